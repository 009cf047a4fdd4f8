"""Common ways to fill gaps. Each takes the data set and its values without the withheld ones, and fills all cells."""

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.interpolate import griddata

from benchmarks._fill_data import CURVES, FIELD, Problem

Peer = Callable[[Problem, np.ndarray], np.ndarray]

YEAR = 365.2425
_HARMONICS = 3  # of the year
_POINTS_OF_A_SPLINE = 4
_MOST_MODES = 20  # that DINEOF tries


def without_nan(values: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Cells that a method cannot fill get the mean of the observations."""
    return np.where(np.isnan(values), np.nanmean(seen), values)


# -- interpolation -----------------------------------------------------------------------------------------------------


def interpolate_na(method: str, axis: int) -> Peer:
    """``xarray.DataArray.interpolate_na`` along one axis, constant beyond the first and the last observation.

    Series of fewer than four observations are interpolated linearly.
    """

    def fill(problem: Problem, seen: np.ndarray) -> np.ndarray:
        array, dim = problem.array(seen) if problem.kind != CURVES else _plain(seen), problem.dims[axis]
        dim = dim if dim in array.dims else array.dims[axis]
        inner = array.interpolate_na(dim, "linear")
        if method != "linear":
            enough = array.where(array.notnull().sum(dim) >= _POINTS_OF_A_SPLINE)
            inner = enough.interpolate_na(dim, method).fillna(inner)
        beyond = inner.interpolate_na(dim, "nearest", fill_value="extrapolate")
        return without_nan(beyond.to_numpy(), seen)

    return fill


def _plain(seen: np.ndarray) -> Any:
    import xarray

    return xarray.DataArray(seen, dims=("row", "column"), coords={"column": np.arange(seen.shape[1])})


def scattered(method: str) -> Peer:
    """``scipy.interpolate.griddata`` in space, and the nearest neighbour outside of the hull."""

    def fill_slice(values: np.ndarray) -> np.ndarray:
        known = ~np.isnan(values)
        points, wanted = np.argwhere(known), np.argwhere(~known)
        result = values.copy()
        if len(points) < 4:
            return result
        found = griddata(points, values[known], wanted, method)
        outside = np.isnan(found)
        if outside.any():
            found[outside] = griddata(points, values[known], wanted[outside], "nearest")
        result[~known] = found
        return result

    return by_date(fill_slice)


def _biharmonic(values: np.ndarray) -> np.ndarray:
    from skimage.restoration import inpaint_biharmonic  # an optional dependency

    if np.isnan(values).all():
        return values
    return inpaint_biharmonic(np.nan_to_num(values), np.isnan(values))


def by_date(fill_slice: Callable[[np.ndarray], np.ndarray]) -> Peer:
    """A method in two dimensions, applied to each date by itself."""

    def fill(problem: Problem, seen: np.ndarray) -> np.ndarray:
        filled = fill_slice(seen) if seen.ndim == 2 else np.stack([fill_slice(one) for one in seen])
        return without_nan(filled, seen)

    return fill


# -- averages ----------------------------------------------------------------------------------------------------------


def climatology(problem: Problem, seen: np.ndarray) -> np.ndarray:
    """The level of each series and, from one and a half years on, harmonics of the year, by least squares.

    For learning curves, the mean over all configurations of each epoch.
    """
    if problem.kind == CURVES:
        return without_nan(np.broadcast_to(np.nanmean(seen, axis=0), seen.shape), seen)
    angle = 2 * np.pi * problem.days() / YEAR
    count = _HARMONICS if angle[-1] - angle[0] >= 3 * np.pi else 0
    waves = [wave(k * angle) for k in range(1, count + 1) for wave in (np.cos, np.sin)]
    design = np.stack([np.ones_like(angle), *waves], axis=1)
    series = seen.reshape(len(seen), -1)
    result = np.full(series.shape, np.nan)
    for column, values in enumerate(series.T):
        known = ~np.isnan(values)
        if known.sum() > design.shape[1]:
            result[:, column] = design @ np.linalg.lstsq(design[known], values[known])[0]
    return without_nan(result.reshape(seen.shape), seen)


def regional(problem: Problem, seen: np.ndarray) -> np.ndarray:
    """The climatology plus, at each time, the mean of all anomalies; for learning curves, a level for each of them."""
    base = climatology(problem, seen)
    anomalies = seen - base
    known = ~np.isnan(anomalies)
    axes = (1,) if problem.kind == CURVES else tuple(range(1, seen.ndim))
    total = np.where(known, anomalies, 0.0).sum(axis=axes, keepdims=True)
    return base + total / np.maximum(known.sum(axis=axes, keepdims=True), 1)


# -- empirical orthogonal functions ------------------------------------------------------------------------------------


def dineof(problem: Problem, seen: np.ndarray) -> np.ndarray:
    """DINEOF by ``pydineof``: a truncated singular value decomposition, iterated; the number of modes cross-validated.

    Beckers & Rixen (2003), J. Atmos. Oceanic Technol. 20:1839-1856. The package takes logarithms and needs more places
    than times, so it gets exponentials of standardized values, with the shorter side as its times. They are smoothed,
    as is its default, if they are times.
    """
    import contextlib
    import io

    import xarray
    from pydineof import run_2D  # an optional dependency

    level, scale = np.nanmean(seen), np.nanstd(seen)
    matrix = seen.reshape(len(seen), -1)
    turned = matrix.shape[0] > matrix.shape[1]
    matrix = matrix.T if turned else matrix
    smoothed = problem.has_time and not turned
    known = ~np.isnan(matrix).all(axis=1)  # it fails on times without observations
    time = (problem.days().astype(np.int64) if smoothed else np.arange(len(matrix)))[known]
    cube = np.exp((matrix[known] - level) / scale)[:, :, None]
    array = xarray.DataArray(
        cube, dims=("time", "y", "x"), coords={"time": time, "y": np.arange(matrix.shape[1]), "x": [0]}
    )
    modes = min(_MOST_MODES, len(time) - 7)
    if modes < 1:
        raise ValueError(f"dineof: got {len(time)} times; expected 8 or more")
    krylov = min(len(time) - 1, max(modes + 6, 2 * modes + 1))
    with contextlib.redirect_stdout(io.StringIO()):  # the package prints its progress
        found = run_2D(array, nev=modes, ncv=krylov, alpha=0.01 if smoothed else 0.0, seed=0)
    filled = np.full(matrix.shape, np.nan)
    filled[known] = np.log(found.transpose("time", "y", "x").to_numpy()[:, :, 0]) * scale + level
    return without_nan((filled.T if turned else filled).reshape(seen.shape), seen)


# -- which of them for which data --------------------------------------------------------------------------------------


def peers(problem: Problem) -> dict[str, Peer]:
    """The methods that fit the kind of data, by name."""
    along = 0 if problem.has_time else -1
    listed: dict[str, Peer] = {
        f"interpolate_na, {method}": interpolate_na(method, along) for method in ("linear", "cubic", "nearest")
    }
    if problem.kind == FIELD:
        listed |= {f"griddata, {method}": scattered(method) for method in ("nearest", "linear", "cubic")}
        listed["biharmonic"] = by_date(_biharmonic)
    if problem.has_time or problem.kind == CURVES:
        names = (
            ("mean curve", "mean curve + level") if problem.kind == CURVES else ("climatology", "+ regional anomaly")
        )
        listed |= dict(zip(names, (climatology, regional), strict=True))
        listed["DINEOF"] = dineof
    return listed
