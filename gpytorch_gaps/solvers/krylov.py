"""Preconditioned conjugate gradients through ``linear_operator.utils.linear_cg``, with our own say on when to stop.

What is different from calling ``linear_cg`` directly:

1. the division guard follows the precision (upstream's 1e-10 makes a residual of 1e-6 unreachable);
2. a caller's `stop` decides, column by column, on any quantity it likes (upstream: the mean over columns);
3. iterations are products with the matrix, and none is made after the stop (upstream makes at least eleven);
4. the Lanczos tridiagonal matrices are as long as the iteration, not cut off at twenty.

``linear_cg`` shows its residual to the preconditioner at every iteration, which is where we listen; a residual set to
zero there is how we tell it to stop.

A single right-hand side of some length needs none of its bookkeeping: :class:`Descent` takes the same steps in a third
of the calls, and in place.

On a device the host would wait for every number it reads, and ``linear_cg`` reads its residual at every iteration.
:class:`Columns` takes the steps there and reads nothing; `stop` is asked after every tenth of them.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import linear_operator
import torch
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from gpytorch_gaps.utils.progress import LateBar

Closure = Callable[[Tensor], Tensor]
Stop = Callable[[Tensor], bool | Tensor]  # a tensor is read by us, once, with all else that is to be read
LOOK = 10  # iterations between two looks at a residual that lives on a device
_IN_PLACE = 256  # rows
_STALLED = 150  # iterations in float32


@dataclass
class _Listener:
    """Stands between ``linear_cg`` and the closures: counts, watches the residual, gathers Lanczos coefficients."""

    matmul: Closure
    precondition: Closure | None
    stop: Stop
    keep_lanczos: bool
    iterations: int = 0
    done: bool = False
    bar: LateBar = field(default_factory=lambda: LateBar("conjugate gradients"))
    steps: list[Tensor] = field(default_factory=list)  # alpha_k
    ratios: list[Tensor] = field(default_factory=list)  # beta_k
    _inner: Tensor | None = None  # r' P^-1 r of the current residual
    _started: bool = False

    def product(self, direction: Tensor) -> Tensor:
        if not self._started or self.done:
            # the first call is for the zero initial guess; after the stop no step is taken
            self._started = True
            return torch.zeros_like(direction)
        self.iterations += 1
        self.bar.update()
        image = self.matmul(direction)
        if self.keep_lanczos:
            curvature = (direction * image).sum(-2)
            assert self._inner is not None
            self.steps.append(_safe_divide(self._inner, curvature))
        return image

    def preconditioned(self, residual: Tensor) -> Tensor:
        if self.done:
            return residual.clone()
        if self.iterations and self.stop(residual):
            self.done = True
            residual.zero_()
            return residual.clone()
        result = residual if self.precondition is None else self.precondition(residual)
        if result.data_ptr() == residual.data_ptr():
            result = residual.clone()  # linear_cg changes both in place
        if self.keep_lanczos:
            inner = (residual * result).sum(-2)
            if self._inner is not None:
                self.ratios.append(_safe_divide(inner, self._inner))
            self._inner = inner
        return result


def _safe_divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    zero = denominator <= torch.finfo(denominator.dtype).tiny
    return torch.where(zero, torch.zeros_like(numerator), numerator / denominator.masked_fill(zero, 1.0))


def _quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """No step where there is nothing left to divide."""
    return (numerator / denominator).nan_to_num_(0.0, 0.0, 0.0)


def _dot(first: Tensor, second: Tensor) -> Tensor:
    return torch.dot(first.view(-1), second.reshape(-1))


class Descent:
    """Conjugate gradients for one right-hand side, a step at a time: three vectors, updated in place.

    `solution` and `residual` are those given; no number of it is read by the host.

    :param dot: the inner product, where the vectors are parts of longer ones.
    """

    def __init__(
        self,
        matmul: Closure,
        precondition: Closure | None,
        residual: Tensor,
        solution: Tensor,
        dot: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self._matmul, self._precondition, self._dot = matmul, precondition, dot or _dot
        self.residual, self.solution = residual, solution
        self._direction: Tensor | None = None
        self._inner = residual.new_zeros(())
        self.steps: list[Tensor] = []  # alpha_k
        self.ratios: list[Tensor] = []  # beta_k

    def step(self) -> None:
        preconditioned = self.residual if self._precondition is None else self._precondition(self.residual)
        inner = self._dot(self.residual, preconditioned)
        if self._direction is None:
            own = preconditioned.data_ptr() != self.residual.data_ptr()
            self._direction = preconditioned if own else preconditioned.clone()
        else:
            ratio = _quotient(inner, self._inner)
            self.ratios.append(ratio)
            self._direction.mul_(ratio).add_(preconditioned)
        self._inner = inner
        image = self._matmul(self._direction)
        length = _quotient(inner, self._dot(self._direction, image))
        self.steps.append(length)
        self.solution.addcmul_(self._direction, length)
        self.residual.addcmul_(image, length, value=-1.0)


class Columns:
    """Conjugate gradients for columns of any number, a step at a time; every column has its own lengths.

    A column that is done has nothing left to divide: it stays where it is, with steps of zero. No number is read by
    the host, and no shape changes.

    :param residual: shape (*batch, n, C), columns of size one or zero; updated in place.
    """

    def __init__(self, matmul: Closure, precondition: Closure | None, residual: Tensor, keep_lanczos: bool) -> None:
        self._matmul, self._precondition, self._keep_lanczos = matmul, precondition, keep_lanczos
        self.residual, self.solution = residual, torch.zeros_like(residual)
        self._direction = torch.zeros_like(residual)
        self._inner = residual.new_zeros(*residual.shape[:-2], 1, residual.size(-1))
        self.steps: list[Tensor] = []  # alpha_k, shape (*batch, C) each
        self.ratios: list[Tensor] = []  # beta_k, from beta_{-1} = 0 on

    def step(self) -> None:
        preconditioned = self.residual if self._precondition is None else self._precondition(self.residual)
        inner = _inner_products(self.residual, preconditioned)
        ratio = _safe_divide(inner, self._inner)
        self._direction.mul_(ratio).add_(preconditioned)
        self._inner = inner
        image = self._matmul(self._direction)
        length = _safe_divide(inner, _inner_products(self._direction, image))
        self.solution.addcmul_(self._direction, length)
        self.residual.addcmul_(image, length, value=-1.0)
        if self._keep_lanczos:
            self.steps.append(length.squeeze(-2))
            self.ratios.append(ratio.squeeze(-2))


def _inner_products(left: Tensor, right: Tensor) -> Tensor:
    """shape: (*batch, n, C) -> (*batch, 1, C)"""
    return (left * right).sum(-2, keepdim=True)


def conjugate_gradients(
    matmul: Closure,
    rhs: Tensor,
    *,
    stop: Stop,
    max_iterations: int,
    precondition: Closure | None = None,
    lanczos: bool = False,
    patience: int = 0,
) -> tuple[Tensor, int, Tensor | None]:
    """Solves ``A x = rhs`` from zero until ``stop(residual)`` holds, the residual being ``rhs - A x``.

    :param rhs: shape (*batch, n, C).
    :param stop: called with the recursive residual, in the units of rhs: once an iteration, on a device once in ten.
    :param lanczos: also return the tridiagonal matrices of the Lanczos process that each column started.
    :param patience: iterations that need not halve the residual; after more, it gives up. 0: never, in float64.
    :return: x; the number of products with A; tridiagonal matrices of shape (*batch, C, k, k), or None.
    """
    patience = _STALLED if rhs.dtype == torch.float32 else patience
    if waits(rhs):
        return _descend_unread(matmul, rhs, stop, max_iterations, precondition, lanczos, patience)
    if patience:
        stop = _or_stalled(stop, patience)
    if rhs.numel() == rhs.size(-2) >= _IN_PLACE:
        return _descend(matmul, rhs, stop, max_iterations, precondition, lanczos)
    unit, scale = _of_size_one(rhs)
    listener = _Listener(matmul, precondition, lambda residual: stop(residual * scale), lanczos)
    with warnings.catch_warnings():
        # non-convergence is judged, and told, by the caller
        warnings.filterwarnings("ignore", category=NumericalWarning, message="CG terminated in")
        solution = linear_operator.utils.linear_cg(
            listener.product,
            unit,
            tolerance=torch.finfo(rhs.dtype).tiny,
            eps=torch.finfo(rhs.dtype).tiny,
            stop_updating_after=0.0,
            max_iter=max_iterations,
            max_tridiag_iter=0,
            preconditioner=listener.preconditioned,
        )
    listener.bar.close()
    tridiagonal = _tridiagonal(listener.steps, listener.ratios) if lanczos else None
    return solution * scale, listener.iterations, tridiagonal


def waits(tensor: Tensor) -> bool:
    """Whether reading a number of it waits for a device."""
    return tensor.device.type != "cpu"


def _of_size_one(rhs: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of norm one, or zero, and the norms. shape: (*batch, n, C) and (*batch, 1, C)"""
    largest = rhs.abs().amax(-2, keepdim=True)  # first: squares may overflow where the numbers do not
    largest = largest.masked_fill(largest == 0, 1.0)
    scale = (rhs / largest).norm(dim=-2, keepdim=True) * largest
    return rhs / scale.masked_fill(scale == 0, 1.0), scale


