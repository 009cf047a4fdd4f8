"""A product of one GPyTorch kernel per axis of a grid, which knows the grid."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from gpytorch.kernels import AdditiveKernel, IndexKernel, Kernel, ProductKernel
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.grid.cartesian import CartesianGrid, refuse_other_grid
from gpytorch_gaps.grid.cells import Cells, Lookups, on_grid, own_grid
from gpytorch_gaps.grid.protocol import GridKernel
from gpytorch_gaps.operators import KernelRowsOperator, KhatriRaoOperator, SelectedKroneckerOperator
from gpytorch_gaps.operators.float64_covariance import covariance_in_float64
from gpytorch_gaps.operators.inspect import one_member
from gpytorch_gaps.posterior.last_solutions import LastSolutions
from gpytorch_gaps.posterior.strategy import GappyGridPredictionStrategy
from gpytorch_gaps.utils.precision import cast_entries, full_float32
from gpytorch_gaps.utils.tensors import same_values


class GappyGridKernel(GridKernel):
    """``k(x, x') = prod_i k_i(x_i, x'_i)``, with x_i the columns of axis i.

    Exact for any inputs. The covariance of cells of the grid is a :class:`SelectedKroneckerOperator`; with points that
    form a grid of their own its factors are rectangular; with scattered points it is a :class:`KhatriRaoOperator`;
    between scattered points, or in a batch of different inputs, it is dense, or made row by row where that is too
    large.

    :param kernels: one kernel an axis, any kernel: it sees the columns of its axis only. An ``IndexKernel`` (one task
        per output) needs an axis of codes 0 .. T-1.
    :param grid: the grid.
    :param active_dims: the columns of the inputs that are the grid's, where there are others.
    """

    def __init__(
        self, kernels: Sequence[Kernel], grid: CartesianGrid, active_dims: Sequence[int] | Tensor | None = None
    ) -> None:
        super().__init__(active_dims=active_dims)
        if not isinstance(grid, CartesianGrid):
            raise ValueError(f"grid: got {type(grid).__name__}, expected a CartesianGrid")
        if isinstance(kernels, Kernel):
            raise ValueError(f"kernels: got one {type(kernels).__name__}, expected a list of one kernel an axis")
        if len(kernels) != len(grid.axes):
            raise ValueError(f"kernels: got {len(kernels)}, expected one for each of the grid's {len(grid.axes)} axes")
        for axis, kernel in enumerate(kernels):
            if not isinstance(kernel, Kernel):
                raise ValueError(f"kernels: axis {axis}: got {type(kernel).__name__}, expected a gpytorch kernel")
            ard, columns = getattr(kernel, "ard_num_dims", None), grid.axes[axis].size(-1)
            if ard is not None and kernel.active_dims is None and ard != columns:
                raise ValueError(
                    f"kernels: axis {axis}: got ard_num_dims={ard}, expected {columns}, the columns of that axis"
                )
            picked = kernel.active_dims
            if picked is not None and (int(picked.max()) >= columns or int(picked.min()) < -columns):
                raise ValueError(
                    f"kernels: axis {axis}: got active_dims={picked.tolist()}, expected columns of that axis only, 0 "
                    f"to {columns - 1}, or none: a kernel sees its own axis"
                )
        if self.active_dims is not None and len(self.active_dims) != grid.num_columns:
            raise ValueError(
                f"active_dims: got {len(self.active_dims)}, expected {grid.num_columns}, the grid's columns"
            )
        self.kernels: Any = torch.nn.ModuleList(kernels)
        self.grid = grid
        self._lookups = Lookups()
        self.solutions = LastSolutions()
        for axis, (kernel, points) in enumerate(zip(kernels, grid.axes, strict=True)):
            _check_codes(f"grid: axis {axis}", kernel, points)

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
            return self._entrywise(x1, x2, diag=True, **params).expand(*batch, x1.size(-2))
        first, second = one_member(x1), one_member(x2)
        if first is None or second is None:
            return self._entrywise(x1, x2, **params).expand(*batch, x1.size(-2), x2.size(-2))
        covariance = self._covariance(first, second, **params)
        if covariance.shape[:-2] == batch:
            return covariance
        return covariance.expand(*batch, *covariance.shape[-2:])

    def _covariance(self, x1: Tensor, x2: Tensor, **params: Any) -> Tensor | LinearOperator:
        """Of unbatched points. shape: (N, D) and (Q, D) -> (*batch, N, Q)"""
        same = same_values(x1, x2)
        # a derivative with respect to the points themselves does not survive a look-up
        free1, free2 = x1.requires_grad and torch.is_grad_enabled(), x2.requires_grad and torch.is_grad_enabled()
        rows = None if free1 else self.cells_of(x1, training=same)
        cols = rows if same and not free2 else None if free2 else self.cells_of(x2)
        if rows is None and cols is None:
            learns = torch.is_grad_enabled() and any(p.requires_grad for p in (x1, x2, *self.parameters()))
            if learns or KernelRowsOperator.is_small(x1, x2):
                return self._entrywise(x1, x2, **params)
            return KernelRowsOperator(x1, x2, kernel=self, params=params)
        if rows is None:
            assert cols is not None
            if not free1 and self._too_many(x1, cols.shape):
                return KernelRowsOperator(x1, x2, kernel=self, params=params, width=sum(cols.shape))
            factors = self._factors(self._split(x1), cols.axes, **params)
            return KhatriRaoOperator(*factors, col_index=cols.index, points=x1.detach(), out_dtype=x1.dtype)
        if cols is None:
            if not free2 and self._too_many(x2, rows.shape):
                width = sum(rows.shape)
                return KernelRowsOperator(x2, x1, kernel=self, params=params, width=width, transposed=True)
            factors = self._factors(rows.axes, self._split(x2), **params)
            transposed = (factor.mT for factor in factors)
            return KhatriRaoOperator(
                *transposed, col_index=rows.index, transposed=True, points=x2.detach(), out_dtype=x2.dtype
            )
        factors = self._factors(rows.axes, cols.axes, **params)
        return SelectedKroneckerOperator(
            *factors,
            row_index=rows.index,
            col_index=cols.index,
            row_points=x1,
            col_points=x2,
            out_dtype=x1.dtype,
        )

    def _too_many(self, x: Tensor, shape: tuple[int, ...]) -> bool:
        """Whether scattered points are so many that their covariances with the axes are made some at a time."""
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            return False
        return len(x) > 1 and 32 * len(x) * sum(shape) > settings.prediction_memory.value()

    def cells_of(self, x: Tensor, training: bool = True) -> Cells | None:
        """The points x `(N, D)` as cells of a grid: this one or, if one is off it, their own. None if scattered.

        With `training` False, points on a small part of this grid are given as cells of that part.
        """

        def look_up() -> Cells | None:
            here = on_grid(self.grid, x)
            if here is not None and (training or 2 * len(x) > self.grid.num_cells):
                return here
            own = own_grid(self.grid, x)
            return here if own is None or own.index.numel() == 0 else own

        found = self._lookups.get("training" if training else "other", self.grid, x, look_up)
        if found is not None and found.axes[0] is not self.grid.axes[0]:
            _check_all_codes(self.kernels, found.axes)  # others may have looked these points up
        return found

    def _factors(self, rows: Sequence[Tensor], cols: Sequence[Tensor], **params: Any) -> list[Tensor]:
        """In float64, unless a kernel can only be evaluated in float32."""
        sides = zip(self.kernels, rows, cols, strict=True)
        factors = [covariance_in_float64(kernel, row, col, **params) for kernel, row, col in sides]
        narrow = any(factor.dtype == torch.float32 for factor in factors)
        return [factor.float() for factor in factors] if narrow else factors

    def _split(self, x: Tensor) -> list[Tensor]:
        """The columns of each axis."""
        parts = [x[..., columns] for columns in self.grid.columns]
        _check_all_codes(self.kernels, parts)
        return parts

    def _entrywise(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
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

    def prediction_strategy(self, *args: Any, **kwargs: Any) -> Any:
        return GappyGridPredictionStrategy(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *args: Any) -> None:
        refuse_other_grid(self.grid, state_dict, f"{prefix}grid.")
        super()._load_from_state_dict(state_dict, prefix, *args)

    # -- batches -----------------------------------------------------------------------------------------------------

    def expand_batch(self, *sizes: Any) -> Self:
        shape = torch.Size(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
        if shape == self.batch_shape:
            return self
        return type(self)([kernel.expand_batch(shape) for kernel in self.kernels], self.grid, self.active_dims)

    def __getitem__(self, index: Any) -> Self:
        if not self.batch_shape:
            return self
        members = [kernel.expand_batch(self.batch_shape)[index] for kernel in self.kernels]
        return type(self)(members, self.grid, self.active_dims)


def _check_all_codes(kernels: Any, axes: Sequence[Tensor]) -> None:
    for axis, (kernel, points) in enumerate(zip(kernels, axes, strict=True)):
        _check_codes(f"x: the column of axis {axis}", kernel, points)


def _check_codes(name: str, kernel: Kernel, points: Tensor, called: bool = True) -> None:
    """An IndexKernel cuts its inputs down to integers: 0.5 would silently be output 0.

    Only the columns that reach it count. Sums and products call the kernels inside them, which pick their own columns;
    other kernels pick for the one that they wrap.

    :param called: whether the kernel picks columns itself.
    """
    points = points.unsqueeze(-1) if points.dim() == 1 else points
    columns = kernel.active_dims if called else None
    columns = getattr(kernel, "_columns", columns)  # see `as_grid_kernels`
    if columns is not None:
        points = points[..., torch.as_tensor(columns, device=points.device).reshape(-1)]
    if isinstance(kernel, IndexKernel):
        tasks = kernel.covar_factor.size(-2)
        wrong = (points != points.round()) | (points < 0) | (points >= tasks)
        if bool(wrong.any()):
            value = points[wrong][0].item()
            raise ValueError(f"{name}: got {value:g}, expected the codes 0 to {tasks - 1} of its IndexKernel")
    calls = isinstance(kernel, AdditiveKernel | ProductKernel)
    for child in kernel.children():
        for part in child if isinstance(child, torch.nn.ModuleList) else [child]:
            if isinstance(part, Kernel):
                _check_codes(name, part, points, calls)
