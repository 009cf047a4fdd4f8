"""The posterior mean of a grid too large for a model: given hyperparameters, up to 10^9 cells, slab by slab.

Values are read once. Of the grid nothing is kept but its mask, a byte a cell; what is solved for are the weights of the
kernel's own eigenvectors (:mod:`gpytorch_gaps.solvers.weight_space`), from which the mean follows anywhere.
"""

import math
import numbers
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpytorch.kernels import Kernel
from linear_operator.utils.warnings import NumericalWarning
from numpy.typing import ArrayLike
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.files import GrowingArray, digest, refuse_directory
from gpytorch_gaps.grid import CartesianGrid
from gpytorch_gaps.kronecker.khatri_rao import khatri_rao_matmul
from gpytorch_gaps.kronecker.products import kron_matmul
from gpytorch_gaps.kronecker.selection import unravel
from gpytorch_gaps.kronecker.tiles import MaskedGrid
from gpytorch_gaps.kronecker.truncated import TruncatedEigen, truncated_eigh
from gpytorch_gaps.progress import with_bar
from gpytorch_gaps.reconstruct_inputs import (
    checked_kernels,
    checked_paths,
    grid_and_slabs,
    kernel_matrix,
    number,
    positive,
)
from gpytorch_gaps.reports import SolveReport, report_solve
from gpytorch_gaps.slabs import Slabs
from gpytorch_gaps.solvers.weight_space import WeightSolution, WeightSolver, WeightSpace
from gpytorch_gaps.weight_checkpoint import WeightCheckpoint

_SLAB = 2**22  # numbers that are projected, or written, at a time
_ADVICE = "more max_iterations, more memory for the dense block of the preconditioner, or more noise"


@dataclass(frozen=True, eq=False)
class ReconstructionReport(SolveReport):
    """How a reconstruction went.

    `residual` is that of the weights' system, ``|Phi'W'y - (s2 T^-1 + Phi'W'W Phi) w| / |Phi'W'y|``, in float64;
    `system_residual` that of ``(K_XX + s2 I) a = y``, which amplifies it by up to ``|K| / s2``. `kernel_error` bounds
    ``|K - Phi T Phi'| / s2``: what the truncated basis, its factorisation and rounding leave out.
    """

    system_residual: float = math.inf
    kernel_error: float = math.inf
    shape: tuple[int, ...] = ()
    num_train: int = 0
    ranks: tuple[int, ...] = ()
    basis_size: int = 0
    read_seconds: float = 0.0
    setup_seconds: float = 0.0

    def __repr__(self) -> str:
        return f"<ReconstructionReport {self}>"

    def __str__(self) -> str:
        grid = " x ".join(map(str, self.shape))
        return (
            f"{grid} cells, {self.num_train} observed; {self.basis_size} of {math.prod(self.ranks)} basis functions, "
            f"which leave out {self.kernel_error:.1e} of the noise; {super().__str__()}; that is "
            f"{self.system_residual:.1e} in the original system; reading took {self.read_seconds:.3g} s, the basis "
            f"{self.setup_seconds:.3g} s"
        )


