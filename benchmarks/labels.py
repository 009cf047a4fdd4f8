"""Tables of many stations as string labels: how ``fill_gaps`` predicts withheld cells, by the number of stations.

    GPYTORCH_GAPS_DATA=... python -m benchmarks.labels --data colorado --labels 4 60 --withheld random runs

Tables are DataFrames of months by stations (``colorado``: the coldest nights, of 300 months) or of days by stations
(``pm10``: fine dust in Germany). Withheld are a tenth of the cells, at random or in runs of one station: two years of
months, or half a year of days. Scores are those of measurements. Peers: linear interpolation in time, the climatology
of each station (mean and yearly harmonics), and that plus a regression of its anomalies on the best-correlated stations
that were observed at the same time. Seconds are CPU seconds.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks._machine import machine_facts
from benchmarks.datasets import load_climate, load_field
from gpytorch_gaps import fill_gaps
from gpytorch_gaps.posterior.scoring import score_errors
from gpytorch_gaps.reports import CalibrationWarning

DATA = ("colorado", "pm10")
LABELS = (4, 15, 30, 60, 120, 376)
MONTHS = 300
RUN = {"colorado": 24, "pm10": 182}
_SHARE = 0.1  # of the observations, withheld
_LEAST = 60  # observations of a station, if there are enough of these
_NEIGHBOURS = 6  # stations of a regression
_HARMONICS = 2
_SHRINKAGE = 20.0  # of correlations, in pseudo-observations
_LEAST_EIGENVALUE = 0.05  # of them

Fill = Callable[[pd.DataFrame], np.ndarray]


def table(name: str, labels: int, seed: int) -> pd.DataFrame:
    """A table with string columns: stations with many observations first, in random order."""
    generator = np.random.default_rng(seed)
    if name == "colorado":
        climate = load_climate("colorado_monthly")
        values = climate.values[..., 0].reshape(-1, climate.values.shape[2])[-MONTHS:]
        index = pd.date_range(f"{climate.year[-1] + 1 - MONTHS // 12}-01-01", periods=MONTHS, freq="MS")
    else:
        arrays = load_field("german_pm10")
        values, index = arrays["values"], pd.DatetimeIndex(arrays["date"].astype(str))
    order = generator.permutation(values.shape[1])
    full = (~np.isnan(values)).sum(axis=0)[order] >= _LEAST
    chosen = np.concatenate([order[full], order[~full]])[:labels]
    columns = [f"station {number:03d}" for number in chosen]
    return pd.DataFrame(values[:, chosen].astype(float), index=index, columns=columns)


def withheld(values: np.ndarray, how: str, run: int, seed: int) -> np.ndarray:
    """Flags of a tenth of the observations: at random, or in runs, at most half of a station."""
    generator = np.random.default_rng(seed)
    observed = ~np.isnan(values)
    if how == "random":
        return observed & (generator.random(values.shape) < _SHARE)
    flags = np.zeros_like(observed)
    for _ in range(100 * values.shape[1]):
        if flags.sum() >= _SHARE * observed.sum():
            break
        label, start = generator.integers(values.shape[1]), generator.integers(len(values) - run + 1)
        piece = np.zeros(len(values), dtype=bool)
        piece[start : start + run] = True
        both = observed[:, label] & (flags[:, label] | piece)
        if both.sum() <= observed[:, label].sum() / 2:
            flags[:, label] = both
    return flags


# -- other methods -----------------------------------------------------------------------------------------------------


def interpolated(data: pd.DataFrame) -> np.ndarray:
    """Linear in time, constant beyond the ends; a station without observations has the mean of all."""
    filled = data.interpolate(method="time", limit_direction="both")
    return filled.fillna(np.nanmean(data.to_numpy())).to_numpy()


def climatology(data: pd.DataFrame) -> np.ndarray:
    """The mean and the yearly harmonics of each station, shrunk towards those of all stations."""
    angle = 2 * np.pi * (data.index.day_of_year.to_numpy() - 1) / 365.2425
    waves = [wave(k * angle) for k in range(1, _HARMONICS + 1) for wave in (np.cos, np.sin)]
    design = np.column_stack([np.ones(len(data)), *waves])
    values = data.to_numpy()
    common = _least_squares(np.repeat(design, values.shape[1], axis=0), values.ravel(), 0.0)
    own = [_least_squares(design, column - design @ common, 1.0) for column in values.T]
    return design @ (common[:, None] + np.stack(own, axis=1))


def _least_squares(design: np.ndarray, values: np.ndarray, ridge: float) -> np.ndarray:
    known = ~np.isnan(values)
    gram = design[known].T @ design[known] + ridge * np.eye(design.shape[1])
    return np.linalg.solve(gram, design[known].T @ values[known])


def regression(data: pd.DataFrame) -> np.ndarray:
    """Climatology, plus the anomalies regressed on those of the best-correlated stations of the same time."""
    means = climatology(data)
    anomalies = data.to_numpy() - means
    known = ~np.isnan(anomalies)
    zeroed = np.where(known, anomalies, 0.0)
    count = known.T.astype(float) @ known
    covariance = zeroed.T @ zeroed / np.maximum(count, 1)
    deviation = np.sqrt(np.maximum(np.diag(covariance), 1e-12))
    correlation = covariance / np.outer(deviation, deviation) * count / (count + _SHRINKAGE)
    np.fill_diagonal(correlation, 1.0)
    strengths, vectors = np.linalg.eigh(correlation)  # those of pairs do not make a positive matrix
    correlation = (vectors * np.maximum(strengths, _LEAST_EIGENVALUE)) @ vectors.T
    result = means + zeroed
    for station in range(data.shape[1]):
        best = np.argsort(-np.abs(correlation[station]))
        best = best[best != station]
        for at in np.flatnonzero(~known[:, station]):
            used = best[known[at, best]][:_NEIGHBOURS]
            if len(used):
                weights = np.linalg.solve(correlation[np.ix_(used, used)], correlation[used, station])
                result[at, station] += deviation[station] * weights @ (zeroed[at, used] / deviation[used])
    return result


PEERS: dict[str, Fill] = {"interpolation": interpolated, "climatology": climatology, "regression": regression}

# -- the table ---------------------------------------------------------------------------------------------------------


def scores(data: pd.DataFrame, held: np.ndarray, options: argparse.Namespace) -> dict[str, Any]:
    """Scores of ``fill_gaps`` at the withheld cells, and its report."""
    started = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CalibrationWarning)
        found = fill_gaps(data.mask(held), smooth=options.smooth, seed=options.seed, progress=False)
    seconds = time.process_time() - started
    deviation = found.std.to_numpy()[held]
    if options.smooth:
        deviation = np.hypot(deviation, found.report.noise_std)
    score = score_errors(_tensor((data - found.mean).to_numpy()[held]), _tensor(deviation))
    warned = any(issubclass(one.category, CalibrationWarning) for one in caught)
    return {**score.as_dict(), "seconds": seconds, "warned": warned, "report": found.report.as_dict()}


def _tensor(values: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(values)


def compare(name: str, labels: int, how: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    data = table(name, labels, options.seed)
    held = withheld(data.to_numpy(), how, RUN[name], options.seed)
    rows: list[dict[str, Any]] = []
    for peer, fill in PEERS.items():
        started = time.process_time()
        error = (fill(data.mask(held)) - data.to_numpy())[held]
        rows.append(
            {"method": peer, "rmse": float(np.sqrt(np.mean(error**2))), "seconds": time.process_time() - started}
        )
    rows.append({"method": "fill_gaps", **scores(data, held, options)})
    for row in rows:
        rest = f"{row['crps']:>9.4f}{row['coverage']:>9.1%}" if "crps" in row else " " * 18
        print(
            f"{name:<9}{data.shape[1]:>7}  {how:<7} {row['method']:<14}{row['rmse']:>9.4f}{rest}{row['seconds']:>9.1f}"
        )
    report = rows[-1]["report"]
    about = "warned" if rows[-1]["warned"] else ""
    print(f"    {report['kernel']}; noise {report['noise_std']:.3g}; {report['seconds']} {about}", flush=True)
    return [{"data": name, "labels": data.shape[1], "withheld": how, **row} for row in rows]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument(
        "--labels", nargs="+", type=int, default=list(LABELS), help="numbers of labels; pm10 has at most 70"
    )
    parser.add_argument("--withheld", nargs="+", choices=["random", "runs"], default=["random", "runs"])
    parser.add_argument("--smooth", action="store_true", help="fill with smooth=True")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    facts = machine_facts()
    print(", ".join(f"{key}: {value}" for key, value in facts.items()))
    print(f"{'data':<9}{'labels':>7}  {'cells':<7} {'method':<14}{'RMSE':>9}{'CRPS':>9}{'95 %':>9}{'seconds':>9}")
    rows = []
    for name in options.data:
        numbers = sorted({min(number, table(name, 376, 0).shape[1]) for number in options.labels})
        rows += [row for labels in numbers for how in options.withheld for row in compare(name, labels, how, options)]
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1))
    return rows


if __name__ == "__main__":
    main()
