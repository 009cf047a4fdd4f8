"""The posterior mean of a grid too large for a model: given hyperparameters, up to 10^9 cells, slab by slab.

Values are read once. Of the grid nothing is kept but its mask, a byte a cell; what is solved for are the weights of the
kernel's own eigenvectors (:mod:`gpytorch_gaps.solvers.weight_space`), from which the mean follows anywhere.
"""

import copy
import hashlib
import math
import numbers
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel
from linear_operator.utils.warnings import NumericalWarning
from numpy.typing import ArrayLike
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.files import GrowingArray, refuse_directory, save_whole
from gpytorch_gaps.grid import CartesianGrid, read
from gpytorch_gaps.kronecker.khatri_rao import khatri_rao_matmul
from gpytorch_gaps.kronecker.products import kron_matmul
from gpytorch_gaps.kronecker.selection import unravel
from gpytorch_gaps.kronecker.tiles import MaskedGrid
from gpytorch_gaps.kronecker.truncated import TruncatedEigen, truncated_eigh
from gpytorch_gaps.progress import with_bar
from gpytorch_gaps.reports import SolveReport, report_solve
from gpytorch_gaps.slabs import Slabs
from gpytorch_gaps.solvers.weight_space import WeightSolution, WeightSolver, WeightSpace

_SLAB = 2**22  # numbers that are projected, or written, at a time
_SAVE_EVERY = 10.0  # seconds between checkpoints
_FORMAT = 1
_KEYS = {"format", "noise", "eigenvalues", "rhs", "weights", "iterations"}
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
    variance = _positive("noise", noise, "variance")
    tolerance, memory = _positive("tolerance", tolerance), _positive("memory", memory)
    system_tolerance = None if system_tolerance is None else _positive("system_tolerance", system_tolerance)
    mean = _number("mean", mean)
    if not isinstance(max_iterations, numbers.Integral) or max_iterations < 1:
        raise ValueError(f"max_iterations: got {max_iterations!r}, expected an integer of at least 1")
    grid, slabs = _grid_and_slabs(values, axes)
    owned = _checked_kernels(kernels, len(grid.shape))
    target, checkpoint = _checked_paths(output, checkpoint)
    with torch.no_grad(), settings.progress(progress):
        started = time.perf_counter()
        factors = [_factor(axis, *pair) for axis, pair in enumerate(zip(owned, grid.axes, strict=True))]
        # the original residual sees what is dropped, and is to be reached
        asked = tolerance if system_tolerance is None else min(tolerance, 0.1 * system_tolerance)
        basis = truncated_eigh(factors, asked * variance, keep_rounded=system_tolerance is not None)
        setup = time.perf_counter() - started
        space, rhs, norm = _read(slabs, basis, variance, mean)
        read = time.perf_counter() - started - setup
        state = _State(checkpoint, basis, variance, rhs)
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
        name = _digest(self.weights, *self._basis.vectors) + f" {self.mean!r}"
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


class _State:
    """The last weights, in a file, with what tells whether they belong to this problem."""

    def __init__(self, path: Path | None, basis: TruncatedEigen, noise: float, rhs: Tensor) -> None:
        self.path, self.start, self.iterations = path, None, 0
        self._problem = {"format": _FORMAT, "noise": noise, "eigenvalues": basis.products.cpu(), "rhs": rhs.cpu()}
        self._saved = time.perf_counter()
        if path is None:
            return
        if path.exists():
            self.start = self._read(path).to(rhs.device)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)

    def _read(self, path: Path) -> Tensor:
        advice = "expected one written by reconstruct; move it away to start afresh"
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:
            raise ValueError(f"checkpoint: {path} cannot be read ({type(error).__name__}); {advice}") from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT or not content.keys() >= _KEYS:
            raise ValueError(f"checkpoint: {path} is not a checkpoint of this version; {advice}")
        for name in ("noise", "eigenvalues", "rhs"):
            theirs, ours = torch.as_tensor(content[name]), torch.as_tensor(self._problem[name])
            same = theirs.shape == ours.shape and bool((theirs - ours).norm() <= 1e-8 * ours.norm())
            if not same:
                what = {"noise": "noise", "eigenvalues": "kernels, axes or tolerance", "rhs": "values or mean"}[name]
                raise ValueError(f"checkpoint: {path} belongs to another run: {what} differ; {advice}")
        weights = content["weights"]
        if weights.shape != content["rhs"].shape or not bool(weights.isfinite().all()):
            raise ValueError(f"checkpoint: {path} holds weights that are none; {advice}")
        self.iterations = int(content["iterations"])
        return weights

    def watch(self, weights: Tensor, iterations: int) -> None:
        if time.perf_counter() - self._saved > _SAVE_EVERY:
            self.save(weights, iterations)

    def save(self, weights: Tensor, iterations: int, done: bool = False) -> None:
        if self.path is not None:
            total = 0 if done else self.iterations + iterations  # from the end of a solve, nothing is left to do
            state = {"weights": weights.cpu(), "iterations": total}
            save_whole(self.path, {**self._problem, **state})
        self._saved = time.perf_counter()

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _number(name: str, value: Any, what: str = "number") -> float:
    shape = tuple(getattr(value, "shape", ()))
    if math.prod(shape) != 1:
        raise ValueError(f"{name}: got shape {shape}, expected one {what}")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: got {value!r}, expected a {what}") from error
    if not math.isfinite(number):
        raise ValueError(f"{name}: got {number}, expected a finite {what}")
    return number


