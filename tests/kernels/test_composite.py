"""Sums and products with grid kernels inside against the same of plain kernels: values, gradients, structure kept."""

import warnings

import gpytorch
import linear_operator
import pytest
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    IndexKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PolynomialKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from linear_operator.operators import (
    DenseLinearOperator,
    LinearOperator,
    LowRankRootLinearOperator,
    MatmulLinearOperator,
    RootLinearOperator,
    SumLinearOperator,
)

import gpytorch_gaps as gaps
from gpytorch_gaps import CartesianGrid, GappyGridKernel, settings
from gpytorch_gaps.operators import (
    KernelRowsOperator,
    KhatriRaoOperator,
    SelectedKroneckerOperator,
    SelectedKroneckerSumOperator,
)
from tests import _dense as dense
from tests.workflow._pairs import Model

EXACT = {"rtol": 1e-11, "atol": 1e-11}
AXES = [torch.linspace(0, 1, 7, dtype=torch.float64), torch.linspace(-1, 1, 6, dtype=torch.float64)]
GRID = CartesianGrid(AXES)


class Plain(Kernel):
    """A grid kernel by the book: the product of kernels on one column each, without a grid."""

    def __init__(self, kernels, active_dims=None):
        super().__init__(active_dims=active_dims)
        self.kernels = torch.nn.ModuleList(kernels)

    def forward(self, x1, x2, diag=False, **params):
        value = 1.0
        for i, kernel in enumerate(self.kernels):
            part = kernel(x1[..., i : i + 1], x2[..., i : i + 1], diag=diag)
            value = value * (part if diag else part.to_dense())
        return value


class Bump(Kernel):
    """A kernel of two columns at once that is no product of kernels of one."""

    has_lengthscale = True

    def forward(self, x1, x2, diag=False, **params):
        distance = self.covar_dist(x1 / self.lengthscale, x2 / self.lengthscale, diag=diag)
        return 1.0 / (1.0 + distance.square())


def grid_kernel(plain, first=RBFKernel, second=MaternKernel, active_dims=None):
    kernels = [first(), second()]
    return Plain(kernels, active_dims) if plain else GappyGridKernel(kernels, GRID, active_dims)


# what to build of a maker of grid kernels; the same is built of plain ones
CASES = {
    "grid + grid": lambda g: ScaleKernel(g()) + ScaleKernel(g(MaternKernel, PeriodicKernel)),
    "grid + grid + grid": lambda g: g() + ScaleKernel(g(RQKernel, RBFKernel)) + g(PeriodicKernel, RBFKernel),
    "grid + linear": lambda g: g() + LinearKernel(),
    "linear + grid": lambda g: LinearKernel() + ScaleKernel(g()),
    "linear of one axis + grid": lambda g: LinearKernel(active_dims=[1]) + g(),
    "RBF of one axis + grid": lambda g: ScaleKernel(RBFKernel(active_dims=[1])) + g(),
    "grid + RBF of both": lambda g: g() + RBFKernel(ard_num_dims=2),
    "grid * grid": lambda g: g() * ScaleKernel(g(MaternKernel, PeriodicKernel)),
    "grid * linear": lambda g: g() * LinearKernel(),
    "linear * grid": lambda g: LinearKernel() * g(),
    "grid * linear with a variance a column": lambda g: g() * LinearKernel(ard_num_dims=2),
    "grid * linear of swapped columns": lambda g: g() * LinearKernel(ard_num_dims=2, active_dims=[1, 0]),
    "grid * polynomial of one axis": lambda g: g() * PolynomialKernel(power=2, active_dims=[0]),
    "grid * (linear + RBF of one axis)": lambda g: g() * (LinearKernel() + RBFKernel(active_dims=[0])),
    "linear * linear * grid": lambda g: LinearKernel() * LinearKernel() * g(),
    "scale of scale": lambda g: ScaleKernel(ScaleKernel(g()) + ScaleKernel(ScaleKernel(g(RBFKernel, RBFKernel)))),
    "sum times sum": lambda g: (g() + g(RBFKernel, RQKernel)) * (g(MaternKernel, RBFKernel) + LinearKernel()),
    "scale of a product in a sum": lambda g: ScaleKernel(g() * RBFKernel(active_dims=[0])) + g() + LinearKernel(),
    "non-separable + grid": lambda g: Bump() + g(),
    "non-separable * grid": lambda g: Bump() * ScaleKernel(g()),
    "(non-separable + grid) * grid": lambda g: (ScaleKernel(Bump()) + g()) * g(MaternKernel, RBFKernel),
}
SEPARABLE = {case for case in CASES if "non-separable" not in case and "RBF of both" not in case}


