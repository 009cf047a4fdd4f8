"""``fill_gaps(mean=)``: backgrounds, of which the mean of the model is a linear function."""

import gpytorch
import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

import gpytorch_gaps as gaps
from gpytorch_gaps.filling import fill as fill_module
from gpytorch_gaps.filling.arrays import targets
from gpytorch_gaps.filling.arrays.adapters import adapt
from gpytorch_gaps.filling.arrays.covariates import read_slab_covariates
from gpytorch_gaps.filling.axes.axis import Axis
from gpytorch_gaps.filling.axes.decoding import decoded
from gpytorch_gaps.filling.axes.describe import describe_axes
from gpytorch_gaps.filling.process import in_memory

QUICK = {"steps": 8, "progress": False}
LAT, LON = np.linspace(40, 44, 18), np.linspace(0, 5, 14)
SHAPE = (18, 14)
HOLE = np.zeros(SHAPE, dtype=bool)
HOLE[4:13, 3:11] = True
ELEVATION = np.abs(np.random.default_rng(0).standard_normal(SHAPE)).cumsum(0)
TRUTH = 15 - 0.6 * ELEVATION + 0.3 * np.sin(2 * LAT[:, None]) * np.cos(LON)
SEEN = np.where(HOLE, np.nan, TRUTH + 0.02 * np.random.default_rng(1).standard_normal(SHAPE))


def kernels(count=2):
    return [gpytorch.kernels.RBFKernel() for _ in range(count)]


def fill(mean, values=SEEN, **options):
    return gaps.fill_gaps(values, **{"axes": [LAT, LON], "kernels": kernels(), **QUICK, "mean": mean, **options})


def rmse(found):
    return np.sqrt(np.mean((found.mean - TRUTH)[HOLE] ** 2))


def test_a_background_is_followed_inside_of_a_hole_and_its_coefficient_is_learned():
    found = fill(ELEVATION)
    assert rmse(found) < 0.1 * rmse(fill(None, check=False))
    assert found.model.mean_module.coefficients.item() == pytest.approx(-0.6, abs=0.02)
    assert any(note.startswith("the mean has -0.") and "times the background" in note for note in found.report.notes)
    assert found.report.expected_rmse < 0.3 * SEEN[~HOLE].std()
    np.testing.assert_array_equal(found.mean[~HOLE], SEEN[~HOLE])


def test_what_is_linear_in_backgrounds_is_filled_exactly():
    def ramp(lat, lon):
        return lat * lon

    exact = 3 + 2 * ELEVATION - 0.5 * LAT[:, None] * LON
    found = fill({"height": ELEVATION, "ramp": ramp}, np.where(HOLE, np.nan, exact), check=False, trend=False)
    np.testing.assert_allclose(found.mean, exact, rtol=1e-6)
    assert "2 times height + -0.5 times ramp" in " ".join(found.report.notes)
    listed = fill([ELEVATION, ramp], np.where(HOLE, np.nan, exact), check=False, trend=False)
    np.testing.assert_array_equal(listed.mean, found.mean)


@pytest.mark.parametrize("trend", [False, True])
def test_coefficients_are_those_of_generalized_least_squares(trend):
    noise = np.where(np.random.default_rng(3).random(SHAPE) < 0.5, 0.01, 0.1)
    model = fill([ELEVATION, lambda lat, lon: np.cos(lat * lon)], noise=noise, trend=trend, check=False).model
    x, y = model.train_inputs[0], model.train_targets
    with torch.no_grad():
        covariance = model.covar_module(x).to_dense() + torch.diag(model.likelihood.noise)
        left = torch.linalg.solve(covariance, y - model.mean_module(x))  # A^-1 (y - X a)
        design = torch.cat([torch.ones(len(x), 1), model.mean_module.covariates(x)], 1).double()
        scale = design.mT.abs() @ torch.linalg.solve(covariance, y).abs()
    assert ((design.mT @ left).abs() < 1e-8 * scale).all()


