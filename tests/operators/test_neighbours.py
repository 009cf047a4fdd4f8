"""Solves, quadratic forms and log-determinants with the neighbours preconditioner, against dense float64 algebra.

With all neighbours the preconditioner is the matrix, and nothing random is left of a log-determinant or its gradient.
With few of them, probes that are the columns of a Hadamard matrix have the identity as their covariance exactly.
"""

import linear_operator
import pytest
import torch
from linear_operator.operators import DenseLinearOperator, RootLinearOperator

import gpytorch_gaps
from gpytorch_gaps import record_solves, settings
from gpytorch_gaps.operators import SelectedKroneckerOperator, estimates
from gpytorch_gaps.preconditioners.neighbours import NeighbourPreconditioner
from gpytorch_gaps.solvers.logdet.stochastic import log_quadrature
from gpytorch_gaps.solvers.warm_start import WarmStart
from tests import _dense as dense
from tests._devices import devices
from tests._standin import count_transfers

EXACT = 1e-8
NUM = 32
INDEX = dense.observed("random", (8, 7), 24 / 56)
BATCH = torch.tensor([1.0, 0.6], dtype=torch.float64).view(2, 1, 1)


class Covariance:
    """``Σ_t W K_t W' + R R' + G + D`` from leaves that collect gradients, as an operator and written out."""

    def __init__(self, *terms, index=INDEX, noise=0.05, root=None, other=None):
        noise = torch.tensor([noise], dtype=torch.float64) if isinstance(noise, float) else noise
        self.index, self.terms = index, [dense.leaves(*factors) for factors in terms]
        self.noise = tuple(dense.leaves(*noise)) if isinstance(noise, tuple) else dense.leaves(noise)[0]
        self.root, self.other = (None if part is None else dense.leaves(part)[0] for part in (root, other))

    @property
    def symmetric(self):
        factors = [factor for factors in self.terms for factor in factors]
        return factors if self.other is None else [*factors, self.other]

    @property
    def inputs(self):
        noise = self.noise if isinstance(self.noise, tuple) else (self.noise,)
        return [*self.symmetric, *([] if self.root is None else [self.root]), *noise]

    def operator(self):
        if len(self.terms) == 1 and self.root is None and self.other is None:
            return dense.build(self.terms[0], self.index, self.noise)
        total, *more = (
            SelectedKroneckerOperator(*own, row_index=self.index, col_index=self.index) for own in self.terms
        )
        for term in more:
            total = total + term
        total = total if self.root is None else total + RootLinearOperator(self.root)
        total = total if self.other is None else total + DenseLinearOperator(self.other)
        return total.add_diagonal(self.noise)

    def dense(self):
        total = torch.diag_embed(dense.diagonal(self.noise, self.index))
        for factors in self.terms:
            total = total + dense.select(dense.kron(factors), self.index)
        total = total if self.root is None else total + self.root @ self.root.mT
        return total if self.other is None else total + self.other

    def gradients(self, value):
        found = torch.autograd.grad(value, self.inputs, retain_graph=True)
        return [dense.symmetric(g) if i < len(self.symmetric) else g for i, g in enumerate(found)]


ROUGH = [dense.matern32(8, 0.4), dense.matern32(7, 0.3)]
SMOOTH = [dense.se(8, 0.4), dense.matern32(7, 0.9)]
PER_POINT = 0.02 + 0.1 * dense.randn(NUM).abs()
AXES = (0.1 + dense.randn(8, seed=4).abs(), 0.2 + 0.3 * dense.randn(7, seed=5).abs())
LABELS = [dense.random_psd(5, 3), dense.matern32(8, 0.3)]  # as an IndexKernel gives them: no distances, any signs
CASES = {
    "one axis": lambda: Covariance([dense.matern32(60, 0.1)], index=dense.observed("random", (60,), 28 / 60)),
    "two axes": lambda: Covariance(ROUGH),
    "a hole": lambda: Covariance(ROUGH, index=torch.cat([torch.arange(16), torch.arange(40, 56)])),
    "three axes": lambda: Covariance([dense.matern32(4), dense.se(4, 0.2), dense.periodic(4)], index=torch.arange(32)),
    "four axes": lambda: Covariance([dense.matern32(n) for n in (3, 4, 2, 3)], index=torch.arange(5, 69, 2)),
    "labels": lambda: Covariance(LABELS, index=torch.arange(32).flip(0)),
    "repeated cells": lambda: Covariance(ROUGH, index=torch.arange(16).repeat(2), noise=PER_POINT),
    "noise per point": lambda: Covariance(ROUGH, noise=PER_POINT),
    "noise per axis": lambda: Covariance(ROUGH, noise=AXES),
    "small noise": lambda: Covariance(ROUGH, noise=1e-6),
    "a sum": lambda: Covariance(ROUGH, SMOOTH),
    "a sum with low-rank and dense terms": lambda: Covariance(
        ROUGH, noise=PER_POINT, root=0.5 * dense.randn(NUM, 3, seed=6), other=0.2 * dense.random_psd(NUM, 7)
    ),
    "a batch": lambda: Covariance([ROUGH[0] * BATCH, ROUGH[1]], noise=torch.stack([PER_POINT, 2.0 * PER_POINT])),
    "a batch of noise": lambda: Covariance(ROUGH, noise=torch.tensor([[0.1], [0.01]], dtype=torch.float64)),
    "a batch of sums": lambda: Covariance([ROUGH[0] * BATCH, ROUGH[1]], SMOOTH),
}
cases = pytest.mark.parametrize("case", CASES)


