"""Draws of posteriors against dense ones: their moments, exactly and by many; gradients, seeds, shapes, solves."""

import copy
import math
import warnings

import gpytorch
import linear_operator
import pytest
import torch
from gpytorch.kernels import IndexKernel, LinearKernel, MaternKernel, ProductKernel, RBFKernel, ScaleKernel

import gpytorch_gaps as gaps
from gpytorch_gaps import settings
from gpytorch_gaps.posterior import covariance as posterior_covariance
from gpytorch_gaps.posterior import pathwise as _pathwise
from gpytorch_gaps.posterior.covariance import NoisyPosteriorCovarianceOperator, PosteriorCovarianceOperator
from gpytorch_gaps.posterior.joint_draws import JointDraws
from gpytorch_gaps.posterior.pathwise import pathwise_draws
from tests import _dense as dense
from tests import _standin as standin
from tests._covering import in_turn
from tests._devices import on_standin
from tests._standin import count_transfers
from tests.workflow._pairs import CASES, Model, gappy, on, with_length

MAX_CHOLESKY = linear_operator.settings.max_cholesky_size
SHAPE = (12, 10)


@pytest.fixture(autouse=True)
def _not_at_the_training_points():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gpytorch.utils.warnings.GPInputWarning)
        yield


def models(shape=SHAPE, scale=1.0, centre=0.0, noise=0.05):
    """Ours and the same of dense kernels, with values of the given scale about a centre, and the grid."""
    axes, values = gappy(shape, 0.4, 0)
    grid, x, y = gaps.from_array(centre + scale * values, axes)
    kernels = [with_length(RBFKernel(), 0.3), with_length(MaternKernel(), 0.5)]
    plain = ProductKernel(on(0, RBFKernel, 0.3), on(1, MaternKernel, 0.5))
    ours = Model(x, y, gaps.GappyGridLikelihood(), ScaleKernel(gaps.GappyGridKernel(kernels, grid))).double()
    other = Model(x, y, gpytorch.likelihoods.GaussianLikelihood(), ScaleKernel(plain)).double()
    for model in (ours, other):
        model.likelihood.noise = noise * scale**2
        model.covar_module.outputscale = scale**2
        model.mean_module.constant = centre
    return ours.eval(), other.eval(), grid


