"""Warm starts: each training step starts from the solutions of the last one, with the same probes.

With fixed probes z, ``u = A^-1 z`` changes as little as A does, so that conjugate gradients start close to the
solution. The loss is then a smooth function of the hyperparameters, and not a new draw at every step. Gradients need
only these solves, ``d log|A| = tr(A^-1 dA) ~ mean_j u_j' dA z_j``. But a solve from a guess gives no Lanczos matrix,
and therefore no log-determinant. Its changes are added up from step to step instead, by the trapezoidal rule along the
path from A to B = A + dA,

    log|B| - log|A|  ~  1/2 mean_j (u_j + v_j)' (B z_j - A z_j),     A u_j = z_j,  B v_j = z_j

The error from an inexact u is then proportional to the length of the step. (``u_j' A z_j = z_j' z_j`` would save a
product, but holds only for exact solutions: the value would drift.) For B = c A it gives N sinh(log c) in place of N
log c. If a step changes A by a tenth, the error is a sixth of a percent of the change. If it changes a length-scale,
the error is several percent.

Probes are random signs that are the same on every device: a hash of their position, not the state of a generator.
The counters ``seed, row, column`` are combined by the finalizer of SplitMix64 (Stafford's mix 13),

    z ^= z >> 30,   z *= 0xBF58476D1CE4E5B9,   z ^= z >> 27,   z *= 0x94D049BB133111EB,   z ^= z >> 31

in integers of 64 bits that wrap around, which give the same results on all devices. Nothing is copied between host and
device.
"""

import copy
import math
import numbers
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gpytorch_gaps.distributed.columns import Share
from gpytorch_gaps.solvers.system import NoisySystem
from gpytorch_gaps.utils.tensors import same_values

MOVED = 0.25  # relative change of a factor or of the noise, beyond which a new preconditioner is set up
REDUCTION = 0.3  # factor by which a step reduces its first residual; later steps remove the rest
LONGEST_STEP = 0.05  # nats per observation; after a longer step, a new log-determinant is estimated
LOOSEST_SETTLED = 1e-2  # largest relative residual once hyperparameters have settled
BIAS = 0.1  # bias of a gradient from unfinished solves, in standard deviations of the score, at the end

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64


@dataclass
class LogdetPath:
    """The last step on one set of observations. It is not differentiated."""

    cells: Tensor  # cells of the observations, shape (N,)
    solutions: Tensor  # solutions for right-hand sides, then probes, shape (N, C + k)
    images: Tensor  # A z, shape (N, k)
    start: Tensor  # the log-determinant at the beginning of the path
    start_error: Tensor  # its standard error
    followed: Tensor  # its change along the path, estimated by each probe, shape (k,)

    @property
    def value(self) -> Tensor:
        return self.start + self.followed.mean()

    @property
    def standard_error(self) -> Tensor:
        own = self.followed.std() / len(self.followed) ** 0.5 if len(self.followed) > 1 else self.followed.abs().mean()
        return torch.hypot(self.start_error, own)

    def of_all(self, share: Share) -> "LogdetPath":
        """The path with the changes from the probes of all ranks, for its value and its error."""
        return replace(self, followed=share.of(self.followed).to(self.followed))


@dataclass
class ReusedPreconditioner:
    """A preconditioner, and the hyperparameters of its set-up. It is also used for similar hyperparameters."""

    preconditioner: Any
    key: Hashable  # the requested method and rank
    cells: Tensor
    parts: tuple[Tensor, ...]  # factors and noise

    def serves(self, key: Hashable, cells: Tensor, parts: Sequence[Tensor]) -> bool:
        """Whether it may precondition a system on these cells with these factors and noise."""
        if key != self.key or len(parts) != len(self.parts) or not same_values(cells, self.cells):
            return False
        if any(a.shape != b.shape for a, b in zip(parts, self.parts, strict=True)):
            return False
        changes = [(a - b).norm() / b.norm() for a, b in zip(parts, self.parts, strict=True)]
        return bool(torch.stack(changes).max() <= MOVED)


