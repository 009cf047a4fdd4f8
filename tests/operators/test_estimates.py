"""Quadratic form and log-determinant from one run of conjugate gradients: dense algebra with the same probes."""

import pytest
import torch
from linear_operator.operators import DenseLinearOperator, RootLinearOperator

from gpytorch_gaps.operators import SelectedKroneckerOperator, estimates
from gpytorch_gaps.operators.estimates import estimated_together, log_determinant
from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.planning.logdet import LogdetPlan, data_preconditioner
from tests import _dense as dense
from tests.linalg.test_circle_eigen import on_circles

SHAPE = (7, 6)
CELLS = 42
INDEX = dense.observed("random", SHAPE)
GAPS = dense.gaps_of(INDEX, SHAPE)
NUM = len(INDEX)
RHS = dense.randn(NUM, 2, seed=9)
CONFIG = SolveConfig(train_tolerance=1e-12, num_probes=4, logdet_method="stochastic", dense_size=0)
DATA, ON_GAPS = LogdetPlan("stochastic", "data"), LogdetPlan("stochastic", "gaps")


class Covariance:
    """``Σ_t W K_t W' + R R' + G + D`` from leaves that collect gradients."""

    def __init__(self, terms, noise, root=None, other=None):
        self.terms = [dense.leaves(*factors) for factors in terms]
        self.noise = tuple(dense.leaves(*noise)) if isinstance(noise, tuple) else dense.leaves(noise)[0]
        self.root, self.other = (None if part is None else dense.leaves(part)[0] for part in (root, other))

    @property
    def symmetric(self):
        return [
            *(factor for factors in self.terms for factor in factors),
            *([] if self.other is None else [self.other]),
        ]

    @property
    def inputs(self):
        noise = self.noise if isinstance(self.noise, tuple) else (self.noise,)
        return [*self.symmetric, *([] if self.root is None else [self.root]), *noise]

    def operator(self):
        if len(self.terms) == 1 and self.root is None and self.other is None:
            return dense.build(self.terms[0], INDEX, self.noise)
        total, *more = (SelectedKroneckerOperator(*own, row_index=INDEX, col_index=INDEX) for own in self.terms)
        for term in more:
            total = total + term
        total = total if self.root is None else total + RootLinearOperator(self.root)
        total = total if self.other is None else total + DenseLinearOperator(self.other)
        return total.add_diagonal(self.noise)

    def whitened(self):
        """Factors and diagonal with which the log-determinant is estimated, and the logarithms that belong to it."""
        if not isinstance(self.noise, tuple):
            return self.terms, dense.diagonal(self.noise, INDEX), 0.0
        roots = [axis.sqrt() for axis in self.noise]
        factors = [factor / (root[:, None] * root) for factor, root in zip(self.terms[0], roots, strict=True)]
        return [factors], torch.ones(NUM, dtype=torch.float64), dense.diagonal(self.noise, INDEX).log().sum()

    def unstructured(self):
        parts = [
            *([] if self.root is None else [self.root @ self.root.mT]),
            *([] if self.other is None else [self.other]),
        ]
        return sum(parts) if parts else 0.0

    def gradients(self, value):
        found = torch.autograd.grad(value, self.inputs)
        return [dense.symmetric(g) if i < len(self.symmetric) else g for i, g in enumerate(found)]


FACTORS = [dense.matern32(SHAPE[0], 0.4), dense.se(SHAPE[1], 0.3)]
MORE = [dense.matern32(SHAPE[0], 0.1), dense.matern32(SHAPE[1], 0.6)]
CONSTANT = torch.tensor([0.05], dtype=torch.float64)
PER_POINT = 0.02 + 0.1 * dense.randn(NUM).abs()
PER_AXIS = (0.1 + dense.randn(SHAPE[0], seed=4).abs(), 0.2 + 0.3 * dense.randn(SHAPE[1], seed=5).abs())
CASES = {
    "a product": lambda: Covariance([FACTORS], CONSTANT),
    "noise per point": lambda: Covariance([FACTORS], PER_POINT),
    "noise per axis": lambda: Covariance([FACTORS], PER_AXIS),
    "a sum": lambda: Covariance([FACTORS, MORE], CONSTANT),
    "low-rank and dense terms": lambda: Covariance(
        [FACTORS], PER_POINT, 0.5 * dense.randn(NUM, 3, seed=6), 0.2 * dense.random_psd(NUM, 7)
    ),
}
RANKS = {"no preconditioner": 0, "rank 9": 9}
cases = pytest.mark.parametrize("case", CASES)
ranks = pytest.mark.parametrize("rank", RANKS.values(), ids=RANKS)


