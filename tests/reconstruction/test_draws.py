"""``reconstruct(draws=)``: standard deviations against dense ones, their stated errors, files, kills and processes."""

import gpytorch
import numpy as np
import pytest
import torch

import gpytorch_gaps as gaps
from gpytorch_gaps.reconstruction import checkpoint as states
from gpytorch_gaps.reconstruction import draws as module
from gpytorch_gaps.reconstruction import variance
from tests import _dense as dense
from tests._covering import covering
from tests._ranks import run_ranks
from tests.distributed import _work as work

SHAPES = {"1 axis": (120,), "2 axes": (22, 18), "3 axes": (9, 8, 7)}
MATRICES = {"smooth": dense.se, "rough": dense.matern32}


def reconstruct(shape, pattern="random", kind="smooth", noise=1e-2, dtype=np.float64, scale=1.0, **options):
    """A reconstruction from a grid with gaps, and the standard deviations of a dense GP."""
    factors = [MATRICES[kind](size) for size in shape]
    factors[0] = scale * factors[0]
    index = dense.observed(pattern, shape, 0.4)
    values = np.full(np.prod(shape), np.nan, dtype)
    values[index] = 0.0
    options = {"draws": 16, "progress": False, **options}
    result = gaps.reconstruct(values.reshape(shape), None, factors, scale * noise, **options)
    kernel = dense.kron(factors)
    system = kernel[index][:, index] + scale * noise * torch.eye(len(index), dtype=torch.float64)
    explained = (kernel[index] * torch.linalg.solve(system, kernel[index])).sum(0)
    return result, (kernel.diagonal() - explained).sqrt().reshape(shape)


def off(result, exact):
    """Relative errors of standard deviations."""
    return (result.std_slab(0, result.shape[0]).double() / exact - 1.0).abs().flatten()


@covering(
    shape=SHAPES,
    pattern=["random", "block", "slice"],
    kind=MATRICES,
    dtype=[np.float32, np.float64],
    noise=[1e-1, 1e-4],
)
def test_standard_deviations_are_within_their_stated_error(shape, pattern, kind, dtype, noise):
    result, exact = reconstruct(SHAPES[shape], pattern, kind, noise, dtype, max_iterations=20_000)
    report, error = result.report, off(result, exact)
    assert result.std_slab(0, 1).dtype == (torch.float32 if dtype == np.float32 else torch.float64)
    # a small grid has few independent errors: quantiles over its cells vary
    assert error.median() <= report.median_std_error
    assert error.quantile(0.9) <= report.std_error
    assert report.std_truncation < 1e-4
    assert "standard deviations from 16 draws, half of them within" in str(report)


def test_the_stated_error_of_a_cell_holds_for_95_percent_of_them():
    covered = []
    for seed in range(6):
        for pattern in ("random", "block"):
            result, exact = reconstruct((14, 13), pattern, seed=seed)
            found, error, dropped = result._variance._at([slice(0, 14), slice(0, 13)])
            covered.append(((found + dropped - exact**2).abs() <= error + 0.02 * found).double().mean())
    assert np.mean(covered) > 0.93


@pytest.mark.parametrize(("pattern", "plain"), [("random", 400), ("block", 28)])
def test_sixteen_draws_are_as_good_as_many_plain_ones(pattern, plain):
    """Plain draws leave a relative error of ``sqrt(2 / n) / 2`` of the standard deviation."""
    errors = [off(*reconstruct((22, 18), pattern, seed=seed)).square().mean() for seed in range(3)]
    assert np.sqrt(np.mean(errors)) < 0.5 * np.sqrt(2 / plain)


@pytest.mark.parametrize("scale", [1e-40, 1e40])
def test_standard_deviations_are_in_the_units_of_the_data(scale):
    result, _ = reconstruct((14, 13))
    scaled, _ = reconstruct((14, 13), scale=scale)
    torch.testing.assert_close(scaled.std_slab(0, 14) / scale**0.5, result.std_slab(0, 14), rtol=1e-5, atol=0.0)


def test_what_is_dropped_is_added_and_stated():
    result, exact = reconstruct((22, 18), noise=1e-1, tolerance=300.0)
    assert result.report.std_truncation > 1e-3
    assert off(result, exact).quantile(0.9) <= result.report.std_error + result.report.std_truncation


def test_more_draws_keep_the_first_ones_and_the_mean_is_that_without_draws():
    few, _ = reconstruct((14, 13), draws=8)
    more, _ = reconstruct((14, 13), draws=24)
    none, _ = reconstruct((14, 13), draws=0)
    torch.testing.assert_close(more._variance.draws.deviation[:8], few._variance.draws.deviation)
    torch.testing.assert_close(more.slab(0, 14), none.slab(0, 14), rtol=0.0, atol=0.0)
    assert none.report.num_draws == 0
    assert "draws" not in str(none.report)


