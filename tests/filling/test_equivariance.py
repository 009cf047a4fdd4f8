"""A filling does not depend on units, on the arrangement of an array, or on how its dates are written."""

import contextlib

import gpytorch
import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

import gpytorch_gaps as gaps
from gpytorch_gaps.filling.arrays.orientation import Orientation
from gpytorch_gaps.filling.axes.describe import describe_axes
from gpytorch_gaps.filling.learning import candidates as kernels_module
from gpytorch_gaps.filling.learning.model import ProductTerm, make_likelihood, make_model
from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.plot.kernel_terms import kernel_terms

RNG = np.random.default_rng(0)
DAYS = pd.date_range("2020-01-01", periods=8)
LAT, LON = np.linspace(40, 62, 7), np.linspace(0, 20, 6)
VALUES = np.sin(np.arange(8) / 3)[:, None, None] * np.cos(LAT[:, None] / 6) + np.sin(LON / 5)
VALUES += 0.1 * RNG.standard_normal(VALUES.shape)
VALUES[RNG.random(VALUES.shape) < 0.2] = np.nan
VALUES[4:6, 3:5, 2:4] = np.nan
SCALE = float(np.nanstd(VALUES))
CUBE = xr.DataArray(VALUES, {"time": DAYS, "lat": LAT, "lon": LON}, ["time", "lat", "lon"])
NAMES = [f"s{i}" for i in range(6)]
TABLE = xr.DataArray(VALUES.reshape(56, 6), {"time": DAYS[0] + pd.to_timedelta(np.arange(56), "D"), "station": NAMES},
                     ["time", "station"])  # fmt: skip
TOLERANCE = 1e-6  # of the standard deviation of the data


@pytest.fixture(autouse=True, scope="module")
def few_candidates():
    """Small windows, and two candidate kernels: one that is a product over axes, one on the sphere or in the plane."""
    listed, patch = kernels_module.candidates, pytest.MonkeyPatch()
    of_two_kinds = lambda task: [listed(task)[0], *listed(task)[4:5]]  # noqa: E731
    patch.setattr("gpytorch_gaps.filling.learning.choose.candidates", of_two_kinds)
    patch.setattr("gpytorch_gaps.filling.learning.choose.MAX_WINDOW_OBSERVATIONS", 80)
    patch.setattr("gpytorch_gaps.filling.learning.windows.MAX_WINDOW_OBSERVATIONS", 80)
    patch.setattr("gpytorch_gaps.filling.learning.learn.FIRST_STEPS", 1)
    patch.setattr("gpytorch_gaps.filling.learning.learn.FURTHER_STEPS", 1)
    yield
    patch.undo()


def fill(values, **options):
    return gaps.fill_gaps(values, steps=3, progress=False, **options)


@pytest.fixture(scope="module")
def cube():
    return fill(CUBE)


@pytest.fixture(scope="module")
def table():
    return fill(TABLE)


def assert_same(one, other, back=lambda field: field, factor=1.0, offset=0.0):
    """Compares two results.

    :param back: undoes what was done to the values of the other result.
    """
    mean, std = (np.asarray(back(field)) for field in (other.mean, other.std))
    np.testing.assert_allclose((mean - offset) / factor, np.asarray(one.mean), rtol=0, atol=TOLERANCE * SCALE)
    np.testing.assert_allclose(std / factor, np.asarray(one.std), rtol=0, atol=TOLERANCE * SCALE)
    assert other.report.kernel == one.report.kernel
    assert other.report.held_out.count == one.report.held_out.count
    assert other.report.held_out.rmse == pytest.approx(factor * one.report.held_out.rmse, rel=TOLERANCE)
    assert other.report.held_out.coverage == one.report.held_out.coverage


def test_the_same_call_gives_the_same_result(cube):
    again = fill(CUBE)
    np.testing.assert_array_equal(again.mean, cube.mean)
    np.testing.assert_array_equal(again.std, cube.std)


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2])
def test_one_thread_or_two(cube, count):
    with threads(count):
        assert_same(cube, fill(CUBE))


def test_units_of_the_data(cube):
    assert_same(cube, fill(3.0 * CUBE + 7.0), factor=3.0, offset=7.0)


@pytest.mark.parametrize("dims", [("lon", "time", "lat"), ("lat", "lon", "time")])
def test_transposition(cube, dims):
    assert_same(cube, fill(CUBE.transpose(*dims)), lambda field: field.transpose("time", "lat", "lon"))


def test_reversal_of_axes(cube):
    assert_same(cube, fill(CUBE[:, ::-1]), lambda field: field[:, ::-1])
    assert_same(cube, fill(CUBE[::-1, :, ::-1]), lambda field: field[::-1, :, ::-1])


def test_permutation_of_times(cube):
    assert_same(cube, fill(CUBE[np.random.default_rng(1).permutation(8)]), lambda field: field.sortby("time"))


@pytest.mark.parametrize(
    "times",
    [
        DAYS.strftime("%Y-%m-%d").to_numpy().astype(str),
        DAYS.strftime("%d.%m.%Y").to_numpy().astype(str),
        DAYS.strftime("%Y%m%d").to_numpy().astype(int),
        xr.date_range("2020-01-01", periods=8, use_cftime=True),
        xr.DataArray(np.arange(8), dims="time", attrs={"units": "days since 2020-01-01"}),
        xr.DataArray(24.0 * np.arange(8), dims="time", attrs={"units": "hours since 2020-01-01"}),
        DAYS.tz_localize("UTC"),
    ],
    ids=["text", "text with dots", "digits", "cftime", "days since", "hours since", "zone"],
)
def test_the_spelling_of_dates(times):
    (axis,) = describe_axes(
        [8],
        [times if isinstance(times, pd.DatetimeIndex) else np.asarray(times)],
        ["time"],
        [getattr(times, "attrs", {})],
    )
    (plain,) = describe_axes([8], [DAYS], ["time"])
    assert (axis.kind, axis.unit, axis.year) == (plain.kind, plain.unit, plain.year)
    np.testing.assert_array_equal(axis.points, plain.points)


