"""Random signs: they pass tests of randomness, and are the same on every device."""

import pytest
import torch

from gpytorch_gaps import WarmStart
from gpytorch_gaps.solvers.warm_start import _mix, _mix_number, random_signs
from tests import _standin as standin
from tests._standin import count_transfers, to_host, to_standin

LIKE = torch.zeros((), dtype=torch.float64)
on_standin = pytest.mark.skipif(bool(standin.UNAVAILABLE), reason=standin.UNAVAILABLE)


def correlations(signs):
    """Between rows, the diagonal left out."""
    products = signs @ signs.mT / signs.size(-1)
    return products - torch.diag(products.diagonal())


@pytest.mark.parametrize("number", [0, 1, 2, 12345, 2**31, 2**62 + 7])
def test_the_mixing_of_splitmix64(number):
    """What the reference writes in unsigned numbers."""
    z = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    assert int(_mix(torch.tensor(number))) % 2**64 == z
    assert _mix_number(number) % 2**64 == z


def test_of_a_known_state():
    """The first output of SplitMix64 seeded with zero, as published."""
    assert _mix_number(0) % 2**64 == 0xE220A8397B1DCDAF


def test_means_and_correlations_over_rows_and_columns():
    n = 20_000
    signs = random_signs(3, 40, n, LIKE)
    assert torch.equal(signs.abs(), torch.ones_like(signs))
    assert signs.mean(-1).abs().max() < 5 / n**0.5
    assert signs.mean(0).abs().max() < 6 / 40**0.5
    assert correlations(signs).abs().max() < 5 / n**0.5
    for lag in (1, 2, 3, 64, 1024):
        assert (signs[:, lag:] * signs[:, :-lag]).mean(-1).abs().max() < 5 / (n - lag) ** 0.5


def test_means_and_correlations_over_seeds():
    n = 20_000
    signs = torch.cat([random_signs(seed, 1, n, LIKE) for seed in (*range(40), 2**32, 2**63, 10**30)])
    assert correlations(signs).abs().max() < 5 / n**0.5
    # a fixed cell over many seeds
    cells = torch.stack([random_signs(seed, 2, 3, LIKE).flatten() for seed in range(2000)], -1)
    assert cells.mean(-1).abs().max() < 5 / 2000**0.5
    assert correlations(cells).abs().max() < 5 / 2000**0.5


def test_neighbouring_counters_are_not_each_other():
    """A row is not the next seed's, nor a column the next row's."""
    n = 20_000
    first, second = random_signs(0, 5, n, LIKE), random_signs(1, 5, n, LIKE)
    for row in range(4):
        assert abs(float((first[row + 1] * second[row]).mean())) < 5 / n**0.5
        assert abs(float((first[row + 1, :-1] * first[row, 1:]).mean())) < 5 / n**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@on_standin
def test_the_same_on_a_device_with_no_copy_and_no_wait(dtype):
    here, there = torch.zeros((), dtype=dtype), to_standin(torch.zeros((), dtype=dtype))
    memory = WarmStart(num_probes=5, seed=9)
    with count_transfers() as counts:
        probes = memory.probes(3000, there)
    assert counts.events == []
    assert probes.dtype == dtype
    assert probes.device == standin.DEVICE
    assert torch.equal(to_host(probes), memory.probes(3000, here))
