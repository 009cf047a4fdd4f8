"""``fill_gaps``: the exact posterior of the learned model, for every type of array."""

import copy

import gpytorch
import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

import gpytorch_gaps as gaps
from gpytorch_gaps.filling import fill as fill_module
from gpytorch_gaps.filling.arrays import grid_values
from gpytorch_gaps.filling.axes.axis import YEAR
from gpytorch_gaps.filling.learning import choose, predict
from gpytorch_gaps.filling.learning.model import ProductTerm
from gpytorch_gaps.filling.process import streamed

RNG = np.random.default_rng(0)
T = np.linspace(0, 1, 24)
TRUTH = np.sin(6 * T[:, None]) * np.cos(4 * T[:20])
SEEN = TRUTH + 0.05 * RNG.standard_normal(TRUTH.shape)
SEEN[8:14, 6:12] = np.nan
SEEN[RNG.random(SEEN.shape) < 0.1] = np.nan
GAPS = np.isnan(SEEN)
QUICK = {"steps": 4, "check": False, "progress": False}


def stationary():
    return [gpytorch.kernels.MaternKernel(nu=2.5), gpytorch.kernels.MaternKernel(nu=2.5)]


def rbf(lengthscale):
    kernel = gpytorch.kernels.RBFKernel()
    kernel.lengthscale = lengthscale
    return kernel


@pytest.fixture(scope="module")
def result():
    return gaps.fill_gaps(SEEN, [T, T[:20]], progress=False)


def test_gaps_are_filled_and_observations_stay(result):
    assert np.isfinite(result.mean).all()
    np.testing.assert_array_equal(result.mean[~GAPS], SEEN[~GAPS])
    np.testing.assert_array_equal(result.gaps, GAPS)
    error = (result.mean - TRUTH)[GAPS]
    assert np.sqrt(np.mean(error**2)) < 0.03
    assert result.std[~GAPS].max() == 0.0
    assert 0.04 < result.std[GAPS].min() <= result.std[GAPS].max() < 0.1  # noise is in it


def test_the_report_says_what_happened(result):
    report = result.report
    assert report.shape == SEEN.shape
    assert report.num_gaps == GAPS.sum()
    assert report.noise_std == pytest.approx(0.05, rel=0.2)
    assert report.held_out.count > 10
    assert 0.03 < report.held_out.rmse < 0.1
    assert report.solve.converged
    assert f"held-out RMSE {report.held_out.rmse:.3g}, 95 % intervals cover" in str(report)
    assert set(report.seconds) == {"training", "held-out check", "mean", "standard deviations"}
    assert report.as_dict()["held_out"]["rmse"] == report.held_out.rmse


def dense(model, x):
    """Mean and variance of the latent function by dense algebra, from the model's own kernel and data."""
    with torch.no_grad():
        train = model.train_inputs[0]
        joint = model.covar_module(torch.cat([train, x])).to_dense()
        n = len(train)
        noisy = joint[:n, :n] + model.likelihood.noise * torch.eye(n)
        weights = torch.linalg.solve(noisy, joint[:n, n:])
        mean = model.mean_module(x) + weights.mT @ (model.train_targets - model.mean_module(train))
        return mean, (joint[n:, n:] - weights.mT @ joint[:n, n:]).diagonal()


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("kernels", ["auto", stationary()], ids=["auto", "given"])
@pytest.mark.usefixtures("quick_choice")
def test_mean_and_std_are_those_of_the_exact_posterior(kernels, smooth):
    found = gaps.fill_gaps(SEEN, [T, T[:20]], kernels, smooth=smooth, tolerance=1e-8, **QUICK)
    where = np.ones_like(GAPS) if smooth else GAPS
    grid, _, _ = gaps.from_array(SEEN, [T, T[:20]])
    mean, variance = dense(found.model, grid.points(torch.from_numpy(np.flatnonzero(where))))
    np.testing.assert_allclose(found.mean[where], mean.numpy(), rtol=0, atol=1e-6)
    if not smooth:
        variance = variance + found.model.likelihood.noise.detach()
    np.testing.assert_allclose(found.std[where], variance.sqrt().numpy(), rtol=1e-5, atol=1e-7)


