"""A budget of seconds: what is left out, and that it says so."""

import numpy as np
import pytest

import gpytorch_gaps as gaps
from gpytorch_gaps.filling.learning.budget import Budget, Effort

FULL = Effort(10, 20, 40, 11)
PER_STEP = [0.01] * 11


def field():
    generator = np.random.default_rng(0)
    x, y = np.arange(14.0)[:, None], np.arange(12.0)
    values = np.sin(x / 3) * np.cos(y / 2) + 0.1 * generator.standard_normal((14, 12))
    values[5:8, 3:7] = np.nan
    return values


def test_without_a_budget_nothing_is_left_out():
    budget = Budget()
    assert budget.training(FULL, PER_STEP, 0.02, 3) == FULL
    assert budget.predictions(1e15, False, True, True) == (True, 16)
    assert budget.notes == []


@pytest.mark.parametrize(
    ("seconds", "wanted"), [(10.0, (True, 16)), (2.1, (True, 8)), (1.0, (False, 8)), (0.3, (False, 0))]
)
def test_the_check_goes_first_then_error_bars(seconds, wanted):
    budget = Budget(seconds)
    assert budget.predictions(5e8, False, True, True) == wanted  # a tenth of a second for the mean
    assert bool(budget.notes) == (wanted != (True, 16))


def test_training_takes_half_of_the_budget_at_most():
    spent = []
    for seconds in (100.0, 4.0, 1.0, 0.5):
        budget = Budget(seconds)
        effort = budget.training(FULL, PER_STEP, 0.02, 3)
        spent.append(effort.seconds(PER_STEP, 0.02, 3))
        assert spent[-1] <= 0.5 * seconds
        assert budget.left == pytest.approx(seconds - spent[-1])
    assert spent == sorted(spent, reverse=True)


def test_a_filling_says_what_it_left_out():
    full = gaps.fill_gaps(field(), steps=8, budget=1e6, progress=False)
    assert not any("budget" in note for note in full.report.notes)
    short = gaps.fill_gaps(field(), steps=8, budget=0.01, progress=False)
    note = next(note for note in short.report.notes if "budget of 0.01 s" in note)
    assert "1 of " in note
    assert "2 steps instead of 8" in note
    assert np.isfinite(short.mean).all()
    assert len(short.report.history) == 2


def test_a_budget_that_is_no_time_is_refused():
    with pytest.raises(ValueError, match="budget: got 0"):
        gaps.fill_gaps(field(), budget=0)
