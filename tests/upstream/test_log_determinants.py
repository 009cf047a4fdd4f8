"""Traps in linear_operator's stochastic log-determinant: why our operators bring their own probes."""

import warnings

import linear_operator
import pytest
import torch
from linear_operator.operators import to_linear_operator

from tests.upstream._helpers import changed, exponential, raised

PROBES = "_probe_vectors_and_norms of our operators and gpytorch_gaps.solvers.logdet"


@pytest.fixture(autouse=True)
def by_lanczos():
    with linear_operator.settings.max_cholesky_size(0):
        yield


def covariance(size=5):
    return to_linear_operator(exponential(size, 0.1) + torch.eye(size, dtype=torch.float64))


def test_no_probes_raises():
    """Trap: `num_trace_samples(0)`, documented as the exact trace, raises.

    Answered by gpytorch_gaps.solvers.logdet.exact.
    """
    with linear_operator.settings.num_trace_samples(0):
        error = raised(covariance().logdet)
    assert error is not None, changed("num_trace_samples(0) no longer raises", "gpytorch_gaps.solvers.logdet.exact")


def test_deterministic_probes_are_global_and_deprecated():
    """Trap: `deterministic_probes` shares one set of probes between all operators. Answered by probes per operator."""
    flag = linear_operator.settings.deterministic_probes
    with flag(True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        covariance().logdet()
        first = flag.probe_vectors
        (3 * covariance()).logdet()
        assert first is not None, changed("deterministic_probes no longer keeps its probes on the class", PROBES)
        assert flag.probe_vectors is first, changed("deterministic_probes is no longer shared by operators", PROBES)
    deprecated = [warning for warning in caught if issubclass(warning.category, DeprecationWarning)]
    assert any("deterministic probes" in str(warning.message) for warning in deprecated), changed(
        "deterministic_probes is no longer deprecated", PROBES
    )


def test_probes_per_operator_are_used():
    """The remedy's hook: what `_probe_vectors_and_norms` returns is what the estimator uses."""
    operator = covariance()
    probes = torch.eye(5, dtype=torch.float64)
    operator._probe_vectors_and_norms = lambda: (probes, torch.ones(1, 5, dtype=torch.float64) * 5**0.5)
    values = {float(operator.logdet()) for _ in range(2)}
    message = changed("inv_quad_logdet no longer asks an operator for its own probes", PROBES)
    assert len(values) == 1, message
    assert values.pop() == pytest.approx(float(torch.logdet(operator.to_dense())), rel=1e-6), message
