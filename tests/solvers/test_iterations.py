"""Iterations on a 250 x 150 grid to an original residual of 1e-6, and the work of `auto` against the best."""

import functools
import math

import pytest
import torch

from gpytorch_gaps.linalg.products import kron_matmul
from gpytorch_gaps.solvers.gap_system import GapSystem
from tests import _dense as dense
from tests._dense import solve_system

SHAPE, NOISE = (250, 150), 1e-4


def distances(size):
    x = torch.linspace(0, 1, size, dtype=torch.float64)
    return (x.unsqueeze(-1) - x).abs()


def squared_exponential(size, theta=0.2):
    return torch.exp(-((distances(size) / theta) ** 2))


def matern(size, lengthscale=0.2):
    scaled = math.sqrt(3) * distances(size) / lengthscale
    return (1 + scaled) * torch.exp(-scaled)


KERNELS = {"SE": squared_exponential, "Matern-3/2": matern}


@functools.cache
def gaps(kind):
    generator = torch.Generator().manual_seed(7)
    cells = math.prod(SHAPE)
    if kind == "random":
        return torch.randperm(cells, generator=generator)[: cells // 2].sort().values
    white = torch.randn(cells, 1, dtype=torch.float64, generator=generator)
    field = kron_matmul([squared_exponential(m) for m in SHAPE], white)
    return (field > field.median()).squeeze(-1).nonzero().squeeze(-1)


@functools.cache
def solve(kernel, kind, response, method, rank=None):
    generator = torch.Generator().manual_seed(1)
    index = gaps(kind)
    system = GapSystem([KERNELS[kernel](m) for m in SHAPE], index, torch.tensor([NOISE]))
    white = torch.randn(len(index), 1, dtype=torch.float64, generator=generator)
    if response == "smooth":
        row, column = index // SHAPE[1] / SHAPE[0], index % SHAPE[1] / SHAPE[1]
        white = (torch.sin(6 * row) * torch.cos(4 * column)).double().unsqueeze(-1) + math.sqrt(NOISE) * white
    _, report = solve_system(system, white, method=method, rank=rank)
    assert report.converged
    assert report.worst_residual <= 1e-6
    return report


@pytest.mark.parametrize("response", ["white", "smooth"])
@pytest.mark.parametrize(
    ("kernel", "kind", "method", "rank", "limit"),
    [
        ("SE", "random", "ignore", 300, 6),
        ("SE", "random", "fill", None, 30),
        ("SE", "cloud", "ignore", 300, 6),
        ("Matern-3/2", "random", "fill", None, 60),
    ],
)
def test_each_method_needs_no_more_iterations_than_measured(kernel, kind, method, rank, limit, response):
    report = solve(kernel, kind, response, method, rank)
    assert report.iterations <= limit
    assert report.method == method
    assert report.rank == (rank or 0)


@pytest.mark.parametrize("response", ["white", "smooth"])
@pytest.mark.parametrize(
    ("kernel", "kind", "rivals"),
    [
        ("SE", "random", [("ignore", 300), ("fill", None)]),
        ("SE", "cloud", [("ignore", 300)]),
        ("Matern-3/2", "random", [("fill", None), ("ignore", 1000)]),
    ],
)
def test_auto_is_within_twice_the_best(kernel, kind, rivals, response):
    best = min(solve(kernel, kind, response, method, rank).flops for method, rank in rivals)
    chosen = solve(kernel, kind, response, "auto")
    assert chosen.flops <= 2 * best
    assert chosen.reason


def test_auto_sees_clouds():
    """Rough kernel, cloud-shaped gaps: fill-gaps does not converge there, and is not tried."""
    chosen = solve("Matern-3/2", "cloud", "white", "auto")
    assert chosen.method == "ignore"
    assert "fill" not in chosen.reason
    assert chosen.flops <= 1.5 * solve("Matern-3/2", "cloud", "white", "ignore", 1000).flops


def test_auto_leaves_fill_gaps_in_time(monkeypatch):
    """Where fill-gaps only looks cheap, as clouds would to one who counts gaps, the reserve takes over."""
    counted = property(lambda system: 1.0 - system.num_train / system.num_cells)
    monkeypatch.setattr(GapSystem, "local_gappiness", counted)
    chosen = solve.__wrapped__("Matern-3/2", "cloud", "white", "auto")
    assert chosen.method == "ignore"
    assert "stopped at" in chosen.reason
    assert chosen.flops <= 3 * solve("Matern-3/2", "cloud", "white", "ignore", 1000).flops


def _gappiness_seen(shape, pattern, fraction):
    index = dense.observed(pattern, shape, fraction)
    factors = [torch.eye(size, dtype=torch.float64) for size in shape]
    return GapSystem(factors, index, torch.ones(1, dtype=torch.float64)).local_gappiness


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("shape", [(60, 70), (15, 16, 17), (400,)])
def test_scattered_gaps_look_as_many_as_they_are(shape, fraction):
    assert _gappiness_seen(shape, "random", fraction) == pytest.approx(fraction, abs=0.01)


def test_blocks_of_gaps_look_like_nothing_else():
    assert _gappiness_seen((60, 70), "block", 0.3) > 0.9
    assert _gappiness_seen((60, 70), "none", 0.0) == 0.0
