"""Fill-gaps in the space of the kernel's own eigenvectors: ``(s2 T^-1 + Phi' W'W Phi) w = Phi' W' y``.

With ``K = Phi T Phi'`` the posterior mean on the grid is ``Phi w``. The vectors of this system are as long as the
basis, not as the grid, which is only swept. Where gaps are scattered, ``Phi' W'W Phi`` is close to ``N/M I``;
preconditioned by ``s2/T + N/M``, the system has the spectrum of fill-gaps, or a better one, and needs few iterations.

Where gaps hang together, functions that live inside of them make the system nearly singular; a dense block of
``s2 T^-1 + Phi' W'W Phi`` on the leading functions takes care of those. It is set up once iterations without it have
shown to be the dearer way.

A small residual is not a small error there: inside a gap the system is as small as ``s2/T``. So wherever more
iterations are needed than scattered gaps would take, the residual is held to a thousandth of the tolerance, which a
few more of them reach.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gpytorch_gaps.kronecker.eigen import leading_products
from gpytorch_gaps.kronecker.gram import structured_gram
from gpytorch_gaps.kronecker.selection import product_at
from gpytorch_gaps.kronecker.tiles import MaskedGrid, project_flops, sweep_flops
from gpytorch_gaps.progress import LateBar
from gpytorch_gaps.solvers.choose import expected_iterations
from gpytorch_gaps.solvers.conjugate_gradients import LOOK, Descent
from gpytorch_gaps.solvers.rates import rates_of
from gpytorch_gaps.solvers.shared_grid import SharedGrid
from gpytorch_gaps.solvers.weights import Weights

_WAIT = 10  # iterations after which their rate is told
_MAX_PASSES = 12
_CLUSTERED = 1e-3  # of the tolerance
# by how much an inner iteration may reduce a residual before it is taken anew in float64
_REACH = {torch.float32: 2e-7, torch.float64: 1e-13}
_CALLS = 60.0  # an iteration, of torch
_LONG_SWEEP = 1e10  # FLOPs
_PASSES = 5.0  # numbers moved per cell by a sweep, in cache
_BLOCK_BYTES = 40.0  # held for each of the p^2 entries while the block is set up


class WeightSpace:
    """The system for one mask, one truncated kernel and one noise. Weights are boxes of shape (r_1, .., r_d).

    :param grid: which cells are observed.
    :param weights: which of the weights are here, and what ranks that share them have to tell each other.
    """

    def __init__(self, grid: MaskedGrid | SharedGrid, weights: Weights, noise: float) -> None:
        self.grid, self.weights, self.basis, self.noise = grid, weights, weights.basis, noise
        self.num_train = grid.count()
        self.products = weights.products
        self._kept = self.products > 0
        self.shift = torch.where(self._kept, noise / self.products, 0.0)  # s2 T^-1
        self.share = self.num_train / grid.num_cells
        self.inverse = torch.where(self._kept, 1.0 / (self.shift + self.share), 0.0)
        self._vectors = {torch.float64: self.basis.vectors}
        self.product_flops = sweep_flops(self.basis.shape, self.basis.ranks)

    def vectors(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        if dtype not in self._vectors:
            self._vectors[dtype] = tuple(q.to(dtype) for q in self.basis.vectors)
        return self._vectors[dtype]

    def matmul(self, weights: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """``(s2 T^-1 + Phi' W'W Phi) w``, the sweep in the precision asked for, all else in float64."""
        image = self.grid.gram(self.vectors(dtype), weights).double()
        return torch.addcmul(image.mul_(self._kept), self.shift, weights)

    def precondition(self, residual: Tensor) -> Tensor:
        return self.inverse * residual

    def system_norm(self, residual: Tensor) -> float:
        """``|W Phi (T / s2) r|``: the size of a residual in the original system, ``(K_XX + s2 I) a = y``."""
        scaled = residual * self.products / self.noise
        return math.sqrt(self.grid.squared_norm(self.basis.vectors, scaled))

    def expected_iterations(self, tolerance: float) -> float:
        """Of a solve, if the gaps are scattered.

        ``Phi' W'W Phi`` then differs from ``N/M`` by a factor of ``1 +- q``, ``q = sqrt(gappiness * dimension / N)``
        at most, with the effective dimension ``sum T / (T + s2 M/N)``.
        """
        dimension = self.weights.number((self.products / (self.products + self.noise / self.share)).sum())
        q = min(0.9, math.sqrt((1.0 - self.share) * dimension / self.num_train))
        return expected_iterations(((1.0 + q) / (1.0 - q)) ** 2, tolerance)

    def expected_seconds(self, tolerance: float) -> float:
        """The same on this machine, which does a rank's part of it."""
        iterations = self.expected_iterations(tolerance) / self.weights.ranks.size
        cells = self.grid.num_cells
        narrow, wide = (rates_of(self.grid.device, dtype) for dtype in (torch.float32, torch.float64))
        inner = narrow.seconds(iterations * self.product_flops, iterations * 4.0 * _PASSES * cells, iterations * _CALLS)
        # one residual, and half of a sweep for that of the original system
        return inner + wide.seconds(1.5 * self.product_flops, 1.5 * 8.0 * _PASSES * cells) / self.weights.ranks.size

    def block_size(self, memory: float) -> int:
        """p: as many functions as have more variance than the noise, within so many bytes."""
        return min(self._above_noise, int(math.sqrt(memory / _BLOCK_BYTES)))

    @cached_property
    def _above_noise(self) -> int:
        return int(self.weights.number((self.products > self.noise).sum()))

    def block_flops(self, rank: int) -> float:
        """Of setting up a :class:`LeadingBlock`."""
        if not rank:
            return math.inf
        used = [len(torch.unique(axis)) for axis in self._leading(rank)]
        pairs = [columns * (columns + 1) // 2 for columns in used]
        return project_flops(self.basis.shape, pairs) + rank**3 / 3.0 + 20.0 * rank**2

    def _leading(self, rank: int) -> Tensor:
        """Where in the box the `rank` functions of largest variance are, by axis. shape: (d, p)"""
        return leading_products(self.basis.values, rank)[1]

    def leading_block(self, rank: int) -> "LeadingBlock":
        positions = self._leading(rank)
        return LeadingBlock(self, positions, structured_gram(self.basis.vectors, positions, self.grid.project))


class LeadingBlock:
    """``M^-1``: the inverse of the block on the p leading functions, that of the diagonal elsewhere.

    The block is scaled by the diagonal, and factorised in float64. Cost: a structured Gram matrix, p^3 / 3, and p^2
    an application.
    """

    def __init__(self, space: WeightSpace, positions: Tensor, gram: Tensor) -> None:
        self._inverse, self._complete = space.inverse, space.weights.complete
        self._which, self._index = space.weights.here(positions)
        shift = space.noise / product_at(space.basis.values, positions)
        self._scale = (shift + space.share).rsqrt()
        gram.mul_(self._scale).mul_(self._scale.unsqueeze(-1))
        gram.diagonal().add_(shift * self._scale.square())
        self._cholesky = psd_safe_cholesky(gram)

    def precondition(self, residual: Tensor) -> Tensor:
        result = (self._inverse * residual).flatten()
        inside = torch.zeros_like(self._scale)
        inside[self._which] = residual.flatten()[self._index]
        inside = self._complete(inside).mul_(self._scale).unsqueeze(-1)
        inside = self._scale * torch.cholesky_solve(inside, self._cholesky).squeeze(-1)
        result[self._index] = inside[self._which]
        return result.view(residual.shape)


@dataclass
class WeightSolution:
    """Weights, and how good they are: relative residuals of the weights' own system and of the original one."""

    weights: Tensor
    residual: float = math.inf
    system_residual: float = math.inf
    iterations: int = 0
    passes: int = 0
    rank: int = 0  # of the dense block
    flops: float = 0.0
    converged: bool = False


class WeightSolver:
    """Iterates in float32, takes the residual anew in float64, and goes on until it is within the tolerance.

    :param rhs: ``Phi' W' y``.
    :param norm: ``|y|``.
    :param system_tolerance: what the residual of the original system must reach as well; None: it is only reported.
    :param memory: bytes that the dense block may take.
    :param watch: shown the weights and the iterations so far, after every iteration.
    """

    def __init__(
        self,
        space: WeightSpace,
        rhs: Tensor,
        norm: float,
        *,
        tolerance: float,
        system_tolerance: float | None,
        max_iterations: int,
        memory: float,
        watch: Callable[[Tensor, int], None],
    ) -> None:
        largest = space.weights.largest(rhs)
        self._scale = 1.0 if largest == 0.0 or 1e-20 < largest < 1e20 else largest  # float32 must hold the weights
        rhs, norm = rhs / self._scale, norm / self._scale
        self.space, self.rhs, self.tolerance, self.system_tolerance = space, rhs, tolerance, system_tolerance
        self.max_iterations, self.memory, self.watch = max_iterations, memory, watch
        self._unit = space.weights.norm(rhs) or 1.0
        self._norm = norm or self._unit
        self._precondition = space.precondition
        self._clustered, self._earlier = False, 0
        self._if_scattered = 2.0 + 1.2 * space.expected_iterations(tolerance)
        # a look waits for the device, which is nothing beside a sweep of a large grid
        quick = space.product_flops / space.weights.ranks.size < _LONG_SWEEP
        self._looks_every = LOOK if quick and space.grid.device.type != "cpu" else 1

    def solve(self, start: Tensor | None = None, earlier: int = 0) -> WeightSolution:
        """The weights, from a start that took some iterations `earlier` where there is one."""
        self._earlier = earlier
        self._clustered = earlier > self._if_scattered
        found = WeightSolution(torch.zeros_like(self.rhs) if start is None else start / self._scale)
        residual = self.rhs.clone() if start is None else self._residual(found)
        dtype = torch.float32
        self._judge(found, residual)
        while self._progress(found) > 1.0 and found.iterations < self.max_iterations and found.passes < _MAX_PASSES:
            candidate = WeightSolution(**{**vars(found), "weights": found.weights.clone()})
            self._descend(candidate, residual.clone(), dtype)
            candidate.passes += 1
            new_residual = self._residual(candidate)
            self._judge(candidate, new_residual)
            stalled = not self._progress(candidate) < 0.5 * self._progress(found)
            if self._progress(candidate) < self._progress(found):
                found, residual = candidate, new_residual
            else:
                found.iterations, found.passes, found.flops = candidate.iterations, candidate.passes, candidate.flops
                found.rank = candidate.rank
            if stalled and dtype == torch.float64:
                break
            dtype = torch.float64 if stalled else dtype
        if math.isinf(found.system_residual):
            found.system_residual = self.space.system_norm(residual) / self._norm
        found.weights.mul_(self._scale)
        return found

    def _residual(self, found: WeightSolution) -> Tensor:
        found.flops += self.space.product_flops
        return self.rhs - self.space.matmul(found.weights)

    def _judge(self, found: WeightSolution, residual: Tensor) -> None:
        found.residual, found.system_residual = self.space.weights.norm(residual) / self._unit, math.inf
        found.converged = found.residual <= self.tolerance
        if self.system_tolerance is not None:
            found.flops += 0.5 * self.space.product_flops
            found.system_residual = self.space.system_norm(residual) / self._norm
            found.converged = found.converged and found.system_residual <= self.system_tolerance

    def _progress(self, found: WeightSolution) -> float:
        """How far off, relative to what is asked for."""
        asked = found.residual / (self.tolerance * (_CLUSTERED if self._clustered else 1.0))
        return asked if self.system_tolerance is None else max(asked, found.system_residual / self.system_tolerance)

    def _descend(self, found: WeightSolution, residual: Tensor, dtype: torch.dtype) -> None:
        """Conjugate gradients from `found`, which is updated, until the residual should be within the tolerance."""
        first = self.space.weights.norm(residual)
        goal = max(0.5 * first / max(self._progress(found), 0.5), _REACH[dtype] * first)
        bar = LateBar("conjugate gradients")
        descent, begun = self._descent(residual, found.weights, dtype), found.iterations
        size = first
        while size > goal and found.iterations < self.max_iterations:
            for _ in range(min(self._looks_every, self.max_iterations - found.iterations)):
                descent.step()
                found.iterations += 1
                found.flops += self.space.product_flops
            size = self.space.weights.norm(descent.residual)
            if not math.isfinite(size):
                break
            bar.update()
            self.watch(found.weights if self._scale == 1.0 else found.weights * self._scale, found.iterations)
            if not self._clustered and (found.rank or self._earlier + found.iterations > self._if_scattered):
                self._clustered = True
                goal = max(_CLUSTERED * goal, _REACH[dtype] * first)
            if not found.rank and self._block_pays(found.iterations, found.iterations - begun, size, first, dtype):
                found.rank = self.space.block_size(self.memory)
                found.flops += self.space.block_flops(found.rank)
                self._precondition = self.space.leading_block(found.rank).precondition
                descent = self._descent(descent.residual, found.weights, dtype)
        bar.close()

    def _descent(self, residual: Tensor, weights: Tensor, dtype: torch.dtype) -> Descent:
        dot = self.space.weights.dot
        return Descent(lambda w: self.space.matmul(w, dtype), self._precondition, residual, weights, dot)

    def _block_pays(self, total: int, iterations: int, size: float, first: float, dtype: torch.dtype) -> bool:
        """Whether the iterations still to come, at the rate so far, cost more than to set up the dense block.

        Or are more than are allowed.
        """
        goal = self.tolerance * self._unit * (_CLUSTERED if self._clustered else 1.0)
        rank = self.space.block_size(self.memory)
        if iterations < _WAIT or size <= goal or not rank:
            return False
        rate = math.log(size / first) / iterations
        left = math.log(goal / size) / rate if rate < 0 else math.inf
        dearer = 2.0 if dtype == torch.float32 else 1.0  # a block is always float64
        too_many = left > self.max_iterations - total
        return too_many or left * self.space.product_flops > dearer * self.space.block_flops(rank)