class _Stall:
    """Many iterations that have not halved the residual: rounding may never let it fall further."""

    def __init__(self, patience: int) -> None:
        self._best, self._waited = math.inf, 0
        self._patience = patience

    def seen(self, size: float, iterations: int) -> bool:
        """Whether to give up on a residual of this size, so many iterations after the last."""
        self._waited += iterations
        if size <= 0.5 * self._best:
            self._best, self._waited = size, 0
        return self._waited >= self._patience


def _or_stalled(stop: Stop, patience: int) -> Stop:
    stall, calls = _Stall(patience), 0

    def told(residual: Tensor) -> bool | Tensor:
        nonlocal calls
        calls += 1
        return (calls % LOOK == 0 and stall.seen(float(residual.norm()), LOOK)) or stop(residual)

    return told


def _descend_unread(
    matmul: Closure,
    rhs: Tensor,
    stop: Stop,
    max_iterations: int,
    precondition: Closure | None,
    lanczos: bool,
    patience: int,
) -> tuple[Tensor, int, Tensor | None]:
    """On a device: ten iterations, then one read that tells whether to go on."""
    unit, scale = _of_size_one(rhs)
    descent, stall = Columns(matmul, precondition, unit, lanczos), _Stall(patience) if patience else None
    bar, iterations = LateBar("conjugate gradients"), 0
    while iterations < max_iterations:
        descent.step()
        iterations += 1
        bar.update()
        if iterations % LOOK or iterations == max_iterations:  # at the end of the budget nothing is left to decide
            continue
        if _told(stop, descent.residual * scale, stall):
            break
    bar.close()
    tridiagonal = None
    if lanczos:
        tridiagonal = _tridiagonal(*([n.double() for n in own] for own in (descent.steps, descent.ratios[1:])))
    return descent.solution.mul_(scale), iterations, tridiagonal


