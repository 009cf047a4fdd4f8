"""``GappyGridModel`` against ``SingleTaskGP``, which is dense: posteriors, fantasies, acquisition functions, fits."""

import doctest
from importlib.util import find_spec

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood

import gpytorch_gaps as gaps
from tests._defaults import defaults_kept

pytestmark = [
    pytest.mark.skipif(find_spec("botorch") is None, reason="botorch is not installed"),
    pytest.mark.filterwarnings("ignore:Data .input features. is not:UserWarning"),
]

NEAR = {"rtol": 1e-8, "atol": 1e-8}


@pytest.fixture(scope="module", autouse=True)
def other_tests_keep_their_settings():
    with defaults_kept():
        import botorch  # noqa: F401

        yield


def curves():
    """Rows of a 6 x 5 grid of which a third is missing, in random order, and their observations."""
    generator = torch.Generator().manual_seed(0)
    X = torch.cartesian_prod(*(torch.linspace(0, 1, m, dtype=torch.float64) for m in (6, 5)))
    rows = torch.randperm(30, generator=generator)[:20]
    noise = torch.randn(20, 1, generator=generator, dtype=torch.float64)
    return X[rows], torch.sin(3 * X[rows, :1]) * torch.cos(2 * X[rows, 1:]) + 3 + 0.1 * noise


def normalized(kind):
    from botorch.models.transforms.input import Normalize

    return {"input_transform": Normalize(2)} if kind == "normalized" else {}


def pair(kind="plain"):
    """Our model and the dense one, with the same hyperparameters."""
    from botorch.models import SingleTaskGP

    X, Y = curves()
    given = {"train_Yvar": 0.01 + 0.01 * Y.abs()} if kind == "known noise" else {}
    X = X * torch.tensor([40.0, 1e-3], dtype=X.dtype) if kind == "normalized" else X
    ours, theirs = (
        gaps.botorch.GappyGridModel(X, Y, **given, **normalized(kind)),
        SingleTaskGP(X, Y, **given, **normalized(kind)),
    )
    for kernel, length in zip(ours.covar_module.kernels, (0.5, 0.8), strict=True):
        kernel.lengthscale = length
    theirs.covar_module.lengthscale = torch.tensor([0.5, 0.8])
    for model in (ours, theirs):
        model.mean_module.constant = 0.2
        if kind != "known noise":
            model.likelihood.noise = 0.03
    return ours.eval(), theirs.eval()


def value(model):
    model.train()
    return ExactMarginalLogLikelihood(model.likelihood, model)(model(*model.train_inputs), model.train_targets)


def queries(ours):
    """Four batches of three points: off the grid, but for the first, which are cells."""
    X = ours.train_inputs[0]
    low, high = X.min(0).values, X.max(0).values
    unit = torch.rand(4, 3, 2, dtype=X.dtype, generator=torch.Generator().manual_seed(1))
    return torch.cat([X[:3].unsqueeze(0), low + (high - low) * unit])


@pytest.mark.parametrize("kind", ["plain", "normalized", "known noise"])
def test_it_is_the_dense_model(kind):
    from botorch.acquisition import LogExpectedImprovement, qLogExpectedImprovement
    from botorch.sampling import SobolQMCNormalSampler

    ours, theirs = pair(kind)
    X = queries(ours.train())
    found = []
    for model in (ours, theirs):
        numbers = [value(model)]
        posterior = model.posterior(X)
        numbers += [posterior.mean, posterior.variance, posterior.distribution.covariance_matrix]
        if kind != "known noise":
            numbers.append(model.posterior(X, observation_noise=True).variance)
        fantasy = model.fantasize(X[1], SobolQMCNormalSampler(torch.Size([3]), seed=2)).posterior(X[2])
        numbers += [fantasy.mean, fantasy.variance]
        x = X.clone().requires_grad_()
        sampler = SobolQMCNormalSampler(torch.Size([8]), seed=1)
        improvements = [
            LogExpectedImprovement(model, best_f=3.4)(x[:, :1]),
            qLogExpectedImprovement(model, best_f=3.4, sampler=sampler)(x),
        ]
        for improvement in improvements:
            numbers += [improvement, *torch.autograd.grad(improvement.sum(), x)]
        found.append([number.detach() for number in numbers])
    for number, expected in zip(*found, strict=True):
        torch.testing.assert_close(number, expected, **NEAR)


def test_by_default_it_is_single_task_gp():
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP

    X, Y = curves()
    models = gaps.botorch.GappyGridModel(X, Y), SingleTaskGP(X, Y)
    start, expected = (value(model).detach() for model in models)
    torch.testing.assert_close(start, expected, rtol=0, atol=1e-6)  # initial values are rounded to float32
    for model in models:
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        assert not model.training
    end, expected = (value(model).detach() for model in models)
    torch.testing.assert_close(end, expected, rtol=0, atol=1e-4)  # both stop near the same optimum
    assert expected > start + 0.01
    assert models[0].history.converged