def kinds(pair):
    """A dozen points of every kind."""
    grid, last = pair.grid, len(pair.grid.axes) - 1
    levels = any(isinstance(module, IndexKernel) for module in pair.ours.modules())
    axes = []
    for i, axis in enumerate(grid.axes):
        if levels and i == last:
            axes.append(axis[[2, 0]])
        elif i == 0:  # shifted, on it, and beyond the data
            axes.append(torch.cat([axis[:1] + 0.013, axis[4:5], axis[-1:] + 0.2]))
        else:
            axes.append(axis[:2] + 0.07)
    return {
        "cells": grid.points(torch.arange(3, grid.num_cells, grid.num_cells // 12)),
        "another grid": gaps.CartesianGrid(axes).points(),
        "scattered": pair.test_x[-10:],
        "on and off the grid": pair.test_x[55:66],
    }


KINDS = ["cells", "another grid", "scattered", "on and off the grid"]


def exact(model, x):
    """Mean and covariance of a dense model."""
    with torch.no_grad(), MAX_CHOLESKY(10_000):
        posterior = model.eval()(x)
        return posterior.mean, posterior.covariance_matrix


def pathwise(posterior, count):
    """Draws by conditioning draws of the prior, however few the points. shape: (count, *batch, Q)"""
    parts = posterior.lazy_covariance_matrix.parts
    draws = [deviation for deviation, _ in pathwise_draws(parts, count)]
    return posterior.mean + torch.cat(draws, -1).movedim(-1, 0)


def check_moments(samples, mean, covariance, bound):
    """Means and covariances within so many standard errors, entry by entry; whitened, as large as chance makes them.

    Of n Gaussian draws, the standard error of a mean is ``sqrt(C_ii / n)``, that of an entry of their covariance about
    the known mean ``sqrt((C_ii C_jj + C_ij^2) / n)``.
    """
    samples, mean, covariance = samples.double(), mean.double(), covariance.double()
    count, deviations = samples.size(0), (samples - mean).movedim(0, -1)  # shape: (*batch, Q, n)
    assert samples.shape[1:] == mean.shape
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    in_mean = deviations.mean(-1) / (variance / count).sqrt()
    assert float(in_mean.abs().max()) <= bound
    estimate = deviations @ deviations.mT / count
    error = ((variance.unsqueeze(-1) * variance.unsqueeze(-2) + covariance.square()) / count).sqrt()
    assert float(((estimate - covariance) / error).abs().max()) <= bound
    values, vectors = torch.linalg.eigh(covariance)
    kept = (values > 1e-8 * values.amax()).reshape(-1, values.size(-1)).all(0)
    white = (vectors.mT @ estimate @ vectors / (values.unsqueeze(-1) * values.unsqueeze(-2)).sqrt())[..., kept, :]
    identity = torch.eye(int(kept.sum()), dtype=torch.float64)
    squares = (white[..., kept] - identity).square() * count / (1.0 + identity)
    rows, columns = torch.triu_indices(len(identity), len(identity))
    squares = squares[..., rows, columns].flatten()
    assert abs(float(squares.mean()) - 1.0) <= bound * math.sqrt(2.0 / len(squares))


# -- moments of many draws --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "max_cholesky"), [("pathwise", 0), ("dense", 800), ("public", 800)])
def test_twenty_thousand_draws_of_a_grid(path, max_cholesky, monkeypatch):
    """All 120 cells, gaps among them: 7,380 numbers, all within four standard errors.

    Chance takes one of them further every other time: the seed is one where it does not, and a draw depends on nothing
    else.
    """
    ours, plain, grid = models()
    x, count = grid.points(), 20_000
    torch.manual_seed(2)
    with torch.no_grad(), MAX_CHOLESKY(max_cholesky):
        posterior = ours(x)
        if path == "pathwise":
            samples = pathwise(posterior, count)
        elif path == "dense":
            monkeypatch.setattr(posterior_covariance, "_FEW_POINTS", 120)
            samples = posterior.rsample(torch.Size([count]))
        else:  # never more draws than points at a time
            samples = torch.cat([gaps.sample_posterior(ours, x, 100, seed=seed) for seed in range(count // 100)])
    check_moments(samples, *exact(plain, x), 4.0)


@in_turn(case=CASES, kind=KINDS)
def test_draws_of_every_case(case, kind):
    pair = CASES[case](small=True)
    x = kinds(pair)[kind]
    torch.manual_seed(2)
    with torch.no_grad():
        check_moments(pathwise(pair.ours.eval()(x), 1_500), *exact(pair.dense, x), 4.5)


@pytest.mark.parametrize("case", CASES)
def test_draws_of_every_case_by_a_dense_root(case, monkeypatch):
    """Draws at all kinds of points at once."""
    monkeypatch.setattr(posterior_covariance, "_FEW_POINTS", 20)
    pair = CASES[case](small=True)
    x = torch.cat([points[:5] for points in kinds(pair).values()])
    with torch.no_grad():
        samples = gaps.sample_posterior(pair.ours, x, 4_000, seed=3)
    check_moments(samples, *exact(pair.dense, x), 4.5)


@pytest.mark.parametrize("kind", ["another grid", "on and off the grid"])
def test_draws_in_single_precision(kind):
    pair = CASES["two axes"](small=True)
    x = kinds(pair)[kind]
    moments = exact(pair.dense, x)
    model = pair.ours.float().eval()
    torch.manual_seed(4)
    with torch.no_grad():
        for samples in (pathwise(model(x.float()), 4_000), model(x.float()).rsample(torch.Size([4_000]))):
            assert samples.dtype == torch.float32
            check_moments(samples, *moments, 4.5)


def test_draws_in_the_units_of_the_data():
    """Temperatures about 300, with a scale of 50: at cells, between them and beyond, where it is nearly the prior."""
    ours, plain, grid = models(scale=50.0, centre=300.0)
    beyond = torch.tensor([[0.5, 4.0], [5.0, 0.5], [9.0, 9.0]], dtype=torch.float64)
    x = torch.cat([grid.points()[:4], dense.randn(4, 2).sigmoid(), beyond])
    mean, covariance = exact(plain, x)
    assert torch.allclose(mean[-1], torch.tensor(300.0).double(), atol=1e-3)
    assert torch.allclose(covariance[-1, -1], torch.tensor(2500.0).double(), atol=1e-3)
    assert float(covariance.diagonal().min()) > 20.0
    torch.manual_seed(5)
    with torch.no_grad():
        check_moments(pathwise(ours(x), 4_000), mean, covariance, 4.5)
        check_moments(gaps.sample_posterior(ours, x, 4_000, seed=0), mean, covariance, 4.5)


def test_outputs_are_drawn_together():
    """Covariances between outputs at the same place, and at others, as dense algebra has them."""
    pair = CASES["an output axis"](small=True)
    index = pair.ours.covar_module.kernels[2]
    with torch.no_grad():
        index.covar_factor.copy_(torch.tensor([[1.5], [-1.2], [0.9]]).double())
        pair.dense.covar_module.kernels[2].covar_factor.copy_(index.covar_factor)
    place = torch.tensor([[0.41, 0.72], [9.0, 9.0]], dtype=torch.float64)  # between cells, and far away
    x = torch.cat([torch.cat([place, torch.full((2, 1), float(level)).double()], -1) for level in range(3)])
    mean, covariance = exact(pair.dense, x)
    correlation = covariance / (covariance.diagonal()[:, None] * covariance.diagonal()).sqrt()
    assert float(correlation[1, 3]) < -0.5  # outputs 0 and 1 far away: there is something to get wrong
    torch.manual_seed(6)
    with torch.no_grad():
        check_moments(pathwise(pair.ours.eval()(x), 5_000), mean, covariance, 4.5)


# -- moments and their gradients, exactly -----------------------------------------------------------------------------


class UnitVectors:
    """In place of ``torch.randn``: draw i is made of the i-th unit vector, so that draws are columns of a root."""

    def __init__(self, size):
        self.size, self.position = size, 0

    def __call__(self, *shape, generator=None, dtype=None, device=None):
        normals = torch.zeros(*shape, dtype=dtype, device=device)
        draw, start = divmod(self.position, self.size)
        if start <= draw < start + shape[-1]:
            normals[..., draw - start] = 1.0
        self.position += shape[-1]
        return normals


def covariance_by_draws(posterior, monkeypatch):
    """``L L'`` of draws ``L z``: what the covariance of infinitely many draws would be. shape: (*batch, Q, Q)"""
    parts = posterior.lazy_covariance_matrix.parts
    with monkeypatch.context() as patch:
        joint = JointDraws(parts.prior.evaluate_kernel(), parts.cross, parts.train, parts.cells, parts.config.memory)
        size = sum(joint.sizes) + parts.num_points  # the last: noise, which is not added here
        patch.setattr(_pathwise, "_fewer_points", lambda *_: False)
        unit = UnitVectors(size)
        patch.setattr(torch, "randn", unit)
        columns = torch.cat([deviation for deviation, _ in pathwise_draws(parts, size)], -1)
        assert unit.position == size**2
    return columns @ columns.mT


@in_turn(case=CASES, kind=[*KINDS, *reversed(KINDS)])
def test_the_root_that_draws_are_made_with(case, kind, monkeypatch):
    """Its square is the dense covariance, and has its gradients: in the points and in every hyperparameter."""
    pair = CASES[case](small=True)
    x, results = kinds(pair)[kind], []
    for model in pair.both():
        own = x.clone().requires_grad_()
        with gpytorch.settings.detach_test_caches(False), settings.solve_tolerance(1e-11), MAX_CHOLESKY(10_000):
            posterior = model.eval()(own)
            if model is pair.ours:
                covariance = covariance_by_draws(posterior, monkeypatch)
            else:
                covariance = posterior.covariance_matrix
            inputs = [own, *model.parameters()]
            value = (dense.symmetric(dense.randn(*covariance.shape)) * covariance).sum()
            gradients = torch.autograd.grad(value, inputs, allow_unused=True)
        gradients = [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, gradients, strict=True)]
        results.append([covariance, *gradients])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def of_points_off_the_grid():
    """The observations span a grid of their own then."""
    ours, plain, grid = models()
    x = ours.train_inputs[0].clone()
    x[3:8] += 0.01
    for model in (ours, plain):
        model.set_train_data(x)
    return ours, plain, grid.points()[::9]


def of_mixed_kernels(ours, plain):
    first, second, grid = models()
    product = ProductKernel(on(0, RBFKernel, 0.3), on(1, MaternKernel, 0.5))
    for model, kernel in ((first, ours(first.covar_module.base_kernel)), (second, plain(product))):
        model.covar_module = kernel.double()
    return first, second, torch.cat([grid.points()[::15], dense.randn(4, 2).sigmoid()])


def of_repeated_cells():
    ours, plain, grid = models()
    return ours, plain, grid.points(torch.tensor([5, 5, 0, 77, 5]))


def of_batches_of_points():
    ours, plain, grid = models()
    return ours, plain, torch.stack([grid.points()[:6], grid.points()[40:46], dense.randn(6, 2).sigmoid()])


OTHERS = {
    "observations off the grid": of_points_off_the_grid,
    "a product with another kernel": lambda: of_mixed_kernels(
        lambda g: g * RBFKernel(active_dims=[0]), lambda g: g * RBFKernel(active_dims=[0])
    ),
    "a sum with a kernel of full rank": lambda: of_mixed_kernels(
        lambda g: g + RBFKernel(ard_num_dims=2), lambda g: g + RBFKernel(ard_num_dims=2)
    ),
    "a product and a sum": lambda: of_mixed_kernels(
        lambda g: g * LinearKernel() + LinearKernel(), lambda g: g * LinearKernel() + LinearKernel()
    ),
    "repeated cells": of_repeated_cells,
    "batches of points": of_batches_of_points,
}


@pytest.mark.parametrize("case", OTHERS)
def test_the_root_of_other_models(case, monkeypatch):
    ours, plain, x = OTHERS[case]()
    with torch.no_grad(), settings.solve_tolerance(1e-11):
        covariance = covariance_by_draws(ours.eval()(x), monkeypatch)
    torch.testing.assert_close(covariance, exact(plain, x)[1], rtol=1e-7, atol=1e-7)


def test_the_root_of_fantasies(monkeypatch):
    """Draws after further observations are those of a model that had them from the start."""
    ours, plain, grid = models()
    x = grid.points()[::8]
    new_x, new_y = dense.randn(3, 2).sigmoid(), torch.ones(3).double()
    with torch.no_grad(), settings.solve_tolerance(1e-11):
        ours(x)
        covariance = covariance_by_draws(ours.get_fantasy_model(new_x, new_y)(x), monkeypatch)
    everything = torch.cat([plain.train_inputs[0], new_x]), torch.cat([plain.train_targets, new_y])
    plain.set_train_data(*everything, strict=False)
    torch.testing.assert_close(covariance, exact(plain, x)[1], rtol=1e-7, atol=1e-7)


# -- gradients of draws -----------------------------------------------------------------------------------------------


def second_moments(model, x, weights, own):
    """Gradients of a weighted sum of ``E f^2``, in the points and the hyperparameters; from draws, one row a batch."""
    rows = []
    for seed in range(40 if own else 1):
        x = x.detach().clone().requires_grad_()
        model.train()  # a graph serves one backward pass
        model.eval()
        with gpytorch.settings.detach_test_caches(False), settings.solve_tolerance(1e-10):
            if own:
                square = own(model, x, seed).square().mean(0)
            else:
                posterior = model(x)
                square = posterior.mean.square() + posterior.variance
            inputs = [x, *model.parameters()]
            gradients = torch.autograd.grad((weights * square).sum(), inputs, allow_unused=True)
        parts = [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, gradients, strict=True)]
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


def by_function(count):
    return lambda model, x, seed: gaps.sample_posterior(model, x, count, seed=seed)


def by_rsample(count):
    def draw(model, x, seed):
        torch.manual_seed(seed)
        return model(x).rsample(torch.Size([count]))

    return draw


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("cells", by_function),
        ("another grid", by_function),
        ("scattered", by_rsample),
        ("fewer points than draws", by_function),
        ("a few points", by_function),
    ],
)
def test_gradients_flow_through_draws(kind, how):
    """``d E f^2`` in the points, the mean, the kernel and the noise: the dense one, as far as 40 batches can tell."""
    ours, plain, grid = models()
    x = {
        "cells": grid.points()[::4],
        "another grid": gaps.CartesianGrid([grid.axes[0][:5] + 0.02, grid.axes[1][:5] + 0.01]).points(),
        "scattered": dense.randn(25, 2).sigmoid(),
        "fewer points than draws": dense.randn(15, 2).sigmoid(),
        "a few points": dense.randn(5, 2).sigmoid(),  # by a dense root
    }[kind]
    weights, count = dense.randn(len(x), seed=3), 20
    rows = second_moments(ours, x, weights, how(count))
    (expected,) = second_moments(plain, x, weights, None)
    error = rows.std(0) / math.sqrt(len(rows))
    assert bool((expected.abs() > error)[-4:].any())  # there is something to see
    # Student's t of 39 degrees of freedom: beyond 4.5 once in 16,000
    assert bool(((rows.mean(0) - expected).abs() <= 4.5 * error + 1e-9).all())


@in_turn(case=["two axes", "a sum of two grid kernels", "a noise per output"], kind=KINDS)
def test_gradients_in_the_points_with_detached_caches(case, kind, monkeypatch):
    """GPyTorch's default, as Bayesian optimisation uses it: of the root that draws are made with."""
    pair = CASES[case](small=True)
    results = []
    for model in pair.both():
        x = kinds(pair)[kind].clone().requires_grad_()
        with settings.solve_tolerance(1e-11), MAX_CHOLESKY(10_000):
            posterior = model.eval()(x)
            own = model is pair.ours
            covariance = covariance_by_draws(posterior, monkeypatch) if own else posterior.covariance_matrix
            value = (dense.symmetric(dense.randn(*covariance.shape)) * covariance).sum()
            results.append(torch.autograd.grad(value, x)[0])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


# -- seeds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [5, 120], ids=["dense", "pathwise"])
@pytest.mark.parametrize("noise", [False, True])
def test_a_seed_repeats_draws_and_leaves_torch_alone(noise, points):
    """The same, the same draws; another, others; none, torch's own, which a seed leaves alone."""
    ours, _, grid = models()
    with torch.no_grad():

        def draw(seed):
            return gaps.sample_posterior(ours, grid.points()[:points], 5, noise=noise, seed=seed)

        state = torch.random.get_rng_state()
        first = draw(1)
        assert torch.equal(first, draw(1))
        assert torch.equal(torch.random.get_rng_state(), state)
        assert float((draw(2) - first).abs().min()) > 0
        assert not torch.equal(draw(None), draw(None))
        repeated = []
        for _ in range(2):
            torch.manual_seed(7)
            repeated.append(draw(None))
        assert torch.equal(*repeated)


@pytest.mark.parametrize("points", [5, 120], ids=["dense", "pathwise"])
def test_the_seed_of_torch_governs_rsample(points):
    ours, _, grid = models()
    draws = []
    with torch.no_grad():
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            draws.append(ours(grid.points()[:points]).rsample(torch.Size([5])))
    assert torch.equal(draws[0], draws[1])
    assert float((draws[0] - draws[2]).abs().min()) > 0


@pytest.mark.parametrize("kind", [*KINDS, "a few points", "the whole grid"])
@pytest.mark.parametrize("noise", [False, True])
def test_more_draws_begin_with_the_fewer(noise, kind):
    """However many: also where there are more draws than points, which are then solved for instead."""
    pair = CASES["two axes"](small=True)
    x = {**kinds(pair), "a few points": pair.test_x[-5:], "the whole grid": pair.grid.points()}[kind]
    with torch.no_grad(), settings.solve_tolerance(1e-9):
        many = gaps.sample_posterior(pair.ours, x, 400, noise=noise, seed=0)
        for count in (1, 7):
            fewer = gaps.sample_posterior(pair.ours, x, count, noise=noise, seed=0)
            torch.testing.assert_close(fewer, many[:count], rtol=1e-7, atol=1e-7)


@in_turn(case=["two axes", "a sum of two grid kernels", "a batch of three"], kind=KINDS)
def test_draws_do_not_depend_on_memory(case, kind, monkeypatch):
    """One at a time, or all at once: as many solves as it takes, and the same numbers."""
    monkeypatch.setattr(posterior_covariance, "_FEW_POINTS", 0)
    pair = CASES[case](small=True)
    x, draws, columns = kinds(pair)[kind], [], []
    for memory in (2**29, 40_000):
        with (
            torch.no_grad(),
            settings.solve_tolerance(1e-12),
            settings.prediction_memory(memory),
            gaps.record_solves() as solves,
        ):
            draws.append(gaps.sample_posterior(pair.ours, x, 5, seed=0))
        columns.append(solves[-1])
    torch.testing.assert_close(*draws, rtol=1e-8, atol=1e-8)
    members = pair.ours.train_targets.shape[:-1].numel()
    assert [report.num_rhs for report in columns] == [5 * members, 5 * members]
    assert [report.parts for report in columns] == [1, 5]


# -- noise ------------------------------------------------------------------------------------------------------------


def check_variances(samples, mean, variance, bound=5.0):
    """The standard error of a variance is ``sqrt(2 / n)`` of it."""
    estimate = (samples - mean).square().mean(0)
    error = (estimate / variance - 1.0).abs() / math.sqrt(2.0 / len(samples))
    assert float(error.max()) <= bound
    assert abs(float((estimate / variance).mean()) - 1.0) <= 0.05


@pytest.mark.parametrize("path", ["sample_posterior", "rsample"])
@pytest.mark.parametrize("noise", [False, True])
def test_draws_above_800_points_have_all_their_variance(noise, path):
    """Upstream's roots are Lanczos' there, and lose a quarter of it and more."""
    ours, plain, _ = models()
    finer = gaps.CartesianGrid([torch.linspace(0, 1, 33).double(), torch.linspace(0, 1, 30).double()])
    mean, covariance = exact(plain, finer.points())
    variance = covariance.diagonal() + (0.05 if noise else 0.0)
    torch.manual_seed(8)
    with torch.no_grad():
        if path == "rsample":
            posterior = ours(finer.points())
            samples = (ours.likelihood(posterior) if noise else posterior).rsample(torch.Size([600]))
        else:
            samples = gaps.sample_posterior(ours, finer, 600, noise=noise, seed=0).flatten(1)
    check_variances(samples, mean, variance)


@pytest.mark.parametrize("part", [slice(50, 950), torch.arange(900)], ids=["slice", "tensor"])
@pytest.mark.parametrize("noise", [False, True])
def test_draws_of_some_of_many_points(noise, part):
    """Draws of a posterior that was indexed, noisy or not."""
    ours, plain, _ = models()
    finer = gaps.CartesianGrid([torch.linspace(0, 1, 33).double(), torch.linspace(0, 1, 30).double()]).points()
    mean, covariance = exact(plain, finer[part])
    torch.manual_seed(9)
    with torch.no_grad():
        posterior = ours(finer)
        posterior = (ours.likelihood(posterior) if noise else posterior)[part]
        samples = posterior.rsample(torch.Size([600]))
    check_variances(samples, mean, covariance.diagonal() + (0.05 if noise else 0.0))


@in_turn(case=["two axes", "a noise per output", "a noise per point", "a batch of three"], path=["pathwise", "dense"])
def test_noise_of_new_observations(case, path, monkeypatch):
    """One noise, one for every output, one a point where it was observed: added to variances, and to nothing else."""
    pair = CASES[case](small=True)
    x = kinds(pair)["another grid"]
    if case == "a noise per point":
        x = pair.ours.train_inputs[0][:12]
        noise = pair.ours.likelihood.noise[:12]
    elif case == "a noise per output":
        noise = pair.ours.likelihood.noise[x[:, -1].long()]
    else:
        noise = pair.ours.likelihood.noise.expand(*pair.ours.likelihood.noise.shape[:-1], len(x))
    mean, covariance = exact(pair.dense, x)
    if path == "pathwise":
        monkeypatch.setattr(posterior_covariance, "_FEW_POINTS", 0)
    with torch.no_grad():
        samples = gaps.sample_posterior(pair.ours, x, 2_500, noise=True, seed=0)
    check_moments(samples, mean, covariance + torch.diag_embed(noise.detach()), 4.5)


def test_noise_is_added_to_the_function():
    """The same seed: the same function, and noise of its own."""
    ours, _, grid = models()
    with torch.no_grad():
        function, observed = (gaps.sample_posterior(ours, grid, 100, noise=noise, seed=0) for noise in (False, True))
    noise = (observed - function).flatten()
    assert abs(float(noise.var()) / 0.05 - 1.0) <= 5.0 * math.sqrt(2.0 / len(noise))
    assert abs(float(noise.mean())) <= 5.0 * math.sqrt(0.05 / len(noise))


def test_more_noise_keeps_the_kind_of_covariance():
    ours, _, grid = models()
    with torch.no_grad():
        posterior = ours(grid.points())
        assert isinstance(posterior.lazy_covariance_matrix, PosteriorCovarianceOperator)
        noisy = ours.likelihood(posterior)
        twice = ours.likelihood(noisy)
        for one in (noisy, twice):
            assert isinstance(one.lazy_covariance_matrix, NoisyPosteriorCovarianceOperator)
        assert torch.allclose(twice.variance, posterior.variance + 0.1)


# -- shapes, and what is left alone -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 40])
def test_draws_have_the_shape_of_grid_or_points(count):
    ours, _, grid = models()
    other = gaps.CartesianGrid([grid.axes[0][:4] + 0.01, grid.axes[1]])
    with torch.no_grad():
        assert gaps.sample_posterior(ours, grid, count).shape == (count, *SHAPE)
        assert gaps.sample_posterior(ours, other, count).shape == (count, 4, SHAPE[1])
        assert gaps.sample_posterior(ours, grid.points()[:17], count).shape == (count, 17)
        assert gaps.sample_posterior(ours, dense.randn(2, 3, 9, 2).sigmoid(), count).shape == (count, 2, 3, 9)
        posterior = ours(grid.points()[:17])
        assert posterior.rsample(torch.Size([2, count])).shape == (2, count, 17)
        assert posterior.rsample().shape == (17,)
        batch = CASES["a batch of three"](small=True)
        assert gaps.sample_posterior(batch.ours, batch.grid, count).shape == (count, 3, *batch.grid.shape)
        assert gaps.sample_posterior(batch.ours, batch.test_x, count).shape == (count, 3, len(batch.test_x))


def test_a_grid_is_laid_out_as_its_points():
    """Cell by cell, the last axis fastest."""
    ours, _, grid = models()
    with torch.no_grad():
        on_grid = gaps.sample_posterior(ours, grid, 4, seed=0)
        assert torch.equal(on_grid.flatten(1), gaps.sample_posterior(ours, grid.points(), 4, seed=0))
    near = grid.ravel([torch.tensor(3), torch.tensor(4)])
    assert torch.equal(on_grid[:, 3, 4], on_grid.flatten(1)[:, near])


@pytest.mark.parametrize("noise", [False, True])
def test_no_points_have_empty_draws(noise):
    ours, _, grid = models()
    with torch.no_grad():
        assert gaps.sample_posterior(ours, grid.points()[:0], 3, noise=noise).shape == (3, 0)


def test_the_default_is_one_draw():
    ours, _, grid = models()
    with torch.no_grad():
        assert gaps.sample_posterior(ours, grid).shape == (1, *SHAPE)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_alone(training):
    """Its mode, its data, its parameters; also where drawing fails."""
    ours, _, grid = models()
    ours.train(training)
    before = copy.deepcopy(ours.state_dict())
    (x,), y = ours.train_inputs, ours.train_targets
    copies = x.clone(), y.clone()
    with torch.no_grad():
        gaps.sample_posterior(ours, grid, 3, noise=True)
        with pytest.raises(ValueError, match="finite"):
            gaps.sample_posterior(ours, grid.points() * torch.nan, 3)
    assert {module.training for module in ours.modules()} == {training}
    assert ours.train_inputs[0] is x
    assert ours.train_targets is y
    assert torch.equal(x, copies[0])
    assert torch.equal(y, copies[1])
    after = ours.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in ours.parameters())


