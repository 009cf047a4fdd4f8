"""The same call gives the same numbers, whatever the speed of the machine and the number of threads."""

import numpy as np
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel

import gpytorch_gaps as gaps
from gpytorch_gaps.utils import rates

MACHINES = [rates.Rates(1e8, 1e12, 1e-3), rates.Rates(1e14, 1e7, 1e-9)]  # slow at products, and slow at memory


def field():
    generator = np.random.default_rng(0)
    x, y = np.arange(48.0)[:, None], np.arange(44.0)
    values = np.sin(x / 6) * np.cos(y / 5) + 0.1 * generator.standard_normal((48, 44))
    values[10:18, 5:20] = np.nan
    values[generator.random(values.shape) < 0.1] = np.nan
    return values  # 1,700 observations: more than are factorised without a comparison of costs


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_fillings_are_the_same_on_another_machine(monkeypatch, threads):
    found = []
    for number, machine in enumerate(MACHINES):
        monkeypatch.setattr(rates, "_measured", lambda *_, machine=machine: machine)
        threads(1 + number)
        kernels = [RBFKernel(), MaternKernel(nu=1.5)]
        found.append(gaps.fill_gaps(field(), kernels=kernels, steps=3, progress=False))
    first, second = found
    spread = np.nanstd(field())
    assert first.report.solve.method == second.report.solve.method
    assert np.abs(first.mean - second.mean).max() < 1e-6 * spread
    assert np.abs(first.std - second.std).max() < 1e-6 * spread
    assert first.report.expected_rmse == pytest.approx(second.report.expected_rmse, rel=1e-6)


def test_rates_are_nominal_only_inside():
    cpu = torch.device("cpu")
    outside = rates.rates_of(cpu, torch.float64)
    with rates.nominal_rates():
        assert rates.rates_of(cpu, torch.float64) is rates.NOMINAL["cpu"]
    assert rates.rates_of(cpu, torch.float64) is outside
