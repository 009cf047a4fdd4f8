"""Sums of kernels, scattered points and posterior covariances: values and gradients against dense float64 algebra.

Solves are asked for a residual of 1e-12 and compared at 1e-8 relative, norm by norm. Dense Cholesky is switched off
unless a case is about it.
"""

import warnings

import linear_operator
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from linear_operator import to_dense
from linear_operator.operators import (
    ConstantDiagLinearOperator,
    DenseLinearOperator,
    DiagLinearOperator,
    RootLinearOperator,
    SumLinearOperator,
)

from gpytorch_gaps import record_solves, settings
from gpytorch_gaps.operators import (
    KhatriRaoOperator,
    SelectedKroneckerAddedDiagOperator,
    SelectedKroneckerOperator,
    SelectedKroneckerSumAddedDiagOperator,
    SelectedKroneckerSumOperator,
)
from gpytorch_gaps.posterior.covariance import PosteriorCovarianceOperator, PredictionPoints
from gpytorch_gaps.reports import NotConvergedWarning
from tests import _dense as dense

EXACT = 1e-8
SHAPE = (5, 4, 3)


@pytest.fixture(autouse=True)
def _iterative():
    with linear_operator.settings.max_cholesky_size(0), settings.logdet_method("exact"):
        yield


# -- one sum, dense and ours -----------------------------------------------------------------------------------------


class Mixture:
    """``Σ_t W K_t W' + Σ R R' + Σ G + D`` from its tensors: leaves that collect gradients.

    :param krons: factors of each Kronecker term.
    :param roots: R, shape (*batch, N, r) each.
    :param others: G, shape (*batch, N, N) each.
    :param noise: shape (*batch, 1) or (*batch, N).
    """

    def __init__(self, index, krons, noise, roots=(), others=(), dtype=torch.float64):
        def leaf(tensor):
            return tensor.detach().to(dtype).clone().requires_grad_()

        self.index, self.noise = index, leaf(noise)
        self.krons = [[leaf(factor) for factor in factors] for factors in krons]
        self.roots, self.others = [leaf(root) for root in roots], [leaf(other) for other in others]

    @property
    def symmetric(self):
        return [*(factor for factors in self.krons for factor in factors), *self.others]

    @property
    def inputs(self):
        return [*self.symmetric, *self.roots, self.noise]

    def like(self, dtype):
        """A copy, from the same numbers."""
        return Mixture(self.index, self.krons, self.noise, self.roots, self.others, dtype)

    def kernel_matrix(self):
        parts = [dense.select(dense.kron(factors), self.index) for factors in self.krons]
        return sum([*parts, *(root @ root.mT for root in self.roots), *self.others])

    def matrix(self):
        return self.kernel_matrix() + torch.diag_embed(dense.diagonal(self.noise, self.index))

    def kernel(self):
        index = self.index
        krons = [SelectedKroneckerOperator(*factors, row_index=index, col_index=index) for factors in self.krons]
        others = [DenseLinearOperator(other) for other in self.others]
        return SelectedKroneckerSumOperator(*krons, *map(RootLinearOperator, self.roots), *others)

    def operator(self):
        rows = len(self.index)
        if self.noise.size(-1) == 1 and rows > 1:
            return self.kernel() + ConstantDiagLinearOperator(self.noise, diag_shape=rows)
        return self.kernel() + DiagLinearOperator(self.noise)

    def gradients(self, value, extra=()):
        count = len(self.symmetric)
        found = torch.autograd.grad(value, [*self.inputs, *extra], retain_graph=True)
        return [dense.symmetric(gradient) if i < count else gradient for i, gradient in enumerate(found)]


KINDS = ("two", "low rank", "dense", "all")


def mixture(kind="two", shape=SHAPE, pattern="random", noise=0.05, batch=(), dtype=torch.float64, fraction=0.4):
    index = dense.observed(pattern, shape, fraction)
    rows = len(index)
    krons = [[dense.matern32(size).expand(*batch, size, size) for size in shape]]
    roots, others = [], []
    if kind in ("two", "all"):  # "one" is a single term, which a sum may well have
        krons.append([dense.random_psd(size, axis, batch=batch) for axis, size in enumerate(shape)])
    if kind in ("low rank", "all"):
        roots.append(dense.randn(*batch, rows, 2, seed=5))
    if kind in ("dense", "all"):
        others.append(dense.ard(rows).expand(*batch, rows, rows))
    noise = noise if torch.is_tensor(noise) else torch.full((*batch, 1), noise, dtype=torch.float64)
    return Mixture(index, krons, noise, roots, others, dtype)


def everything(problem, matrix_of, rhs, weights):
    """Solution, quadratic form and log-determinant, with the gradients of weighted sums of each."""
    (rhs,) = dense.leaves(rhs)
    if matrix_of == "dense":
        matrix = problem.matrix()
        solution = torch.linalg.solve(matrix, rhs)
        quad, logdet = (rhs * solution).sum((-2, -1)), torch.linalg.slogdet(matrix).logabsdet
    else:
        operator = problem.operator()
        assert isinstance(operator, SelectedKroneckerSumAddedDiagOperator)
        solution = operator.solve(rhs)
        quad, logdet = operator.inv_quad_logdet(rhs, logdet=True)
    result = {"solve": solution.detach(), "inv_quad": quad.detach(), "logdet": logdet.detach()}
    of = {
        "solve": ((weights["solve"] * solution).sum(), (rhs,)),
        "inv_quad": ((weights["batch"] * quad).sum(), (rhs,)),
        "logdet": ((weights["batch"] * logdet).sum(), ()),
    }
    for name, (value, extra) in of.items():
        for i, gradient in enumerate(problem.gradients(value, extra)):
            result[f"d {name} / d input {i}"] = gradient
    return result


