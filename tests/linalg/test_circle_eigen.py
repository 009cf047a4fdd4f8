"""Eigenvectors on whole circles against those of the dense matrix."""

import math

import pytest
import torch

from gpytorch_gaps.autograd.first_order import frozen_eigenvalues
from gpytorch_gaps.linalg.circle_eigen import circle_eigh
from gpytorch_gaps.linalg.circulant import CirculantOperator
from gpytorch_gaps.linalg.eigen import kron_eigh
from gpytorch_gaps.linalg.products import kron_matmul
from tests import _dense as dense

CASES = {  # places of every circle, and levels of the dense axis
    "even": ((6,), 3),
    "odd": ((5,), 2),
    "one latitude": ((8,), 1),
    "a torus": ((4, 6), 1),
    "an odd torus": ((5, 3), 2),
    "a single place": ((1,), 3),
}


def on_circles(circles, levels, lengths=(1.0,)):
    """A squared exponential of the chords across every circle and of the dense axis, for every length-scale."""
    lines = dense.randn(levels, seed=3)
    squared = (lines.unsqueeze(-1) - lines).square().reshape(levels, levels, *[1] * len(circles))
    for number, places in enumerate(circles):
        chord = 2.0 * (math.pi / places * torch.arange(places // 2 + 1, dtype=torch.float64)).sin()
        squared = squared + chord.square().reshape(-1, *[1] * (len(circles) - number - 1))
    table = torch.stack([torch.exp(-squared / length) for length in lengths])
    return CirculantOperator(table if len(lengths) > 1 else table[0], torus=circles, row_positions=circles)


@pytest.mark.parametrize("case", CASES)
def test_they_diagonalise_the_covariance(case):
    covariance = on_circles(*CASES[case])
    values, basis = circle_eigh(covariance)
    assert covariance.is_closed
    eye = torch.eye(covariance.size(-1), dtype=torch.float64)
    vectors = basis._matmul(eye)
    torch.testing.assert_close(vectors.mT @ vectors, eye)
    torch.testing.assert_close(basis.mT._matmul(eye), vectors.mT)
    torch.testing.assert_close(vectors * values @ vectors.mT, covariance.to_dense())
    torch.testing.assert_close(basis.quotients(covariance), values)
    narrow = basis.to(torch.float32)._matmul(eye.float())
    torch.testing.assert_close(narrow.double(), vectors, rtol=1e-5, atol=1e-6)


def test_a_batch_beside_another_axis():
    covariance, time = on_circles((6,), 2, lengths=(0.5, 2.0)), dense.matern32(4)
    eigen = kron_eigh([covariance, time])
    x = dense.randn(48, 3)
    expected = torch.stack([torch.kron(own, time) @ x for own in covariance.to_dense()])
    image = kron_matmul(eigen.vectors, eigen.products.unsqueeze(-1) * kron_matmul(eigen.transposed, x))
    torch.testing.assert_close(image, expected)


def test_eigenvalues_that_no_product_brings_above_a_level_are_dropped():
    eigen = kron_eigh([on_circles((6,), 5), dense.matern32(4)])
    level = 1e-3 * float(eigen.products.max())
    vectors, values = eigen.truncated(level)
    above = (eigen.products >= level).sum()
    assert sum(own.numel() for own in values) < 34
    kept = (values[0].unsqueeze(-1) * values[1]).flatten()
    assert (kept >= level).sum() == above
    x = dense.randn(120, 1)
    image = kron_matmul(vectors, kept.unsqueeze(-1) * kron_matmul([q.mT for q in vectors], x))
    whole = kron_matmul(eigen.vectors, eigen.products.unsqueeze(-1) * kron_matmul(eigen.transposed, x))
    assert float((image - whole).norm()) <= level * float(x.norm())


def test_eigenvalues_are_differentiated_by_the_table():
    """Repeated ones, too: those of k and -k."""
    covariance = on_circles((6,), 3)
    table = covariance.table.clone().requires_grad_(True)
    own = covariance.with_table(table)
    (values,) = frozen_eigenvalues([own], [circle_eigh(covariance)[1]])
    (gradient,) = torch.autograd.grad((values + 0.1).log().sum(), table)
    eye = torch.eye(covariance.size(-1), dtype=torch.float64)
    (expected,) = torch.autograd.grad(torch.linalg.slogdet(own.to_dense() + 0.1 * eye).logabsdet, table)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("places", [(5,), (torch.tensor([0, 1, 3]),)], ids=["an arc", "some places"])
def test_a_part_of_a_circle_is_not_closed(places):
    covariance = on_circles((6,), 2)
    part = CirculantOperator(covariance.table, torus=(6,), row_positions=places)
    assert not part.is_closed
