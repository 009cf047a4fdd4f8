"""What a fit says about its hyperparameters, compared with dense algebra, quadrature and autograd's Hessians."""

import math

import gpytorch
import pytest
import torch
from gpytorch.constraints import GreaterThan, Interval, LessThan
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import PoissonLikelihood
from gpytorch.mlls import LeaveOneOutPseudoLikelihood

import gpytorch_gaps as gaps
from gpytorch_gaps.training import fit as fit_module
from gpytorch_gaps.training.coordinates import Coordinates
from gpytorch_gaps.training.run import TrainingRun
from tests.laplace._dense import Model as LaplaceModel
from tests.laplace._dense import dense_laplace
from tests.workflow._pairs import Model, with_length

SHAPE = (9, 12)
AXES = [torch.arange(size, dtype=torch.float64) for size in SHAPE]


# -- fields: all hyperparameters of a product kernel -------------------------------------------------------------------


def field():
    """A wave and noise, with a hole and scattered gaps."""
    generator = torch.Generator().manual_seed(0)
    values = torch.sin(AXES[0] / 2.5).unsqueeze(-1) * torch.cos(AXES[1] / 4.0)
    values = values + 0.1 * torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    values[torch.rand(SHAPE, generator=generator) < 0.2] = torch.nan
    values[2:6, 4:9] = torch.nan
    return values


def model_of(values, step=1.0, kernel=ScaleKernel, **options):
    grid, x, y = gaps.from_array(values, [step * axis for axis in AXES])
    kernels = [with_length(RBFKernel(), 3.0 * step), with_length(MaternKernel(nu=1.5), 4.0 * step)]
    likelihood = gaps.GappyGridLikelihood(**options)
    return Model(x, y, likelihood, kernel(gaps.GappyGridKernel(kernels, grid))).double(), grid


def fitted(model, **options):
    return gaps.fit(model, steps=300, patience=3, progress=False, uncertainty=True, **options).uncertainty


@pytest.fixture(scope="module")
def trained():
    """A model, its grid, and how well its hyperparameters are known."""
    model, grid = model_of(field())
    return model, grid, fitted(model)


def dense_covariance(model):
    """The inverse of autograd's Hessian at the present hyperparameters, with kernels written out."""
    parts, y = Coordinates(model), model.train_targets
    a, b = model.train_inputs[0].T
    identity = torch.eye(len(y), dtype=torch.float64)

    def negative_log_likelihood(coordinates):
        values = dict(zip(parts.names, parts.values(coordinates), strict=True))
        first, second = (values[f"covar_module.base_kernel.kernels.{axis}.lengthscale"] for axis in (0, 1))
        distance = (b.unsqueeze(-1) - b).abs() * math.sqrt(3.0) / second
        K = torch.exp(-0.5 * ((a.unsqueeze(-1) - a) / first) ** 2) * (1.0 + distance) * torch.exp(-distance)
        K = values["covar_module.outputscale"] * K + values["likelihood.noise_covar.noise"] * identity
        mean = values["mean_module.constant"].expand(len(y))
        return -torch.distributions.MultivariateNormal(mean, K).log_prob(y)

    return torch.linalg.inv(torch.autograd.functional.hessian(negative_log_likelihood, parts.present()))


def relative_error(found, expected):
    """The largest error of a covariance, relative to standard deviations."""
    deviations = expected.diagonal().sqrt()
    return float(((found - expected) / deviations / deviations.unsqueeze(-1)).abs().max())


def test_the_covariance_is_the_inverse_of_autograds_hessian(trained):
    model, _, known = trained
    expected = dense_covariance(model)
    assert relative_error(known.covariance, expected) < 0.005
    assert torch.allclose(known.axes @ known.axes.mT, known.covariance)
    assert known.expected_gain < 1e-3
    assert known.unknown == []
    relative = dict(zip(known.names, (expected.diagonal().sqrt() / known.values).tolist(), strict=True))
    found = dict(zip(known.names, (known.standard_errors / known.values).tolist(), strict=True))
    values = dict(zip(known.names, known.values.tolist(), strict=True))
    length, noise = "covar_module.base_kernel.kernels.0.lengthscale", "likelihood.noise_covar.noise"
    assert values[length] == pytest.approx(model.covar_module.base_kernel.kernels[0].lengthscale.item())
    assert values[noise] == pytest.approx(model.likelihood.noise.item())
    assert found["mean_module.constant"] == pytest.approx(relative["mean_module.constant"], rel=0.01)
    assert found[length] == pytest.approx(relative[length] * values[length], rel=0.01)
    assert found[noise] == pytest.approx(relative[noise] * (values[noise] - 1e-4), rel=0.01)  # above GPyTorch's bound
    assert f"{values[length]:.3g} +- {found[length] * values[length]:.2g}" in str(known)


