"""Joint draws of the prior at the observations and at test points, from the covariances of a prediction.

A covariance is a sum of terms, and a draw is a sum of independent draws. For ``K = (x) K_i`` with ``K_i = R_i R_i'``:

    test points on the grid        f = (x) R_i z contains both
    on blocks of axes              the root of a torus, by FFT; its rows are the observations and the test points
    on a grid of their own         R_i of ``[[K_i(a, a), K_i(a, t)], [K_i(t, a), K_i(t, t)]]``: with the same z, its
                                   rows a give the observations and its rows t the test points
    scattered                      f_* = B z + w. B[q] = (x) K_i(x_q, a) R_i^+' is the part of a point that the grid
                                   determines, and w has the remaining covariance ``K_** - B B'``
    low-rank terms                 R z, with the same z for both
    others                         a dense root of the joint covariance

All roots are exact and differentiable.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from linear_operator import to_dense
from linear_operator.operators import LinearOperator, RootLinearOperator
from torch import Tensor

from gpytorch_gaps.autograd.kernel_root import directions, kernel_root
from gpytorch_gaps.linalg.factors import Factor, all_dense
from gpytorch_gaps.linalg.khatri_rao import khatri_rao_matmul
from gpytorch_gaps.linalg.products import kron_matmul
from gpytorch_gaps.linalg.selection import select_cells
from gpytorch_gaps.operators.interpolated_kronecker import InterpolatedKroneckerOperator
from gpytorch_gaps.operators.khatri_rao import KhatriRaoOperator
from gpytorch_gaps.operators.noisy import NoisyGridOperator
from gpytorch_gaps.operators.selected_kronecker import SelectedKroneckerOperator
from gpytorch_gaps.posterior.train_covariance import summands
from gpytorch_gaps.posterior.wide_roots import has_two_roots, joint_covariance, joint_root, two_wide_roots, wide_root
from gpytorch_gaps.utils.tensors import same_values

_GridOperator = SelectedKroneckerOperator | InterpolatedKroneckerOperator

_MOST_NUMBERS_PER_CELL = 4  # standard normal numbers per cell for one draw
_DETERMINED = 1e-10  # a remaining variance below this fraction of the prior's counts as rounding


class _Term(Protocol):
    sizes: list[int]  # how many standard normal numbers each part of one draw takes

    def draw(self, *normals: Tensor) -> tuple[Tensor, Tensor]:
        """Draws at the observations and at the test points. shape: (*batch, size, n) each -> (*batch, N or Q, n)"""


def normal_columns(
    sizes: Sequence[int], count: int, like: LinearOperator, generator: torch.Generator | None = None
) -> list[Tensor]:
    """Standard normal numbers for `count` draws, generated one draw after the other.

    The first draws therefore do not depend on `count`.

    :param sizes: how many numbers each part of a draw takes.
    :param like: an operator with the batch shape, precision and device of the result.
    :return: one tensor for each size. shape: (*batch, size, count)
    """
    kind: dict[str, Any] = {"dtype": like.dtype, "device": like.device, "generator": generator}
    draws = [[torch.randn(*like.batch_shape, size, **kind) for size in sizes] for _ in range(count)]
    return [torch.stack(column, -1) for column in zip(*draws, strict=True)]


class JointDraws:
    """Joint draws, with mean zero, of noisy observations and of the function at test points.

    :param prior: K_**, evaluated, shape (*batch, Q, Q).
    :param cross: K_*X, evaluated, shape (*batch, Q, N).
    :param train: K_XX + D, shape (*batch, N, N).
    :param cells: cells of the test points, if all of them lie on the training grid, shape (Q,).
    :param memory: bytes that a dense root may take.
    """

    def __init__(
        self, prior: LinearOperator, cross: LinearOperator, train: LinearOperator, cells: Tensor | None, memory: float
    ) -> None:
        self._batch = train.batch_shape
        self._noise: Tensor | None = None
        terms: list[_Term] = []
        if isinstance(train, NoisyGridOperator):
            self._noise = train._diag_tensor._diagonal()
            parts = [summands(op) for op in (prior, cross, train._linear_op)]
            if len(set(map(len, parts))) == 1:
                terms = [_term(here, across, there, cells, memory) for here, across, there in zip(*parts, strict=True)]
            else:
                terms = [_Dense(prior, cross, train._linear_op, memory)]
        else:  # the noise is part of the matrix, and need not be separate
            terms = [_Dense(prior, cross, train, memory)]
        self._terms = terms

    @property
    def size(self) -> int:
        """How many standard normal numbers one draw takes."""
        return self._batch.numel() * sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """How many standard normal numbers each part of one draw takes."""
        own = [size for term in self._terms for size in term.sizes]
        return own if self._noise is None else [*own, self._noise.size(-1)]

    def draw(self, normals: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Draws from given standard normal numbers. shape: (*batch, size, count) each

        :return: y_X and f_*. shape: (*batch, N, count) and (*batch, Q, count)
        """
        noise = [] if self._noise is None else [self._noise.sqrt().unsqueeze(-1) * normals.pop()]
        draws = []
        for term in self._terms:
            own, normals = normals[: len(term.sizes)], normals[len(term.sizes) :]
            draws.append(term.draw(*own))
        observed, tested = zip(*draws, strict=True)
        return _total([*observed, *noise]), _total(tested)