def test_several_scales_by_iterations_are_the_exact_posterior_too(monkeypatch):
    monkeypatch.setattr(predict, "_MAX_DENSE", 0)
    near, far = rbf(1.5), rbf(20.0)

    def two_scales():
        return [ProductTerm([copy.deepcopy(kernel) for _ in range(2)], 1.0) for kernel in (near, far)]

    monkeypatch.setattr(choose, "candidates", lambda *_: [("two scales", two_scales)])
    field = np.cumsum(RNG.standard_normal((30, 30)), axis=1) / 4 + RNG.standard_normal((30, 30)) / 10
    field[10:18, 10:18] = np.nan
    found = gaps.fill_gaps(field, tolerance=1e-8, std=False, **QUICK)
    grid, _, _ = gaps.from_array(field)
    mean, _ = dense(found.model, grid.points(torch.from_numpy(np.flatnonzero(np.isnan(field)))))
    np.testing.assert_allclose(found.mean[np.isnan(field)], mean.numpy(), rtol=0, atol=1e-6)
    assert found.std is None
    assert found.report.kernel == "two scales"
    assert found.report.solve.iterations > 0


def test_model_predicts_between_cells_in_units_of_the_data():
    found = gaps.fill_gaps(1000 + 50 * SEEN, [T, T[:20]], stationary(), **QUICK)
    x = torch.tensor([[0.31, 0.22]], dtype=torch.float64)
    with torch.no_grad():
        predicted = found.model.likelihood(found.model(x)).mean.item()
    assert predicted == pytest.approx(1000 + 50 * np.sin(6 * 0.31) * np.cos(4 * 0.22), abs=3)


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_units_do_not_matter(scale):
    found = gaps.fill_gaps(SEEN * scale, [T, T[:20]], stationary(), **QUICK)
    plain = gaps.fill_gaps(SEEN, [T, T[:20]], stationary(), **QUICK)
    np.testing.assert_allclose(found.mean / scale, plain.mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.std / scale, plain.std, rtol=1e-6, atol=1e-6)


def test_the_same_seed_gives_the_same_and_torch_is_left_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second = (gaps.fill_gaps(SEEN, None, stationary(), steps=3, seed=2, progress=False) for _ in range(2))
    np.testing.assert_array_equal(first.mean, second.mean)
    assert first.report.held_out == second.report.held_out
    assert torch.equal(torch.get_rng_state(), state)


def test_what_the_user_holds_is_not_changed():
    values, kernels = SEEN.copy(), stationary()
    before = [copy.deepcopy(kernel.state_dict()) for kernel in kernels]
    gaps.fill_gaps(values, kernels=kernels, **QUICK)
    np.testing.assert_array_equal(values, SEEN)
    assert all(
        torch.equal(kernel.raw_lengthscale, state["raw_lengthscale"])
        for kernel, state in zip(kernels, before, strict=True)
    )


# -- coordinates -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_choice")
def test_a_yearly_cycle_goes_on_where_nothing_is_near():
    weeks = pd.date_range("2015-01-01", periods=150, freq="7D", name="week")
    wave = 5 * np.cos(2 * np.pi * 7 * np.arange(150) / YEAR)
    truth = pd.DataFrame({"a": wave + 0.3 * RNG.standard_normal(150)}, index=weeks)
    table = truth.copy()
    table.iloc[120:] = np.nan  # only the years before tell
    found = gaps.fill_gaps(table, steps=20, check=False, progress=False)
    assert any("cycle of 365.243 days" in note for note in found.report.notes)
    without = gaps.fill_gaps(table, steps=20, check=False, progress=False, periods={"week": []})
    errors = [np.sqrt(np.mean((one.mean - truth).to_numpy()[120:] ** 2)) for one in (found, without)]
    assert errors[0] < 1.0
    assert errors[1] > 2 * errors[0]


def test_the_order_of_coordinates_does_not_matter():
    order = RNG.permutation(24)
    kernels = stationary()
    for kernel in kernels:
        kernel.lengthscale = 0.3
        kernel.raw_lengthscale.requires_grad_(False)
    options = {"kernels": kernels, "tolerance": 1e-8, "trend": False, **QUICK}
    sorted_first = gaps.fill_gaps(SEEN, [T, T[:20]], **options)
    shuffled = gaps.fill_gaps(SEEN[order], [T[order], T[:20]], **options)
    np.testing.assert_allclose(shuffled.mean, sorted_first.mean[order], atol=1e-9)
    np.testing.assert_array_equal(shuffled.gaps, sorted_first.gaps[order])