def test_a_filling_with_other_dates(cube):
    assert_same(cube, fill(CUBE.assign_coords(time=xr.date_range("2020-01-01", periods=8, use_cftime=True))))
    assert_same(cube, fill(CUBE.to_numpy(), axes={"time": DAYS.strftime("%d.%m.%Y"), "lat": LAT, "lon": LON}))


def test_units_and_arrangement_of_a_plane():
    names = {"lat": "y", "lon": "x"}
    metres = CUBE.rename(names).assign_coords(y=1000.0 * np.arange(7), x=2000.0 * np.arange(6))
    in_metres = fill(metres)
    assert_same(in_metres, fill(metres.assign_coords(y=metres.y / 1000, x=metres.x / 1000)))
    turned = fill(metres.transpose("x", "time", "y")[::-1])
    assert_same(in_metres, turned, lambda field: field[::-1].transpose("time", "y", "x"))


def test_arrays_without_coordinates():
    plain = VALUES.reshape(16, 21)
    filled = fill(plain)
    assert_same(filled, fill(plain.T), np.transpose)
    assert_same(filled, fill(plain[::-1, ::-1]), lambda field: field[::-1, ::-1])


def test_permutation_and_names_of_labels(table):
    order = np.random.default_rng(1).permutation(6)
    assert_same(table, fill(TABLE[:, order]), lambda field: field.sel(station=NAMES))
    assert_same(table, fill(TABLE[:, order].T), lambda field: field.sel(station=NAMES).T)
    assert_same(table, fill(TABLE.assign_coords(station=list("fedcba"))))


def test_rows_of_a_long_table(table):
    long = TABLE.to_series().dropna(how="all")
    long = pd.concat([long, TABLE.to_series()]).groupby(level=[0, 1]).first()
    shuffled = long.sample(frac=1.0, random_state=0)
    assert_same(table, fill(shuffled), lambda rows: rows.unstack("station").sort_index()[NAMES])


def test_stations_in_any_order():
    places = {"lat": ("station", LAT[:6]), "lon": ("station", LON[[3, 1, 4, 0, 2, 5]])}
    in_space = TABLE.assign_coords(places)
    order = np.random.default_rng(2).permutation(6)
    assert_same(fill(in_space), fill(in_space[:, order]), lambda field: field.sel(station=NAMES))


# -- the parts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4,), (3, 5), (2, 4, 3)])
def test_an_orientation_maps_there_and_back(shape):
    values = RNG.standard_normal(shape)
    turn = Orientation.of(describe_axes(shape), values)
    np.testing.assert_array_equal(turn.turn_back(turn.turn(values)), values)
    canonical = turn.turn(values)
    cells = np.argwhere(canonical > 0)
    np.testing.assert_array_equal(values[tuple(turn.cells(cells).T)], canonical[canonical > 0])
    np.testing.assert_array_equal([turn.canonical(cell) for cell in turn.cells(cells)], cells)
    part = [np.arange(size - 1) for size in shape]
    np.testing.assert_array_equal(turn.at(part).turn(values[np.ix_(*part)]).shape, [shape[i] - 1 for i in turn.order])


def test_a_block_of_axes_that_lie_apart_is_the_exact_covariance():
    points = [np.linspace(40, 60, 4), np.arange(3.0), np.linspace(0, 20, 5)]
    grid = CartesianGrid([torch.from_numpy(own) for own in points])
    plane, time = gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=2), gpytorch.kernels.RBFKernel()
    plane.lengthscale, time.lengthscale = torch.tensor([9.0, 4.0]), 2.0
    term = ProductTerm([time.double(), plane.double()], 1.7, [(1,), (2, 0)])
    index = torch.arange(0, 60, 2)
    y = torch.from_numpy(np.sin(np.arange(30.0)))
    mean = gpytorch.means.ZeroMean()
    model = make_model(grid, index, y, [term], make_likelihood(1.0), mean)
    x, rest = grid.points(index), grid.points(torch.arange(1, 60, 2))
    dense = lambda a, b: 1.7 * plane(a[:, [2, 0]], b[:, [2, 0]]).to_dense() * time(a[:, [1]], b[:, [1]]).to_dense()  # noqa: E731
    with torch.no_grad():
        noisy = dense(x, x) + model.likelihood.noise * torch.eye(30)
        weights = torch.linalg.solve(noisy, dense(x, rest))
        posterior = model(rest)
        torch.testing.assert_close(posterior.mean, weights.mT @ y, rtol=1e-6, atol=1e-8)
        expected = (dense(rest, rest) - weights.mT @ dense(x, rest)).diagonal()
        torch.testing.assert_close(posterior.variance, expected, rtol=1e-5, atol=1e-8)
    shown, (kernels,) = kernel_terms(model)
    assert [len(axis) for axis in shown.axes] == [4, 3, 5]
    np.testing.assert_allclose([one.length_scales for one in kernels], [[4.0], [2.0], [9.0]], rtol=1e-6)
