"""from_array, from_points, from_xarray: every form of the same data gives the same grid and observations."""

import builtins
import re
from datetime import date
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.grid.data import from_array, from_points, from_xarray

DTYPES = [torch.float32, torch.float64]
NAN = float("nan")
examples = settings(max_examples=60)  # the first call of a torch function is slow


@st.composite
def arrays_with_gaps(draw: st.DrawFn) -> Tensor:
    """One to three dimensions, at least one observation."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    entries = st.lists(
        st.sampled_from([NAN, -0.0, 1.5, 7.0]), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))
    )
    values = torch.tensor(draw(entries), dtype=draw(st.sampled_from(DTYPES))).reshape(shape)
    values.view(-1)[draw(st.integers(0, values.numel() - 1))] = 3.0
    return values


def on_the_grid(grid: CartesianGrid, train_x: Tensor, train_y: Tensor) -> Tensor:
    """The array that the observations came from."""
    values = torch.full((grid.num_cells,), NAN, dtype=train_y.dtype)
    values[grid.index_of(train_x)] = train_y
    return values.reshape(grid.shape)


def assert_equal(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------------------------------------------- from_array


@examples
@given(arrays_with_gaps())
def test_array_is_recovered_from_its_observations(values: Tensor) -> None:
    grid, train_x, train_y = from_array(values)
    assert_equal(on_the_grid(grid, train_x, train_y), values)
    assert (grid.index_of(train_x).diff() > 0).all()  # grid order
    assert train_x.dtype == train_y.dtype == values.dtype
    assert not train_y.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_array_with_axes(dtype: torch.dtype) -> None:
    values = torch.tensor([[1.0, NAN, 3.0], [NAN, 5.0, 6.0]], dtype=dtype)
    stations = torch.tensor([[7.0, 1.0], [5.0, 2.0]], dtype=dtype)
    grid, train_x, train_y = from_array(values, [stations, None])
    assert train_x.tolist() == [[7, 1, 0], [7, 1, 2], [5, 2, 1], [5, 2, 2]]
    assert train_y.tolist() == [1, 3, 5, 6]
    assert grid.shape == (2, 3)
    assert grid.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("integers", [np.arange(4, 6), torch.arange(4, 6), [4, 5], range(4, 6)])
def test_integer_axes_take_the_dtype_of_the_values(dtype: torch.dtype, integers: Any) -> None:
    grid, train_x, _ = from_array(torch.zeros(2, dtype=dtype), [integers])
    assert grid.dtype == train_x.dtype == dtype
    assert train_x.tolist() == [[4.0], [5.0]]


NUMPY = np.array([[1.0, NAN], [3.0, 4.0]])
MASK = [[False, True], [False, False]]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (NUMPY, torch.float64),
        (NUMPY.astype(np.float32), torch.float32),
        (NUMPY.astype(">f4"), torch.float32),
        (np.asfortranarray(NUMPY), torch.float64),
        (NUMPY[::-1][::-1], torch.float64),
        (NUMPY.tolist(), torch.float32),
        (np.ma.masked_array(np.nan_to_num(NUMPY, nan=np.inf), MASK), torch.float64),
        (np.ma.masked_array([[1, 2], [3, 4]], MASK), torch.float32),
        (np.ma.masked_invalid(NUMPY.astype(np.float32)), torch.float32),
    ],
)
def test_forms_of_one_array(values: Any, dtype: torch.dtype) -> None:
    grid, train_x, train_y = from_array(values)
    assert train_x.tolist() == [[0, 0], [1, 0], [1, 1]]
    assert train_y.tolist() == [1, 3, 4]
    assert grid.dtype == train_x.dtype == train_y.dtype == dtype


@pytest.mark.parametrize("values", [[True, False], np.array([1, 0]), torch.tensor([True, False]), [1, 0]])
def test_integers_and_booleans_take_the_default_dtype(values: Any) -> None:
    grid, _, train_y = from_array(values)
    assert grid.dtype == train_y.dtype == torch.get_default_dtype()
    assert train_y.tolist() == [1.0, 0.0]


def test_observations_stay_differentiable() -> None:
    values = torch.tensor([1.0, NAN, 3.0], requires_grad=True)
    _, _, train_y = from_array(values)
    (train_y**2).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [2.0, 0.0, 6.0]


@pytest.mark.parametrize("as_numpy", [False, True])
def test_the_array_passed_is_neither_modified_nor_shared(as_numpy: bool) -> None:
    values, axis = torch.tensor([1.0, NAN, 3.0]), torch.tensor([9.0, 8.0, 7.0])
    before = values.clone()
    passed = (values.numpy(), [axis.numpy()]) if as_numpy else (values, [axis])
    grid, train_x, train_y = from_array(*passed)
    assert_equal(values, before)
    values[:], axis[:] = 0, 0
    assert train_x.tolist() == [[9.0], [7.0]]
    assert train_y.tolist() == [1.0, 3.0]
    assert grid.index_of(train_x).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("values", "axes", "message"),
    [
        (torch.zeros(2, 3), [[0, 1]], "axes: got 1; expected 2"),
        (torch.zeros(2, 3), [[0, 1], [0, 1]], "axis 1: got 2 coordinates; expected 3"),
        (torch.zeros(2, 2), [None, torch.tensor([1.0, 1.0])], "axis 1: rows 0 and 1"),
        (torch.zeros(2), [torch.zeros(2).double()], r"axis 0: got torch\.float64; expected torch\.float32"),
        (torch.zeros(2), [torch.zeros(2, device="meta")], "axis 0: got meta; expected cpu, the device of values"),
        (torch.zeros(2), [[True, False]], r"axis 0: got torch\.bool"),
        (torch.zeros(2), [torch.tensor([2**24, 2**24 + 1])], "axis 0: rows 0 and 1"),
        (torch.tensor([0.0, torch.inf]), None, r"values: entry \(1,\) is inf"),
        ([NAN, NAN], None, "values: got 2 entries, all of them gaps"),
        (np.ma.masked_all((2, 2)), None, "values: got 4 entries, all of them gaps"),
        (torch.zeros(2, 0), None, r"values: got shape \(2, 0\)"),
        (torch.tensor(1.0), None, r"values: got shape \(\)"),
        (torch.zeros(2, dtype=torch.complex64), None, r"values: got torch\.complex64"),
        (np.array(["a", "b"]), None, "values: expected real numbers"),
    ],
)
def test_wrong_arrays_are_refused(values: Any, axes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_array(values, axes)


# --------------------------------------------------------------------------------------------------- from_points


@examples
@given(arrays_with_gaps(), st.randoms(use_true_random=False))
def test_points_in_any_order_give_the_grid_back(values: Tensor, random: Random) -> None:
    full = CartesianGrid([range(m) for m in values.shape]).points().to(values.dtype)
    order = random.sample(range(len(full)), len(full))
    x, y = full[order], values.flatten()[order]
    grid, train_x, train_y = from_points(x, y)  # gaps are NaN rows: the axes are complete
    assert grid.shape == values.shape
    assert_equal(on_the_grid(grid, train_x, train_y), values)
    assert_equal(train_x, x[~y.isnan()])  # the rows keep their order
    assert_equal(train_y, y[~y.isnan()])


@pytest.mark.parametrize("dtype", DTYPES)
def test_axes_are_sorted_and_distinct(dtype: torch.dtype) -> None:
    x = torch.tensor([[3, -0.0], [1, 5], [3, 5], [2, 0.0]], dtype=dtype)
    grid, train_x, train_y = from_points(x, torch.tensor([1.0, NAN, 3.0, 4.0], dtype=dtype))
    assert [axis.squeeze(-1).tolist() for axis in grid.axes] == [[1, 2, 3], [0, 5]]
    assert grid.index_of(train_x).tolist() == [4, 5, 2]
    assert train_y.tolist() == [1, 3, 4]


def test_groups_reorder_the_columns() -> None:
    x = np.array([[2.0, 7.0, 1.0], [1.0, 7.0, 1.0], [2.0, 5.0, 1.0], [1.0, 5.0, 2.0]])
    grid, train_x, _ = from_points(x, np.arange(4.0), groups=[[1, 2], [0]])
    assert grid.axes[0].tolist() == [[5, 1], [5, 2], [7, 1]]
    assert grid.axes[1].tolist() == [[1], [2]]
    assert np.array_equal(train_x.numpy(), x[:, [1, 2, 0]])
    assert grid.index_of(train_x).tolist() == [5, 4, 1, 2]


def test_points_from_lists() -> None:
    grid, train_x, train_y = from_points([[0, 1], [2, 1]], [True, False])
    assert grid.dtype == train_x.dtype == train_y.dtype == torch.get_default_dtype()
    assert train_y.tolist() == [1.0, 0.0]


def test_the_points_passed_are_neither_modified_nor_shared() -> None:
    x, y = torch.tensor([[2.0], [1.0]]), torch.tensor([5.0, 6.0])
    grid, train_x, train_y = from_points(x, y)
    assert x.tolist() == [[2.0], [1.0]]
    x[:], y[:] = 0, 0
    assert train_x.tolist() == [[2.0], [1.0]]
    assert train_y.tolist() == [5.0, 6.0]
    assert grid.index_of(train_x).tolist() == [1, 0]


X = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 2.0]])
Y = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("x", "y", "groups", "message"),
    [
        (X[:, 0], Y, None, r"x: got shape \(3,\); expected \(N, D\)"),
        (X[:, :0], Y, None, r"x: got shape \(3, 0\)"),
        (X, Y[:2], None, r"y: got shape \(2,\); expected \(3,\)"),
        (X, Y[:, None], None, r"y: got shape \(3, 1\)"),
        (X, Y.double(), None, r"y: got torch\.float64; expected torch\.float32, the dtype of x"),
        (X, Y.to("meta"), None, "y: got meta; expected cpu, the device of x"),
        (X.bool(), Y, None, r"x: got torch\.bool"),
        (torch.tensor([[0.0, NAN]]), Y[:1], None, r"x: entry \(0, 1\) is nan"),
        (torch.tensor([[0.0], [torch.inf]]), Y[:2], None, r"x: entry \(1, 0\) is inf"),
        (X, torch.tensor([1.0, 2.0, -torch.inf]), None, r"y: entry \(2,\) is -inf"),
        (X, Y * NAN, None, "y: got 3 entries, all of them gaps"),
        (X[:0], Y[:0], None, "y: got 0 entries"),
        (X[[0, 1, 2, 1]], [1.0, NAN, 3.0, 4.0], None, "x: rows 1 and 3 are both"),
        (torch.tensor([[2**24, 0], [2**24 + 1, 1]]), Y[:2], None, r"axis 0: rows 0 and 1 .* torch\.float64"),
        (X, Y, [[0]], re.escape("groups: got [[0]]; expected each column of x, 0 to 1, in exactly one group")),
        (X, Y, [[0, 1], [1]], "groups: got"),
        (X, Y, [[0], [2]], "groups: got"),
        (X, Y, [[0], [-1]], "groups: got"),
        (X, Y, [[0], [], [1]], "groups: got"),
    ],
)
def test_wrong_points_are_refused(x: Any, y: Any, groups: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_points(x, y, groups)


# --------------------------------------------------------------------------------------------------- from_xarray


def data_array(dtype: str = "float64", **coords: Any) -> Any:
    """Two days by three stations, one gap."""
    xarray = pytest.importorskip("xarray")
    values = np.array([[1.0, NAN, 3.0], [4.0, 5.0, 6.0]], dtype=dtype)
    return xarray.DataArray(values, dims=("time", "station"), coords=coords)


@pytest.mark.parametrize("unit", ["ns", "us", "ms", "s"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_times_become_days_and_labels_positions(unit: str, dtype: str) -> None:
    times = np.array(["1969-12-30T18:00", "1970-01-02T06:00"], dtype=f"datetime64[{unit}]")
    values = data_array(dtype, time=times, station=["north", "south", "mid"])
    grid, train_x, train_y = from_xarray(values)
    assert str(grid.dtype) == f"torch.{dtype}"
    assert [axis.squeeze(-1).tolist() for axis in grid.axes] == [[0.0, 2.5], [0.0, 1.0, 2.0]]
    assert_equal(on_the_grid(grid, train_x, train_y), torch.from_numpy(values.values))


def test_durations_become_days_since_the_first() -> None:
    grid, _, _ = from_xarray(data_array(time=np.array([-12, 36], dtype="timedelta64[h]")))
    assert grid.axes[0].squeeze(-1).tolist() == [0.0, 2.0]


def test_days_are_exact_over_spans_that_overflow_nanoseconds() -> None:
    # 1678 to 2262 is 584 years, twice what a difference in int64 nanoseconds can hold.
    times = np.array(["1678-01-01T00:00:00.000000001", "2262-01-01T12:00:00.000000001"], dtype="datetime64[ns]")
    grid, _, _ = from_xarray(data_array(time=times))
    assert grid.axes[0].squeeze(-1).tolist() == [0.0, (date(2262, 1, 1) - date(1678, 1, 1)).days + 0.5]


def test_numeric_and_missing_coordinates() -> None:
    grid, _, _ = from_xarray(data_array("float32", station=np.array([3.5, 1.25, 2.0])))
    assert [axis.squeeze(-1).tolist() for axis in grid.axes] == [[0.0, 1.0], [3.5, 1.25, 2.0]]
    assert grid.dtype == torch.float32


def test_booleans_become_positions() -> None:
    grid, _, _ = from_xarray(data_array(time=[True, False]))
    assert grid.axes[0].squeeze(-1).tolist() == [0.0, 1.0]


def test_times_that_float32_merges_are_refused_with_advice() -> None:
    times = np.array(["2000-01-01", "2020-01-01T00:00", "2020-01-01T00:00:01"], dtype="datetime64[ns]")
    values = data_array("float32").T.assign_coords(station=times)
    with pytest.raises(ValueError, match=r"\('station', 'time'\): axis 0: rows 1 and 2 .* torch\.float64"):
        from_xarray(values)
    assert from_xarray(values.astype("float64"))[0].shape == (3, 2)


def test_missing_times_are_refused() -> None:
    with pytest.raises(ValueError, match="coordinate 'time' has NaT"):
        from_xarray(data_array(time=np.array(["2000-01-01", "NaT"], dtype="datetime64[ns]")))


def test_what_is_no_data_array_is_refused() -> None:
    with pytest.raises(TypeError, match=r"data_array: got a Dataset; pick a variable, one of \['rain'\]"):
        from_xarray(data_array().to_dataset(name="rain"))
    with pytest.raises(TypeError, match="data_array: got ndarray; expected an xarray DataArray"):
        from_xarray(np.zeros(3))  # type: ignore[arg-type]


def test_without_xarray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = builtins.__import__

    def without_xarray(name: str, *args: Any) -> Any:
        if name == "xarray":
            raise ImportError(name)
        return find(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_xarray)
    with pytest.raises(ImportError, match=re.escape("pip install gpytorch-gaps[xarray]")):
        from_xarray(np.zeros(3))  # type: ignore[arg-type]