def test_latitude_and_longitude_say_that_they_are_no_sphere():
    lat, lon = np.linspace(-60, 60, 20), np.arange(0, 360, 15.0)
    field = np.cos(np.deg2rad(lat))[:, None] * np.cos(np.deg2rad(lon + 5))
    field[:, [0, 23]] = np.nan  # on both sides of the seam
    data = xr.DataArray(field, {"lat": lat, "lon": lon}, ("lat", "lon"))
    found = data.gaps.fill(kernels=[rbf(60.0), rbf(60.0)], progress=False, check=False, steps=20)
    assert any("not treated as a sphere" in note for note in found.report.notes)
    assert any("lon closes to a circle" in note for note in found.report.notes)
    truth = np.cos(np.deg2rad(lat))[:, None] * np.cos(np.deg2rad(lon + 5))
    assert np.abs(found.mean.values - truth)[:, [0, 23]].max() < 0.02  # interpolated through the seam


# -- xarray ------------------------------------------------------------------------------------------------------------


def data_array():
    months = pd.date_range("2001-01-01", periods=24, freq="MS")
    return xr.DataArray(SEEN, {"time": months, "x": T[:20]}, ("time", "x"), "T", {"units": "K"})


def test_data_array_through_the_accessor():
    data = data_array()
    found = data.gaps.fill(kernels=stationary(), **QUICK)
    assert found.mean.attrs == {"units": "K"}
    np.testing.assert_array_equal(found.mean.values[~GAPS], SEEN[~GAPS])
    assert found.std.dims == found.gaps.dims == ("time", "x")
    model = data.gaps.model(kernels=stationary(), steps=4, progress=False)
    assert isinstance(model, gpytorch.models.ExactGP)
    assert len(model.train_targets) == (~GAPS).sum()


def test_dataset_of_two_variables_keeps_what_is_no_number():
    data = xr.Dataset({"T": data_array(), "s": data_array() * 2, "name": ("station", ["a", "b"])}, attrs={"title": "x"})
    found = data.gaps.fill(kernels=stationary(), **QUICK)
    assert found.mean.attrs == {"title": "x"}
    assert list(found.mean.data_vars) == ["T", "s", "name"]
    assert list(found.std.data_vars) == ["T", "s"]
    for name in ("T", "s"):
        np.testing.assert_array_equal(found.mean[name].values[~GAPS], data[name].values[~GAPS])
        assert found.mean[name].notnull().all()
        assert found.report[name].num_gaps == GAPS.sum()
    assert set(found.model) == {"T", "s"}
    assert set(data.gaps.model(kernels=stationary(), steps=2, progress=False)) == {"T", "s"}


@pytest.mark.usefixtures("quick_choice")
def test_small_chunked_arrays_are_filled_like_others_and_stay_chunked():
    dask = pytest.importorskip("dask.array")
    data = data_array().chunk({"time": 7, "x": 9})
    found, expected = (gaps.fill_gaps(one, **QUICK) for one in (data, data_array()))
    for name in ("mean", "std", "gaps"):
        result = getattr(found, name)
        assert isinstance(result.data, dask.Array)
        assert result.chunks == data.chunks
        xr.testing.assert_identical(result.compute(), getattr(expected, name))
    assert found.model is not None
    assert found.report.std_method == expected.report.std_method


@pytest.mark.usefixtures("quick_choice")
def test_variables_in_chunks_are_filled_together():
    pytest.importorskip("dask.array")
    dataset = xr.Dataset({"a": data_array(), "b": data_array().transpose()})
    found = gaps.fill_gaps(dataset.chunk({"time": 7}), joint=True, **QUICK)
    assert found.std["b"].chunks == dataset["b"].chunk({"time": 7}).chunks
    assert not bool(found.mean.isnull().any().to_dataarray().any())