class WarmStart:
    """Probes, the last solutions for them, and the last preconditioner, of every set of observations trained on.

    :param num_probes: k. The relative error of the gradient of the log-determinant, in a direction with T effective
        degrees of freedom, is about ``sqrt(2 / (k T))``. For a hundred thousand observations, four probes are as
        accurate as the hyperparameters that the data determine.
    :param tolerance: relative residual of every solve once the hyperparameters have settled; of the original system
        for every method, in place of ``settings.train_tolerance``. By default it follows from the number of
        observations and their noise, see :func:`unbiased_tolerances`. While hyperparameters change, each solve only
        reduces its initial residual to 30 %; later steps remove the rest.
    :param loosest: largest relative residual of a solve while they change.
    :param seed: seed of the probes, which are random signs.
    :raises ValueError: if an argument is of the wrong type or range.

    >>> print(WarmStart(num_probes=2, tolerance=1e-3))
    2 probes of seed 0, to 0.001, at most 0.1
    """

    def __init__(
        self, num_probes: int = 4, tolerance: float | None = None, *, loosest: float = 0.1, seed: int = 0
    ) -> None:
        for name, whole, least in (("num_probes", num_probes, 1), ("seed", seed, 0)):
            if not isinstance(whole, int) or isinstance(whole, bool) or whole < least:
                raise ValueError(f"WarmStart: {name}: got {whole!r}, expected an integer, at least {least}")
        for name, value in (("tolerance", tolerance), ("loosest", loosest)):
            default = name == "tolerance" and value is None
            if not default and (not isinstance(value, numbers.Real) or not 0.0 < value < 1.0):
                raise ValueError(f"WarmStart: {name}: got {value!r}, expected a number between 0 and 1")
        self.num_probes, self.loosest = num_probes, float(loosest)
        self.tolerance = None if tolerance is None else float(tolerance)
        self.seed = seed
        self._settled = False
        self._paths: dict[int, LogdetPath] = {}
        self._preconditioners: dict[int, ReusedPreconditioner] = {}

    def probes(self, rows: int, like: Tensor) -> Tensor:
        """Random signs, generated on the device of `like`, the same on every call and device. shape: (N, k)"""
        return random_signs(self.seed, self.num_probes, rows, like).mT  # columns that are whole in memory

    def tolerance_for(self, settled: float, start: float = 0.0) -> float:
        """The relative residual that a solve must reach.

        While hyperparameters change, each solve only reduces its initial residual to 30 %; later steps remove the rest.

        :param settled: relative residual once hyperparameters have settled.
        :param start: relative residual at the start of the solve.
        """
        moving = 0.0 if self._settled else min(self.loosest, REDUCTION * start)
        return max(settled, moving)

    @contextmanager
    def settling(self) -> Iterator[None]:
        """Makes all solves reach the tolerance of settled hyperparameters, even while these still change."""
        self._settled = True
        try:
            yield
        finally:
            self._settled = False

    @contextmanager
    def reuse_preconditioner(self, system: NoisySystem, key: Hashable) -> Iterator[None]:
        """Preconditions a system with the preconditioner of an earlier one, if its hyperparameters are still close.

        A preconditioner that the system sets up itself is kept for the next one.

        :param key: the requested method and rank.
        """
        kept = self._preconditioners.get(system.num_train)
        if kept is not None and kept.serves(key, system.train_index, system.parts):
            system.reused_preconditioner = kept.preconditioner
        system.last_preconditioner = None
        try:
            yield
        finally:
            if system.last_preconditioner is not None:
                own = copy.copy(system.last_preconditioner)
                own.left_over = math.inf  # not known for another matrix
                self._preconditioners[system.num_train] = ReusedPreconditioner(
                    own, key, system.train_index, system.parts
                )
            system.reused_preconditioner = None

    def guess(self, cells: Tensor, rhs: Tensor, num_probes: int | None = None) -> Tensor | None:
        """Solutions of the last step for these observations and as many right-hand sides. shape: (N, C + k)

        :param num_probes: probes on this rank, where other ranks have the rest; default: all.
        """
        path, probes = self._path(cells), self.num_probes if num_probes is None else num_probes
        if path is None or path.solutions.size(-1) != rhs.size(-1) + probes:
            return None
        return path.solutions if path.solutions.dtype == rhs.dtype else None

    def advance(
        self, cells: Tensor, solutions: Tensor, images: Tensor, share: Share | None = None
    ) -> LogdetPath | None:
        """The path with one more step; None if there is no path, or the step is too long.

        :param share: the probes of this rank; other ranks have the rest.
        """
        path, (rows, count) = self._path(cells), images.shape
        if path is None or path.images.shape != images.shape or path.solutions.shape != solutions.shape:
            return None
        before, after = (x[:, x.size(-1) - count :] for x in (path.solutions, solutions))
        step = 0.5 * ((before + after) * (images - path.images)).sum(0)
        every = step if share is None else share.of(step)
        if not bool(every.abs().mean() <= LONGEST_STEP * rows):
            return None
        return LogdetPath(cells, solutions, images, path.start, path.start_error, path.followed + step)

    def _path(self, cells: Tensor) -> LogdetPath | None:
        path = self._paths.get(len(cells))
        return path if path is not None and same_values(path.cells, cells) else None

    def keep(self, path: LogdetPath) -> None:
        """Stores the last step of a set of observations."""
        self._paths[len(path.cells)] = path

    def forget(self) -> None:
        """Drops all solutions and preconditioners: the next step starts from zero, with a new log-determinant."""
        self._paths.clear()
        self._preconditioners.clear()

    # -- as plain data, for checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """All paths. Preconditioners are not saved: they are set up again."""
        return {"paths": [dict(vars(path)) for path in self._paths.values()]}

    def load_state_dict(self, state: dict) -> None:
        """Restores what :meth:`state_dict` saved."""
        self._paths = {len(path["cells"]): LogdetPath(**path) for path in state["paths"]}
        self._preconditioners = {}

    def __str__(self) -> str:
        tolerance = "what leaves no bias" if self.tolerance is None else f"{self.tolerance:g}"
        return f"{self.num_probes} probes of seed {self.seed}, to {tolerance}, at most {self.loosest:g}"


