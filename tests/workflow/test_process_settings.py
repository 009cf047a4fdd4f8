"""Settings of the process that are not ours: importing BoTorch turns fast computations off, and dense limits up."""

from contextlib import contextmanager

import gpytorch
import linear_operator
import pytest
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood

import gpytorch_gaps as gaps
from gpytorch_gaps.operators import SelectedKroneckerOperator
from tests.workflow._pairs import CASES


@contextmanager
def as_after_importing_botorch():
    """tests/upstream/test_environment.py watches that these are what the import changes."""
    with (
        linear_operator.settings.fast_computations(False, False, False),
        linear_operator.settings.max_cholesky_size(4096),
        linear_operator.settings.cholesky_max_tries(6),
        gpytorch.settings.max_eager_kernel_size(4096),
    ):
        yield


def trained_and_predicted(case):
    """Two steps of a loop of one's own, then predictions: every number, and how each was found."""
    pair = CASES[case]()
    model, inputs, targets = pair.ours, pair.ours.train_inputs, pair.ours.train_targets
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    numbers = []
    torch.manual_seed(3)
    with gaps.record_solves() as record:
        for _ in range(2):
            optimizer.zero_grad()
            loss = -mll(model(*inputs), targets).sum()
            loss.backward()
            optimizer.step()
            numbers.append(loss.detach())
        model.eval()
        with torch.no_grad():
            posterior = model.likelihood(model(pair.test_x), pair.test_x)
            numbers += [posterior.mean, posterior.variance, posterior.rsample(torch.Size([3]))]
    found = [(solve.method, solve.iterations, solve.rank) for solve in record]
    return numbers, found, [(logdet.method, logdet.reason, logdet.num_probes) for logdet in record.logdets]


@pytest.mark.parametrize("case", ["two axes", "a sum of two grid kernels", "a noise per output"])
def test_an_own_loop_does_the_same_whatever_botorch_has_set(case, monkeypatch):
    numbers, solves, logdets = trained_and_predicted(case)
    assert {method for method, *_ in logdets} == {"stochastic"}

    def to_dense(operator):
        assert max(operator.shape) < 1000, f"a dense matrix of {tuple(operator.shape)}"
        return true_to_dense(operator)

    true_to_dense = SelectedKroneckerOperator.to_dense
    monkeypatch.setattr(SelectedKroneckerOperator, "to_dense", to_dense)
    with as_after_importing_botorch():
        theirs, their_solves, their_logdets = trained_and_predicted(case)
    assert their_logdets == logdets
    assert their_solves == solves
    for one, other in zip(numbers, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_dense_log_determinant_is_asked_for_by_our_setting():
    pair = CASES["two axes"]()
    prior = pair.ours.likelihood(pair.ours(*pair.ours.train_inputs))
    with gaps.settings.logdet_method("exact"), gaps.record_solves() as record:
        prior.log_prob(pair.ours.train_targets)
    assert [logdet.method for logdet in record.logdets] == ["exact"]


def test_dense_size_is_ours_and_a_smaller_limit_of_linear_operator_wins():
    limit = linear_operator.settings.max_cholesky_size
    assert gaps.settings.current().dense_size == 800
    with limit(4096):
        assert gaps.settings.current().dense_size == 800
        with gaps.settings.dense_size(2000):
            assert gaps.settings.current().dense_size == 2000
    with limit(10), gaps.settings.dense_size(2000):
        assert gaps.settings.current().dense_size == 10