def test_modes_of_parts_are_left_alone():
    """A likelihood that was put in eval mode by itself stays there."""
    ours, _, grid = models()
    ours.train()
    ours.likelihood.eval()
    with torch.no_grad():
        gaps.sample_posterior(ours, grid, 1)
    assert ours.training
    assert not ours.likelihood.training


def test_settings_are_left_alone_and_those_of_its_making_kept():
    """A posterior draws with the tolerance it was made with."""
    ours, _, grid = models()
    before = settings.current()
    with torch.no_grad():
        with settings.solve_tolerance(1e-11), gaps.record_solves() as solves:
            posterior = ours(grid.points())
        made = len(solves)
        posterior.rsample(torch.Size([3]))
    assert [report.tolerance for report in solves[made:]] == [1e-11]  # reported where the posterior was made
    assert settings.current() == before
    assert settings.progress.value() is True


@pytest.mark.parametrize("wanted", [True, False])
def test_a_progress_bar_is_made_or_not(wanted, monkeypatch):
    """A bar is made, or not."""
    from gpytorch_gaps.utils import progress

    seen = []

    class Bar(progress.tqdm):
        def __init__(self, *args, **kwargs):
            seen.append((kwargs["desc"], kwargs["total"], kwargs["disable"]))
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(progress, "tqdm", Bar)
    ours, _, grid = models()
    with torch.no_grad():
        gaps.sample_posterior(ours, grid, 3, progress=wanted)
        with settings.progress(False):
            gaps.sample_posterior(ours, grid, 3, progress=wanted)
    assert seen == [("samples", 3, not wanted), ("samples", 3, True)]


