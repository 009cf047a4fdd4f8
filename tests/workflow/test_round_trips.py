"""Saved, copied, cast and moved models keep their grid, their gaps and their predictions."""

import copy
import io
import pickle

import gpytorch
import pytest
import torch

import gpytorch_gaps as gaps
from gpytorch_gaps.operators import SelectedKroneckerAddedDiagOperator
from gpytorch_gaps.operators.selected_kronecker_sum import SelectedKroneckerSumAddedDiagOperator
from tests._covering import in_turn
from tests.workflow._pairs import CASES

cases = pytest.mark.parametrize("case", CASES)


def make(case):
    """A model off its defaults, and the points to predict at."""
    pair = CASES[case](small=True)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in pair.ours.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return pair.ours, pair.test_x


def blank(case):
    """The same model at its defaults."""
    return CASES[case](small=True).ours


@cases
def test_the_state_of_another_grid_is_refused(case):
    """Data and axes would no longer belong together; hyperparameters alone are welcome."""
    model, x = make(case)
    twin = blank(case)
    for module in twin.modules():
        if isinstance(module, gaps.CartesianGrid):
            for axis in module.axes:
                axis.mul_(3.0)
    elsewhere = twin.state_dict()
    other = blank(case)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ValueError, match="is not axis 0 of this model's grid"):
        other.load_state_dict(elsewhere)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items() if ".grid." in name)
    learned = {name: value for name, value in model.state_dict().items() if ".grid." not in name}
    other.load_state_dict(learned, strict=False)
    for got, expected in zip(predictions(other, x), predictions(model, x), strict=True):
        assert torch.allclose(got, expected, rtol=1e-9, atol=1e-9)


def predictions(model, x):
    """Means and variances, and those of new observations where these have a noise."""
    model.eval()
    with torch.no_grad():
        posterior = model(x)
        results = [posterior.mean, posterior.variance]
        if model.likelihood.noise.size(-1) != model.train_targets.size(-1):
            results.append(model.likelihood(posterior).variance)
        return results


def log_likelihood(model):
    model.train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    return mll(model(*model.train_inputs), model.train_targets).sum()


def check_same(model, twin, x, tolerance=1e-9):
    for got, expected in zip(predictions(twin, x), predictions(model, x), strict=True):
        assert torch.allclose(got, expected, rtol=tolerance, atol=tolerance)
    assert torch.allclose(log_likelihood(twin), log_likelihood(model), rtol=tolerance)
    solved_with = twin.likelihood(twin(*twin.train_inputs)).lazy_covariance_matrix
    assert isinstance(solved_with, SelectedKroneckerAddedDiagOperator | SelectedKroneckerSumAddedDiagOperator)
    for own, other in zip(grids(model), grids(twin), strict=True):
        assert own is not other
        assert own.shape == other.shape
        assert all(torch.equal(a, b) for a, b in zip(own.axes, other.axes, strict=True))


def grids(model):
    return [module for module in model.modules() if isinstance(module, gaps.CartesianGrid)]


def through_a_file(value, **kwargs):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **kwargs)


@cases
def test_state_dict(case):
    model, x = make(case)
    twin = blank(case)
    twin.load_state_dict(through_a_file(model.state_dict(), weights_only=True))
    check_same(model, twin, x)


@cases
def test_state_dict_of_a_model_that_has_predicted(case):
    """Into one that has, too."""
    model, x = make(case)
    twin = CASES[case](small=True).ours
    for each in (model, twin):
        predictions(each, x)
    twin.load_state_dict(model.state_dict())
    twin.train()
    check_same(model, twin, x)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: through_a_file(model, weights_only=False),
}
WAYS_TO_COPY = list(COPIES)  # in turn: each case meets each of them once in the three tests below


@in_turn(case=CASES, how=WAYS_TO_COPY)
def test_copies(case, how):
    model, x = make(case)
    twin = COPIES[how](model)
    assert twin.training
    check_same(model, twin, x)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)  # the copy's own
    assert not torch.allclose(predictions(model, x)[0], predictions(twin, x)[0], atol=1e-4)


