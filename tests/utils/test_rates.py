"""Rates of the machine, and what is expected of a solve."""

import math

import pytest
import torch

from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.planning.plans import Task, plan
from gpytorch_gaps.utils import rates
from tests._dense import solve_system

CPU = torch.device("cpu")


@pytest.mark.usefixtures("measured_rates")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rates_are_measured_once(dtype, monkeypatch):
    first = rates.rates_of(CPU, dtype)
    monkeypatch.setattr(rates, "_best", lambda work: pytest.fail("measured again"))
    assert rates.rates_of(CPU, dtype) is first
    assert all(math.isfinite(rate) and rate > 0 for rate in (first.products, first.memory, first.call))


def test_seconds_add_up():
    machine = rates.Rates(products=1e9, memory=1e8, call=1e-6)
    alone = [machine.seconds(6e8), machine.seconds(0.0, 1e8), machine.seconds(0.0, 0.0, 1e6)]
    assert alone == pytest.approx([1.0, 1.0, 1.0])
    assert machine.seconds(6e8, 1e8, 1e6) == pytest.approx(3.0)


def system(noise: float, size: int = 60, theta: float = 0.3) -> tuple[GapSystem, torch.Tensor]:
    x = torch.linspace(0, 1, size, dtype=torch.float64)
    factor = torch.exp(-(((x[:, None] - x) / theta) ** 2))
    generator = torch.Generator().manual_seed(0)
    index = (torch.rand(size * size, generator=generator) < 0.7).nonzero().squeeze(-1)
    rhs = torch.randn(len(index), 1, generator=generator, dtype=torch.float64)
    return GapSystem([factor, factor], index, torch.tensor([noise], dtype=torch.float64)), rhs


def with_rates(gaps: GapSystem, machine: rates.Rates) -> None:
    """Has the system planned for another machine."""
    assert gaps.cached("rates", lambda: machine) is machine


def test_a_report_says_what_was_expected():
    gaps, rhs = system(1e-2)
    _, report = solve_system(gaps, rhs)
    assert 0 < report.expected_seconds < 10.0
    assert "s expected" in str(report)
    _, named = solve_system(gaps, rhs, method="fill")
    assert math.isinf(named.expected_seconds)
    assert "expected" not in str(named)


@pytest.mark.parametrize("noise", [1e-2, 1e-5])
@pytest.mark.parametrize(("products", "memory"), [(1e7, 1e12), (1e14, 1e7)])
def test_first_comes_what_should_take_least(products, memory, noise):
    gaps, _ = system(noise)
    with_rates(gaps, rates.Rates(products, memory, 1e-9))
    plans = list(plan(gaps, Task(1, 1e-6), SolveConfig()))
    assert plans[0].seconds == min(plan.seconds for plan in plans)
    slower, _ = system(noise)
    with_rates(slower, rates.Rates(products / 2, memory / 2, 2e-9))
    (other, *_) = plan(slower, Task(1, 1e-6), SolveConfig())
    assert (other.method, other.rank) == (plans[0].method, plans[0].rank)
    assert other.seconds == pytest.approx(2 * plans[0].seconds)


def test_what_is_soon_done_is_not_planned_for(monkeypatch):
    gaps, rhs = system(1e-2)
    with_rates(gaps, rates.Rates(1e12, 1e12, 1e-9))
    monkeypatch.setattr("gpytorch_gaps.solvers.planning.plans.best_rank", lambda *args: pytest.fail("planned further"))
    _, report = solve_system(gaps, rhs)
    assert report.method == "spectral"
    assert report.converged