def both(case):
    """Ours and plain, with the same parameters, none at its default."""
    torch.manual_seed(0)
    ours = CASES[case](lambda *kinds: grid_kernel(False, *kinds)).double()
    plain = CASES[case](lambda *kinds: grid_kernel(True, *kinds)).double()
    copy_parameters(ours, plain)
    return ours, plain


def copy_parameters(ours, plain):
    """Parameters correspond in order."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            a.copy_(0.6 * torch.randn(a.shape, generator=generator, dtype=torch.float64) - 0.3)
            b.copy_(a)


TRAIN = GRID.points(dense.observed("random", GRID.shape, 0.4))
TEST = {
    "all cells": GRID.points(),
    "a few cells": GRID.points(torch.tensor([3, 41, 17, 3])),
    "a grid of their own": CartesianGrid([AXES[0] + 0.01, AXES[1][:3] - 0.02]).points(),
    "scattered": dense.randn(19, 2),
    "on and off the grid": torch.cat([GRID.points()[:9], dense.randn(8, 2)]),
    "training points": TRAIN.clone(),
}


def pairs_of_inputs():
    yield "train x train", TRAIN, TRAIN
    for name, x in TEST.items():
        yield f"{name} x train", x, TRAIN
        yield f"train x {name}", TRAIN, x
        yield f"{name} x {name}", x, x


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_plain_kernels(case):
    ours, plain = both(case)
    for name, x1, x2 in pairs_of_inputs():
        expected = plain(x1, x2).to_dense()
        covariance = ours(x1, x2).evaluate_kernel()
        assert covariance.shape == expected.shape, name
        assert torch.allclose(covariance.to_dense(), expected, **EXACT), name
        rhs = dense.randn(len(x2), 2)
        assert torch.allclose(covariance @ rhs, expected @ rhs, **EXACT), name
        assert torch.allclose(covariance.mT @ (expected @ rhs), expected.mT @ (expected @ rhs), **EXACT), name
    for x in (TRAIN, *TEST.values()):
        expected = plain(x, x).to_dense().diagonal()
        assert torch.allclose(ours(x, diag=True), expected, **EXACT)
        assert torch.allclose(ours(x).diagonal(dim1=-1, dim2=-2), expected, **EXACT)
        assert torch.allclose(ours(x).evaluate_kernel().diagonal(dim1=-1, dim2=-2), expected, **EXACT)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_plain_kernels(case):
    """Gradients of a product with the covariance, for every parameter."""
    ours, plain = both(case)
    for name, x1, x2 in pairs_of_inputs():
        rhs, weights = dense.randn(len(x2), 2), dense.randn(len(x1), 2, seed=1)
        results = []
        for kernel in (ours, plain):
            value = (weights * (kernel(x1, x2).evaluate_kernel() @ rhs)).sum()
            results.append(torch.autograd.grad(value, list(kernel.parameters())))
        for got, expected in zip(*results, strict=True):
            assert torch.allclose(got, expected, rtol=1e-9, atol=1e-9), name


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_the_points(case):
    ours, plain = both(case)
    for name in ("a few cells", "scattered"):
        x, results = TEST[name].clone().requires_grad_(), []
        for kernel in (ours, plain):
            value = kernel(x, TRAIN).to_dense()
            results.append(torch.autograd.grad((value * dense.randn(*value.shape)).sum(), x)[0])
        assert torch.allclose(*results, rtol=1e-9, atol=1e-9), name


# -- structure -------------------------------------------------------------------------------------------------------


def parts(covariance):
    """The operators inside, all the way down."""
    yield covariance
    for argument in covariance._args:
        if isinstance(argument, LinearOperator):
            yield from parts(argument)


def largest_tensor(covariance):
    return max(tensor.numel() for tensor in covariance.representation())


@pytest.mark.parametrize("case", sorted(SEPARABLE))
def test_structure_is_kept(case):
    """Sums are of Kronecker products and low-rank terms; no tensor of the size of the matrix is formed."""
    kernel, _ = both(case)
    covariance = kernel(TRAIN).evaluate_kernel()
    assert isinstance(covariance, SelectedKroneckerOperator | SelectedKroneckerSumOperator)
    for name in ("all cells", "a few cells", "a grid of their own", "scattered"):
        cross = kernel(TEST[name], TRAIN).evaluate_kernel()
        terms = cross.linear_ops if isinstance(cross, SumLinearOperator) else [cross]
        kinds = (SelectedKroneckerOperator, KhatriRaoOperator, MatmulLinearOperator)
        assert all(isinstance(term, kinds) for term in terms), (name, terms)
        assert not any(isinstance(term, KhatriRaoOperator) for term in terms) or name == "scattered"
        assert not any(isinstance(part, SelectedKroneckerOperator) for part in terms) or name != "scattered"
    for x in (TRAIN, TEST["all cells"]):
        assert largest_tensor(kernel(x, TRAIN).evaluate_kernel()) < len(x) * len(TRAIN) / 4


ROOTS = (RootLinearOperator, LowRankRootLinearOperator)


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        ("grid + grid", [SelectedKroneckerOperator] * 2),
        ("grid + linear", [SelectedKroneckerOperator, ROOTS]),
        ("linear + grid", [ROOTS, SelectedKroneckerOperator]),
        ("RBF of one axis + grid", [SelectedKroneckerOperator] * 2),
        ("grid + RBF of both", [SelectedKroneckerOperator, DenseLinearOperator]),
        ("grid * linear", [SelectedKroneckerOperator] * 2),  # a term for each column of the linear kernel
        ("grid * (linear + RBF of one axis)", [SelectedKroneckerOperator] * 3),
        ("linear * linear * grid", [SelectedKroneckerOperator] * 4),
        ("sum times sum", [SelectedKroneckerOperator] * 6),
        ("non-separable + grid", [DenseLinearOperator, SelectedKroneckerOperator]),
        ("non-separable * grid", [DenseLinearOperator]),
    ],
)
def test_sums_keep_the_structure_of_their_terms(case, kinds):
    kernel, _ = both(case)
    covariance = kernel(TRAIN).evaluate_kernel()
    assert type(covariance) is SelectedKroneckerSumOperator
    assert len(covariance.linear_ops) == len(kinds)
    for term, kind in zip(covariance.linear_ops, kinds, strict=True):
        assert isinstance(term, kind)


def test_a_product_of_grid_kernels_is_one_kronecker_product():
    kernel, _ = both("grid * grid")
    for x in (TRAIN, TEST["all cells"], TEST["a grid of their own"]):
        assert type(kernel(x, TRAIN).evaluate_kernel()) is SelectedKroneckerOperator
    assert type(kernel(TEST["scattered"], TRAIN).evaluate_kernel()) is KhatriRaoOperator


def test_a_batch_of_sums():
    """Also one member of the kernel, or of the covariance."""
    batch = torch.Size([3])
    lengths = torch.tensor([0.2, 0.4, 0.9], dtype=torch.float64).view(3, 1, 1)
    results = []
    for make in (lambda k: GappyGridKernel(k, GRID), Plain):
        first = [RBFKernel(batch_shape=batch), MaternKernel(batch_shape=batch)]
        kernel = ScaleKernel(make(first), batch_shape=batch) + LinearKernel(batch_shape=batch)
        kernel = (kernel * make([RBFKernel(), RBFKernel()]) + make([RBFKernel(), MaternKernel()])).double()
        for own in first:
            own.lengthscale = lengths
        kernel.kernels[0].kernels[0].kernels[0].outputscale = lengths.view(3)
        assert kernel.batch_shape == (3,)
        values = []
        for x in (TRAIN, *TEST.values()):
            covariance = kernel(x, TRAIN)
            assert covariance.shape == (3, len(x), len(TRAIN))
            values += [covariance.to_dense(), kernel(x).to_dense(), kernel(x, diag=True)]
            if make is not Plain:
                assert torch.allclose(kernel[2](x, TRAIN).to_dense(), covariance.to_dense()[2], **EXACT)
                assert torch.allclose(kernel(x, TRAIN)[1].to_dense(), covariance.to_dense()[1], **EXACT)
        results.append(values)
    for got, expected in zip(*results, strict=True):
        assert got.shape == expected.shape
        assert torch.allclose(got, expected, **EXACT)


# -- columns that are not the grid's ---------------------------------------------------------------------------------


def wide(x):
    """Four columns: the grid's second, one of its own, the grid's first, another of its own."""
    other = dense.randn(len(x), 2, seed=len(x))
    return torch.stack([x[:, 1], other[:, 0], x[:, 0], other[:, 1]], -1)


WIDE = {
    "grid + RBF of other columns": lambda g: g([2, 0]) + RBFKernel(active_dims=[1, 3], ard_num_dims=2),
    "grid * RBF of another column": lambda g: g([2, 0]) * RBFKernel(active_dims=[3]),
    "grid * linear of all columns": lambda g: g([2, 0]) * LinearKernel(ard_num_dims=4),
    "grid * RBF of one of its columns": lambda g: g([2, 0]) * RBFKernel(active_dims=[0]),
    "grid * linear of its columns": lambda g: g([2, 0]) * LinearKernel(ard_num_dims=2, active_dims=[0, 2]),
    "linear of all columns + scaled grid": lambda g: LinearKernel() + ScaleKernel(g([2, 0])),
    "nested": lambda g: (
        ScaleKernel(RBFKernel(active_dims=[1]) + g([2, 0])) * (g([2, 0]) + LinearKernel(active_dims=[3]))
    ),
    "mixed axes": lambda g: g([2, 0]) + RBFKernel(active_dims=[0, 3], ard_num_dims=2),
    "a sum with columns of its own": lambda g: restricted(AdditiveKernel(g([1, 0]), LinearKernel(active_dims=[2]))),
}


def restricted(kernel):
    """Sees columns 0, 2 and 3 only: those inside count from there."""
    kernel.active_dims = torch.tensor([0, 2, 3])
    return kernel


@pytest.mark.parametrize("case", WIDE)
def test_columns_that_are_not_the_grids(case):
    ours = WIDE[case](lambda columns: grid_kernel(False, active_dims=columns)).double()
    plain = WIDE[case](lambda columns: grid_kernel(True, active_dims=columns)).double()
    copy_parameters(ours, plain)
    train = wide(TRAIN)
    for name, x in TEST.items():
        for x1, x2 in ((wide(x), train), (train, wide(x)), (wide(x), wide(x))):
            expected = plain(x1, x2).to_dense()
            assert torch.allclose(ours(x1, x2).to_dense(), expected, **EXACT), name
        assert torch.allclose(ours(wide(x), diag=True), plain(wide(x), diag=True), **EXACT)
    got, expected = (
        torch.autograd.grad((kernel(train).evaluate_kernel() @ train).square().sum(), list(kernel.parameters()))
        for kernel in (ours, plain)
    )
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)


def test_lifting_keeps_to_the_grids_columns():
    """A kernel of one of the grid's columns joins it, wherever that column stands."""
    kernel = (grid_kernel(False, active_dims=[2, 0]) * RBFKernel(active_dims=[0])).double()
    assert type(kernel(wide(TRAIN)).evaluate_kernel()) is SelectedKroneckerOperator
    kernel = (grid_kernel(False, active_dims=[2, 0]) * RBFKernel(active_dims=[1])).double()
    assert not any(isinstance(part, SelectedKroneckerOperator) for part in parts(kernel(wide(TRAIN)).evaluate_kernel()))


