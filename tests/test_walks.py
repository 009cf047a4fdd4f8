"""The walks of docs/architecture.md, traced: a training step and a variance go where the page says they do."""

import re
from pathlib import Path

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

import gpytorch_gaps as gaps
from gpytorch_gaps.operators import noisy
from gpytorch_gaps.solvers import refine
from tests._trace import trace

PAGE = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()
PLAIN_FUNCTIONS = ("utils/", "linalg/", "autograd/", "grid/")  # floors of tensor functions and look-ups


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, grid, kernel):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = ScaleKernel(gaps.GappyGridKernel([kernel(), kernel()], grid))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def model_on(shape, kernel):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(*shape, generator=generator, dtype=torch.float64)
    values[torch.rand(*shape, generator=generator) < 0.5] = torch.nan
    grid, x, y = gaps.from_array(values)
    model = Model(x, y, gaps.GappyGridLikelihood(), grid, kernel).double()
    for part in model.covar_module.base_kernel.kernels:
        part.lengthscale = 4.0
    return model, grid, x, y


def modules_of(heading):
    """The modules that a walk of the page names."""
    walk = PAGE.split(f"### {heading}\n")[1].split("\n#")[0]
    return set(re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", walk))


@pytest.mark.parametrize("kernel", [RBFKernel, MaternKernel])
def test_a_training_step_enters_what_its_walk_names_and_leaves_twice_at_most(kernel):
    model, _, x, y = model_on((60, 50), kernel)
    assert len(y) > 800
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)

    def step():
        with gaps.settings.logdet_method("stochastic"), gaps.settings.preconditioner_rank(50):
            (-mll(model(x), y)).backward()

    step()
    found = trace(step)
    named = modules_of("A training step") - {"kernels/composite.py"}  # which is for sums and products
    assert named <= found.modules
    assert len(named) <= 15
    assert len(found.excursions) <= 2
    # the page names the spine; everything else above the plain functions is a helper of one of these
    assert len([module for module in found.modules if not module.startswith(PLAIN_FUNCTIONS)]) <= 32


def test_a_variance_has_one_accuracy_loop(monkeypatch):
    model, grid, _, _ = model_on((40, 30), MaternKernel)
    model.likelihood.noise = 20.0
    for part in model.covar_module.base_kernel.kernels:
        part.lengthscale = 40.0  # neighbours explain too little: "pathwise" has to make draws
    model.eval()
    counts = {"solves": 0, "loops": 0}

    def counting(owner, name, what):
        true = getattr(owner, name)

        def call(*arguments, **named):
            counts[what] += 1
            return true(*arguments, **named)

        return call

    def variance(method="exact"):
        few = gaps.settings.prediction_memory(2**21)  # at a time
        with torch.no_grad(), few, gaps.settings.variance_method(method), gaps.settings.gap_method("ignore"):
            return model(grid.points()).variance

    with torch.no_grad():
        model(grid.points()[:1])  # the mean
    found = trace(variance)
    drawn = {f"posterior/{module}.py" for module in ("drawn_variance", "regressions", "pilots", "pathwise")}
    assert modules_of("A variance") - drawn <= found.modules
    assert drawn <= modules_of("A variance") & trace(lambda: variance("pathwise")).modules
    monkeypatch.setattr(noisy, "solve_system", counting(noisy, "solve_system", "solves"))
    monkeypatch.setattr("gpytorch_gaps.solvers.solve.refine", counting(refine, "refine", "loops"))
    model.train()
    model.eval()
    variance()
    assert counts["solves"] > 5  # one for every chunk of points, one for the mean, whose guess may be its solution
    assert counts["solves"] - 1 <= counts["loops"] <= counts["solves"]
