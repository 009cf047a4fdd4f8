"""Axes that are given by lag against the matrices they stand for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpytorch_gaps.linalg.axis_correlations import axis_entries, correlations, relative_change
from tests import _dense as dense

examples = settings(max_examples=60)
numbers = st.floats(-10.0, 10.0, width=32)
lag_vectors = st.lists(numbers, min_size=1, max_size=12).map(lambda values: torch.tensor(values, dtype=torch.float64))


@examples
@given(lag_vectors)
def test_correlations_by_lag_are_those_of_the_matrix(lags):
    by_lag, matrix = correlations([lags, dense.toeplitz(lags)])
    torch.testing.assert_close(dense.toeplitz(by_lag), matrix, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("lags", [[0.0, 0.0, 0.0], [0.0, 1.0, 2.0], [-1.0, 0.5, 0.5]])
def test_without_a_variance_levels_are_correlated_with_themselves_alone(lags):
    assert correlations([torch.tensor(lags)])[0].tolist() == [1.0, 0.0, 0.0]


def test_what_was_given_is_left_as_it_is():
    lags = torch.tensor([4.0, -2.0])
    correlations([lags])
    assert lags.tolist() == [4.0, -2.0]


@pytest.mark.parametrize("shape", [(), (2, 3, 3)])
def test_other_dimensions_are_refused(shape):
    with pytest.raises(ValueError, match=r"factors: got shape .* expected \(m, m\), or \(m,\)"):
        correlations([torch.ones(shape)])


@examples
@given(lag_vectors, st.data())
def test_entries_are_those_of_the_matrix(lags, data):
    level = st.integers(0, len(lags) - 1)
    rows, columns = (torch.tensor(data.draw(st.lists(level, min_size=1, max_size=5))) for _ in range(2))
    expected = dense.toeplitz(lags)[rows.unsqueeze(-1), columns]
    assert torch.equal(axis_entries(lags, rows.unsqueeze(-1), columns), expected)
    assert torch.equal(axis_entries(dense.toeplitz(lags), rows.unsqueeze(-1), columns), expected)


@examples
@given(st.integers(1, 12), st.floats(0.1, 2.0), st.floats(0.1, 2.0))
def test_a_change_is_that_of_the_matrix(size, before, after):
    old, new = dense.matern32(size, before)[0], dense.matern32(size, after)[0]
    expected = (dense.toeplitz(new) - dense.toeplitz(old)).norm() / dense.toeplitz(old).norm()
    torch.testing.assert_close(relative_change(new, old), expected, rtol=1e-12, atol=1e-14)
