"""Robust likelihoods: gross errors are found, named and not believed, and data without any lose nothing."""

import math

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood

import gpytorch_gaps as gaps
from gpytorch_gaps.likelihoods.gross_errors import _from_others
from tests.workflow._pairs import Model, with_length

SHAPE, NOISE = (14, 20), 0.1
AXES = [torch.arange(size, dtype=torch.float64) for size in SHAPE]


def field(seed=0):
    """A rough function, observations of it with a hole and scattered gaps, and a copy with 5 % of gross errors."""
    generator = torch.Generator().manual_seed(seed)
    roots = [torch.linalg.cholesky(MaternKernel(nu=1.5).double()(axis / 6.0).to_dense().detach()) for axis in AXES]
    truth = roots[0] @ torch.randn(SHAPE, generator=generator, dtype=torch.float64) @ roots[1].mT
    clean = truth + NOISE * torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    gap = torch.rand(SHAPE, generator=generator) < 0.2
    gap[3:7, 5:11] = True
    clean[gap] = torch.nan
    bad = torch.zeros(SHAPE, dtype=torch.bool)
    bad.view(-1)[torch.randperm(bad.numel(), generator=generator)[:10]] = True
    bad[10:12, 14:16] = True  # a block, each cell with an error of its own
    bad &= ~gap
    size = NOISE * 10.0 * 100.0 ** torch.rand(SHAPE, generator=generator, dtype=torch.float64)
    size = size * torch.where(torch.rand(SHAPE, generator=generator) < 0.5, -1.0, 1.0)
    return truth, clean, torch.where(bad, clean + size, clean), bad


def model_of(values, noise=None, robust=True, known=None, **options):
    grid, x, y = gaps.from_array(values, AXES)
    kernels = [with_length(MaternKernel(nu=1.5), 6.0) for _ in AXES]
    likelihood = gaps.GappyGridLikelihood(known, robust=robust, **options)
    model = Model(x, y, likelihood, ScaleKernel(gaps.GappyGridKernel(kernels, grid))).double()
    if noise is not None:
        likelihood.noise, model.covar_module.outputscale = noise, 1.0
    return model, grid


def mean_of(model, grid):
    with torch.no_grad():
        return model.eval()(grid.points()).mean.view(SHAPE)


def test_predictions_from_others_are_those_of_dense_algebra():
    model, _ = model_of(field()[2], NOISE**2)
    wild = model.likelihood.weigh(model)
    rho, y = model.likelihood.gross_errors.variance, model.train_targets
    assert 5 < int(wild.sum()) < 20
    noise = torch.full_like(y, NOISE**2)
    with torch.no_grad():
        distance, spread = _from_others(model.eval(), rho, noise)
        kernel = model.covar_module(*model.train_inputs).to_dense()
    inverse = torch.linalg.inv(kernel + torch.diag(noise + rho))
    left_out = 1.0 / inverse.diagonal()  # of the mean, zero
    assert torch.allclose(distance, (inverse @ y) * left_out, rtol=1e-6)
    assert torch.allclose(spread, left_out - rho, rtol=1e-6, atol=1e-8 * float(rho.max()))


def test_a_fit_finds_gross_errors_and_predicts_as_without_them():
    truth, clean, dirty, bad = field()
    observed = ~clean.isnan()
    model, grid = model_of(dirty)
    history = gaps.fit(model, steps=80, progress=False)
    assert torch.equal(model.likelihood.distrusted, bad[observed])
    assert f"{int(bad.sum())} observations distrusted" in str(history)
    assert math.sqrt(model.likelihood.noise.item()) == pytest.approx(NOISE, rel=0.15)
    plain, _ = model_of(clean, robust=False)
    plain.load_state_dict(model.state_dict(), strict=False)
    errors = [(mean_of(own, grid) - truth)[~observed].square().mean().sqrt() for own in (model, plain)]
    assert errors[0] < 1.1 * errors[1]


def test_without_gross_errors_nothing_changes():
    clean = field()[1]
    plain, grid = model_of(clean, NOISE**2, robust=False)
    robust, _ = model_of(clean, NOISE**2)
    assert not bool(robust.likelihood.weigh(robust).any())
    for result in (mean_of, lambda model, grid: model.likelihood(model(grid.points()[:7])).variance):
        assert torch.equal(result(plain, grid), result(robust, grid))


