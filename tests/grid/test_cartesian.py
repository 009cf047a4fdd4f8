"""CartesianGrid: exact look-up of cells, casts that keep them apart, and refusals that name what came."""

import copy
import pickle
import re
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpytorch_gaps.grid.cartesian import CartesianGrid

DTYPES = [torch.float32, torch.float64]
examples = settings(max_examples=60)  # the first call of a torch function is slow
# Few distinct numbers, so that the rows of a group share columns; every one is exact in float32.
FEW = np.array([-2.5, -1.0, -0.0, 0.0, 1e-30, 0.5, 1.0, 3.0, 1e30], dtype=np.float32).tolist()
COORDINATES = st.sampled_from(FEW) | st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def grids(draw: st.DrawFn) -> CartesianGrid:
    """Up to three unsorted axes of one to three columns."""
    dtype = draw(st.sampled_from(DTYPES))
    axes = []
    for width in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)):
        rows = st.lists(st.tuples(*[COORDINATES] * width), min_size=1, max_size=6, unique=True)
        axes.append(torch.tensor(draw(rows), dtype=dtype))
    return CartesianGrid(axes)


def station_grid(dtype: torch.dtype = torch.float64) -> CartesianGrid:
    """Two unsorted times by three stations; neither of a station's columns tells it apart alone."""
    times = torch.tensor([3.0, 1.0], dtype=dtype)
    stations = torch.tensor([[10.0, 1.0], [10.0, 2.0], [20.0, 1.0]], dtype=dtype)
    return CartesianGrid([times, stations])


def minutes() -> Tensor:
    """Minutes, in days since 1970: distinct in float64, not in float32."""
    return 20_000 + torch.arange(60, dtype=torch.float64) / 1440


@examples
@given(grids())
def test_every_cell_is_found_at_its_own_index(grid: CartesianGrid) -> None:
    assert torch.equal(grid.index_of(grid.points()), torch.arange(grid.num_cells))


@examples
@given(grids(), st.data())
def test_look_up_agrees_with_a_dictionary(grid: CartesianGrid, data: st.DataObject) -> None:
    points = [tuple(row) for row in grid.points().tolist()]
    cell_of = {point: cell for cell, point in enumerate(points)}
    known = [st.sampled_from(sorted(set(column))) for column in zip(*points, strict=True)]
    mixed = st.tuples(*[column | COORDINATES for column in known])  # on the grid, off it, or right in some columns only
    queries = data.draw(st.lists(mixed, min_size=1, max_size=20))
    rows = torch.tensor(queries, dtype=grid.dtype)  # in the grid's precision, where a query may become a coordinate
    assert grid.index_of(rows).tolist() == [cell_of.get(tuple(row), -1) for row in rows.tolist()]


@examples
@given(grids())
def test_ravel_inverts_unravel(grid: CartesianGrid) -> None:
    cells = torch.arange(grid.num_cells)
    positions = grid.unravel(cells)
    assert np.array_equal(positions.numpy(), np.unravel_index(cells.numpy(), grid.shape))
    assert torch.equal(grid.ravel(positions), cells)