@pytest.fixture(autouse=True)
def _neighbours():
    with (
        linear_operator.settings.max_cholesky_size(0),
        linear_operator.settings.num_trace_samples(3),
        settings.gap_method("ignore"),
        settings.logdet_method("stochastic"),
        settings.preconditioner("neighbours"),
        settings.solve_tolerance(1e-12),
        settings.train_tolerance(1e-12),
    ):
        yield


def weights(*shape):
    return 2.0 + dense.randn(*shape, seed=3).tanh()


def close(got, expected, tolerance=EXACT):
    errors = [dense.relative(own, other) for own, other in zip(got, expected, strict=True)]
    assert max(errors) <= tolerance, errors


@cases
@pytest.mark.parametrize("count", [1, 6])
def test_solves_equal_dense_ones(case, count):
    covariance = CASES[case]()
    matrix, rhs = covariance.dense(), dense.randn(NUM, 2, seed=1)
    with settings.num_neighbours(count), record_solves() as solves:
        solution = covariance.operator().solve(rhs)
    expected = torch.linalg.solve(matrix, rhs.expand(*matrix.shape[:-1], 2))
    weight = weights(*expected.shape)
    close([solution], [expected])
    close(covariance.gradients((weight * solution).sum()), covariance.gradients((weight * expected).sum()))
    assert solves[0].num_neighbours == count
    assert all(report.converged for report in solves)


@cases
def test_with_all_neighbours_likelihood_and_gradient_are_exact(case):
    covariance, rhs = CASES[case](), dense.randn(NUM, 2, seed=1)
    matrix = covariance.dense()
    rhs = rhs.expand(*matrix.shape[:-1], 2)
    with settings.num_neighbours(NUM - 1), record_solves() as solves:
        quad, logdet = covariance.operator().inv_quad_logdet(rhs, logdet=True)
    expected = torch.linalg.slogdet(matrix).logabsdet
    expected_quad = (rhs * torch.linalg.solve(matrix, rhs)).sum((-2, -1))
    close([quad, logdet], [expected_quad, expected])
    weight = weights(*expected.shape)
    close(covariance.gradients((weight * logdet).sum()), covariance.gradients((weight * expected).sum()))
    close(covariance.gradients((weight * quad).sum()), covariance.gradients((weight * expected_quad).sum()))
    report = solves.logdets[-1]
    assert (report.method, report.reason) == ("stochastic", "data side")
    assert float(report.standard_error.max()) < 1e-6


