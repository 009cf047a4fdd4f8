"""The comparison on the fields of Heaton et al. on some hundred cells: the split, and what the tables say."""

import json

import numpy as np
import pytest

from benchmarks import heaton

SHAPE = (14, 18)


@pytest.fixture
def _small_fields(monkeypatch):
    generator = np.random.default_rng(0)
    lat, lon = np.linspace(37.0, 34.2, SHAPE[0]), np.linspace(-96.0, -92.6, SHAPE[1])
    away = np.sqrt(np.subtract.outer(lat, lat)[:, None, :, None] ** 2 + np.subtract.outer(lon, lon)[:, None] ** 2)
    covariance = 16.4 * np.exp(-away / 1.333).reshape(away[..., 0, 0].size, -1) + 0.05 * np.eye(np.prod(SHAPE))
    field = 44.5 + (np.linalg.cholesky(covariance) @ generator.standard_normal(len(covariance))).reshape(SHAPE)
    field[3:7, 4:9] = np.nan
    arrays = {"satellite": field.astype(np.float32), "simulated": field.astype(np.float32), "lat": lat, "lon": lon}
    monkeypatch.setattr("benchmarks.heaton.load_field", lambda name: arrays)
    monkeypatch.setattr("benchmarks.heaton.MOVED", (5, 6))


def test_moved_clouds_are_withheld_where_something_was_observed():
    values = np.arange(20.0).reshape(4, 5)
    values[0, :2] = np.nan
    left, withheld = heaton.split(values, (0, 1))
    assert withheld.nonzero()[0].tolist() == [0]
    assert withheld.nonzero()[1].tolist() == [2]  # cell (0, 1) was a gap before
    assert np.isnan(left).sum() == 3
    assert not np.isnan(values[withheld]).any()


@pytest.mark.usefixtures("_small_fields", "quick_choice")
def test_both_methods_are_scored_beside_published_figures(tmp_path, capsys):
    heaton.main(["--steps", "8", "--output", str(tmp_path)])
    content = json.loads((tmp_path / "heaton.json").read_text())
    printed, written = capsys.readouterr().out, (tmp_path / "heaton.md").read_text()
    for field in heaton.FIELDS:
        own, fill = content[field]
        assert (own["method"], fill["method"]) == heaton.METHODS
        for row in (own, fill):
            assert 0 < row["mae"] < row["rmse"] < 8
            assert 0.5 < row["coverage"] <= 1
            assert row["count"] == 20  # the hole, moved
    assert len(content["satellite"][0]["learned"]["range"]) == 2
    for text in (printed, written):
        assert "| SPDE |  | 1.53 |  |  |  |  | others |" in text
        assert "20 here" in text
        assert "| variance / range |" in text


def test_learned_parameters_are_compared_with_those_of_the_simulation():
    table = heaton.parameter_table({"variance": 2 * 16.40771, "range": [1.0, 5 / 3], "nugget": 0.05})
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()}
    assert "+100.0 %" in rows["variance"]
    assert "+0.0 %" in rows["range"]
    assert "+0.0 %" in rows["nugget"]
    assert "+100.0 %" in rows["variance / range"]
