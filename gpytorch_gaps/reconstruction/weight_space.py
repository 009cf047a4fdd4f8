"""Fill-gaps in the basis of the kernel's own eigenvectors: ``(s2 T^-1 + Phi' W'W Phi) w = Phi' W' y``.

With ``K = Phi T Phi'``, the posterior mean on the grid is ``Phi w``. Vectors of this system have the length of the
basis, not that of the grid; products go through the grid in parts. If gaps are scattered, ``Phi' W'W Phi`` is close to
``N/M I``. Preconditioned by ``s2/T + N/M``, the system has the spectrum of fill-gaps, Evans & Nair (2018), Proposition
3.3, or a better one, and needs few iterations.

The basis of a sum of products is ``Psi = [Psi_1 .. Psi_n]``, whose columns overlap. The system and its bounds are the
same; ``N/M Psi' Psi`` takes the place of ``N/M`` in the preconditioner (:class:`SumPreconditioner`).

If gaps are clustered, some functions are almost zero outside a gap, and the system is nearly singular. For these, a
dense block of ``s2 T^-1 + Phi' W'W Phi`` on the leading functions is used as preconditioner (:class:`LeadingBlock`).
"""

import math
from functools import cached_property

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gpytorch_gaps.linalg.eigen import leading_products
from gpytorch_gaps.linalg.gram import structured_gram
from gpytorch_gaps.linalg.masked_grid import MaskedGrid, project_flops, sweep_flops
from gpytorch_gaps.linalg.selection import product_at
from gpytorch_gaps.linalg.truncated_sum import TruncatedSum
from gpytorch_gaps.reconstruction.sharding import Weights
from gpytorch_gaps.reconstruction.sum_preconditioner import SumPreconditioner
from gpytorch_gaps.solvers.planning.costs import expected_iterations

_BLOCK_BYTES_PER_ENTRY = 40.0  # memory during the set-up of the dense block


