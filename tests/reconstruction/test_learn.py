"""``gaps.fit_reconstruction``: dense gradients at what it has learned, other fits, checkpoints, and wrong arguments."""

import copy
import math

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import IndexKernel, MaternKernel, RBFKernel, ScaleKernel

import gpytorch_gaps as gaps
from gpytorch_gaps.linalg.masked_grid import MaskedGrid
from gpytorch_gaps.linalg.truncated import truncated_eigh
from gpytorch_gaps.reconstruction import learner as module
from gpytorch_gaps.reconstruction import learning_data, likelihood
from gpytorch_gaps.reconstruction.hyperparameters import Hyperparameters
from gpytorch_gaps.reconstruction.inputs import Problem
from gpytorch_gaps.reconstruction.scoring import fisher_information
from gpytorch_gaps.reconstruction.sharding import ReplicatedWeights
from gpytorch_gaps.reconstruction.weight_space import WeightSpace
from tests import _dense as dense
from tests._covering import covering

SHAPES = {"1 axis": (200,), "2 axes": (22, 18), "3 axes": (9, 8, 7)}
TRUE = {"scale": 2.0, "length": 0.25}


def axes_of(shape):
    return [np.linspace(0.0, 1.0, size) for size in shape]


def kernels_of(shape, off=1.0, kind=RBFKernel):
    """One kernel per axis, the first with a scale; all hyperparameters `off` times those of the data."""
    kernels = [kind().double() for _ in shape]
    for kernel in kernels:
        kernel.lengthscale = off * TRUE["length"]
    kernels[0] = ScaleKernel(kernels[0]).double()
    kernels[0].outputscale = off * TRUE["scale"]
    return kernels


def draw(shape, pattern="random", noise=1e-2, seed=0, kind=RBFKernel):
    """A grid with gaps, drawn from the kernels with these hyperparameters."""
    with torch.no_grad():
        factors = [
            kernel(torch.as_tensor(axis)).to_dense()
            for kernel, axis in zip(kernels_of(shape, kind=kind), axes_of(shape), strict=True)
        ]
    roots = [torch.linalg.cholesky(factor + 1e-10 * torch.eye(len(factor))) for factor in factors]
    field = dense.kron(roots) @ dense.randn(math.prod(shape), seed=seed)
    values = np.full(math.prod(shape), np.nan)
    index = dense.observed(pattern, shape, 0.4, seed)
    values[index] = (field + math.sqrt(noise) * dense.randn(len(field), seed=seed + 1))[index]
    return values.reshape(shape)


def learn(shape, noise=1e-2, off=2.0, kind=RBFKernel, pattern="random", seed=0, **options):
    values, kernels = draw(shape, pattern, noise, seed, kind), kernels_of(shape, off, kind)
    options = {"progress": False, **options}
    return values, gaps.fit_reconstruction(values, axes_of(shape), kernels, off * noise, **options)


def dense_score(values, axes, kernels, noise):
    """The log-likelihood, its gradient by logarithms of hyperparameters, and their Fisher information, dense."""
    index = np.flatnonzero(~np.isnan(values))
    y = torch.as_tensor(values.ravel()[index])
    own = Hyperparameters([copy.deepcopy(kernel) for kernel in kernels], noise)

    def system(vector):
        own.set(vector)
        with torch.no_grad():
            factors = [kernel(torch.as_tensor(x)).to_dense() for kernel, x in zip(own.kernels, axes, strict=True)]
        return dense.system(factors, torch.as_tensor(index), torch.tensor([own.noise], dtype=torch.float64))

    at, h = own.vector, 1e-4
    matrix = system(at)
    parts = [(system(at + h * unit) - system(at - h * unit)) / (2 * h) for unit in torch.eye(len(at)).double()]
    a = torch.linalg.solve(matrix, y)
    scaled = [torch.linalg.solve(matrix, part) for part in parts]
    gradient = torch.stack([0.5 * (a @ part @ a - one.trace()) for part, one in zip(parts, scaled, strict=True)])
    information = torch.stack([torch.stack([0.5 * (one * two.mT).sum() for two in scaled]) for one in scaled])
    value = -0.5 * (y @ a + torch.logdet(matrix) + len(y) * math.log(2 * math.pi))
    return float(value), gradient, information


@covering(shape=SHAPES, pattern=["random", "block", "slice"], noise=[1e-1, 1e-2, 1e-4])
def test_the_gradient_of_dense_algebra_is_zero_at_what_was_learned(shape, pattern, noise):
    values, learned = learn(SHAPES[shape], noise, pattern=pattern, tolerance=1e-3)
    assert learned.converged
    value, gradient, information = dense_score(values, axes_of(SHAPES[shape]), learned.kernels, learned.noise)
    assert float(gradient @ torch.linalg.solve(information, gradient)) ** 0.5 < 3e-3
    assert learned.log_likelihood == pytest.approx(value, abs=1e-4)
    assert learned.steps[-1].probe_error == 0.0


