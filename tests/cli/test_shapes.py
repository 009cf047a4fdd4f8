"""Arrays at the edge of what has gaps."""

from importlib.util import find_spec

import numpy as np
import pytest


def filled(fill, tmp_path, values, *arguments):
    np.save(tmp_path / "in.npy", values)
    code, out, err = fill(tmp_path / "in.npy", "-o", tmp_path / "out.npy", *arguments)
    assert code == 0, err
    result = np.load(tmp_path / "out.npy")
    assert result.dtype == values.dtype
    assert result.shape == values.shape
    return result, out


def test_no_gaps(tmp_path, fill):
    values = np.random.default_rng(0).random((6, 5))
    result, out = filled(fill, tmp_path, values, "--std", tmp_path / "std.npy")
    np.testing.assert_array_equal(result, values)
    assert "no gaps" in out
    assert not np.load(tmp_path / "std.npy").any()


def test_a_constant(tmp_path, fill):
    values = np.full((6, 5), 3.0, dtype=np.float32)
    values[2, 1:3] = np.nan
    result, out = filled(fill, tmp_path, values)
    assert (result == 3).all()
    assert "all observations are equal" in out


def test_one_observation(tmp_path, fill):
    values = np.full((6, 5), np.nan)
    values[2, 3] = 4.0
    assert (filled(fill, tmp_path, values)[0] == 4).all()


@pytest.mark.parametrize("shape", [(1, 30), (30, 1), (30,), (1, 1, 30), (5, 4, 6)])
def test_rows_columns_series_and_boxes_with_their_pictures(shape, tmp_path, fill):
    values = np.sin(np.arange(np.prod(shape)) / 4).reshape(shape)
    values.ravel()[[3, 4, 11, 20]] = np.nan
    drawn = shape in [(30,), (5, 4, 6)] and find_spec("matplotlib") is not None
    picture = ["--plot", tmp_path / "p.png"] if drawn else []
    result, _ = filled(fill, tmp_path, values, *picture)
    assert np.isfinite(result).all()
    assert abs(result).max() < 2
    assert not picture or (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_integers_with_a_gap_value(tmp_path, fill):
    values = (100 + 20 * np.sin(np.arange(96) / 9)).reshape(12, 8).astype(np.int16)
    values[3:5, 2:6] = -999
    result, _ = filled(fill, tmp_path, values, "--gap-value", -999)
    assert (result > 0).all()
    np.testing.assert_array_equal(result[values > 0], values[values > 0])