def hadamard(size):
    """Orthogonal columns of signs."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], -1), torch.cat([matrix, -matrix], -1)])
    return matrix


@cases
@pytest.mark.parametrize("count", [1, 6])
def test_with_few_neighbours_logdet_and_gradient_are_exact_in_the_mean(case, count, monkeypatch):
    """Over probes ``U'^-1 g`` whose g are orthogonal, the mean of ``u w'`` is the inverse of the matrix."""

    def draw(self, number, batch):
        signs = hadamard(NUM).expand(*batch, NUM, number)
        return self._of_each(lambda own, part: own.mT_solve(part), self._columns, signs)

    monkeypatch.setattr(NeighbourPreconditioner, "draw", draw)
    # what is subtracted to lower the variance has no mean for independent probes alone
    monkeypatch.setattr(estimates, "log_quadrature", lambda matrices, size, _: log_quadrature(matrices, size))
    covariance = CASES[case]()
    with settings.num_neighbours(count), linear_operator.settings.num_trace_samples(NUM):
        logdet = covariance.operator().logdet()
    expected = torch.linalg.slogdet(covariance.dense()).logabsdet
    weight = weights(*expected.shape)
    close(covariance.gradients((weight * logdet).sum()), covariance.gradients((weight * expected).sum()))
    close([logdet], [expected])


def test_single_precision():
    """In float32, gradients of entries are added up in float64."""
    factors, rhs = [factor.float().double() for factor in ROUGH], dense.randn(NUM, 1, seed=1).float()
    exact = Covariance(factors, noise=PER_POINT.float().double())
    narrow = Covariance([factor.float() for factor in factors], noise=PER_POINT.float())
    with settings.num_neighbours(NUM - 1), settings.solve_tolerance(1e-6), settings.train_tolerance(1e-6):
        quad, logdet = narrow.operator().inv_quad_logdet(rhs, logdet=True)
    assert quad.dtype == logdet.dtype == torch.float32
    expected = torch.logdet(exact.dense())
    expected_quad = (rhs.double() * torch.linalg.solve(exact.dense(), rhs.double())).sum()
    close([quad, logdet], [expected_quad, expected], 1e-6)
    close(narrow.gradients(logdet), exact.gradients(expected), 1e-5)


@pytest.mark.parametrize("case", ["two axes", "labels", "a sum"])
def test_solves_without_any_noise(case):
    covariance, rhs = CASES[case](), dense.randn(NUM, 2, seed=1)
    bare = Covariance(*covariance.terms, index=covariance.index, noise=0.0)
    with settings.num_neighbours(6), record_solves() as solves:
        solution = bare.operator().solve(rhs)
    assert solves[-1].converged
    assert dense.relative(bare.dense() @ solution, rhs) < 1e-11


def test_there_are_no_more_neighbours_than_other_observations():
    with settings.num_neighbours(10**6), record_solves() as solves:
        Covariance(ROUGH).operator().solve(dense.randn(NUM, 1))
    assert (solves[-1].num_neighbours, solves[-1].iterations) == (NUM - 1, 1)
    assert solves[-1].flops < 1e6


def test_more_right_hand_sides_than_the_matrix_has_members():
    covariance, rhs = CASES["a batch"](), dense.randn(3, 2, NUM, 2, seed=1)
    with settings.num_neighbours(4):
        solution = covariance.operator().solve(rhs)
    matrix = covariance.dense()
    close([solution], [torch.linalg.solve(matrix.expand(3, *matrix.shape), rhs)])


@devices
@pytest.mark.parametrize("case", ["two axes", "noise per point", "noise per axis", "repeated cells", "a sum"])
def test_likelihoods_where_their_tensors_live(case, device):
    expected = CASES[case]()
    noise = tuple(expected.noise) if isinstance(expected.noise, tuple) else (expected.noise,)
    moved = [axis.detach().to(device) for axis in noise]
    own = Covariance(
        *([factor.detach().to(device) for factor in factors] for factors in expected.terms),
        index=expected.index.to(device),
        noise=tuple(moved) if len(moved) > 1 else moved[0],
    )
    rhs = dense.randn(NUM, 2, seed=1)
    with settings.num_neighbours(NUM - 1), count_transfers() as counts:
        quad, logdet = own.operator().inv_quad_logdet(rhs.to(device), logdet=True)
        gradients = own.gradients(logdet)
    assert counts.within(gpytorch_gaps).copies == 0
    matrix = expected.dense()
    exact = torch.logdet(matrix)
    close([quad.cpu(), logdet.cpu()], [(rhs * torch.linalg.solve(matrix, rhs)).sum(), exact])
    close([gradient.cpu() for gradient in gradients], expected.gradients(exact))


@pytest.mark.parametrize("case", ["two axes", "a sum"])
def test_warm_starts_begin_at_the_log_determinant_and_follow_it(case):
    """With all neighbours the begin of a path is exact; from there a step of some percent is followed to its square."""
    memory, rhs = WarmStart(num_probes=50, tolerance=1e-10), dense.randn(NUM, 1, seed=1)
    covariance, values = CASES[case](), []
    with settings.num_neighbours(NUM - 1), settings.warm_start(memory), record_solves() as solves:
        for scale in (1.0, 1.03):
            covariance = Covariance(
                *([scale * factors[0].detach(), factors[1]] for factors in CASES[case]().terms), noise=0.05
            )
            quad, value = covariance.operator().inv_quad_logdet(rhs, logdet=True)
            values.append((value.detach(), torch.logdet(covariance.dense()).detach()))
            # while hyperparameters move, solves are loose; the quadratic form has the square of their residuals
            close([quad], [(rhs * torch.linalg.solve(covariance.dense(), rhs)).sum()], 1e-6)
    close([values[0][0]], [values[0][1]])
    assert solves.logdets[-1].reason.startswith("followed")
    assert abs(float(values[1][0] - values[1][1])) < 4.0 * float(solves.logdets[-1].standard_error) + 1e-3
    assert sum(report.num_neighbours == NUM - 1 for report in solves) > 0
