"""The neighbours preconditioner against dense matrices: exact with all neighbours, optimal with few."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpytorch_gaps.linalg import neighbours as search
from gpytorch_gaps.linalg import places
from gpytorch_gaps.preconditioners import neighbours
from gpytorch_gaps.preconditioners.neighbours import NeighbourLists, NeighbourPreconditioner, neighbour_lists
from gpytorch_gaps.solvers.kronecker_term import KroneckerTerm
from gpytorch_gaps.solvers.system import NoisySystem
from tests import _dense as dense
from tests._covering import covering
from tests._devices import devices

examples = settings(max_examples=30)
INDICES = {
    "all cells": torch.arange(30),
    "scattered": dense.observed("random", (6, 5)),
    "a hole": dense.observed("block", (6, 5)),
    "repeated": torch.tensor([3, 3, 7, 12, 3, 16, 7, 29, 0, 11]),
    "two": torch.tensor([4, 29]),
}
BATCHES = {"none": ((), ()), "kernel": ((2,), ()), "noise": ((), (2,)), "both": ((3, 2), (2,))}


def kernels(batch=(), seed=0):
    """Positive definite, and different in every member of a batch."""
    scale = 1.0 + 0.3 * dense.randn(*batch, 1, 1, seed=seed).abs()
    return [dense.matern32(6, 0.4) * scale, dense.se(5, 0.3) + 0.2 * dense.random_psd(5, seed, batch=batch)]


def variances(kind, size, index, batch=()):
    own = 0.5 + dense.randn(*batch, 1 if kind == "constant" else len(index), seed=4).abs()
    return size * own


def made(factors, index, noise, count):
    """The preconditioner of ``K_XX + D``, and that matrix."""
    term = KroneckerTerm(factors)
    system = NoisySystem([term], index, noise, len(index))
    typical = [factor.reshape(-1, *factor.shape[-2:]).mean(0) for factor in factors]
    found = NeighbourPreconditioner(system.entries, noise, neighbour_lists(typical, index, count))
    return found, dense.system(factors, index, noise)


def root(preconditioner):
    """U, dense."""
    size = len(preconditioner._rows)
    columns = [own.matmul(torch.eye(size, dtype=torch.float64)) for own in preconditioner._columns]
    return torch.stack(columns).reshape(*preconditioner.batch, size, size)


def vecchia_logdet(matrix, lists):
    """``log|P|`` of any matrix as a sum of conditional variances, differentiable."""
    total = 0.0
    for row, neighbours_of in enumerate(lists.rows):
        own = neighbours_of[neighbours_of >= 0]
        block = dense.select(matrix, torch.cat([own, torch.tensor([row])]))
        total = total + torch.logdet(block) - (torch.logdet(block[..., :-1, :-1]) if len(own) else 0.0)
    return total


# -- exact with all neighbours ---------------------------------------------------------------------------------------


@covering(
    cells=list(INDICES),
    size=[1e-8, 1e-4, 1.0, 1e2],
    kind=["constant", "per point"],
    batch=list(BATCHES),
)
def test_with_all_neighbours_it_is_the_matrix(cells, size, kind, batch):
    index, (own, noise_batch) = INDICES[cells], BATCHES[batch]
    noise = variances(kind, size, index, noise_batch)
    preconditioner, matrix = made(kernels(own), index, noise, len(index) - 1)
    x = dense.randn(*matrix.shape[:-1], 2, seed=2)
    condition = float(torch.linalg.cond(matrix).max())
    accuracy = max(1e-12, 1e-15 * condition)
    assert dense.relative(preconditioner.matmul(matrix @ preconditioner.solve(x)), matrix @ x) < accuracy
    assert dense.relative(preconditioner.solve(matrix @ x), x) < accuracy
    assert dense.relative(preconditioner.matmul(x), matrix @ x) < accuracy
    expected = torch.linalg.slogdet(matrix).logabsdet
    assert preconditioner.logdet().shape == expected.shape
    torch.testing.assert_close(preconditioner.logdet(), expected, rtol=1e-10, atol=accuracy)


@pytest.mark.parametrize("name", ["solve", "matmul"])
def test_single_precision_in_single_precision_out(name):
    index = INDICES["scattered"]
    preconditioner, _ = made(kernels(), index, variances("per point", 1e-2, index), 5)
    x = dense.randn(len(index), 3)
    got = getattr(preconditioner, name)(x.float())
    assert got.dtype == torch.float32
    assert dense.relative(got, getattr(preconditioner, name)(x)) < 1e-5


@devices
def test_every_device_gives_the_same(device):
    index, factors = INDICES["repeated"], kernels()
    noise, x = variances("per point", 0.1, index), dense.randn(len(index), 2)
    expected, _ = made(factors, index, noise, 4)
    own, _ = made([factor.to(device) for factor in factors], index.to(device), noise.to(device), 4)
    assert dense.relative(own.solve(x.to(device)).cpu(), expected.solve(x)) < 1e-12
    assert dense.relative(own.matmul(x.to(device)).cpu(), expected.matmul(x)) < 1e-12
    assert dense.relative(own.logdet().cpu(), expected.logdet()) < 1e-12


@devices
@pytest.mark.parametrize("tabulated", [1024, 1])
def test_lists_by_lag_are_the_same_on_every_device(device, tabulated, monkeypatch):
    monkeypatch.setattr(places, "_MAX_TABULATED", tabulated)
    monkeypatch.setattr(search, "_COMPARED_WITH_ALL", 10)
    lags, labels, index = dense.matern32(40, 0.1)[0], dense.ard(3), dense.observed("random", (40, 3))
    expected = neighbour_lists([lags, labels], index, 4)
    own = neighbour_lists([lags.to(device), labels.to(device)], index.to(device), 4)
    assert torch.equal(own.rank.cpu(), expected.rank)
    assert torch.equal(own.rows.cpu(), expected.rows)


# -- with few --------------------------------------------------------------------------------------------------------


@st.composite
def few(draw):
    index = INDICES[draw(st.sampled_from(sorted(INDICES)))]
    own, noise_batch = BATCHES[draw(st.sampled_from(sorted(BATCHES)))]
    kind = draw(st.sampled_from(["constant", "per point"]))
    noise = variances(kind, 10.0 ** draw(st.integers(-6, 2)), index, noise_batch)
    return made(kernels(own, draw(st.integers(0, 99))), index, noise, draw(st.integers(1, len(index) - 1)))


@examples
@given(few())
def test_what_it_leaves_has_ones_on_its_diagonal(case):
    preconditioner, matrix = case
    factor = root(preconditioner)
    left = (factor.mT @ matrix @ factor).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(left, torch.ones_like(left), rtol=0, atol=1e-8)


@examples
@given(few())
def test_solve_matmul_and_logdet_belong_together(case):
    preconditioner, _ = case
    inverse = root(preconditioner) @ root(preconditioner).mT
    size = inverse.size(-1)
    eye = torch.eye(size, dtype=torch.float64).expand_as(inverse)
    assert dense.relative(preconditioner.solve(eye), inverse) < 1e-10
    assert dense.relative(inverse @ preconditioner.matmul(eye), eye) < 1e-6
    torch.testing.assert_close(-torch.logdet(inverse), preconditioner.logdet(), rtol=1e-8, atol=1e-6)


@examples
@given(few())
def test_inverse_entries_sum_to_a_trace(case):
    """This holds for any symmetric matrix, not only for the one that is approximated."""
    preconditioner, matrix = case
    other = dense.random_psd(matrix.size(-1), 8)
    got = sum((weights * other[rows, columns]).sum(-1) for rows, columns, weights in preconditioner.inverse_entries())
    factor = root(preconditioner)
    expected = (factor.mT @ other @ factor).diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@examples
@given(few())
def test_logdet_is_a_sum_of_conditional_variances(case):
    preconditioner, matrix = case
    expected = vecchia_logdet(matrix, preconditioner.lists)
    torch.testing.assert_close(preconditioner.logdet(), expected, rtol=1e-8, atol=1e-6)


@examples
@given(few())
def test_the_derivative_of_logdet_is_a_trace(case):
    """``d log|P| = tr(P^-1 dA)``, against autograd through dense conditional variances."""
    preconditioner, matrix = case
    leaf = matrix.clone().requires_grad_(True)
    (expected,) = torch.autograd.grad(vecchia_logdet(leaf, preconditioner.lists).sum(), leaf)
    direction = dense.random_psd(matrix.size(-1), 9)
    parts = [(weights * direction[rows, cols]).sum(-1) for rows, cols, weights in preconditioner.inverse_entries()]
    got = torch.stack(parts).sum()
    assert float(got) == pytest.approx(float((expected * direction).sum()), rel=1e-7)


def test_parts_of_any_size_give_the_same(monkeypatch):
    index = INDICES["scattered"]
    noise = variances("per point", 0.1, index, (2,))
    whole, _ = made(kernels((2,)), index, noise, 4)
    monkeypatch.setattr(neighbours, "_CHUNK_NUMBERS", 7)
    parts, _ = made(kernels((2,)), index, noise, 4)
    assert torch.equal(parts._values, whole._values)
    assert len(list(parts.inverse_entries())) == len(index)


def test_more_neighbours_leave_less():
    """``log|P| - log|A|`` is twice a divergence: positive, and smaller for more neighbours of each."""
    index = dense.observed("random", (12, 11))
    factors, noise = [dense.matern32(12, 0.2), dense.matern32(11, 0.2)], torch.tensor([1e-3], dtype=torch.float64)
    exact = torch.logdet(dense.system(factors, index, noise))
    excess = [float(made(factors, index, noise, count)[0].logdet() - exact) for count in (1, 3, 10, 40)]
    assert excess == sorted(excess, reverse=True)
    assert 0.0 < excess[-1] < 1e-2 * excess[0]


# -- draws -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", ["none", "both"])
def test_draws_have_its_covariance(batch):
    index, (own, noise_batch) = INDICES["scattered"], BATCHES[batch]
    noise = variances("per point", 0.1, index, noise_batch)
    preconditioner, matrix = made(kernels(own), index, noise, 4)
    torch.manual_seed(0)
    draws = preconditioner.draw(20000, matrix.shape[:-2])
    covariance = preconditioner.matmul(torch.eye(len(index), dtype=torch.float64).expand_as(matrix))
    scale = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    deviation = (draws @ draws.mT / 20000 - covariance) / (scale.unsqueeze(-1) * scale.unsqueeze(-2))
    assert float(deviation.abs().max()) < 6.0 * (2.0 / 20000) ** 0.5


def test_draws_are_signs_in_its_own_units():
    """So that ``z'P^-1 z = N`` in every draw."""
    index = INDICES["scattered"]
    preconditioner, _ = made(kernels(), index, variances("constant", 0.1, index), 4)
    draws = preconditioner.draw(5, torch.Size())
    norms = (draws * preconditioner.solve(draws)).sum(-2)
    torch.testing.assert_close(norms, torch.full_like(norms, len(index)), rtol=1e-10, atol=0)