@pytest.mark.usefixtures("quick_choice")
def test_large_chunked_arrays_are_streamed_and_stay_chunked(monkeypatch):
    dask = pytest.importorskip("dask.array")
    monkeypatch.setattr(fill_module, "MAX_CELLS_IN_MEMORY", 100)
    data = data_array().chunk({"time": 7, "x": 9})
    found = gaps.fill_gaps(data, [T, T[:20]], steps=15, progress=False)
    for result in (found.mean, found.std, found.gaps):
        assert isinstance(result.data, dask.Array)
    assert found.std.dtype == data.dtype
    assert found.std.attrs["long_name"].startswith("standard deviation of")
    std = found.std.values
    assert std[~GAPS].max() == 0.0
    assert 0.03 < std[GAPS].min() < std[GAPS].max() < 0.2
    assert found.report.expected_rmse == pytest.approx(np.sqrt(np.mean(std[GAPS] ** 2)), rel=0.2)
    assert "draws" in found.report.std_method
    assert found.model is None
    assert any("streamed" in note for note in found.report.notes)
    filled = found.mean.values
    np.testing.assert_array_equal(filled[~GAPS], SEEN[~GAPS])
    assert np.sqrt(np.mean((filled - TRUTH)[GAPS] ** 2)) < 0.05
    np.testing.assert_array_equal(found.gaps.values, GAPS)
    assert found.report.num_gaps == GAPS.sum()
    assert found.report.held_out is not None


# -- streamed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smooth", [False, True])
def test_large_arrays_are_streamed_to_the_same_numbers(monkeypatch, smooth):
    options = {
        "kernels": [gpytorch.kernels.RBFKernel(), gpytorch.kernels.RBFKernel()],
        "trend": False,
        "smooth": smooth,
    }
    whole = gaps.fill_gaps(SEEN, [T, T[:20]], **options, **QUICK)
    monkeypatch.setattr(fill_module, "MAX_CELLS_IN_MEMORY", 100)
    streamed = gaps.fill_gaps(SEEN, [T, T[:20]], **options, **QUICK)
    ratios = (
        streamed.std[GAPS] / whole.std[GAPS]
    )  # from 16 draws: up to 18 % off inside of the hole, one standard error
    assert abs(np.median(ratios) - 1) < 0.1
    assert 0.6 < ratios.min() <= ratios.max() < 1.6
    np.testing.assert_array_equal(streamed.std == 0.0, whole.std == 0.0)
    assert gaps.fill_gaps(SEEN, [T, T[:20]], std=False, **options, **QUICK).std is None
    where = np.ones_like(GAPS) if smooth else GAPS
    np.testing.assert_allclose(streamed.mean[where], whole.mean[where], atol=1e-3)  # 1e-2 standard deviations each
    if not smooth:
        np.testing.assert_array_equal(streamed.mean[~GAPS], SEEN[~GAPS])
    masked = np.ma.MaskedArray(np.rint(100 * np.nan_to_num(SEEN)).astype(np.int16), mask=GAPS)
    integers = gaps.fill_gaps(masked, kernels=stationary(), **QUICK)
    assert integers.mean.dtype == np.int16
    np.testing.assert_array_equal(integers.mean[~GAPS], masked[~GAPS])


@pytest.mark.usefixtures("quick_choice")
def test_length_scales_are_held_up_where_memory_is_short(monkeypatch):
    monkeypatch.setattr(fill_module, "MAX_CELLS_IN_MEMORY", 100)
    noise = np.where(GAPS, np.nan, RNG.standard_normal(SEEN.shape))  # white: a short length-scale, all eigenvectors
    found = gaps.fill_gaps(noise, memory=20_000, **QUICK)
    assert any("held above" in note for note in found.report.notes)
    rough = [gpytorch.kernels.MaternKernel(nu=0.5) for _ in range(2)]
    with pytest.raises(ValueError, match="kernels: their eigenvectors take"):
        gaps.fill_gaps(noise, kernels=rough, memory=20_000, **QUICK)


@pytest.mark.parametrize("order", ["C", "F"])
def test_the_order_of_memory_does_not_matter(order):
    found = gaps.fill_gaps(np.array(SEEN, order=order), kernels=stationary(), **QUICK)
    assert found.std[GAPS].min() > 0.01
    table = gaps.fill_gaps(pd.DataFrame(np.array(SEEN, order=order)), kernels=stationary(), **QUICK)
    np.testing.assert_array_equal(table.std.to_numpy(), found.std)


def test_streamed_means_have_a_trend_and_no_sight_of_what_is_withheld(monkeypatch):
    rows, columns = np.meshgrid(np.arange(20.0), np.arange(20.0), indexing="ij")
    truth = 5 * rows + 3 * columns + 0.3 * np.sin(rows)
    seen = np.where(RNG.random((20, 20)) < 0.3, np.nan, truth)
    given = []
    choose_model = streamed.choose_model
    monkeypatch.setattr(streamed, "choose_model", lambda *args: given.append(args[1].values) or choose_model(*args))
    monkeypatch.setattr(fill_module, "MAX_CELLS_IN_MEMORY", 100)
    found = gaps.fill_gaps(seen, kernels=stationary(), steps=10, progress=False)
    error = np.sqrt(np.mean((found.mean - truth)[np.isnan(seen)] ** 2))
    assert error < 3 * found.report.held_out.rmse + 0.1
    assert any("trend" in note for note in found.report.notes)
    assert np.isnan(given[0]).sum() == np.isnan(seen).sum() + found.report.held_out.count


