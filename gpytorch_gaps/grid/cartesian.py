"""The Cartesian product of coordinate axes, and exact look-up of its cells."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from gpytorch_gaps.linalg.selection import ravel, unravel
from gpytorch_gaps.utils.checks import read_tensor, refuse_entries, refuse_repeats, to_common_dtype
from gpytorch_gaps.utils.html import table
from gpytorch_gaps.utils.tensors import first_equal_row


class CartesianGrid(torch.nn.Module):
    """A grid: every combination of one row from each axis is a cell. The last axis varies fastest (C order).

    Axis i is a table of m_i distinct rows of d_i coordinates. A plain axis `(m_i,)` has one column. A *group*
    `(m_i, d_i)` has several input columns that vary together, such as the latitude, longitude and elevation of a
    station. Cell (p_1, .., p_d) lies at the concatenation of the rows p_i, a point with D = Σ d_i columns. Its flat
    index is (..(p_1 m_2 + p_2) m_3 + ..) + p_d, one of M = Π m_i.

    The axes are buffers, so they move, cast, save and copy with the module. A cast that would merge two coordinates
    raises and leaves the grid unchanged.

    :param axes: the coordinates of each axis, in any order. All floating-point axes must share one dtype; integers and
        Python numbers take that dtype, or torch's default one.
    :raises ValueError: if an axis is empty, has more than two dimensions, repeats a row or holds values that are not
        finite, or if the axes require different dtypes or devices.

    >>> grid = CartesianGrid([[0.0, 0.5, 1.0], [10.0, 20.0]])
    >>> grid
    CartesianGrid(3 x 2, 2 columns, float32)
    >>> grid.points(torch.tensor([0, 1, 2])).tolist()
    [[0.0, 10.0], [0.0, 20.0], [0.5, 10.0]]
    >>> grid.index_of(torch.tensor([[1.0, 20.0], [0.7, 20.0]])).tolist()
    [5, -1]
    """

    def __init__(self, axes: Sequence[ArrayLike | Tensor]) -> None:
        super().__init__()
        if len(axes) == 0:
            raise ValueError("axes: got none; expected at least one axis")
        tensors = to_common_dtype(*(read_tensor(f"axis {i}", axis) for i, axis in enumerate(axes)))
        for i, tensor in enumerate(tensors):
            if tensor.ndim not in (1, 2) or tensor.numel() == 0:
                raise ValueError(f"axis {i}: got shape {tuple(tensor.shape)}; expected (m,) or (m, d), none of them 0")
            rows = tensor.detach().reshape(len(tensor), -1).clone(memory_format=torch.contiguous_format)
            _check_axis(i, rows)
            self.register_buffer(f"axis_{i}", rows)
        self._num_axes = len(tensors)

    @property
    def axes(self) -> tuple[Tensor, ...]:
        """Coordinates of each axis, shape (m_i, d_i)."""
        return tuple(self.get_buffer(f"axis_{i}") for i in range(self._num_axes))

    @property
    def shape(self) -> torch.Size:
        """Number of rows m_i of each axis."""
        return torch.Size([len(axis) for axis in self.axes])

    @property
    def num_cells(self) -> int:
        """Number of cells M."""
        return math.prod(self.shape)

    @property
    def columns(self) -> tuple[slice, ...]:
        """The input columns that belong to each axis."""
        bounds = accumulate((axis.shape[-1] for axis in self.axes), initial=0)
        return tuple(slice(start, stop) for start, stop in pairwise(bounds))

    @property
    def num_columns(self) -> int:
        """Number of input columns D."""
        return self.columns[-1].stop

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the coordinates."""
        return self.axes[0].dtype

    @property
    def device(self) -> torch.device:
        """Device of the coordinates."""
        return self.axes[0].device

    def points(self, index: Tensor | None = None) -> Tensor:
        """Coordinates of cells.

        :param index: flat cells, any shape. Default: all cells in grid order.
        :return: coordinates, shape (*index.shape, D).
        :raises ValueError: if an index is not an integer from 0 to M - 1.
        """
        positions = self.unravel(torch.arange(self.num_cells, device=self.device) if index is None else index)
        return torch.cat([axis[p] for axis, p in zip(self.axes, positions, strict=True)], dim=-1)

    def index_of(self, x: Tensor) -> Tensor:
        """Flat cell of each point. Coordinates must match exactly: there is no tolerance. Cost: O(N D log m).

        :param x: points, shape (*, N, D).
        :return: flat cells, -1 for points off the grid, shape (*, N).
        :raises ValueError: if x has another number of columns, dtype or device, or values that are not finite.
        """
        return self.ravel(self.axis_index_of(x))

    def axis_index_of(self, x: Tensor) -> Tensor:
        """Position of each point on each axis.

        :param x: points, shape (*, N, D).
        :return: positions, -1 where a point is off that axis, shape (d, *, N).
        :raises ValueError: as :meth:`index_of`.
        """
        if x.ndim < 2 or x.shape[-1] != self.num_columns:
            raise ValueError(f"x: got shape {tuple(x.shape)}; expected (*, N, {self.num_columns}), the grid's columns")
        if (x.dtype, x.device) != (self.dtype, self.device):
            raise ValueError(f"x: got {x.dtype} on {x.device}; expected {self.dtype} on {self.device}, as the grid")
        refuse_entries(~x.isfinite(), x, "x", "finite coordinates")
        return torch.stack([first_equal_row(axis, x[..., c]) for axis, c in zip(self.axes, self.columns, strict=True)])

    def unravel(self, index: Tensor) -> Tensor:
        """Position on each axis of flat cells: shape (*) -> (d, *).

        :param index: flat cells.
        :return: positions.
        :raises ValueError: if an index is not an integer from 0 to M - 1.
        """
        refuse_entries((index < 0) | (index >= self.num_cells), index, "index", f"cells from 0 to {self.num_cells - 1}")
        if index.is_floating_point() or index.dtype == torch.bool:
            raise ValueError(f"index: got {index.dtype}; expected integers")
        return torch.stack(unravel(index.long(), self.shape))

    def ravel(self, positions: Tensor | Sequence[Tensor]) -> Tensor:
        """Flat cells of positions on the axes: shape (d, *) -> (*).

        :param positions: position on each axis.
        :return: flat cells, -1 where a position lies outside its axis.
        """
        outside = torch.zeros_like(positions[0], dtype=torch.bool)
        for position, size in zip(positions, self.shape, strict=True):
            outside = outside | (position < 0) | (position >= size)
        return ravel([position.long() for position in positions], self.shape).masked_fill(outside, -1)

    def observed(self, values: ArrayLike | Tensor) -> Tensor:
        """Flat cells of the observations, in grid order.

        :param values: one value per cell, of the grid's shape or flattened. NaN marks a gap.
        :return: flat cells where `values` is not NaN, shape (N,).
        :raises ValueError: if the shape is another, a value is infinite, or all cells are gaps.
        """
        tensor = read_tensor("values", values, booleans=True).tensor
        if tensor.shape not in (self.shape, (self.num_cells,)):
            raise ValueError(
                f"values: got shape {tuple(tensor.shape)}; expected {tuple(self.shape)} or ({self.num_cells},)"
            )
        return observed_entries("values", tensor)

    def extra_repr(self) -> str:
        columns = f"{self.num_columns} column{'s' if self.num_columns > 1 else ''}"
        return f"{' x '.join(map(str, self.shape))}, {columns}, {str(self.dtype).removeprefix('torch.')}"

    def _repr_html_(self) -> str:
        rows = []
        for number, axis in enumerate(self.axes):
            first, last = (", ".join(f"{entry:g}" for entry in axis[at].tolist()) for at in (0, -1))
            rows.append((f"axis {number}", f"{len(axis):,}", first, last))
        return table(rows, ("", "points", "first", "last"), f"CartesianGrid, {self.num_cells:,} cells")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        for i, axis in enumerate(self.axes):  # all axes are checked before any is replaced
            _check_axis(i, fn(axis))
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *args: Any) -> None:
        # Loading casts to the dtype of the grid; axes of another shape are left to torch's own error.
        for i, axis in enumerate(self.axes):
            loaded = state_dict.get(f"{prefix}axis_{i}", axis)
            if loaded.shape == axis.shape:
                _check_axis(i, loaded.to(axis))
        super()._load_from_state_dict(state_dict, prefix, *args)


