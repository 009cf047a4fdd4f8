"""The factors of a Kronecker product: matrices, or operators with a fast product.

Tensors and operators have a common interface for sizes, batches, transposes, diagonals and casts. These functions add
the rest that algorithms need: entries, the underlying tensor, the axes of a factor, and the cost of a product.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, TypeGuard

import torch
from torch import Tensor

from gpytorch_gaps.linalg.circle_eigen import CircleBasis
from gpytorch_gaps.linalg.circulant import CirculantOperator
from gpytorch_gaps.linalg.frequencies import by_frequency
from gpytorch_gaps.linalg.positions import count
from gpytorch_gaps.utils.tensors import look_up

Factor = Tensor | CirculantOperator
Basis = Tensor | CircleBasis
"""The eigenvectors of a factor: a matrix, or an operator."""
_NEGATIVE_ROUNDING = 1e-10  # negative eigenvalues below this fraction of the largest are rounding
_SHORT_AXIS = 2048  # with at most so many levels of a regular axis, all pairs are compared


def all_dense(factors: Sequence[Factor | Basis]) -> TypeGuard[Sequence[Tensor]]:
    """Whether all factors are matrices, whose eigenvectors are columns of matrices."""
    return all(torch.is_tensor(factor) for factor in factors)


def have_eigenbases(factors: Iterable[Factor]) -> bool:
    """Whether all factors are matrices or operators on whole circles."""
    return all(torch.is_tensor(factor) or factor.is_closed for factor in factors)


def eigh_cubes(factor: Factor) -> float:
    """The cubes of the sizes of the matrices that an eigen-decomposition decomposes."""
    if torch.is_tensor(factor):
        return float(factor.size(-1)) ** 3
    return float(prod(factor.torus[:-1]) * (factor.torus[-1] // 2 + 1)) * float(factor.num_dense[0]) ** 3


def leaf(factor: Factor) -> Tensor:
    """The underlying tensor of a factor, with respect to which it is differentiated."""
    return factor.table if isinstance(factor, CirculantOperator) else factor


def with_leaf(factor: Factor, tensor: Tensor) -> Factor:
    """A factor of the same kind with another underlying tensor."""
    return factor.with_table(tensor) if isinstance(factor, CirculantOperator) else tensor


def same_kind(first: Factor, second: Factor) -> bool:
    """Whether two factors are matrices, or on the same places of the same circles."""
    if isinstance(first, CirculantOperator) and isinstance(second, CirculantOperator):
        return first.is_like(second)
    return torch.is_tensor(first) and torch.is_tensor(second)


def entrywise(first: Factor, second: Factor) -> Factor:
    """The entry-wise product of factors of the same kind."""
    if isinstance(first, CirculantOperator) and isinstance(second, CirculantOperator):
        smaller = tuple(map(min, first.torus, second.torus))
        first, second = first.on_torus(smaller), second.on_torus(smaller)
    return with_leaf(first, leaf(first) * leaf(second))


def row_places(factor: Factor, levels: Tensor) -> list[Tensor]:
    """Places of rows on the axes of a factor, computed once per row, for :func:`entries_at`."""
    return factor.row_places(levels) if isinstance(factor, CirculantOperator) else [levels]


def col_places(factor: Factor, levels: Tensor) -> list[Tensor]:
    """Places of columns, likewise."""
    return factor.col_places(levels) if isinstance(factor, CirculantOperator) else [levels]


def entries_at(
    factor: Factor, rows: Sequence[Tensor], columns: Sequence[Tensor], batch: tuple[Any, ...] = (...,)
) -> Tensor:
    """Some entries between places, which broadcast. Differentiable. shape: (*batch, *positions)"""
    if isinstance(factor, CirculantOperator):
        return factor.entries_at(rows, columns, batch)
    if batch != (...,):
        return factor[(*batch, rows[0], columns[0])]
    return look_up(factor.flatten(-2), rows[0] * factor.size(-1) + columns[0])


def factor_axes(factor: Factor) -> tuple[int, ...]:
    """Number of levels of each axis of a square factor; a block has several axes."""
    return factor.row_axes if isinstance(factor, CirculantOperator) else (factor.size(-1),)


def axis_covariances(factors: Iterable[Factor]) -> list[Tensor]:
    """Covariances along every axis of the factors, for equal levels on all others; the mean over a batch.

    Each is a matrix (m, m), or a vector (m,) by lag for a long regular axis with a stationary covariance.
    """
    every = [own for factor in factors for own in _axis_covariances(factor)]
    return [toeplitz(own) if own.dim() == 1 and len(own) <= _SHORT_AXIS else own for own in every]


def joint_covariances(factors: Sequence[Factor]) -> list[Tensor]:
    """Like :func:`axis_covariances`, but a block of a dense and a regular axis is one matrix by lag, (a, a, q).

    On the sphere, the decay of covariances along a circle of latitude depends on the latitude. If there are several
    such blocks, only the first has a matrix by lag.
    """
    found: list[Tensor] = []
    for factor in factors:
        table = None if any(own.dim() == 3 for own in found) else _matrix_by_lag(factor)
        found += axis_covariances([factor]) if table is None else [table]
    return found


def _matrix_by_lag(factor: Factor) -> Tensor | None:
    """The covariances of a dense axis by lag along a regular one, the mean over a batch; None for other factors."""
    if not isinstance(factor, CirculantOperator) or factor.num_dense == (1, 1) or len(factor.torus) != 1:
        return None
    (places,), (positions,) = factor.torus, factor.row_positions
    lag = torch.arange(count(positions), device=factor.device) % places  # both ends of a circle may be one place
    around = len(lag) >= places or 2 * len(lag) - 1 <= places
    if not around or (torch.is_tensor(positions) and not torch.equal(positions, lag)):
        return None
    return _batch_mean(factor)[..., torch.minimum(lag, places - lag)]


def _batch_mean(factor: Factor) -> Tensor:
    """The underlying tensor of a factor, detached; the mean over a batch."""
    tensor, batch = leaf(factor).detach(), len(factor.shape) - 2
    return tensor.flatten(0, batch - 1).mean(0) if batch else tensor


def toeplitz(lags: Tensor) -> Tensor:
    """The matrix of covariances by lag. shape: (m,) -> (m, m)"""
    level = torch.arange(len(lags), device=lags.device)
    return lags[(level.unsqueeze(-1) - level).abs()]


def _axis_covariances(factor: Factor) -> list[Tensor]:
    mean = _batch_mean(factor)
    if not isinstance(factor, CirculantOperator):
        return [mean]
    origin: tuple[Any, ...] = (..., *[0] * len(factor.torus))
    found = [mean[origin]] if factor.num_dense[0] > 1 else []
    lagged = mean.diagonal(dim1=0, dim2=1).mean(-1)  # shape: (n_1 // 2 + 1, ...)
    for axis, (places, positions) in enumerate(zip(factor.torus, factor.row_positions, strict=True)):
        lags = lagged[tuple(slice(None) if other == axis else 0 for other in range(lagged.dim()))]
        if not torch.is_tensor(positions) and 2 * positions - 1 <= places:
            found.append(lags[:positions])
            continue
        level = positions if torch.is_tensor(positions) else torch.arange(positions, device=lags.device)
        away = (level.unsqueeze(-1) - level).abs()
        found.append(lags[torch.minimum(away, places - away)])
    return found


def row_norm_squared(factor: Factor) -> Tensor:
    """An upper bound on the squared norm of a row, over a batch. It stays on the device."""
    return _largest_row_sum(factor, torch.square)


def row_sum(factor: Factor) -> Tensor:
    """An upper bound on the sum of absolute entries of a row, over a batch. It stays on the device."""
    return _largest_row_sum(factor, torch.abs)


def _largest_row_sum(factor: Factor, size: Callable[[Tensor], Tensor]) -> Tensor:
    if not isinstance(factor, CirculantOperator):
        return size(factor).sum(-1).max()
    sizes, torus_dims = size(factor.table), len(factor.torus)
    for axis in range(-torus_dims, 0):  # all lags except the first occur twice, on either side
        sizes = 2.0 * sizes.sum(axis, keepdim=True) - sizes.narrow(axis, 0, 1)
    return sizes.flatten(-torus_dims).squeeze(-1).sum(-1).max()


def asymmetry(factor: Factor) -> Tensor:
    """The difference of a factor and its transpose, and its size. They stay on the device. shape: (2,)"""
    if not isinstance(factor, CirculantOperator):
        return torch.stack([(factor - factor.mT).abs().amax(), factor.abs().amax()])
    table, dense_dim = factor.table, len(factor.shape) - 2
    return torch.stack([(table - table.transpose(dense_dim, dense_dim + 1)).abs().amax(), table.abs().amax()])


def symmetric_part(factor: Factor) -> Factor:
    """``(K + K') / 2``."""
    tensor, dim = leaf(factor), len(factor.shape) - 2
    return with_leaf(factor, 0.5 * (tensor + tensor.transpose(dim, dim + 1)))


def negative_share(factor: CirculantOperator) -> float:
    """The size of the most negative eigenvalue of a torus, relative to the largest; zero if it is only rounding.

    A positive definite torus has a root. If the padding is too short for a smooth covariance with a long range, the
    torus is not positive definite.
    """
    values = factor.spectrum().detach()
    if factor.num_dense != (1, 1):
        values = torch.linalg.eigvalsh(by_frequency(values, len(factor.torus)))
    share = float(-values.amin() / values.amax())
    return share if share > _NEGATIVE_ROUNDING else 0.0


def operator_product_flops(factors: Sequence[Factor | Basis], order: Iterable[int], num_rhs: int) -> float:
    """FLOPs of a product with the factors one after the other, in a given order."""
    sizes, flops = [factor.size(-1) for factor in factors], 0.0
    for i in order:
        factor, others = factors[i], prod(sizes[:i]) * prod(sizes[i + 1 :]) * num_rhs
        own = 2.0 * prod(factor.shape[-2:]) if torch.is_tensor(factor) else factor.product_flops
        flops += own * others
        sizes[i] = factor.size(-2)
    return flops