def test_two_grids_of_different_columns():
    """Their products have no common cells; a prediction must not take the cells of one for those of the other."""
    first, second = CartesianGrid([AXES[0]]), CartesianGrid([AXES[1][:5]])
    x = torch.cartesian_prod(AXES[0], AXES[1][:5])[::2]
    test_x = torch.cat([torch.cartesian_prod(AXES[0], AXES[1][:5])[1::2], dense.randn(4, 2)])
    models = []
    for make in (
        lambda k, grid, columns: GappyGridKernel([k], grid, active_dims=columns),
        lambda k, grid, columns: Plain([k], active_dims=columns),
    ):
        a, b = make(RBFKernel(), first, [0]), make(MaternKernel(), second, [1])
        for kernel in (a + b, a * b):
            kernel = ScaleKernel(kernel).double()
            models.append(Model(x, x.sum(-1).sin(), gpytorch.likelihoods.GaussianLikelihood(), kernel).double())
    for ours, plain in zip(models[:2], models[2:], strict=True):
        for points in (test_x, test_x[:-4], x):
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore", gpytorch.utils.warnings.GPInputWarning)
                got, expected = ours.eval()(points), plain.eval()(points)
                assert torch.allclose(got.mean, expected.mean, atol=1e-5)
                assert torch.allclose(got.variance, expected.variance, atol=1e-5)