def test_units_of_the_background_do_not_matter():
    options = {"check": False, "trend": False, "tolerance": 1e-8}
    plain = fill(ELEVATION, **options)
    other = fill(1e6 + 1e4 * ELEVATION, **options)
    np.testing.assert_allclose(other.mean, plain.mean, rtol=1e-6)


def test_withheld_observations_do_not_take_part_in_the_coefficients_by_which_they_are_predicted(monkeypatch):
    fitted = []

    def spied(model, *arguments):
        fitted.append((model.mean_module.coefficients.clone(), len(model.train_targets)))
        return check(model, *arguments)

    check = in_memory.check_withheld
    monkeypatch.setattr(in_memory, "check_withheld", spied)
    found = fill(ELEVATION)
    ((coefficients, count),) = fitted
    assert count < (~HOLE).sum()
    assert coefficients != found.model.mean_module.coefficients


def test_backgrounds_come_in_the_forms_of_the_values():
    options = {"check": False}
    plain = fill(ELEVATION, **options).mean
    field = xr.DataArray(SEEN, {"lat": LAT, "lon": LON}, ("lat", "lon"), name="t2m")
    height = field.copy(data=ELEVATION).rename("height").transpose("lon", "lat")
    found = field.gaps.fill(mean=height, kernels=kernels(), check=False, **QUICK)
    np.testing.assert_allclose(found.mean, plain, rtol=1e-9)
    assert "times height" in " ".join(found.report.notes)
    dataset = xr.Dataset({"t2m": field, "height": height})
    for mean in ("height", {"t2m": "height"}, {"t2m": ["height"]}):
        found = dataset.gaps.fill(mean=mean, kernels=kernels(), check=False, **QUICK)
        np.testing.assert_allclose(found.mean["t2m"], plain, rtol=1e-9)
        assert list(found.report) == ["t2m"]
    tensor = fill(torch.from_numpy(ELEVATION), torch.from_numpy(SEEN), **options)
    np.testing.assert_allclose(tensor.mean, plain, rtol=1e-9)


def test_a_background_may_lack_dimensions():
    times = np.arange("2020-01-01", "2020-01-07", dtype="datetime64[D]")
    drift = np.arange(6.0)[:, None, None]
    field = xr.DataArray(SEEN + drift, {"time": times, "lat": LAT, "lon": LON}, ("time", "lat", "lon"))
    height = xr.DataArray(ELEVATION, {"lat": LAT, "lon": LON}, ("lat", "lon"), name="height")
    found = field.gaps.fill(mean=height, kernels=kernels(3), check=False, **QUICK)
    assert np.abs(found.mean - TRUTH - drift).max() < 0.5
    assert found.model.mean_module.coefficients.item() == pytest.approx(-0.6, abs=0.05)

    stations = pd.DataFrame(SEEN[:, :6], index=LAT, columns=list("abcdef"))
    per_station = pd.Series([3.0, 1.0, 2.0, 5.0, 4.0, 7.0], index=stations.columns)
    table = stations + 10 * per_station
    found = gaps.fill_gaps(table, mean=per_station, kernels=[*kernels(1), None], check=False, **QUICK)
    assert found.model.mean_module.coefficients.item() == pytest.approx(10, rel=0.05)


def test_functions_get_coordinates_in_the_units_of_the_user():
    times = np.arange("2020-01-01", "2020-01-15", dtype="datetime64[D]")
    shapes = []

    def seasonal(lat, time):
        shapes.append((lat.shape, time.shape, time.dtype.kind))
        day = (time - np.datetime64("2020-01-01")) / np.timedelta64(1, "D")
        return np.cos(day) + 0 * lat

    found = fill(seasonal, axes=[LAT, times], check=False)
    assert shapes[0] == ((18, 1), (1, 14), "M")
    between = found.at({"axis 0": LAT[:2], "axis 1": np.array(["2020-01-03T12", "2020-01-20"], "datetime64[h]")})
    assert np.isfinite(between.mean).all()
    assert shapes[-1] == ((2,), (2,), "M")
    with torch.no_grad():
        value = found.model.mean_module.covariates(torch.tensor([[LAT[0], 2.5], [LAT[0], 3.0]], dtype=torch.float64))
    np.testing.assert_allclose(value[:, 0], np.cos([2.5, 3.0]))