def test_another_optimizer_is_used_as_it_is():
    from botorch.fit import fit_gpytorch_mll
    from botorch.optim.fit import fit_gpytorch_mll_torch

    model = gaps.botorch.GappyGridModel(*curves())
    before = value(model).detach()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    fit_gpytorch_mll(mll, optimizer=fit_gpytorch_mll_torch, optimizer_kwargs={"step_limit": 3})
    assert model.history is None
    assert not model.training
    assert value(model) > before


def test_bounds_that_adam_would_not_respect_are_refused():
    from botorch.fit import fit_gpytorch_mll

    bound = gpytorch.constraints.GreaterThan(0.1, transform=None, initial_value=0.5)
    model = gaps.botorch.GappyGridModel(*curves(), kernels=[RBFKernel(lengthscale_constraint=bound), RBFKernel()])
    with pytest.raises(ValueError, match=r"kernels.0.raw_lengthscale: got GreaterThan.* optimizer=fit_gpytorch_mll_s"):
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))


def test_groups_of_columns_replicates_and_gaps():
    """Column 1 is the epoch of configurations in the columns 0 and 2."""
    from botorch.models import SingleTaskGP
    from botorch.utils.datasets import SupervisedDataset

    X, Y = curves()
    configuration = torch.rand(6, 2, dtype=X.dtype, generator=torch.Generator().manual_seed(3))
    rows = configuration[(X[:, 0] * 5).round().long()]
    X = torch.stack([rows[:, 0], X[:, 1], rows[:, 1]], -1)
    X, Y = torch.cat([X, X[:2], X[:1] + 2]), torch.cat([Y, Y[:2] + 0.1, torch.full_like(Y[:1], torch.nan)])
    data = SupervisedDataset(X, Y, feature_names=["a", "epoch", "b"], outcome_names=["loss"], validate_init=False)
    kernels = [MaternKernel(ard_num_dims=2), ScaleKernel(MaternKernel(nu=1.5))]
    arguments = gaps.botorch.GappyGridModel.construct_inputs(data, groups=[[0, 2], [1]])
    ours = gaps.botorch.GappyGridModel(**arguments, kernels=kernels).eval()
    assert ours.covar_module.grid.shape == (7, 6)  # with the configuration and the epoch of the gap
    first, second = MaternKernel(ard_num_dims=2, active_dims=[0, 2]), MaternKernel(nu=1.5, active_dims=[1])
    theirs = SingleTaskGP(X[:-1], Y[:-1], covar_module=first * ScaleKernel(second)).eval()
    theirs.likelihood.noise = ours.likelihood.noise.detach()
    x = torch.cat([X[-1:], X[:4], X[:1] + 0.1])
    posterior, expected = ours.posterior(x), theirs.posterior(x)
    torch.testing.assert_close(posterior.mean, expected.mean, **NEAR)
    torch.testing.assert_close(posterior.variance, expected.variance, **NEAR)


def test_saved_and_loaded():
    ours, _ = pair("normalized")
    X = queries(ours.train())
    other = gaps.botorch.GappyGridModel(ours.train_inputs[0], curves()[1], **normalized("normalized"))
    other.load_state_dict(ours.state_dict())
    torch.testing.assert_close(other.posterior(X).mean, ours.posterior(X).mean, rtol=1e-12, atol=0)


def test_what_is_not_supported():
    from botorch.models.transforms.input import Warp

    model = gaps.botorch.GappyGridModel
    X, Y = curves()
    with pytest.raises(ValueError, match=r"train_X: got shape \(1, 20, 2\); expected \(N, d\)"):
        model(X[None], Y[None])
    with pytest.raises(ValueError, match=r"train_Y: got shape \(20, 2\).* ModelListGP"):
        model(X, Y.expand(-1, 2))
    with pytest.raises(ValueError, match=r"train_Y: .*inf"):
        model(X, Y.index_fill(0, torch.tensor([3]), torch.inf))
    with pytest.raises(ValueError, match="input_transform: got parameters to learn"):
        model(X, Y, input_transform=Warp(d=2, indices=[0, 1]))


def test_examples():
    """pytest does not collect them, as that would import BoTorch."""
    assert doctest.testmod(gaps.botorch).failed == 0


def test_exactly_the_public_names_are_shown():
    from tests.test_api_pages import shown

    assert [name for name in shown() if ".botorch." in name] == ["gpytorch_gaps.botorch.GappyGridModel"]
    assert gaps.botorch.__all__ == ["GappyGridModel"]
