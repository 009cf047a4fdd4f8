"""The Cartesian product of coordinate axes, and exact look-up of its cells."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor


class CartesianGrid(torch.nn.Module):
    """Cells at every combination of one row from each axis, the last axis fastest (C order).

    Axis i is a table of m_i distinct rows of d_i coordinates: a plain axis `(m_i,)` has one column, a *group*
    `(m_i, d_i)` has input columns that vary together, such as a station's latitude, longitude and elevation.
    Cell (p_1, .., p_d) lies at the concatenation of rows p_i, a point of D = Σ d_i columns, and has the flat index
    (..(p_1 m_2 + p_2) m_3 + ..) + p_d, one of M = Π m_i.

    The axes are buffers in the order given, so that they move, cast, save and copy with the module; all else derives
    from them when asked. Integers and Python numbers take the floating dtype of the other axes, or the default one.
    """

    def __init__(self, axes: Sequence[ArrayLike | Tensor]) -> None:
        super().__init__()
        if len(axes) == 0:
            raise ValueError("axes: got none; expected at least one axis")
        tensors = unify(*(read(f"axis {i}", axis) for i, axis in enumerate(axes)))
        for i, tensor in enumerate(tensors):
            if tensor.ndim not in (1, 2) or tensor.numel() == 0:
                raise ValueError(f"axis {i}: got shape {tuple(tensor.shape)}; expected (m,) or (m, d), none of them 0")
            rows = tensor.detach().reshape(len(tensor), -1).clone(memory_format=torch.contiguous_format)
            _check_axis(i, rows)
            self.register_buffer(f"axis_{i}", rows)
        self._num_axes = len(tensors)

    @property
    def axes(self) -> tuple[Tensor, ...]:
        return tuple(self.get_buffer(f"axis_{i}") for i in range(self._num_axes))  # shapes: (m_i, d_i)

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(axis) for axis in self.axes])

    @property
    def num_cells(self) -> int:
        return math.prod(self.shape)

    @property
    def columns(self) -> tuple[slice, ...]:
        """The input columns that each axis spans."""
        bounds = accumulate((axis.shape[-1] for axis in self.axes), initial=0)
        return tuple(slice(start, stop) for start, stop in pairwise(bounds))

    @property
    def num_columns(self) -> int:
        return self.columns[-1].stop

    @property
    def dtype(self) -> torch.dtype:
        return self.axes[0].dtype

    @property
    def device(self) -> torch.device:
        return self.axes[0].device

    def points(self, index: Tensor | None = None) -> Tensor:
        """Coordinates of the given flat cells, or of all of them in grid order."""
        positions = self.unravel(torch.arange(self.num_cells, device=self.device) if index is None else index)
        return torch.cat([axis[p] for axis, p in zip(self.axes, positions, strict=True)], dim=-1)  # shape: (*, N, D)

    def index_of(self, x: Tensor) -> Tensor:
        """Flat cell of each row of x `(*, N, D)`, -1 for rows off the grid: `(*, N)`, in O(N D log m).

        Coordinates match when they are equal, bit for bit but for the sign of zero: there is no tolerance.
        """
        return self.ravel(self.axis_index_of(x))

    def axis_index_of(self, x: Tensor) -> Tensor:
        """Position on each axis of each row of x `(*, N, D)`, -1 where it is off that axis: `(d, *, N)`."""
        if x.ndim < 2 or x.shape[-1] != self.num_columns:
            raise ValueError(f"x: got shape {tuple(x.shape)}; expected (*, N, {self.num_columns}), the grid's columns")
        if (x.dtype, x.device) != (self.dtype, self.device):
            raise ValueError(f"x: got {x.dtype} on {x.device}; expected {self.dtype} on {self.device}, as the grid")
        refuse(~x.isfinite(), x, "x", "finite coordinates")
        return torch.stack([first_equal_row(axis, x[..., c]) for axis, c in zip(self.axes, self.columns, strict=True)])

    def unravel(self, index: Tensor) -> Tensor:
        """Positions on the axes `(d, *)` of flat cells `(*)`."""
        refuse((index < 0) | (index >= self.num_cells), index, "index", f"cells from 0 to {self.num_cells - 1}")
        if index.is_floating_point() or index.dtype == torch.bool:
            raise ValueError(f"index: got {index.dtype}; expected integers")
        index, positions = index.long(), []  # torch.unravel_index would copy the shape to the device
        for m in reversed(self.shape):
            positions.append(index % m)
            index = index // m
        return torch.stack(positions[::-1])

    def ravel(self, positions: Tensor | Sequence[Tensor]) -> Tensor:
        """Flat cells `(*)` of positions on the axes `(d, *)`, -1 where a position lies outside its axis."""
        index = torch.zeros_like(positions[0], dtype=torch.int64)
        outside = torch.zeros_like(index, dtype=torch.bool)
        for position, m in zip(positions, self.shape, strict=True):
            index = index * m + position
            outside = outside | (position < 0) | (position >= m)
        return index.masked_fill(outside, -1)

    def observed(self, values: ArrayLike | Tensor) -> Tensor:
        """Flat cells, in grid order, where `values` (of the grid's shape, or flattened) is not NaN."""
        tensor = read("values", values, booleans=True).tensor
        if tensor.shape not in (self.shape, (self.num_cells,)):
            raise ValueError(
                f"values: got shape {tuple(tensor.shape)}; expected {tuple(self.shape)} or ({self.num_cells},)"
            )
        return observed_entries("values", tensor)

    def extra_repr(self) -> str:
        columns = f"{self.num_columns} column{'s' if self.num_columns > 1 else ''}"
        return f"{' x '.join(map(str, self.shape))}, {columns}, {str(self.dtype).removeprefix('torch.')}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Every axis is tried before any is replaced: a cast that merges coordinates leaves the grid as it was.
        for i, axis in enumerate(self.axes):
            _check_axis(i, fn(axis))
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *args: Any) -> None:
        # Loading casts to the dtype of the grid; axes of another shape are left to torch's own complaint.
        for i, axis in enumerate(self.axes):
            loaded = state_dict.get(f"{prefix}axis_{i}", axis)
            if loaded.shape == axis.shape:
                _check_axis(i, loaded.to(axis))
        super()._load_from_state_dict(state_dict, prefix, *args)