@pytest.mark.parametrize(
    ("axis", "further"),
    [
        (np.array([1.0, 2.0, 4.0]), [2.5, 7.0]),
        (np.array(["2020-01-01", "2020-01-03"], "datetime64[ns]"), np.array(["2020-01-02T06", "2020-02-01"], "M8[ns]")),
        (np.array([1, 5, 9], "timedelta64[D]"), np.array([36, 480], "timedelta64[h]")),
        (np.array([[0.0, 1.0], [2.0, 5.0]]), np.array([[0.5, 0.5], [2.0, 5.0]])),
        (["b", "a"], ["a", "b"]),
    ],
)
def test_decoding_inverts_encoding(axis, further):
    described: Axis = describe_axes((len(axis), 50), [axis, None])[0]
    found = decoded(described, described.encode(further))
    np.testing.assert_array_equal(found.T, further)


@pytest.mark.parametrize(
    ("attributes", "numbers", "further"),
    [
        ({"units": "hours since 2000-01-01"}, [0.0, 6.0, 12.0, 36.0], [3.0, 40.0]),
        ({"units": "degrees_east"}, np.arange(0.0, 360.0, 10.0), [5.0, 355.0]),
    ],
)
def test_decoding_inverts_the_encoding_of_cf_units(attributes, numbers, further):
    axis = describe_axes((len(numbers), 50), [np.array(numbers), None], ["lon", "y"], [attributes, {}])[0]
    np.testing.assert_allclose(decoded(axis, axis.encode(further)), further)


def test_points_off_the_grid_need_functions():
    assert np.isfinite(fill(lambda lat, lon: lat**2, check=False).at(np.array([[41.2, 2.22]])).mean).all()
    found = fill(ELEVATION, check=False)
    np.testing.assert_allclose(found.at(np.array([[LAT[6], LON[5]]])).mean, found.mean[6, 5], rtol=1e-6)
    with pytest.raises(ValueError, match=r"mean: the background is an array, .* got the point \[41.2, 2.22\] off"):
        found.at(np.array([[41.2, 2.22]]))


def test_variables_that_are_filled_together_have_backgrounds_of_their_own():
    rng = np.random.default_rng(2)
    other = 1e-3 * (50 + 7 * LON + 0.1 * rng.standard_normal(SHAPE))
    other[rng.random(SHAPE) < 0.5] = np.nan
    data = xr.Dataset({"t": (("lat", "lon"), SEEN), "q": (("lat", "lon"), other)}, {"lat": LAT, "lon": LON})

    def east(lat, lon):
        return lon + 0 * lat

    mean = {"t": ELEVATION, "q": east}
    found = data.gaps.fill(mean=mean, joint=True, kernels=kernels(), trend=False, check=False, **QUICK)
    assert np.sqrt(np.mean((found.mean["t"].values - TRUTH)[HOLE] ** 2)) < 0.3
    assert found.model["t"].mean_module.coefficients.tolist() == pytest.approx([-0.6, 7e-3], rel=0.05)
    assert "times the background of t" in " ".join(found.report["q"].notes)