# -- matrices that are not positive definite -------------------------------------------------------------------------


def test_a_singular_block_is_lifted():
    """A cell that is observed twice without noise."""
    index = torch.tensor([0, 0, 3])
    preconditioner, matrix = made([dense.matern32(5)], index, torch.zeros(1, dtype=torch.float64), 2)
    solution = preconditioner.solve(matrix @ dense.randn(3, 1))
    assert bool(solution.isfinite().all())
    assert dense.relative(matrix @ solution, matrix @ dense.randn(3, 1)) < 1e-3
    assert bool(preconditioner.logdet().isfinite())


def test_only_singular_blocks_are_lifted():
    matrix = torch.block_diag(torch.ones(2, 2, dtype=torch.float64), 1.1 * dense.matern32(2))
    lists = NeighbourLists(torch.tensor([[-1], [0], [-1], [2]]), torch.arange(4))
    nothing = torch.zeros(1, dtype=torch.float64)
    preconditioner = NeighbourPreconditioner(lambda rows, columns: matrix[rows, columns], nothing, lists)
    got, x = preconditioner.solve(torch.eye(4, dtype=torch.float64)), torch.linalg.inv(matrix[2:, 2:])
    torch.testing.assert_close(got[2:, 2:], x, rtol=4e-16, atol=0)
    assert bool(got.isfinite().all())


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_what_is_no_covariance_is_refused(value):
    matrix = torch.tensor([[1.0, 0.5, 2.0], [0.5, 1.0, 0.5], [2.0, 0.5, 1.0]], dtype=torch.float64)
    matrix = matrix * (1.0 if value < 0 else value)
    lists = neighbour_lists([dense.matern32(3)], torch.arange(3), 2)
    with pytest.raises(ValueError, match=r"covariance: got .* expected a positive definite matrix"):
        NeighbourPreconditioner(lambda rows, columns: matrix[rows, columns], torch.zeros(1, dtype=torch.float64), lists)


