"""Results have the form of the input; observed values are unchanged bit for bit."""

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

import gpytorch_gaps as gaps
from gpytorch_gaps.filling.arrays.adapters import adapt

RNG = np.random.default_rng(0)
VALUES = RNG.standard_normal((6, 5)) * 3
GAPS = RNG.random((6, 5)) < 0.3
GAPPY = np.where(GAPS, np.nan, VALUES)
DATES = pd.date_range("2020-01-01", periods=6)


def cases():
    yield "float64", GAPPY
    yield "float32", GAPPY.astype(np.float32)
    yield "float16", GAPPY.astype(np.float16)
    yield "big-endian", GAPPY.astype(">f8")
    yield "fortran", np.asfortranarray(GAPPY)
    yield "masked int16", np.ma.MaskedArray(np.rint(VALUES * 100).astype(np.int16), mask=GAPS, fill_value=-1)
    yield "masked float", np.ma.MaskedArray(VALUES, mask=GAPS)
    yield "tensor", torch.tensor(GAPPY)
    yield "float32 tensor", torch.tensor(GAPPY, dtype=torch.float32)
    yield "bfloat16 tensor", torch.tensor(GAPPY, dtype=torch.bfloat16)
    yield "frame", pd.DataFrame(GAPPY, index=DATES, columns=pd.Index(list("abcde"), name="station"))
    yield "float32 frame", pd.DataFrame(GAPPY.astype(np.float32))
    yield "nullable frame", pd.DataFrame(np.rint(GAPPY)).astype("Int64")
    attrs = {"units": "K", "long_name": "warmth"}
    data = xr.DataArray(GAPPY, {"t": DATES, "x": np.arange(5.0)}, ("t", "x"), "T", attrs)
    data["x"].attrs["units"] = "m"
    yield "data array", data
    yield "float32 data array", data.astype(np.float32).assign_coords(extra=("t", np.arange(6)))
    yield "transposed data array", data.T


def numpy_of(values):
    if isinstance(values, torch.Tensor):
        return values.double().numpy()
    if isinstance(values, pd.DataFrame):
        return values.to_numpy(dtype=float, na_value=np.nan)
    if isinstance(values, xr.DataArray):
        return values.values
    return np.ma.filled(np.ma.asarray(values).astype(float), np.nan)