def test_estimated_likelihoods_give_nearly_the_same(trained):
    model, _, known = trained
    other, _ = model_of(field())
    other.load_state_dict(model.state_dict())
    with gaps.settings.dense_size(0), gaps.settings.logdet_method("stochastic"):
        history = gaps.fit(other, steps=0, progress=False, uncertainty=True)
    ratio = history.uncertainty.covariance.diagonal() / known.covariance.diagonal()
    assert (ratio.log().abs() < 0.5).all()  # 20 probes, of about 70 observations


def test_predictions_leave_the_model_as_it_was(trained):
    model, grid, known = trained
    with torch.no_grad():
        before = model(grid.points()).mean.clone()
    state = {name: own.clone() for name, own in model.state_dict().items()}
    known.predict(model, grid.points()[:5])
    assert not model.training
    assert all(torch.equal(own, state[name]) for name, own in model.state_dict().items())
    with torch.no_grad():
        assert torch.allclose(model(grid.points()).mean, before, rtol=1e-10)


def test_a_fit_that_has_ended_can_still_be_asked(trained, tmp_path):
    model, _ = model_of(field())
    options = {"steps": 300, "patience": 3, "progress": False, "checkpoint": tmp_path / "fit"}
    assert gaps.fit(model, **options).uncertainty is None
    known = gaps.fit(model, **options, uncertainty=True).uncertainty
    assert torch.allclose(known.covariance, trained[2].covariance, rtol=1e-6)
    for (name, mine), theirs in zip(model.named_parameters(), trained[0].parameters(), strict=True):
        assert torch.equal(mine, theirs), name  # asked or not, the fit ends at the same place


def test_units_of_data_and_axes_do_not_matter(trained):
    model, grid, known = trained
    with torch.no_grad():
        plain = known.predict(model, grid.points())
    step, scale = 1e-3, 100.0
    other, far = model_of(scale * field(), step, noise_constraint=GreaterThan(1e-4 * scale**2))
    for (_, mine), (part, theirs) in zip(
        model.named_parameters(), zip(Coordinates(other).parts, Coordinates(model).parts, strict=True), strict=True
    ):
        value = theirs.value(theirs.present())
        unit = {"noise": scale**2, "constant": scale, "outputscale": scale**2}.get(part.name.rpartition(".")[2], step)
        raw = unit * value if part.constraint is None else part.constraint.inverse_transform(unit * value)
        assert mine.shape == raw.shape
        part.parameter.data.copy_(raw)
    found = gaps.fit(other, steps=0, progress=False, uncertainty=True).uncertainty
    with torch.no_grad():
        wide = found.predict(other, far.points())
    assert torch.allclose(wide.mean, scale * plain.mean, rtol=1e-3, atol=1e-3 * scale)
    assert torch.allclose(wide.variance, scale**2 * plain.variance, rtol=5e-3)


# -- series with two hyperparameters: brute force ----------------------------------------------------------------------

NOISE = 0.01


