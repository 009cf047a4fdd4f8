"""Regressions of points of a grid on the most correlated observations.

For a point of value f, with covariances g to noisy observations ``y_J``, ``b = (K_JJ + D_J)^-1 g``. What ``b'y_J``
leaves of f has the variance ``t = var f - 2 b'g + b'(K_JJ + D_J) b``. It is computed as written, so that it holds for
the coefficients as they are rounded and stored. Estimates from draws then cover only what neighbours leave.

Points of a small tile of the grid share J, and so one factorisation: for the same work, a point has more neighbours.
An observation i in J that is itself regressed, on the others, takes ``b = -p / p_i`` with ``p`` its column of
``(K_JJ + D_J)^-1``.
"""

from collections.abc import Sequence
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

_NUM_NEIGHBOURS = 320  # at most
_NUM_NEIGHBOURS_OF_A_SERIES = 64  # at most, along one axis: those at both ends of a tile
_LEAST_NEIGHBOURS = 8
_TILE_POINTS = (64, 16, 4, 1)  # that may share their neighbours
_NEIGHBOURS_PER_POINT = 4  # of a tile, at least: those of few neighbours lie around its middle
_NEIGHBOURS_PER_POINT_OF_A_SERIES = 2
_FLOPS = 1e11  # for all factorisations: about ten seconds on a core
_SHARE_OF_MEMORY = 0.5  # for coefficients
_CHUNK_BYTES = 2.0**25  # matrices that are factorised together, with what is made on the way to them
_BYTES_PER_ENTRY = 64  # of such a matrix
_RIDGE = 1e-10  # of the variances, where a matrix is singular to working precision


@dataclass(frozen=True)
class Regressions:
    """Coefficients b and residual variances t of some points; t alone where no neighbours are known.

    :param members: points of each tile, -1 for none.
    :param rows: observations that they are regressed on, in any order.
    :param coefficients: zero where there is no member, or no observation. In float32, as is enough for t.
    """

    members: Tensor  # shape: (tiles, p)
    rows: Tensor  # shape: (tiles, m)
    coefficients: Tensor  # shape: (tiles, p, m)
    left: Tensor  # t in float64, shape: (*batch, Q)

    @classmethod
    def on_nothing(cls, variance: Tensor) -> "Regressions":
        """b = 0, and t the variance itself. shape: (*batch, Q)"""
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


def regressions(
    train: LinearOperator, cross: LinearOperator, variance: Tensor, cells: Tensor | None, memory: float
) -> Regressions:
    """Regressions on the most correlated observations; on none in a batch, or for kernels without single entries.

    :param train: K_XX + D.
    :param cross: covariances of the points with the observations, without noise, shape (*batch, Q, N).
    :param variance: of the points, in float64, shape (*batch, Q).
    :param cells: of the training grid, of the points. None: the points are the observations themselves, each of which
        is regressed on others. shape (Q,).
    :param memory: bytes that may be held at once.
    """
    kernel = train._linear_op if isinstance(train, NoisyGridOperator) and not train.batch_shape else None
    first = _first_product(kernel)
    if kernel is None or first is None or not _has_entries(cross) or cross.batch_shape:
        return Regressions.on_nothing(variance)
    factors = [own.double() for own in axis_covariances(first.factors)]
    centres, members, count = _shared(factors, first.row_index if cells is None else cells, train.size(-1), memory)
    rows = correlated_rows([own.double() for own in joint_covariances(first.factors)], first.row_index, centres, count)
    noise = train._diag_tensor._diagonal().detach().double()
    regression = _Regression(summands(kernel), summands(cross), noise, variance.detach(), cells is None)
    bytes_each = _BYTES_PER_ENTRY * count**2 * max(map(_width, (*regression.train, *regression.cross)))
    size = int(max(1, min(memory, _CHUNK_BYTES) // bytes_each))
    coefficients = torch.empty(*members.shape, count, dtype=torch.float32, device=variance.device)
    left = torch.empty_like(variance)
    for start in range(0, len(rows), size):
        some = slice(start, start + size)
        coefficients[some], variances = regression.of(members[some], rows[some])
        there = members[some] >= 0
        left[members[some][there]] = variances[there]
    return Regressions(members, rows.clamp_min(0), coefficients, left)


def _shared(factors: Sequence[Tensor], cells: Tensor, num_rows: int, memory: float) -> tuple[Tensor, Tensor, int]:
    """Centres and members of tiles, and as many neighbours as memory for coefficients, and time, allow."""
    most, per_point = _NUM_NEIGHBOURS, _NEIGHBOURS_PER_POINT
    if len(factors) == 1:
        most, per_point = min(most, _NUM_NEIGHBOURS_OF_A_SERIES), _NEIGHBOURS_PER_POINT_OF_A_SERIES
    for size in _TILE_POINTS:
        centres, members = tiles(factors, cells, size)
        by_memory = _SHARE_OF_MEMORY * memory / (4 * members.numel())
        by_flops = (3.0 * _FLOPS / len(members)) ** (1.0 / 3.0)
        count = int(min(num_rows, most, max(_LEAST_NEIGHBOURS, min(by_memory, by_flops))))
        if count >= min(num_rows, per_point * size):
            break
    return centres, members, count


@dataclass(frozen=True)
class _Regression:
    """What the regressions of all tiles share.

    :param train: terms of K_XX.
    :param cross: terms of the points' covariances with the observations.
    :param leaves_out: whether the points are the observations, to be regressed on others.
    """

    train: Sequence[LinearOperator]
    cross: Sequence[LinearOperator]
    noise: Tensor
    variance: Tensor
    leaves_out: bool

    def of(self, members: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Coefficients, in float32, and residual variances of some tiles. shape: (q, p, m) and (q, p)"""
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
    """Solutions, of slightly larger matrices where these are singular to working precision."""
    factors, failed = torch.linalg.cholesky_ex(matrices)
    if bool(failed.any()):
        singular = failed != 0
        ridge = torch.diag_embed(_RIDGE * matrices[singular].diagonal(dim1=-2, dim2=-1))
        factors[singular] = torch.linalg.cholesky_ex(matrices[singular] + ridge)[0]
    return torch.cholesky_solve(columns, factors)


def _first_product(kernel: LinearOperator | None) -> SelectedKroneckerOperator | None:
    """The Kronecker product by whose correlations neighbours are chosen; None for kernels without single entries."""
    if kernel is None or not _has_entries(kernel):
        return None
    return next((op for op in summands(kernel) if isinstance(op, SelectedKroneckerOperator)), None)


def _has_entries(covariance: LinearOperator) -> bool:
    """Whether single entries of a covariance cost no more than a look-up, or a few products."""
    known = SelectedKroneckerOperator | RootLinearOperator | DenseLinearOperator | MatmulLinearOperator
    return all(isinstance(term, known) for term in summands(covariance))


def _width(term: LinearOperator) -> int:
    """Numbers that are visited for one entry."""
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
