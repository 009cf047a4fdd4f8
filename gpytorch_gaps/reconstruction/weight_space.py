"""Fill-gaps in the space of the kernel's own eigenvectors: ``(s2 T^-1 + Phi' W'W Phi) w = Phi' W' y``.

With ``K = Phi T Phi'`` the posterior mean on the grid is ``Phi w``. The vectors of this system are as long as the
basis, not as the grid, which is only swept. Where gaps are scattered, ``Phi' W'W Phi`` is close to ``N/M I``;
preconditioned by ``s2/T + N/M``, the system has the spectrum of fill-gaps, or a better one, and needs few iterations.

Clustered gaps leave functions that live inside of them, which make the system nearly singular. A dense block of
``s2 T^-1 + Phi' W'W Phi`` on the leading functions takes care of those. It is set up once the iterations so far show
that going on without it costs more.

A small residual r of this system is not a small error: inside a gap the matrix is as small as ``s2 T^-1``. But it is
never smaller, so that the error e of the weights has ``e' H e = r' H^-1 r <= r' T r / s2`` for the matrix H. The
posterior covariance of the weights is ``s2 H^-1``; hence, at every point x,

    ``|mean error at x| <= sd(x) ||T^(1/2) r|| / s2``,

sd the posterior standard deviation. Iterations stop on that bound.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gpytorch_gaps.linalg.eigen import leading_products
from gpytorch_gaps.linalg.gram import structured_gram
from gpytorch_gaps.linalg.masked_grid import MaskedGrid, project_flops, sweep_flops
from gpytorch_gaps.linalg.selection import product_at
from gpytorch_gaps.reconstruction.shared_grid import SharedGrid
from gpytorch_gaps.reconstruction.weights import Weights
from gpytorch_gaps.solvers.krylov import ITERATIONS_BETWEEN_READS, ConjugateGradients
from gpytorch_gaps.solvers.planning.costs import expected_iterations
from gpytorch_gaps.solvers.planning.rates import rates_of
from gpytorch_gaps.utils.progress import LateBar

_WAIT = 10  # iterations after which their rate of convergence is known
_MAX_PASSES = 12
# by how much an inner iteration may reduce a residual before it is computed again in float64
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
        self._kept, self._roots = self.products > 0, self.products.sqrt()
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

    def error_in_std(self, residual: Tensor) -> float:
        """``||T^(1/2) r|| / s2``: bounds the error of the mean, at every point, in posterior standard deviations."""
        return self.weights.norm(self._roots * residual) / self.noise

    def rounding_in_std(self, weights: Tensor) -> float:
        """What rounding of a float64 residual may add to :meth:`error_in_std`.

        A cell of ``Phi w`` is rounded by about ``eps sqrt(R / M) |w|``, and so is every component of the residual.
        """
        per_cell = math.sqrt(self.weights.size / self.grid.num_cells) * self.weights.norm(weights)
        return torch.finfo(torch.float64).eps * per_cell * self._error_of_ones

    @cached_property
    def _error_of_ones(self) -> float:
        return self.error_in_std(torch.ones_like(self.products))

    def misfit(self, weights: Tensor, rhs: Tensor, norm: float) -> float:
        """Root mean square of ``(y - W Phi w) / s``, for weights that solve the system up to a small residual.

        ``|y - W Phi w|^2 = |y|^2 - w'(b + s2 T^-1 w) - w'r`` with ``b = Phi' W' y``, whose last term is negligible.

        :param rhs: b.
        :param norm: ``|y|``.
        """
        explained = self.weights.number((weights * torch.addcmul(rhs, self.shift, weights)).sum())
        rounding = torch.finfo(torch.float64).eps * norm**2  # of the difference
        return math.sqrt(max(norm**2 - explained, rounding) / (self.num_train * self.noise))

    def expected_iterations(self, reduction: float) -> float:
        """Iterations that reduce a residual by this factor if the gaps are scattered.

        ``Phi' W'W Phi`` then differs from ``N/M`` by a factor of ``1 +- q``, ``q = sqrt(gappiness * dimension / N)``
        at most, with the effective dimension ``sum T / (T + s2 M/N)``.
        """
        dimension = self.weights.number((self.products / (self.products + self.noise / self.share)).sum())
        q = min(0.9, math.sqrt((1.0 - self.share) * dimension / self.num_train))
        return expected_iterations(((1.0 + q) / (1.0 - q)) ** 2, reduction)

    def expected_seconds(self, reduction: float) -> float:
        """The same on this machine, which does a rank's part of it."""
        iterations = self.expected_iterations(reduction) / self.weights.ranks.size
        cells = self.grid.num_cells
        narrow, wide = (rates_of(self.grid.device, dtype) for dtype in (torch.float32, torch.float64))
        inner = narrow.seconds(iterations * self.product_flops, iterations * 4.0 * _PASSES * cells, iterations * _CALLS)
        passes = max(1.0, math.log(reduction) / math.log(_REACH[torch.float32]))  # a float64 residual after each
        residuals = wide.seconds(passes * self.product_flops, passes * 8.0 * _PASSES * cells)
        return inner + residuals / self.weights.ranks.size

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
    """Weights, and how good they are."""

    weights: Tensor
    residual: float = math.inf  # relative, of the weights' own system
    error_in_std: float = math.inf  # certified bound on the error of the mean
    iterations: int = 0
    passes: int = 0
    rank: int = 0  # of the dense block
    flops: float = 0.0
    converged: bool = False


