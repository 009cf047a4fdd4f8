"""Preconditioned conjugate gradients for any number of right-hand sides at once, used by all solvers.

It differs from ``linear_operator.utils.linear_cg`` in that

1. the threshold below which a divisor counts as zero depends on the precision (with 1e-10, as in linear_operator, a
   residual of 1e-6 cannot be reached);
2. the caller's `stop` determines the end, for every column and by any quantity (linear_operator: by the mean over
   columns);
3. there is no product after the end (linear_operator makes at least eleven in total);
4. Lanczos matrices have one row per iteration and are not cut off at twenty;
5. on a device, only `stop` is read by the host, once every ten iterations.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gpytorch_gaps.utils.progress import LateBar

Closure = Callable[[Tensor], Tensor]
Dots = Callable[[Tensor, Tensor], Tensor]
Stop = Callable[[Tensor], bool | Tensor]  # a tensor is read once, together with everything else that is read
ITERATIONS_BETWEEN_READS = 10  # iterations between two reads of a residual on a device
_STALLED_ITERATIONS = 150  # in float32, without a halved residual
_ITERATIONS_BETWEEN_ORIGINALS = 8  # after which the original residual is computed, however far off it seems
_TINY = 1e-300
_SAFE_RANGE = {torch.float64: 1e12, torch.float32: 1e6}  # largest entries whose squares are numbers at every iteration


def on_device(tensor: Tensor) -> bool:
    """Whether reading a number of the tensor makes the host wait."""
    return tensor.device.type != "cpu"


def column_dots(left: Tensor, right: Tensor) -> Tensor:
    """Inner products of corresponding columns. shape: (*batch, n, C) -> (*batch, 1, C)"""
    if left.numel() == left.size(-2):  # one column: no product is stored
        return torch.dot(left.reshape(-1), right.reshape(-1)).reshape([1] * left.dim())
    return (left * right).sum(-2, keepdim=True)


class ConjugateGradients:
    """A run of conjugate gradients, one step at a time. Every column has its own step lengths.

    `solution` and `residual` are updated in place. A column that is solved has nothing left to divide: it keeps its
    solution, with steps of zero. No number is read by the host, and no shape changes.

    :param residual: right-hand sides minus their images so far, shape (*batch, n, C). Overwritten.
    :param solution: where steps are added up. Default: zeros.
    :param precondition: ``P^-1``; default: none.
    :param dots: inner products of columns, where the rows are spread over several processes.
    :param keep_lanczos: whether to keep the coefficients of the Lanczos process that each column started.
    """

    def __init__(
        self,
        matmul: Closure,
        residual: Tensor,
        *,
        solution: Tensor | None = None,
        precondition: Closure | None = None,
        dots: Dots = column_dots,
        keep_lanczos: bool = False,
    ) -> None:
        self._matmul, self._precondition, self._dots, self._keep_lanczos = matmul, precondition, dots, keep_lanczos
        self.residual = residual
        self.solution = torch.zeros_like(residual) if solution is None else solution
        self._direction: Tensor | None = None
        self._inner: Tensor | None = None  # r' P^-1 r of the last residual
        self.steps: list[Tensor] = []  # alpha_k, shape (*batch, C) each
        self.ratios: list[Tensor] = []  # beta_k

    def step(self) -> None:
        preconditioned = self.residual if self._precondition is None else self._precondition(self.residual)
        inner = self._dots(self.residual, preconditioned)
        if self._direction is None or self._inner is None:
            # a copy: the residual changes in place, and a preconditioner may return the very same numbers
            self._direction = preconditioned.clone(memory_format=torch.contiguous_format)
        else:
            ratio = _safe_divide(inner, self._inner)
            self._direction.mul_(ratio).add_(preconditioned)
            if self._keep_lanczos:
                self.ratios.append(ratio.squeeze(-2))
        self._inner = inner
        image = self._matmul(self._direction)
        length = _safe_divide(inner, self._dots(self._direction, image))
        self.solution.addcmul_(self._direction, length)
        self.residual.addcmul_(image, length, value=-1.0)
        if self._keep_lanczos:
            self.steps.append(length.squeeze(-2))

    def lanczos(self) -> Tensor:
        """The tridiagonal matrices of the Lanczos process, in float64. shape: (*batch, C, k, k)

        ``T[k, k] = 1/alpha_k + beta_{k-1}/alpha_{k-1}``, ``T[k, k-1] = sqrt(beta_{k-1}) / alpha_{k-1}``. A column that
        converged early has steps of zero: its matrix continues as the identity, decoupled, and carries no weight.
        """
        steps = _stacked(self.steps)
        ratios = _stacked(self.ratios) if len(self.ratios) else steps[..., :0]
        ended = (steps <= 0).cumsum(-1) > 0
        inverse = torch.where(ended, torch.ones_like(steps), 1.0 / steps.masked_fill(ended, 1.0))
        coupled = torch.where(ended[..., 1:], torch.zeros_like(ratios), ratios)
        diagonal = inverse.clone()
        diagonal[..., 1:] += coupled * inverse[..., :-1]
        off = coupled.sqrt() * inverse[..., :-1]
        return torch.diag_embed(diagonal) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)


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
    :param stop: called with the recursive residual, in the units of rhs: after every iteration, on a device after
        every tenth.
    :param lanczos: whether to return the tridiagonal matrices of the Lanczos process that each column started.
    :param patience: iterations after which a run stops if they have not halved the residual. 0: never, in float64.
    :return: x; the number of products with A; tridiagonal matrices of shape (*batch, C, k, k), or None.
    """
    waits = on_device(rhs)
    unit, scale = _normalized(rhs, waits)
    run = ConjugateGradients(matmul, unit, precondition=precondition, keep_lanczos=lanczos)
    patience = _STALLED_ITERATIONS if rhs.dtype == torch.float32 else patience
    stall = _Stall(patience) if patience else None
    bar, iterations = LateBar("conjugate gradients"), 0
    while iterations < max_iterations:
        run.step()
        iterations += 1
        bar.update()
        look = iterations % ITERATIONS_BETWEEN_READS == 0
        if waits and (not look or iterations == max_iterations):  # after the last iteration there is nothing to decide
            continue
        residual = run.residual if scale is None else run.residual * scale
        if _should_stop(stop, residual, stall if look else None, waits):
            break
    bar.close()
    solution = run.solution if scale is None else run.solution.mul_(scale)
    return solution, iterations, run.lanczos() if lanczos else None


