"""Sums of Kronecker products in one basis: the certificate of what is left out, and products with the basis."""

import pytest
import torch

from gpytorch_gaps.linalg.truncated_sum import truncated_sum
from tests import _dense as dense

CASES = {
    "one axis": [[dense.se(60, 0.5)], [dense.se(60, 0.1)]],
    "smooth and smoother": [[dense.se(18, 1.5), dense.se(14, 1.5)], [dense.se(18, 0.9), dense.se(14, 0.8)]],
    "rough on one axis each": [[dense.se(18, 1.0), dense.matern32(8)], [dense.matern32(18), dense.se(8, 1.0)]],
    "three terms": [[s * dense.se(9, t), dense.se(8, t), dense.se(3, t)] for s, t in ((1, 2.0), (9, 0.9), (0.1, 0.5))],
    "the same term twice": [[dense.se(18, 0.4), dense.se(14, 0.4)]] * 2,
    "a term of zero": [[0.0 * dense.se(18, 0.4), dense.se(14, 0.4)], [dense.se(18, 0.4), dense.se(14, 0.4)]],
    "no truncation": [[dense.matern32(12), dense.identity(9)], [dense.identity(12), dense.matern32(9)]],
}


def columns(basis):
    """Psi written out. shape: (M, R)"""
    unit = torch.eye(basis.size, dtype=torch.float64)
    return torch.stack([dense.kron(basis.vectors) @ basis.to_box(own).flatten() for own in unit], dim=-1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("level", [1e-8, 1e-2])
def test_what_is_left_out_is_within_the_bound(case, level):
    terms = CASES[case]
    basis = truncated_sum(terms, level)
    whole, psi = sum(dense.kron(factors) for factors in terms), columns(basis)
    error = float(torch.linalg.eigvalsh(whole - psi * basis.products @ psi.mT).abs().max())
    norm = float(torch.linalg.eigvalsh(whole)[-1])
    assert error <= basis.error + 1e-13 * norm
    assert basis.error <= 3 * level + 1e-11 * norm


@pytest.mark.parametrize("case", CASES)
def test_projections_are_the_transpose_of_expansions(case):
    basis = truncated_sum(CASES[case], 1e-6)
    weights, box = dense.randn(basis.size, seed=0), dense.randn(*basis.ranks, seed=1)
    torch.testing.assert_close((basis.to_box(weights) * box).sum(), (weights * basis.from_box(box)).sum())


def test_a_smoother_term_adds_little_to_the_basis():
    terms = [[dense.se(200, 1.0), dense.se(150, 1.0)], [dense.se(200, 0.1), dense.se(150, 0.1)]]
    basis = truncated_sum(terms, 1e-6)
    long, short = basis.terms
    for own, *ranks in zip(basis.ranks, long.ranks, short.ranks, strict=True):
        assert max(ranks) <= own < sum(ranks)
