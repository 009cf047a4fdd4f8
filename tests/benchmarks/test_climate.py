"""The study of a climate of stations, on made-up ones that are small enough to know the answer."""

import dataclasses

import numpy as np
import pytest

from benchmarks import climate as command
from benchmarks._climate_methods import PaperModel
from benchmarks._climate_model import Anomalies, ClimateModel, days_off, lagged_covariance, mean_cycle, moved
from benchmarks._climate_train import references, scores, train, withheld
from benchmarks.datasets import StationClimate, synthetic_climate


@pytest.fixture(scope="module")
def small() -> StationClimate:
    return synthetic_climate(years=5, stations=6, gappiness=0.3)


def save(path, climate, **changed):
    arrays = {"values": climate.values, "year": climate.year, "doy": climate.time, "lon": climate.lon}
    arrays |= {"lat": climate.lat, "elev": climate.elevation, "output": np.array(climate.output)}
    np.savez(path, **{**arrays, **changed})


# -- what goes in front ------------------------------------------------------------------------------------------------


def test_a_cycle_of_two_harmonics_is_found(small):
    angle = 2 * np.pi * small.time / small.period
    cycle = 5.0 + 8.0 * np.cos(angle - 0.4) + 1.5 * np.sin(2 * angle)
    values = np.broadcast_to(cycle[None, :, None, None], small.values.shape).copy()
    values[np.isnan(small.values)] = np.nan
    found = mean_cycle(small, values)
    observed = (~np.isnan(values)).any((0, 1))
    np.testing.assert_allclose(found[:, observed], np.broadcast_to(cycle[:, None], found[:, observed].shape), atol=0.05)


def test_records_of_another_day_are_moved_back_and_forth():
    climate = synthetic_climate(years=6, stations=10, gappiness=0.3)
    anomalies = Anomalies.of(climate, climate.values)
    truth = np.zeros_like(anomalies.shift)
    truth[:, 2, 1], truth[3:, 4, 0] = 1, -1  # whole history of one output, the last years of another
    late = moved(anomalies.values, -truth)
    found = days_off(late)
    seen = (~np.isnan(late)).sum(1) > 30
    assert (found == truth)[seen].mean() > 0.95
    assert (found[:, 2, 1] == 1)[seen[:, 2, 1]].all()
    np.testing.assert_array_equal(moved(moved(late, found), -found), late)


def test_anomalies_and_cycle_make_up_the_records(small):
    anomalies = Anomalies.of(small, small.values)
    again = anomalies.recorded(anomalies.values) + anomalies.cycle
    np.testing.assert_allclose(again, small.values, atol=1e-5)


def test_monthly_records_have_no_clock_to_be_wrong():
    monthly = synthetic_climate(years=8, stations=5, times=12, period=12.0)
    assert not Anomalies.of(monthly, monthly.values).shift.any()


def test_pairs_that_never_met_have_no_weight():
    series = np.random.default_rng(0).standard_normal((2, 50, 3, 1))
    series[:, :25, 1] = np.nan
    series[:, 25:, 2] = np.nan
    covariance, weight = lagged_covariance(series, 0)
    assert weight[1, 2] == 0
    assert weight[0, 0] > 0.7
    np.testing.assert_allclose(covariance[0, 0], (series[:, :, 0] ** 2).mean(), rtol=1e-12)


# -- the models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ClimateModel, PaperModel])
def test_the_models_are_trained_on_what_is_observed(small, kind):
    anomalies = Anomalies.of(small, small.values)
    model = kind(small, anomalies.values)
    known = ~np.isnan(anomalies.values)
    assert len(model.train_targets) == known.sum()
    np.testing.assert_array_equal(model.train_targets.numpy(), anomalies.values[known])
    assert model.grid.num_cells == small.values.size


def test_a_place_without_data_is_not_at_odds_with_the_others(small):
    values = small.values.copy()
    values[:, :, 0] = np.nan
    model = ClimateModel(small, Anomalies.of(small, values).values)
    places = model.covar_module.kernels[0].kernels[2]
    covariance = places(model.grid.axes[2]).to_dense().detach()
    assert (covariance[:2, 2:] > 0).all()


@pytest.mark.benchmark
def test_it_beats_the_references_and_knows_how_well(small):
    cells = withheld(small)
    trained = train(small, np.where(cells, np.nan, small.values), progress=False, steps=(4, 2))
    mean, deviation = command.predict(trained)
    own = scores(small, cells, mean, deviation)
    for name, pair in references(small, cells).items():
        for output, theirs in scores(small, cells, *pair).items():
            assert own[output].rmse < 0.97 * theirs.rmse, name
            assert own[output].crps < 0.97 * theirs.crps, name
    assert all(0.9 < score.coverage < 0.98 for score in own.values())
    assert set(trained.seconds) == {"anomalies and first guess", "training", "mean", "standard deviation"}


# -- the command -------------------------------------------------------------------------------------------------------


def test_cells_are_predicted_in_the_order_asked_for(tmp_path, monkeypatch):
    small = synthetic_climate(years=3, stations=4, gappiness=0.3)
    data, cells, out = tmp_path / "data.npz", tmp_path / "cells.npz", tmp_path / "out.npz"
    save(data, small)
    wanted = np.argwhere(~np.isnan(small.values))[::397][::-1]
    np.savez(cells, cells=wanted)
    true_train = command.train
    monkeypatch.setattr(command, "train", lambda c, values, progress: true_train(c, values, False, steps=(1, 1)))
    command.main(["--data", str(data), "--predict", str(cells), "-o", str(out), "--quiet"])
    with np.load(out) as found:
        assert found["mean"].shape == found["std"].shape == (len(wanted),)
        truth = small.values[tuple(wanted.T)]
        assert np.sqrt(np.mean((found["mean"] - truth) ** 2)) < 2.0  # these were trained on
        assert (found["std"] > 0.3).all()


def test_marked_cells_are_never_trained_on(small):
    marked = ~np.isnan(small.values) & (np.random.default_rng(1).random(small.values.shape) < 0.1)
    climate = dataclasses.replace(small, test_cells=marked)
    np.testing.assert_array_equal(withheld(climate), marked)
    np.testing.assert_array_equal(command.withheld_only_if_marked(climate), marked)
    assert not command.withheld_only_if_marked(small).any()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"other": np.zeros((1, 4), dtype=int)}, "holds other, expected an array `cells`"),
        ({"cells": np.zeros((1, 3), dtype=int)}, "int64 of shape \\(1, 3\\), expected integers, k x 4"),
        ({"cells": np.zeros((1, 4))}, "got float64"),
        ({"cells": np.array([[0, 0, 0, 0], [0, 366, 0, 0]])}, "row 1 is \\[0, 366, 0, 0\\]"),
        ({"cells": np.array([[0, 0, -1, 0]])}, "row 0"),
    ],
)
def test_cells_that_are_none_are_refused(tmp_path, arrays, message):
    path = tmp_path / "cells.npz"
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=message):
        command.checked_cells(path, (5, 366, 6, 2))


def test_predictions_need_a_place_to_go_to(tmp_path, small, capsys):
    with pytest.raises(SystemExit):
        command.main(["--data", "synthetic", "--predict", str(tmp_path / "cells.npz")])
    assert "--predict and -o go together" in capsys.readouterr().err
