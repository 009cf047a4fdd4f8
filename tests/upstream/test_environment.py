"""Traps around the libraries: stand-ins for devices that are absent, and imports with side effects."""

import importlib.util
import json

import pytest
import torch
from gpytorch.kernels import IndexKernel, MaternKernel, PeriodicKernel, RBFKernel
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
    }
before = defaults()
import botorch
print(json.dumps([before, defaults()]))
"""


@pytest.mark.skipif(importlib.util.find_spec("botorch") is None, reason="botorch is not installed")
def test_importing_botorch_changes_defaults():
    """Trap: `import botorch` turns off fast computations everywhere. Answered by peers run in a subprocess."""
    before, after = json.loads(in_subprocess(DEFAULTS).splitlines()[-1])
    where = "the peer tests and benchmarks: each imports botorch in a subprocess"
    same = [name for name in before if before[name] == after[name]]
    assert not same, changed(f"import botorch no longer changes {', '.join(same)}", where)
