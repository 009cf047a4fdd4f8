"""A product of one GPyTorch kernel per axis, or per block of axes, of a grid."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from gpytorch.kernels import Kernel
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpytorch_gaps.grid.cartesian import CartesianGrid, refuse_other_grid
from gpytorch_gaps.grid.cells import Cells, Lookups, on_grid, own_grid
from gpytorch_gaps.grid.protocol import GridKernel
from gpytorch_gaps.kernels.arguments import check_axis_codes, check_blocks, check_codes, check_kernels, no_fast_product
from gpytorch_gaps.kernels.blocks import (
    LONG_AXIS,
    LONG_SERIES,
    MAX_DENSE,
    MAX_DENSE_AXIS,
    block_factor,
    block_points,
    find_lattice,
)
from gpytorch_gaps.linalg.factors import Factor
from gpytorch_gaps.operators import KernelRowsOperator, KhatriRaoOperator, SelectedKroneckerOperator
from gpytorch_gaps.operators.float64_covariance import covariance_in_float64
from gpytorch_gaps.operators.inspect import one_member
from gpytorch_gaps.operators.kernel_rows import fits_memory
from gpytorch_gaps.posterior.last_solutions import LastSolutions
from gpytorch_gaps.posterior.strategy import GappyGridPredictionStrategy
from gpytorch_gaps.utils.cache import TensorCache
from gpytorch_gaps.utils.precision import cast_entries, full_float32
from gpytorch_gaps.utils.tensors import same_values


class GappyGridKernel(GridKernel):
    """Product kernel on a grid, ``k(x, x') = prod_i k_i(x_i, x'_i)``, where x_i are the columns of axis or block i.

    The kernel is exact for all inputs. Only the representation of the covariance depends on them:

    - between cells of the grid, a :class:`SelectedKroneckerOperator`; its factors are rectangular if points form a grid
      of their own;
    - between scattered points and cells, a :class:`KhatriRaoOperator`;
    - between scattered points, or for a batch of different inputs, a dense matrix. If it would exceed
      ``settings.prediction_memory``, it is computed row by row.

    The kernel owns two caches: the cells of the last few inputs (`Lookups`), and the last solutions for training data
    (`solutions`), which are starting values of the next solve. Copies and pickles do not include them.

    :param kernels: one GPyTorch kernel per axis, or per block, of any class. Kernel i receives only the columns of axis
        or block i. An ``IndexKernel`` (one task per output) needs an axis of codes 0 .. T-1.
    :param grid: the grid.
    :param active_dims: the input columns that belong to the grid, if the inputs have further columns.
    :param blocks: groups of consecutive axes that share a kernel, in order, as in ``[(0, 1), (2,)]``. By default every
        axis is a block of its own. The covariance of a block is a matrix, so the block must be small. There is one
        exception: products use FFTs if the kernel is stationary along the last axes of the block, and their coordinates
        are multiples of a step. This applies to blocks of several axes, and to single axes with thousands of points.
    :raises ValueError: if the kernels do not match the blocks, or the blocks do not match the axes of the grid. When
        the kernel is evaluated: if a block is too large for a matrix and FFTs do not apply.

    >>> from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
    >>> grid = CartesianGrid([range(4), range(3)])
    >>> kernel = ScaleKernel(GappyGridKernel([RBFKernel(), MaternKernel(nu=1.5)], grid))
    >>> train_x = grid.points(torch.tensor([0, 1, 5, 11]))
    >>> covariance = kernel(train_x).evaluate_kernel()
    >>> type(covariance).__name__, tuple(covariance.shape)
    ('SelectedKroneckerOperator', (4, 4))
    >>> # a Matern kernel of the distance in the plane, which is not a product over axes
    >>> plane = GappyGridKernel([MaternKernel(nu=0.5)], grid, blocks=[(0, 1)])
    >>> [type(factor).__name__ for factor in plane(train_x).evaluate_kernel().factors]
    ['CirculantOperator']
    """

    def __init__(
        self,
        kernels: Sequence[Kernel],
        grid: CartesianGrid,
        active_dims: Sequence[int] | Tensor | None = None,
        blocks: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(active_dims=active_dims)
        self.blocks = check_blocks(blocks, grid)
        check_kernels(kernels, grid, self.blocks)
        if self.active_dims is not None and len(self.active_dims) != grid.num_columns:
            raise ValueError(
                f"active_dims: got {len(self.active_dims)}, expected {grid.num_columns}, the grid's columns"
            )
        self.kernels: Any = torch.nn.ModuleList(kernels)
        self.grid = grid
        self._lookups = Lookups()
        self.solutions = LastSolutions()
        self._lattices = TensorCache()
        check_axis_codes("grid: axis", kernels, self.blocks, grid.axes)

    @property
    def is_stationary(self) -> bool:
        return all(kernel.is_stationary for kernel in self.kernels)

    # -- covariance --------------------------------------------------------------------------------------------------

    @full_float32()
    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **params: Any
    ) -> Tensor | LinearOperator:
        if last_dim_is_batch:
            raise ValueError("last_dim_is_batch: got True, expected False: the columns of a grid belong together")
        self._check("x1", x1)
        self._check("x2", x2)
        batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2], self.batch_shape)
        if diag:
            return self._entries(x1, x2, diag=True, **params).expand(*batch, x1.size(-2))
        first, second = one_member(x1), one_member(x2)
        if first is None or second is None:
            return self._entries(x1, x2, **params).expand(*batch, x1.size(-2), x2.size(-2))
        covariance = self._covariance(first, second, **params)
        if covariance.shape[:-2] == batch:
            return covariance
        return covariance.expand(*batch, *covariance.shape[-2:])

    def _covariance(self, x1: Tensor, x2: Tensor, **params: Any) -> Tensor | LinearOperator:
        """Covariance of unbatched points. shape: (N, D) and (Q, D) -> (*batch, N, Q)"""
        same = same_values(x1, x2)
        # Points that require a gradient are not looked up: an index has no derivative.
        free1, free2 = (x.requires_grad and torch.is_grad_enabled() for x in (x1, x2))
        rows = None if free1 else self.cells_of(x1, training=same)
        cols = None if free2 else rows if same else self.cells_of(x2)
        factors = None if rows is None or cols is None else self._factors(rows.axes, cols.axes, same, **params)
        if factors is not None:
            assert rows is not None
            assert cols is not None
            return SelectedKroneckerOperator(
                *factors,
                row_index=rows.index,
                col_index=cols.index,
                row_points=x1,
                col_points=x2,
                out_dtype=x1.dtype,
            )
        if cols is not None:
            return self._scattered_by_cells(x1, x2, cols, free1, **params)
        if rows is not None:
            return self._scattered_by_cells(x2, x1, rows, free2, **params).mT
        if fits_memory(len(x1), len(x2)) or free1 or free2 or self._learns():
            return self._entries(x1, x2, **params)
        return KernelRowsOperator(x1, x2, kernel=self, params=params)

    def _scattered_by_cells(
        self, scattered: Tensor, x: Tensor, cells: Cells, differentiable: bool, **params: Any
    ) -> LinearOperator:
        """Covariance of Q scattered points with N cells. shape: (*batch, Q, N)"""
        width = sum(math.prod(len(cells.axes[axis]) for axis in axes) for axes in self.blocks)
        if not (fits_memory(len(scattered), width) or differentiable or self._learns()):
            return KernelRowsOperator(scattered, x, kernel=self, params=params, width=width)
        points = [block_points([cells.axes[axis] for axis in axes]) for axes in self.blocks]
        factors = _in_one_precision(
            [
                covariance_in_float64(kernel, row, column, **params)
                for kernel, row, column in zip(self.kernels, self._split(scattered), points, strict=True)
            ]
        )
        kind: dict[str, Any] = {"points": scattered.detach(), "out_dtype": scattered.dtype}
        return KhatriRaoOperator(*factors, col_index=cells.index, **kind)

    def _learns(self) -> bool:
        """Whether the hyperparameters must be differentiated."""
        return torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())

    def cells_of(self, x: Tensor, training: bool = True) -> Cells | None:
        """Finds the cells of points, on this grid or on the grid of their own coordinates.

        :param x: points, shape (N, D).
        :param training: False for test points. If they lie on a small part of this grid, cells refer to that part.
        :return: the cells; None if the points are scattered.
        """

        def look_up() -> Cells | None:
            here = on_grid(self.grid, x)
            if here is not None and (training or 2 * len(x) > self.grid.num_cells):
                return here
            own = own_grid(self.grid, x)
            return here if own is None or own.index.numel() == 0 else own

        found = self._lookups.get("training" if training else "other", self.grid, x, look_up)
        if found is not None and found.axes[0] is not self.grid.axes[0]:
            # the codes are checked for this kernel too: look-ups may be shared with another kernel
            check_axis_codes("x: the column of axis", self.kernels, self.blocks, found.axes)
        return found

    def share_lookups(self, other: "GappyGridKernel") -> None:
        """Uses the cached look-ups of another kernel on the same grid.

        :param other: the kernel.
        """
        self._lookups = other._lookups

    def _factors(
        self, rows: Sequence[Tensor], cols: Sequence[Tensor], same: bool, **params: Any
    ) -> list[Factor] | None:
        """Covariance of each block, in float64 unless a kernel can only be evaluated in float32.

        None for rows and columns of different grids, if a block is too large for a matrix and has no fast product.
        """
        factors: list[Factor] = []
        for number, (kernel, axes) in enumerate(zip(self.kernels, self.blocks, strict=True)):
            own, other = [rows[axis] for axis in axes], [cols[axis] for axis in axes]
            sizes = [math.prod(map(len, side)) for side in (own, other)]
            lattice = None
            if len(axes) > 1 or max(sizes) >= (LONG_SERIES if len(self.grid.axes) == 1 else LONG_AXIS):
                find = partial(find_lattice, kernel, own, other)
                lattice = self._lattices.cached(("lattice", number, kernel), (*own, *other), find)
            if lattice is None and max(sizes) > (MAX_DENSE if len(axes) > 1 else MAX_DENSE_AXIS):
                if not same:
                    return None
                raise ValueError(no_fast_product(kernel, axes, own))
            if lattice is None and len(axes) == 1:
                factors.append(covariance_in_float64(kernel, own[0], other[0], **params))
            else:
                factors.append(block_factor(kernel, own, other, lattice, not self.training, **params))
        return _in_one_precision(factors)

    def _split(self, x: Tensor) -> list[Tensor]:
        """The columns of each block."""
        columns = [slice(self.grid.columns[axes[0]].start, self.grid.columns[axes[-1]].stop) for axes in self.blocks]
        parts = [x[..., own] for own in columns]
        for axes, kernel, part in zip(self.blocks, self.kernels, parts, strict=True):
            which = f"column of axis {axes[0]}" if len(axes) == 1 else f"columns of block {axes}"
            check_codes(f"x: the {which}", kernel, part)
        return parts

    def _entries(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        """Dense entries, or the diagonal, for any batch of points."""
        value: Any = 1.0
        for kernel, first, second in zip(self.kernels, self._split(x1), self._split(x2), strict=True):
            value = value * covariance_in_float64(kernel, first, second, diag=diag, **params)
        return cast_entries(value, x1.dtype)

    def _check(self, name: str, x: Tensor) -> None:
        if x.size(-1) != self.grid.num_columns:
            hint = "; pass active_dims to pick the grid's" if self.active_dims is None else ""
            raise ValueError(f"{name}: got {x.size(-1)} columns, expected the grid's {self.grid.num_columns}{hint}")
        if x.dtype != self.grid.dtype or x.device != self.grid.device:
            raise ValueError(
                f"{name}: got {x.dtype} on {x.device}, expected {self.grid.dtype} on {self.grid.device}, as the grid; "
                "model.double() or model.to(...) casts and moves a model with its grid"
            )
        for parameter_name, parameter in self.named_parameters():
            if parameter.dtype != x.dtype or parameter.device != x.device:
                raise ValueError(
                    f"{name}: got {x.dtype} on {x.device}, but {parameter_name} is {parameter.dtype} on "
                    f"{parameter.device}; expected the same: model.to({x.dtype}) casts the model"
                )

    # -- GPyTorch's interface ----------------------------------------------------------------------------------------

    def prediction_strategy(self, *args: Any, **kwargs: Any) -> Any:
        return GappyGridPredictionStrategy(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *args: Any) -> None:
        refuse_other_grid(self.grid, state_dict, f"{prefix}grid.")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def expand_batch(self, *sizes: Any) -> Self:
        shape = torch.Size(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
        if shape == self.batch_shape:
            return self
        members = [kernel.expand_batch(shape) for kernel in self.kernels]
        return type(self)(members, self.grid, self.active_dims, self.blocks)

    def __getitem__(self, index: Any) -> Self:
        if not self.batch_shape:
            return self
        members = [kernel.expand_batch(self.batch_shape)[index] for kernel in self.kernels]
        return type(self)(members, self.grid, self.active_dims, self.blocks)


def _in_one_precision(factors: list[Factor]) -> list[Factor]:
    """Casts all factors to float32 if one of them is: a kernel that cannot be evaluated in float64."""
    narrow = any(factor.dtype == torch.float32 for factor in factors)
    return [factor.float() for factor in factors] if narrow else factors
