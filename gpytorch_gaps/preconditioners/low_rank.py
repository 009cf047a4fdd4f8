"""A low-rank matrix in a Kronecker eigenbasis plus a diagonal, and its inverse by the matrix inversion lemma.

``P = F C F' + D`` with ``C = diag(c)`` and ``F = W Q S_p'``, a rectangular selected Kronecker product, never stored:

    P^-1   = D^-1 - D^-1 F B (I + B G B)^-1 B F' D^-1,    B = C^(1/2),  G = F' D^-1 F
    log|P| = log|D| + log|I + B G B|

Columns without this structure may be added to F: ``P = F C F' + R R' + D`` has the same form, with ``[F B, R]`` in
place of ``F B``. The eigenvectors may belong to several matrices: for a sum of Kronecker products, F contains the
leading eigenvectors of each product.

The symmetric form needs no division by c. For a constant diagonal, the condition number of ``I + B G B`` is not larger
than that of P. The Cholesky factor of ``I + B G B`` is applied by triangular solves, because with an explicit inverse
the error of ``P^-1`` would grow with the square of the condition number. The relative residual of ``P^-1`` is then
about ``eps max(c) / min(D)``. This is accurate enough for a preconditioner up to a ratio ``max(c) / min(D)`` of 1e14.
If D is smaller, it is raised to this ratio.

A preconditioner of ``A = K + D`` is better if it has the trace of A: ``P = F C F' + (D + m I)``, where m is the mean of
the eigenvalues that F C F' leaves out. Let l be the largest of these, and ``a`` the smallest eigenvalue of A. For
constant noise s2,

    cond(P^-1 A) <= (l + s2) / (m + s2) (1 + m / a) <= 1 + l / s2

The bound on the right is that of the paper's P, with m = 0. It is attained: if all of K is far above the noise,
``cond(A)`` may be small, and m = 0 moves the leading eigenvalues from the upper end of the spectrum to below its lower
end. With m, the condition number is at most about ``2 l / a``. For the smallest rank this is about that of A, and for
larger ranks it is less.
"""

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from gpytorch_gaps.autograd.dense import dense_logdet, logdet_from, solve_from
from gpytorch_gaps.linalg.gram import masked_gram
from gpytorch_gaps.linalg.products import cast_without_denormals, kron_matmul
from gpytorch_gaps.linalg.selection import product_at, ravel, select_cells, spread_cells, unravel
from gpytorch_gaps.preconditioners.core_matrix import factorise_lifted, lifted_root, low_rank_flops, same_batch

_ROUNDED = 1e-2  # relative error of a preconditioner that conjugate gradients do not notice
_LARGE = 2**17  # cells
_RESOLVED = 1e-14  # a diagonal below this fraction of the largest coefficient is lost to rounding


