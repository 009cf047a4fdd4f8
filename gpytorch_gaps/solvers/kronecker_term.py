"""One Kronecker product of a sum of kernels, with what is worked out for it once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpytorch_gaps.autograd.rayleigh import frozen_eigenvalues
from gpytorch_gaps.linalg.eigen import (
    KroneckerEigen,
    factored_if_cheaper,
    kron_eigh,
    largest_left_out,
    leading_products_stable,
)
from gpytorch_gaps.linalg.products import cast_without_denormals, kron_matmul, kron_matmul_flops
from gpytorch_gaps.linalg.selection import product_at, unravel


class KroneckerTerm:
    """``W K W'``, one term of a sum.

    :param factors: K_i, shape (*batch, m_i, m_i) each.
    :param shared: where the eigen-decomposition is kept for others who have the same factors.
    """

    def __init__(self, factors: Sequence[Tensor], shared: dict[str, KroneckerEigen]) -> None:
        self.factors = [factor.detach().double() for factor in factors]
        self.shape = tuple(factor.size(-1) for factor in self.factors)
        self._shared = shared
        self._narrow: list[Tensor] | None = None  # the factors in float32, once asked for

    @property
    def is_decomposed(self) -> bool:
        """Whether the eigen-decomposition is there already."""
        return "eigen" in self._shared

    @property
    def eigen(self) -> KroneckerEigen:
        if "eigen" not in self._shared:
            self._shared["eigen"] = kron_eigh(self.factors)
        return self._shared["eigen"]

    @property
    def product_flops(self) -> float:
        thin = factored_if_cheaper(self._shared.get("eigen"))
        return float(kron_matmul_flops([(m, m) for m in self.shape], 1)) if thin is None else thin.root_flops

    def matmul(self, grid: Tensor) -> Tensor:
        """``K x`` on the whole grid, in the precision of x. shape: (*batch, M, C)"""
        thin = factored_if_cheaper(self._shared.get("eigen"))
        if thin is not None:
            return thin.matmul(grid)
        if grid.dtype == torch.float64:
            return kron_matmul(self.factors, grid)
        if self._narrow is None:
            self._narrow = [cast_without_denormals(factor, grid.dtype) for factor in self.factors]
        return kron_matmul(self._narrow, grid)

    def leading(self, count: int) -> tuple[Tensor, Tensor]:
        """The largest eigenvalues of K, the worst of a batch, and where they are. shape: (p,) and (d, p)"""
        values, positions = leading_products_stable(self.eigen.values, count)
        return values.reshape(-1, values.size(-1)).amax(0), positions

    def left_out(self, rank: int) -> float:
        """The largest eigenvalue that is not among the leading ones, over a batch."""
        _, positions = leading_products_stable(self.eigen.values, rank)
        return largest_left_out(self.eigen.values, positions)

    def eigenvalues(self, factors: Sequence[Tensor], positions: Tensor) -> Tensor:
        """Some products of eigenvalues, differentiable in the same factors as this term's. shape: (*batch, p)"""
        return product_at(frozen_eigenvalues(factors, self.eigen.vectors), positions)

    def trace(self, index: Tensor) -> Tensor:
        """Trace of ``W K W'``, W selecting the cells `index`. shape: batch"""
        diagonals = [factor.diagonal(dim1=-2, dim2=-1) for factor in self.factors]
        return product_at(diagonals, unravel(index, self.shape)).sum(-1)

    @property
    def least_eigenvalue(self) -> Tensor:
        """The smallest eigenvalue of K, over a batch."""
        return torch.stack([values.amin() for values in self.eigen.values]).prod()
