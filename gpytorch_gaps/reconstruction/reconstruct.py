"""The posterior mean of a grid too large for a model: given hyperparameters, up to 10^9 cells, slab by slab.

Values are read once. Of the grid nothing is kept but its mask, a byte a cell; what is solved for are the weights of the
kernel's own eigenvectors (:mod:`gpytorch_gaps.reconstruction.weight_space`), from which the mean follows anywhere.

Several processes share a grid by slices of its first axis: each reads, masks and writes its own, and what goes between
them are weights (:mod:`gpytorch_gaps.reconstruction.weights`).
"""

import copy
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from gpytorch.kernels import Kernel
from linear_operator.utils.warnings import NumericalWarning
from numpy.typing import ArrayLike
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.distributed.communicator import Traffic, ranks_of, shares
from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.linalg.khatri_rao import khatri_rao_matmul
from gpytorch_gaps.linalg.products import kron_matmul
from gpytorch_gaps.reconstruction.checkpoint import WeightCheckpoint
from gpytorch_gaps.reconstruction.inputs import Problem
from gpytorch_gaps.reconstruction.output import GrowingArray
from gpytorch_gaps.reconstruction.read import read_slabs
from gpytorch_gaps.reconstruction.same_basis import same_basis
from gpytorch_gaps.reconstruction.weight_space import WeightSolution, WeightSolver, WeightSpace
from gpytorch_gaps.reconstruction.weights import Weights, WeightsInParts, weights_for
from gpytorch_gaps.reports import SolveReport, report_solve
from gpytorch_gaps.utils.files import digest, refuse_directory
from gpytorch_gaps.utils.precision import full_float32
from gpytorch_gaps.utils.progress import format_bytes, with_bar

_SLAB = 2**22  # numbers that are written at a time
_ADVICE = "more max_iterations, more memory for the dense block of the preconditioner, or more noise"


@dataclass(frozen=True, eq=False)
class ReconstructionReport(SolveReport):
    """How a reconstruction went.

    `error_in_std` bounds the error of the mean at every point, in units of the posterior standard deviation there: what
    the solve has left, and what `kernel_error` and dropped eigenvalues may add, which grows with `misfit`. `residual`
    is that of the weights' system,
    ``|Phi'W'y - (s2 T^-1 + Phi'W'W Phi) w| / |Phi'W'y|``, in float64. `kernel_error` bounds ``|K - Phi T Phi'| / s2``:
    what the truncated basis, its factorisation and rounding leave out of the kernel itself.
    """

    kernel_error: float = math.inf
    misfit: float = math.nan
    """Root mean square of ``y - f`` at the observations, in units of the noise: about 1 or below if the noise is
    right."""
    shape: tuple[int, ...] = ()
    num_train: int = 0
    ranks: tuple[int, ...] = ()
    basis_size: int = 0
    read_seconds: float = 0.0
    setup_seconds: float = 0.0
    num_processes: int = 1
    traffic: Traffic = field(default_factory=Traffic)
    """What this rank handed to the others, from the beginning to the end of the solve."""
    bytes_per_iteration: float = 0.0
    """Of that, in the solve, an iteration."""

    def __repr__(self) -> str:
        return f"<ReconstructionReport {self}>"

    def __str__(self) -> str:
        grid = " x ".join(map(str, self.shape))
        shared = ""
        if self.num_processes > 1:
            sent = format_bytes(self.bytes_per_iteration)
            shared = f"; {self.num_processes} processes, each of which sent {sent} an iteration ({self.traffic})"
        return (
            f"{grid} cells, {self.num_train} observed; {self.basis_size} of {math.prod(self.ranks)} basis functions, "
            f"which leave out {self.kernel_error:.1e} of the noise; {super().__str__()}; reading took "
            f"{self.read_seconds:.3g} s, the basis {self.setup_seconds:.3g} s{shared}"
        )


