"""Stationary covariances on regular axes: blocks of a circulant matrix, multiplied by FFT.

On a regular axis, the covariance of two levels depends only on their lag. On a circle of n places, with n at least
twice the largest lag, it becomes a circulant matrix C, which the Fourier transform diagonalises. The padding is treated
as gaps. Several such axes form a torus. With a further, dense axis, there is one matrix for every frequency::

    K = W_r C W_c',    C = F* L F,    L = F t,      t: covariance by lag

W_r and W_c select places of the torus, so products are exact, whether or not C itself is positive definite.

>>> lags = torch.exp(-torch.arange(5.0, dtype=torch.float64)).reshape(1, 1, 5)
>>> covariance = CirculantOperator(lags, torus=(8,), row_positions=(4,))
>>> distance = (torch.arange(4.0).unsqueeze(-1) - torch.arange(4.0)).abs().double()
>>> torch.allclose(covariance @ torch.eye(4, dtype=torch.float64), torch.exp(-distance))
True
"""

import math
from collections.abc import Sequence
from operator import gt
from typing import Any, Self

import torch
from linear_operator.operators import LinearOperator
from linear_operator.utils.getitem import _is_noop_index
from torch import Tensor

from gpytorch_gaps.linalg.frequencies import filtered, from_frequencies, stored_by_frequency, to_frequencies
from gpytorch_gaps.linalg.positions import Positions, axes_of, count, places_of, same_positions
from gpytorch_gaps.linalg.short_range import ShortRange
from gpytorch_gaps.utils.tensors import look_up

_CACHED_NUMBERS = 2**18  # numbers that are transformed together: 2 MiB
_NUMBERS_PER_MATRIX = 2**22  # the same with a dense axis: few passes over its matrices, one for every frequency
FFT_SLOWDOWN = 4.0  # time of an FFT, relative to a matrix product with as many FLOPs