@in_turn(case=CASES, how=[*WAYS_TO_COPY[1:], *WAYS_TO_COPY[:1]])
def test_copies_of_a_model_that_has_predicted(case, how):
    """With its caches, which copies may or may not take along."""
    model, x = make(case)
    expected = predictions(model, x)
    twin = COPIES[how](model)
    assert not twin.training
    for got, own in zip(predictions(twin, x), expected, strict=True):
        assert torch.allclose(got, own, rtol=1e-9, atol=1e-9)
    check_same(model, twin, x)


@in_turn(case=CASES, how=[*WAYS_TO_COPY[2:], *WAYS_TO_COPY[:2]])
def test_copies_of_a_model_that_has_been_trained_and_has_predicted(case, how):
    """GPyTorch forgets its prediction strategy in ``train()``, and the graph that no copy can take along with it."""
    model, x = make(case)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    (-log_likelihood(model)).backward()
    optimizer.step()
    model.eval()(x).mean.sum().backward()
    model.train()
    check_same(model, COPIES[how](model), x)


@cases
def test_casts(case):
    """There and back; single precision keeps the numbers that it can."""
    model, x = make(case)
    expected = predictions(model, x)
    twin = copy.deepcopy(model.train()).float()
    assert {t.dtype for t in (*twin.parameters(), *twin.train_inputs, twin.train_targets)} == {torch.float32}
    assert all(grid.dtype == torch.float32 for grid in grids(twin))
    for got, own in zip(predictions(twin, x.float()), expected, strict=True):
        assert torch.allclose(got.double(), own, atol=2e-3)
    twin.train().double()
    assert all(grid.dtype == torch.float64 for grid in grids(twin))
    # coordinates have been rounded: the model's own points are still its cells, and the gaps still gaps
    for got, own in zip(predictions(twin, x.float().double()), expected, strict=True):
        assert torch.allclose(got, own, atol=2e-3)
    solved_with = twin.train().likelihood(twin(*twin.train_inputs)).lazy_covariance_matrix
    assert isinstance(solved_with, SelectedKroneckerAddedDiagOperator | SelectedKroneckerSumAddedDiagOperator)


@cases
def test_casts_of_a_model_that_has_predicted(case):
    """What was looked up, factorised or solved in one precision is not used in the other.

    As in GPyTorch a model is taken through ``train()`` first: its prediction strategy is not cast with it.
    """
    model, x = make(case)
    expected = predictions(model, x)
    for dtype in (torch.float32, torch.float64, torch.float32):
        model.train().to(dtype)
        for got, own in zip(predictions(model, x.float().to(dtype)), expected, strict=True):
            assert got.dtype == dtype
            assert torch.allclose(got.double(), own, atol=2e-3)


@cases
def test_to_where_it_is_changes_nothing(case):
    model, x = make(case)
    expected = predictions(model, x)
    for move in (lambda m: m.to("cpu"), lambda m: m.to(torch.float64), lambda m: m.cpu(), lambda m: m.double()):
        moved = move(model)
        assert moved is model
        for got, own in zip(predictions(model, x), expected, strict=True):
            assert torch.equal(got, own)


def test_a_cast_that_merges_coordinates_is_refused():
    """Minutes of a year in single precision are not told apart; the model stays as it was."""
    minutes = torch.tensor([2**24, 2**24 + 1, 2**24 + 3]).double()
    grid = gaps.CartesianGrid([minutes, torch.arange(2).double()])
    kernel = gaps.GappyGridKernel([gpytorch.kernels.RBFKernel(), gpytorch.kernels.RBFKernel()], grid).double()
    with pytest.raises(ValueError, match="axis 0: rows 0 and 1 are both"):
        kernel.float()
    assert grid.dtype == torch.float64


@cases
def test_training_goes_on_from_a_copy(case):
    """Two steps from a saved model and optimizer are those that the original would have taken."""

    def step(model, optimizer):
        optimizer.zero_grad()
        with gaps.settings.logdet_method("exact"):
            loss = -log_likelihood(model)
            loss.backward()
        optimizer.step()
        return loss.item()

    model, _ = make(case)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, weights_only=True)
    twin = blank(case)
    twin.load_state_dict(saved["model"])
    other = torch.optim.Adam(twin.parameters(), lr=0.1)
    other.load_state_dict(saved["optimizer"])
    assert [step(twin, other) for _ in range(2)] == pytest.approx([step(model, optimizer) for _ in range(2)], rel=1e-9)