class LowRankPreconditioner:
    """``P = F C F' + R R' + D'`` on the cells `index`, in float64 for any precision of its input.

    D' is D plus `added`: the dropped part of the diagonal if `trace` is given, and what rounding requires.

    :param vectors: Q_i, shape (*batch, m_i, m_i) each.
    :param positions: column of each Q_i that makes up eigenvector a, shape (d, p).
    :param coefficients: c, shape (*batch, p).
    :param index: cells of the rows, shape (N,).
    :param diagonal: D, shape (*batch, 1) or (*batch, N).
    :param root: R, shape (*batch, N, r).
    :param left_over: a bound on ``|A - P|`` over the smallest noise, for the matrix A that P stands for: where it is
        below a tolerance, P is as good as A.
    :param trace: of ``A - D``, shape batch: P has the same. None: nothing is added for what is left out.

    Cost: set-up of one masked Gram matrix and p^3 / 3; then two rectangular Kronecker products and p^2 a column.
    """

    num_neighbours = 0

    def __init__(
        self,
        vectors: Sequence[Tensor],
        positions: Tensor,
        coefficients: Tensor,
        index: Tensor,
        diagonal: Tensor,
        root: Tensor | None = None,
        left_over: float = math.inf,
        trace: Tensor | None = None,
    ) -> None:
        self._leading = positions.size(-1)
        self.root = None if root is None else root.detach().double()
        self.rank = self._leading + (0 if root is None else root.size(-1))
        self.index = index
        own_diagonal = diagonal.detach().double()
        self.coefficients = coefficients.detach().double()
        used = [torch.unique(axis, return_inverse=True) for axis in positions]
        self.columns = [columns for columns, _ in used]
        # only the columns in use: a product with these is far cheaper than one with Q
        self.vectors = [q.detach()[..., columns] for q, columns in zip(vectors, self.columns, strict=True)]
        self._transposed = [q.mT for q in self.vectors]
        self._local = torch.stack([local for _, local in used])
        self._basis_shape = tuple(len(columns) for columns in self.columns)
        self.basis_index = ravel(self._local, self._basis_shape)
        self.num_cells = math.prod(q.size(-2) for q in self.vectors)
        self.diagonal = self._raised(own_diagonal, trace)
        self.unit_gram = self._gram(torch.ones_like(self.diagonal)) if self.constant else None
        core = self._core(self.coefficients, self.diagonal, self.root)
        self._cholesky, lift, raised = factorise_lifted(core, (self.diagonal / own_diagonal).amax())
        self.diagonal = lift * self.diagonal
        self.added = self.diagonal - own_diagonal  # shape: (*batch, 1) or (*batch, N)
        self.left_over = max(left_over, lift * raised - 1.0)
        shapes = [(q.size(-2), q.size(-1)) for q in self.vectors]
        self.setup_flops, self.flops = low_rank_flops(shapes, self._leading)

    @property
    def constant(self) -> bool:
        return self.diagonal.size(-1) == 1

    @property
    def num_rows(self) -> int:
        return len(self.index)

    def _spread(self, x: Tensor) -> Tensor:
        """``W' x``. shape: (*batch, N, C) -> (*batch, M, C)"""
        return spread_cells(x, self.index, self.num_cells)

    def _select(self, grid: Tensor) -> Tensor:
        """``W g``. shape: (*batch, M, C) -> (*batch, N, C)"""
        return select_cells(grid, self.index)

    def _raised(self, diagonal: Tensor, trace: Tensor | None) -> Tensor:
        """D', before any lift. shape: (*batch, 1) or (*batch, N)"""
        largest = self.coefficients.amax() if self._leading else diagonal.new_zeros(())
        by_root = None if self.root is None else self.root.square().sum(-2)  # shape: (*batch, r)
        if by_root is not None and by_root.size(-1):
            largest = largest + by_root.amax()
        if trace is not None:
            left_out = trace.detach().double() - (self.coefficients * self._column_squares()).sum(-1)
            left_out = left_out if by_root is None else left_out - by_root.sum(-1)
            diagonal = diagonal + left_out.clamp_min(0.0).unsqueeze(-1) / max(1, self.num_rows)
        return diagonal.maximum(_RESOLVED * largest)

    def _column_squares(self) -> Tensor:
        """``|f_a|^2``: how much of each eigenvector is on the cells of the rows. shape: (*batch, p)"""
        ones = torch.ones(self.num_rows, 1, dtype=torch.float64, device=self.index.device)
        counts = self._spread(ones)
        squares = kron_matmul([q.square() for q in self._transposed], counts)
        return select_cells(squares, self.basis_index).squeeze(-1)

    def product_of(self, eigenvalues: Sequence[Tensor]) -> Tensor:
        """The p products of eigenvalues, from those of the columns in use on each axis. shape: (*batch, p)"""
        return product_at(eigenvalues, self._local)

    def _gram(self, diagonal: Tensor) -> Tensor:
        """``F' D^-1 F``, differentiable in D."""
        if not self._leading:
            return diagonal.new_zeros(0, 0)
        weights = diagonal.reciprocal().expand(*diagonal.shape[:-1], self.num_rows).unsqueeze(-1)
        grid_weights = self._spread(weights).squeeze(-1)
        return masked_gram(self.vectors, self._local, grid_weights)

    def _core(self, coefficients: Tensor, diagonal: Tensor, root: Tensor | None) -> Tensor:
        """``I + [F B, R]' D^-1 [F B, R]``. shape: (*batch, p + r, p + r)"""
        gram = self._gram(diagonal) if self.unit_gram is None else self.unit_gram / diagonal.unsqueeze(-1)
        scale = lifted_root(coefficients)
        core = scale.unsqueeze(-1) * gram * scale.unsqueeze(-2)
        if root is not None:
            weighted = root / diagonal.unsqueeze(-1)
            cross = scale.unsqueeze(-1) * self.project(weighted)  # shape: (*batch, p, r)
            corner = root.mT @ weighted
            core, cross, corner = same_batch(core, cross, corner)
            core = torch.cat([torch.cat([core, cross], -1), torch.cat([cross.mT, corner], -1)], -2)
        return core + torch.eye(self.rank, dtype=core.dtype, device=core.device)

    def project(self, x: Tensor) -> Tensor:
        """``F' x``. shape: (*batch, N, C) -> (*batch, p, C)"""
        if not self._leading:
            return x[..., :0, :]
        return select_cells(kron_matmul(self._transposed, self._spread(x)), self.basis_index)

    def expand(self, coefficients: Tensor) -> Tensor:
        """``F c``. shape: (*batch, p, C) -> (*batch, N, C)"""
        if not self._leading:
            return coefficients.new_zeros(*coefficients.shape[:-2], self.num_rows, coefficients.size(-1))
        basis = spread_cells(coefficients, self.basis_index, math.prod(self._basis_shape))
        return self._select(kron_matmul(self.vectors, basis))

    def solve(self, x: Tensor) -> Tensor:
        """``P^-1 x``, in the precision of x. shape: (*batch, N, C)"""
        if x.dtype == torch.float32 and self._float32_will_do:
            return self._narrow_solve(x)
        diagonal, scale = self.diagonal.unsqueeze(-1), self.coefficients.clamp_min(0.0).sqrt().unsqueeze(-1)
        scaled = x.double() / diagonal
        inner = scale * self.project(scaled)
        if self.root is not None:
            inner = torch.cat(same_batch(inner, self.root.mT @ scaled), -2)
        inner = solve_from(self._cholesky, inner)
        image = self.expand(scale * inner[..., : self._leading, :])
        if self.root is not None:
            image = image + self.root @ inner[..., self._leading :, :]
        return (scaled - image / diagonal).to(x.dtype)

    @cached_property
    def _float32_will_do(self) -> bool:
        """Whether float32 saves time, and rounding of ``eps max(c) / min(D)`` is small enough for a preconditioner."""
        ratio = self.coefficients.amax() / self.diagonal.amin() if self._leading else self.diagonal.new_zeros(())
        large = self.num_cells >= _LARGE and self.root is None
        return large and bool(ratio * torch.finfo(torch.float32).eps < _ROUNDED)

    @cached_property
    def _narrow(self) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """The eigenvectors, transposed and not, and ``1 / D``, in float32."""
        vectors = [cast_without_denormals(q, torch.float32) for q in self.vectors]
        return vectors, [q.mT for q in vectors], self.diagonal.reciprocal().float().unsqueeze(-1)

    def _narrow_solve(self, x: Tensor) -> Tensor:
        """All but the p x p part in float32. shape: (*batch, N, C)"""
        vectors, transposed, weights = self._narrow
        scale = self.coefficients.clamp_min(0.0).sqrt().unsqueeze(-1)
        scaled = x * weights
        grid = kron_matmul(transposed, self._spread(scaled))
        inner = scale * solve_from(self._cholesky, scale * select_cells(grid, self.basis_index).double())
        basis = spread_cells(inner.float(), self.basis_index, math.prod(self._basis_shape))
        return scaled - weights * self._select(kron_matmul(vectors, basis))

    def matmul(self, x: Tensor) -> Tensor:
        """``P x``, in the precision of x. shape: (*batch, N, C)"""
        wide = x.double()
        low_rank = self.expand(self.coefficients.unsqueeze(-1) * self.project(wide))
        if self.root is not None:
            low_rank = low_rank + self.root @ (self.root.mT @ wide)
        return (low_rank + self.diagonal.unsqueeze(-1) * wide).to(x.dtype)

    def draw(self, count: int, batch: torch.Size) -> Tensor:
        """Random vectors with covariance P. shape: (*batch, N, count)"""

        def normals(rows: int) -> Tensor:
            return torch.randn(*batch, rows, count, dtype=torch.float64, device=self.diagonal.device)

        result = self.diagonal.sqrt().unsqueeze(-1) * normals(self.num_rows)
        if self._leading:
            result = result + self.expand(
                self.coefficients.clamp_min(0.0).sqrt().unsqueeze(-1) * normals(self._leading)
            )
        return result if self.root is None else result + self.root @ normals(self.root.size(-1))

    def quadratic(self, x: Tensor, coefficients: Tensor, diagonal: Tensor, root: Tensor | None) -> Tensor:
        """``x' P x`` per column, differentiable in coefficients, diagonal and root.

        `diagonal` is D. What P adds to D is treated as a constant. shape: (*batch, N, C) -> (*batch, C)
        """
        wide = x.double()
        value = ((diagonal + self.added).unsqueeze(-1) * wide.square()).sum(-2)
        if self._leading:
            value = value + (coefficients.unsqueeze(-1) * self.project(wide).square()).sum(-2)
        return value if root is None else value + (root.mT @ wide).square().sum(-2)

    def variances(self, basis: Tensor) -> tuple[Tensor, Tensor]:
        """Posterior and prior variances of ``Φ B z``, z standard normal, Φ the basis at any points.

        If P is the covariance of the data, they are ``|Φ B (I + B G B)^-1/2|^2`` and ``|Φ B|^2``, row by row, so that
        no digits cancel. R is not included. shape: (*batch, q) each
        """
        assert self.root is None
        scaled = basis * self.coefficients.clamp_min(0.0).sqrt().unsqueeze(-2)
        left = torch.linalg.solve_triangular(self._cholesky, scaled.mT, upper=False)
        return left.square().sum(-2), scaled.square().sum(-1)

    @property
    def condition(self) -> float:
        """A bound on the condition number of ``I + B G B``. The rounding of variances is about eps times this."""
        largest = float(self.coefficients.amax() / self.diagonal.amin()) if self._leading else 0.0
        return 1.0 + largest

    def basis_at(self, cells: Tensor) -> Tensor:
        """Φ: the eigenvectors at any cells of the grid. shape: (*batch, q, p)"""
        rows = unravel(cells, tuple(q.size(-2) for q in self.vectors))
        return self.basis_from([q[..., own, :] for q, own in zip(self.vectors, rows, strict=True)])

    def basis_from(self, tables: Sequence[Tensor]) -> Tensor:
        """Φ from the columns in use of each axis, at the points. shape: (*batch, q, r_i) each -> (*batch, q, p)"""
        value = tables[0][..., self._local[0]]
        for table, columns in zip(tables[1:], self._local[1:], strict=True):
            value = value * table[..., columns]
        return value

    def logdet(
        self, coefficients: Tensor | None = None, diagonal: Tensor | None = None, root: Tensor | None = None
    ) -> Tensor:
        """``log|P|``, differentiable in coefficients, diagonal and root where these are given. shape: batch

        A given diagonal is D: what P adds to it is a constant.
        """
        own = coefficients is None and diagonal is None and root is None
        coefficients = self.coefficients if coefficients is None else coefficients
        diagonal = self.diagonal if diagonal is None else diagonal + self.added
        root = self.root if root is None else root
        inner = logdet_from(self._cholesky) if own else dense_logdet(self._core(coefficients, diagonal, root))
        rows = self.num_rows if diagonal.size(-1) == 1 else 1
        return inner + rows * diagonal.log().sum(-1)
