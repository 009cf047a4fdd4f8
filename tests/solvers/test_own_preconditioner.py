"""A preconditioner of the user's own: what is asked of it, and what is said where it does not give it."""

import linear_operator
import pytest
import torch

from gpytorch_gaps import record_solves, settings
from gpytorch_gaps.operators import SelectedKroneckerOperator
from tests import _dense as dense

SHAPE = (9, 8)
INDEX = dense.observed("random", SHAPE)
NUM = len(INDEX)
FACTORS = [dense.matern32(9, 0.3), dense.matern32(8, 0.2)]
NOISE = 1e-3 * (1.0 + 50.0 * dense.randn(NUM).abs())
RHS = dense.randn(NUM, 2, seed=1)


class Jacobi:
    """The diagonal: no more than a method that solves."""

    def __init__(self, system):
        rows = torch.arange(system.num_train)
        self.diagonal = (system.entries(rows, rows) + system.noise).unsqueeze(-1)

    def solve(self, x):
        return x / self.diagonal


class WholeJacobi(Jacobi):
    """With what a log-determinant needs."""

    def draw(self, count, batch):
        signs = torch.randint(2, (*batch, self.diagonal.size(-2), count)).mul(2).sub(1)
        return signs * self.diagonal.sqrt()

    def logdet(self):
        return self.diagonal.log().sum((-2, -1))


class Cholesky:
    """The matrix itself."""

    flops, setup_flops = 10.0, 1000.0

    def __init__(self, system):
        self.factor = torch.linalg.cholesky(system.dense())

    def solve(self, x):
        return torch.cholesky_solve(x, self.factor)

    def draw(self, count, batch):
        return self.factor @ torch.randn(*batch, self.factor.size(-1), count, dtype=torch.float64)

    def logdet(self):
        return 2.0 * self.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


class NumberForLogdet(Cholesky):
    def logdet(self):
        return float(super().logdet())


@pytest.fixture(autouse=True)
def _iterative():
    with (
        linear_operator.settings.max_cholesky_size(0),
        settings.logdet_method("stochastic"),
        settings.solve_tolerance(1e-11),
        settings.train_tolerance(1e-11),
    ):
        yield


def single(noise=NOISE, dtype=torch.float64):
    return dense.build([factor.to(dtype) for factor in FACTORS], INDEX, noise.to(dtype))


def total():
    first = SelectedKroneckerOperator(*FACTORS, row_index=INDEX, col_index=INDEX)
    second = SelectedKroneckerOperator(dense.se(9), dense.se(8), row_index=INDEX, col_index=INDEX)
    return (first + second).add_diagonal(NOISE)


OPERATORS = {
    "a product": single,
    "a sum": total,
    "noise per axis": lambda: single_axes(),
    "a batch": lambda: dense.build(FACTORS, INDEX, torch.stack([NOISE, 3.0 * NOISE])),
}
operators = pytest.mark.parametrize("kind", OPERATORS)


def single_axes():
    return dense.build(FACTORS, INDEX, (0.1 + dense.randn(9).abs(), 0.1 + dense.randn(8).abs()))


@operators
@pytest.mark.parametrize("own", [Jacobi, Cholesky])
@pytest.mark.parametrize("method", ["auto", "ignore"])
def test_an_object_that_solves_preconditions_solves(kind, own, method):
    operator = OPERATORS[kind]()
    with settings.preconditioner(own), settings.gap_method(method), record_solves() as solves:
        solution = operator.solve(RHS)
    matrix = operator.to_dense()
    assert dense.relative(matrix @ solution, RHS.expand(*matrix.shape[:-1], 2)) < 1e-10
    assert solves[-1].converged
    if own is Cholesky and solves[-1].method == "ignore":
        assert solves[-1].iterations <= 3