def amplified_stop(initial: Tensor, dtype: torch.dtype, original: Closure, tolerance: float) -> Stop:
    """The end of iterations on a system whose residual may be much smaller than that of the original system.

    The original residual costs half an iteration. It is computed at least every eighth iteration, and whenever the last
    ratio of the two residuals suggests that the original one is small enough.

    :param initial: norms of the residual that the iteration starts from. shape: (*batch, C)
    :param original: measure of the original residual for a residual of the own system. shape: (*batch, C)
    """
    floor = 10 * torch.finfo(dtype).eps
    if on_device(initial):
        return lambda current: (
            (current.norm(dim=-2) <= floor * initial) | (original(current) <= 0.9 * tolerance)
        ).all()
    first = initial.flatten().tolist()
    amplification: list[float] = []
    since_look = 0

    def stop(current: Tensor) -> bool:
        nonlocal amplification, since_look
        # comparisons of a few numbers cost less on the host than as many calls of torch
        sizes, since_look = current.norm(dim=-2).flatten().tolist(), since_look + 1
        exhausted = [size <= floor * begun for size, begun in zip(sizes, first, strict=True)]
        if all(exhausted):
            return True
        far = any(size * factor > 1.5 * tolerance for size, factor in zip(sizes, amplification, strict=False))
        if far and since_look < _ITERATIONS_BETWEEN_ORIGINALS:
            return False
        errors, since_look = original(current).flatten().tolist(), 0
        amplification = [error / max(size, _TINY) for error, size in zip(errors, sizes, strict=True)]
        return all(error <= 0.9 * tolerance or done for error, done in zip(errors, exhausted, strict=True))

    return stop


class _Stall:
    """Detects many iterations that have not halved the residual: rounding may never let it fall further."""

    def __init__(self, patience: int) -> None:
        self._best, self._waited, self._patience = math.inf, 0, patience

    def seen(self, size: float, iterations: int) -> bool:
        """Whether to stop, given a residual of this size after this many more iterations."""
        self._waited += iterations
        if size <= 0.5 * self._best:
            self._best, self._waited = size, 0
        return self._waited >= self._patience


def _should_stop(stop: Stop, residual: Tensor, stall: _Stall | None, waits: bool) -> bool:
    if stall is None:
        return bool(stop(residual))
    if not waits:
        return stall.seen(float(residual.norm()), ITERATIONS_BETWEEN_READS) or bool(stop(residual))
    verdict, size = torch.stack([residual.new_ones(()) * stop(residual), residual.norm()]).tolist()  # one read
    return stall.seen(size, ITERATIONS_BETWEEN_READS) or bool(verdict)


def _normalized(rhs: Tensor, waits: bool) -> tuple[Tensor, Tensor | None]:
    """A copy of the right-hand sides whose squares neither under- nor overflow, and the divisors of its columns.

    shape: (*batch, n, C) and (*batch, 1, C). The divisors are None if nothing was divided.
    """
    largest = rhs.abs().amax(-2, keepdim=True)
    largest = largest.masked_fill(largest == 0, 1.0)
    if not waits and largest.numel():
        low, high = (float(value) for value in torch.aminmax(largest))
        limit = _SAFE_RANGE[rhs.dtype]
        if 1.0 / limit < low and high < limit:
            return rhs.clone(memory_format=torch.contiguous_format), None
    return (rhs / largest).contiguous(), largest


def _safe_divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient, or zero where the denominator is not above zero."""
    nothing = denominator <= torch.finfo(denominator.dtype).tiny
    return (numerator / denominator).masked_fill_(nothing, 0.0)


def _stacked(coefficients: Sequence[Tensor]) -> Tensor:
    return torch.stack([number.double() for number in coefficients], -1)
