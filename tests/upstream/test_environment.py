"""Traps around the libraries: stand-ins for devices that are absent, and imports with side effects."""

import importlib.util
import json
from typing import ClassVar

import linear_operator
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import IndexKernel, MaternKernel, PeriodicKernel, RBFKernel
from linear_operator.operators import DenseLinearOperator
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests.upstream._helpers import changed, in_subprocess, raised

STAND_IN = "tests/_standin.py"


@pytest.mark.parametrize("kernel_class", [RBFKernel, MaternKernel, PeriodicKernel])
def test_distance_kernels_raise_on_fake_cuda(kernel_class):
    """Trap: kernels compare their inputs by value (`torch.equal`), which fake tensors have not. Answered by a stand-in.

    Forward only: a backward on fake CUDA tensors aborts the whole process where torch has no CUDA, beyond any test.
    """
    with torch.no_grad(), FakeTensorMode():
        kernel = kernel_class()
        for name, parameter in list(kernel.named_parameters(recurse=False)):
            setattr(kernel, name, torch.nn.Parameter(torch.zeros(parameter.shape, device="cuda")))
        x = torch.zeros(5, 1, device="cuda")
        assert x.device.type == "cuda"
        error = raised(lambda: kernel.forward(x, x))
    message = changed(f"{kernel_class.__name__} no longer compares inputs by value under FakeTensorMode", STAND_IN)
    assert isinstance(error, DataDependentOutputException), message
    assert "equal" in str(error), message


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is CUDA, there is no need of a stand-in")
def test_nothing_moves_to_fake_cuda():
    """Trap: fake tensors can be made on "cuda" but not moved there without CUDA, so no module can. See the stand-in."""
    with FakeTensorMode():
        error = raised(lambda: torch.zeros(2).to("cuda"))
    assert error is not None, changed("tensors now move to fake CUDA", STAND_IN)


def test_kernels_without_distances_do_not_raise():
    """The other side of the trap: it is the comparison that raises, not fake tensors in kernels as such."""
    with torch.no_grad(), FakeTensorMode():
        covariance = IndexKernel(num_tasks=3)(torch.zeros(5, 1))
        assert raised(covariance.evaluate_kernel) is None, changed("IndexKernel now raises on fake tensors", STAND_IN)


DEFAULTS = """
import json, gpytorch, linear_operator.settings as s
def defaults():
    return {
        "fast solves": s._fast_solves.on(),
        "fast log_prob": s._fast_log_prob.on(),
        "fast roots": s._fast_covar_root_decomposition.on(),
        "max_cholesky_size": s.max_cholesky_size.value(),
        "cholesky_max_tries": s.cholesky_max_tries.value(),
        "max_eager_kernel_size": gpytorch.settings.max_eager_kernel_size.value(),
    }
before = defaults()
import botorch
print(json.dumps([before, defaults()]))
"""


@pytest.mark.skipif(importlib.util.find_spec("botorch") is None, reason="botorch is not installed")
def test_importing_botorch_changes_defaults():
    """Trap: `import botorch` turns off fast computations everywhere. Answered by a distribution that does not ask.

    These are the settings of tests/workflow/test_process_settings.py. Peers run in a subprocess.
    """
    before, after = json.loads(in_subprocess(DEFAULTS).splitlines()[-1])
    where = "MarginalNormal, settings.dense_size and tests/workflow/test_process_settings.py"
    same = [name for name in before if before[name] == after[name]]
    assert not same, changed(f"import botorch no longer changes {', '.join(same)}", where)


class Counting(DenseLinearOperator):
    """A matrix that counts how often it is asked for all of its entries, or for a log-determinant."""

    asked: ClassVar[list[str]] = []

    def to_dense(self):
        self.asked.append("entries")
        return super().to_dense()

    def inv_quad_logdet(self, *args, **kwargs):
        self.asked.append("log-determinant")
        return super().inv_quad_logdet(*args, **kwargs)


def test_log_densities_are_dense_where_fast_computations_are_off():
    """Trap: then `log_prob` never asks the operator, but factorizes its entries. Answered by MarginalNormal."""
    zeros = torch.zeros(4, dtype=torch.float64)
    asked = {}
    for fast in (True, False):
        Counting.asked.clear()
        with linear_operator.settings.fast_computations(log_prob=fast):
            MultivariateNormal(zeros, Counting(torch.eye(4, dtype=torch.float64))).log_prob(zeros)
        asked[fast] = set(Counting.asked)
    message = changed("log_prob no longer asks fast_computations.log_prob which way to go", "MarginalNormal")
    assert "log-determinant" in asked[True], message
    assert "log-determinant" not in asked[False], message
    assert "entries" in asked[False], message