@examples
@given(grids(), st.randoms(use_true_random=False))
def test_rows_are_found_in_any_order_and_batch(grid: CartesianGrid, random: Random) -> None:
    cells = torch.tensor([random.randrange(grid.num_cells) for _ in range(12)])
    x = grid.points(cells)
    assert torch.equal(grid.index_of(x), cells)
    assert torch.equal(grid.index_of(x.reshape(2, 3, 2, -1)), cells.reshape(2, 3, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_last_axis_is_the_fastest(dtype: torch.dtype) -> None:
    grid = station_grid(dtype)
    assert grid.shape == (2, 3)
    assert isinstance(grid.shape, torch.Size)
    assert (grid.num_cells, grid.num_columns) == (6, 3)
    assert grid.columns == (slice(0, 1), slice(1, 3))
    assert [tuple(axis.shape) for axis in grid.axes] == [(2, 1), (3, 2)]
    assert (grid.dtype, grid.device) == (dtype, torch.device("cpu"))
    expected = [[3, 10, 1], [3, 10, 2], [3, 20, 1], [1, 10, 1], [1, 10, 2], [1, 20, 1]]  # last axis fastest
    assert grid.points().tolist() == expected
    assert grid.points(torch.tensor([4, 0])).tolist() == [expected[4], expected[0]]


def test_repr_is_concise() -> None:
    assert repr(station_grid()) == "CartesianGrid(2 x 3, 3 columns, float64)"
    assert repr(CartesianGrid([[1, 2]])) == "CartesianGrid(2, 1 column, float32)"


@pytest.mark.parametrize("dtype", DTYPES)
def test_points_off_the_grid_have_index_minus_one(dtype: torch.dtype) -> None:
    x = torch.tensor([[3, 20, 2], [2, 10, 1], [3, 10, 1.5], [9, 99, 9], [3, 20, 1]], dtype=dtype)
    grid = station_grid(dtype)
    assert grid.index_of(x).tolist() == [-1, -1, -1, -1, 2]  # the first has both columns, but of two stations
    assert grid.axis_index_of(x).tolist() == [[0, -1, 0, -1, 0], [-1, 0, -1, -1, 2]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_look_up_is_exact(dtype: torch.dtype) -> None:
    third = torch.tensor(1.0, dtype=dtype) / 3
    neighbour = torch.nextafter(third, torch.ones_like(third))
    grid = CartesianGrid([torch.stack([neighbour, third])])
    x = torch.stack([third, neighbour, torch.nextafter(neighbour, torch.ones_like(third))])
    assert grid.index_of(x[:, None]).tolist() == [1, 0, -1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_zero_is_zero(dtype: torch.dtype) -> None:
    grid = CartesianGrid([torch.tensor([1.0, -0.0], dtype=dtype), torch.tensor([[0.0, 1.0], [-0.0, 2.0]], dtype=dtype)])
    x = torch.tensor([[0.0, -0.0, 1.0], [-0.0, 0.0, 2.0]], dtype=dtype)
    assert grid.index_of(x).tolist() == [2, 3]


def test_unknown_coordinate_does_not_borrow_the_key_of_another_row() -> None:
    # Codes (1, none) of the query next to codes (0, 2) of the last row: equal keys, were the base 3 and not 4.
    grid = CartesianGrid([[[10.0, 1.0], [20.0, 1.0], [10.0, 2.0]]])
    assert grid.index_of(torch.tensor([[20.0, 9.0]])).tolist() == [-1]


def test_codes_of_wide_groups_do_not_overflow() -> None:
    # Twelve columns of 3000 distinct values: a mixed-radix key would reach 3000^12 ~ 2^138.
    generator = torch.Generator().manual_seed(0)
    rows = torch.stack([torch.randperm(3000, generator=generator) for _ in range(12)], dim=-1).double()
    grid = CartesianGrid([rows])
    assert torch.equal(grid.index_of(rows), torch.arange(3000))
    swapped = rows.clone()
    swapped[:, 0] = rows[:, 0].roll(1)  # every column is known, no row is
    assert (grid.index_of(swapped) == -1).all()


@pytest.mark.parametrize("axes", [[[5.0]], [[5.0], [7.0]], [[[5.0, 6.0]], [7.0]]])
def test_a_grid_of_one_cell_finds_it(axes: list) -> None:
    grid = CartesianGrid(axes)
    assert grid.index_of(grid.points()).tolist() == [0]
    assert grid.index_of(grid.points() + 1).tolist() == [-1]


def test_ravel_marks_positions_outside_an_axis() -> None:
    positions = torch.tensor([[0, 1, -1, 2, 1], [2, 3, 1, 0, -1]])
    assert station_grid().ravel(positions).tolist() == [2, -1, -1, -1, -1]


@pytest.mark.parametrize("flat", [False, True])
def test_cells_without_nan_are_observed(flat: bool) -> None:
    values = torch.tensor([[1.0, torch.nan, 0.0], [torch.nan, 2.0, torch.nan]])
    assert station_grid().observed(values.flatten() if flat else values).tolist() == [0, 2, 4]
    assert station_grid().observed((values.flatten() if flat else values).numpy()).tolist() == [0, 2, 4]


@pytest.mark.parametrize("dtype", DTYPES)
def test_integers_and_python_numbers_take_the_floating_dtype_of_the_others(dtype: torch.dtype) -> None:
    grid = CartesianGrid([torch.arange(3), [0.1, 0.2], np.arange(2, dtype=np.uint16), torch.ones(1, dtype=dtype)])
    assert {axis.dtype for axis in grid.axes} == {dtype}
    assert grid.axes[1].squeeze(-1).tolist() == torch.tensor([0.1, 0.2], dtype=dtype).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_integers_alone_take_the_default_dtype(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert CartesianGrid([range(3), np.arange(2)]).dtype == dtype
    finally:
        torch.set_default_dtype(before)


def test_foreign_memory_layouts() -> None:
    reversed_big_endian = np.arange(4, dtype=">f8")[::-1]
    assert CartesianGrid([reversed_big_endian]).axes[0].squeeze(-1).tolist() == [3.0, 2.0, 1.0, 0.0]
    transposed = torch.arange(6.0).reshape(2, 3).T
    assert CartesianGrid([transposed]).axes[0].tolist() == transposed.tolist()


@pytest.mark.parametrize("as_numpy", [False, True])
def test_later_changes_to_what_was_passed_do_not_reach_the_grid(as_numpy: bool) -> None:
    axis = torch.tensor([3.0, 1.0, 2.0])
    grid = CartesianGrid([axis.numpy() if as_numpy else axis])
    assert axis.tolist() == [3.0, 1.0, 2.0]
    axis[:] = 0
    assert grid.axes[0].squeeze(-1).tolist() == [3.0, 1.0, 2.0]


def test_axes_do_not_carry_gradients() -> None:
    assert not CartesianGrid([torch.ones(1, requires_grad=True)]).axes[0].requires_grad


def assert_same(one: CartesianGrid, other: CartesianGrid) -> None:
    assert one.dtype == other.dtype
    assert all(torch.equal(a, b) for a, b in zip(one.axes, other.axes, strict=True))
    assert torch.equal(other.index_of(one.points()), torch.arange(one.num_cells))


def test_pickle_and_deepcopy() -> None:
    grid = station_grid()
    assert_same(grid, pickle.loads(pickle.dumps(grid)))
    twin = copy.deepcopy(grid)
    twin.axes[0].zero_()
    assert_same(grid, station_grid())


def test_look_up_follows_a_loaded_state() -> None:
    grid = station_grid()
    other = CartesianGrid([axis.flip(0) + 0.25 for axis in grid.axes])
    before = grid.points()
    grid.index_of(before)  # nothing remembered here may outlive the load
    grid.load_state_dict(other.state_dict())
    assert_same(other, grid)
    assert (grid.index_of(before) == -1).all()


def test_casts_round_trip() -> None:
    grid = station_grid(torch.float32)
    grid.index_of(grid.points())
    assert grid.double().dtype == torch.float64
    assert_same(grid, station_grid(torch.float64))
    assert_same(grid.float(), station_grid(torch.float32))
    assert_same(grid.to("cpu", torch.float64), station_grid(torch.float64))


def test_cast_that_merges_coordinates_is_refused_and_undone() -> None:
    grid = CartesianGrid([torch.arange(3).double(), minutes()])
    with pytest.raises(ValueError, match=r"axis 1: rows 0 and 1 .* torch\.float32"):
        grid.float()
    assert_same(grid, CartesianGrid([torch.arange(3).double(), minutes()]))


def test_cast_that_overflows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"axis 0: entry \(0, 0\) is inf"):
        CartesianGrid([torch.tensor([1e30])]).half()


def test_loading_that_merges_coordinates_is_refused() -> None:
    grid = CartesianGrid([torch.arange(60.0)])
    with pytest.raises(ValueError, match="axis 0: rows 0 and 1"):
        grid.load_state_dict(CartesianGrid([minutes()]).state_dict())
    assert_same(grid, CartesianGrid([torch.arange(60.0)]))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ([], "axes: got none"),
        ([[1.0], []], r"axis 1: got shape \(0,\)"),
        ([torch.zeros(2, 0)], r"axis 0: got shape \(2, 0\)"),
        ([[1.0], torch.zeros(2, 1, 1)], r"axis 1: got shape \(2, 1, 1\)"),
        ([torch.tensor(1.0)], r"axis 0: got shape \(\)"),
        ([[1.0], [[0.0, 1.0], [2.0, float("nan")]]], r"axis 1: entry \(1, 1\) is nan; expected finite"),
        ([[0.0, float("inf")]], r"axis 0: entry \(1, 0\) is inf"),
        ([[2.0, 1.0, 3.0, 1.0]], "axis 0: rows 1 and 3 are both"),
        ([[0.0, -0.0]], "axis 0: rows 0 and 1 are both"),
        ([[1.0], [[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]]], "axis 1: rows 0 and 2 are both"),
        ([torch.tensor([2**24, 2**24 + 1])], r"axis 0: rows 0 and 1 are both .* torch\.float32.* or torch\.float64"),
        ([torch.ones(1).float(), torch.ones(1).double()], r"axis 1: got torch\.float64; expected torch\.float32"),
        ([torch.ones(1), torch.ones(1, device="meta")], "axis 1: got meta; expected cpu, the device of axis 0"),
        ([torch.tensor([True])], r"axis 0: got torch\.bool"),
        ([[1.0], torch.tensor([1j])], r"axis 1: got torch\.complex64"),
        ([np.array([1], dtype=np.uint64)], r"axis 0: got torch\.uint64"),
        ([np.array([None, 1.0])], "axis 0: expected real numbers"),
        ([[1.0], ["north", "south"]], "axis 1: expected real numbers"),
        ([[[1.0, 2.0], [3.0]]], "axis 0: expected real numbers"),
    ],
)
def test_wrong_axes_are_refused(axes: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CartesianGrid(axes)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(4, 2).double(), r"x: got shape \(4, 2\); expected \(\*, N, 3\)"),
        (torch.zeros(3).double(), r"x: got shape \(3,\)"),
        (torch.zeros(4, 3), r"x: got torch\.float32 on cpu; expected torch\.float64"),
        (torch.zeros(4, 3).long(), r"x: got torch\.int64 on cpu; expected torch\.float64"),
        (torch.zeros(4, 3, device="meta").double(), r"x: got torch\.float64 on meta; expected torch\.float64 on cpu"),
        (torch.tensor([[0.0, 0, 0], [0, torch.nan, 0]]).double(), r"x: entry \(1, 1\) is nan"),
        (torch.tensor([[0.0, 0, -torch.inf]]).double(), r"x: entry \(0, 2\) is -inf"),
    ],
)
def test_refused_look_ups(x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        station_grid().index_of(x)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(3, 2), re.escape("values: got shape (3, 2); expected (2, 3) or (6,)")),
        (torch.tensor([[0, 0, 0], [0, torch.inf, 0]]), r"values: entry \(1, 1\) is inf"),
        (torch.full((6,), torch.nan), "values: got 6 entries, all of them gaps"),
    ],
)
def test_wrong_values_are_refused(values: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        station_grid().observed(values)


@pytest.mark.parametrize("cell", [-1, 6])
def test_cells_outside_the_grid_are_refused(cell: int) -> None:
    with pytest.raises(ValueError, match=rf"index: entry \(1,\) is {cell}; expected cells from 0 to 5"):
        station_grid().points(torch.tensor([0, cell]))
