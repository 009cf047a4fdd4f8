"""Numbers that fit a file: rounded, clipped, and never one that means a gap."""

import numpy as np
import pytest

from gpytorch_gaps.utils.dtypes import equal_to, to_dtype, write_where

NAN = float("nan")


def test_integers_are_rounded_and_clipped():
    values = np.array([-1e30, -0.6, -0.4, 0.5, 1.5, 254.6, 300.0, np.inf])
    np.testing.assert_array_equal(to_dtype(values, np.dtype("uint8")), [0, 0, 0, 0, 2, 255, 255, 255])
    np.testing.assert_array_equal(to_dtype(values, np.dtype("int8")), [-128, -1, 0, 0, 2, 127, 127, 127])


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_the_largest_integers_do_not_wrap_around(dtype):
    limits = np.iinfo(dtype)
    stored = to_dtype(np.array([1e30, -1e30]), np.dtype(dtype))
    assert int(stored[0]) > limits.max - 2**12
    assert int(stored[1]) == limits.min


@pytest.mark.parametrize(("dtype", "largest"), [("float16", 65504.0), ("float32", 3.4028234663852886e38)])
def test_floating_numbers_are_clipped_to_finite_ones(dtype, largest):
    np.testing.assert_array_equal(to_dtype(np.array([1e300, -1e300]), np.dtype(dtype)), [largest, -largest])


@pytest.mark.parametrize(
    ("dtype", "reserved", "expected"),
    [
        ("uint8", [5], [4, 4, 6]),
        ("uint8", [0], [4, 5, 6]),
        ("uint8", [5, 4], [3, 6, 6]),  # 3 is as near to 4 as 6 is to 5, and neither is taken
        ("uint8", [4, 5], [3, 6, 6]),
        ("int16", [4, 5, 6], [3, 3, 7]),
        ("int16", [5.5, NAN, np.inf, -1e30], [4, 5, 6]),
    ],
)
def test_no_integer_falls_onto_a_value_that_means_a_gap(dtype, reserved, expected):
    np.testing.assert_array_equal(to_dtype(np.array([4.0, 5.0, 6.0]), np.dtype(dtype), reserved), expected)


@pytest.mark.parametrize(("dtype", "value", "expected"), [("uint8", 0, 1), ("uint8", 255, 254), ("int8", -128, -127)])
def test_limits_that_mean_a_gap_are_left_inwards(dtype, value, expected):
    assert to_dtype(np.array([float(value)]), np.dtype(dtype), [value]).tolist() == [expected]
    both = to_dtype(np.array([0.0, 1.0]), np.dtype("uint8"), [0, 1])
    assert both.tolist() == [2, 2]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4"])
@pytest.mark.parametrize("value", [0.0, -99.0, 0.1])
def test_no_floating_number_falls_onto_a_value_that_means_a_gap(dtype, value):
    stored = to_dtype(np.array([value, 1.0]), np.dtype(dtype), [value])
    assert not equal_to(stored, value).any()
    meant = np.dtype(dtype).type(value)
    assert abs(stored[0] - meant) <= np.spacing(abs(meant))
    assert stored[1] == 1.0


def test_a_gap_value_is_found_as_the_type_holds_it():
    assert equal_to(np.array([0.1, 0.2], "float32"), 0.1).tolist() == [True, False]
    assert equal_to(np.array([1, 2], "uint8"), -9999.0).tolist() == [False, False]
    assert equal_to(np.array([1, 2], "uint8"), 1.5).tolist() == [False, False]
    lowest = np.iinfo("int64").min
    neighbours = np.array([lowest, lowest + 1], "int64")  # the same float64
    assert equal_to(neighbours, float(lowest)).tolist() == [True, False]


def test_flags_are_set_above_one_half():
    assert to_dtype(np.array([0.2, 0.5, 0.9]), np.dtype(bool)).tolist() == [False, False, True]


def test_values_are_written_where_asked_into_a_copy():
    held = np.ma.MaskedArray([1, 2, 3], mask=[0, 1, 1])
    result = write_where(held, np.array([9.0, 7.6, 3.4]), np.array([False, True, True]), reserved=[8])
    assert result.tolist() == [1, 7, 3]
    assert held.data.tolist() == [1, 2, 3]
