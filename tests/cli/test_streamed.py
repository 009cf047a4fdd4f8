"""What is too large for a model in memory, at a small size and, as a benchmark, at 10^8 cells."""

import json
import resource
import time

import numpy as np
import pytest

import gpytorch_gaps.filling.fill as filling


def smooth_field(path, shape, gappy=0.3):
    """Waves in float32 with noise and lost cells, written slab by slab."""
    generator = np.random.default_rng(0)
    array = np.lib.format.open_memmap(path, "w+", np.float32, shape)
    rest = np.ones(shape[1:], dtype=np.float32)
    for axis, size in enumerate(shape[1:]):
        wave = np.cos(np.linspace(0, 5 + axis, size, dtype=np.float32))
        rest *= wave.reshape([-1 if i == axis else 1 for i in range(len(shape) - 1)])
    step = max(1, 2**22 // rest.size)
    for start in range(0, shape[0], step):
        rows = np.arange(start, min(start + step, shape[0]))
        slab = np.sin(7 * rows / shape[0], dtype=np.float32).reshape(-1, *[1] * rest.ndim) * rest
        slab += 0.05 * generator.standard_normal(slab.shape, dtype=np.float32)
        slab[generator.random(slab.shape, dtype=np.float32) < gappy] = np.nan
        array[rows[0] : rows[-1] + 1] = slab
    array.flush()
    return path


@pytest.fixture
def small(monkeypatch):
    """Anything beyond a thousand cells is large."""
    monkeypatch.setattr(filling, "MAX_CELLS_IN_MEMORY", 1000)


def check_filled(source, target):
    before, after = np.load(source, mmap_mode="r"), np.load(target, mmap_mode="r")
    assert after.dtype == before.dtype
    step = max(1, 2**22 // before[0].size)
    for start in range(0, len(before), step):
        rows = slice(start, start + step)
        known = ~np.isnan(before[rows])
        np.testing.assert_array_equal(after[rows][known], before[rows][known])
        assert np.isfinite(after[rows]).all()


@pytest.mark.parametrize("shape", [(60, 40), (20, 12, 10)])
def test_a_large_array_is_filled_piece_by_piece(shape, small, tmp_path, fill):
    source = smooth_field(tmp_path / "in.npy", shape)
    picture = ["--plot", tmp_path / "p.png"] * (len(shape) == 2)
    code, out, err = fill(source, "-o", tmp_path / "out.npy", *picture)
    assert code == 0, err
    assert "streamed" in out
    check_filled(source, tmp_path / "out.npy")
    assert not picture or (tmp_path / "p.png").exists()


def test_standard_deviations_of_it_are_written(small, tmp_path, fill):
    source = smooth_field(tmp_path / "in.npy", (60, 40))
    code, out, err = fill(source, "-o", tmp_path / "out.npy", "--std", tmp_path / "std.npy")
    assert code == 0, err
    assert "from 16 draws, half of them within" in out
    known, std = ~np.isnan(np.load(source)), np.load(tmp_path / "std.npy")
    assert std.dtype == np.float32
    assert (std[known] == 0.0).all()
    assert 0.04 < std[~known].min() <= std[~known].max() < 0.5  # the noise is 0.05


def test_integers_with_a_gap_value(small, tmp_path, fill):
    values = (100 + 20 * np.sin(np.arange(60) / 9)[:, None] * np.cos(np.arange(40) / 7)).astype(np.int16)
    values[20:24, 10:15] = 0
    np.save(tmp_path / "in.npy", values)
    code, _, err = fill(tmp_path / "in.npy", "-o", tmp_path / "out.npy", "--gap-value", 0)
    assert code == 0, err
    result = np.load(tmp_path / "out.npy")
    assert result.dtype == np.int16
    assert abs(result - 100).max() <= 25


@pytest.mark.parametrize(("value", "word"), [(np.nan, "gaps"), (np.inf, "inf")])
def test_nothing_to_learn_from(value, word, small, tmp_path, fill):
    np.save(tmp_path / "in.npy", np.full((60, 40), value))
    code, _, err = fill(tmp_path / "in.npy", "-o", tmp_path / "out.npy")
    assert code == 1
    assert word in err
    assert err.count("\n") == 1


def test_no_gaps_and_a_constant(small, tmp_path, fill):
    values = np.full((60, 40), 3.0)
    for gap in (False, True):
        values[5, 5:9] = np.nan if gap else 3.0
        np.save(tmp_path / "in.npy", values)
        code, _, err = fill(tmp_path / "in.npy", "-o", tmp_path / "out.npy", "--force")
        assert code == 0, err
        np.testing.assert_allclose(np.load(tmp_path / "out.npy"), 3.0, atol=1e-6)


def test_an_axis_too_long_is_refused_before_any_work(small, tmp_path, fill):
    source = smooth_field(tmp_path / "in.npy", (20_000,))
    code, _, err = fill(source, "-o", tmp_path / "out.npy")
    assert code == 1
    assert "20,000 positions" in err


def test_a_store_in_chunks(small, tmp_path, field, fill):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("zarr")
    pytest.importorskip("dask")
    values = np.load(smooth_field(tmp_path / "in.npy", (60, 40)))
    dataset = xarray.Dataset({"sst": (("y", "x"), values)}).chunk({"y": 25, "x": 20})
    dataset.to_zarr(tmp_path / "in.zarr", consolidated=False)
    code, _, err = fill(tmp_path / "in.zarr", "-o", tmp_path / "out.zarr")
    assert code == 0, err
    after = xarray.open_zarr(tmp_path / "out.zarr", consolidated=False)["sst"].values
    known = ~np.isnan(values)
    np.testing.assert_array_equal(after[known], values[known])
    assert np.isfinite(after).all()


@pytest.mark.benchmark
@pytest.mark.parametrize("shape", [(10_000, 10_000), (500, 500, 400)])
def test_a_hundred_million_cells(shape, tmp_path, run):
    source = smooth_field(tmp_path / "in.npy", shape)
    started = time.perf_counter()
    code, out, err = run("fill", source, "-o", tmp_path / "out.npy", "--json")
    assert code == 0, err
    check_filled(source, tmp_path / "out.npy")
    (report,) = json.loads(out)["report"].values()
    assert report["converged"]
    assert report["held_out"]["rmse"] < 0.055  # the noise is 0.05
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{shape}: {time.perf_counter() - started:.0f} s, {peak:.1f} GiB")
    assert peak < 8