# -- axes by lag -----------------------------------------------------------------------------------------------------


def condition(axis, lags, noise):
    """The condition number of ``U' A U`` for a series with 30 % gaps, with eight neighbours from a form of the axis."""
    index = dense.observed("random", (len(lags),), 0.3)
    matrix, own = dense.select(dense.toeplitz(lags), index), torch.tensor([noise], dtype=torch.float64)
    lists = neighbour_lists([axis], index, 8)
    u = root(NeighbourPreconditioner(lambda rows, columns: matrix[rows, columns], own, lists))
    values = torch.linalg.eigvalsh(u.mT @ (matrix + noise * dense.identity(len(index))) @ u)
    return float(values[-1] / values[0])


def by_lag(size, length):
    """Matern-3/2, with a length-scale in levels."""
    lag = torch.arange(size, dtype=torch.float64) * 3**0.5 / length
    return (1.0 + lag) * torch.exp(-lag)


SERIES = [(860, length, noise) for length in (3.0, 30.0, 300.0) for noise in (1e-2, 1e-4)]


@pytest.mark.parametrize(("size", "length", "noise"), [*SERIES, (1_300, 30.0, 1e-2)])
def test_neighbours_by_lag_are_as_good_as_those_of_the_matrix(size, length, noise):
    """The longest axis is searched by steps: it has more levels than are tabulated."""
    lags = by_lag(size, length)
    assert condition(lags, lags, noise) <= 1.5 * condition(dense.toeplitz(lags), lags, noise) < 15.0