@pytest.mark.parametrize("max_cholesky", [800, 0])
@pytest.mark.parametrize("combine", [torch.add, torch.mul], ids=["sum", "product"])
def test_cells_of_one_grid_are_not_those_of_another(combine, max_cholesky):
    """Two grids of the same shape, the same training cells on both, and test points that are other cells on each."""
    axis = torch.linspace(0, 1, 40, dtype=torch.float64)
    grids = CartesianGrid([axis]), CartesianGrid([2 * axis])
    x = torch.stack([axis, 2 * axis], -1)[::2]
    test_x = torch.stack([axis, 2 * axis.flip(0)], -1)
    results = []
    for make, size in (
        (lambda k, grid, columns: GappyGridKernel([k], grid, active_dims=columns), max_cholesky),
        (lambda k, grid, columns: Plain([k], active_dims=columns), 800),
    ):
        first, second = make(RBFKernel(), grids[0], [0]), make(RBFKernel(), grids[1], [1])
        kernel = first + second if combine is torch.add else first * second
        model = Model(x, x.sum(-1).sin(), gpytorch.likelihoods.GaussianLikelihood(), kernel).double().eval()
        with torch.no_grad(), linear_operator.settings.max_cholesky_size(size):
            posterior = model(test_x)
            results.append([posterior.mean, posterior.variance, posterior.covariance_matrix])
    for got, expected in zip(*results, strict=True):
        assert torch.allclose(got, expected, atol=1e-5)