def _positive(name: str, value: Any, what: str = "number") -> float:
    number = _number(name, value, what)
    if not number > 0:
        raise ValueError(f"{name}: got {number}, expected a {what} above 0")
    return number


def _checked_kernels(kernels: Any, axes: int) -> list[Kernel | Tensor]:
    """One for each axis; kernels are copied, in float64: what the user holds is not touched."""
    if not isinstance(kernels, Sequence | torch.nn.ModuleList):
        raise ValueError(f"kernels: got {type(kernels).__name__}, expected a list with one for each axis")
    if len(kernels) != axes:
        raise ValueError(f"kernels: got {len(kernels)}, expected {axes}, one for each axis")
    owned: list[Kernel | Tensor] = []
    for axis, kernel in enumerate(kernels):
        if isinstance(kernel, Kernel):
            owned.append(copy.deepcopy(kernel).double().eval())
        elif isinstance(kernel, Tensor | np.ndarray):
            owned.append(read(f"kernels: axis {axis}", kernel).tensor.detach().double())
        else:
            came = type(kernel).__name__
            raise ValueError(f"kernels: axis {axis} got {came}, expected a GPyTorch kernel, or its matrix")
    return owned


def _checked_paths(output: str | Path | None, checkpoint: str | Path | None) -> tuple[Path | None, Path | None]:
    """Better found wrong now than in an hour."""
    target, state = (None if path is None else Path(path) for path in (output, checkpoint))
    if target is not None:
        refuse_directory("output", target)
        if not target.parent.is_dir():
            raise ValueError(f"output: the directory of {target} does not exist; expected one that does")
        state = state or target.with_name(target.name + ".checkpoint")
        if state.resolve() == target.resolve():
            raise ValueError(f"checkpoint: got {state}, the output itself; expected another file")
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
        tables = [read(f"axis {i}", axis).tensor for i, axis in enumerate(axes)]
        for i, table in enumerate(tables):
            if table.dim() not in (1, 2):
                raise ValueError(f"axis {i}: got shape {tuple(table.shape)}, expected coordinates (m,) or (m, d)")
        shape = [len(table) for table in tables]
    slabs = Slabs(values, shape)
    if axes is None:
        tables = [torch.arange(size) for size in slabs.shape]
    device = values.device if isinstance(values, Tensor) else None
    return CartesianGrid([table.detach().to(device=device, dtype=torch.float64) for table in tables]), slabs


def _factor(axis: int, kernel: Kernel | Tensor, x: Tensor) -> Tensor:
    if isinstance(kernel, Tensor):
        matrix = kernel.detach().to(device=x.device, dtype=torch.float64)
    else:
        try:
            matrix = kernel.to(x.device)(x).to_dense()
        except RuntimeError as error:
            columns = x.size(-1)
            raise ValueError(
                f"kernels: axis {axis} does not take its {columns} column{'s' if columns > 1 else ''}: {error}"
            ) from error
    if matrix.shape != (len(x), len(x)):
        raise ValueError(f"kernels: axis {axis} gives shape {tuple(matrix.shape)}, expected {(len(x), len(x))}")
    if not bool(matrix.isfinite().all()):
        raise ValueError(f"kernels: axis {axis} gives NaN or infinite entries, expected finite ones")
    if bool((matrix - matrix.mT).abs().amax() > 1e-3 * matrix.abs().amax()):
        raise ValueError(f"kernels: axis {axis} differs from its transpose, expected symmetry")
    if bool(matrix.diagonal().amin() < 0):
        raise ValueError(f"kernels: axis {axis} gives negative variances, expected a positive semi-definite matrix")
    return matrix


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


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