def compare(problem, method="auto", rank=None, tolerance=EXACT, columns=2):
    """Everything at once, without a warning; returns the reports of our solves."""
    dtype, rows = problem.noise.dtype, len(problem.index)
    batch = problem.operator().batch_shape
    rhs = dense.randn(*batch, rows, columns, seed=1).to(dtype)
    weights = {
        "solve": dense.randn(*batch, rows, columns, seed=2).to(dtype),
        "batch": (2.0 + dense.randn(*batch, seed=3).tanh()).to(dtype),
    }
    exact = {name: weight.double() for name, weight in weights.items()}
    expected = everything(problem.like(torch.float64), "dense", rhs.double(), exact)
    accuracy = 1e-12 if dtype == torch.float64 else 1e-7
    with (
        settings.gap_method(method),
        settings.preconditioner_rank(rank),
        settings.solve_tolerance(accuracy),
        settings.train_tolerance(accuracy),
        record_solves() as solves,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        got = everything(problem, "ours", rhs, weights)
    dense.check_each(got, expected, dtype, tolerance)
    return solves


METHODS = [("auto", None), ("ignore", None), ("ignore", 0), ("ignore", 20), ("cholesky", None)]


@pytest.mark.parametrize("shape", [(9,), (6, 5), (4, 3, 5), (3, 2, 2, 3)], ids=lambda shape: f"{len(shape)} axes")
@pytest.mark.parametrize(("method", "rank"), [("auto", None), ("ignore", 20), ("cholesky", None)])
def test_number_of_axes(shape, method, rank):
    solves = compare(mixture("two", shape), method, rank)
    assert {report.method for report in solves} == {"cholesky" if method == "cholesky" else "ignore"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("method", "rank"), METHODS)
def test_kinds_of_terms(kind, method, rank):
    compare(mixture(kind), method, rank)


@pytest.mark.parametrize("pattern", ["none", "one gap", "one observation", "random", "block", "slice"])
@pytest.mark.parametrize("kind", ["two", "all"])
def test_sums_with_gaps_of_every_pattern(kind, pattern):
    compare(mixture(kind, pattern=pattern))


@pytest.mark.parametrize("noise", [1e-6, 1e-3, 1.0, 1e2])
@pytest.mark.parametrize(("method", "rank"), [("ignore", None), ("ignore", 20), ("cholesky", None)])
def test_sums_with_noise_of_every_size(noise, method, rank):
    # the random factors bound the condition number also at 1e-6
    compare(mixture("two", (6, 5), noise=noise), method, rank)


@pytest.mark.parametrize("kind", ["two", "all"])
@pytest.mark.parametrize("method", ["ignore", "cholesky"])
def test_noise_per_point(kind, method):
    index = dense.observed("random", SHAPE)
    compare(mixture(kind, noise=0.1 + dense.randn(len(index), seed=4).square()), method)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["ignore", "cholesky"])
def test_sums_in_float32_agree_with_float64(kind, method):
    """Against float64 algebra on the same rounded inputs; gradients are float32 products of exact solutions."""
    compare(mixture(kind, dtype=torch.float32), method, tolerance=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["ignore", "cholesky"])
@pytest.mark.parametrize("batch", [(2,), (2, 2)], ids=str)
def test_batches_of_sums_are_solved_member_by_member(kind, method, batch):
    compare(mixture(kind, (4, 3), batch=batch), method)


@pytest.mark.parametrize("part", ["noise", "one term", "root"])
@pytest.mark.parametrize("method", ["ignore", "cholesky"])
def test_a_batch_of_one_part_alone(part, method):
    """The other parts are shared, and their gradients summed over the batch."""
    base = mixture("all", (4, 3))
    krons, noise, roots = base.krons, base.noise, base.roots
    if part == "noise":
        noise = torch.tensor([[0.1], [0.2]], dtype=torch.float64)
    elif part == "one term":
        krons = [krons[0], [dense.random_psd(size, batch=(2,)) for size in (4, 3)]]
    else:
        roots = [dense.randn(2, len(base.index), 2)]
    compare(Mixture(base.index, krons, noise, roots, base.others), method)


def test_no_noise_at_all():
    """Nothing to precondition with: plain conjugate gradients on the kernel."""
    problem = mixture("two", (4, 3), noise=0.0)
    rhs = dense.randn(len(problem.index), 1)
    with settings.solve_tolerance(1e-12), settings.gap_method("ignore"), record_solves() as solves:
        solution = problem.operator().solve(rhs)
    assert solves[0].rank == 0
    assert dense.relative(solution.detach(), torch.linalg.solve(problem.matrix().detach(), rhs)) < EXACT


@pytest.mark.parametrize("method", ["ignore", "auto"])
@pytest.mark.parametrize(
    "krons",
    [
        [[dense.identity(6), dense.identity(5)], [dense.matern32(6), dense.identity(5)]],
        [[dense.periodic(6), dense.periodic(5)], [dense.periodic(6, 0.3), dense.identity(5)]],
        [[dense.matern32(6), dense.se(5)], [dense.matern32(6), dense.se(5)]],
    ],
    ids=["identities", "periodic", "the same kernel twice"],
)
def test_sums_of_kernels_with_repeated_eigenvalues(krons, method):
    """Within a term and between terms: gradients never pass through eigenvectors."""
    noise = torch.tensor([0.05], dtype=torch.float64)
    compare(Mixture(dense.observed("random", (6, 5)), krons, noise), method)