def estimated(operator, config):
    """The quadratic form, if it is found with it, and the log-determinant."""
    if operator.whitened() is not None:
        value, report = log_determinant(operator, DATA, config)
        return None, value, report
    return estimated_together(operator, RHS, config)


def leading(factors, rank):
    """The eigenvectors on the whole grid that belong to the largest eigenvalues of a term, as constants."""
    own = [torch.linalg.eigh(factor.detach()) for factor in factors]
    products = dense.kron_vectors([values for values, _ in own])
    return dense.kron([vectors for _, vectors in own])[:, products.topk(rank).indices]


def dense_preconditioner(terms, diagonal, ranks, added, root):
    """``Σ_t W Q_t T_t Q_t' W' + R R' + D'`` with frozen eigenvectors, T_t being their Rayleigh quotients."""
    matrix = torch.diag(diagonal + added) + (0.0 if root is None else root @ root.mT)
    for factors, rank in zip(terms, ranks, strict=True):
        basis = leading(factors, rank)
        values = (basis * (dense.kron(factors) @ basis)).sum(0)
        matrix = matrix + (basis[INDEX] * values) @ basis[INDEX].mT
    return matrix


@pytest.fixture
def drawn(monkeypatch):
    """Has probes of any distribution drawn, and keeps the preconditioner that they are drawn for."""
    seen = {}

    def draw(preconditioner, size, batch, count, like, repeat):
        seen["preconditioner"], seen["probes"] = preconditioner, dense.randn(size, count, seed=3)
        return seen["probes"].to(like.dtype)

    monkeypatch.setattr(estimates, "draw_probes", draw)
    return seen


@ranks
@cases
def test_gradients_are_those_of_dense_algebra_with_the_same_probes(case, rank, drawn):
    config, ours, own = CONFIG.replace(rank=rank), CASES[case](), CASES[case]()
    operator = ours.operator()
    quad, logdet, report = estimated(operator, config)
    assert (report.method, report.num_probes) == ("stochastic", 4)
    probes, preconditioner = drawn["probes"], drawn["preconditioner"]
    assert (preconditioner is None) == (rank == 0)

    terms, diagonal, rest = own.whitened()
    matrix = sum(dense.select(dense.kron(factors), INDEX) for factors in terms) + own.unstructured()
    matrix = matrix + torch.diag(diagonal)
    solutions, partners, exact = torch.linalg.solve(matrix, probes).detach(), probes, rest
    half = dense.identity(NUM)
    if rank:
        white = operator if operator.whitened() is None else operator.whitened()[0]
        root = operator.unstructured_root()
        pivoted = None if root is None else root.detach()[:, 3:]  # of the dense term, to some rank
        root = None if root is None else torch.cat([own.root, pivoted], -1)
        kept = data_preconditioner(white.system(), config).ranks
        assert sum(kept) == preconditioner.rank - (0 if root is None else root.size(-1))
        stand_in = dense_preconditioner(terms, diagonal, kept, preconditioner.added, root)
        partners = torch.linalg.solve(stand_in, probes).detach()
        control = (partners * (stand_in @ partners)).sum(0).mean()
        exact = rest + torch.linalg.slogdet(stand_in).logabsdet - (control - control.detach())
        values, vectors = torch.linalg.eigh(stand_in.detach())
        half = vectors @ torch.diag(values.rsqrt()) @ vectors.mT
    expected = exact + (solutions * (matrix @ partners)).sum(0).mean()
    for found, right in zip(ours.gradients(logdet), own.gradients(expected), strict=True):
        assert dense.relative(found, right) < 1e-7

    # the value: log|P| + mean v'log(P^-1/2 A P^-1/2)v N / v'v, v = P^-1/2 z
    values, vectors = torch.linalg.eigh(half @ matrix.detach() @ half)
    along = (vectors.mT @ half @ probes).square()
    quadratures = NUM * (along * values.log().unsqueeze(-1)).sum(0) / along.sum(0)
    torch.testing.assert_close(
        logdet.detach(), torch.as_tensor(exact).detach() + quadratures.mean(), rtol=1e-8, atol=1e-8
    )
    if quad is not None:
        torch.testing.assert_close(quad, (RHS * torch.linalg.solve(matrix, RHS)).sum(0), rtol=1e-8, atol=0)