# -- what it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_cholesky", [800, 0])
def test_one_solve_of_as_many_columns_as_draws(max_cholesky):
    """Whatever the number of points; and one of the mean, once."""
    ours, _, grid = models()
    finer = gaps.CartesianGrid([torch.linspace(0, 1, 60).double(), grid.axes[1]])
    with torch.no_grad(), MAX_CHOLESKY(max_cholesky), gaps.record_solves() as solves:
        gaps.sample_posterior(ours, finer, 8)
        assert [report.num_rhs for report in solves] == [1, 8]
        gaps.sample_posterior(ours, finer, 5, noise=True)
        assert [report.num_rhs for report in solves] == [1, 8, 5]
    assert all(report.converged for report in solves)
    assert solves.variances == []


def test_many_draws_of_a_few_points_take_a_solve_a_point():
    ours, _, grid = models()
    with torch.no_grad(), gaps.record_solves() as solves:
        posterior = ours(grid.points()[:6])
        solves.clear()
        posterior.rsample(torch.Size([500]))
        assert sum(report.num_rhs for report in solves) in (6, 12)  # a second pass, where the first was not enough
        solves.clear()
        posterior.rsample(torch.Size([500]))  # the root is kept
        assert solves == []


def test_more_draws_than_points_take_a_solve_a_point():
    ours, _, grid = models()
    with torch.no_grad(), gaps.record_solves() as solves:
        gaps.sample_posterior(ours, grid.points()[:30], 500)
    assert [report.num_rhs for report in solves] == [1, 30]


