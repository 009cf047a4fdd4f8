"""What algorithms ask of a factor, whether a matrix or a circulant operator."""

import math

import pytest
import torch

from gpytorch_gaps.linalg import factors as own
from gpytorch_gaps.linalg.circulant import CirculantOperator
from gpytorch_gaps.linalg.products import kron_matmul, product_flops
from tests import _dense as dense
from tests._torus import circulant, written_out

SOME = torch.tensor([0, 2, 3])
FACTORS = {
    "a matrix": lambda **kind: dense.random_psd(5, **kind),
    "a circle": lambda **kind: circulant((9,), (5,), **kind),
    "an even circle, whole": lambda **kind: circulant((8,), (8,), **kind),
    "some places": lambda **kind: circulant((9,), (torch.tensor([0, 2, 3, 5, 8]),), **kind),
    "a torus": lambda **kind: circulant((8, 7), (4, SOME), **kind),
    "a sphere": lambda **kind: circulant((6,), (6,), dense=4, **kind),
    "a sphere and depth": lambda **kind: circulant((6, 5), (3, 3), dense=2, **kind),
}
factors = pytest.mark.parametrize("name", FACTORS)
batches = pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)


def written(factor):
    return factor if torch.is_tensor(factor) else written_out(factor)


@batches
@factors
def test_the_largest_row_is_not_underestimated(name, batch):
    factor = FACTORS[name](batch=batch)
    norms = written(factor).square().sum(-1)
    bound = own.row_norm_squared(factor)
    assert bound.shape == ()
    assert bool((norms <= bound * (1 + 1e-12)).all())
    # each lag is there at most twice on every circle
    circles = 0 if torch.is_tensor(factor) else len(factor.torus)
    assert float(bound) <= 4.0**circles * float(norms.max()) * (1 + 1e-12)


def test_the_largest_row_of_a_whole_odd_torus():
    """All lags are there, each as often as is counted."""
    factor = circulant((5, 7), (5, 7))
    assert float(own.row_norm_squared(factor)) == pytest.approx(float(written_out(factor).square().sum(-1).max()))


def test_the_largest_row_of_a_rectangle():
    factor = CirculantOperator(dense.randn(2, 3, 4), torus=(6,), row_positions=(3,), col_positions=(6,))
    norms = written_out(factor).square().sum(-1)
    assert bool((norms <= own.row_norm_squared(factor) * (1 + 1e-12)).all())


def _entries(factor, rows, columns, batch=(...,)):
    return own.entries_at(factor, own.row_places(factor, rows), own.col_places(factor, columns), batch)


@batches
@factors
def test_entries(name, batch):
    factor = FACTORS[name](batch=batch)
    rows, columns = torch.tensor([[0], [2], [4]]), torch.tensor([1, 4])
    expected = written(factor)
    assert torch.equal(_entries(factor, rows, columns), expected[..., rows, columns])
    if batch:
        members = (torch.tensor([1, 0, 1]),) * len(batch)
        rows, columns = torch.tensor([0, 3, 4]), torch.tensor([1, 1, 2])
        got = _entries(factor, rows, columns, members)
        assert torch.equal(got, expected[(*members, rows, columns)])


@batches
@factors
def test_covariances_along_every_axis(name, batch):
    """Covariances of cells that differ along one axis alone; the mean over the levels of a dense axis."""
    factor = FACTORS[name](batch=batch)
    shape = own.factor_axes(factor)
    matrix = written(factor).reshape(-1, *shape, *shape).mean(0)
    got = own.axis_covariances([factor])
    assert len(got) == len(shape)
    for axis, covariance in enumerate(got):
        assert len(covariance) == shape[axis]
        origins = (
            range(1) if torch.is_tensor(factor) or axis == 0 or len(shape) == len(factor.torus) else range(shape[0])
        )
        rest = []
        for first in origins:
            other = [first, *[0] * (len(shape) - 1)]
            place = [slice(None) if number == axis else level for number, level in enumerate(other)]
            rest.append(matrix[(*place, *place)])
        expected = torch.stack(rest).mean(0)
        torch.testing.assert_close(dense.toeplitz(covariance), expected, rtol=1e-12, atol=1e-12)


def test_covariances_by_lag_on_long_axes_where_lags_do_not_wrap(monkeypatch):
    monkeypatch.setattr(own, "_SHORT_AXIS", 3)
    assert [c.dim() for c in own.axis_covariances([circulant((9, 6), (5, 4))])] == [1, 2]
    assert [c.dim() for c in own.axis_covariances([circulant((9,), (SOME,))])] == [2]
    assert [c.dim() for c in own.axis_covariances([circulant((12,), (5,), dense=3)])] == [2, 1]
    table = circulant((9,), (5,)).table.requires_grad_(True)
    (lags,) = own.axis_covariances([CirculantOperator(table, torus=(9,), row_positions=(5,))])
    assert not lags.requires_grad