def reconstruct(
    values: Any,
    axes: Sequence[ArrayLike | Tensor | None] | None,
    kernels: Sequence[Kernel | Tensor],
    noise: float | Tensor,
    *,
    mean: float = 0.0,
    tolerance: float = 1e-2,
    max_iterations: int = 2000,
    memory: float = 2**31,
    checkpoint: str | Path | None = None,
    output: str | Path | None = None,
    progress: bool = True,
    group: Any = None,
) -> "Reconstruction":
    """The posterior mean of ``y = f + noise`` on a grid with gaps, f a GP with a product kernel.

    :param values: the grid with NaN gaps: a tensor, an array, a ``numpy.memmap`` or anything sliced like one, or an
        iterable of slabs along the first axis. Read once, never changed.
    :param axes: coordinates of each axis, (m_i,) or (m_i, d_i); None for 0, 1, .., m_i - 1, for one axis or for all.
    :param kernels: one for each axis, with its hyperparameters; or its matrix, (m_i, m_i).
    :param noise: the variance s2, above zero.
    :param mean: of f.
    :param tolerance: largest error of the mean, at every point, in units of the posterior standard deviation there.
        The bound that is reached is in ``report.error_in_std``.
    :param memory: bytes that the preconditioner may take where gaps are clustered.
    :param checkpoint: a file from which the same call goes on where it was stopped.
    :param output: an ``.npy`` file that the mean is written to. It is there once it is whole; until then
        ``<output>.partial`` and ``<output>.checkpoint`` let the same call go on where it was stopped.
    :param group: of ``torch.distributed``, such as :func:`gpytorch_gaps.distributed.process_group` gives: its members
        make the same call, share the work by slices of the first axis, and get the same mean. An array is that of the
        whole grid, of which each reads its slices; an iterable gives the slabs of those (`distributed.own_slices`).
        Files are on a file system that all share.

    Cost: some ten sweeps over the grid of ``4 M r`` FLOPs, r the rank of the longest axis, where gaps are scattered.
    A kernel that does not truncate keeps all its eigenvectors: weights then take the memory of the grid, several times.
    """
    ranks = ranks_of(group, "reconstruct")
    problem = ranks.together(
        "checking what it was given",
        lambda: Problem(values, axes, kernels, noise, mean, tolerance, max_iterations, memory, checkpoint, output),
    )
    if ranks.size > 1:
        problem.share(values, ranks)
    grid, slabs, target = problem.grid, problem.slabs, problem.output
    with torch.no_grad(), full_float32(), settings.progress(progress if ranks.leads else False):
        started = time.perf_counter()
        basis = same_basis(ranks.together("decomposing the kernels", problem.basis), ranks)
        setup = time.perf_counter() - started
        rows = shares(grid.shape[0], ranks.size, slabs.chunk)
        weights = weights_for(basis, ranks, rows)
        slabs.rows = weights.own_rows
        space, rhs, norm = read_slabs(slabs, weights, problem.noise, problem.mean)
        read = time.perf_counter() - started - setup
        state = WeightCheckpoint(problem.checkpoint, weights, problem.noise, rhs)
        solver = WeightSolver(
            space,
            rhs,
            tolerance=problem.tolerance,
            max_iterations=max_iterations,
            memory=problem.memory,
            watch=state.watch,
        )
        begun, sent = time.perf_counter(), ranks.traffic.total
        found = solver.solve(state.start)
        sent = ranks.traffic.total - sent
        state.save(found.weights, found.iterations, done=found.converged)
        misfit = space.misfit(found.weights, rhs, norm)
        truncation = problem.truncation_error if weights.size < grid.num_cells else 0.0
        of_kernel = misfit * math.hypot(truncation, basis.error / problem.noise)
        report = replace(
            _report(space, found, solver.reduction, problem.tolerance, of_kernel),
            seconds=time.perf_counter() - begun,
            read_seconds=read,
            setup_seconds=setup,
            misfit=misfit,
            bytes_per_iteration=sent / max(1, found.iterations),
        )
        _tell(report, of_kernel)
        result = Reconstruction(grid, problem.kernels, weights, found.weights, problem.mean, slabs.dtype, report)
        if target is not None:
            result.write(target)
            if report.converged:
                ranks.together("removing its checkpoint", state.remove)
    return result


def _tell(report: ReconstructionReport, of_kernel: float) -> None:
    """Records the report, and warns of what was not reached.

    :param of_kernel: the part of the error that is due to the kernel, whose basis is truncated and rounded.
    """
    advice = _ADVICE
    if of_kernel > 0.5 * report.error_in_std:
        advice = (
            f"a larger noise: float64 knows the kernel to {report.kernel_error:.1e} of the noise variance, and the RMS "
            f"residual of the data is {report.misfit:.1e} noise standard deviations"
        )
    report_solve(report, advice)
    if report.kernel_error > 1.0:
        warnings.warn(
            f"the kernel is known to {report.kernel_error:.1e} times the noise only: float64 does not resolve "
            "eigenvalues as small as the noise. Try: more noise, or a rougher kernel.",
            NumericalWarning,
            stacklevel=3,
        )