@pytest.mark.parametrize("x", [[[0.0]], [[1.0]], [[0.0], [1.0], [-2.0]]], ids=str)
@pytest.mark.parametrize("method", ["exact", "low_rank", "pathwise"])
def test_a_kernel_that_is_zero_at_its_only_coordinate(method, x):
    """The data tell nothing of the function: what is left is the prior, zero there and not elsewhere."""
    grid = gaps.CartesianGrid([torch.zeros(1, dtype=torch.float64)])
    kernel = gaps.GappyGridKernel([LinearKernel()], grid)
    model = Model(grid.points(), torch.ones(1).double(), gaps.GappyGridLikelihood(), kernel).double().eval()
    x = torch.tensor(x, dtype=torch.float64)
    prior = kernel.kernels[0].variance.item() * x.squeeze(-1).square()
    with torch.no_grad(), settings.variance_method(method):
        posterior = model(x)
        variance = posterior.lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2)
        torch.testing.assert_close(variance, prior, rtol=1e-9, atol=1e-12)
        assert posterior.mean.abs().max() == 0
        draws = gaps.sample_posterior(model, x, 3)
    assert bool((draws.abs().amax(0) > 0).eq(prior > 0).all())


@pytest.mark.parametrize("memory", [40_000, 100_000, 2**20])
def test_columns_add_up(memory):
    ours, _, grid = models()
    with torch.no_grad(), settings.prediction_memory(memory), gaps.record_solves() as solves:
        gaps.sample_posterior(ours, grid, 30)
    mean, draws = solves
    assert mean.num_rhs == 1
    assert draws.num_rhs == 30
    assert draws.num_rhs / draws.parts * 8 * 10 * ours.train_targets.size(-1) <= memory  # at least what a solve holds


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "3", None])
def test_a_number_of_draws_that_is_none(count):
    ours, _, grid = models()
    with pytest.raises(ValueError, match=r"sample_posterior: num_samples: got .*, expected an integer above 0"):
        gaps.sample_posterior(ours, grid, count)