@pytest.mark.parametrize(("name", "given"), list(cases()), ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("smooth", [False, True])
def test_results_have_the_form_of_the_input(name, given, smooth):
    adapter = adapt(given)
    before = numpy_of(given).copy()
    numbers = adapter.numbers()
    gaps = np.isnan(numbers)
    assert gaps.any()
    np.testing.assert_array_equal(gaps, np.isnan(before))
    found = adapter.wrap_filled(np.full(adapter.shape, 7.25), gaps, smooth)
    assert type(found) is type(given)
    assert found.shape == given.shape
    after = numpy_of(found)
    whole = name in ("masked int16", "nullable frame")
    assert (after[gaps] == (7 if whole else 7.25)).all()
    if smooth:
        assert (after == (7 if whole else 7.25)).all()
    else:
        np.testing.assert_array_equal(after[~gaps], before[~gaps])
    if isinstance(given, pd.DataFrame):
        assert found.index.equals(given.index)
        assert found.columns.equals(given.columns)
        assert (found.dtypes == given.dtypes).all()
    else:
        assert found.dtype == given.dtype
    if isinstance(given, xr.DataArray):
        assert found.attrs == given.attrs
        assert found.name == given.name
        assert found.dims == given.dims
        xr.testing.assert_identical(found.coords.to_dataset(), given.coords.to_dataset())
    np.testing.assert_array_equal(numpy_of(given), before)  # what came is as it was
    flags = adapter.wrap_like_input(gaps)
    np.testing.assert_array_equal(np.asarray(flags), gaps)
    deviation = adapter.wrap_like_input(np.full(adapter.shape, 0.5))
    assert deviation.shape == given.shape
    assert (numpy_of(deviation) == 0.5).all()


def test_payloads_of_nan_and_signed_zeros_stay():
    values = np.array([0.0, -0.0, np.nan, 5e-324, 1.0])
    found = adapt(values).wrap_filled(np.zeros(5), np.isnan(values), False)
    np.testing.assert_array_equal(found.view(np.int64)[[0, 1, 3, 4]], values.view(np.int64)[[0, 1, 3, 4]])


def test_masked_entries_and_nan_are_both_gaps():
    given = np.ma.MaskedArray([1.0, np.nan, 3.0], mask=[True, False, False])
    adapter = adapt(given)
    assert np.isnan(adapter.numbers()).tolist() == [True, True, False]
    assert adapter.wrap_filled(np.zeros(3), np.isnan(adapter.numbers()), False).tolist() == [0.0, 0.0, 3.0]


def test_integers_are_rounded_and_clipped():
    given = np.ma.MaskedArray(np.array([1, 2, 3, 4], np.uint8), mask=[0, 1, 1, 1])
    found = adapt(given).wrap_filled(np.array([0, 2.6, -4.0, 300.0]), np.array([False, True, True, True]), False)
    assert found.tolist() == [1, 3, 0, 255]
    assert found.dtype == np.uint8


def test_std_of_a_data_array_says_what_it_is():
    data = xr.DataArray(GAPPY, dims=("a", "b"), name="T", attrs={"units": "K", "source": "buoy"})
    deviation = adapt(data).wrap_like_input(np.ones((6, 5)))
    assert deviation.attrs == {"long_name": "standard deviation of T", "units": "K"}
    assert data.attrs == {"units": "K", "source": "buoy"}


def test_a_column_that_is_full_is_not_touched():
    table = pd.DataFrame({"a": [1, 2, 3], "b": [1.0, np.nan, 3.0]})
    gaps = table.isna().to_numpy()
    found = adapt(table).wrap_filled(np.full((3, 2), 9.0), gaps, False)
    assert found.dtypes.tolist() == table.dtypes.tolist()
    assert found["a"].tolist() == [1, 2, 3]
    assert found["b"].tolist() == [1.0, 9.0, 3.0]


def test_a_series_lies_on_its_index():
    given = pd.Series([1.0, np.nan, 3.0], index=pd.date_range("2020-01-01", periods=3), name="s", dtype=np.float32)
    adapter = adapt(given)
    assert adapter.axes[0].kind == "time"
    found = adapter.wrap_filled(np.full(3, 2.0), np.isnan(adapter.numbers()), False)
    pd.testing.assert_series_equal(found, pd.Series([1.0, 2.0, 3.0], given.index, np.float32, "s"))


def long_table(values, names=("time", "depth")):
    """One row a cell, shuffled."""
    wide = pd.DataFrame(values, index=DATES, columns=np.array([0.0, 1.0, 2.5, 4.0, 8.0]))
    index = pd.MultiIndex.from_product([wide.index, wide.columns], names=names)
    return pd.Series(wide.to_numpy().ravel(), index, name="T").sample(frac=1.0, random_state=0)


def test_a_series_with_levels_lies_on_one_axis_a_level():
    given = long_table(GAPPY).drop((DATES[2], 4.0))
    adapter = adapt(given)
    assert [(axis.name, axis.kind, axis.size) for axis in adapter.axes] == [("time", "time", 6), ("depth", "number", 5)]
    expected = GAPPY.copy()
    expected[2, 3] = np.nan  # a combination without a row is a gap
    np.testing.assert_array_equal(adapter.numbers(), expected)
    cells = np.arange(30.0).reshape(6, 5)
    found = adapter.wrap_filled(cells, np.isnan(adapter.numbers()), False)
    places = [cells[DATES.get_loc(t), [0.0, 1.0, 2.5, 4.0, 8.0].index(d)] for t, d in given.index]
    pd.testing.assert_series_equal(found, given.fillna(pd.Series(places, given.index)))
    pd.testing.assert_series_equal(adapter.wrap_like_input(cells), pd.Series(places, given.index, name="T"))


def test_a_table_with_levels_lies_on_one_axis_a_level():
    series = long_table(GAPPY)
    given = pd.DataFrame({"a": series, "b": 2 * series, "c": 3 * series})
    adapter = adapt(given)
    assert [axis.size for axis in adapter.axes] == [6, 5, 3]
    np.testing.assert_array_equal(adapter.numbers(), GAPPY[..., None] * [1.0, 2.0, 3.0])
    cells = np.arange(90.0).reshape(6, 5, 3)
    found = adapter.wrap_filled(cells, np.isnan(adapter.numbers()), smooth=True)
    assert found.loc[(DATES[4], 2.5)].tolist() == cells[4, 2].tolist()
    assert found.index.equals(given.index)


@pytest.mark.usefixtures("quick_choice")
def test_a_series_with_levels_is_filled_as_the_table_that_it_unstacks_to():
    t, x = np.linspace(0, 1, 12), np.linspace(0, 1, 9)
    wide = pd.DataFrame(np.sin(5 * t[:, None]) * np.cos(3 * x), pd.Index(t, name="t"), pd.Index(x, name="x"))
    wide = wide.mask(RNG.random(wide.shape) < 0.3)
    long = wide.stack(future_stack=True).sample(frac=1.0, random_state=0)
    options = {"steps": 4, "check": False, "progress": False}
    from_long, from_wide = gaps.fill_gaps(long, **options), gaps.fill_gaps(wide, **options)
    assert from_long.mean.index.equals(long.index)
    np.testing.assert_allclose(from_long.mean.unstack(), from_wide.mean, rtol=1e-12)
    np.testing.assert_allclose(from_long.std.unstack(), from_wide.std, rtol=1e-12)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (pd.MultiIndex.from_tuples([(0, 1), (0, 2), (0, 1)], names=["a", "b"]), r"a, b: row 2, \(0, 1\), occurs twice"),
        (pd.MultiIndex.from_arrays([[0, 1, None], [1, 2, 3]], names=["a", "b"]), "a: row 2 has no label"),
        (pd.MultiIndex.from_arrays([np.arange(200)] * 2), "rows, level 0, rows, level 1: got 200 rows for 200 x 200"),
    ],
    ids=["repeated", "missing", "no grid"],
)
def test_levels_that_make_no_grid_are_refused(index, message):
    with pytest.raises(ValueError, match=message):
        adapt(pd.Series(np.arange(float(len(index))), index))


