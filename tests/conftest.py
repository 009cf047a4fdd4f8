"""One thread a worker, as two workers with two threads each thrash on two cores; and one machine for every plan."""

import os

import hypothesis
import pytest
import torch

from gpytorch_gaps.filling.learning import learn
from gpytorch_gaps.utils import rates

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

hypothesis.settings.register_profile("any machine", deadline=None)  # however busy it is
hypothesis.settings.load_profile("any machine")

# Plans compare what methods cost at the rates of the machine. Measured beside other processes these differ from run to
# run, so the tests plan for one core of an idle machine: FLOPs and bytes a second, seconds of a call.
_MACHINE = {
    torch.float32: rates.Rates(products=6e10, memory=1.2e11, call=2e-6),
    torch.float64: rates.Rates(products=3e10, memory=8e10, call=2e-6),
}
_measure = rates._measured
rates._measured = lambda kind, index, dtype, threads: _MACHINE[dtype]


@pytest.fixture
def measured_rates(monkeypatch):
    """The rates of this machine, measured."""
    monkeypatch.setattr(rates, "_measured", _measure)


@pytest.fixture
def quick_choice(monkeypatch):
    """`fill_gaps` compares candidate kernels after one step: for tests that hold for any kernel."""
    monkeypatch.setattr(learn, "FIRST_STEPS", 1)
    monkeypatch.setattr(learn, "FURTHER_STEPS", 1)
