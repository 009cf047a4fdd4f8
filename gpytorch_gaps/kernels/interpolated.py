"""Structured kernel interpolation at scattered points, with our solves: GPyTorch's kernel with another covariance."""

from typing import Any

import torch
from gpytorch.kernels import AdditiveKernel, GridInterpolationKernel, Kernel, ScaleKernel
from gpytorch.utils.grid import create_grid
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpytorch_gaps.kernels.axis_factors import axis_factors, check_factorises
from gpytorch_gaps.linalg.interpolation import GridInterpolation
from gpytorch_gaps.operators import InterpolatedKroneckerOperator
from gpytorch_gaps.operators.inspect import one_member
from gpytorch_gaps.posterior.strategy import GappyGridPredictionStrategy
from gpytorch_gaps.utils.cache import TensorCache
from gpytorch_gaps.utils.precision import cast_entries, full_float32
from gpytorch_gaps.utils.tensors import same_values

_FEWEST_PLACES = 6  # per axis; the outermost two on each side lie beyond the points
_MARGIN = 2.01  # spacings between the points and the border of a grid that is created for them, as in GPyTorch


def preconditioned_ski(kernel: Kernel) -> Kernel:
    """A kernel like `kernel`, whose ``GridInterpolationKernel`` has our covariance, solves and preconditioner.

    Base kernels, and all hyperparameters, are those of `kernel`; state dicts have the same keys.

    - The covariance is an :class:`~gpytorch_gaps.operators.InterpolatedKroneckerOperator`. With noise, its solves are
      preconditioned by interpolated eigenvectors of the grid.
    - Axes may have different lengths and length-scales (ARD). GPyTorch's kernel exchanges the axes in these cases.
    - A ``ScaleKernel`` inside the ``GridInterpolationKernel`` is applied once. GPyTorch applies it once per column.
    - A kernel on several columns is replaced by the product of its one-dimensional versions, as in GPyTorch. This is
      the same kernel if it is squared-exponential, but not if it is a Matern kernel.
    - If there are no ``grid_bounds``, the grid is created for the training points. Test points outside it raise an
      error: on another grid, the kernel would differ from the trained one.

    :param kernel: a ``GridInterpolationKernel``, or scales and sums of them (``ScaleKernel``, ``AdditiveKernel``).
    :return: the kernel, for any ``ExactGP``.
    :raises ValueError: if there is no ``GridInterpolationKernel`` inside, if there is one in another place, such as in
        a product, or if its base kernel is not a product over the columns.

    >>> from gpytorch.kernels import RBFKernel
    >>> ski = GridInterpolationKernel(RBFKernel(ard_num_dims=2), [60, 90], grid_bounds=((0.0, 1.0), (0.0, 1.0)))
    >>> kernel = preconditioned_ski(ScaleKernel(ski))
    >>> points = torch.rand(5, 2)
    >>> covariance = kernel(points).evaluate_kernel()
    >>> type(covariance).__name__
    'InterpolatedKroneckerOperator'
    >>> bool((covariance.to_dense() - ScaleKernel(ski.base_kernel)(points).to_dense()).abs().max() < 1e-4)
    True
    """
    if not isinstance(kernel, Kernel):
        raise ValueError(f"kernel: got {type(kernel).__name__}, expected a GPyTorch kernel")
    if not any(isinstance(part, GridInterpolationKernel) for part in kernel.modules()):
        raise ValueError(f"kernel: got {type(kernel).__name__}, expected one with a GridInterpolationKernel inside")
    return _converted(kernel)


def _converted(kernel: Kernel) -> Kernel:
    if isinstance(kernel, InterpolatedGridKernel):
        return kernel
    if isinstance(kernel, GridInterpolationKernel):
        return _interpolated(kernel)
    if not any(isinstance(part, GridInterpolationKernel) for part in kernel.modules()):
        return kernel
    if isinstance(kernel, ScaleKernel):
        return _with_modules(kernel, {"base_kernel": _converted(kernel.base_kernel)})
    if isinstance(kernel, AdditiveKernel):
        return _with_modules(kernel, {"kernels": torch.nn.ModuleList([_converted(own) for own in kernel.kernels])})
    raise ValueError(
        f"kernel: got a GridInterpolationKernel inside the kernel {type(kernel).__name__}, expected one inside "
        "scales and sums only. Try: move a product inside, GridInterpolationKernel(first * second)"
    )


def _with_modules(kernel: Kernel, changed: dict[str, torch.nn.Module]) -> Kernel:
    """A copy with some submodules replaced. It shares its other parameters, priors and constraints with `kernel`."""
    own = kernel.__class__.__new__(kernel.__class__)  # copy.copy of a GPyTorch kernel shares all of its attributes
    own.__dict__ = {**kernel.__dict__, "_modules": {**kernel._modules, **changed}}
    return own


def _interpolated(kernel: GridInterpolationKernel) -> "InterpolatedGridKernel":
    own = InterpolatedGridKernel(
        kernel.base_kernel,
        kernel.grid_sizes,
        num_dims=kernel.num_dims,
        grid_bounds=None if kernel.grid_is_dynamic else kernel.grid_bounds,
        active_dims=kernel.active_dims,
    )
    own.grid_bounds = kernel.grid_bounds
    own.update_grid([axis.clone() for axis in kernel.grid])
    own.has_initialized_grid = kernel.has_initialized_grid.clone()
    own.train(kernel.training)
    return own


