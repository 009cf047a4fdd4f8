"""The posterior mean of a large grid, evaluated in parts."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from gpytorch.kernels import Kernel
from numpy.typing import ArrayLike
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.linalg.khatri_rao import khatri_rao_matmul
from gpytorch_gaps.linalg.products import kron_matmul
from gpytorch_gaps.reconstruction.noise_levels import NoiseLevels
from gpytorch_gaps.reconstruction.output import ResumableNpy
from gpytorch_gaps.reconstruction.prior_mean import PriorMean, mean_at, mean_of_slices, name_of_mean
from gpytorch_gaps.reconstruction.report import ReconstructionReport
from gpytorch_gaps.reconstruction.sharding import ShardedWeights, Weights
from gpytorch_gaps.reconstruction.variance import DrawnVariance
from gpytorch_gaps.utils.files import digest, refuse_directory
from gpytorch_gaps.utils.progress import with_bar

_SLAB_NUMBERS = 2**22  # numbers that are expanded at once; four times as many are written at once


class Reconstruction:
    """The posterior mean ``f = mean + Phi w`` of a grid: the result of :func:`reconstruct`.

    Attributes: `shape`; `dtype`, that of the values; `report`; `mean`; `weights`, an array with one axis for each axis
    of the grid; and `rows`, the slices ``(start, stop)`` of the first axis that belong to this process.

    If there are several processes, each can evaluate any slice. There is an exception: for rough kernels, which keep
    all eigenvectors, the weights are divided among the processes, and each evaluates only its own `rows`.

    >>> import numpy as np, gpytorch_gaps as gaps
    >>> from gpytorch.kernels import RBFKernel
    >>> values = np.full((40, 30), 2.0)
    >>> values[10:20, 5:15] = np.nan
    >>> result = gaps.reconstruct(values, None, [RBFKernel(), RBFKernel()], noise=0.01, mean=2.0, progress=False)
    >>> result.slab(12, 14).shape, result.at([[12.5, 7.5]]).tolist()
    (torch.Size([2, 30]), [2.0])

    :param grid: the coordinates.
    :param terms: one kernel, or its matrix, per axis, for each term of a sum.
    :param layout: which weights and slices this process holds.
    :param weights: the weights w held here.
    :param mean: the prior mean.
    :param dtype: precision of the results.
    :param report: the report of the reconstruction.
    :param variance: estimates of the posterior variance, if there are draws.
    :param levels: the noise, by which values were scaled if it has levels.
    """

    def __init__(
        self,
        grid: CartesianGrid,
        terms: Sequence[Sequence[Kernel | Tensor]],
        layout: Weights,
        weights: Tensor,
        mean: PriorMean,
        dtype: torch.dtype,
        report: ReconstructionReport,
        variance: DrawnVariance | None = None,
        levels: NoiseLevels | None = None,
    ) -> None:
        self.shape, self.dtype, self.report, self.weights, self.mean = grid.shape, dtype, report, weights, mean
        self.rows = (layout.own_rows.start, layout.own_rows.stop)
        self._grid, self._terms, self._basis, self._comm = grid, terms, layout.basis, layout.comm
        self._box = layout.basis.to_box(weights)
        self._variance = variance
        self._levels = levels or NoiseLevels(1.0, None, grid.shape, weights.device)
        self._half: Tensor | None = None  # Phi_1 w at the slices of this process, if the weights are sharded
        if isinstance(layout, ShardedWeights):
            self._half = layout.expand_first(self._basis.vectors[0], weights).flatten(1)

    def __repr__(self) -> str:
        return f"<Reconstruction {self.report}>"

    def slab(self, start: int, stop: int) -> Tensor:
        """The mean at some slices of the first axis.

        :param start: first slice.
        :param stop: slice after the last one.
        :return: shape (stop - start, m_2, .., m_d), in the precision of the values.
        :raises ValueError: if there are no such slices, or another process holds them.
        """
        first, last = (0, self.shape[0]) if self._half is None else self.rows
        if not first <= start <= stop <= last:
            raise ValueError(f"slab: got {start} to {stop}, expected slices from {first} to {last}")
        others = self._basis.vectors[1:]
        result = torch.empty(stop - start, *self.shape[1:], dtype=self.dtype, device=self.weights.device)
        step = max(1, _SLAB_NUMBERS // math.prod(self.shape[1:]))
        for at in range(start, stop, step):
            rows = slice(at, min(at + step, stop))
            part = self._expand_first(rows).unsqueeze(-1)
            part = kron_matmul(others, part) if others else part
            mean = mean_of_slices(self.mean, self._grid, rows.start, rows.stop)
            scale = self._levels.of_slices(rows.start, rows.stop)
            result[rows.start - start : rows.stop - start] = part.reshape(-1, *self.shape[1:]) * scale + mean
        return result

    def variance_slab(self, start: int, stop: int) -> Tensor:
        """The posterior variance of f, without noise, at some slices of the first axis, estimated from draws.

        >>> import numpy as np, gpytorch_gaps as gaps
        >>> from gpytorch.kernels import RBFKernel
        >>> values = np.where(np.arange(40) % 20 < 5, np.nan, 0.0)
        >>> options = {"noise": 0.01, "draws": 8, "progress": False}
        >>> result = gaps.reconstruct(values, None, [RBFKernel()], **options)
        >>> bool(result.variance_slab(20, 21) > 10 * result.variance_slab(30, 31))
        True

        :param start: first slice.
        :param stop: slice after the last one.
        :return: shape (stop - start, m_2, .., m_d), in the precision of the values.
        :raises ValueError: if there are no such slices, or no draws.
        """
        if not 0 <= start <= stop <= self.shape[0]:
            raise ValueError(f"slab: got {start} to {stop}, expected slices from 0 to {self.shape[0]}")
        return (self._drawn.slab(start, stop) * self._levels.of_slices(start, stop) ** 2).to(self.dtype)

    def variance_at(self, positions: Sequence[ArrayLike | Tensor]) -> Tensor:
        """The posterior variance of f, without noise, at a product of positions on the grid, such as a block of it.

        :param positions: numbers of the cells along each axis, shape (k_i,).
        :return: shape (k_1, .., k_d), in the precision of the values.
        :raises ValueError: if there are no draws.
        """
        cells = [torch.as_tensor(own, device=self.weights.device) for own in positions]
        return (self._drawn.at(cells) * self._levels.at(cells) ** 2).to(self.dtype)

    @property
    def _drawn(self) -> DrawnVariance:
        if self._variance is None:
            raise ValueError(
                "draws: got none, expected some for standard deviations, such as reconstruct(.., draws=16)"
            )
        return self._variance

    def std_slab(self, start: int, stop: int) -> Tensor:
        """The posterior standard deviation of f, without noise, at some slices: the root of :meth:`variance_slab`.

        :param start: first slice.
        :param stop: slice after the last one.
        :return: shape (stop - start, m_2, .., m_d), in the precision of the values.
        :raises ValueError: if there are no such slices, or no draws.
        """
        return self.variance_slab(start, stop).sqrt()

    def _expand_first(self, rows: slice) -> Tensor:
        """``Phi_1 w`` at some slices. shape: (k, r_2 .. r_d)"""
        if self._half is not None:
            return self._half[rows.start - self.rows[0] : rows.stop - self.rows[0]]
        first = self._basis.vectors[0]
        return first[rows] @ self._box.reshape(first.size(-1), -1)

    def at(self, points: ArrayLike | Tensor) -> Tensor:
        """The mean at any points, on the grid or off it.

        It is ``k(x, X) a`` in the basis: ``(x)_i [k_i(x_i, X_i) Phi_i] T^-1 w``. Between the points of the grid, it is
        as accurate as on them. Outside the grid, eigenvectors with eigenvalues far below the noise limit the accuracy
        to the root of the tolerance.

        :param points: coordinates, shape (Q, D), with D the number of input columns of all axes.
        :return: shape (Q,), in the precision of the values.
        :raises ValueError: if an axis was given by a matrix instead of a kernel, if several processes divide the
            weights among them, or if the points have the wrong shape or are not finite.
        """
        x = torch.as_tensor(points, dtype=torch.float64, device=self.weights.device)
        if x.dim() != 2 or x.size(-1) != self._grid.num_columns:
            raise ValueError(f"points: got shape {tuple(x.shape)}, expected (Q, {self._grid.num_columns})")
        if not bool(x.isfinite().all()):
            raise ValueError("points: got NaN or infinite coordinates, expected finite ones")
        if self._half is not None:
            raise ValueError(
                "points: the weights are divided among several processes, expected all of them in one. Try: slab(), or "
                "a smoother kernel, which keeps fewer eigenvectors"
            )
        with torch.no_grad():
            parts = [self._at(some) for some in x.split(max(1, _SLAB_NUMBERS // max(self.shape)))]
        return torch.cat(parts).to(self.dtype)

    def _at(self, x: Tensor) -> Tensor:
        """The mean at some points, term after term."""
        total = x.new_zeros(len(x)) + mean_at(self.mean, x)
        for kernels, term, weights in zip(self._terms, self._basis.terms, self._basis.boxes(self.weights), strict=True):
            coefficients = torch.where(term.products > 0, weights / term.products, 0.0).view(-1, 1)
            tables = []
            parts = zip(kernels, self._grid.columns, self._grid.axes, term.vectors, strict=True)
            for number, (kernel, own, axis, vectors) in enumerate(parts):
                if isinstance(kernel, Tensor):
                    raise ValueError("points: an axis has a matrix in place of a kernel, expected kernels off the grid")
                tables.append(self._levels.whiten_columns(number, kernel(x[:, own], axis).to_dense()) @ vectors)
            total += khatri_rao_matmul(tables, coefficients).squeeze(-1)
        return total

    def write(self, path: str | Path, std: str | Path | None = None) -> None:
        """Write the mean, and optionally standard deviations, as ``.npy`` files, slab by slab.

        A file appears once it is complete. Until then there is ``<path>.partial``, from which a later call for the same
        reconstruction continues. If there are several processes, all must make this call, and each writes its own
        slices.

        :param path: the file, on a file system that all processes share.
        :param std: a file for standard deviations of f, without noise.
        :raises ValueError: if nothing can be written at `path`, or if there are no draws for `std`.
        """
        path, name = Path(path), digest(self.weights, *self._basis.vectors)
        refuse_directory("path", path)
        if std is not None:
            refuse_directory("std", Path(std))
            if self._variance is None or Path(std).resolve() == path.resolve():
                came = "the file of the mean" if self._variance is not None else "a file, but there are no draws"
                raise ValueError(f"std: got {came}, expected another file, and reconstruct(.., draws=16), for example")
        self._write(path, f"{name} {name_of_mean(self.mean, self._grid)}", self.slab)
        if std is not None and self._variance is not None:
            self._write(Path(std), f"{name} {digest(self._variance.draws.deviation)}", self.std_slab)

    def _write(self, path: Path, name: str, slab: Callable[[int, int], Tensor]) -> None:
        """Write the slices of this process.

        :param name: identifies the content, so that a later call continues.
        """
        kind = "float32" if self.dtype == torch.float32 else "float64"
        (start, end), comm = self.rows, self._comm
        file = ResumableNpy(path, tuple(self.shape), kind, name, slice(start, end), comm)
        step = max(1, 4 * _SLAB_NUMBERS // math.prod(self.shape[1:]))

        def pieces() -> Iterator[None]:
            with with_bar(None, f"writing {path.name}", total=end - start, unit="slice") as bar:
                bar.update(file.rows - start)
                while file.rows < end:
                    stop = min(file.rows + step, end)
                    bar.update(stop - file.rows)
                    file.append(slab(file.rows, stop).cpu().numpy())
                    yield

        with settings.progress(settings.progress.value() and comm.is_main):
            comm.run_lockstep("writing its slices", pieces())
        file.finish()