class CirculantOperator(LinearOperator):
    """The covariance of a block of axes: dense along the first, stationary and even along each of the others.

    Cells of the block are numbered with the last axis fastest.

    :param table: covariance by lag, shape (*batch, a, b, n_1 // 2 + 1, ..., n_s // 2 + 1): a and b levels of the dense
        axis (one each if there is none), and lags from 0 to half the circle. Lags l and n - l are the same.
    :param torus: n_i, the number of places on the circle of each stationary axis.
    :param row_positions: places of the rows on the circle of each stationary axis: shape (q_i,) each, or the number q_i
        for the first places.
    :param col_positions: places of the columns, likewise. Default: `row_positions`.
    :param inner: smaller circles that contain all lags of rows and columns. Products use these. The torus itself may be
        larger, so that it is positive definite. Default: `torus`.
    :raises ValueError: if the table does not match the torus.

    Cost of a product: two FFTs of the inner torus, and ``a b`` times its size if there is a dense axis.
    """

    def __init__(
        self,
        table: Tensor,
        *,
        torus: Sequence[int],
        row_positions: Sequence[Positions],
        col_positions: Sequence[Positions] | None = None,
        inner: Sequence[int] | None = None,
    ) -> None:
        torus, row_positions = tuple(torus), tuple(row_positions)
        inner = torus if inner is None else tuple(inner)
        col_positions = row_positions if col_positions is None else tuple(col_positions)
        wanted = tuple(places // 2 + 1 for places in torus)
        if table.dim() < len(torus) + 2 or tuple(table.shape[table.dim() - len(torus) :]) != wanted:
            raise ValueError(
                f"CirculantOperator: table: got shape {tuple(table.shape)}, expected (*batch, a, b, "
                f"{', '.join(map(str, wanted))}) for a torus of {torus}"
            )
        for name, own in (("row_positions", row_positions), ("col_positions", col_positions), ("inner", inner)):
            if len(own) != len(torus):
                raise ValueError(f"CirculantOperator: {name}: got {len(own)}, expected {len(torus)}, as the torus")
        if any(map(gt, inner, torus)):
            raise ValueError(f"CirculantOperator: inner: got {inner}, expected at most the torus of {torus}")
        sides = {"row_positions": row_positions, "col_positions": col_positions}
        super().__init__(table, torus=torus, inner=inner, **sides)
        self.table, self.torus, self.inner = table, torus, inner
        self.row_positions, self.col_positions = row_positions, col_positions
        self._spectra: dict[tuple[torch.dtype, tuple[int, ...]], Tensor] = {}
        self._short_ranges: dict[torch.dtype, ShortRange | None] = {}

    # -- structure -----------------------------------------------------------------------------------------------------

    @property
    def num_dense(self) -> tuple[int, int]:
        """Levels of the dense axis, in rows and columns."""
        rows, columns = self.table.shape[self._dense_dim : self._dense_dim + 2]
        return rows, columns

    @property
    def _dense_dim(self) -> int:
        """The first dimension of the table after the batch dimensions."""
        return self.table.dim() - len(self.torus) - 2

    @property
    def row_axes(self) -> tuple[int, ...]:
        """Number of levels of every axis of the block, for rows. The dense axis, if there is one, is the first."""
        return axes_of(self.num_dense[0], self.row_positions)

    @property
    def col_axes(self) -> tuple[int, ...]:
        return axes_of(self.num_dense[1], self.col_positions)

    @property
    def is_symmetric(self) -> bool:
        """Whether rows and columns are the same places."""
        alike = all(map(same_positions, self.row_positions, self.col_positions))
        return self.num_dense[0] == self.num_dense[1] and alike

    @property
    def is_closed(self) -> bool:
        """Whether rows and columns are all places of every circle: then the eigenvectors are known."""
        whole = all(map(same_positions, self.row_positions, self.torus))
        return whole and self.is_symmetric and self.inner == self.torus

    def is_like(self, other: "CirculantOperator") -> bool:
        """Whether rows and columns are at the same places of the same circles as those of another operator."""
        if self.inner != other.inner or self.num_dense != other.num_dense:
            return False
        sides = (*self.row_positions, *self.col_positions), (*other.row_positions, *other.col_positions)
        return all(map(same_positions, *sides))

    @property
    def product_flops(self) -> float:
        """The cost of a product with one column, in FLOPs of matrix products."""
        places = math.prod(self.inner)
        transforms = 2.5 * places * math.log2(max(2, places)) * sum(self.num_dense)
        return FFT_SLOWDOWN * transforms + 2.0 * places * math.prod(self.num_dense)

    def _size(self) -> torch.Size:
        rows, columns = math.prod(self.row_axes), math.prod(self.col_axes)
        return torch.Size((*self.table.shape[: self._dense_dim], rows, columns))

    def with_table(self, table: Tensor) -> Self:
        """The same places with other covariances."""
        return type(self)(table, **self._kwargs)

    def on_torus(self, torus: tuple[int, ...]) -> "CirculantOperator":
        """The same covariance on another torus, not smaller than the inner one and not larger than its own."""
        table = self.table
        for dim, places in zip(self._torus_dims, torus, strict=True):
            table = table.narrow(dim, 0, places // 2 + 1)
        return CirculantOperator(table, **{**self._kwargs, "torus": torus})

    # -- products ----------------------------------------------------------------------------------------------------

    def spectrum(self, dtype: torch.dtype = torch.float64, inner: bool = False) -> Tensor:
        """L, real since the table is even. shape: (*batch, a, b, n_1, ..., n_s // 2 + 1)"""
        known = not (self.table.requires_grad and torch.is_grad_enabled())
        torus = self.inner if inner else self.torus
        if known and (dtype, torus) in self._spectra:
            return self._spectra[dtype, torus]
        around = self.table.to(dtype)
        for dim, places in zip(self._torus_dims, torus, strict=True):
            lags = torch.arange(places, device=around.device)
            around = around.index_select(dim, torch.minimum(lags, places - lags))
        found = stored_by_frequency(torch.fft.rfftn(around, dim=self._torus_dims).real, len(self.torus))
        if known:
            self._spectra[dtype, torus] = found
        return found

    @property
    def _torus_dims(self) -> tuple[int, ...]:
        return tuple(range(-len(self.torus), 0))

    def _matmul(self, rhs: Tensor) -> Tensor:
        columns = (rhs.unsqueeze(-1) if rhs.dim() == 1 else rhs).mT
        short = self._short_range(rhs)
        if short is not None:
            image = short.product(columns.flatten(0, -2), self.size(-2)).unflatten(0, columns.shape[:-1]).mT
            return image.squeeze(-1) if rhs.dim() == 1 else image
        x = columns.reshape(*columns.shape[:-1], self.num_dense[1], *map(count, self.col_positions))
        spectrum, batched = self.spectrum(rhs.dtype, inner=True), self._dense_dim > 0
        every = x if batched else x.flatten(0, -len(self.torus) - 2)
        parts = every.split(self._columns_at_once(every), -len(self.torus) - 2)
        image = torch.cat([self._filter(spectrum, part) for part in parts], -len(self.torus) - 2)
        image = (image if batched else image.unflatten(0, columns.shape[:-1])).flatten(-len(self.torus) - 1).mT
        return image.squeeze(-1) if rhs.dim() == 1 else image

    def _short_range(self, rhs: Tensor) -> ShortRange | None:
        """For products along one long axis on a CPU, without a gradient."""
        positions = (*self.row_positions, *self.col_positions)
        along = len(positions) == 2 and self.table.dim() == 3 and self.num_dense == (1, 1)
        if not along or rhs.device.type != "cpu" or any(map(torch.is_tensor, positions)):
            return None
        differentiated = torch.is_grad_enabled() and (self.table.requires_grad or rhs.requires_grad)
        if differentiated or sum(map(count, positions)) - 1 > self.inner[0]:  # covariances go around the circle
            return None
        if rhs.dtype not in self._short_ranges:
            lags = self.table.flatten()[: max(map(count, positions))]
            self._short_ranges[rhs.dtype] = ShortRange.of(lags, rhs.dtype)
        return self._short_ranges[rhs.dtype]

    def _columns_at_once(self, x: Tensor) -> int:
        """Number of columns that are transformed together. On a CPU, they must fit in the cache."""
        if x.device.type != "cpu":
            return max(1, x.size(-len(self.torus) - 2))
        numbers = math.prod(self.inner) * max(self.num_dense) * self.batch_shape.numel()
        return max(1, (_CACHED_NUMBERS if self.num_dense == (1, 1) else _NUMBERS_PER_MATRIX) // numbers)

    def _filter(self, spectrum: Tensor, x: Tensor) -> Tensor:
        """Maps values at columns to values at rows. shape: (..., C, b, m_1, .., m_s) -> (..., C, a, q_1, .., q_s)"""
        image = filtered(spectrum, to_frequencies(x, self.inner, self.col_positions), len(self.torus))
        return from_frequencies(image, self.inner, self.row_positions)

    def _transpose_nonbatch(self) -> "CirculantOperator":
        table = self.table.transpose(self._dense_dim, self._dense_dim + 1)
        sides = {"row_positions": self.col_positions, "col_positions": self.row_positions}
        return CirculantOperator(table, torus=self.torus, inner=self.inner, **sides)

    # -- entries -----------------------------------------------------------------------------------------------------

    def entries(self, rows: Tensor, columns: Tensor, batch: tuple[Any, ...] = (...,)) -> Tensor:
        """Some entries, for positions that broadcast. Differentiable. shape: (*batch, *positions)"""
        return self.entries_at(self.row_places(rows), self.col_places(columns), batch)

    def row_places(self, cells: Tensor) -> list[Tensor]:
        """Places of rows: the level on the dense axis, if there is one, and the place on every circle."""
        return places_of(cells, self.row_positions, self.num_dense != (1, 1))

    def col_places(self, cells: Tensor) -> list[Tensor]:
        """Places of columns, likewise."""
        return places_of(cells, self.col_positions, self.num_dense != (1, 1))

    def entries_at(self, first: Sequence[Tensor], second: Sequence[Tensor], batch: tuple[Any, ...] = (...,)) -> Tensor:
        """Entries between places, which broadcast. shape: (*batch, *positions)"""
        flat: Any = 0
        if self.num_dense != (1, 1):
            flat = first[0] * self.num_dense[1] + second[0]
            first, second = first[1:], second[1:]
        for places, start, end in zip(self.torus, first, second, strict=True):
            lag = (start - end).abs()
            flat = flat * (places // 2 + 1) + torch.minimum(lag, places - lag)
        table = self.table.flatten(self._dense_dim)
        return look_up(table, flat) if batch == (...,) else table[(*batch, flat)]

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        return self.entries(row_index, col_index, batch_indices or (...,))

    def _diagonal(self) -> Tensor:
        cells = torch.arange(self.size(-1), device=self.device)
        return self.entries(cells, cells)

    def to_dense(self) -> Tensor:
        rows, columns = (torch.arange(size, device=self.device) for size in self.shape[-2:])
        return self.entries(rows.unsqueeze(-1), columns)

    # -- operations that keep the structure ----------------------------------------------------------------------------

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        if _is_noop_index(row_index) and _is_noop_index(col_index):
            return self.with_table(self.table[batch_indices]) if batch_indices else self
        return super()._getitem(row_index, col_index, *batch_indices)

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> "CirculantOperator":
        return self.with_table(self.table.expand(*batch_shape, *self.table.shape[self._dense_dim :]))

    def _permute_batch(self, *dims: int) -> "CirculantOperator":
        return self.with_table(self.table.permute(*dims, *range(len(dims), self.table.dim())))

    def _unsqueeze_batch(self, dim: int) -> "CirculantOperator":
        return self.with_table(self.table.unsqueeze(dim))

    def _mul_constant(self, other: float | Tensor) -> "CirculantOperator":
        shape = (1,) * (len(self.torus) + 2)
        scale = other.reshape(*other.shape, *shape) if torch.is_tensor(other) else other
        return self.with_table(self.table * scale)

    def detach(self) -> "CirculantOperator":
        return self.with_table(self.table.detach())

    def to(self, *args: Any, **kwargs: Any) -> "CirculantOperator":
        """Moves and casts like :meth:`torch.Tensor.to`; positions stay integers."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device in (None, self.device) and dtype in (None, self.dtype):
            return self
        rows, columns = (
            tuple(own.to(device) if torch.is_tensor(own) else own for own in side)
            for side in (self.row_positions, self.col_positions)
        )
        table = self.table.to(device, dtype, non_blocking)
        return CirculantOperator(table, **{**self._kwargs, "row_positions": rows, "col_positions": columns})

    def double(self, device_id: str | None = None) -> "CirculantOperator":
        return self.to(torch.float64)

    def float(self, device_id: str | None = None) -> "CirculantOperator":
        return self.to(torch.float32)