class InterpolatedGridKernel(GridInterpolationKernel):
    """A ``GridInterpolationKernel`` with our covariance, created by :func:`preconditioned_ski`. Same arguments.

    :param base_kernel: a product over the columns of its input: see :func:`preconditioned_ski`.
    :param grid_size: number of places on each axis, or one number for all axes.
    :param num_dims: the number of axes, if there are no `grid_bounds`.
    :param grid_bounds: smallest and largest coordinate on every axis. Default: those of the training points.
    :param active_dims: the input columns to use, one per axis.
    :raises ValueError: if an axis has too few places, or the base kernel is not a product over the columns.

    >>> from gpytorch.kernels import RBFKernel
    >>> kernel = InterpolatedGridKernel(RBFKernel(), [20, 30], grid_bounds=((0.0, 1.0), (0.0, 1.0)))
    >>> tuple(kernel(torch.rand(5, 2)).evaluate_kernel().factors[1].shape)
    (30, 30)
    """

    grid_bounds: Any

    def __init__(self, base_kernel: Kernel, grid_size: Any, **options: Any) -> None:
        sizes = [grid_size] if isinstance(grid_size, int) else list(grid_size)
        if min(sizes) < _FEWEST_PLACES:
            raise ValueError(f"grid_size: got {grid_size}, expected at least {_FEWEST_PLACES} places on every axis")
        super().__init__(base_kernel, grid_size, **options)
        check_factorises(base_kernel, self.num_dims)
        self._known = TensorCache(size=12)

    @full_float32()
    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **params: Any
    ) -> Tensor | LinearOperator:
        if last_dim_is_batch:
            raise ValueError("last_dim_is_batch: got True, expected False: the columns of a grid belong together")
        first, same = self._points("x1", x1), same_values(x1, x2)
        second = first if same else self._points("x2", x2)
        rows = self._rows(first, training=same)
        columns = rows if same else self._rows(second, training=False)
        factors = axis_factors(self.base_kernel, [axis.to(x1.dtype) for axis in self._axes()], params)
        batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2], *(factor.shape[:-2] for factor in factors))
        if diag:
            return cast_entries(rows.entries(factors, columns), x1.dtype).expand(*batch, len(rows))
        covariance = InterpolatedKroneckerOperator(*factors, rows=rows, columns=columns, out_dtype=x1.dtype)
        return covariance if covariance.batch_shape == batch else covariance.expand(*batch, *covariance.shape[-2:])

    def _points(self, name: str, x: Tensor) -> Tensor:
        """Points that all members of a batch share, checked. shape: (*batch, N, d) -> (N, d)"""
        if x.size(-1) != self.num_dims:
            raise ValueError(f"{name}: got {x.size(-1)} columns, expected {self.num_dims}; active_dims selects some")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: got points that require a gradient, expected constants: detach them")
        shared = one_member(x)
        if shared is None:
            raise ValueError(f"{name}: got a batch of different points, expected the same for all members")
        return shared

    def _axes(self) -> list[Tensor]:
        """Equally spaced places in float64: buffers are rounded to float32. shape: (m_i,) each"""
        grid = self.grid

        def make() -> list[Tensor]:
            kind: dict[str, Any] = {"dtype": torch.float64, "device": grid[0].device}
            return [torch.linspace(own[0].double(), own[-1].double(), len(own), **kind) for own in grid]

        return self._known.cached("axes", grid, make)

    def _rows(self, x: Tensor, training: bool) -> GridInterpolation:
        """The interpolation at x, cached. Creates the grid first if necessary."""
        if self.grid_is_dynamic:
            may_change = training and self.training
            self._known.cached(("fitted", may_change), (x, *self.grid), lambda: self._fit_grid(x, may_change))
        return self._known.cached("rows", (x, *self.grid), lambda: GridInterpolation.cubic(self._axes(), x))

    def _fit_grid(self, x: Tensor, may_change: bool) -> None:
        """Creates a grid for points x if there is none, or if training points lie outside it."""
        if not len(x):
            return
        low, high = torch.stack([x.amin(0), x.amax(0)]).tolist()
        inside = all(a <= b and c <= d for (a, d), b, c in zip(self.grid_bounds, low, high, strict=True))
        if bool(self.has_initialized_grid) and (inside or not may_change):
            return
        sides = list(zip(self.grid_sizes, low, high, strict=True))
        # a column with a single value gets a narrow axis around it
        spacings = [(c - b) / (size - 2 * _MARGIN) or 1e-3 * max(1.0, abs(b)) for size, b, c in sides]
        bounds = [(b - _MARGIN * own, c + _MARGIN * own) for (_, b, c), own in zip(sides, spacings, strict=True)]
        self.grid_bounds = tuple(bounds)
        like = self.grid[0]
        self.update_grid(create_grid(self.grid_sizes, bounds, dtype=like.dtype, device=like.device))
        self.has_initialized_grid.fill_(True)

    def prediction_strategy(self, *args: Any, **kwargs: Any) -> GappyGridPredictionStrategy:
        """The prediction strategy of :class:`~gpytorch_gaps.GappyGridKernel`."""
        return GappyGridPredictionStrategy(*args, **kwargs)