def same_values(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are alike in shape, dtype, device and content; by identity first, which costs no wait."""
    if first is second:
        return True
    alike = first.shape == second.shape and first.dtype == second.dtype and first.device == second.device
    return alike and torch.equal(first, second)


def refuse_other_grid(grid: CartesianGrid, state_dict: Mapping[str, Tensor], prefix: str) -> None:
    """Raise where a state about to be loaded into a model holds the axes of another grid.

    The model's data would stay on its own, and its predictions would silently move to the other's coordinates.
    """
    for i, axis in enumerate(grid.axes):
        loaded = state_dict.get(f"{prefix}axis_{i}", axis)
        if loaded.shape != axis.shape or not torch.equal(loaded.to(axis), axis):
            raise ValueError(
                f"state_dict: {prefix}axis_{i} is not axis {i} of this model's grid; expected the same grid. To take "
                "over hyperparameters only, leave the grid out: model.load_state_dict({name: value for name, value in "
                'state.items() if ".grid." not in name}, strict=False)'
            )


def _check_axis(i: int, rows: Tensor) -> None:
    refuse(~rows.isfinite(), rows, f"axis {i}", "finite coordinates")
    refuse_repeats(f"axis {i}", rows)


def _first_equal(table: Tensor, queries: Tensor) -> Tensor:
    """Position in `table` `(m,)` of the first entry equal to each query, -1 where there is none."""
    ordered, order = table.sort(stable=True)
    rank = torch.searchsorted(ordered, queries.contiguous()).clamp(max=len(table) - 1)
    return torch.where(ordered[rank] == queries, order[rank], -1)


def first_equal_row(table: Tensor, rows: Tensor) -> Tensor:
    """Position in `table` `(m, d)` of the first row equal to each of `rows` `(*, d)`, -1 where there is none.

    The columns fold into one key: the pair (key so far, next column), each coded by its first equal in the table,
    becomes one integer below (m+1)². Coding anew at each column keeps it there, however many columns there are.
    """
    base = len(table) + 1
    table_key, key = table[:, 0], rows[..., 0]
    for table_column, column in zip(table[:, 1:].unbind(-1), rows[..., 1:].unbind(-1), strict=True):
        # A code of -1 gives a negative key, or else a multiple of the base: no row of the table has either.
        key = _first_equal(table_key, key) * base + _first_equal(table_column, column) + 1
        table_key = _first_equal(table_key, table_key) * base + _first_equal(table_column, table_column) + 1
    return _first_equal(table_key, key)


def refuse(bad: Tensor, tensor: Tensor, name: str, expected: str) -> None:
    """Raise at the first entry of `tensor` that `bad` marks."""
    if bad.any():
        entry = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"{name}: entry {entry} is {tensor[entry].item()}; expected {expected}")


def refuse_repeats(name: str, rows: Tensor, keys: Tensor | None = None) -> None:
    """Raise when two of the rows `(m, d)` are equal; `keys` `(m,)` tell rows apart more cheaply where given."""
    first = first_equal_row(rows, rows) if keys is None else _first_equal(keys, keys)
    repeats = (first != torch.arange(len(rows), device=rows.device)).nonzero()
    if len(repeats) > 0:
        later = int(repeats[0])
        hint = "" if rows.dtype == torch.float64 else ", or torch.float64 if that tells them apart"
        raise ValueError(
            f"{name}: rows {int(first[later])} and {later} are both {rows[later].tolist()} in {rows.dtype}; "
            f"expected distinct coordinates{hint}"
        )


def observed_entries(name: str, values: Tensor) -> Tensor:
    """Flat positions where `values` is not NaN: at least one, and none infinite."""
    refuse(values.isinf(), values, name, "finite values, or NaN for gaps")
    index = (~values.isnan()).flatten().nonzero().squeeze(-1)
    if len(index) == 0:
        raise ValueError(f"{name}: got {values.numel()} entries, all of them gaps; expected at least one observation")
    return index


class Argument(NamedTuple):
    """What a caller passed, as a tensor, with the dtype and device it insists on: None where any will do."""

    name: str
    tensor: Tensor
    dtype: torch.dtype | None
    device: torch.device | None


def read(name: str, value: ArrayLike | Tensor, booleans: bool = False) -> Argument:
    """Real numbers in any container. Integers insist on no floating dtype; Python numbers on no device either."""
    if isinstance(value, Tensor):
        tensor, floating = value, value.is_floating_point()
    else:
        try:
            array = np.asanyarray(value)
            floating = array.dtype.kind == "f"
            if isinstance(array, np.ma.MaskedArray):
                array = np.ma.filled(array if floating else array.astype(np.float64), np.nan)
            # torch reads native, C-ordered memory; a copy also shields us from what the caller does to theirs.
            tensor = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: expected real numbers, but {error}") from error
    if tensor.is_complex() or tensor.dtype == torch.uint64 or (tensor.dtype == torch.bool and not booleans):
        raise ValueError(f"{name}: got {tensor.dtype}; expected floating-point numbers, or integers that fit int64")
    if not tensor.is_floating_point():
        tensor = tensor.long()  # torch does little with unsigned integers
    if isinstance(value, Sequence):
        return Argument(name, tensor, None, None)
    return Argument(name, tensor, tensor.dtype if floating else None, tensor.device)


def unify(*arguments: Argument) -> list[Tensor]:
    """The arguments' tensors, in the one floating dtype and on the one device that those who insist agree on."""
    dtype = _agreed(arguments, "dtype") or torch.get_default_dtype()
    device = _agreed(arguments, "device")
    return [argument.tensor.to(dtype=dtype, device=device) for argument in arguments]


def _agreed(arguments: Sequence[Argument], trait: str) -> Any:
    first, *others = [(a.name, getattr(a, trait)) for a in arguments if getattr(a, trait) is not None] or [("", None)]
    for name, got in others:
        if got != first[1]:
            raise ValueError(f"{name}: got {got}; expected {first[1]}, the {trait} of {first[0]}")
    return first[1]
