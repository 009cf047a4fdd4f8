"""What is planned for several processes is what they then send and hold."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel

from gpytorch_gaps.reconstruction.sizing import plan, plan_of
from tests._ranks import run_ranks
from tests.distributed import _work as work

WORK = "tests.distributed._work"


@pytest.mark.parametrize("count", [2, 4])
def test_bytes_of_a_smooth_kernel(count):
    """A float32 vector for every iteration, a float64 one for every residual, and numbers."""
    found = run_ranks(count, WORK, "reconstruct", (40, 30), {"tolerance": 1e-2})[0]
    expected = plan((40, 30), found["ranks"], count)
    box = math.prod(found["ranks"])
    assert not expected.sharded
    assert expected.sent == 4 * box + 8
    sums = found["messages"]["sums of weights"]
    residuals = sums - found["iterations"]
    assert found["bytes"]["sums of weights"] == found["iterations"] * 4 * box + residuals * 8 * box


@pytest.mark.parametrize("count", [2, 4])
def test_bytes_of_a_rough_kernel(count, monkeypatch):
    shape = (16, 12, 8)
    monkeypatch.setattr("gpytorch_gaps.reconstruction.sharding._MAX_REPLICATED_WEIGHTS", 0)
    results = run_ranks(count, WORK, "reconstruct", shape, {"kind": "Matern", "tolerance": 1e-2})
    expected = plan(shape, results[0]["ranks"], count)
    assert expected.sharded
    for found in results:
        # two transposes an iteration; others for residuals, which are in float64, the right-hand side and the result
        messages, iterations = found["messages"]["transposes"], found["iterations"]
        others = messages - 2 * iterations
        one = (expected.sent - 24) / 2
        assert found["bytes"]["transposes"] == pytest.approx(2 * iterations * one + 2 * others * one, rel=1e-6)


def test_a_plan_from_kernels_is_that_of_the_basis():
    shape = (40, 30)
    result = work.solve(None, shape, tolerance=1e-2)
    kernels = work.kernels_of("RBF", 2, 0.3)
    expected = plan_of(work.axes_of(shape), kernels, 1e-2, 2)
    assert expected.ranks == result.report.ranks
    assert expected.weights == math.prod(result.report.ranks)
    assert expected.cells == 1200
    assert "1200" in str(expected) or "1.2e+03 cells on 2 processes" in str(expected)


def test_more_processes_hold_and_do_less_each_and_send_the_same():
    plans = [plan((3840, 2160, 121), (44, 43, 19), count) for count in (2, 4, 8, 64)]
    for fewer, more in pairwise(plans):
        assert more.memory < fewer.memory
        assert more.flops < fewer.flops
        assert more.sent == fewer.sent
    assert plans[0].seconds(1e11, 1e9) == pytest.approx(plans[0].flops / 1e11 + 2 * plans[0].sent / 1e9)
    assert plan((3840, 2160, 121), (44, 43, 19), 1).sent == 0


@pytest.mark.parametrize(
    ("shape", "ranks", "processes", "message"),
    [
        ((4, 5), (4,), 1, "ranks: got"),
        ((4, 5), (5, 5), 1, "ranks: got"),
        ((4, 5), (0, 5), 1, "ranks: got"),
        ((4, 5), (2, 2), 0, "processes: got 0"),
        ((4, 5), (2, 2), 5, "processes: got 5, expected 1 to 4"),
    ],
)
def test_what_is_wrong_is_named(shape, ranks, processes, message):
    with pytest.raises(ValueError, match=message):
        plan(shape, ranks, processes)


def test_memory_grows_no_faster_than_the_cells():
    small, large = (plan((1000 * factor, 1000, 100), (40, 40, 40), 4) for factor in (1, 2))
    assert large.memory < 2.0 * small.memory
    assert np.isfinite(large.memory)


def test_draws_take_memory_and_need_weights_that_every_process_holds():
    without, with_draws = (plan((3840, 2160, 121), (44, 43, 19), 4, draws=draws) for draws in (0, 16))
    assert with_draws.memory - without.memory == 16 * 20 * without.weights
    with pytest.raises(ValueError, match=r"draws: got 16 for .* weights, divided among 4 processes; expected 0"):
        plan((2000, 1500), (2000, 1500), 4, draws=16)


def test_learning_takes_memory_and_holds_all_weights():
    without, learning = (plan((3840, 2160, 121), (44, 43, 19), 4, learn=learn) for learn in (False, True))
    assert without.memory < learning.memory < 1.5 * without.memory
    assert learning.sent == without.sent
    assert not plan((2000, 1500), (2000, 1500), 4, learn=True).sharded
    x, kernels = [torch.linspace(0, 1, 90), torch.linspace(0, 1, 80)], [RBFKernel(), RBFKernel()]
    some, more = (plan_of(x, kernels, noise=1e-2, processes=2, learn=learn) for learn in (True, False))
    assert some.weights < more.weights  # eigenvectors that serve the mean far from data are not needed