@pytest.mark.parametrize(("length", "serve"), [(30.0, True), (40.0, True), (300.0, False)])
def test_lists_by_lag_serve_as_long_as_those_of_the_matrix(length, serve):
    index, new = torch.arange(0, 100, 3), by_lag(100, length)
    for form in (torch.Tensor.clone, dense.toeplitz):
        lists = neighbour_lists([form(by_lag(100, 30.0))], index, 3)
        assert lists.still_serve([2.0 * form(new)]) == serve


def test_lists_do_not_serve_another_kind_of_axis():
    lags = by_lag(10, 3.0)
    assert not neighbour_lists([lags], torch.arange(10), 3).still_serve([dense.toeplitz(lags)])
    assert not neighbour_lists([dense.toeplitz(lags)], torch.arange(10), 3).still_serve([lags])


@pytest.mark.parametrize("largest", [0, 10**9])
def test_solves_in_both_precisions_in_any_order(largest, monkeypatch):
    """Compressed rows of one precision serve the other, and are made again if they were freed."""
    monkeypatch.setattr(neighbours, "_LARGE_ENTRIES", largest)
    index = INDICES["scattered"]
    found, matrix = made(kernels(), index, variances("constant", 0.1, index), len(index) - 1)
    x = dense.randn(len(index), 2)
    exact = torch.linalg.solve(matrix, x)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-3), (torch.float64, 1e-9)):
        own = found.solve(x.to(dtype))
        assert own.dtype == dtype
        torch.testing.assert_close(own.double(), exact, rtol=tolerance, atol=tolerance)
    wide, narrow = found._columns[0], found._narrow_columns[0]
    if largest:
        assert narrow._by_column.col_indices().data_ptr() == wide._by_column.col_indices().data_ptr()