def test_wrong_models_and_points_are_named():
    ours, plain, grid = models()
    with pytest.raises(ValueError, match=r"model: got Linear, expected a gpytorch\.models\.ExactGP"):
        gaps.sample_posterior(torch.nn.Linear(2, 2), grid)
    for x in (grid.points().tolist(), grid.points().numpy(), None):
        with pytest.raises(ValueError, match=r"x: got .*, expected a tensor of points or a CartesianGrid"):
            gaps.sample_posterior(ours, x)
    with torch.no_grad(), pytest.raises(ValueError, match="expected a model whose covar_module has a GappyGridKernel"):
        gaps.sample_posterior(plain, grid)
    empty = Model(None, None, gaps.GappyGridLikelihood(), ours.covar_module).double().eval()
    with pytest.raises(ValueError, match="got no training data"):
        gaps.sample_posterior(empty, grid)
    with torch.no_grad(), gpytorch.settings.skip_posterior_variances(), pytest.raises(ValueError, match="Zero"):
        gaps.sample_posterior(ours, grid)


@pytest.mark.parametrize("columns", [1, 3])
def test_points_with_wrong_columns_are_refused(columns):
    ours, _, _ = models()
    with torch.no_grad(), pytest.raises(ValueError, match="columns"):
        gaps.sample_posterior(ours, torch.zeros(4, columns, dtype=torch.float64))