@pytest.mark.parametrize(
    ("mean", "message"),
    [
        (np.where(HOLE, np.nan, ELEVATION), r"mean: the background is nan at the cell \(4, 3\), a gap"),
        (np.where(HOLE, ELEVATION, np.inf), r"mean: the background is inf at the cell \(0, 0\), an observation"),
        (np.where(HOLE, ELEVATION, 1.0), "mean: the background is the same at all observations"),
        (ELEVATION[:3], r"mean: got an array of the shape \(3, 14\), expected \(18, 14\)"),
        ([], "mean: got an empty list"),
        (lambda lat, lon: np.zeros(3), r"mean: the function the background returned an array of the shape \(3,\)"),
        ("height", "mean: got <U6, expected flags or numbers"),
    ],
)
def test_backgrounds_that_cannot_be_are_refused(mean, message):
    with pytest.raises(ValueError, match=message):
        fill(mean)


def test_backgrounds_of_few_observations_are_refused():
    with pytest.raises(ValueError, match="mean: got 3 backgrounds for 4 observations; expected fewer"):
        gaps.fill_gaps(np.array([1.0, 2, np.nan, 4, 3]), mean=[np.arange(5.0) ** n for n in (1, 2, 3)], progress=False)
    data = xr.Dataset({"a": (("lat", "lon"), SEEN), "b": (("lat", "lon"), ELEVATION)})
    with pytest.raises(ValueError, match="mean: got the variable 'c', expected one of"):
        data.gaps.fill(mean={"c": "b"})


# -- streamed ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def streaming(monkeypatch):
    monkeypatch.setattr(fill_module, "MAX_CELLS_IN_MEMORY", 100)
    monkeypatch.setattr(targets, "_SLAB_CELLS", 80)  # slabs of five slices


def test_a_streamed_array_follows_its_backgrounds(streaming):
    ramp = 0.4 * LAT[:, None] * LON
    listed = {"height": ELEVATION.astype(np.float32), "ramp": lambda lat, lon: lat * lon}
    found = fill(listed, SEEN + ramp, trend=False, check=False, std=False)
    assert found.model is None
    assert np.sqrt(np.mean((found.mean - ramp - TRUTH)[HOLE] ** 2)) < 0.05 * TRUTH[HOLE].std()
    (note,) = (note for note in found.report.notes if "times height" in note)
    coefficients = [float(word) for word in note.split() if word.lstrip("-")[0].isdigit()]
    assert coefficients == pytest.approx([-0.6, 0.4], abs=0.03)


def test_a_streamed_background_is_held_with_the_dimensions_that_it_has():
    dask = pytest.importorskip("dask.array")
    field = xr.DataArray(np.zeros((6, *SHAPE)), {"time": np.arange(6), "lat": LAT, "lon": LON}, ("time", "lat", "lon"))
    height = xr.DataArray(dask.from_array(ELEVATION, chunks=5), {"lat": LAT, "lon": LON}, ("lat", "lon"), name="height")
    everywhere = np.ones(field.shape, dtype=bool)
    adapter = adapt(field.chunk({"time": 2}))
    held = read_slab_covariates(adapter, height, [(0, everywhere, everywhere)])
    assert held.values_0.shape == (1, *SHAPE)
    points = torch.tensor([[float(time), LAT[7], LON[5]] for time in range(6)], dtype=torch.float64)
    np.testing.assert_array_equal(held(points), np.full((6, 1), ELEVATION[7, 5]))


def test_a_streamed_background_is_needed_only_where_values_are_observed_or_filled(streaming):
    inside = np.ones(SHAPE, dtype=bool)
    inside[:, :2] = False
    seen, height = np.where(inside, SEEN, np.nan), np.where(inside, ELEVATION, np.nan)
    found = fill(height, seen, where=inside, check=False, std=False)
    np.testing.assert_array_equal(np.isnan(found.mean), ~inside)
    with pytest.raises(ValueError, match=r"mean: the background is nan at the cell \(0, 0\), a gap"):
        fill(height, seen)
    with pytest.raises(ValueError, match=r"mean: the background is inf at the cell \(13, 0\), an observation"):
        fill(np.where(np.arange(18)[:, None] < 13, ELEVATION, np.inf))
    with pytest.raises(ValueError, match="mean: the background is the same at all observations"):
        fill(np.where(HOLE, ELEVATION, 1.0))