def unbiased_tolerances(rhs: Tensor, noise: Tensor) -> tuple[float, float]:
    """Relative residuals, for data and probes, that change a maximum of the likelihood by a tenth of its error.

    With ``A = L L'``, ``B = L^-1 dA L^-T`` and Fisher's information ``F = tr(B^2) / 2``, a residual r of the solution
    for the data y changes the score ``y'A^-1 dA A^-1 y / 2`` by

        |y'L^-T B L^-1 r|  <=  sqrt(2 F) ||L^-1 r||  <=  sqrt(2 F) ||D^-1/2 r||

    since ``L^-1 y`` is white. The score has a standard deviation of sqrt(F). If the data are far above their noise,
    residuals relative to the data give no useful bound. A relative residual e of a probe z with norm sqrt(N) changes
    ``z'A^-1 dA z / 2``, whose mean is the other half of the score, by at most ``e sqrt(N) ||A^-1 dA z|| / 2``, about
    ``e sqrt(N F / 2)``.

    :param rhs: shape (N, C).
    :param noise: variances, of any shape.
    """
    rows, size = rhs.size(-2), float(rhs.detach().double().norm(dim=-2).amax()) if rhs.size(-1) else 0.0
    scale = float(noise.detach().double().min()) ** 0.5
    data = BIAS * scale / (2.0**0.5 * size) if size > 0 else 1.0
    return min(data, LOOSEST_SETTLED), min(BIAS * (2.0 / rows) ** 0.5, LOOSEST_SETTLED)


# -- probes ------------------------------------------------------------------------------------------------------------


def random_signs(seed: int, rows: int, columns: int, like: Tensor) -> Tensor:
    """Plus or minus one, with equal probability, of the dtype and device of `like`. shape: (rows, columns)

    >>> random_signs(0, 2, 5, torch.zeros(()))
    tensor([[-1.,  1., -1., -1., -1.],
            [ 1.,  1., -1.,  1., -1.]])
    """
    row, column = (torch.arange(count, device=like.device) for count in (rows, columns))
    mixed = _mix(column + _mix(row.unsqueeze(-1) + _mix_number(seed)))
    return (mixed & 1).mul_(2).sub_(1).to(like.dtype)


def _mix(counters: Tensor) -> Tensor:
    """SplitMix64's output for each state."""
    z = (counters + 1) * _signed(_GOLDEN)  # not zero at zero
    z = (z ^ _shifted(z, 30)) * _signed(_FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(_SECOND)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """``z >> bits`` of an unsigned number: torch shifts in the sign, which is masked."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix_number(seed: int) -> int:
    """:func:`_mix` of one number, on the host."""
    z = (seed + 1) * _GOLDEN % 2**64
    z = (z ^ z >> 30) * _FIRST % 2**64
    z = (z ^ z >> 27) * _SECOND % 2**64
    return _signed(z ^ z >> 31)


def _signed(z: int) -> int:
    """The same 64 bits as a number with a sign."""
    return z - 2**64 if z >= 2**63 else z