# -- what has no grid kernel inside, and what is added outside of kernels --------------------------------------------


def test_kernels_without_a_grid_are_left_alone():
    """What the package does to GPyTorch's sums and products at import concerns those with a grid kernel only."""
    upstream = {kind: kind.forward.__wrapped__ for kind in (AdditiveKernel, ProductKernel)}
    x1, x2 = dense.randn(8, 2), dense.randn(5, 2, seed=1)
    kernels = [
        RBFKernel() + LinearKernel(),
        RBFKernel(active_dims=[0]) * MaternKernel(active_dims=[1]),
        ScaleKernel(LinearKernel()) * RBFKernel() + PeriodicKernel(),
        IndexKernel(num_tasks=2) * IndexKernel(num_tasks=2),
    ]
    for kernel in kernels:
        kernel = kernel.double()
        own_x1, own_x2 = (x1, x2) if not isinstance(kernel.kernels[0], IndexKernel) else (x1[:, :1] > 0, x2[:, :1] > 0)
        for second in (own_x1, own_x2):
            got, expected = kernel.forward(own_x1, second), upstream[type(kernel)](kernel, own_x1, second)
            assert type(got) is type(expected)
            assert torch.equal(linear_operator.to_dense(got), linear_operator.to_dense(expected))
        got = kernel.forward(own_x1, own_x1, diag=True)
        expected = upstream[type(kernel)](kernel, own_x1, own_x1, diag=True)
        assert torch.equal(linear_operator.to_dense(got), linear_operator.to_dense(expected))
    model = Model(x1, x1[:, 0], gpytorch.likelihoods.GaussianLikelihood(), kernels[0]).double().eval()
    model(x2)
    assert type(model.prediction_strategy).__module__.startswith("gpytorch.")