def reconstruct(
    values: Any,
    axes: Sequence[ArrayLike | Tensor | None] | None,
    kernels: Sequence[Kernel | Tensor],
    noise: float | Tensor,
    *,
    mean: float = 0.0,
    tolerance: float = 1e-6,
    system_tolerance: float | None = None,
    max_iterations: int = 2000,
    memory: float = 2**31,
    checkpoint: str | Path | None = None,
    output: str | Path | None = None,
    progress: bool = True,
) -> "Reconstruction":
    """The posterior mean of ``y = f + noise`` on a grid with gaps, f a GP with a product kernel.

    :param values: the grid with NaN gaps: a tensor, an array, a ``numpy.memmap`` or anything sliced like one, or an
        iterable of slabs along the first axis. Read once, never changed.
    :param axes: coordinates of each axis, (m_i,) or (m_i, d_i); None for 0, 1, .., m_i - 1, for one axis or for all.
    :param kernels: one for each axis, with its hyperparameters; or its matrix, (m_i, m_i).
    :param noise: the variance s2, above zero.
    :param mean: of f.
    :param tolerance: relative residual of the weights, a thousandth of it where gaps hang together; eigenvalues below
        `tolerance` times the noise are dropped. The error of the mean is larger where nothing is observed near.
    :param system_tolerance: what the residual of the original system must reach as well, as far as the truncated kernel
        tells; eigenvalues below a tenth of it times the noise are dropped. None: it is only reported.
    :param memory: bytes that the preconditioner may take where gaps are clustered.
    :param checkpoint: a file from which the same call goes on where it was stopped.
    :param output: an ``.npy`` file that the mean is written to. It is there once it is whole; until then
        ``<output>.partial`` and ``<output>.checkpoint`` let the same call go on where it was stopped.

    Cost: some ten sweeps over the grid of ``4 M r`` FLOPs, r the rank of the longest axis, where gaps are scattered.
    A kernel that does not truncate keeps all its eigenvectors: weights then take the memory of the grid, several times.
    """
    variance = positive("noise", noise, "variance")
    tolerance, memory = positive("tolerance", tolerance), positive("memory", memory)
    system_tolerance = None if system_tolerance is None else positive("system_tolerance", system_tolerance)
    mean = number("mean", mean)
    if not isinstance(max_iterations, numbers.Integral) or max_iterations < 1:
        raise ValueError(f"max_iterations: got {max_iterations!r}, expected an integer of at least 1")
    grid, slabs = grid_and_slabs(values, axes)
    owned = checked_kernels(kernels, len(grid.shape))
    target, checkpoint = checked_paths(output, checkpoint)
    with torch.no_grad(), settings.progress(progress):
        started = time.perf_counter()
        factors = [kernel_matrix(axis, *pair) for axis, pair in enumerate(zip(owned, grid.axes, strict=True))]
        # the original residual sees what is dropped, and is to be reached
        asked = tolerance if system_tolerance is None else min(tolerance, 0.1 * system_tolerance)
        basis = truncated_eigh(factors, asked * variance, keep_rounded=system_tolerance is not None)
        setup = time.perf_counter() - started
        space, rhs, norm = _read(slabs, basis, variance, mean)
        read = time.perf_counter() - started - setup
        state = WeightCheckpoint(checkpoint, basis, variance, rhs)
        solver = WeightSolver(
            space,
            rhs,
            norm,
            tolerance=tolerance,
            system_tolerance=system_tolerance,
            max_iterations=max_iterations,
            memory=memory,
            watch=state.watch,
        )
        begun = time.perf_counter()
        found = solver.solve(state.start, state.iterations)
        state.save(found.weights, found.iterations, done=found.converged)
        report = _report(space, found, time.perf_counter() - begun, tolerance, setup, read)
        advice = _ADVICE
        if system_tolerance is not None and report.worst_residual <= tolerance:
            advice = (
                f"a larger system_tolerance: the residual of the original system is {report.system_residual:.1e} where "
                f"{system_tolerance:.1e} was asked for, which rounding may forbid"
            )
        report_solve(report, advice)
        if report.kernel_error > 1.0:
            warnings.warn(
                f"the kernel is known to {report.kernel_error:.1e} times the noise only: float64 does not resolve "
                "eigenvalues as small as the noise. Try: more noise, or a rougher kernel.",
                NumericalWarning,
                stacklevel=2,
            )
        result = Reconstruction(grid, owned, basis, found.weights, mean, slabs.dtype, report)
        if target is not None:
            result.write(target)
            if report.converged:
                state.remove()
    return result