def _told(stop: Stop, residual: Tensor, stall: _Stall | None) -> bool:
    """Whether to stop, in one read."""
    verdict = stop(residual)
    if stall is None:
        return bool(verdict)
    told, size = torch.stack([residual.new_ones(()) * verdict, residual.norm()]).tolist()
    return stall.seen(size, LOOK) or bool(told)


def _descend(
    matmul: Closure, rhs: Tensor, stop: Stop, max_iterations: int, precondition: Closure | None, lanczos: bool
) -> tuple[Tensor, int, Tensor | None]:
    """One column, in units in which squares neither under- nor overflow."""
    scale = float(rhs.abs().amax())
    scale = 1.0 if scale == 0.0 or 1e-12 < scale < 1e12 else scale
    start = rhs.clone(memory_format=torch.contiguous_format) if scale == 1.0 else rhs.div(scale).contiguous()
    descent = Descent(matmul, precondition, start, torch.zeros_like(start))
    bar, iterations = LateBar("conjugate gradients"), 0
    while iterations < max_iterations:
        descent.step()
        iterations += 1
        bar.update()
        if stop(descent.residual if scale == 1.0 else descent.residual * scale):
            break
    bar.close()
    tridiagonal = None
    if lanczos:
        shape = (*rhs.shape[:-2], 1)
        coefficients = ([number.double().reshape(shape) for number in own] for own in (descent.steps, descent.ratios))
        tridiagonal = _tridiagonal(*coefficients)
    return descent.solution.mul_(scale), iterations, tridiagonal


def _tridiagonal(all_steps: Sequence[Tensor], all_ratios: Sequence[Tensor]) -> Tensor:
    """``T[k, k] = 1/alpha_k + beta_{k-1}/alpha_{k-1}``, ``T[k, k-1] = sqrt(beta_{k-1}) / alpha_{k-1}``.

    A column that converged early has steps of zero: its matrix goes on as the identity, decoupled, and carries no
    weight.
    """
    steps = torch.stack(list(all_steps), -1)  # shape: (*batch, C, k)
    ratios = torch.stack(list(all_ratios[: steps.size(-1) - 1]), -1) if steps.size(-1) > 1 else steps[..., :0]
    ended = (steps <= 0).cumsum(-1) > 0
    inverse = torch.where(ended, torch.ones_like(steps), 1.0 / steps.masked_fill(ended, 1.0))
    coupled = torch.where(ended[..., 1:], torch.zeros_like(ratios), ratios)
    diagonal = inverse.clone()
    diagonal[..., 1:] += coupled * inverse[..., :-1]
    off = coupled.sqrt() * inverse[..., :-1]
    return torch.diag_embed(diagonal) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