def _total(parts: Sequence[Tensor]) -> Tensor:
    first, *others = parts
    for other in others:
        first = first + other
    return first


def _term(
    prior: LinearOperator, cross: LinearOperator, train: LinearOperator, cells: Tensor | None, memory: float
) -> _Term:
    interpolated = all(isinstance(op, InterpolatedKroneckerOperator) for op in (train, prior))
    if interpolated and prior.is_symmetric and prior.row_shape == train.row_shape:
        return _OnGrid(prior, train)
    if isinstance(train, SelectedKroneckerOperator):
        tested = isinstance(prior, SelectedKroneckerOperator) and prior.is_symmetric
        against = isinstance(cross, SelectedKroneckerOperator | KhatriRaoOperator) and _against(cross, train)
        if tested and isinstance(cross, SelectedKroneckerOperator) and against:
            alike = prior.row_shape == cross.row_shape and same_values(prior.row_index, cross.row_index)
            here = cells is not None and same_values(prior.row_index, cells)
            # test points on a part of the training grid have other cells in `cross`
            if prior.row_shape == train.row_shape and (here or not alike):
                return _OnGrid(prior, train)
            if alike and all(map(has_two_roots, train.factors, cross.factors, prior.factors)):
                return _OnTwoGrids(prior, cross, train)
        elif isinstance(cross, KhatriRaoOperator) and against and not cross.transposed and all_dense(train.factors):
            return _Scattered(prior, cross, train, memory)
    if (
        isinstance(train, RootLinearOperator)
        and isinstance(prior, RootLinearOperator)
        and _share_root(prior, cross, train)
    ):
        return _LowRank(prior, train)
    return _Dense(prior, cross, train, memory)


def _share_root(prior: RootLinearOperator, cross: LinearOperator, train: RootLinearOperator) -> bool:
    """Whether both roots have the same features, ``R_* R_X' = K_*X``, as with a linear kernel."""
    if prior.root.size(-1) != train.root.size(-1):
        return False
    some = slice(0, 8)
    test_root, train_root = to_dense(prior.root)[..., some, :], to_dense(train.root)[..., some, :]
    difference = (test_root @ train_root.mT - to_dense(cross[..., some, some])).abs()
    return bool((difference <= 1e-5 * test_root.norm(dim=-1).amax() * train_root.norm(dim=-1).amax()).all())


def _against(cross: SelectedKroneckerOperator | KhatriRaoOperator, train: SelectedKroneckerOperator) -> bool:
    return cross.col_shape == train.row_shape and same_values(cross.col_index, train.row_index)


class _OnGrid:
    """The process on the grid, at cells or interpolated."""

    def __init__(self, prior: _GridOperator, train: _GridOperator) -> None:
        self._train, self._test, self._rotations = train, prior, None
        # use the factors of the prior: those of the observations may be detached
        if all_dense(prior.factors):
            self._roots: list[Factor] = [kernel_root(factor)[0].to(train.dtype) for factor in prior.factors]
            self._rotations = _rotations(self._roots)
            self.sizes = [math.prod(train.row_shape)]
        else:
            self._roots = [wide_root(factor).to(train.dtype) for factor in prior.factors]
            self.sizes = [math.prod(root.size(-1) for root in self._roots)]

    def draw(self, *normals: Tensor) -> tuple[Tensor, Tensor]:
        z = normals[0] if self._rotations is None else kron_matmul(self._rotations, normals[0])
        grid = kron_matmul(self._roots, z)
        return _at_rows(grid, self._train), _at_rows(grid, self._test)


def _at_rows(grid: Tensor, op: _GridOperator) -> Tensor:
    """Values of a process on the grid at the rows of its covariance. shape: (*batch, M, C) -> (*batch, N, C)"""
    if isinstance(op, InterpolatedKroneckerOperator):
        return op.rows.select(grid)
    return select_cells(grid, op.row_index)