@pytest.mark.usefixtures("quick_choice")
def test_equal_observations_that_are_streamed_have_no_error_bars(monkeypatch):
    monkeypatch.setattr(fill_module, "MAX_CELLS_IN_MEMORY", 100)
    found = gaps.fill_gaps(np.where(GAPS, np.nan, 3.0), **QUICK)
    np.testing.assert_allclose(found.mean, 3.0)
    np.testing.assert_array_equal(np.isnan(found.std), GAPS)
    assert any("all observations are equal" in note for note in found.report.notes)
    assert found.report.expected_rmse is None


@pytest.mark.usefixtures("quick_choice")
def test_error_bars_that_do_not_fit_in_memory_are_left_out_with_a_note(monkeypatch):
    monkeypatch.setattr(fill_module, "MAX_CELLS_IN_MEMORY", 100)
    found = gaps.fill_gaps(SEEN, kernels=stationary(), memory=100_000, **QUICK)
    assert found.std is None
    assert any("draws do not fit in" in note for note in found.report.notes)


@pytest.mark.parametrize("trend", [True, False])
def test_the_trend_of_a_streamed_array_is_seen_in_its_widest_window(monkeypatch, trend):
    monkeypatch.setattr(fill_module, "MAX_CELLS_IN_MEMORY", 100)
    monkeypatch.setattr(grid_values, "MAX_PART_CELLS", 1000)  # the part to check in is less than the whole
    x, y = np.linspace(0, 1, 90), np.linspace(0, 1, 60)
    truth = 40 * x[:, None] - 20 * y + 0.2 * np.sin(9 * x[:, None] + 7 * y)
    seen = truth.copy()
    seen[70:] = np.nan  # beyond the data, only a trend goes on
    kernels = [rbf(0.1), rbf(0.1)]
    found = gaps.fill_gaps(seen, [x, y], kernels=kernels, trend=trend, **QUICK)
    off = np.abs(found.mean - truth)[80:].max()
    assert off < 2 if trend else off > 5
    assert any("trend" in note for note in found.report.notes) is trend


@pytest.mark.usefixtures("quick_choice")
def test_a_steep_trend_does_not_drown_the_rest():
    x = np.linspace(0, 1, 40)
    truth = 1e4 * x + np.sin(12 * x)
    seen = truth.copy()
    seen[[7, 8, 20, 31]] = np.nan
    found = gaps.fill_gaps(seen, [x], check=False, progress=False)
    assert np.abs(found.mean - truth).max() < 0.05
    assert found.std.max() < 0.2


def test_columns_of_other_scales_have_errors_of_their_own():
    t = np.arange(60)
    truth = pd.DataFrame({"p": 1013 + 5 * np.sin(t / 5), "t": 15 + 5 * np.cos(t / 6), "h": 0.5 + 0.1 * np.sin(t / 4)})
    seen = truth.mask(RNG.random(truth.shape) < 0.2)
    found = gaps.fill_gaps(seen, kernels=[gpytorch.kernels.RBFKernel(), "auto"], check=False, progress=False)
    for name in truth:
        gap = seen[name].isna()
        sd = truth[name].std()
        assert (found.mean[name] - truth[name])[gap].abs().max() < 0.3 * sd
        assert 0 < found.std[name][gap].max() < 0.5 * sd
    assert any("differ in scale" in note for note in found.report.notes)


@pytest.mark.usefixtures("quick_choice")
def test_units_of_coordinates_do_not_matter():
    plain, far = (gaps.fill_gaps(SEEN, [u * T, u * T[:20]], **QUICK) for u in (1.0, 1e3))
    assert plain.report.kernel == far.report.kernel
    np.testing.assert_allclose(far.mean, plain.mean, atol=1e-3)


# -- little to learn from ----------------------------------------------------------------------------------------------


def test_no_gaps_is_what_came():
    found = gaps.fill_gaps(TRUTH)
    np.testing.assert_array_equal(found.mean, TRUTH)
    assert found.std.max() == 0.0
    assert "no gaps" in str(found.report)