class Reconstruction:
    """The posterior mean ``f = mean + Phi w`` of a grid, given out in parts.

    `shape`, `dtype` (that of the values), `report`, and `weights`, a box with one axis for each axis of the grid.

    Where several processes have made it, `rows` are the slices of the first axis that are this one's. It can give
    others too, but where the kernel does not truncate: the weights of one axis are then spread over all of them.
    """

    def __init__(
        self,
        grid: CartesianGrid,
        kernels: Sequence[Kernel | Tensor],
        layout: Weights,
        weights: Tensor,
        mean: float,
        dtype: torch.dtype,
        report: ReconstructionReport,
    ) -> None:
        self.shape, self.dtype, self.report, self.weights, self.mean = grid.shape, dtype, report, weights, mean
        self.rows = (layout.own_rows.start, layout.own_rows.stop)
        self._grid, self._kernels, self._basis, self._ranks = grid, kernels, layout.basis, layout.ranks
        self._half: Tensor | None = None  # (Phi_1 w) at own slices
        if isinstance(layout, WeightsInParts):
            self._half = layout.expand_first(self._basis.vectors[0], weights).flatten(1)

    def __repr__(self) -> str:
        return f"<Reconstruction {self.report}>"

    def slab(self, start: int, stop: int) -> Tensor:
        """The mean at slices `start` to `stop` of the first axis. shape: (stop - start, m_2, .., m_d)"""
        first, last = (0, self.shape[0]) if self._half is None else self.rows
        if not first <= start <= stop <= last:
            raise ValueError(f"slab: got {start} to {stop}, expected slices from {first} to {last}")
        others = self._basis.vectors[1:]
        result = torch.empty(stop - start, *self.shape[1:], dtype=self.dtype, device=self.weights.device)
        step = max(1, _SLAB // math.prod(self.shape[1:]))
        for at in range(start, stop, step):
            rows = slice(at, min(at + step, stop))
            part = self._lead(rows).unsqueeze(-1)
            part = kron_matmul(others, part) if others else part
            result[rows.start - start : rows.stop - start] = part.reshape(-1, *self.shape[1:]) + self.mean
        return result

    def _lead(self, rows: slice) -> Tensor:
        """``Phi_1 w`` at some slices. shape: (k, r_2 .. r_d)"""
        if self._half is not None:
            return self._half[rows.start - self.rows[0] : rows.stop - self.rows[0]]
        first = self._basis.vectors[0]
        return first[rows] @ self.weights.reshape(first.size(-1), -1)

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
        if self._half is not None:
            raise ValueError(
                "points: the weights are spread over several processes, expected a kernel that truncates, or slab()"
            )
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
        reconstruction goes on. Several processes write their slices each, and all have to call.
        """
        refuse_directory("path", Path(path))
        name = digest(self.weights, *self._basis.vectors) + f" {self.mean!r}"
        kind = "float32" if self.dtype == torch.float32 else "float64"
        (start, end), ranks = self.rows, self._ranks
        file = GrowingArray(Path(path), tuple(self.shape), kind, name, slice(start, end), ranks)
        step = max(1, 4 * _SLAB // math.prod(self.shape[1:]))

        def pieces() -> Iterator[None]:
            with with_bar(None, f"writing {Path(path).name}", total=end - start, unit="slice") as bar:
                bar.update(file.rows - start)
                while file.rows < end:
                    stop = min(file.rows + step, end)
                    bar.update(stop - file.rows)
                    file.append(self.slab(file.rows, stop).cpu().numpy())
                    yield

        with settings.progress(settings.progress.value() and ranks.leads):
            ranks.in_step("writing its slices", pieces())
        file.finish()


def _report(
    space: WeightSpace, found: WeightSolution, reduction: float, tolerance: float, of_kernel: float
) -> ReconstructionReport:
    """What is known without a clock.

    :param of_kernel: the error that the truncated and rounded kernel may add, in posterior standard deviations.
    """
    error_in_std = math.hypot(found.error_in_std, of_kernel)
    return ReconstructionReport(
        method="spectral",
        iterations=found.iterations,
        residual=torch.tensor([found.residual], dtype=torch.float64),
        seconds=0.0,
        rank=found.rank,
        num_rhs=1,
        converged=error_in_std <= tolerance,
        tolerance=math.inf,  # the residual is only reported
        error_in_std=error_in_std,
        std_tolerance=tolerance,
        refinements=found.passes,
        flops=found.flops,
        expected_seconds=space.expected_seconds(reduction),
        reason=("all eigenvectors of every axis are kept: this is fill-gaps; " if space.basis.is_full else "")
        + f"about {space.expected_iterations(reduction):.0f} iterations if the gaps are scattered",
        kernel_error=space.basis.error / space.noise,
        shape=space.basis.shape,
        num_train=space.num_train,
        ranks=space.basis.ranks,
        basis_size=space.weights.size,
        num_processes=space.weights.ranks.size,
        traffic=copy.deepcopy(space.weights.ranks.traffic),
    )