class _OnTwoGrids:
    def __init__(
        self, prior: SelectedKroneckerOperator, cross: SelectedKroneckerOperator, train: SelectedKroneckerOperator
    ) -> None:
        sides = list(zip(train.factors, cross.factors, prior.factors, strict=True))
        self._train_index, self._test_index, self._rotations = train.row_index, prior.row_index, None
        if not all_dense(cross.factors):
            pairs = [two_wide_roots(*factors) for factors in sides]
            self._train_roots, self._test_roots = (
                [own.to(train.dtype) for own in part] for part in zip(*pairs, strict=True)
            )
            self.sizes = [math.prod(root.size(-1) for root in self._train_roots)]
            return
        roots = [joint_root(*factors).to(train.dtype) for factors in sides]
        sizes = train.row_shape
        self._train_roots = [root[..., :size, :] for root, size in zip(roots, sizes, strict=True)]
        self._test_roots = [root[..., size:, :] for root, size in zip(roots, sizes, strict=True)]
        numbers = math.prod(root.size(-2) for root in roots)
        # if the grids differ on several axes, the product of all sizes may be far too large
        few = numbers <= _MOST_NUMBERS_PER_CELL * (math.prod(train.row_shape) + math.prod(prior.row_shape))
        self._rotations = _rotations(roots) if few else None
        self.sizes = [numbers if few else math.prod(root.size(-1) for root in roots)]

    def draw(self, *normals: Tensor) -> tuple[Tensor, Tensor]:
        z = normals[0] if self._rotations is None else kron_matmul(self._rotations, normals[0])
        at_train = select_cells(kron_matmul(self._train_roots, z), self._train_index)
        return at_train, select_cells(kron_matmul(self._test_roots, z), self._test_index)


class _Scattered:
    def __init__(
        self, prior: LinearOperator, cross: KhatriRaoOperator, train: SelectedKroneckerOperator, memory: float
    ) -> None:
        pairs = [kernel_root(factor) for factor in train.factors]
        self._roots = [root.to(train.dtype) for root, _ in pairs]
        known = [factor.double() @ inverse for factor, (_, inverse) in zip(cross.factors, pairs, strict=True)]
        self._known = [table.to(train.dtype) for table in known]  # shape: (*batch, Q, r_i) each
        self._train_index = train.row_index
        self._left = _remaining_root(prior, known, memory)
        self._rotations = _rotations(self._roots)
        self.sizes = [math.prod(train.row_shape), *([] if self._left is None else [prior.size(-1)])]

    def draw(self, *normals: Tensor) -> tuple[Tensor, Tensor]:
        z = kron_matmul(self._rotations, normals[0])
        at_test = khatri_rao_matmul(self._known, z)
        if self._left is not None:
            left = self._left.to(z.dtype)
            at_test = at_test + left @ (directions(left).mT @ normals[1])
        return select_cells(kron_matmul(self._roots, z), self._train_index), at_test


class _LowRank:
    def __init__(self, prior: RootLinearOperator, train: RootLinearOperator) -> None:
        self._train_root, self._test_root = to_dense(train.root), to_dense(prior.root)
        self.sizes = [self._train_root.size(-1)]

    def draw(self, *normals: Tensor) -> tuple[Tensor, Tensor]:
        return self._train_root @ normals[0], self._test_root @ normals[0]


class _Dense:
    def __init__(self, prior: LinearOperator, cross: LinearOperator, train: LinearOperator, memory: float) -> None:
        self._rows = train.size(-1)
        _check_memory("draws of a kernel without a grid", self._rows + prior.size(-1), memory)
        self._root = kernel_root(joint_covariance(to_dense(train), to_dense(cross), to_dense(prior)))[0].to(train.dtype)
        self.sizes = [self._root.size(-2)]

    def draw(self, *normals: Tensor) -> tuple[Tensor, Tensor]:
        both = self._root @ (directions(self._root).mT @ normals[0])
        return both[..., : self._rows, :], both[..., self._rows :, :]


def _rotations(roots: Sequence[Tensor]) -> list[Tensor]:
    """``Q_r'`` of each root. It maps one normal number per row of the root to one per column."""
    return [directions(root).mT for root in roots]


def _remaining_root(prior: LinearOperator, known: Sequence[Tensor], memory: float) -> Tensor | None:
    """A root of ``K_** - B B'``; None if the grid determines the points. shape: (*batch, Q, r)"""
    variance = prior.diagonal(dim1=-1, dim2=-2).double()
    determined = torch.ones_like(variance)
    for table in known:
        determined = determined * table.square().sum(-1)
    floor = _DETERMINED * float(variance.detach().amax()) if variance.numel() else 0.0
    if not variance.numel() or float((variance - determined).detach().amax()) <= floor:
        return None
    _check_memory("joint draws at scattered points", variance.size(-1), memory)
    gram = torch.ones_like(to_dense(prior).double())
    for table in known:
        gram = gram * (table @ table.mT)
    return kernel_root(to_dense(prior).double() - gram, floor)[0]


def _check_memory(what: str, rows: int, allowed: float) -> None:
    needed = 40.0 * rows**2
    if needed > allowed:
        raise ValueError(
            f"sample: {what} need a dense matrix of {rows} x {rows}, {needed / 2**30:.1f} GiB with its root; expected "
            f"at most prediction_memory, {allowed / 2**30:.1f} GiB. Try: points on a grid, fewer points at a time, or "
            "a larger settings.prediction_memory(...)"
        )