def test_a_stacked_dimension_is_refused():
    data = xr.DataArray(GAPPY, {"t": DATES, "x": np.arange(5.0)}, ("t", "x")).stack(z=("t", "x"))
    with pytest.raises(ValueError, match=r"z: entry 0 is .* Try: unstack it"):
        adapt(data)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.array(["a", "b"]), "values: got <U1, expected real numbers"),
        (np.array([1j]), "values: got complex128"),
        (np.float64(3.0), r"values: got shape \(\)"),
        (np.empty((3, 0)), r"values: got shape \(3, 0\)"),
        (pd.DataFrame({"a": [1.0], "b": ["x"]}), "values: column 'b' holds"),
        (xr.DataArray(np.array(["2020"], "datetime64[D]"), dims="t"), "values: got datetime64"),
    ],
)
def test_what_is_no_array_of_numbers(given, message):
    with pytest.raises(ValueError, match=message):
        adapt(given)


def test_infinite_entries_are_named():
    with pytest.raises(ValueError, match=r"values: entry \(1, 0\) is -inf"):
        adapt(np.array([[1.0, np.nan], [-np.inf, 2.0]])).numbers()


def test_a_dimension_without_coordinates_is_what_it_is_in_an_array():
    data = xr.DataArray(np.zeros((20, 20, 3)), dims=("y", "x", "colour"))
    assert [axis.kind for axis in adapt(data).axes] == ["position", "position", "label"]
    assert [axis.name for axis in adapt(data).axes] == ["y", "x", "colour"]


def test_none_in_a_list_is_a_gap():
    assert np.isnan(adapt([1.0, None, 3.0]).numbers()).tolist() == [False, True, False]


def test_series_of_booleans_and_of_objects():
    given = pd.Series([True, pd.NA, False], dtype="boolean")
    adapter = adapt(given)
    found = adapter.wrap_filled(np.full(3, 0.9), np.isnan(adapter.numbers()), False)
    pd.testing.assert_series_equal(found, pd.Series([True, True, False], dtype="boolean"))
    with pytest.raises(ValueError, match="values: got a Series of object"):
        adapt(pd.Series([1.0, "x"], dtype=object))