def test_only_grid_kernels_bring_their_strategy():
    for case in CASES:
        ours, plain = both(case)
        for kernel, package in ((ours, "gpytorch_gaps"), (plain, "gpytorch")):
            model = Model(TRAIN, TRAIN[:, 0], gpytorch.likelihoods.GaussianLikelihood(), kernel).double().eval()
            with torch.no_grad():
                model(TEST["scattered"])
            assert type(model.prediction_strategy).__module__.partition(".")[0] == package, case


class AddsInForward(gpytorch.models.ExactGP):
    """Covariances are added in `forward`, not kernels."""

    def __init__(self, x, y, likelihood, kernels):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.kernels = torch.nn.ModuleList(kernels)

    def forward(self, x):
        first, *others = [kernel(x) for kernel in self.kernels]
        for other in others:
            first = first + other
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), first)


ADDED = {
    "grid + grid": lambda g: [ScaleKernel(g()), ScaleKernel(g(RBFKernel, PeriodicKernel))],
    "grid + linear": lambda g: [g(), LinearKernel()],
    "linear + grid": lambda g: [LinearKernel(), g()],
    "non-separable + grid + grid": lambda g: [Bump(), g(), g(MaternKernel, RBFKernel)],
    "a sum + grid": lambda g: [g() + LinearKernel(), g(MaternKernel, RBFKernel)],
}


@pytest.mark.parametrize("max_cholesky", [800, 0])
@pytest.mark.parametrize("case", ADDED)
def test_covariances_added_in_forward(case, max_cholesky):
    y = TRAIN.sum(-1).sin() + 0.1 * dense.randn(len(TRAIN))
    ours = AddsInForward(TRAIN, y, gaps.GappyGridLikelihood(), ADDED[case](lambda *k: grid_kernel(False, *k))).double()
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    plain = AddsInForward(TRAIN, y, likelihood, ADDED[case](lambda *k: grid_kernel(True, *k))).double()
    copy_parameters(ours, plain)
    results = []
    for model, size in ((ours, max_cholesky), (plain, 800)):
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        with linear_operator.settings.max_cholesky_size(size), settings.logdet_method("exact"):
            output = model(TRAIN)
            if model is ours:
                noisy = model.likelihood(output).lazy_covariance_matrix
                assert type(noisy._linear_op) is SelectedKroneckerSumOperator
            loss = mll(output, y)
            gradient = torch.autograd.grad(loss, list(model.parameters()))
            model.eval()
            with torch.no_grad():
                posterior = model.likelihood(model(TEST["on and off the grid"]))
                results.append([loss, *gradient, posterior.mean, posterior.variance])
    for got, expected in zip(*results, strict=True):
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5)


# -- memory ----------------------------------------------------------------------------------------------------------

ROWS_CASES = ["non-separable + grid", "(non-separable + grid) * grid", "grid + RBF of both"]


def has_rows(covariance):
    return any(isinstance(part, KernelRowsOperator) for part in parts(covariance))