def refuse_other_grid(grid: CartesianGrid, state_dict: Mapping[str, Tensor], prefix: str) -> None:
    """Raises an error if a state dict, about to be loaded into a model, contains the axes of another grid.

    The training data would stay on the model's grid while its predictions would move to the other coordinates.
    """
    for i, axis in enumerate(grid.axes):
        loaded = state_dict.get(f"{prefix}axis_{i}", axis)
        if loaded.shape != axis.shape or not torch.equal(loaded.to(axis), axis):
            raise ValueError(
                f"state_dict: {prefix}axis_{i} is not axis {i} of this model's grid; expected the same grid. To load "
                "the hyperparameters only, leave the grid out: model.load_state_dict({name: value for name, value in "
                'state.items() if ".grid." not in name}, strict=False)'
            )


def observed_entries(name: str, values: Tensor) -> Tensor:
    """Flat positions where `values` is not NaN. Raises if there is none, or if a value is infinite."""
    refuse_entries(values.isinf(), values, name, "finite values, or NaN for gaps")
    index = (~values.isnan()).flatten().nonzero().squeeze(-1)
    if len(index) == 0:
        raise ValueError(f"{name}: got {values.numel()} entries, all of them gaps; expected at least one observation")
    return index


def _check_axis(i: int, rows: Tensor) -> None:
    refuse_entries(~rows.isfinite(), rows, f"axis {i}", "finite coordinates")
    refuse_repeats(f"axis {i}", rows)