def test_no_gaps_can_still_be_smoothed():
    noisy = TRUTH + 0.1 * RNG.standard_normal(TRUTH.shape)
    found = gaps.fill_gaps(noisy, kernels=stationary(), smooth=True, steps=20, check=False, progress=False)
    assert np.sqrt(np.mean((found.mean - TRUTH) ** 2)) < 0.05


@pytest.mark.parametrize("values", [[3.0, np.nan, 3.0], [[np.nan, np.nan], [3.0, np.nan]]])
def test_a_constant_and_a_single_observation(values):
    found = gaps.fill_gaps(np.array(values), progress=False)
    assert (found.mean == 3.0).all()
    assert found.model is None
    assert found.report.notes


@pytest.mark.parametrize("shape", [(1, 60), (60, 1), (60,), (1, 1, 60)])
@pytest.mark.usefixtures("quick_choice")
def test_a_single_row_is_filled(shape):
    wave = np.sin(np.arange(60) / 4)
    seen = wave.copy()
    seen[[5, 20, 21, 40]] = np.nan
    found = gaps.fill_gaps(seen.reshape(shape), progress=False, check=False)
    assert found.mean.shape == shape
    assert np.abs(found.mean.reshape(-1) - wave).max() < 0.02


@pytest.mark.parametrize("observed", [2, 3, 5])
@pytest.mark.usefixtures("quick_choice")
def test_a_few_observations_give_wide_errors(observed):
    seen = np.full((8, 9), np.nan)
    seen.reshape(-1)[np.linspace(0, 71, observed).astype(int)] = np.arange(observed)
    found = gaps.fill_gaps(seen, progress=False)
    assert np.isfinite(found.mean).all()
    assert np.isfinite(found.std).all()
    assert found.std.max() > 0.1 * np.std(np.arange(observed))


def test_a_sparse_grid_is_filled():
    rows, columns = np.meshgrid(np.arange(300) / 60, np.arange(320) / 70, indexing="ij")
    truth = np.sin(rows) * np.cos(columns)
    seen = np.full(truth.shape, np.nan)
    chosen = RNG.choice(truth.size, 500, replace=False)
    seen.reshape(-1)[chosen] = truth.reshape(-1)[chosen]
    found = gaps.fill_gaps(seen, kernels=[rbf(60.0), rbf(60.0)], std=False, **QUICK)
    assert np.sqrt(np.mean((found.mean - truth) ** 2)) < 0.02 * truth.std()


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"values": np.full((3, 3), np.nan)}, "values: got 9 entries, all of them gaps"),
        ({"values": np.array([1.0, np.inf, np.nan])}, r"values: entry \(1,\) is inf"),
        ({"axes": [T]}, "axes: got 1, expected 2"),
        ({"axes": [T, [0.0] * 20]}, r"axis 1: got the coordinate 0\.0 twice"),
        ({"kernels": [gpytorch.kernels.RBFKernel()]}, "kernels: got 1, expected one for each"),
        ({"kernels": "rbf"}, "kernels: got 'rbf'"),
        ({"kernels": {"z": gpytorch.kernels.RBFKernel()}}, "kernels: got the axis 'z'"),
        ({"kernels": [1.0, None]}, "kernels: axis 0 got float"),
        ({"periods": {0: -1.0}}, "periods: axis 0: got -1.0"),
        ({"steps": 0}, "steps: got 0"),
        ({"seed": -1}, "seed: got -1"),
        ({"tolerance": 0.0}, "tolerance: got 0.0"),
        ({"smooth": 1}, "smooth: got 1"),
        ({"memory": -5}, "memory: got -5"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        gaps.fill_gaps(**{"values": SEEN, "progress": False, **arguments})


def test_a_dataset_brings_its_own_axes():
    with pytest.raises(ValueError, match="axes: got coordinates with a Dataset"):
        gaps.fill_gaps(xr.Dataset({"a": data_array()}), [T, T])
    with pytest.raises(ValueError, match="variable 'b': values: got 480 entries, all of them gaps"):
        gaps.fill_gaps(xr.Dataset({"a": data_array(), "b": data_array() * np.nan}), kernels=stationary(), **QUICK)
    with pytest.raises(ValueError, match="expected a variable of numbers"):
        gaps.fill_gaps(xr.Dataset({"a": ("x", ["u"])}))
