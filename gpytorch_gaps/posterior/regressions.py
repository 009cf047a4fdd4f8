"""Regressions of points of a grid on the most correlated observations.

For a point with value f, with covariances g to noisy observations ``y_J``, ``b = (K_JJ + D_J)^-1 g``. The residual
``f - b'y_J`` has the variance ``t = var f - 2 b'g + b'(K_JJ + D_J) b``. It is computed by this formula, which holds for
rounded coefficients too. Only the rest has to be estimated from draws.

The points of a small tile of the grid share J, and therefore one factorisation. For the same cost, a point has more
neighbours, but these lie around the middle of the tile. The best size of a tile is found by trial. If a point is an
observation i in J, it is regressed on the others by ``b = -p / p_i``, with ``p`` its column of ``(K_JJ + D_J)^-1``.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from linear_operator.operators import DenseLinearOperator, LinearOperator, MatmulLinearOperator, RootLinearOperator
from torch import Tensor

from gpytorch_gaps.linalg.factors import axis_covariances, joint_covariances
from gpytorch_gaps.linalg.neighbours import correlated_rows
from gpytorch_gaps.linalg.selection import kron_entries, unravel
from gpytorch_gaps.linalg.tiles import tiles
from gpytorch_gaps.operators.noisy import NoisyGridOperator
from gpytorch_gaps.operators.selected_kronecker import SelectedKroneckerOperator
from gpytorch_gaps.posterior.train_covariance import summands

_NUM_NEIGHBOURS = 320  # largest number of neighbours
_NUM_NEIGHBOURS_OF_A_SERIES = 64  # largest number along a single axis: neighbours at both ends of a tile
_LEAST_NEIGHBOURS = 8
_TILE_POINTS = (64, 16, 4, 1)  # sizes of tiles: a smaller one is used if its t is smaller
_WORTH_MORE_TILES = 0.005  # mean relative decrease of t that four times as many factorisations must give
_TRIED_POINTS = 96  # points at which sizes are compared
_FLOPS = 1e11  # for all factorisations: about ten seconds on a core
_SHARE_OF_MEMORY = 0.5  # share of the memory for coefficients
_CHUNK_BYTES = 2.0**25  # memory for matrices that are factorised together, with intermediate results
_BYTES_PER_ENTRY = 64  # memory per entry of such a matrix
_RIDGE = 1e-10  # added to a matrix that is numerically singular, as a fraction of its diagonal


@dataclass(frozen=True)
class Regressions:
    """Coefficients b and residual variances t of some points. Points without neighbours have only t.

    :param members: points of each tile, -1 for none.
    :param rows: observations that the points of each tile are regressed on, in any order.
    :param coefficients: b in float32, which is accurate enough for t. Zero if there is no member or no observation.
    """

    members: Tensor  # shape: (tiles, p)
    rows: Tensor  # shape: (tiles, m)
    coefficients: Tensor  # shape: (tiles, p, m)
    left: Tensor  # t in float64, shape: (*batch, Q)

    @classmethod
    def on_nothing(cls, variance: Tensor) -> "Regressions":
        """Regressions without neighbours: b = 0, and t is the variance. shape: (*batch, Q)"""
        none = torch.zeros(0, 0, dtype=torch.long, device=variance.device)
        return cls(none, none, variance.new_zeros(0, 0, 0), variance)

    def fitted(self, values: Tensor) -> Tensor:
        """``b'w_J`` of values w at the observations, in float64. shape: (*batch, N, n) -> (*batch, Q, n)"""
        shape = (*values.shape[:-2], self.left.size(-1), values.size(-1))
        result = torch.zeros(shape, dtype=torch.float64, device=values.device)
        if not len(self.rows):
            return result
        size = int(max(1, _CHUNK_BYTES // (16 * self.rows.size(-1) * (values.size(-1) + self.members.size(-1)))))
        values = values.double()
        for start in range(0, len(self.rows), size):
            some = slice(start, start + size)
            found = self.coefficients[some].double() @ values[self.rows[some]]  # shape: (tiles, p, n)
            there = self.members[some] >= 0
            result[self.members[some][there]] = found[there]
        return result

    def sizes(self) -> Tensor:
        """``|b|``. shape: (Q,)"""
        result = torch.zeros(self.left.size(-1), dtype=torch.float64, device=self.left.device)
        there = self.members >= 0
        result[self.members[there]] = self.coefficients.norm(dim=-1)[there].double()
        return result


@dataclass(frozen=True)
class Neighbourhoods:
    """The observations that the points of each tile are regressed on. Regressions are computed on request.

    :param members: points of each tile, -1 for none.
    :param rows: observations that they are regressed on, integers of 32 bits, -1 for none.
    """

    members: Tensor  # shape: (tiles, p)
    rows: Tensor  # shape: (tiles, m)
    regression: "_Regression | None"  # None: on no neighbours
    variance: Tensor  # of the points, in float64, shape: (*batch, Q)

    @classmethod
    def none(cls, variance: Tensor) -> "Neighbourhoods":
        """No neighbours, for points of these variances. shape: (*batch, Q)"""
        empty = torch.zeros(0, 0, dtype=torch.long, device=variance.device)
        return cls(empty, empty, None, variance)

    def regressions(self) -> Regressions:
        """The regressions of all points."""
        if self.regression is None:
            return Regressions.on_nothing(self.variance)
        shape = *self.members.shape, self.rows.size(-1)
        coefficients = torch.empty(shape, dtype=torch.float32, device=self.variance.device)
        left = torch.empty_like(self.variance)
        for some, found, variances in self._some_at_a_time():
            coefficients[some] = found
            self._put(left, some, variances)
        return Regressions(self.members, self.rows.long().clamp_min(0), coefficients, left)

    def left(self) -> tuple[Tensor, Tensor]:
        """t and ``|b|`` of all points, without the coefficients. shape: (Q,) each"""
        left, sizes = torch.empty_like(self.variance), torch.empty_like(self.variance)
        for some, found, variances in self._some_at_a_time():
            self._put(left, some, variances)
            self._put(sizes, some, found.norm(dim=-1).double())
        return left, sizes

    def can_be_held(self, memory: float) -> bool:
        """Whether the coefficients of all points fit in their share of the memory, in bytes."""
        return 4 * self.members.numel() * self.rows.size(-1) <= _SHARE_OF_MEMORY * memory

    def of_members(self, tile: Tensor, member: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, coefficients in float64, and t, of some members of tiles. shape: (P,) each -> (P, m), (P, m), (P,)"""
        assert self.regression is not None
        points, rows = self.members[tile, member].unsqueeze(-1), self.rows[tile].long()
        found = [
            self.regression.of(points[some], rows[some]) for some in torch.arange(len(tile)).split(self._at_a_time)
        ]
        coefficients, left = (torch.cat(own).squeeze(1) for own in zip(*found, strict=True))
        return rows.clamp_min(0), coefficients.double(), left

    def _some_at_a_time(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Some tiles, coefficients of their members, and t. shape: (q, p, m) and (q, p)"""
        assert self.regression is not None
        for start in range(0, len(self.rows), self._at_a_time):
            some = slice(start, start + self._at_a_time)
            yield some, *self.regression.of(self.members[some], self.rows[some].long())

    @property
    def _at_a_time(self) -> int:
        assert self.regression is not None
        terms = (*self.regression.train, *self.regression.cross)
        return int(max(1, _CHUNK_BYTES // (_BYTES_PER_ENTRY * self.rows.size(-1) ** 2 * max(map(_width, terms)))))

    def _put(self, result: Tensor, some: slice, values: Tensor) -> None:
        there = self.members[some] >= 0
        result[self.members[some][there]] = values[there]


def neighbourhoods(
    train: LinearOperator,
    cross: LinearOperator,
    variance: Tensor,
    cells: Tensor | None,
    memory: float,
    held: bool = True,
) -> Neighbourhoods:
    """The most correlated observations. Batches, and kernels without cheap entries, get no neighbours.

    :param train: K_XX + D.
    :param cross: covariances of the points with the observations, without noise, shape (*batch, Q, N).
    :param variance: prior variances of the points in float64, shape (*batch, Q).
    :param cells: cells of the points on the training grid, shape (Q,). None if the points are the observations: each is
        then regressed on others.
    :param memory: bytes that may be used at once.
    :param held: whether the coefficients of all points will be in memory.
    """
    kernel = train._linear_op if isinstance(train, NoisyGridOperator) and not train.batch_shape else None
    first = _first_product(kernel)
    if kernel is None or first is None or not _has_entries(cross) or cross.batch_shape:
        return Neighbourhoods.none(variance)
    noise = train._diag_tensor._diagonal().detach().double()
    regression = _Regression(summands(kernel), summands(cross), noise, variance.detach(), cells is None)
    joint = [own.double() for own in joint_covariances(first.factors)]

    def around(members: Tensor, centres: Tensor, count: int) -> Neighbourhoods:
        rows = correlated_rows(joint, first.row_index, centres, count)
        return Neighbourhoods(members, rows.int(), regression, variance)

    factors = [own.double() for own in axis_covariances(first.factors)]
    places, best, least = first.row_index if cells is None else cells, None, math.inf
    picked = torch.randperm(len(places), generator=torch.Generator().manual_seed(0))[:_TRIED_POINTS].to(places.device)
    for size in _TILE_POINTS:
        centres, members = tiles(factors, places, size)
        count = _affordable(members, train.size(-1), len(factors), memory, held)
        if count < min(train.size(-1), size):
            continue
        there = torch.isin(members, picked).nonzero()  # shape: (P, 2)
        tile, where = there[:, 0].unique(return_inverse=True)
        tried = around(members[tile], centres[tile], count).of_members(where, there[:, 1])[-1]
        left = float(tried.clamp_min(torch.finfo(tried.dtype).tiny).log().mean())
        if best is None or left < least - _WORTH_MORE_TILES:
            best, least = (members, centres, count), left
    assert best is not None  # a tile of one point is always tried
    return around(*best)


def _affordable(members: Tensor, num_rows: int, num_axes: int, memory: float, held: bool) -> int:
    """The number of neighbours of each tile, limited by memory and work."""
    most = _NUM_NEIGHBOURS if num_axes > 1 else min(_NUM_NEIGHBOURS, _NUM_NEIGHBOURS_OF_A_SERIES)
    by_memory = _SHARE_OF_MEMORY * memory / (4 * members.numel() if held else 4 * len(members))
    by_flops = (3.0 * _FLOPS / len(members)) ** (1.0 / 3.0)
    return int(min(num_rows, most, max(_LEAST_NEIGHBOURS, min(by_memory, by_flops))))


@dataclass(frozen=True)
class _Regression:
    """The covariances that the regressions of all tiles use.

    :param train: terms of K_XX.
    :param cross: terms of the points' covariances with the observations.
    :param noise: noise variances of the observations, shape (N,).
    :param variance: prior variances of the points, shape (Q,).
    :param leaves_out: whether the points are the observations, each regressed on others.
    """

    train: Sequence[LinearOperator]
    cross: Sequence[LinearOperator]
    noise: Tensor
    variance: Tensor
    leaves_out: bool

    def of(self, members: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Coefficients in float32, and residual variances, of some tiles. shape: (q, p, m) and (q, p)"""
        absent, missing = (members < 0).unsqueeze(-1), (rows < 0).unsqueeze(-2)
        points, rows = members.clamp_min(0), rows.clamp_min(0)
        among = _entries(self.train, rows.unsqueeze(-1), rows.unsqueeze(-2))  # shape: (q, m, m)
        among = among.masked_fill(missing | missing.mT, 0.0)
        among = among + torch.diag_embed(self.noise[rows].masked_fill(missing.squeeze(-2), 1.0))
        across = _entries(self.cross, points.unsqueeze(-1), rows.unsqueeze(-2)).masked_fill(missing | absent, 0.0)
        own = (points.unsqueeze(-1) == rows.unsqueeze(-2)) & ~missing & self.leaves_out  # shape: (q, p, m)
        solved = _solve(among, torch.where(own.any(-1, keepdim=True), own.double(), across).mT).mT
        of_own = (solved * own).sum(-1, keepdim=True)
        solved = torch.where(own.any(-1, keepdim=True), -solved / of_own, solved).masked_fill(own | absent, 0.0)
        coefficients = solved.nan_to_num(0.0, 0.0, 0.0).float()
        wide = coefficients.double()
        return coefficients, self.variance[points] + (wide * (wide @ among - 2.0 * across)).sum(-1)


def _solve(matrices: Tensor, columns: Tensor) -> Tensor:
    """Solutions. A small ridge is added to matrices that are numerically singular."""
    factors, failed = torch.linalg.cholesky_ex(matrices)
    if bool(failed.any()):
        singular = failed != 0
        ridge = torch.diag_embed(_RIDGE * matrices[singular].diagonal(dim1=-2, dim2=-1))
        factors[singular] = torch.linalg.cholesky_ex(matrices[singular] + ridge)[0]
    return torch.cholesky_solve(columns, factors)


def _first_product(kernel: LinearOperator | None) -> SelectedKroneckerOperator | None:
    """The Kronecker product whose correlations determine the neighbours; None for kernels without cheap entries."""
    if kernel is None or not _has_entries(kernel):
        return None
    return next((op for op in summands(kernel) if isinstance(op, SelectedKroneckerOperator)), None)


def _has_entries(covariance: LinearOperator) -> bool:
    """Whether a single entry of a covariance costs only a look-up or a few products."""
    known = SelectedKroneckerOperator | RootLinearOperator | DenseLinearOperator | MatmulLinearOperator
    return all(isinstance(term, known) for term in summands(covariance))


def _width(term: LinearOperator) -> int:
    """How many numbers are read for one entry."""
    if isinstance(term, RootLinearOperator):
        return max(1, term.root.size(-1))
    return max(1, term.left_linear_op.size(-1)) if isinstance(term, MatmulLinearOperator) else 1


def _entries(terms: Sequence[LinearOperator], rows: Tensor, columns: Tensor) -> Tensor:
    """Entries of a covariance, in float64; rows and columns broadcast."""
    total: Tensor | float = 0.0
    for op in terms:
        if isinstance(op, SelectedKroneckerOperator):
            cells = unravel(op.row_index[rows], op.row_shape), unravel(op.col_index[columns], op.col_shape)
            total = total + kron_entries([factor.detach().double() for factor in op.factors], *cells)
        else:
            total = total + op._get_indices(*torch.broadcast_tensors(rows, columns)).detach().double()
    assert torch.is_tensor(total)
    return total
