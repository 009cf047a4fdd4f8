"""The tracer of calls, on functions that pretend to be ours and linear_operator's, and on a product of an operator."""

import os
import sys

import pytest
import torch

from gpytorch_gaps.operators import SelectedKroneckerOperator
from tests import _dense as dense
from tests._trace import OURS, THEIRS, trace


def function_in(folder, module, name="call"):
    """A function in a file of that folder, which calls its arguments one after the other."""
    namespace = {}
    source = f"def {name}(*functions):\n    return [function() for function in functions]"
    exec(compile(source, os.path.join(folder, module), "exec"), namespace)
    return namespace[name]


ours, other = function_in(OURS, "solvers/one.py"), function_in(OURS, "linalg/two.py")
theirs, shape = function_in(THEIRS, "operators/base.py", "solve"), function_in(THEIRS, "operators/base.py", "shape")


def nothing():
    return None


CALLS = {
    "ours alone": (lambda: ours(other), 0),
    "out and not back": (lambda: ours(theirs), 0),
    "out and back": (lambda: ours(lambda: theirs(other)), 1),
    "out and back twice in one call": (lambda: ours(lambda: theirs(other, other)), 1),
    "out and back, twice": (lambda: ours(lambda: theirs(other), lambda: theirs(other)), 2),
    "out, back and out again": (lambda: ours(lambda: theirs(lambda: other(lambda: theirs(other)))), 1),
    "not from ours": (lambda: theirs(ours), 0),
    "from ours that was called by theirs": (lambda: theirs(lambda: ours(lambda: theirs(other))), 1),
    "an accessor": (lambda: ours(lambda: shape(other)), 0),
    "by way of torch": (lambda: ours(lambda: torch.no_grad()(lambda: theirs(other))()), 1),
}


@pytest.mark.parametrize("case", CALLS)
def test_excursions_are_calls_that_come_back(case):
    call, expected = CALLS[case]
    assert len(trace(call).excursions) == expected


def test_modules_are_those_with_a_function_that_was_called():
    assert trace(nothing).modules == frozenset()
    assert trace(lambda: theirs(ours)).modules == {"solvers/one.py"}
    assert trace(lambda: ours(lambda: theirs(other))).modules == {"solvers/one.py", "linalg/two.py"}


def test_an_excursion_says_where_it_began_and_what_it_entered():
    (found,) = trace(lambda: ours(lambda: theirs(other))).excursions
    assert found == ("solvers/one.py:2", "operators/base.py:solve")


def test_what_is_traced_returns_its_result_or_raises_and_tracing_ends():
    before = sys.getprofile()
    assert trace(lambda: 3).result == 3
    with pytest.raises(ZeroDivisionError):
        trace(lambda: ours(lambda: theirs(lambda: 1 / 0)))
    assert sys.getprofile() is before


def test_a_product_of_an_operator_enters_its_modules():
    index = dense.observed("random", (5, 4))
    operator = SelectedKroneckerOperator(dense.se(5), dense.se(4), row_index=index, col_index=index)
    found = trace(lambda: operator @ dense.randn(len(index), 2))
    assert {"operators/selected_kronecker.py", "linalg/products.py"} <= found.modules
    assert not any(module.startswith("solvers/formulations") for module in found.modules)
    assert found.result.shape == (len(index), 2)
