"""The benchmark of learning, on hundreds of cells: data are drawn as it says, and it measures what it says."""

import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from benchmarks import learning

SHAPE = (40, 30, 3)


class Facts(dict):
    """A child that runs here."""

    @contextmanager
    def clock(self):
        yield

    def report(self, **facts):
        self.update(facts)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    path = tmp_path_factory.mktemp("learning") / "values.npy"
    options = learning.parser().parse_args(["--lengthscale", "0.2", "--steps", "2"])
    learning.draw_file(path, SHAPE, options)
    return path, options


def test_draws_have_the_covariance_that_is_to_be_learned(drawn):
    path, options = drawn
    values = torch.from_numpy(np.load(path).ravel()).double()
    index = (~values.isnan()).nonzero().squeeze(-1)
    assert abs(len(index) / len(values) - 0.5) < 4.0 * 0.5 / math.sqrt(len(values))
    pairs = zip(learning.kernels_of(SHAPE, options), learning.axes_of(SHAPE), strict=True)
    with torch.no_grad():
        first, second, third = (kernel(x).to_dense() for kernel, x in pairs)
    covariance = torch.kron(torch.kron(first, second), third)[index][:, index]
    covariance.diagonal().add_(options.noise)
    root = torch.linalg.cholesky(covariance)
    whitened = torch.linalg.solve_triangular(root, values[index].unsqueeze(-1), upper=False)
    assert abs(float(whitened.square().mean()) - 1.0) < 4.0 * math.sqrt(2.0 / len(index))


@pytest.mark.parametrize("method", learning.WORK)
def test_a_row_tells_how_far_off_each_hyperparameter_is(drawn, method):
    path, options = drawn
    facts = Facts(size="few", method=method)
    learning.WORK[method](facts, path, options)
    assert list(facts["values"])[-1] == "noise"
    assert set(facts["values"]) == set(facts.get("deviations", facts["values"]))
    line = learning.line_of(facts, options)
    assert line[-1].count("%") == 5
    assert math.isfinite(facts["log_likelihood"])