@ranks
@pytest.mark.parametrize("case", [case for case in CASES if case != "noise per axis"])
def test_gradients_of_the_quadratic_form(case, rank):
    """Exact, whatever the probes are; for the data, too."""
    ours, own, mine, theirs = CASES[case](), CASES[case](), *dense.leaves(RHS, RHS)
    quad, _, _ = estimated_together(ours.operator(), mine, CONFIG.replace(rank=rank))
    matrix = sum(dense.select(dense.kron(factors), INDEX) for factors in own.terms) + own.unstructured()
    matrix = matrix + torch.diag(dense.diagonal(own.noise, INDEX))
    weights = torch.tensor([1.0, -2.0], dtype=torch.float64)
    value = (quad * weights).sum()
    expected = ((theirs * torch.linalg.solve(matrix, theirs)).sum(0) * weights).sum()
    for found, right in zip(_with_data(ours, value, mine), _with_data(own, expected, theirs), strict=True):
        assert dense.relative(found, right) < 1e-7


def _with_data(covariance, value, rhs):
    (by_data,) = torch.autograd.grad(value, [rhs], retain_graph=True)
    return [by_data, *covariance.gradients(value)]


@pytest.mark.parametrize("noise", [0.5, 0.01])
def test_gradients_on_the_gap_side(noise, drawn):
    """``log|K + s2 I| + mean u'S z`` with ``S = V (K + s2 I)^-1 V'`` and ``u = S^-1 z`` held fixed."""
    diagonal = torch.tensor([noise], dtype=torch.float64)
    ours, own = Covariance([FACTORS], diagonal), Covariance([FACTORS], diagonal)
    logdet, report = log_determinant(ours.operator(), ON_GAPS, CONFIG)
    assert report.reason == "gaps side"
    assert drawn["preconditioner"] is None
    probes, whole = drawn["probes"], dense.kron(own.terms[0]) + own.noise * dense.identity(CELLS)
    block = dense.select(torch.linalg.inv(whole), GAPS)
    solutions = torch.linalg.solve(block, probes).detach()
    expected = torch.linalg.slogdet(whole).logabsdet + (solutions * (block @ probes)).sum(0).mean()
    for found, right in zip(ours.gradients(logdet), own.gradients(expected), strict=True):
        assert dense.relative(found, right) < 1e-7


def test_gradients_on_the_gap_side_of_whole_circles(drawn):
    """Likewise, for a table of covariances by lag."""
    noise = torch.tensor([0.1], dtype=torch.float64)
    closed = on_circles((7,), 3)
    ours, own = (dense.leaves(closed.table, dense.matern32(2), noise) for _ in range(2))
    kernel = SelectedKroneckerOperator(closed.with_table(ours[0]), ours[1], row_index=INDEX, col_index=INDEX)
    logdet, report = log_determinant(kernel.add_diagonal(ours[2]), ON_GAPS, CONFIG)
    assert report.reason == "gaps side"
    whole = torch.kron(closed.with_table(own[0]).to_dense(), own[1]) + own[2] * dense.identity(CELLS)
    block = dense.select(torch.linalg.inv(whole), GAPS)
    solutions = torch.linalg.solve(block, drawn["probes"]).detach()
    expected = torch.linalg.slogdet(whole).logabsdet + (solutions * (block @ drawn["probes"])).sum(0).mean()
    for found, right in zip(torch.autograd.grad(logdet, ours), torch.autograd.grad(expected, own), strict=True):
        assert dense.relative(found, right) < 1e-7


@ranks
@cases
def test_values_are_unbiased_within_their_standard_error(case, rank):
    torch.manual_seed(0)
    covariance = CASES[case]()
    operator = covariance.operator()
    with torch.no_grad():
        _, logdet, report = estimated(operator, CONFIG.replace(rank=rank, num_probes=400))
        exact = torch.linalg.slogdet(operator.to_dense()).logabsdet
    assert 0.0 <= float(report.standard_error) < 0.05 * NUM
    assert abs(float(logdet - exact)) <= 4.0 * float(report.standard_error) + 1e-8


def test_values_on_the_gap_side_are_unbiased_within_their_standard_error():
    torch.manual_seed(0)
    operator = CASES["a product"]().operator()
    with torch.no_grad():
        logdet, report = log_determinant(operator, ON_GAPS, CONFIG.replace(num_probes=400))
        exact = torch.linalg.slogdet(operator.to_dense()).logabsdet
    assert abs(float(logdet - exact)) <= 4.0 * float(report.standard_error) + 1e-8
