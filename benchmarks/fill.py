"""``fill_gaps`` without options compared with common interpolation methods on real fields: RMSE at withheld cells.

    GPYTORCH_GAPS_DATA=... python -m benchmarks.fill --json results/fill.json

Cells are withheld at random and in blocks of the shape of clouds. ``fill_gaps`` uses all dimensions. The other methods
would take hours in three dimensions and fill one month at a time: linear interpolation along rows, nearest neighbour,
``scipy.interpolate.griddata`` (linear and cubic, nearest outside the hull) and biharmonic inpainting (scikit-image:
``pip install 'gpytorch-gaps[benchmarks]'``). Linear interpolation in time is compared as well.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.interpolate import griddata
from scipy.ndimage import gaussian_filter

from benchmarks._machine import machine_facts
from benchmarks.datasets import load_field
from gpytorch_gaps import fill_gaps

Peer = Callable[[np.ndarray], np.ndarray]

_RANDOM_SHARE, _CLOUDY_SHARE = 0.1, 0.15  # of the cells, withheld
_CLOUD_CELLS = {"modis_lst": (12.0, 12.0), "sst_pacific": (2.0, 4.0, 6.0)}  # extent of a cloud along each axis


def field_of(name: str, months: int | None) -> tuple[np.ndarray, list[np.ndarray]]:
    arrays = load_field(name)
    if name == "modis_lst":
        return arrays["satellite"].astype(np.float64), [arrays["lat"], arrays["lon"]]
    values, month = arrays["values"][:months], arrays["month_index"][:months]
    return values.astype(np.float64), [month, arrays["lat"], arrays["lon"]]


def withheld(values: np.ndarray, shape: str, cloud: tuple[float, ...], seed: int) -> np.ndarray:
    """Flags of withheld observations: random cells, or clouds, where smoothed noise is largest."""
    generator = np.random.default_rng(seed)
    observed = ~np.isnan(values)
    if shape == "random":
        return observed & (generator.random(values.shape) < _RANDOM_SHARE)
    height = gaussian_filter(generator.standard_normal(values.shape), cloud)
    return observed & (height > np.quantile(height, 1 - _CLOUDY_SHARE))


# -- other methods -----------------------------------------------------------------------------------------------------


def along(axis: int) -> Peer:
    """Linear interpolation along one axis: constant beyond the ends, the overall mean in lines without observations."""

    def fill(values: np.ndarray) -> np.ndarray:
        lines = np.moveaxis(values, axis, -1)
        places, result = np.arange(lines.shape[-1]), lines.copy()
        for at in np.ndindex(lines.shape[:-1]):
            known = ~np.isnan(lines[at])
            result[at] = np.interp(places, places[known], lines[at][known]) if known.any() else np.nanmean(values)
        return np.moveaxis(result, -1, axis)

    return fill


def scattered(method: str) -> Peer:
    def fill(values: np.ndarray) -> np.ndarray:
        known = ~np.isnan(values)
        points, wanted = np.argwhere(known), np.argwhere(~known)
        result = values.copy()
        found = griddata(points, values[known], wanted, method)
        outside = np.isnan(found)
        if outside.any():
            found[outside] = griddata(points, values[known], wanted[outside], "nearest")
        result[~known] = found
        return result

    return fill


def biharmonic(values: np.ndarray) -> np.ndarray:
    from skimage.restoration import inpaint_biharmonic  # an optional dependency

    return inpaint_biharmonic(np.nan_to_num(values), np.isnan(values))


def month_by_month(fill: Peer) -> Peer:
    return lambda values: fill(values) if values.ndim == 2 else np.stack([fill(one) for one in values])


def peers(dimensions: int) -> dict[str, Peer]:
    listed = {
        "linear along rows": month_by_month(along(-1)),
        "nearest neighbour": month_by_month(scattered("nearest")),
        "griddata, linear": month_by_month(scattered("linear")),
        "griddata, cubic": month_by_month(scattered("cubic")),
        "biharmonic": month_by_month(biharmonic),
    }
    return {**listed, "linear in time": along(0)} if dimensions == 3 else listed


# -- the table ---------------------------------------------------------------------------------------------------------


def root_mean_square(errors: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(errors))))


def compare(name: str, shape: str, options: argparse.Namespace) -> list[dict]:
    values, axes = field_of(name, options.months)
    held = withheld(values, shape, _CLOUD_CELLS[name], options.seed)
    seen = np.where(held, np.nan, values)
    rows = []
    for peer, fill in peers(values.ndim).items():
        started = time.perf_counter()
        error = root_mean_square((fill(seen) - values)[held])
        rows.append({"method": peer, "rmse": error, "seconds": time.perf_counter() - started})
    started = time.perf_counter()
    found = fill_gaps(seen, axes, progress=not options.quiet, std=not options.mean_only, check=not options.mean_only)
    seconds = time.perf_counter() - started
    errors = (found.mean - values)[held]
    rows.append({"method": "fill_gaps", "rmse": root_mean_square(errors), "seconds": seconds})
    if found.std is not None:
        rows[-1]["coverage"] = float(np.mean(np.abs(errors) < 1.96 * found.std[held]))
    rows[-1]["report"] = found.report.as_dict()
    print(f"\n{name}, {shape}: {held.sum():,} of {np.isfinite(values).sum():,} observations withheld")
    for row in rows:
        covered = f"{row['coverage']:>10.1%}" if "coverage" in row else ""
        print(f"{row['method']:<20}{row['rmse']:>9.4f}{row['seconds']:>9.1f} s{covered}")
    print(found.report, flush=True)
    return [{"data": name, "withheld": shape, **row} for row in rows]


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if ``fill_gaps`` is best in every table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=list(_CLOUD_CELLS), default=list(_CLOUD_CELLS))
    parser.add_argument("--withheld", nargs="+", choices=["random", "clouds"], default=["random", "clouds"])
    parser.add_argument("--months", type=int, help="use only the first months of sst_pacific")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--mean-only",
        action="store_true",
        help="without standard deviations and the held-out check, which withholds data from training",
    )
    parser.add_argument("--quiet", action="store_true", help="without progress bars")
    options = parser.parse_args(arguments)
    facts = machine_facts()
    print(", ".join(f"{key}: {value}" for key, value in facts.items()))
    print(f"{'method':<20}{'RMSE':>9}{'time':>11}{'95 % cover':>10}")
    rows = [row for name in options.data for shape in options.withheld for row in compare(name, shape, options)]
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1))
    best = {(row["data"], row["withheld"]): row for row in sorted(rows, key=lambda row: -row["rmse"])}
    return 0 if all(row["method"] == "fill_gaps" for row in best.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