def test_terms_on_two_grids():
    """Kronecker terms of other axes than the first's are followed by pivoted Cholesky; the result is the same."""
    index = torch.arange(20)
    first, second = [dense.matern32(5), dense.se(4)], [dense.random_psd(10), dense.matern32(2)]
    matrix = dense.kron(first) + dense.kron(second) + 0.1 * torch.eye(20, dtype=torch.float64)
    krons = [SelectedKroneckerOperator(*factors, row_index=index, col_index=index) for factors in (first, second)]
    rhs = dense.randn(20, 2)
    for order in (krons, krons[::-1]):
        operator = SelectedKroneckerSumOperator(*order).add_diagonal(torch.tensor(0.1, dtype=torch.float64))
        with settings.solve_tolerance(1e-12):
            assert dense.relative(operator.solve(rhs), torch.linalg.solve(matrix, rhs)) < EXACT


def test_more_columns_than_rows_in_a_root():
    """A root wider than the matrix is no low-rank term."""
    problem = mixture("two", (4, 3))
    rows = len(problem.index)
    wide = Mixture(problem.index, problem.krons, problem.noise, [dense.randn(rows, 2 * rows + 150)])
    compare(wide, "ignore")


def test_right_hand_sides_batched_alone():
    problem = mixture("all", (4, 3))
    rhs, matrix = dense.randn(3, len(problem.index), 2), problem.matrix().detach()
    with settings.solve_tolerance(1e-12), settings.train_tolerance(1e-12):
        operator = problem.operator()
        assert dense.relative(operator.solve(rhs).detach(), torch.linalg.solve(matrix, rhs)) < EXACT
        quad, logdet = operator.inv_quad_logdet(rhs, logdet=True)
    assert quad.shape == (3,)
    assert dense.relative(quad.detach(), (rhs * torch.linalg.solve(matrix, rhs)).sum((-2, -1))) < EXACT
    assert dense.relative(logdet.detach(), torch.logdet(matrix)) < EXACT


# -- the algebra of a sum --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("noisy", [False, True], ids=["kernel", "with noise"])
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_products_diagonals_and_parts(kind, noisy, batch):
    problem = mixture(kind, batch=batch)
    matrix = (problem.matrix() if noisy else problem.kernel_matrix()).detach()
    operator = problem.operator() if noisy else problem.kernel()
    rows = len(problem.index)
    x = dense.randn(*batch, rows, 3)
    some = torch.tensor([3, 0, 0, 7])
    pairs = {
        "matmul": (operator @ x, matrix @ x),
        "t_matmul": (operator._t_matmul(x), matrix.mT @ x),
        "rmatmul": (x.mT @ operator, x.mT @ matrix),
        "diagonal": (operator.diagonal(dim1=-2, dim2=-1), matrix.diagonal(dim1=-2, dim2=-1)),
        "dense": (operator.to_dense(), matrix),
        "entries": (operator[..., some, some.flip(0)], matrix[..., some, some.flip(0)]),
        "row": (operator[..., 2, :], matrix[..., 2, :]),
        "block": (to_dense(operator[..., 1:6, 2:9]), matrix[..., 1:6, 2:9]),
        "some rows": (to_dense(operator[..., some, :]), matrix[..., some, :]),
        "strided": (to_dense(operator[..., ::3, ::2]), matrix[..., ::3, ::2]),
        "scaled": (to_dense(operator * 2.5), 2.5 * matrix),
    }
    for name, (got, expected) in pairs.items():
        assert got.shape == expected.shape, name
        assert dense.relative(got.detach(), expected) < 1e-13, name


@pytest.mark.parametrize("noisy", [False, True], ids=["kernel", "with noise"])
def test_gradients_of_products_and_diagonals(noisy):
    problem = mixture("all", (4, 3))
    inputs = problem.inputs if noisy else problem.inputs[:-1]
    matrix, operator = (problem.matrix(), problem.operator()) if noisy else (problem.kernel_matrix(), problem.kernel())
    rows = len(problem.index)
    x, weights = dense.randn(rows, 2), dense.randn(rows, 2, seed=1)
    values = [
        ((weights * (operator @ x)).sum(), (weights * (matrix @ x)).sum()),
        ((weights[:, 0] * operator.diagonal(dim1=-2, dim2=-1)).sum(), (weights[:, 0] * matrix.diagonal()).sum()),
        (operator.to_dense().square().sum(), matrix.square().sum()),
        (to_dense(operator[1:4, :]).square().sum(), matrix[1:4].square().sum()),
    ]
    for got, expected in values:
        gradients = torch.autograd.grad(got, inputs, retain_graph=True)
        exact = torch.autograd.grad(expected, inputs, retain_graph=True)
        for ours, theirs in zip(gradients, exact, strict=True):
            assert dense.relative(ours, theirs) < 1e-12


def test_what_adding_gives():
    """Sums stay sums that know how to solve, in any order of adding."""
    a, b = mixture("two", (4, 3)), mixture("low rank", (4, 3))
    kernel, other, noise = a.kernel(), b.kernel(), DiagLinearOperator(torch.rand(len(a.index)).double() + 0.1)
    plain = a.kernel().linear_ops[0]
    tensor = dense.ard(len(a.index))
    for got, expected in (
        (kernel + other, a.kernel_matrix() + b.kernel_matrix()),
        (kernel + tensor, a.kernel_matrix() + tensor),
        (plain + kernel, to_dense(plain) + a.kernel_matrix()),
        (plain + RootLinearOperator(b.roots[0]), to_dense(plain) + b.roots[0] @ b.roots[0].mT),
    ):
        assert isinstance(got, SelectedKroneckerSumOperator)
        assert dense.relative(got.to_dense().detach(), expected.detach()) < 1e-14
    diagonal = torch.diag_embed(noise._diag)
    for got, expected in (
        (kernel + noise, a.kernel_matrix() + diagonal),
        (kernel + noise + noise, a.kernel_matrix() + 2 * diagonal),
        (kernel + noise + other, a.kernel_matrix() + b.kernel_matrix() + diagonal),
        (kernel + (other + noise), a.kernel_matrix() + b.kernel_matrix() + diagonal),
        (kernel + (plain + noise), a.kernel_matrix() + to_dense(plain) + diagonal),
        ((kernel + noise) + (other + noise), a.kernel_matrix() + b.kernel_matrix() + 2 * diagonal),
        ((kernel + noise) + (plain + noise), a.kernel_matrix() + to_dense(plain) + 2 * diagonal),
        ((kernel + noise).add_jitter(0.2), a.kernel_matrix() + diagonal + 0.2 * torch.eye(len(a.index)).double()),
    ):
        assert isinstance(got, SelectedKroneckerSumAddedDiagOperator)
        assert dense.relative(got.to_dense().detach(), expected.detach()) < 1e-14