class WeightSpace:
    """The system for one mask, one truncated kernel and one noise.

    Weights are boxes of shape (r_1, .., r_d); those of a sum are a vector, term after term.

    :param grid: the observed cells of the slices of this process.
    :param weights: which weights this process holds, and how they are summed over processes.
    :param noise: s2.
    :param memory: bytes that the preconditioner of a sum may take.
    """

    def __init__(self, grid: MaskedGrid, weights: Weights, noise: float, memory: float = 2**31) -> None:
        self.grid, self.weights, self.basis, self.noise = grid, weights, weights.basis, noise
        self.num_cells, self.num_train = math.prod(self.basis.shape), weights.count(grid)
        self.products = weights.products
        self._kept, self._roots = self.products > 0, self.products.sqrt()
        self.shift = torch.where(self._kept, noise / self.products, 0.0)  # s2 T^-1
        self.share = self.num_train / self.num_cells
        self.inverse = torch.where(self._kept, 1.0 / (self.shift + self.share), 0.0)
        self._vectors = {torch.float64: self.basis.vectors}
        self.product_flops = sweep_flops(self.basis.shape, self.basis.ranks)
        self._sum = None
        if isinstance(self.basis, TruncatedSum) and self.num_train:
            self._sum = SumPreconditioner(self.basis, self.shift, self.share, _largest_block(memory))

    def matmul(self, weights: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """``(s2 T^-1 + Phi' W'W Phi) w``. The second term is computed in the given precision, the rest in float64."""
        if dtype not in self._vectors:
            self._vectors[dtype] = tuple(q.to(dtype) for q in self.basis.vectors)
        image = self.weights.gram(self.grid, self._vectors[dtype], weights).double()
        return torch.addcmul(image.mul_(self._kept), self.shift, weights)

    def precondition(self, residual: Tensor) -> Tensor:
        return self.inverse * residual if self._sum is None else self._sum(residual)

    # -- errors --------------------------------------------------------------------------------------------------------

    def error_in_std(self, residual: Tensor) -> float:
        """``||T^(1/2) r|| / s2``: a bound on the error of the mean in posterior standard deviations, at every point.

        The matrix H of the system is at least ``s2 T^-1``, so the error e of the weights has
        ``e' H e = r' H^-1 r <= r' T r / s2``. The posterior covariance of the weights is ``s2 H^-1``; hence, at every
        point x, ``|mean error at x| <= sd(x) ||T^(1/2) r|| / s2``. (A small residual does not imply a small error:
        inside a gap, the matrix is as small as ``s2 T^-1``.)
        """
        return self.weights.norm(self._roots * residual) / self.noise

    def column_norms(self, residual: Tensor) -> Tensor:
        """:meth:`error_in_std` of a flattened box, in the form that the refinement needs. shape: (R, 1) -> (1,)"""
        return residual.new_tensor([self.error_in_std(residual.reshape(self.products.shape))])

    def residual_unit(self, rhs: Tensor) -> Tensor:
        """The unit of :meth:`column_norms`: one, since they are in units of the posterior. shape: (1,)"""
        return rhs.new_ones(1)

    def rounding_in_std(self, weights: Tensor) -> float:
        """A bound on the effect of rounding a float64 residual on :meth:`error_in_std`.

        The rounding error of a cell of ``Phi w`` is about ``eps sqrt(R / M) |w|``, and so is that of every component of
        the residual.
        """
        per_cell = math.sqrt(self.weights.size / self.num_cells) * self.weights.norm(weights)
        return torch.finfo(torch.float64).eps * per_cell * self._error_of_ones

    @cached_property
    def _error_of_ones(self) -> float:
        return self.error_in_std(torch.ones_like(self.products))

    def misfit(self, weights: Tensor, rhs: Tensor, norm: float) -> float:
        """Root mean square of ``(y - W Phi w) / s``, for weights with a small residual.

        ``|y - W Phi w|^2 = |y|^2 - w'(b + s2 T^-1 w) - w'r`` with ``b = Phi' W' y``. The last term is negligible.

        :param rhs: b.
        :param norm: ``|y|``.
        """
        explained = self.weights.total((weights * torch.addcmul(rhs, self.shift, weights)).sum())
        rounding = torch.finfo(torch.float64).eps * norm**2
        return math.sqrt(max(norm**2 - explained, rounding) / (self.num_train * self.noise))

    # -- costs ---------------------------------------------------------------------------------------------------------

    def expected_iterations(self, reduction: float) -> float:
        """Number of iterations that reduce a residual by this factor, if the gaps are scattered.

        The ratio of ``Phi' W'W Phi`` and ``N/M`` then lies in ``1 +- q``, with ``q`` at most
        ``sqrt(gappiness * dimension / N)`` and the effective dimension ``sum T / (T + s2 M/N)``.
        """
        dimension = self.weights.total((self.products / (self.products + self.noise / self.share)).sum())
        q = min(0.9, math.sqrt((1.0 - self.share) * dimension / self.num_train))
        return expected_iterations(((1.0 + q) / (1.0 - q)) ** 2, reduction)

    def block_size(self, memory: float) -> int:
        """p: the number of functions with more variance than the noise, limited by the memory for their block.

        Zero for a sum, whose preconditioner has another dense block.
        """
        return min(self._above_noise, _largest_block(memory)) if self._sum is None else 0

    @cached_property
    def _above_noise(self) -> int:
        return int(self.weights.total((self.products > self.noise).sum()))

    def block_flops(self, rank: int) -> float:
        """FLOPs of setting up a :class:`LeadingBlock`."""
        if not rank:
            return math.inf
        used = [len(torch.unique(axis)) for axis in self._leading(rank)]
        pairs = [columns * (columns + 1) // 2 for columns in used]
        return project_flops(self.basis.shape, pairs) + rank**3 / 3.0 + 20.0 * rank**2

    def _leading(self, rank: int) -> Tensor:
        """Positions in the box of the `rank` functions with the largest variance, by axis. shape: (d, p)"""
        return leading_products(self.basis.terms[0].values, rank)[1]

    def leading_block(self, rank: int) -> "LeadingBlock":
        positions = self._leading(rank)
        gram = structured_gram(self.basis.vectors, positions, lambda bases: self.weights.project_mask(self.grid, bases))
        return LeadingBlock(self, positions, gram)


def _largest_block(memory: float) -> int:
    return int(math.sqrt(memory / _BLOCK_BYTES_PER_ENTRY))


class LeadingBlock:
    """A preconditioner: the inverse of the dense block on the p leading functions, and of the diagonal elsewhere.

    The block is scaled by the diagonal and factorised in float64. Cost: a structured Gram matrix and p^3 / 3 FLOPs,
    then p^2 per application. `positions` are the leading functions, shape (d, p). `index` are the places, in the box of
    weights, of those that this process holds.
    """

    def __init__(self, space: WeightSpace, positions: Tensor, gram: Tensor) -> None:
        self._inverse, self._complete = space.inverse, space.weights.complete
        self._which, self.index = space.weights.held(positions)
        self.positions = positions
        shift = space.noise / product_at(space.basis.terms[0].values, positions)
        self._scale = (shift + space.share).rsqrt()
        gram.mul_(self._scale).mul_(self._scale.unsqueeze(-1))
        gram.diagonal().add_(shift * self._scale.square())
        self._cholesky = psd_safe_cholesky(gram)

    def precondition(self, residual: Tensor) -> Tensor:
        result = (self._inverse * residual).flatten()
        inside = torch.zeros_like(self._scale)
        inside[self._which] = residual.flatten()[self.index]
        inside = self._complete(inside).mul_(self._scale).unsqueeze(-1)
        inside = self._scale * torch.cholesky_solve(inside, self._cholesky).squeeze(-1)
        result[self.index] = inside[self._which]
        return result.view(residual.shape)

    @property
    def root(self) -> Tensor:
        """F with ``F F'`` the dense block. shape: (p, p)"""
        return self._cholesky / self._scale.unsqueeze(-1)
