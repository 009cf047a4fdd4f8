"""The arguments of `reconstruct`, checked before any values are read: reading may take an hour."""

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel
from numpy.typing import ArrayLike
from torch import Tensor

from gpytorch_gaps.distributed.agreement import describe_kernel, describe_values
from gpytorch_gaps.distributed.communicator import Communicator
from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.linalg.symmetry import largest_and_asymmetry
from gpytorch_gaps.linalg.truncated import TruncatedEigen, truncated_eigh
from gpytorch_gaps.linalg.truncated_sum import TruncatedSum, in_one_basis
from gpytorch_gaps.reconstruction.noise_levels import NoiseLevels
from gpytorch_gaps.reconstruction.prior_mean import PriorMean, check_mean, describe_mean
from gpytorch_gaps.reconstruction.slabs import Slabs
from gpytorch_gaps.utils.checks import check_integer, check_number, read_tensor
from gpytorch_gaps.utils.files import digest, refuse_directory, require_place

Kernels = Sequence[Kernel | Tensor] | Sequence[Sequence[Kernel | Tensor]]
"""One kernel or matrix per axis; or one such list for each term of a sum."""

FEWEST_DRAWS = 8
_NUMBERS = ("noise", "tolerance", "max_iterations", "memory", "draws", "seed")
_DROPPED_SHARE = 1 / 400  # part of the tolerance for dropped eigenvalues, if residuals are as the model expects


class Problem:
    """The checked arguments of `reconstruct`, under their own names; `grid` and `slabs` come from values and axes."""

    def __init__(
        self,
        values: Any,
        axes: Sequence[ArrayLike | Tensor | None] | None,
        kernels: Kernels,
        noise: float | Tensor,
        *,
        mean: PriorMean = 0.0,
        tolerance: float = 1e-2,
        max_iterations: int = 2000,
        memory: float = 2**31,
        checkpoint: str | Path | None = None,
        output: str | Path | None = None,
        draws: int = 0,
        seed: int = 0,
        noise_axis: int | None = None,
    ) -> None:
        self.tolerance = check_number("tolerance", tolerance, above=0)
        self.memory = check_number("memory", memory, above=0)
        self.max_iterations = check_integer("max_iterations", max_iterations, at_least=1)
        self.draws, self.seed = check_integer("draws", draws, at_least=0), check_integer("seed", seed, at_least=0)
        if 0 < self.draws < FEWEST_DRAWS:
            raise ValueError(
                f"draws: got {draws}, expected 0 or at least {FEWEST_DRAWS}: fewer do not give error estimates"
            )
        self.grid, self.slabs = _grid_and_slabs(values, axes)
        self.levels = NoiseLevels(noise, noise_axis, self.grid.shape, self.grid.device)
        self.noise = self.levels.noise
        self.mean = check_mean(mean, self.grid.shape)
        self.terms = _own_terms(kernels, len(self.grid.shape))
        self.output, self.checkpoint = _paths(output, checkpoint)

    def require_same(self, values: Any, comm: Communicator) -> None:
        """Check that all processes have the same arguments, and that there are enough slices for all of them."""
        if comm.size == 1:
            return
        content = comm.run_on_all("looking at its values", lambda: describe_values(values))
        comm.require_same(
            {
                "values": f"{tuple(self.slabs.shape)} of {self.slabs.dtype} {content}".rstrip(),
                **{f"axis {i}": f"coordinates #{digest(axis)}" for i, axis in enumerate(self.grid.axes)},
                "kernels: number of terms": len(self.terms),
                **{
                    f"kernels: {'' if len(self.terms) == 1 else f'term {t}, '}axis {i}": describe_kernel(kernel)
                    for t, term in enumerate(self.terms)
                    for i, kernel in enumerate(term)
                },
                **{name: getattr(self, name) for name in _NUMBERS},
                "noise_axis": self.levels.axis,
                "noise of each level": "none"
                if self.levels.scale is None
                else f"variances #{digest(self.levels.scale)}",
                "mean": describe_mean(self.mean),
                "output": str(self.output),
                "checkpoint": str(self.checkpoint),
            }
        )
        if self.grid.shape[0] < comm.size:
            raise ValueError(
                f"values: got {self.grid.shape[0]} slices along the first axis for {comm.size} processes, expected at "
                "least one for each; put a longer axis first, or use fewer processes"
            )

    @property
    def kernels(self) -> list[Kernel | Tensor]:
        """The kernels of a single product.

        :raises ValueError: if there are several terms.
        """
        if len(self.terms) > 1:
            raise ValueError(
                f"kernels: got a sum of {len(self.terms)} products; expected one, one kernel for each axis"
            )
        return self.terms[0]

    def basis(self, share: float | None = None) -> TruncatedEigen | TruncatedSum:
        """The eigenvectors of the kernel that matter at this noise and tolerance, or above a share of the noise."""
        level = self.noise * (share or truncation_level(self.tolerance, self.grid.num_cells))
        self.diagonals, found = [], []
        for term in self.terms:
            axes = enumerate(zip(term, self.grid.axes, strict=True))
            factors = [self.levels.whiten(axis, kernel_matrix(axis, kernel, x)) for axis, (kernel, x) in axes]
            self.diagonals.append([factor.diagonal().clone() for factor in factors])
            found.append(truncated_eigh(factors, level / len(self.terms)))
        return found[0] if len(found) == 1 else in_one_basis(tuple(found), level)

    @property
    def truncation_error(self) -> float:
        """The error of the mean from dropped eigenvalues, in posterior standard deviations, for a misfit of 1."""
        return _DROPPED_SHARE * self.tolerance


