"""Checks of arguments, and equality of tensors."""

import math

import numpy as np
import pytest
import torch

from gpytorch_gaps.utils.checks import check_integer, check_number
from gpytorch_gaps.utils.tensors import same_values


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2), torch.tensor(2.0), torch.tensor([2]), [[2.0]]])
def test_one_number_of_any_kind_is_read(value):
    value = np.array(value) if isinstance(value, list) else value
    assert check_number("x", value, above=1, at_least=2) == 2.0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("2", "x: got '2', expected a finite width"),
        (True, "x: got True, expected a finite width"),
        (None, "x: got None, expected a width"),
        (math.inf, "x: got inf, expected a finite width"),
        (torch.ones(3), r"x: got shape \(3,\), expected one width"),
        (0, "x: got 0, expected a width above 0"),
        (0.5, "x: got 0.5, expected a width of at least 1"),
    ],
)
def test_other_values_are_refused(value, message):
    with pytest.raises(ValueError, match=message):
        check_number("x", value, above=0, at_least=1, what="width")


@pytest.mark.parametrize("value", [0, 1.0, True, "1", None, torch.tensor(1)])
def test_what_is_no_integer_is_refused(value):
    with pytest.raises(ValueError, match=r"n: got .*, expected an integer of at least 1 or None"):
        check_integer("n", value, at_least=1, hint=" or None")


def test_numpy_integers_become_python_integers():
    assert type(check_integer("n", np.int32(3), at_least=0)) is int


def test_same_values_compares_content_shape_dtype_and_layout():
    x = torch.arange(6.0).reshape(2, 3)
    assert same_values(x, x)
    assert same_values(x, x.view(2, 3))
    assert same_values(x, x.clone())
    assert not same_values(x, x.flatten())
    assert not same_values(x, x.double())
    square = torch.arange(4.0).reshape(2, 2)
    assert not same_values(square, square.mT)  # the same memory in another order