@pytest.mark.parametrize("case", ["non-separable + grid", "grid + RBF of both"])
def test_covariances_too_large_to_hold_are_evaluated_by_rows(case):
    kernel, plain = both(case)
    x = TEST["all cells"]
    needed = 8 * len(x) * len(TRAIN)
    with torch.no_grad():
        assert not has_rows(kernel(x, TRAIN).evaluate_kernel())
        with settings.prediction_memory(4 * needed):
            assert not has_rows(kernel(x, TRAIN).evaluate_kernel())
        with settings.prediction_memory(4 * needed - 1):
            covariance = kernel(x, TRAIN).evaluate_kernel()
            assert has_rows(covariance)
    with settings.prediction_memory(1):
        assert not has_rows(kernel(x, TRAIN).evaluate_kernel())  # to be differentiated
    expected = plain(x, TRAIN).to_dense()
    for memory in (1, 10_000, 2**29):
        with torch.no_grad(), settings.prediction_memory(memory):
            rhs = dense.randn(len(TRAIN), 3)
            assert torch.allclose(covariance @ rhs, expected @ rhs, **EXACT)
            assert torch.allclose(covariance @ rhs[:, 0], expected @ rhs[:, 0], **EXACT)
            assert torch.allclose(covariance.mT @ (expected @ rhs), expected.mT @ (expected @ rhs), **EXACT)
            assert torch.allclose(covariance.to_dense(), expected, **EXACT)
            for index in [(slice(3, 9), slice(None)), (torch.tensor([4, 1, 1]), slice(None, None, 2))]:
                assert torch.allclose(covariance[index].to_dense(), expected[index], **EXACT)
            both_indices = torch.tensor([4, 1, 0]), torch.tensor([2, 2, 7])
            assert torch.allclose(linear_operator.to_dense(covariance[both_indices]), expected[both_indices], **EXACT)
            square = kernel(x).evaluate_kernel()
            assert torch.allclose(square.diagonal(dim1=-1, dim2=-2), plain(x, diag=True), **EXACT)
            assert torch.allclose(square.to_dense(), plain(x).to_dense(), **EXACT)


@pytest.mark.parametrize("max_cholesky", [800, 0])
@pytest.mark.parametrize("case", ROWS_CASES)
def test_predictions_by_rows(case, max_cholesky):
    """Nothing of the posterior depends on how much memory there is."""
    kernel, plain = both(case)
    y = TRAIN.sum(-1).sin() + 0.1 * dense.randn(len(TRAIN))
    model = Model(TRAIN, y, gaps.GappyGridLikelihood(), kernel).double().eval()
    reference = Model(TRAIN, y, gpytorch.likelihoods.GaussianLikelihood(), plain).double().eval()
    x = TEST["on and off the grid"]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        expected = reference(x)
        with (
            settings.prediction_memory(30_000),  # bytes: some rows at a time
            settings.solve_tolerance(1e-10),
            linear_operator.settings.max_cholesky_size(max_cholesky),
        ):
            posterior = model(x)
            got = posterior.mean, posterior.variance, posterior.covariance_matrix
        wanted = expected.mean, expected.variance, expected.covariance_matrix
        for ours, theirs in zip(got, wanted, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_a_batch_by_rows():
    batch = torch.Size([2])
    bump = ScaleKernel(Bump(batch_shape=batch), batch_shape=batch)
    kernel = (GappyGridKernel([RBFKernel(), MaternKernel()], GRID) + bump).double()
    kernel.kernels[1].outputscale = torch.tensor([0.5, 2.0], dtype=torch.float64)
    x = TEST["all cells"]
    expected = kernel(x, TRAIN).to_dense().detach()
    assert expected.shape == (2, len(x), len(TRAIN))
    with torch.no_grad(), settings.prediction_memory(1000):
        covariance = kernel(x, TRAIN).evaluate_kernel()
        assert has_rows(covariance)
        rhs = dense.randn(2, len(TRAIN), 3)
        assert torch.allclose(covariance @ rhs, expected @ rhs, **EXACT)
        assert torch.allclose(covariance @ rhs[0], expected @ rhs[0], **EXACT)
        assert torch.allclose(covariance.to_dense(), expected, **EXACT)
        assert torch.allclose(covariance[1].to_dense(), expected[1], **EXACT)
        assert torch.allclose(covariance[..., 3:7, :].to_dense(), expected[..., 3:7, :], **EXACT)


def test_a_dense_product_beyond_the_memory_warns():
    kernel, _ = both("non-separable * grid")
    with (
        settings.prediction_memory(1000),
        pytest.warns(ResourceWarning, match="stored densely.*more than prediction_memory"),
    ):
        kernel(TRAIN).to_dense()