def test_the_likelihood_is_that_of_noise_and_gross_errors():
    model, _ = model_of(field()[2], NOISE**2)
    model.likelihood.weigh(model)
    model.train()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    got = mll(model(*model.train_inputs), model.train_targets)
    kernel = model.covar_module(*model.train_inputs).to_dense()
    diagonal = model.likelihood.noise + model.likelihood.gross_errors.variance
    dense = gpytorch.distributions.MultivariateNormal(model.mean_module(*model.train_inputs), kernel + diagonal.diag())
    expected = dense.log_prob(model.train_targets) / len(model.train_targets)
    assert got.item() == pytest.approx(expected.item(), rel=1e-8)
    parameters = list(model.parameters())
    pairs = zip(torch.autograd.grad(got, parameters), torch.autograd.grad(expected, parameters), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-9) for a, b in pairs)


@pytest.mark.parametrize("options", [{"noise_axis": 1}, {}])
def test_any_noise_can_have_gross_errors_beside_it(options):
    dirty = field()[2]
    grid, _, y = gaps.from_array(dirty, AXES)
    if "noise_axis" in options:
        model, _ = model_of(dirty, torch.full((SHAPE[1],), NOISE**2).double(), grid=grid, **options)
    else:
        model, _ = model_of(dirty, known=torch.full_like(y, NOISE**2))
        model.covar_module.outputscale = 1.0
    plain, _ = model_of(dirty, NOISE**2)
    assert torch.equal(model.likelihood.weigh(model), plain.likelihood.weigh(plain))


def test_estimated_variances_find_the_same():
    exact, _ = model_of(field()[2], NOISE**2)
    model, _ = model_of(field()[2], NOISE**2)
    state = torch.get_rng_state()
    with gaps.settings.dense_size(0):
        found = model.likelihood.weigh(model)
    assert torch.equal(found, exact.likelihood.weigh(exact))
    assert torch.equal(state, torch.get_rng_state())


def test_a_state_takes_its_gross_errors_along():
    dirty = field()[2]
    model, grid = model_of(dirty, NOISE**2)
    model.likelihood.weigh(model)
    other, _ = model_of(dirty)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.likelihood.distrusted, model.likelihood.distrusted)
    assert torch.allclose(mean_of(other, grid), mean_of(model, grid), atol=1e-10)


def test_a_resumed_fit_ends_where_an_uninterrupted_one_does(tmp_path):
    ends = []
    for path, legs in ((tmp_path / "once", (14,)), (tmp_path / "twice", (7, 14))):
        for steps in legs:
            model, _ = model_of(field()[2])
            history = gaps.fit(model, steps=steps, checkpoint=path, progress=False)
        ends.append((history.loss, history.num_distrusted, model.likelihood.gross_errors.variance.tolist()))
    assert ends[0] == ends[1]


def test_new_data_are_weighed_anew():
    clean, dirty = field()[1:3]
    observed = ~clean.isnan()
    model, grid = model_of(dirty, NOISE**2)
    with pytest.raises(ValueError, match=r"the 0 observations that were weighed. Try: likelihood.weigh\(model\)"):
        mean_of(model, grid)
    model.likelihood.weigh(model)
    more = model.eval()(grid.points()[:3]) and model.get_fantasy_model(grid.points()[70:72], torch.zeros(2).double())
    assert more(grid.points()[:3]).mean.shape == (3,)  # believed
    assert len(more.likelihood.weigh(more)) == int(observed.sum()) + 2
    model.set_train_data(targets=clean[observed], strict=False)
    with pytest.raises(ValueError, match=r"have changed since they were weighed; expected likelihood.weigh\(model\)"):
        mean_of(model, grid)
    assert not bool(model.likelihood.weigh(model).any())
    assert torch.allclose(mean_of(model, grid), mean_of(*model_of(clean, NOISE**2, robust=False)), atol=1e-10)


def test_an_untrained_model_of_data_far_from_its_mean_believes_most_of_them():
    model, _ = model_of(field()[1] + 280.0)
    assert float(model.likelihood.weigh(model).double().mean()) < 0.5


def test_what_cannot_be_weighed_is_refused():
    with pytest.raises(ValueError, match=r"robust: got a batch of shape \(2,\), expected True, for one model"):
        gaps.GappyGridLikelihood(robust=True, batch_shape=torch.Size([2]))
    with pytest.raises(ValueError, match="robust: got 1, expected True"):
        gaps.GappyGridLikelihood(robust=1)
    model, _ = model_of(field()[1])
    with pytest.raises(ValueError, match="model: got a model with another likelihood"):
        gaps.GappyGridLikelihood(robust=True).weigh(model)
    plain, _ = model_of(field()[1], robust=False)
    with pytest.raises(ValueError, match="robust: got False, expected a GappyGridLikelihood"):
        plain.likelihood.weigh(plain)
    y = torch.stack([model.train_targets] * 2)
    model.set_train_data(targets=y, strict=False)
    with pytest.raises(ValueError, match=r"train_targets: got shape \(2, \d+\), expected observations of shape \(N,\)"):
        model.likelihood.weigh(model)