def test_too_many_scattered_points():
    """A dense root of what the grid leaves of them must fit; points on a grid need none."""
    ours, _, grid = models()
    with torch.no_grad(), settings.prediction_memory(100_000):
        gaps.sample_posterior(ours, grid, 2)
        with pytest.raises(ValueError, match=r"joint draws at scattered points need a dense matrix of 60 x 60.*memory"):
            gaps.sample_posterior(ours, dense.randn(60, 2).sigmoid(), 2)
        gaps.sample_posterior(ours, dense.randn(30, 2).sigmoid(), 2)


def test_too_many_observations_without_a_grid():
    ours, _, x = OTHERS["a sum with a kernel of full rank"]()
    with (
        torch.no_grad(),
        settings.prediction_memory(250_000),
        pytest.raises(ValueError, match="draws of a kernel without a grid need a dense matrix"),
    ):
        gaps.sample_posterior(ours, x, 2)


# -- on another device ------------------------------------------------------------------------------------------------


@on_standin
@pytest.mark.parametrize(("case", "count"), [*((case, 3) for case in CASES), ("two axes", 40)])
def test_draws_on_a_device_are_those_of_the_cpu(case, count):
    """On the stand-in device, whose random numbers are the CPU's: the same draws, and no copies to or from it."""
    pair = CASES[case](small=True)
    there, results = copy.deepcopy(pair.ours).to(standin.DEVICE), []
    for kind, x in kinds(pair).items():  # three draws: a solve each; forty: a solve a point
        for model, own in ((pair.ours, x), (there, x.to(standin.DEVICE))):
            torch.manual_seed(0)
            with torch.no_grad(), settings.solve_tolerance(1e-11), count_transfers() as counts:
                posterior = model.eval()(own)
                results.append(posterior.rsample(torch.Size([count])))
            assert [event for event in counts.within(gaps).events if event.kind != "sync"] == [], kind
        here, elsewhere = results[-2:]
        assert elsewhere.device == standin.DEVICE
        torch.testing.assert_close(elsewhere.host, here, rtol=1e-8, atol=1e-8)
        with torch.no_grad():
            assert gaps.sample_posterior(there, own, count).device == standin.DEVICE