def test_slabs_are_parts_of_the_whole_however_small_the_blocks(monkeypatch):
    result, _ = reconstruct((9, 8, 7))
    whole = result.variance_slab(0, 9)
    torch.testing.assert_close(result.variance_slab(3, 5), whole[3:5], rtol=1e-4, atol=0.0)
    monkeypatch.setattr(variance, "_BLOCK_NUMBERS", 3 * 16 * 20)
    torch.testing.assert_close(result.variance_slab(0, 9), whole, rtol=1e-4, atol=0.0)
    assert result.variance_slab(4, 4).shape == (0, 8, 7)


def test_means_and_standard_deviations_are_written(tmp_path):
    result, _ = reconstruct((14, 13), dtype=np.float32)
    result.write(tmp_path / "mean.npy", std=tmp_path / "std.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "mean.npy"), result.slab(0, 14))
    np.testing.assert_allclose(np.load(tmp_path / "std.npy"), result.std_slab(0, 14), rtol=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mean.npy", "std.npy"]
    with pytest.raises(ValueError, match="std: got the file of the mean, expected another file"):
        result.write(tmp_path / "mean.npy", std=tmp_path / "mean.npy")


def test_what_is_wrong_is_named(tmp_path):
    with pytest.raises(ValueError, match="draws: got 3, expected 0 or at least 8"):
        reconstruct((14, 13), draws=3)
    with pytest.raises(ValueError, match="draws: got -1"):
        reconstruct((14, 13), draws=-1)
    result, _ = reconstruct((14, 13), draws=0)
    with pytest.raises(ValueError, match="draws: got none, expected some"):
        result.std_slab(0, 3)
    with pytest.raises(ValueError, match="std: got a file, but there are no draws"):
        result.write(tmp_path / "mean.npy", std=tmp_path / "std.npy")
    drawn, _ = reconstruct((14, 13))
    with pytest.raises(ValueError, match="slab: got 3 to 15, expected slices from 0 to 14"):
        drawn.variance_slab(3, 15)


def test_an_interruption_loses_one_draw_at_most(tmp_path, monkeypatch):
    expected, _ = reconstruct((14, 13), "block")
    keep = states.WeightCheckpoint.keep_draw

    def interrupt(self, number, deviation):
        keep(self, number, deviation)
        if number == 9:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(states, "_SECONDS_BETWEEN_SAVES", 0.0)
        patch.setattr(states.WeightCheckpoint, "keep_draw", interrupt)
        with pytest.raises(KeyboardInterrupt):
            reconstruct((14, 13), "block", checkpoint=tmp_path / "state.pt")
    starts = []
    solve = module.WeightSolver.solve
    monkeypatch.setattr(
        module.WeightSolver, "solve", lambda self, start=None: starts.append(start is None) or solve(self, start)
    )
    result, _ = reconstruct((14, 13), "block", checkpoint=tmp_path / "state.pt")
    assert starts == [False] * 11 + [True] * 6  # the mean and ten draws were known
    torch.testing.assert_close(result.std_slab(0, 14), expected.std_slab(0, 14), rtol=1e-2, atol=0.0)


def test_several_processes_draw_the_same(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_NUMBERS", 40)  # blocks of three slices, cut where a process ends
    own = work.solve(None, (14, 11), draws=8)
    expected = own.std_slab(0, 14).numpy()
    for std in run_ranks(2, "tests.distributed._work", "standard_deviations", (14, 11), {"draws": 8}, 40):
        np.testing.assert_allclose(std, expected, rtol=1e-6)


def test_weights_in_parts_have_no_draws():
    with pytest.raises(Exception, match="draws: got 8 for 154 weights, divided among several processes"):
        run_ranks(2, "tests.distributed._work", "reconstruct", (14, 11), {"kind": "Matern", "draws": 8})


def test_a_trained_model_has_the_same_error_bars():
    t = np.linspace(0, 1, 20)
    values = np.sin(5 * t[:, None]) * np.cos(3 * t)
    values[6:11, 4:9] = np.nan
    grid, x, y = gaps.from_array(values, [t, t])
    likelihood = gaps.GappyGridLikelihood(noise=torch.tensor([1e-2], dtype=torch.float64))

    class Model(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gaps.GappyGridKernel([gpytorch.kernels.RBFKernel() for _ in range(2)], grid)

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Model().double().eval()
    with torch.no_grad(), gaps.settings.variance_method("exact"):
        exact = model(grid.points()).variance.sqrt().reshape(20, 20)
    noise = float(likelihood.noise)
    result = gaps.reconstruct(values, [t, t], list(model.covar_module.kernels), noise, draws=16, progress=False)
    assert off(result, exact).quantile(0.9) <= result.report.std_error
