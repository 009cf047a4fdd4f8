"""A product of one GPyTorch kernel per axis of a grid."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from gpytorch.kernels import AdditiveKernel, IndexKernel, Kernel, ProductKernel
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpytorch_gaps.grid.cartesian import CartesianGrid, refuse_other_grid
from gpytorch_gaps.grid.cells import Cells, Lookups, on_grid, own_grid
from gpytorch_gaps.grid.protocol import GridKernel
from gpytorch_gaps.operators import KernelRowsOperator, KhatriRaoOperator, SelectedKroneckerOperator
from gpytorch_gaps.operators.float64_covariance import covariance_in_float64
from gpytorch_gaps.operators.inspect import one_member
from gpytorch_gaps.operators.kernel_rows import fits_memory
from gpytorch_gaps.posterior.last_solutions import LastSolutions
from gpytorch_gaps.posterior.strategy import GappyGridPredictionStrategy
from gpytorch_gaps.utils.precision import cast_entries, full_float32
from gpytorch_gaps.utils.tensors import same_values


class GappyGridKernel(GridKernel):
    """Product kernel on a grid, ``k(x, x') = prod_i k_i(x_i, x'_i)``, where x_i are the columns of axis i.

    It is exact for any inputs; only the representation of the covariance depends on them. Between cells of the grid it
    is a :class:`SelectedKroneckerOperator`, with rectangular factors for points that form a grid of their own. Between
    scattered points and cells it is a :class:`KhatriRaoOperator`. Between scattered points, or for a batch of
    different inputs, it is dense, or computed row by row if that would exceed ``settings.prediction_memory``.

    The kernel owns two caches that live as long as it does and that copies and pickles leave out: the cells of the last
    few inputs (`Lookups`), and the last solutions for training data (`solutions`), where the next solve starts.

    :param kernels: one GPyTorch kernel per axis, of any class. Kernel i receives only the columns of axis i. An
        ``IndexKernel`` (one task per output) needs an axis of codes 0 .. T-1.
    :param grid: the grid.
    :param active_dims: the input columns that belong to the grid, if the inputs have further columns.
    :raises ValueError: if the kernels do not match the axes of the grid.

    >>> from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
    >>> grid = CartesianGrid([range(4), range(3)])
    >>> kernel = ScaleKernel(GappyGridKernel([RBFKernel(), MaternKernel(nu=1.5)], grid))
    >>> train_x = grid.points(torch.tensor([0, 1, 5, 11]))
    >>> covariance = kernel(train_x).evaluate_kernel()
    >>> type(covariance).__name__, tuple(covariance.shape)
    ('SelectedKroneckerOperator', (4, 4))
    """

    def __init__(
        self, kernels: Sequence[Kernel], grid: CartesianGrid, active_dims: Sequence[int] | Tensor | None = None
    ) -> None:
        super().__init__(active_dims=active_dims)
        _check_kernels(kernels, grid)
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
        if rows is not None and cols is not None:
            factors = self._factors(rows.axes, cols.axes, **params)
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
        width = sum(cells.shape)
        if not (fits_memory(len(scattered), width) or differentiable or self._learns()):
            return KernelRowsOperator(scattered, x, kernel=self, params=params, width=width)
        factors = self._factors(self._split(scattered), cells.axes, **params)
        kind: dict[str, Any] = {"points": scattered.detach(), "out_dtype": scattered.dtype}
        return KhatriRaoOperator(*factors, col_index=cells.index, **kind)

    def _learns(self) -> bool:
        """Whether the hyperparameters must be differentiated."""
        return torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())

    def cells_of(self, x: Tensor, training: bool = True) -> Cells | None:
        """Points as cells of this grid, or of the grid of their own coordinates; None if they are scattered.

        :param x: points, shape (N, D).
        :param training: False for test points: those on a small part of this grid are given as cells of that part.
        :return: the cells.
        """

        def look_up() -> Cells | None:
            here = on_grid(self.grid, x)
            if here is not None and (training or 2 * len(x) > self.grid.num_cells):
                return here
            own = own_grid(self.grid, x)
            return here if own is None or own.index.numel() == 0 else own

        found = self._lookups.get("training" if training else "other", self.grid, x, look_up)
        if found is not None and found.axes[0] is not self.grid.axes[0]:
            _check_all_codes(self.kernels, found.axes)  # a kernel that shares the look-ups may have found these points
        return found

    def share_lookups(self, other: "GappyGridKernel") -> None:
        """Uses the cached look-ups of another kernel on the same grid.

        :param other: the kernel.
        """
        self._lookups = other._lookups

    def _factors(self, rows: Sequence[Tensor], cols: Sequence[Tensor], **params: Any) -> list[Tensor]:
        """Covariance of each axis, in float64 unless a kernel can only be evaluated in float32."""
        sides = zip(self.kernels, rows, cols, strict=True)
        factors = [covariance_in_float64(kernel, row, col, **params) for kernel, row, col in sides]
        narrow = any(factor.dtype == torch.float32 for factor in factors)
        return [factor.float() for factor in factors] if narrow else factors

    def _split(self, x: Tensor) -> list[Tensor]:
        """The columns of each axis."""
        parts = [x[..., columns] for columns in self.grid.columns]
        _check_all_codes(self.kernels, parts)
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
        return type(self)([kernel.expand_batch(shape) for kernel in self.kernels], self.grid, self.active_dims)

    def __getitem__(self, index: Any) -> Self:
        if not self.batch_shape:
            return self
        members = [kernel.expand_batch(self.batch_shape)[index] for kernel in self.kernels]
        return type(self)(members, self.grid, self.active_dims)


def _check_kernels(kernels: Any, grid: Any) -> None:
    """Checks that there is one kernel per axis, which takes the columns of that axis."""
    if not isinstance(grid, CartesianGrid):
        raise ValueError(f"grid: got {type(grid).__name__}, expected a CartesianGrid")
    if isinstance(kernels, Kernel):
        raise ValueError(f"kernels: got one {type(kernels).__name__}, expected a list of one kernel per axis")
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
        active = kernel.active_dims
        if active is not None and (int(active.max()) >= columns or int(active.min()) < -columns):
            raise ValueError(
                f"kernels: axis {axis}: got active_dims={active.tolist()}, expected columns of that axis only, 0 "
                f"to {columns - 1}, or none: a kernel sees its own axis"
            )


def _check_all_codes(kernels: Any, axes: Sequence[Tensor]) -> None:
    for axis, (kernel, points) in enumerate(zip(kernels, axes, strict=True)):
        _check_codes(f"x: the column of axis {axis}", kernel, points)


def _check_codes(name: str, kernel: Kernel, points: Tensor, selects: bool = True) -> None:
    """Checks that an IndexKernel receives integer codes. It would truncate others: 0.5 would silently be output 0.

    Only the columns that reach the IndexKernel count. A sum or product calls the kernels inside it, which select
    columns by their own `active_dims`; any other kernel selects columns for the kernel that it wraps.

    :param selects: whether the kernel selects columns itself.
    """
    points = points.unsqueeze(-1) if points.dim() == 1 else points
    columns = getattr(kernel, "replaced_active_dims", kernel.active_dims if selects else None)
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
