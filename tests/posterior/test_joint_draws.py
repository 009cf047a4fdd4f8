"""Terms of a covariance and how they are drawn: which structure is used, and when it must not be."""

import pytest
import torch
from linear_operator.operators import DenseLinearOperator, MatmulLinearOperator, RootLinearOperator

from gpytorch_gaps.posterior.joint_draws import _Dense, _LowRank, _term
from tests import _dense as dense

MEMORY = 2.0**29  # bytes


def low_rank(turn, unit=1.0):
    """Features of 5 test points and 7 observations; the root of the observations turned, or not."""
    test, train = unit * dense.randn(5, 3, seed=0), unit * dense.randn(7, 3, seed=1)
    rotation = torch.linalg.qr(dense.randn(3, 3, seed=2)).Q if turn else torch.eye(3, dtype=torch.float64)
    return RootLinearOperator(test), MatmulLinearOperator(test, train.mT), RootLinearOperator(train @ rotation)


@pytest.mark.parametrize("unit", [1.0, 1e-6, 1e6])
def test_a_root_is_shared_only_by_the_same_features(unit):
    """Turned by any rotation it is a root of the same covariance, and says nothing about the other points."""
    assert isinstance(_term(*low_rank(turn=False, unit=unit), None, MEMORY), _LowRank)
    assert isinstance(_term(*low_rank(turn=True, unit=unit), None, MEMORY), _Dense)


def test_draws_of_both():
    """Unit vectors for normal numbers: the columns of a root of the joint covariance."""
    for turn in (False, True):
        prior, cross, train = low_rank(turn)
        term = _term(prior, cross, train, None, MEMORY)
        (size,) = term.sizes
        observed, tested = term.draw(torch.eye(size, dtype=torch.float64))
        torch.testing.assert_close(observed @ observed.mT, train.to_dense(), rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(tested @ observed.mT, cross.to_dense(), rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(tested @ tested.mT, prior.to_dense(), rtol=1e-7, atol=1e-7)


def test_terms_without_structure_are_drawn_densely():
    joint = dense.random_psd(12)
    prior, cross, train = (DenseLinearOperator(block) for block in (joint[7:, 7:], joint[7:, :7], joint[:7, :7]))
    term = _term(prior, cross, train, None, MEMORY)
    assert isinstance(term, _Dense)
    observed, tested = term.draw(torch.eye(12, dtype=torch.float64))
    both = torch.cat([observed, tested])
    torch.testing.assert_close(both @ both.mT, joint, rtol=1e-10, atol=1e-10)