class Reconstruction:
    """The posterior mean ``f = mean + Phi w`` of a grid, given out in parts.

    `shape`, `dtype` (that of the values), `report`, and `weights`, a box with one axis for each axis of the grid.
    """

    def __init__(
        self,
        grid: CartesianGrid,
        kernels: Sequence[Kernel | Tensor],
        basis: TruncatedEigen,
        weights: Tensor,
        mean: float,
        dtype: torch.dtype,
        report: ReconstructionReport,
    ) -> None:
        self.shape, self.dtype, self.report, self.weights, self.mean = grid.shape, dtype, report, weights, mean
        self._grid, self._kernels, self._basis = grid, kernels, basis

    def __repr__(self) -> str:
        return f"<Reconstruction {self.report}>"

    def slab(self, start: int, stop: int) -> Tensor:
        """The mean at slices `start` to `stop` of the first axis. shape: (stop - start, m_2, .., m_d)"""
        if not 0 <= start <= stop <= self.shape[0]:
            raise ValueError(f"slab: got {start} to {stop}, expected slices from 0 to {self.shape[0]}")
        first, *others = self._basis.vectors
        result = torch.empty(stop - start, *self.shape[1:], dtype=self.dtype, device=self.weights.device)
        lead = self.weights.reshape(first.size(-1), -1)
        step = max(1, _SLAB // math.prod(self.shape[1:]))
        for at in range(start, stop, step):
            rows = slice(at, min(at + step, stop))
            part = (first[rows] @ lead).unsqueeze(-1)  # shape: (k, r_2 .. r_d, 1)
            part = kron_matmul(others, part) if others else part
            result[rows.start - start : rows.stop - start] = part.reshape(-1, *self.shape[1:]) + self.mean
        return result

    def at(self, points: ArrayLike | Tensor) -> Tensor:
        """The mean at any points, on the grid or off it. shape: (Q, D) -> (Q,)

        ``k(x, X) a`` in the basis: ``(x)_i [k_i(x_i, X_i) Phi_i] T^-1 w``. Between the points of the grid it is as
        exact as on them; beyond, by directions that the noise hides on the grid, to the root of the tolerance.
        """
        x = torch.as_tensor(points, dtype=torch.float64, device=self.weights.device)
        if x.dim() != 2 or x.size(-1) != self._grid.num_columns:
            raise ValueError(f"points: got shape {tuple(x.shape)}, expected (Q, {self._grid.num_columns})")
        if not bool(x.isfinite().all()):
            raise ValueError("points: got NaN or infinite coordinates, expected finite ones")
        kernels = [kernel for kernel in self._kernels if not isinstance(kernel, Tensor)]
        if len(kernels) < len(self._kernels):
            raise ValueError("points: an axis was given by a matrix, expected kernels, to be evaluated off the grid")
        products = self._basis.products
        coefficients = torch.where(products > 0, self.weights / products, 0.0).view(-1, 1)
        parts = []
        with torch.no_grad():
            for some in x.split(max(1, _SLAB // max(self.shape))):
                tables = [
                    kernel(some[:, columns], axis).to_dense() @ vectors
                    for kernel, columns, axis, vectors in zip(
                        kernels, self._grid.columns, self._grid.axes, self._basis.vectors, strict=True
                    )
                ]
                parts.append(khatri_rao_matmul(tables, coefficients).squeeze(-1) + self.mean)
        return torch.cat(parts).to(self.dtype)

    def write(self, path: str | Path) -> None:
        """Writes the mean as an ``.npy`` file, slab by slab.

        The file appears once it is whole. Until then there is ``<path>.partial``, from which a call for the same
        reconstruction goes on.
        """
        refuse_directory("path", Path(path))
        name = digest(self.weights, *self._basis.vectors) + f" {self.mean!r}"
        kind = "float32" if self.dtype == torch.float32 else "float64"
        file = GrowingArray(Path(path), tuple(self.shape), kind, name)
        step = max(1, 4 * _SLAB // math.prod(self.shape[1:]))
        with with_bar(None, f"writing {Path(path).name}", total=self.shape[0], unit="slice") as bar:
            bar.update(file.rows)
            while file.rows < self.shape[0]:
                stop = min(file.rows + step, self.shape[0])
                bar.update(stop - file.rows)
                file.append(self.slab(file.rows, stop).cpu().numpy())
        file.finish()


def _read(slabs: Slabs, basis: TruncatedEigen, noise: float, mean: float) -> tuple[WeightSpace, Tensor, float]:
    """One pass over the values: the mask, ``Phi' W' (y - mean)`` and its ``|y - mean|``."""
    first, *others = basis.vectors
    transposed = [vectors.mT for vectors in others]
    rest, device = slabs.shape[1:], first.device
    observed = torch.empty(slabs.shape, dtype=torch.bool, device=device)
    rhs, square = first.new_zeros(first.size(-1), math.prod(basis.ranks[1:])), 0.0
    step = max(1, _SLAB // math.prod(rest))
    with with_bar(None, "reading", total=slabs.shape[0], unit="slice") as bar:
        for start, slab in slabs:
            for at in range(0, len(slab), step):
                part = slab[at : at + step].to(device)
                rows = slice(start + at, start + at + len(part))
                torch.logical_not(part.isnan(), out=observed[rows])
                y = part.to(torch.float64, copy=True).sub_(mean)
                y.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
                y = y.reshape(len(part), -1, 1)
                projected = kron_matmul(transposed, y) if others else y
                rhs.addmm_(first[rows].mT, projected.reshape(len(part), -1))
                size = float(y.square().sum())
                if not math.isfinite(size):
                    largest = unravel(y.abs().flatten().argmax(), (len(part), *rest))
                    where = tuple(int(position) for position in largest)
                    what = (
                        "infinite" if bool(part[where].isinf()) else f"{float(part[where])}, whose square is infinite"
                    )
                    where = (where[0] + rows.start, *where[1:])
                    raise ValueError(f"values: entry {where} is {what}; expected finite values, or NaN for gaps")
                square += size
            bar.update(len(slab))
    grid = MaskedGrid(observed)
    space = WeightSpace(grid, basis, noise)
    if not space.num_train:
        raise ValueError(f"values: got {grid.num_cells} entries, all of them gaps; expected at least one observation")
    return space, rhs.view(basis.ranks) * (basis.products > 0), math.sqrt(square)


def _report(
    space: WeightSpace, found: WeightSolution, seconds: float, tolerance: float, setup: float, read: float
) -> ReconstructionReport:
    return ReconstructionReport(
        method="spectral",
        iterations=found.iterations,
        residual=torch.tensor([found.residual], dtype=torch.float64),
        seconds=seconds,
        rank=found.rank,
        num_rhs=1,
        converged=found.converged,
        tolerance=tolerance,
        refinements=found.passes,
        flops=found.flops,
        expected_seconds=space.expected_seconds(tolerance),
        reason=("no axis truncates: this is fill-gaps; " if space.basis.is_full else "")
        + f"about {space.expected_iterations(tolerance):.0f} iterations if the gaps are scattered",
        system_residual=found.system_residual,
        kernel_error=space.basis.error / space.noise,
        shape=space.basis.shape,
        num_train=space.num_train,
        ranks=space.basis.ranks,
        basis_size=space.basis.size,
        read_seconds=read,
        setup_seconds=setup,
    )