def series():
    """A model of a series with a length-scale and a scale, trained, and points in and beside its gap."""
    t = torch.arange(40, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    root = torch.linalg.cholesky(RBFKernel().double()(t / 3.5).to_dense().detach() + 1e-8 * torch.eye(40))
    values = root @ torch.randn(40, generator=generator, dtype=torch.float64)
    values = values + math.sqrt(NOISE) * torch.randn(40, generator=generator, dtype=torch.float64)
    values[16:25] = torch.nan
    grid, x, y = gaps.from_array(values)
    kernel = ScaleKernel(gaps.GappyGridKernel([with_length(RBFKernel(), 3.0)], grid))
    model = Model(x, y, gaps.GappyGridLikelihood(noise=NOISE), kernel)
    model.mean_module = gpytorch.means.ZeroMean()
    return model.double(), grid.points()[[3, 17, 18, 20, 22, 24, 30]]


def dense_series(model, points, coordinates):
    """Log-likelihood, means and variances for logarithms of both. shape: (n,), (n, m), (n, m)"""
    x, y = model.train_inputs[0], model.train_targets
    scale, length = coordinates.exp().unsqueeze(-1).unsqueeze(-1).unbind(1)

    def kernel(a, b):
        return scale * torch.exp(-0.5 * ((a - b.mT) / length) ** 2)

    root = torch.linalg.cholesky(kernel(x, x) + NOISE * torch.eye(len(y), dtype=torch.float64))
    white = torch.linalg.solve_triangular(root, y.unsqueeze(-1), upper=False)
    cross = torch.linalg.solve_triangular(root, kernel(x, points), upper=False)
    log_likelihood = -0.5 * white.square().sum((-2, -1)) - root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    mean = (cross.mT @ white).squeeze(-1)
    return log_likelihood, mean, scale.squeeze(-1) - cross.square().sum(-2)


def total(weights, mean, variance):
    """The law of total variance for given weights. shape: (m,)"""
    weights = (weights / weights.sum()).unsqueeze(-1)
    center = (weights * mean).sum(0)
    return center, (weights * (variance + (mean - center).square())).sum(0)


def test_error_bars_are_those_of_brute_force_integration():
    model, points = series()
    known = fitted(model)
    assert known.names == ["covar_module.outputscale", "covar_module.base_kernel.kernels.0.lengthscale"]
    line = torch.linspace(-5, 5, 41, dtype=torch.float64)
    steps = torch.cartesian_prod(line, line)
    nodes = known.coordinates + steps @ known.axes.mT
    log_likelihood, mean, variance = dense_series(model, points, nodes)
    normal = total(torch.exp(-0.5 * steps.square().sum(-1)), mean, variance)
    with torch.no_grad():
        plain, found = model(points), known.predict(model, points)
    deviation = normal[1].sqrt()
    assert (((found.mean - normal[0]) / deviation).abs() < 0.03).all()
    assert torch.allclose(found.variance, normal[1], rtol=0.03)
    exact = total(torch.exp(log_likelihood - log_likelihood.max()), mean, variance)  # the posterior as it is
    missing, left = ((exact[1] - own.variance).sum() for own in (plain, found))
    assert missing > 0.2 * exact[1].sum()  # by the optimum alone
    assert left.abs() < 0.5 * missing


# -- counts ------------------------------------------------------------------------------------------------------------


def test_counts_have_the_curvature_of_dense_laplace():
    t = torch.linspace(0, 3, 6, dtype=torch.float64)
    counts = torch.poisson(4 + 3 * torch.sin(t).unsqueeze(-1) * torch.cos(t), torch.Generator().manual_seed(0))
    counts[2:4, 3:5] = torch.nan
    grid, x, y = gaps.from_array(counts, [t, t])
    model = LaplaceModel(x, y, PoissonLikelihood(), grid).double()
    for kernel in model.covar_module.base_kernel.kernels:
        kernel.lengthscale = 1.0
        kernel.requires_grad_(False)
    known = fitted(model)
    assert known.names == ["mean_module.constant", "covar_module.outputscale"]
    coordinates, step = Coordinates(model), 0.02

    def value(first, second):
        coordinates.set(known.coordinates + step * torch.tensor([first, second], dtype=torch.float64))
        return -dense_laplace(model, x[:1]).log_marginal

    with coordinates.restored():
        middle, mixed = value(0, 0), value(1, 1) - value(1, -1) - value(-1, 1) + value(-1, -1)
        own = [value(*sides) + value(*(-side for side in sides)) - 2 * middle for sides in ((1, 0), (0, 1))]
    hessian = torch.tensor([[own[0], mixed / 4], [mixed / 4, own[1]]], dtype=torch.float64) / step**2
    assert relative_error(known.covariance, torch.linalg.inv(hessian)) < 0.01
    wider = known.predict(model, grid.points())
    with torch.no_grad():
        assert (wider.variance > model(grid.points()).variance).all()
        assert model.likelihood(wider).mean.isfinite().all()


# -- bounds, and what the data do not say ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraint", "value"),
    [(GreaterThan(0.2), 0.5), (LessThan(3.0), 0.5), (Interval(0.1, 2.0), 0.5), (Interval(0.1, 2.0), 1.9999)],
)
def test_coordinates_and_their_gradients_go_both_ways(constraint, value):
    kernel = RBFKernel(lengthscale_constraint=constraint).double()
    kernel.lengthscale = value
    parts = Coordinates(kernel)
    raw, at = kernel.raw_lengthscale.detach().clone(), parts.present()
    assert parts.names == ["lengthscale"]
    assert parts.values(at).item() == pytest.approx(value)
    (3.0 * kernel.lengthscale.square()).sum().backward()
    (slope,) = torch.autograd.functional.jacobian(parts.values, at)
    assert parts.gradient(at).item() == pytest.approx(float(slope) * 6.0 * value)
    parts.set(at)
    assert torch.allclose(kernel.raw_lengthscale, raw)
    parts.set(at + 50.0)
    assert torch.isfinite(kernel.lengthscale) or isinstance(constraint, LessThan)