def test_the_root_of_the_inverse_is_the_symmetric_one():
    """``sqrt_inv_matmul`` with a preconditioner would give a rotated root, which is not what is asked for."""
    problem = mixture("low rank", (6, 5), noise=0.5)
    matrix, x = problem.matrix().detach(), dense.randn(len(problem.index), 2)
    values, vectors = torch.linalg.eigh(matrix)
    exact = vectors @ ((vectors.mT @ x) / values.sqrt().unsqueeze(-1))
    one_term = SelectedKroneckerAddedDiagOperator(problem.kernel().linear_ops[0], problem.operator()._diag_tensor)
    alone = to_dense(one_term).detach()
    values, vectors = torch.linalg.eigh(alone)
    exact_alone = vectors @ ((vectors.mT @ x) / values.sqrt().unsqueeze(-1))
    with linear_operator.settings.minres_tolerance(1e-9), settings.preconditioner_rank(8):
        assert dense.relative(problem.operator().sqrt_inv_matmul(x).detach(), exact) < 1e-4
        assert dense.relative(one_term.sqrt_inv_matmul(x).detach(), exact_alone) < 1e-4


@st.composite
def random_mixtures(draw):
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    cells, seed = torch.Size(shape).numel(), draw(st.integers(0, 2**16))
    index = torch.tensor(draw(st.lists(st.integers(0, cells - 1), min_size=1, max_size=8)))  # in any order, repeated
    krons = [
        [dense.random_psd(size, seed + 7 * t + axis) for axis, size in enumerate(shape)]
        for t in range(draw(st.integers(1, 3)))
    ]
    roots = [dense.randn(len(index), draw(st.integers(1, 3)), seed=seed)] if draw(st.booleans()) else []
    others = [dense.random_psd(len(index), seed)] if draw(st.booleans()) else []
    noise = torch.tensor([10.0 ** draw(st.integers(-3, 2))], dtype=torch.float64)
    return Mixture(index, krons, noise, roots, others)


@hypothesis_settings(max_examples=40)
@given(random_mixtures(), st.sampled_from(METHODS))
def test_a_solve_undoes_a_product(problem, method):
    operator, x = problem.operator(), dense.randn(len(problem.index), 2)
    assert dense.relative((operator @ x).detach(), (problem.matrix() @ x).detach()) < 1e-13
    with (
        linear_operator.settings.max_cholesky_size(0),
        settings.gap_method(method[0]),
        settings.preconditioner_rank(method[1]),
        settings.solve_tolerance(1e-12),
        torch.no_grad(),
    ):
        assert dense.relative(operator.solve(operator @ x), x) < 1e-6