class WeightSolver:
    """Iterates in float32, computes the residual in float64, and goes on until the mean is certified.

    :param rhs: ``Phi' W' y``.
    :param tolerance: largest error of the mean, in posterior standard deviations.
    :param memory: bytes that the dense block may take.
    :param watch: shown the weights and the iterations so far, after every iteration.
    """

    def __init__(
        self,
        space: WeightSpace,
        rhs: Tensor,
        *,
        tolerance: float,
        max_iterations: int,
        memory: float,
        watch: Callable[[Tensor, int], None],
    ) -> None:
        largest = space.weights.largest(rhs)
        self._scale = 1.0 if largest == 0.0 or 1e-20 < largest < 1e20 else largest  # float32 must hold the weights
        self.space, self.rhs, self.tolerance = space, rhs / self._scale, tolerance
        self.max_iterations, self.memory, self.watch = max_iterations, memory, watch
        self._unit = space.weights.norm(self.rhs) or 1.0
        self._precondition = space.precondition
        # a look waits for the device, which is nothing beside a sweep of a large grid
        quick = space.product_flops / space.weights.ranks.size < _LONG_SWEEP
        self._looks_every = ITERATIONS_BETWEEN_READS if quick and space.grid.device.type != "cpu" else 1

    @property
    def reduction(self) -> float:
        """By what factor the bound on the error must fall from that of weights of zero."""
        return min(0.5, self.tolerance / max(self._error_in_std(self.rhs), self.tolerance))

    def solve(self, start: Tensor | None = None) -> WeightSolution:
        """The weights, from a start where there is one."""
        found = WeightSolution(torch.zeros_like(self.rhs) if start is None else start / self._scale)
        residual = self.rhs.clone() if start is None else self._residual(found)
        dtype = torch.float32
        self._judge(found, residual)
        while not found.converged and found.iterations < self.max_iterations and found.passes < _MAX_PASSES:
            candidate = WeightSolution(**{**vars(found), "weights": found.weights.clone()})
            self._descend(candidate, residual.clone(), dtype)
            candidate.passes += 1
            new_residual = self._residual(candidate)
            self._judge(candidate, new_residual)
            stalled = not candidate.error_in_std < 0.5 * found.error_in_std
            if candidate.error_in_std < found.error_in_std:
                found, residual = candidate, new_residual
            else:
                found.iterations, found.passes, found.flops = candidate.iterations, candidate.passes, candidate.flops
                found.rank = candidate.rank
            if stalled and dtype == torch.float64:
                break
            dtype = torch.float64 if stalled else dtype
        found.weights.mul_(self._scale)
        return found

    def _residual(self, found: WeightSolution) -> Tensor:
        found.flops += self.space.product_flops
        return self.rhs - self.space.matmul(found.weights)

    def _error_in_std(self, residual: Tensor) -> float:
        return self._scale * self.space.error_in_std(residual)

    def _judge(self, found: WeightSolution, residual: Tensor) -> None:
        found.residual = self.space.weights.norm(residual) / self._unit
        rounding = self._scale * self.space.rounding_in_std(found.weights)
        found.error_in_std = math.hypot(self._error_in_std(residual), rounding)
        found.converged = found.error_in_std <= self.tolerance

    def _descend(self, found: WeightSolution, residual: Tensor, dtype: torch.dtype) -> None:
        """Conjugate gradients from `found`, which is updated, until the mean should be within the tolerance."""
        first = self._error_in_std(residual)
        goal = max(0.5 * self.tolerance, _REACH[dtype] * first)
        bar = LateBar("conjugate gradients")
        descent, begun = self._descent(residual, found.weights, dtype), found.iterations
        error = first
        while error > goal and found.iterations < self.max_iterations:
            for _ in range(min(self._looks_every, self.max_iterations - found.iterations)):
                descent.step()
                found.iterations += 1
                found.flops += self.space.product_flops
            error = self._error_in_std(descent.residual)
            if not math.isfinite(error):
                break
            bar.update()
            self.watch(found.weights if self._scale == 1.0 else found.weights * self._scale, found.iterations)
            if not found.rank and self._block_pays(found.iterations, found.iterations - begun, error, first, dtype):
                found.rank = self.space.block_size(self.memory)
                found.flops += self.space.block_flops(found.rank)
                self._precondition = self.space.leading_block(found.rank).precondition
                descent = self._descent(descent.residual, found.weights, dtype)
        bar.close()

    def _descent(self, residual: Tensor, weights: Tensor, dtype: torch.dtype) -> ConjugateGradients:
        dot = self.space.weights.dot
        return ConjugateGradients(
            lambda w: self.space.matmul(w, dtype), residual, solution=weights, precondition=self._precondition, dots=dot
        )

    def _block_pays(self, total: int, iterations: int, error: float, first: float, dtype: torch.dtype) -> bool:
        """Whether the iterations still to come, at the rate so far, cost more than setting up the dense block.

        Or are more than are allowed.
        """
        rank = self.space.block_size(self.memory)
        if iterations < _WAIT or error <= self.tolerance or not rank:
            return False
        rate = math.log(error / first) / iterations
        left = math.log(self.tolerance / error) / rate if rate < 0 else math.inf
        slower = 2.0 if dtype == torch.float32 else 1.0  # a block is always float64
        too_many = left > self.max_iterations - total
        return too_many or left * self.space.product_flops > slower * self.space.block_flops(rank)