def test_asymmetry():
    matrix = dense.random_psd(4)
    matrix[0, 1] += 0.25
    difference, size = own.asymmetry(matrix)
    assert float(difference) == pytest.approx(0.25)
    assert float(size) == float(matrix.abs().max())

    for batch in ((), (2,)):
        sphere = circulant((6,), (4,), dense=3, batch=batch)
        assert float(own.asymmetry(sphere)[0]) == 0.0
        table = sphere.table.clone()
        table[..., 0, 2, 1] += 0.5
        crooked = sphere.with_table(table)
        difference, size = own.asymmetry(crooked)
        expected = crooked.to_dense()
        assert float(difference) == pytest.approx(float((expected - expected.mT).abs().max()))
        assert float(size) == float(expected.abs().max())
        mended = own.symmetric_part(crooked)
        torch.testing.assert_close(mended.to_dense(), 0.5 * (expected + expected.mT))
    assert torch.equal(own.symmetric_part(matrix), 0.5 * (matrix + matrix.mT))


def by_lag(torus, lengths, nu):
    """Matern covariances on a torus."""
    squared = sum(
        (torch.arange(places // 2 + 1).double() / length)
        .square()
        .reshape([-1 if axis == other else 1 for other in range(len(torus))])
        for axis, (places, length) in enumerate(zip(torus, lengths, strict=True))
    )
    distance = squared.sqrt()
    return (torch.exp(-distance) if nu == 0.5 else torch.exp(-0.5 * squared)).unsqueeze(0).unsqueeze(0)


@pytest.mark.parametrize(
    ("torus", "lengths", "nu", "definite"),
    [
        ((40,), (3.0,), 0.5, True),
        ((40,), (8.0,), math.inf, False),
        ((40,), (2.0,), math.inf, True),
        ((20, 25), (3.0, 2.0), 0.5, True),
        ((12, 15), (6.0, 6.0), math.inf, False),
    ],
)
def test_how_negative_a_torus_is(torus, lengths, nu, definite):
    factor = CirculantOperator(by_lag(torus, lengths, nu), torus=torus, row_positions=torus)
    values = torch.linalg.eigvalsh(written_out(factor) if math.prod(torus) <= 60 else factor.to_dense())
    expected = float(-values.min() / values.max())
    assert (expected <= 1e-10) == definite
    assert own.negative_share(factor) == (0.0 if definite else pytest.approx(expected, rel=1e-6))


def test_how_negative_a_torus_with_a_dense_axis_is():
    for seed, definite in ((0, True), (1, False)):
        factor = circulant((6,), (6,), dense=3, seed=seed)
        if not definite:
            table = factor.table.clone()
            table[..., 3] = 1.5 * table[..., 0]
            factor = factor.with_table(table)
        values = torch.linalg.eigvalsh(written_out(factor))
        expected = float(-values.min() / values.max())
        assert (expected <= 1e-10) == definite
        assert own.negative_share(factor) == (0.0 if definite else pytest.approx(expected, rel=1e-6))


def test_kinds():
    torus, matrix = circulant((8, 7), (4, 3)), dense.random_psd(12)
    assert own.all_dense([matrix, matrix])
    assert not own.all_dense([matrix, torus])
    assert own.same_kind(matrix, matrix)
    assert own.same_kind(torus, torus.with_table(2.0 * torus.table))
    assert not own.same_kind(torus, matrix)
    assert not own.same_kind(torus, circulant((8, 8), (4, 3)))
    product = own.entrywise(torus, torus.with_table(torus.table.square()))
    torch.testing.assert_close(product.to_dense(), written_out(torus) ** 3)
    assert torch.equal(own.entrywise(matrix, matrix), matrix * matrix)
    assert own.leaf(torus) is torus.table
    assert own.leaf(matrix) is matrix


def test_flops():
    """FLOPs of matrices are those of a product. FLOPs of a torus grow much less than those of a matrix."""
    small, torus = dense.random_psd(4), circulant((128, 128), (64, 64))
    assert own.operator_product_flops([small, small], [0, 1], 3) == 2 * 2 * 4 * 4 * 4 * 3
    alone = own.operator_product_flops([torus], [0], 1)
    assert alone == torus.product_flops
    assert alone < 0.2 * 2.0 * 4096**2
    assert own.operator_product_flops([torus, small], [0, 1], 2) == 2 * (4 * alone + 4096 * 2 * 16)
    assert product_flops([torus, small]) == 4 * alone + 4096 * 2 * 16
    sphere = circulant((16,), (16,), dense=6)
    assert sphere.product_flops > circulant((16,), (16,)).product_flops * 6


@pytest.mark.parametrize("columns", [1, 3])
@batches
@pytest.mark.parametrize("place", [0, 1, 2])
def test_kronecker_products(place, batch, columns):
    """A circulant factor before, between and after matrices, square or not."""
    ops = [dense.randn(*batch, 3, 2), dense.random_psd(3, batch=batch)]
    for factor in (circulant((8, 5), (2, SOME), (3, 2), batch=batch), circulant((6,), (4,), dense=2)):
        parts = [*ops[:place], factor, *ops[place:]]
        matrix = dense.kron([written(part) for part in parts])
        x = dense.randn(matrix.size(-1), columns)
        torch.testing.assert_close(kron_matmul(parts, x), matrix @ x, rtol=1e-12, atol=1e-12)
        x = dense.randn(2, *batch, matrix.size(-1), columns)
        torch.testing.assert_close(kron_matmul(parts, x), matrix @ x, rtol=1e-12, atol=1e-12)