@hypothesis_settings(max_examples=40)
@given(random_mixtures(), st.sampled_from([None, 1, 3, 100]))
def test_a_preconditioner_is_what_it_says(problem, rank):
    """``P^-1 P = I``, the log-determinant is P's, and P has the trace of the matrix it stands for."""
    operator = problem.operator()
    with settings.preconditioner_rank(rank):
        solve, matrix, logdet = operator._preconditioner()
    if solve is None:  # auto may find that none is worth it
        assert rank is None
        return
    written_out, rows = matrix.to_dense().detach(), len(problem.index)
    identity = torch.eye(rows, dtype=torch.float64)
    assert dense.relative(solve(written_out), identity) < 1e-8
    torch.testing.assert_close(logdet.detach(), torch.linalg.slogdet(written_out).logabsdet, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(written_out.trace(), problem.matrix().detach().trace(), rtol=1e-8, atol=0)


@pytest.mark.parametrize("kind", ["one", *KINDS])
@pytest.mark.parametrize(("rank", "batch"), [(3, ()), (3, (2,)), (1000, ())])
def test_gradient_of_a_preconditioners_logdet(kind, rank, batch):
    """That of ``log|P|`` for the P returned with it, whose basis is constant for both."""
    problem = mixture(kind, (4, 3), batch=batch)
    with settings.preconditioner_rank(rank):
        _, matrix, logdet = problem.operator()._preconditioner()
    exact = torch.linalg.slogdet(matrix.to_dense()).logabsdet
    options = {"retain_graph": True, "materialize_grads": True}  # a dense term is followed as a constant
    ours = torch.autograd.grad(logdet.sum(), problem.inputs, **options)
    theirs = torch.autograd.grad(exact.sum(), problem.inputs, **options)
    for gradient, expected in zip(ours, theirs, strict=True):
        assert dense.relative(gradient, expected) < EXACT
    for tensor, gradient in zip(problem.inputs, ours, strict=True):
        if any(tensor is root for root in problem.roots):
            assert float(gradient.norm()) > 0.1  # kept whole, and differentiable: that is what lowers the variance


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_a_preconditioner_of_full_rank_is_the_matrix(batch):
    """One term without gaps: values and gradients of its log-determinant are those of the matrix."""
    problem = mixture("one", (4, 3), pattern="none", batch=batch)
    with settings.preconditioner_rank(1000):
        _, matrix, logdet = problem.operator()._preconditioner()
    exact = torch.linalg.slogdet(problem.matrix()).logabsdet
    assert dense.relative(logdet.detach(), exact.detach()) < 1e-10
    for ours, theirs in zip(problem.gradients(logdet.sum()), problem.gradients(exact.sum()), strict=True):
        assert dense.relative(ours, theirs) < EXACT
    assert dense.relative(matrix.to_dense().detach(), problem.matrix().detach()) < 1e-10


# -- stochastic log-determinants -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "rank"), [("two", 0), ("two", 8), ("all", 0), ("all", 4)])
def test_stochastic_logdet_is_unbiased(kind, rank):
    """Within four of the standard errors it reports, and these are worth something: not half the value."""
    problem = mixture(kind, (6, 5), noise=0.3)
    exact = float(torch.logdet(problem.matrix().detach()))
    torch.manual_seed(0)
    with (
        settings.logdet_method("stochastic"),
        settings.preconditioner_rank(rank),
        settings.train_tolerance(1e-10),
        linear_operator.settings.num_trace_samples(400),
        record_solves() as solves,
    ):
        _, value = problem.operator().inv_quad_logdet(None, logdet=True)
    (report,) = solves.logdets
    error = float(report.standard_error)
    assert report.method == "stochastic"
    assert report.num_probes == 400
    assert 0.0 < error < 0.1 * abs(exact)
    assert abs(float(value.detach()) - exact) < 4.0 * error


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_stochastic_logdets_of_a_batch(dtype):
    problem = mixture("all", (4, 3), batch=(2,), dtype=dtype)
    exact = torch.logdet(problem.like(torch.float64).matrix()).detach()
    torch.manual_seed(1)
    with (
        settings.logdet_method("stochastic"),
        settings.preconditioner_rank(4),
        linear_operator.settings.num_trace_samples(400),
        record_solves() as solves,
    ):
        value = problem.operator().logdet()
    error = solves.logdets[0].standard_error
    assert value.dtype == dtype
    assert value.shape == error.shape == (2,)
    assert bool(((value.detach() - exact).abs() < 4.0 * error).all())


@pytest.mark.parametrize("kind", ["two", "all"])
def test_a_preconditioner_lowers_the_variance(kind):
    problem = mixture(kind, (6, 5), pattern="one gap", noise=0.1)
    errors = {}
    for rank in (0, 15, 28):
        torch.manual_seed(0)
        with (
            settings.logdet_method("stochastic"),
            settings.preconditioner_rank(rank),
            linear_operator.settings.num_trace_samples(100),
            record_solves() as solves,
        ):
            problem.operator().inv_quad_logdet(None, logdet=True)
        errors[rank] = float(solves.logdets[-1].standard_error)
    assert errors[28] < errors[15] < errors[0]


@pytest.mark.parametrize(("kind", "rank"), [("two", 0), ("low rank", 4), ("all", 4)])
def test_stochastic_gradient_is_right_on_average(kind, rank):
    """The mean over twenty runs is the exact gradient within its standard error, in norm and entry by entry."""
    problem = mixture(kind, (4, 3), noise=0.3)
    exact = torch.cat([g.flatten() for g in problem.gradients(torch.logdet(problem.matrix()))])
    torch.manual_seed(0)
    found = []
    with (
        settings.logdet_method("stochastic"),
        settings.preconditioner_rank(rank),
        settings.train_tolerance(1e-10),
        linear_operator.settings.num_trace_samples(100),
    ):
        for _ in range(20):
            _, value = problem.operator().inv_quad_logdet(None, logdet=True)
            found.append(torch.cat([g.flatten() for g in problem.gradients(value)]))
    runs = torch.stack(found)
    error = runs.std(0) / len(runs) ** 0.5
    off = runs.mean(0) - exact
    assert float(error.norm()) < 0.05 * float(exact.norm())
    assert float(off.norm()) < 2.0 * float(error.norm())
    assert bool((off.abs() <= 4.5 * error + 1e-8).all())


def test_quadratic_form_and_stochastic_logdet_share_one_run():
    problem = mixture("all")
    rhs, matrix = dense.randn(len(problem.index), 1), problem.matrix().detach()
    torch.manual_seed(0)
    with (
        settings.logdet_method("stochastic"),
        settings.train_tolerance(1e-10),
        record_solves() as solves,
    ):
        quad, _ = problem.operator().inv_quad_logdet(rhs, logdet=True)
    assert len(solves) == 1
    assert "probes for the log-determinant" in solves[0].reason
    assert dense.relative(quad.detach(), (rhs * torch.linalg.solve(matrix, rhs)).sum()) < EXACT


# -- what a solve says -----------------------------------------------------------------------------------------------


def two_smooth_kernels(noise=1e-3):
    shape = (40, 30)
    krons = [[dense.se(40, 0.3), dense.se(30, 0.4)], [dense.se(40, 0.1), dense.se(30, 1.0)]]
    return Mixture(dense.observed("random", shape), krons, torch.tensor([noise], dtype=torch.float64))


@pytest.mark.parametrize(("rank", "least", "most"), [(None, 1, 8), (100, 10, 40), (20, 150, 500), (0, 400, 1000)])
def test_a_preconditioner_of_all_terms_saves_iterations(rank, least, most):
    """On 40 x 30 with 40 % gaps: 4 with the rank found best, 23 at rank 100, 301 at 20, 696 without."""
    problem = two_smooth_kernels()
    with settings.gap_method("ignore"), settings.preconditioner_rank(rank), record_solves() as solves:
        problem.operator().solve(dense.randn(len(problem.index), 2))
    (report,) = solves
    assert report.converged
    assert report.worst_residual <= 1e-6
    assert least <= report.iterations <= most
    assert (report.rank == 0) if rank == 0 else (report.rank >= (rank or 100))


def test_reports_tell_method_rank_and_residual():
    problem = mixture("all")
    rhs, width = dense.randn(len(problem.index), 2), 2 + len(problem.index)
    with record_solves() as solves:
        for method, rank in (("ignore", 5), ("ignore", 0), ("cholesky", None), ("auto", None)):
            with settings.gap_method(method), settings.preconditioner_rank(rank):
                problem.operator().solve(rhs)
    ranked, plain, direct, auto = solves
    assert (ranked.method, plain.method, direct.method, auto.method) == ("ignore", "ignore", "cholesky", "ignore")
    assert ranked.rank == 5 + width  # the low-rank term whole, and the dense one as far as it goes
    assert (plain.rank, direct.rank, direct.iterations) == (0, 0, 0)
    assert ranked.reason.startswith(f"a sum with 2 Kronecker terms, rank {ranked.rank} leaves eigenvalues of")
    assert plain.reason == "a sum with 2 Kronecker terms, no preconditioner"
    assert direct.reason == "a sum with 2 Kronecker terms, dense"
    for report in solves:
        assert report.converged
        assert report.num_rhs == 2
        assert report.residual.shape == (2,)
        assert report.flops > 0


def test_auto_takes_dense_cholesky_where_it_is_allowed():
    problem = mixture("two")
    with linear_operator.settings.max_cholesky_size(800), settings.logdet_method("auto"), record_solves() as solves:
        problem.operator().inv_quad_logdet(dense.randn(len(problem.index), 1), logdet=True)
    assert [report.method for report in solves] == ["cholesky"]
    assert [report.method for report in solves.logdets] == ["exact"]
    with settings.logdet_method("auto"), record_solves() as solves:
        problem.operator().inv_quad_logdet(dense.randn(len(problem.index), 1), logdet=True)
    assert [report.method for report in solves] == ["ignore"]
    assert [report.method for report in solves.logdets] == ["stochastic"]


def test_a_solve_that_does_not_converge_says_so():
    problem = two_smooth_kernels()
    rhs = dense.randn(len(problem.index), 1)
    with (
        settings.gap_method("ignore"),
        settings.preconditioner_rank(0),
        settings.max_iterations(5),
        record_solves() as solves,
        pytest.warns(NotConvergedWarning, match="stopped after 5 iterations with a relative residual") as warned,
    ):
        problem.operator().solve(rhs)
    assert not solves[0].converged
    assert solves[0].worst_residual > solves[0].tolerance
    assert "fill" not in str(warned[0].message)  # which a sum would refuse


@pytest.mark.parametrize("method", ["fill", "penalize", "spectral"])
def test_methods_that_need_one_eigenbasis_are_refused(method):
    problem = mixture("two", (4, 3))
    with (
        settings.gap_method(method),
        pytest.raises(ValueError, match=f"gap_method: got '{method}' for a sum of kernels, expected 'auto', 'ignore'"),
    ):
        problem.operator().solve(dense.randn(len(problem.index), 1))


def test_nystrom_is_refused():
    with (
        settings.logdet_method("nystrom"),
        pytest.raises(ValueError, match="logdet_method: got 'nystrom' for a sum of kernels"),
    ):
        mixture("two", (4, 3)).operator().logdet()


def test_what_cannot_be_added_is_refused():
    kernel = mixture("two", (4, 3)).kernel()
    rows = kernel.size(-1)
    with pytest.raises(ValueError, match=r"the diagonal is torch\.float32"):
        kernel + DiagLinearOperator(torch.ones(rows))
    with pytest.raises(ValueError, match="got SelectedKroneckerOperator, expected a SelectedKroneckerSumOperator"):
        SelectedKroneckerSumAddedDiagOperator(kernel.linear_ops[0], DiagLinearOperator(torch.ones(rows).double()))
    with pytest.raises(ValueError, match=r"diag: got shape \(3,\), expected"):
        kernel.add_diagonal(torch.ones(3, dtype=torch.float64))


def test_work_is_remembered_and_forgotten():
    """A second solve sets nothing up; numbers changed in place are seen, whichever they are."""
    problem = mixture("all")
    rhs, operator = dense.randn(len(problem.index), 1), problem.operator()
    with settings.solve_tolerance(1e-12), torch.no_grad():
        operator.solve(rhs)
        system = operator.system()
        operator.solve(rhs)
        assert operator.system() is system
        for tensor in (problem.krons[0][0], problem.krons[1][2], problem.roots[0], problem.others[0], problem.noise):
            tensor.mul_(2.0)
            assert operator.system() is not system
            assert dense.relative(operator.solve(rhs), torch.linalg.solve(problem.matrix(), rhs)) < EXACT
            system = operator.system()


def test_second_derivatives_are_refused():
    problem = mixture("two", (4, 3))
    rhs = dense.randn(len(problem.index), 1)
    for value in (problem.operator().solve(rhs).square().sum(), problem.operator().inv_quad(rhs)):
        with pytest.raises(RuntimeError, match="second derivatives"):
            torch.autograd.grad(value, problem.inputs, create_graph=True)


# -- scattered points against a grid ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(9,), (6, 5), (4, 3, 5), (3, 2, 2, 3)], ids=lambda shape: f"{len(shape)} axes")
@pytest.mark.parametrize("pattern", ["one observation", "random"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_scattered_points_against_a_grid_are_a_khatri_rao_product(shape, pattern, dtype, transposed):
    index, points = dense.observed(pattern, shape), 6
    factors = dense.leaves(*(dense.randn(points, size, seed=axis).to(dtype) for axis, size in enumerate(shape)))
    wide = dense.leaves(*(factor.double() for factor in factors))
    operator = KhatriRaoOperator(*factors, col_index=index, transposed=transposed)
    matrix = dense.kron_vectors(wide)[:, index]
    matrix = matrix.mT if transposed else matrix
    right, left = dense.randn(matrix.size(-1), 2, seed=8), dense.randn(matrix.size(-2), 2, seed=9)
    bound = 1e-12 if dtype == torch.float64 else 2e-5
    part = torch.tensor([0, 0, matrix.size(-2) - 1])
    for got, expected in (
        (operator @ right.to(dtype), matrix @ right),
        (operator.mT @ left.to(dtype), matrix.mT @ left),
        (operator.to_dense(), matrix),
        (to_dense(operator[part, :]), matrix[part]),
        (to_dense(operator[:, : matrix.size(-1) // 2 + 1]), matrix[:, : matrix.size(-1) // 2 + 1]),
        (operator[part, part.clamp_max(matrix.size(-1) - 1)], matrix[part, part.clamp_max(matrix.size(-1) - 1)]),
        (to_dense(operator * 3.0), 3.0 * matrix),
    ):
        assert got.dtype == dtype
        assert got.shape == expected.shape
        assert dense.relative(got.detach(), expected.detach()) < bound
        weights = dense.randn(*expected.shape, seed=10)
        ours = torch.autograd.grad((weights.to(dtype) * got).sum(), factors)
        theirs = torch.autograd.grad((weights * expected).sum(), wide, retain_graph=True)
        for gradient, exact in zip(ours, theirs, strict=True):
            assert dense.relative(gradient, exact) < bound


def test_khatri_rao_refuses_what_is_none():
    with pytest.raises(ValueError, match="axis 1 has 4 rows, axis 0 5; expected one row per point for every axis"):
        KhatriRaoOperator(torch.ones(5, 3), torch.ones(4, 2), col_index=torch.arange(3))
    with pytest.raises(ValueError, match="col_index: entry 1 is 6, expected cells 0 to 5"):
        KhatriRaoOperator(torch.ones(5, 3), torch.ones(5, 2), col_index=torch.tensor([0, 6]))


# -- posterior covariances -------------------------------------------------------------------------------------------


def se_between(first, second, length):
    return torch.exp(-(((first[:, None] - second) / length) ** 2))


class Posterior:
    """The posterior of a sum of two product kernels, at cells or scattered points. Lengths and noise are leaves."""

    def __init__(self, where="cells", terms=2, shape=(6, 5), pattern="random"):
        self.index, self.where = dense.observed(pattern, shape), where
        self.axes = [torch.linspace(0.0, 1.0, size, dtype=torch.float64) for size in shape]
        self.lengths, self.noise = dense.leaves(
            torch.tensor([[0.3, 0.5], [0.15, 1.0]]).double()[:terms], torch.ones(1).double()
        )
        self.cells = torch.arange(0, torch.Size(shape).numel(), 2)
        self.points = torch.rand(7, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.scale = 1e-2

    @property
    def inputs(self):
        return [self.lengths, self.noise]

    def _factors(self, lengths):
        return [se_between(x, x, length) for x, length in zip(self.axes, lengths, strict=True)]

    def _rows(self, lengths):
        """Rows of the covariance of the points with the whole axes."""
        columns = self.points.unbind(-1)
        return [se_between(p, x, length) for p, x, length in zip(columns, self.axes, lengths, strict=True)]

    def matrix(self):
        prior = cross = train = 0.0
        for lengths in self.lengths:
            grid = dense.kron(self._factors(lengths))
            train = train + dense.select(grid, self.index)
            if self.where == "cells":
                prior, cross = prior + dense.select(grid, self.cells), cross + grid[self.cells][:, self.index]
            else:
                cross = cross + dense.kron_vectors(self._rows(lengths))[:, self.index]
                prior = prior + self._among_points(lengths)
        train = train + self.scale * self.noise * torch.eye(len(self.index), dtype=torch.float64)
        return prior - cross @ torch.linalg.solve(train, cross.mT)

    def _among_points(self, lengths):
        first, second = (se_between(p, p, length) for p, length in zip(self.points.unbind(-1), lengths, strict=True))
        return first * second

    def where_they_are(self):
        x = torch.cartesian_prod(*self.axes)
        return PredictionPoints(x[self.cells], x[self.index], self.cells)

    def operator(self, **kwargs):
        train, cross, prior = [], [], []
        for lengths in self.lengths:
            factors = self._factors(lengths)
            train.append(SelectedKroneckerOperator(*factors, row_index=self.index, col_index=self.index))
            if self.where == "cells":
                cross.append(SelectedKroneckerOperator(*factors, row_index=self.cells, col_index=self.index))
                prior.append(SelectedKroneckerOperator(*factors, row_index=self.cells, col_index=self.cells))
            else:
                cross.append(KhatriRaoOperator(*self._rows(lengths), col_index=self.index))
                prior.append(DenseLinearOperator(self._among_points(lengths)))
        noise = ConstantDiagLinearOperator(self.scale * self.noise, diag_shape=len(self.index))
        one = len(train) == 1
        return PosteriorCovarianceOperator(
            prior[0] if one else SumLinearOperator(*prior),
            cross[0] if one else SumLinearOperator(*cross),
            (train[0] if one else SelectedKroneckerSumOperator(*train)) + noise,
            **kwargs,
        )


@pytest.mark.parametrize("where", ["cells", "points"])
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("pattern", ["none", "one observation", "block"])
def test_the_posterior_covariance_is_the_dense_one(where, terms, pattern):
    """The diagonal, products and parts of the dense posterior's, and the gradient of its variance."""
    problem = Posterior(where, terms, pattern=pattern)
    exact = problem.matrix()
    with settings.solve_tolerance(1e-12):
        operator = problem.operator()
        x = dense.randn(exact.size(-1), 2)
        variance = operator.diagonal(dim1=-2, dim2=-1)
        assert dense.relative(variance.detach(), exact.diagonal().detach()) < EXACT
        assert dense.relative((operator @ x).detach(), (exact @ x).detach()) < EXACT
        assert dense.relative(operator.to_dense().detach(), exact.detach()) < EXACT
        assert dense.relative(to_dense(operator[2:5, 2:5]).detach(), exact[2:5, 2:5].detach()) < EXACT
        assert dense.relative(to_dense(operator[2:5, 1:3]).detach(), exact[2:5, 1:3].detach()) < EXACT
        part = operator[1:4, 1:4]
        assert isinstance(part, PosteriorCovarianceOperator)
        assert dense.relative(part.diagonal(dim1=-2, dim2=-1).detach(), exact.diagonal()[1:4].detach()) < EXACT
        weights = dense.randn(len(variance), seed=1)
        ours = torch.autograd.grad((weights * variance).sum(), problem.inputs, retain_graph=True)
        whole = torch.autograd.grad((x * (operator @ x)).sum(), problem.inputs)
    theirs = torch.autograd.grad((weights * exact.diagonal()).sum(), problem.inputs, retain_graph=True)
    for gradient, expected in zip(ours, theirs, strict=True):
        assert dense.relative(gradient, expected) < 1e-7
    for gradient, expected in zip(whole, torch.autograd.grad((x * (exact @ x)).sum(), problem.inputs), strict=True):
        assert dense.relative(gradient, expected) < 1e-7


@pytest.mark.parametrize("where", ["cells", "points"])
@pytest.mark.parametrize("memory", [1, 10**4, 2**29])
def test_posterior_in_chunks(where, memory):
    """One point at a time, a few, or all: the same variances and gradients, in as many solves as that takes."""
    problem = Posterior(where)
    exact = problem.matrix().diagonal()
    with settings.solve_tolerance(1e-12), settings.prediction_memory(memory):
        operator = problem.operator()
    with record_solves() as solves:  # outside of the context: a posterior keeps the settings of its making
        variance = operator.diagonal(dim1=-2, dim2=-1)
    (report,) = solves
    assert report.num_rhs == len(exact)
    parts = report.parts
    assert {1: parts >= len(exact), 10**4: 1 < parts < len(exact), 2**29: parts <= 2}[memory]
    assert dense.relative(variance.detach(), exact.detach()) < EXACT
    with settings.solve_tolerance(1e-12):
        ours = torch.autograd.grad(variance.sum(), problem.inputs)
    for gradient, expected in zip(ours, torch.autograd.grad(exact.sum(), problem.inputs), strict=True):
        assert dense.relative(gradient, expected) < 1e-7


def test_chunks_count_the_grid_of_a_sum():
    """A product visits every cell of the grid, however few of them are observed: also for sums."""
    one, two = (Posterior("points", terms, shape=(20, 20), pattern="one observation").operator() for terms in (1, 2))
    assert one.parts._grid_numbers() == two.parts._grid_numbers() == 400


@pytest.mark.parametrize("terms", [1, 2])
def test_posterior_keeps_the_settings_of_its_making(terms):
    problem = Posterior(terms=terms)
    exact = problem.matrix().detach()
    with settings.solve_tolerance(1e-10), settings.gap_method("ignore"):
        operator = problem.operator()
    x = dense.randn(exact.size(-1), 1)
    with record_solves() as solves, torch.no_grad(), settings.solve_tolerance(0.1), settings.gap_method("cholesky"):
        variance = operator.diagonal(dim1=-2, dim2=-1)
        operator @ x
        operator.to_dense()
        operator[:4, :4].diagonal(dim1=-2, dim2=-1)
        assert settings.solve_tolerance.value() == 0.1  # restored to what it was
    assert len(solves) == 4
    for report in solves:
        assert report.tolerance == 1e-10
        assert report.method == "ignore"
        assert report.worst_residual <= 1e-10
    assert dense.relative(variance, exact.diagonal()) < 1e-7


@pytest.mark.parametrize("terms", [1, 2])
def test_low_rank_variances_of_cells(terms):
    """Where the covariance is of low rank to the tolerance, variances of cells need no solves, and are as good."""
    problem = Posterior("cells", terms, shape=(40, 30))
    with torch.no_grad(), record_solves() as solves:
        variance = problem.operator(points=problem.where_they_are()).diagonal(dim1=-2, dim2=-1)
    exact = problem.matrix().diagonal().detach()
    assert sum(report.iterations for report in solves) == 0
    assert float((variance - exact).abs().max()) < 1e-6
    with torch.no_grad(), settings.gap_method("ignore"), record_solves() as solves:
        asked = problem.operator(points=problem.where_they_are()).diagonal(dim1=-2, dim2=-1)
    assert sum(report.num_rhs for report in solves) == len(problem.cells)
    assert float((asked - exact).abs().max()) < 1e-6


def test_root_of_a_posterior_is_exact():
    """The root is by Cholesky for any `max_cholesky_size`: a Lanczos root loses variance."""
    problem = Posterior("points")
    with torch.no_grad(), settings.solve_tolerance(1e-12):
        root = problem.operator().root_decomposition()
    exact = problem.matrix().detach()
    assert dense.relative(to_dense(root), exact) < 1e-7
