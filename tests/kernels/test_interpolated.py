"""Structured kernel interpolation with our covariance: the kernel, the likelihood and predictions, against dense."""

import copy
import math
import pickle

import gpytorch
import pytest
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    AdditiveStructureKernel,
    GridInterpolationKernel,
    MaternKernel,
    PeriodicKernel,
    ProductKernel,
    RBFKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)

from gpytorch_gaps import CartesianGrid, GappyGridKernel, preconditioned_ski, record_solves, settings
from gpytorch_gaps.linalg.interpolation import GridInterpolation
from gpytorch_gaps.operators import InterpolatedKroneckerOperator, SelectedKroneckerSumOperator

UNIT = ((0.0, 1.0), (0.0, 1.0))
NUM_POINTS, NOISE = 1000, 1e-2


def rand(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ard(*lengthscales):
    kernel = RBFKernel(ard_num_dims=len(lengthscales))
    kernel.lengthscale = torch.tensor(lengthscales)
    return kernel


def one(kernel, lengthscale):
    kernel.lengthscale = lengthscale
    return kernel


def ski(base, sizes=(60, 90), **options):
    return GridInterpolationKernel(base, list(sizes), **(options or {"grid_bounds": UNIT}))


# -- covariance --------------------------------------------------------------------------------------------------------


def scaled(base, scale):
    kernel = ScaleKernel(base)
    kernel.outputscale = scale
    return kernel


BASES = {
    "isotropic": lambda: one(RBFKernel(), 0.3),
    "ARD": lambda: ard(0.2, 0.9),
    "a scale inside counts once": lambda: scaled(ard(0.2, 0.9), 2.5),
    "periodic": lambda: one(PeriodicKernel(), 2.0),
    "a product": lambda: one(RBFKernel(), 0.5) * ard(0.6, 0.9),
    "one column each": lambda: one(RBFKernel(active_dims=[1]), 0.2) * one(MaternKernel(active_dims=[0]), 0.7),
    "a sum on one column": lambda: (
        (one(PeriodicKernel(active_dims=[1]), 2.0) + one(RBFKernel(active_dims=[1]), 0.3))
        * one(RBFKernel(active_dims=[0]), 0.4)
    ),
    "one column only": lambda: scaled(one(RBFKernel(active_dims=[1]), 0.3), 3.0),
}


@pytest.mark.parametrize("base", BASES.values(), ids=BASES.keys())
def test_the_covariance_is_that_of_the_base_kernel(base):
    """Up to the error of cubic interpolation, which a finer grid reduces; on axes of different lengths."""
    own, x1, x2 = base().double(), rand(50, 2), rand(30, 2, seed=1)
    exact = own(x1, x2).to_dense()
    errors = []
    for sizes in ((60, 90), (120, 180)):
        kernel = preconditioned_ski(ski(own, sizes)).double()
        covariance = kernel(x1, x2).evaluate_kernel()
        assert isinstance(covariance, InterpolatedKroneckerOperator)
        errors.append((covariance.to_dense() - exact).abs().max().item())
        torch.testing.assert_close(kernel(x1, x1, diag=True), covariance_diagonal(kernel, x1), rtol=1e-12, atol=1e-12)
    assert errors[0] < 1e-2
    assert errors[1] < 0.3 * errors[0]


def covariance_diagonal(kernel, x):
    return kernel(x).to_dense().diagonal(dim1=-2, dim2=-1)


def test_matern_kernels_are_products_of_one_dimensional_ones_as_in_gpytorch():
    base, x = one(MaternKernel(nu=2.5), 0.4).double(), rand(40, 2)
    ours = preconditioned_ski(ski(base, (80, 80))).double()(x).to_dense()
    theirs = ski(base, (80, 80)).double()(x).to_dense()
    columns = [base(x[:, [i]]).to_dense() for i in range(2)]
    torch.testing.assert_close(ours, columns[0] * columns[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)  # whose grid is rounded to float32


@pytest.mark.parametrize("num_dims", [1, 3])
def test_any_number_of_axes(num_dims):
    base, x = one(RBFKernel(), 0.5).double(), rand(40, num_dims)
    kernel = preconditioned_ski(ski(base, range(30, 30 + num_dims), grid_bounds=((0.0, 1.0),) * num_dims)).double()
    torch.testing.assert_close(kernel(x).to_dense(), base(x).to_dense(), rtol=1e-4, atol=1e-4)


def test_active_dims_and_batches():
    base = RBFKernel(batch_shape=torch.Size([3]))
    base.lengthscale = torch.tensor([0.3, 0.5, 0.7]).view(3, 1, 1)
    kernel = preconditioned_ski(ski(base, grid_bounds=UNIT, active_dims=[2, 0])).double()
    x = rand(20, 3)
    for points in (x, x.expand(3, 20, 3)):
        covariance = kernel(points)
        assert covariance.shape == (3, 20, 20)
        expected = base(x[:, [2, 0]].expand(3, 20, 2)).to_dense()
        torch.testing.assert_close(covariance.to_dense(), expected, rtol=1e-4, atol=1e-4)


def test_float32_models_evaluate_their_kernel_in_float64():
    base, x = one(RBFKernel(), 0.3), rand(30, 2)
    covariance = preconditioned_ski(ski(base))(x.float()).evaluate_kernel()
    assert covariance.dtype == torch.float32
    assert covariance.factors[0].dtype == torch.float64


# -- what is converted -------------------------------------------------------------------------------------------------


def test_hyperparameters_are_shared_and_state_dicts_alike():
    kernel = ScaleKernel(ski(ard(0.2, 0.4))) + ScaleKernel(RBFKernel())
    ours = preconditioned_ski(kernel)
    assert {name: id(p) for name, p in ours.named_parameters()} == {
        name: id(p) for name, p in kernel.named_parameters()
    }
    assert list(ours.state_dict()) == list(kernel.state_dict())
    assert type(kernel.kernels[0].base_kernel) is GridInterpolationKernel  # the user's own is left as it was
    assert preconditioned_ski(ours).kernels[0].base_kernel is ours.kernels[0].base_kernel
    assert kernel.kernels[1] is ours.kernels[1]
    ours.load_state_dict(copy.deepcopy(kernel).state_dict())


def test_copies_and_pickles():
    kernel = preconditioned_ski(ScaleKernel(ski(RBFKernel()))).double()
    x = rand(10, 2)
    expected = kernel(x).to_dense()
    for other in (copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
        assert torch.equal(other(x).to_dense(), expected)


def test_sums_are_ours_and_keep_the_grid_kernel_beside_them():
    x = rand(40, 2)
    both = preconditioned_ski(ski(one(RBFKernel(), 0.3)) + ScaleKernel(ski(MaternKernel(), (30, 40)))).double()
    covariance = both(x).evaluate_kernel()
    assert isinstance(covariance, SelectedKroneckerSumOperator)
    expected = sum(own(x).to_dense() for own in both.kernels)
    torch.testing.assert_close(covariance.to_dense(), expected)
    cells = CartesianGrid([torch.linspace(0, 1, 6).double(), torch.linspace(0, 1, 7).double()])
    beside = GappyGridKernel([RBFKernel(), RBFKernel()], cells) + preconditioned_ski(ski(RBFKernel()))
    points = cells.points()
    expected = sum(own(points).to_dense() for own in beside.double().kernels)
    torch.testing.assert_close(beside(points).to_dense(), expected)


REFUSED = {
    "no kernel": (lambda: preconditioned_ski("RBF"), "got str"),
    "none inside": (lambda: preconditioned_ski(ScaleKernel(RBFKernel())), "GridInterpolationKernel inside"),
    "in a product": (lambda: preconditioned_ski(ski(RBFKernel()) * RBFKernel()), "inside the kernel ProductKernel"),
    "in a structure": (
        lambda: preconditioned_ski(AdditiveStructureKernel(ski(RBFKernel(), [9], grid_bounds=((0.0, 1.0),)), 2)),
        "inside the kernel AdditiveStructureKernel",
    ),
    "few places": (lambda: preconditioned_ski(ski(RBFKernel(), (5, 9))), "at least 6 places"),
    "a sum": (lambda: preconditioned_ski(ski(RBFKernel() + MaternKernel())), r"AdditiveKernel on 2 columns.*a sum is"),
    "a sum over columns": (
        lambda: preconditioned_ski(ski(RBFKernel(active_dims=[0]) + RBFKernel(active_dims=[1]))),
        "AdditiveKernel on 2 columns",
    ),
    "a mixture": (
        lambda: preconditioned_ski(ski(SpectralMixtureKernel(num_mixtures=2, ard_num_dims=2))),
        "SpectralMixtureKernel on 2 columns",
    ),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_kernels(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_refused_inputs():
    kernel = preconditioned_ski(ski(RBFKernel())).double()
    x = rand(5, 2)
    for call, message in (
        (lambda: kernel(x + 0.5), r"column 0 reaches .* a larger grid_bounds"),
        (lambda: kernel(x[:, :1]), "x1: got 1 columns, expected 2"),
        (lambda: kernel(torch.stack([x, rand(5, 2, seed=1)])), "batch of different points"),
        (lambda: kernel(x.clone().requires_grad_(True)), "require a gradient"),
    ):
        with pytest.raises(ValueError, match=message):
            call().to_dense()
    with pytest.raises(ValueError, match="last_dim_is_batch"):
        kernel.forward(x, x, last_dim_is_batch=True)


# -- models ------------------------------------------------------------------------------------------------------------


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, kernel):
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        likelihood.noise = NOISE
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel
        self.double()

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def data():
    x = rand(NUM_POINTS, 2)
    return x, torch.sin(6.0 * x[:, 0]) * torch.cos(4.0 * x[:, 1]) + math.sqrt(NOISE) * randn(NUM_POINTS)


def model_and_data(**options):
    x, y = data()
    kernel = preconditioned_ski(scaled(ski(ard(0.2, 0.35), (30, 24), **options), 1.5))
    return Model(x, y, kernel), x, y


def dense_covariance(model, x1, x2):
    """``s W (K_1 (x) K_2) W'``, with the kernels written out."""
    interpolated = model.covar_module.base_kernel
    axes = [torch.linspace(float(own[0]), float(own[-1]), len(own), dtype=torch.float64) for own in interpolated.grid]
    lengthscales = interpolated.base_kernel.lengthscale.squeeze()
    factors = [torch.exp(-0.5 * ((a[:, None] - a) / own).square()) for a, own in zip(axes, lengthscales, strict=True)]
    left, right = (GridInterpolation.cubic(axes, x).dense() for x in (x1, x2))
    return model.covar_module.outputscale * left @ torch.kron(*factors) @ right.mT


@pytest.mark.parametrize("method", ["ignore", "auto"])
@pytest.mark.parametrize("options", [{}, {"num_dims": 2}], ids=["grid bounds", "a grid for the points"])
def test_marginal_likelihood_and_its_gradient(options, method):
    model, x, y = model_and_data(**options)
    likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    model.train()
    tight = settings.train_tolerance(1e-12)
    with tight, settings.gap_method(method), settings.logdet_method("exact"), record_solves() as solves:
        value = likelihood(model(x), y)
        found = torch.autograd.grad(value, list(model.parameters()))
    assert all(report.converged for report in solves)
    noisy = dense_covariance(model, x, x) + model.likelihood.noise * torch.eye(NUM_POINTS, dtype=torch.float64)
    mean = model.mean_module.constant.expand(NUM_POINTS)
    dense = torch.distributions.MultivariateNormal(mean, noisy).log_prob(y) / NUM_POINTS
    expected = torch.autograd.grad(dense, list(model.parameters()))
    torch.testing.assert_close(value, dense, rtol=1e-8, atol=1e-10)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-8, atol=1e-10)


def posterior_by_dense(model, x, y, test_x):
    noisy = dense_covariance(model, x, x) + NOISE * torch.eye(NUM_POINTS, dtype=torch.float64)
    cross = dense_covariance(model, test_x, x)
    mean = model.mean_module.constant + cross @ torch.linalg.solve(noisy, y - model.mean_module.constant)
    return mean, dense_covariance(model, test_x, test_x) - cross @ torch.linalg.solve(noisy, cross.mT)


@pytest.mark.parametrize("options", [{}, {"num_dims": 2}], ids=["grid bounds", "a grid for the points"])
def test_predictions(options):
    model, x, y = model_and_data(**options)
    test_x = 0.02 + 0.96 * rand(200, 2, seed=7)
    model.eval()
    with torch.no_grad(), settings.solve_tolerance(1e-10):
        posterior = model(test_x)
        mean, covariance = posterior_by_dense(model, x, y, test_x)
        torch.testing.assert_close(posterior.mean, mean, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(posterior.variance, covariance.diagonal(), rtol=1e-6, atol=1e-10)
        torch.testing.assert_close(posterior.covariance_matrix, covariance, rtol=1e-6, atol=1e-8)
        torch.manual_seed(0)
        draws = model(test_x[:20]).rsample(torch.Size([4000]))
        largest = covariance[:20, :20].abs().max()
        assert float((torch.cov(draws.mT) - covariance[:20, :20]).abs().max() / largest) < 0.1
        noisy = model.likelihood(model(test_x))
        torch.testing.assert_close(noisy.variance, covariance.diagonal() + NOISE, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize(("method", "tolerance"), [("exact", 1e-6), ("low_rank", 1e-4), ("pathwise", 1.0)])
def test_variances_by_every_method(method, tolerance):
    model, x, y = model_and_data()
    test_x = rand(300, 2, seed=7)
    model.eval()
    torch.manual_seed(0)
    with torch.no_grad(), settings.variance_method(method), settings.variance_samples(64), record_solves() as solves:
        variance = model(test_x).variance
    exact = posterior_by_dense(model, x, y, test_x)[1].diagonal()
    assert solves.variances[-1].method == method
    assert float(((variance - exact) / exact).abs().max()) < tolerance


def test_smooth_kernels_give_many_variances_without_solves():
    model, _, _ = model_and_data()
    model.eval()
    with torch.no_grad(), record_solves() as solves:
        assert model(rand(3000, 2, seed=7)).variance.min() > 0
    assert solves.variances[-1].reason == "without solves"


def test_gradients_of_predictions():
    model, x, y = model_and_data()
    test_x = rand(20, 2, seed=7)
    model.eval()
    parameters = list(model.parameters())
    with settings.solve_tolerance(1e-12), settings.gap_method("ignore"), gpytorch.settings.detach_test_caches(False):
        posterior = model(test_x)
        value = posterior.mean.square().sum() + posterior.variance.sum()
        found = torch.autograd.grad(value, parameters)
    noise = model.likelihood.noise * torch.eye(NUM_POINTS, dtype=torch.float64)
    noisy, cross = dense_covariance(model, x, x) + noise, dense_covariance(model, test_x, x)
    mean = model.mean_module.constant + cross @ torch.linalg.solve(noisy, y - model.mean_module.constant)
    explained = (cross * torch.linalg.solve(noisy, cross.mT).mT).sum(-1)
    variance = dense_covariance(model, test_x, test_x).diagonal() - explained
    expected = torch.autograd.grad(mean.square().sum() + variance.sum(), parameters)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-8)


def test_training_finds_what_dense_training_finds():
    model, x, y = model_and_data()
    likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
    model.train()
    torch.manual_seed(0)
    values = []
    for _ in range(25):
        optimiser.zero_grad()
        loss = -likelihood(model(x), y)
        loss.backward()
        optimiser.step()
        values.append(loss.item())
    assert values[-1] < values[0] - 0.01
    noisy = dense_covariance(model, x, x) + model.likelihood.noise * torch.eye(NUM_POINTS, dtype=torch.float64)
    mean = model.mean_module.constant.expand(NUM_POINTS)
    dense = torch.distributions.MultivariateNormal(mean, noisy).log_prob(y) / NUM_POINTS
    torch.testing.assert_close(likelihood(model(x), y), dense, rtol=1e-3, atol=1e-3)


# -- grids that are made for the points --------------------------------------------------------------------------------


def test_a_grid_is_made_for_the_training_points_and_kept_for_predictions():
    kernel = preconditioned_ski(ski(RBFKernel(), (30, 24), num_dims=2)).double()
    x = 5.0 + 3.0 * rand(100, 2)
    kernel(x).evaluate_kernel()
    made = [own.clone() for own in kernel.grid]
    assert all(own[0] < column.min() and own[-1] > column.max() for own, column in zip(made, x.mT, strict=True))
    kernel.eval()
    kernel(x[:3] + 0.01, x).evaluate_kernel()
    assert all(torch.equal(own, other) for own, other in zip(kernel.grid, made, strict=True))
    elsewhere = x + 9.0
    for other in (x, elsewhere):
        with pytest.raises(ValueError, match="expected points on the grid"):
            kernel(elsewhere, other).evaluate_kernel()
    kernel.train()
    kernel(elsewhere).evaluate_kernel()  # other training points, another grid
    moved = kernel.grid[0]
    assert moved[0] > made[0][-1]
    kernel(elsewhere).evaluate_kernel()
    assert kernel.grid[0] is moved  # made once


def test_a_grid_for_points_with_one_coordinate():
    kernel = preconditioned_ski(ski(RBFKernel(), (30, 24), num_dims=2)).double()
    x = torch.stack([rand(20), torch.full((20,), 3.0, dtype=torch.float64)], -1)
    torch.testing.assert_close(kernel(x).to_dense(), kernel.base_kernel(x).to_dense(), rtol=1e-4, atol=1e-4)


def test_other_training_points_of_a_fixed_grid():
    model, x, y = model_and_data()
    other = rand(200, 2, seed=9)
    model.set_train_data(other, y[:200], strict=False)
    model.eval()
    with torch.no_grad():
        mean = model(x[:30]).mean
    noisy = dense_covariance(model, other, other) + NOISE * torch.eye(200, dtype=torch.float64)
    expected = dense_covariance(model, x[:30], other) @ torch.linalg.solve(noisy, y[:200])
    torch.testing.assert_close(mean, expected.detach(), rtol=1e-5, atol=1e-5)


def test_sums_of_models_predict():
    x, y = data()
    kernel = preconditioned_ski(
        AdditiveKernel(ski(one(RBFKernel(), 0.3), (30, 24)), ScaleKernel(ski(one(MaternKernel(), 0.5), (24, 20))))
    )
    model = Model(x, y, kernel).eval()
    test_x = rand(50, 2, seed=7)
    with torch.no_grad(), settings.gap_method("ignore"), settings.solve_tolerance(1e-10):
        posterior = model(test_x)
        train, cross, prior = (kernel(*pair).to_dense() for pair in ((x, x), (test_x, x), (test_x, test_x)))
        noisy = train + NOISE * torch.eye(NUM_POINTS, dtype=torch.float64)
        torch.testing.assert_close(posterior.mean, cross @ torch.linalg.solve(noisy, y), rtol=1e-6, atol=1e-6)
        variance = (prior - cross @ torch.linalg.solve(noisy, cross.mT)).diagonal()
        torch.testing.assert_close(posterior.variance, variance, rtol=1e-5, atol=1e-8)


def test_products_belong_inside():
    x = rand(20, 2)
    inside = preconditioned_ski(ski(ProductKernel(one(RBFKernel(), 0.4), one(RBFKernel(), 0.5)))).double()
    expected = one(RBFKernel(), 0.4).double()(x).to_dense() * one(RBFKernel(), 0.5).double()(x).to_dense()
    torch.testing.assert_close(inside(x).to_dense(), expected, rtol=1e-4, atol=1e-4)
