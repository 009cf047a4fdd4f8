"""One Kronecker product ``K = (x) K_i`` of a covariance, with cached results."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpytorch_gaps.autograd.first_order import frozen_eigenvalues
from gpytorch_gaps.linalg.eigen import (
    KroneckerEigen,
    factored_if_cheaper,
    kron_eigh,
    largest_left_out,
    leading_products_stable,
)
from gpytorch_gaps.linalg.factors import (
    Factor,
    all_dense,
    asymmetry,
    axis_covariances,
    factor_axes,
    have_eigenbases,
    joint_covariances,
    leaf,
    row_norm_squared,
    row_places,
    symmetric_part,
)
from gpytorch_gaps.linalg.products import cast_without_denormals, kron_matmul, product_flops
from gpytorch_gaps.linalg.selection import kron_block, product_at, unravel


class KroneckerTerm:
    """``K = (x) K_i`` on the whole grid, detached and in float64.

    :param factors: K_i, symmetric positive semi-definite, matrices or operators, shape (*batch, m_i, m_i) each.
    :param shared: a cache in which terms with the same factors share the eigen-decomposition.
    """

    def __init__(self, factors: Sequence[Factor], shared: dict[str, KroneckerEigen] | None = None) -> None:
        wide = [factor.detach().double() for factor in factors]
        self.shape = tuple(factor.size(-1) for factor in wide)
        self.shared = {} if shared is None else shared
        self._factors = {torch.float64: tuple(wide)}
        self._eigen: dict[torch.dtype, KroneckerEigen] = {}

    def asymmetry(self) -> Tensor:
        """Differences of the factors and their transposes, then sizes. They stay on the device. shape: (2 d,)"""
        return torch.stack([asymmetry(factor) for factor in self.factors()]).mT.flatten()

    def symmetrize(self, asymmetry: Sequence[float]) -> None:
        """Takes the symmetric parts. float32 kernels are only symmetric up to rounding, which would limit the residual.

        :param asymmetry: the result of :meth:`asymmetry`.
        :raises ValueError: if a factor is not symmetric.
        """
        differences, sizes = asymmetry[: len(self.shape)], asymmetry[len(self.shape) :]
        for axis, (difference, size) in enumerate(zip(differences, sizes, strict=True)):
            if difference > 1e-3 * size:
                raise ValueError(
                    f"factors: axis {axis} differs from its transpose by {difference:.1e}, expected symmetry"
                )
        pairs = zip(self.factors(), differences, strict=True)
        self._factors = {torch.float64: tuple(symmetric_part(f) if difference > 0 else f for f, difference in pairs)}

    def factors(self, dtype: torch.dtype = torch.float64) -> tuple[Factor, ...]:
        if dtype not in self._factors:
            self._factors[dtype] = tuple(
                cast_without_denormals(factor, dtype) for factor in self._factors[torch.float64]
            )
        return self._factors[dtype]

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that the factors are made of."""
        return tuple(map(leaf, self.factors()))

    @property
    def axes(self) -> tuple[int, ...]:
        """The levels of every axis; a factor may span several."""
        return tuple(size for factor in self.factors() for size in factor_axes(factor))

    def axis_covariances(self) -> list[Tensor]:
        """Covariances along every axis, the mean over a batch: a matrix (m, m), or a vector (m,) by lag."""
        return axis_covariances(self.factors())

    def joint_covariances(self) -> list[Tensor]:
        """As :meth:`axis_covariances`, with one matrix by lag (a, a, q) for a block of a dense and a regular axis."""
        return joint_covariances(self.factors())

    @property
    def has_eigenbasis(self) -> bool:
        """Whether products with all eigenvectors are possible, for fill-gaps."""
        return have_eigenbases(self.factors())

    @property
    def has_eigenvectors(self) -> bool:
        """Whether single eigenvectors are available, for low ranks: all factors are matrices."""
        return all_dense(self.factors())

    @property
    def is_decomposed(self) -> bool:
        """Whether the eigen-decomposition has been computed."""
        return "eigen" in self.shared

    def eigen(self, dtype: torch.dtype = torch.float64) -> KroneckerEigen:
        if "eigen" not in self.shared:
            self.shared["eigen"] = kron_eigh(self.factors())
        if dtype not in self._eigen:
            self._eigen[dtype] = self.shared["eigen"].to(dtype)
        return self._eigen[dtype]

    @property
    def product_flops(self) -> float:
        """FLOPs of one product with K and one column, as :meth:`matmul` takes it."""
        thin = factored_if_cheaper(self.shared.get("eigen"))
        return product_flops(self.factors()) if thin is None else thin.root_flops

    def matmul(self, grid: Tensor) -> Tensor:
        """``K x`` on the whole grid, in the precision of x. shape: (*batch, M, C)"""
        thin = factored_if_cheaper(self.shared.get("eigen"))
        return kron_matmul(self.factors(grid.dtype), grid) if thin is None else thin.matmul(grid)

    def block(self, index: Tensor) -> Tensor:
        """``W K W'``, dense. shape: (*batch, N, N)"""
        return kron_block(self.factors(), index, index)

    def places(self, index: Tensor) -> list[list[Tensor]]:
        """Places of cells on the axes of every factor. shape: (N,) each"""
        return [row_places(*own) for own in zip(self.factors(), unravel(index, self.shape), strict=True)]

    def leading(self, count: int) -> tuple[Tensor, Tensor]:
        """The largest eigenvalues of K, the worst of a batch, and their positions. shape: (p,) and (d, p)"""
        values, positions = leading_products_stable(self.eigen().values, count)
        return values.reshape(-1, values.size(-1)).amax(0), positions

    def left_out(self, rank: int) -> float:
        """The largest eigenvalue that is not among the leading ones, over a batch."""
        _, positions = leading_products_stable(self.eigen().values, rank)
        return largest_left_out(self.eigen().values, positions)

    def eigenvalues(self, factors: Sequence[Tensor], positions: Tensor) -> Tensor:
        """Some products of eigenvalues, differentiable in the same factors as this term's. shape: (*batch, p)"""
        used = [torch.unique(axis, return_inverse=True) for axis in positions]  # products with these are far cheaper
        vectors = [q[..., columns] for q, (columns, _) in zip(self.eigen().matrices, used, strict=True)]
        return product_at(frozen_eigenvalues(factors, vectors), torch.stack([local for _, local in used]))

    def trace(self, index: Tensor) -> Tensor:
        """Trace of ``W K W'``, W selecting the cells `index`. shape: batch"""
        diagonals = [factor.diagonal(dim1=-2, dim2=-1) for factor in self.factors()]
        return product_at(diagonals, unravel(index, self.shape)).sum(-1)

    @property
    def largest_variance(self) -> Tensor:
        """The largest diagonal entry of K, over a batch."""
        return torch.stack([factor.diagonal(dim1=-2, dim2=-1).amax() for factor in self.factors()]).prod()

    @property
    def row_norm(self) -> Tensor:
        """The largest norm of a row of K, over a batch. It stays on the device."""
        return torch.stack(list(map(row_norm_squared, self.factors()))).prod().sqrt()

    @property
    def least_eigenvalue(self) -> Tensor:
        """The smallest eigenvalue of K, over a batch; zero if it is not known."""
        if not self.has_eigenvectors:
            return self.leaves[0].new_zeros(())
        return torch.stack([values.amin() for values in self.eigen().values]).prod()


def side_by_side(vectors: Sequence[Tensor]) -> Tensor:
    """Matrices of several terms as one. shape: (*batch, m, m_t) each -> (*batch, m, Σ m_t)"""
    if len(vectors) == 1:
        return vectors[0]
    batch = torch.broadcast_shapes(*(own.shape[:-2] for own in vectors))
    return torch.cat([own.expand(*batch, *own.shape[-2:]) for own in vectors], -1)