def test_probes_leave_what_they_say(monkeypatch):
    monkeypatch.setattr(likelihood, "_MOST_EXACT_WEIGHTS", 0)
    shape = (40, 36)
    values, learned = learn(shape)
    assert learned.converged
    value, gradient, information = dense_score(values, axes_of(shape), learned.kernels, learned.noise)
    distance = float(gradient @ torch.linalg.solve(information, gradient)) ** 0.5
    assert 0.0 < learned.steps[-1].probe_error < 0.1
    assert distance < 0.1 + 4.0 * learned.steps[-1].probe_error
    assert abs(learned.log_likelihood - value) < 5.0 * learned.log_likelihood_error + 0.01


def test_it_agrees_with_fit():
    shape = (16, 14)
    values, learned = learn(shape, tolerance=1e-3, kind=MaternKernel, noise=1e-1)
    grid, x, y = gaps.from_array(values, axes_of(shape))
    likelihood = gaps.GappyGridLikelihood()

    class Model(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gaps.GappyGridKernel(kernels_of(shape, kind=MaternKernel), grid)

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Model().double()
    likelihood.noise = 0.1
    history = gaps.fit(model, steps=100, lr=0.1, progress=False)
    assert history.converged
    theirs = Hyperparameters(list(model.covar_module.kernels), likelihood.noise.item()).values
    for name, value in learned.values.items():
        assert value == pytest.approx(theirs[name], rel=0.01)


def test_a_part_of_the_data_comes_first_and_changes_nothing(monkeypatch):
    shape = (60, 50)
    values, expected = learn(shape, tolerance=1e-2)
    monkeypatch.setattr(learning_data, "PART_CELLS", 500)
    monkeypatch.setattr(learning_data, "_CELLS_PER_FUNCTION", 1)
    background = np.broadcast_to(np.arange(60.0)[:, None], shape)
    kernels = kernels_of(shape, 2.0)
    options = {"tolerance": 1e-2, "progress": False}
    learned = gaps.fit_reconstruction(values + background, axes_of(shape), kernels, 0.02, mean=background, **options)
    used = [step.num_train for step in learned.steps]
    assert used == sorted(used)
    assert used[0] < used[-1] / 3
    assert used[-1] == np.isfinite(values).sum()
    assert used.count(used[-1]) < len(expected.steps)
    for name, value in learned.values.items():
        assert value == pytest.approx(expected.values[name], rel=1e-3)


# -- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_without_gaps_the_fisher_information_is_that_of_dense_algebra(shape):
    shape, noise = SHAPES[shape], 1e-2
    values, kernels = draw(shape, "none", noise), kernels_of(shape)
    problem = Problem(values, axes_of(shape), kernels, noise)
    own = Hyperparameters(problem.kernels, noise)
    basis = truncated_eigh(own.factors(problem.grid), 1e-9 * noise)
    space = WeightSpace(MaskedGrid(torch.ones(shape, dtype=torch.bool)), ReplicatedWeights(basis), noise)
    found = fisher_information(space, own.derivatives(problem.grid, basis))
    _, _, expected = dense_score(values, axes_of(shape), kernels, noise)
    assert dense.relative(found, expected) < 1e-4


def test_kernels_of_any_kind():
    """Several length-scales, bounds, fixed parameters, an axis of labels, a kernel of two axes, and a matrix."""
    x = np.linspace(0.0, 1.0, 12)
    pairs = np.stack([np.repeat(x[:4], 3), np.tile(x[:3], 4)], -1)
    ard = RBFKernel(ard_num_dims=2, lengthscale_constraint=gpytorch.constraints.GreaterThan(0.05))
    bounded = RBFKernel(lengthscale_constraint=gpytorch.constraints.Interval(0.05, 2.0))
    fixed = ScaleKernel(RBFKernel())
    fixed.raw_outputscale.requires_grad_(False)
    shared = MaternKernel()
    torch.manual_seed(0)
    problem = Problem(
        np.zeros((12, 12, 12, 4, 12, 12)),
        [pairs, x, x, np.arange(4.0), x, x],
        [ard, bounded, fixed, IndexKernel(num_tasks=4, rank=1), shared, shared],
        0.1,
    )
    own = Hyperparameters(problem.kernels, 0.1)
    assert len(own) == 2 + 1 + 1 + 4 + 4 + 1 + 1
    before, vector = own.values, own.vector
    own.set(vector)
    assert own.values == pytest.approx(before, rel=1e-6)
    factors = own.factors(problem.grid)
    basis = truncated_eigh(factors, 1e-5)
    found = own.derivatives(problem.grid, basis)
    assert torch.equal(own.vector, vector)
    assert [sorted(one) for one in found] == [[0], [0], [1], [2], *8 * [[3]], [4, 5]]
    for place, one in enumerate(found):
        unit = torch.eye(len(own), dtype=torch.float64)[place]
        for axis, derivative in one.items():
            changed = {}
            for step in (-4e-4, -2e-4, 2e-4, 4e-4):
                own.set(vector + step * unit)
                changed[step] = own.factors(problem.grid)[axis]
            # of fourth order: shorter steps round more where eigenvalues are small
            difference = 8 * (changed[2e-4] - changed[-2e-4]) - (changed[4e-4] - changed[-4e-4])
            scaled = basis.vectors[axis] / basis.values[axis].sqrt()
            expected = scaled.mT @ (difference / 2.4e-3) @ scaled
            assert dense.relative(derivative, expected) < 1e-4
    own.set(vector)


def test_what_the_user_holds_is_not_modified():
    values, kernels = draw((14, 12)), kernels_of((14, 12), 2.0)
    before, states = values.copy(), [copy.deepcopy(kernel.state_dict()) for kernel in kernels]
    learned = gaps.fit_reconstruction(values, axes_of((14, 12)), kernels, 0.02, progress=False)
    np.testing.assert_array_equal(values, before)
    for kernel, state in zip(kernels, states, strict=True):
        assert all(torch.equal(own, state[name]) for name, own in kernel.state_dict().items())
    result = gaps.reconstruct(values, axes_of((14, 12)), learned.kernels, learned.noise, progress=False)
    assert result.report.converged
    assert result.report.misfit == pytest.approx(1.0, abs=0.3)


def test_one_kernel_of_two_axes_remains_one():
    shape, kernel = (14, 12), RBFKernel()
    kernel.lengthscale = 0.5
    learned = gaps.fit_reconstruction(draw(shape), axes_of(shape), [kernel, kernel], 0.02, progress=False)
    assert learned.kernels[0] is learned.kernels[1]
    assert list(learned.values) == ["axis 0: lengthscale", "noise"]


# -- files and errors ------------------------------------------------------------------------------------------------


def test_a_checkpoint_continues_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(learning_data, "PART_CELLS", 100)
    monkeypatch.setattr(learning_data, "_CELLS_PER_FUNCTION", 1)
    shape, path = (30, 26), tmp_path / "state.pt"
    values, expected = learn(shape)
    step, taken = module.Learner.step, []

    def interrupted(self):
        if len(taken) in (1, 4):
            taken.append("interrupted")
            raise KeyboardInterrupt
        taken.append("step")
        step(self)

    monkeypatch.setattr(module.Learner, "step", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            learn(shape, checkpoint=path)
    _, learned = learn(shape, checkpoint=path)
    assert taken.count("step") == len(expected.steps) == len(learned.steps)
    assert learned.values == pytest.approx(expected.values, rel=1e-12)
    _, again = learn(shape, checkpoint=path)  # a finished run returns at once
    assert taken.count("step") == len(expected.steps)
    # what is kept are logarithms, which round
    assert again.values == pytest.approx(learned.values, rel=1e-12)
    assert again.deviations == learned.deviations
    assert again.log_likelihood == learned.log_likelihood
    with pytest.raises(ValueError, match=r"checkpoint: .* belongs to another run: numbers differ"):
        learn(shape, checkpoint=path, tolerance=0.2)
    with pytest.raises(ValueError, match=r"checkpoint: .* belongs to another run: values differ"):
        gaps.fit_reconstruction(2 * values, axes_of(shape), kernels_of(shape, 2.0), 0.02, checkpoint=path)


def test_a_fit_that_has_not_converged_says_so():
    with pytest.warns(gaps.NotConvergedWarning, match="after 2 steps, the maximum of the likelihood is estimated"):
        _, learned = learn((14, 12), steps=2)
    assert not learned.converged
    assert "2 steps, not converged" in repr(learned)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": iter([np.zeros((14, 12))])}, "values: got .*iterator, expected an array: every step reads"),
        ({"values": np.full((14, 12), np.nan)}, "values: got 168 entries, all of them gaps"),
        ({"noise": 0.0}, "noise: got 0.0, expected a variance above 0"),
        ({"steps": 0}, "steps: got 0"),
        ({"probes": 1}, "probes: got 1"),
        ({"tolerance": -1.0}, "tolerance: got -1.0"),
        ({"kernels": [RBFKernel()]}, "kernels: got 1, expected 2"),
        ({"kernels": [IndexKernel(num_tasks=600, rank=1), RBFKernel()]}, "kernels: got 1201 hyperparameters"),
    ],
)
def test_what_is_wrong_is_named(change, message):
    arguments = {"values": draw((14, 12)), "axes": axes_of((14, 12)), "kernels": kernels_of((14, 12)), "noise": 0.1}
    with pytest.raises(ValueError, match=message):
        gaps.fit_reconstruction(**{**arguments, **change}, progress=False)
