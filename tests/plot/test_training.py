"""What the steps of a fit did, panel by panel."""

import copy

import gpytorch
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

import gpytorch_gaps as gaps
from gpytorch_gaps import plot, settings
from gpytorch_gaps.training.history import History
from tests.plot._drawn import panels_of, tick_texts


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, grid):
        super().__init__(x, y, gaps.GappyGridLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = ScaleKernel(gaps.GappyGridKernel([RBFKernel(), RBFKernel()], grid))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def test_the_history_of_a_fit():
    torch.manual_seed(0)
    axis = torch.linspace(0, 1, 8, dtype=torch.float64)
    values = torch.sin(6 * axis[:, None]) * torch.cos(4 * axis) + 0.1 * torch.randn(8, 8, dtype=torch.float64)
    values[3:5, 2:5] = torch.nan
    grid, x, y = gaps.from_array(values, [axis, axis])
    with settings.gap_method("fill"), settings.logdet_method("stochastic"):
        history = gaps.fit(Model(x, y, grid).double(), steps=3, progress=False)
    assert sum(history.iterations) > 0
    before = copy.deepcopy(history)
    loss, noise, iterations = panels_of(plot.history(history))
    assert history == before
    steps = np.arange(1, 4)
    assert loss.lines[0].get_xdata().tolist() == noise.lines[0].get_xdata().tolist() == steps.tolist()
    assert loss.lines[0].get_ydata().tolist() == history.loss
    assert noise.lines[0].get_ydata().tolist() == history.noise
    assert iterations.lines[0].get_ydata().tolist() == history.iterations
    best = loss.lines[1].get_xydata().tolist()
    assert best == [[1 + history.loss.index(history.best_loss), history.best_loss]]
    (band,) = loss.collections
    top = {x: y for x, y in band.get_paths()[0].vertices if y > history.loss[int(x) - 1]}
    assert top == pytest.approx(
        dict(zip(steps, np.add(history.loss, 2 * np.array(history.standard_error)), strict=True))
    )
    assert f"{history.best_loss:.4g} at best" in loss.get_title()
    assert f"{history.noise[-1]:.3g} at last" in noise.get_title()
    assert iterations.get_title() == f"CG iterations: {sum(history.iterations)} in all"
    assert iterations.get_ylim()[0] == 0.0
    assert {ax.get_xlabel() for ax in (loss, noise, iterations)} == {"step"}


def made_up(loss, noise=None, iterations=None, error=None):
    count = len(loss)
    return History(
        loss=loss, noise=noise or [None] * count, iterations=iterations or [0] * count,
        standard_error=error or [None] * count,
    )  # fmt: skip


def test_nothing_is_drawn_of_what_there_is_none():
    (loss,) = panels_of(plot.history(made_up([2.0, 1.0, 1.5])))
    assert not loss.collections
    assert loss.lines[1].get_xydata().tolist() == [[2, 1.0]]
    assert not panels_of(plot.history(made_up([2.0, 1.0], error=[0.0, 0.0])))[0].collections  # exact


def test_one_step_is_seen():
    (loss,) = panels_of(plot.history(made_up([2.0])))
    assert loss.lines[0].get_marker() == "o"
    assert tick_texts(loss.xaxis) == ["1"]


def test_steps_are_counted_in_whole_numbers():
    (loss,) = panels_of(plot.history(made_up([3.0, 2.0, 1.0])))
    assert tick_texts(loss.xaxis) == ["1", "2", "3"]


@pytest.mark.parametrize(("noise", "scale"), [([1.0, 0.5], "linear"), ([1.0, 0.01], "log"), ([1.0, 0.0], "linear")])
def test_noise_that_falls_far_is_on_a_logarithmic_scale(noise, scale):
    assert panels_of(plot.history(made_up([2.0, 1.0], noise)))[1].get_yscale() == scale


def test_steps_without_a_loss():
    (loss,) = panels_of(plot.history(made_up([np.nan, np.nan])))
    assert loss.get_title() == "loss, nats per observation"
    (loss,) = panels_of(plot.history(made_up([2.0, 1.0, np.nan])))
    assert loss.lines[1].get_xydata().tolist() == [[2, 1.0]]


@pytest.mark.parametrize(
    ("history", "message"),
    [
        (History(), "history: got 0 steps; expected at least one"),
        ([1.0, 2.0], "history: got list; expected the History that fit returns"),
        (None, "history: got NoneType"),
    ],
)
def test_errors_name_the_argument_and_leave_no_figure(history, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        plot.history(history)
    assert not plt.get_fignums()