def test_it_saves_iterations():
    counts, noise = [], torch.logspace(-2, 3, NUM, dtype=torch.float64)
    for value in ("none", Jacobi):
        with settings.preconditioner(value), settings.gap_method("ignore"), record_solves() as solves:
            single(noise).solve(RHS)
        counts.append(solves[-1].iterations)
    assert counts[1] < 0.5 * counts[0]


@operators
@pytest.mark.parametrize("own", [Cholesky])
def test_the_matrix_itself_gives_the_log_determinant(kind, own):
    operator = OPERATORS[kind]()
    with settings.preconditioner(own), settings.gap_method("ignore"):
        value = operator.logdet()
    assert dense.relative(value, torch.linalg.slogdet(operator.to_dense()).logabsdet) < 1e-9


def test_a_log_determinant_may_be_a_number():
    with settings.preconditioner(NumberForLogdet):
        assert float(single().logdet()) == pytest.approx(float(torch.logdet(single().to_dense())), rel=1e-9)


def test_estimates_with_it_are_unbiased():
    factors, noise, inputs = dense.with_leaves(FACTORS, NOISE)
    truth = torch.logdet(dense.system(factors, INDEX, noise))
    expected = dense.gradients(truth, inputs, 2)[-1]
    torch.manual_seed(0)
    with (
        settings.preconditioner(WholeJacobi),
        linear_operator.settings.num_trace_samples(1000),
        record_solves() as solves,
    ):
        value = dense.build(factors, INDEX, noise).logdet()
    error = float(solves.logdets[-1].standard_error)
    assert abs(float(value - truth)) < 3.0 * error < 3.0
    assert dense.relative(dense.gradients(value, inputs, 2)[-1], expected) < 0.1


def test_it_is_made_once_for_a_covariance_and_given_float64():
    made, seen = [], set()

    class Counted(Jacobi):
        def __init__(self, system):
            super().__init__(system)
            made.append(self)

        def solve(self, x):
            seen.add(x.dtype)
            return super().solve(x)

    operator = single(dtype=torch.float32)
    with settings.preconditioner(Counted), settings.gap_method("ignore"), settings.solve_tolerance(1e-5):
        for _ in range(2):
            solution = operator.solve(RHS.float())
    assert dense.relative(operator.to_dense() @ solution, RHS) < 1e-4
    assert len(made) == 1
    assert seen == {torch.float64}


class Nothing:
    def __init__(self, system):
        pass


class Attribute(Nothing):
    solve = 3.0


class Transposed(Jacobi):
    def solve(self, x):
        return super().solve(x).mT


class FewDraws(WholeJacobi):
    def draw(self, count, batch):
        return super().draw(1, batch)


class NoLogdet(WholeJacobi):
    logdet = None


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (Nothing, r"made a Nothing, expected an object with a method solve\(x\)"),
        (Attribute, r"made a Attribute, expected an object with a method solve\(x\)"),
        (lambda system: None, r"made a NoneType, expected an object with a method solve\(x\)"),
        (Transposed, rf"solve of Transposed gave shape \(2, {NUM}\), expected a tensor of shape \({NUM}, 2\)"),
    ],
)
def test_what_does_not_solve_is_refused(own, words):
    with (
        settings.preconditioner(own),
        settings.gap_method("ignore"),
        pytest.raises(ValueError, match=r"settings\.preconditioner: .*" + words),
    ):
        single().solve(RHS)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (Jacobi, r"Jacobi has no method draw, expected draw\(count, batch\) and logdet\(\)"),
        (NoLogdet, r"NoLogdet has no method logdet, expected draw\(count, batch\) and logdet\(\)"),
        (FewDraws, rf"draw of FewDraws gave shape \({NUM}, 1\), expected a tensor of shape \({NUM}, 10\)"),
    ],
)
def test_what_gives_no_log_determinant_is_refused(own, words):
    with settings.preconditioner(own), pytest.raises(ValueError, match=r"settings\.preconditioner: " + words):
        single().logdet()