def truncation_level(tolerance: float, cells: int) -> float:
    """The level, relative to the noise, below which eigenvalues are dropped for an error within `tolerance`.

    Let ``K_d`` be the part of the kernel with eigenvalues below the level. Without it, the mean at x lacks the term
    ``k_d(x, X) a`` with ``a = (y - f) / s2``. If residuals are as the model expects, the variance of this term is at
    most ``level k_d(x, x) / s2``. The posterior variance at x is, nearly, at least ``k_d(x, x)``. Hence the error is
    ``sqrt(level / s2)`` standard deviations, or ``sqrt(2 log 2M)`` times that at the worst of M cells.
    """
    return (_DROPPED_SHARE * tolerance) ** 2 / (2.0 * math.log(2.0 * cells))


def _own_terms(kernels: Any, axes: int) -> list[list[Kernel | Tensor]]:
    """One kernel or matrix per axis, for every term. Kernels are copied in float64.

    A kernel that several axes or terms share remains a single kernel.
    """
    copies: dict[int, Any] = {}
    many = isinstance(kernels, Sequence) and len(kernels) > 0
    if many and all(isinstance(term, Sequence | torch.nn.ModuleList) for term in kernels):
        return [_own_kernels(term, axes, copies) for term in kernels]
    return [_own_kernels(kernels, axes, copies)]


def _own_kernels(kernels: Any, axes: int, copies: dict[int, Any]) -> list[Kernel | Tensor]:
    """The kernels of one term."""
    if not isinstance(kernels, Sequence | torch.nn.ModuleList):
        raise ValueError(f"kernels: got {type(kernels).__name__}, expected a list with one for each axis")
    if len(kernels) != axes:
        raise ValueError(f"kernels: got {len(kernels)}, expected {axes}, one for each axis")
    owned: list[Kernel | Tensor] = []
    for axis, kernel in enumerate(kernels):
        if isinstance(kernel, Kernel):
            owned.append(copy.deepcopy(kernel, copies).double().eval())
        elif isinstance(kernel, Tensor | np.ndarray):
            owned.append(read_tensor(f"kernels: axis {axis}", kernel).tensor.detach().double())
        else:
            came = type(kernel).__name__
            raise ValueError(f"kernels: axis {axis} got {came}, expected a GPyTorch kernel, or its matrix")
    return owned


def _paths(output: str | Path | None, checkpoint: str | Path | None) -> tuple[Path | None, Path | None]:
    """The paths of the output and of the checkpoint. Default of the checkpoint: a file beside the output."""
    target, state = (None if path is None else Path(path) for path in (output, checkpoint))
    if target is not None:
        require_place("output", target)
        if target.suffix != ".npy":
            raise ValueError(f"output: got {target.name}, expected a name that ends in .npy")
        state = state or target.with_name(target.name + ".checkpoint")
        if state.resolve() == target.resolve():
            raise ValueError(f"checkpoint: got {state}, the path of the output; expected another file")
    if state is not None:
        refuse_directory("checkpoint", state)
    return target, state


def _grid_and_slabs(values: Any, axes: Sequence[Any] | None) -> tuple[CartesianGrid, Slabs]:
    shape = None
    if axes is not None:
        own = getattr(values, "shape", None)
        if own is not None and len(own) != len(axes):
            raise ValueError(f"axes: got {len(axes)}, expected {len(own)}, one for each dimension of values")
        if own is None and any(axis is None for axis in axes):
            raise ValueError("axes: got None with an iterable of slabs, expected the coordinates of each axis")
        axes = [range(int(own[i])) if axis is None else axis for i, axis in enumerate(axes)]  # type: ignore[index]
        tables = [read_tensor(f"axis {i}", axis).tensor for i, axis in enumerate(axes)]
        for i, table in enumerate(tables):
            if table.dim() not in (1, 2):
                raise ValueError(f"axis {i}: got shape {tuple(table.shape)}, expected coordinates (m,) or (m, d)")
        shape = [len(table) for table in tables]
    slabs = Slabs(values, shape)
    if axes is None:
        tables = [torch.arange(size) for size in slabs.shape]
    device = values.device if isinstance(values, Tensor) else None
    return CartesianGrid([table.detach().to(device=device, dtype=torch.float64) for table in tables]), slabs


def kernel_matrix(axis: int, kernel: Kernel | Tensor, x: Tensor) -> Tensor:
    """K_i at the coordinates of an axis, checked to be a covariance matrix. shape: (m_i, m_i)"""
    if isinstance(kernel, Tensor):
        matrix = kernel.detach().to(device=x.device, dtype=torch.float64)
    else:
        try:
            matrix = kernel.to(x.device)(x).to_dense()
        except RuntimeError as error:
            columns = x.size(-1)
            raise ValueError(
                f"kernels: axis {axis} cannot be evaluated on {columns} column{'s' if columns > 1 else ''}: {error}"
            ) from error
    if matrix.shape != (len(x), len(x)):
        raise ValueError(f"kernels: axis {axis} gives shape {tuple(matrix.shape)}, expected {(len(x), len(x))}")
    largest, asymmetry = largest_and_asymmetry(matrix)
    if not math.isfinite(largest + asymmetry):  # Python's max() may ignore a NaN
        raise ValueError(f"kernels: axis {axis} gives NaN or infinite entries, expected finite ones")
    if asymmetry > 1e-3 * largest:
        raise ValueError(f"kernels: axis {axis} gives a matrix that is not symmetric, expected a symmetric one")
    if bool(matrix.diagonal().amin() < 0):
        raise ValueError(f"kernels: axis {axis} gives negative variances, expected a positive semi-definite matrix")
    return matrix