def test_what_data_do_not_determine_has_finite_error_bars_and_is_named():
    model, grid = model_of(field(), kernel=lambda kernel: ScaleKernel(ScaleKernel(kernel)))  # two scales: one too many
    known = fitted(model)
    scales = [name for name in known.names if name.endswith("outputscale")]
    assert torch.linalg.eigvalsh(known.covariance).min() > 0
    errors = dict(zip(known.names, known.covariance.diagonal().sqrt().tolist(), strict=True))
    assert len(scales) == 2
    assert all(1.0 < errors[name] < 2.5 for name in scales)
    product = torch.tensor([float(name in scales) for name in known.names], dtype=torch.float64)
    assert (product @ known.covariance @ product).sqrt() < 1.0  # their product is known
    assert known.predict(model, grid.points()).variance.isfinite().all()


def test_a_fit_that_was_cut_short_says_so():
    model, _ = model_of(field())
    with pytest.warns(gaps.NotConvergedWarning, match="nats above the last hyperparameters"):
        gaps.fit(model, steps=3, progress=False, uncertainty=True)


@pytest.mark.parametrize(
    ("finishes", "words"), [(False, "two evaluations of the likelihood differ"), (True, "fail: no")]
)
def test_a_likelihood_without_derivatives_says_so(trained, monkeypatch, finishes, words):
    def fail(run):
        raise gaps.FitError("no", 0, run.history)

    monkeypatch.setattr(TrainingRun, "begin_finish", lambda run: finishes and bool(run._make_finish()))
    monkeypatch.setattr(TrainingRun, "_evaluate", fail)
    model, _ = model_of(field())
    model.load_state_dict(trained[0].state_dict())
    with pytest.warns(gaps.NotConvergedWarning, match=f"uncertainty: not known, since .*{words}"):
        assert gaps.fit(model, steps=0, progress=False, uncertainty=True).uncertainty is None
    for name, own in model.state_dict().items():
        assert torch.equal(own, trained[0].state_dict()[name])


def test_what_has_no_uncertainty_is_refused(trained, monkeypatch):
    model, grid = model_of(field())
    with pytest.raises(ValueError, match="fit: uncertainty: got 1, expected True or False"):
        gaps.fit(model, uncertainty=1)
    mll = LeaveOneOutPseudoLikelihood(model.likelihood, model)
    with pytest.raises(ValueError, match="True with a LeaveOneOutPseudoLikelihood, expected a marginal likelihood"):
        gaps.fit(model, mll=mll, uncertainty=True)
    monkeypatch.setattr(fit_module, "_MOST_WITH_UNCERTAINTY", 4)
    with pytest.raises(ValueError, match="True with 5 parameters, expected at most 4"):
        gaps.fit(model, uncertainty=True)
    with pytest.raises(ValueError, match=r"model: got one with .*, expected the trained one with"):
        trained[2].predict(series()[0], grid.points())
