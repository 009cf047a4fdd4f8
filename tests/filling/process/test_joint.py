"""``fill_gaps(dataset, joint=True)``: variables on one grid that inform each other."""

import gpytorch
import numpy as np
import pytest
import xarray as xr

import gpytorch_gaps as gaps
from gpytorch_gaps.filling import fill as fill_module
from gpytorch_gaps.filling.axes.describe import describe_axes
from gpytorch_gaps.filling.learning.candidates import KernelLimits, KernelTask, candidates
from gpytorch_gaps.filling.learning.label_factors import LabelFactors

QUICK = {"steps": 10, "progress": False}
SHAPE = (18, 16)


def kernels():
    return [gpytorch.kernels.RBFKernel(), gpytorch.kernels.RBFKernel()]


def waves(seed):
    """A random sum of waves, of mean 0 and standard deviation 1."""
    rng = np.random.default_rng(seed)
    y, x = np.ogrid[: SHAPE[0], : SHAPE[1]]
    field = sum(
        rng.standard_normal() * np.sin(rng.normal(0, 0.3) * y + rng.normal(0, 0.3) * x + rng.uniform(0, 6))
        for _ in range(12)
    )
    return (field - field.mean()) / field.std()


def pair(correlation, noise=(0.05, 0.05)):
    """A temperature with few gaps and a concentration with many, and both without noise and gaps.

    :param noise: of each, over its standard deviation.
    """
    rng = np.random.default_rng(3)
    first, other = waves(1), waves(2)
    other = other - (other * first).mean() * first
    second = correlation * first + np.sqrt(1 - correlation**2) * other / other.std()
    truth = {"sst": 15 + 4 * first, "chl": 0.3 + 0.02 * second}
    seen = {}
    for (name, values), share, level in zip(truth.items(), (0.1, 0.9), noise, strict=True):
        noisy = values + level * values.std() * rng.standard_normal(SHAPE)
        noisy[rng.random(SHAPE) < share] = np.nan
        seen[name] = (("y", "x"), noisy)
    return xr.Dataset(seen, {"y": np.arange(18.0), "x": np.arange(16.0)}), truth


def error(found, truth, name):
    gap = found.gaps[name].values
    return np.sqrt(np.mean((found.mean[name].values - truth[name])[gap] ** 2))


def test_a_variable_with_many_gaps_is_filled_better_with_one_that_is_correlated_with_it():
    data, truth = pair(0.95)
    alone = data.gaps.fill(kernels=kernels(), check=False, **QUICK)
    together = data.gaps.fill(kernels=kernels(), joint=True, **QUICK)
    assert error(together, truth, "chl") < 0.75 * error(alone, truth, "chl")
    assert error(together, truth, "sst") < 1.1 * error(alone, truth, "sst")
    for name, held in truth.items():
        report = together.report[name]
        assert report.shape == SHAPE
        assert report.num_gaps == data[name].isnull().sum()
        assert report.expected_rmse == pytest.approx(np.hypot(error(together, truth, name), 0.05 * held.std()), rel=0.6)
        assert report.held_out is None or report.held_out.rmse < held.std()  # in units of the variable
        assert any("filled together with" in note for note in report.notes)
        inside = abs(together.mean[name] - held) < 1.96 * together.std[name]
        assert inside.values[together.gaps[name].values].mean() > 0.8
        np.testing.assert_array_equal(
            together.mean[name].values[data[name].notnull()], data[name].values[data[name].notnull()]
        )


def test_variables_that_have_nothing_in_common_lose_nothing_and_keep_a_noise_of_their_own():
    data, truth = pair(0.0, noise=(0.02, 0.4))
    data["chl"] = (
        data["chl"].where(data["chl"].notnull(), truth["chl"]).where(np.random.default_rng(0).random(SHAPE) > 0.4)
    )
    rng = np.random.default_rng(1)
    data["chl"] += 0.4 * 0.02 * rng.standard_normal(SHAPE)
    alone = data.gaps.fill(kernels=kernels(), check=False, **QUICK | {"steps": 30})
    together = data.gaps.fill(kernels=kernels(), joint=True, check=False, **QUICK | {"steps": 30})
    for name, level in (("sst", 0.02), ("chl", 0.4)):
        assert error(together, truth, name) < 1.1 * error(alone, truth, name)
        assert together.report[name].noise_std / truth[name].std() == pytest.approx(level, rel=0.4)


def test_variables_may_have_length_scales_of_their_own():
    axes = describe_axes((2, 12, 10), [["a", "b"], np.arange(12.0), np.arange(10.0)])
    factors = LabelFactors(np.array([[0.8], [0.6]]), np.array([0.2, 0.4]), 1.0)
    task = KernelTask(axes, 1.0, [[], [], []], [factors, None, None], [None] * 3, KernelLimits(), variables=0)
    found = {name: make for name, make in candidates(task) if "for each variable" in name}
    assert len(found) == 3
    covariance = factors.loadings @ factors.loadings.T + np.diag(factors.own)
    for make in found.values():
        terms = make()
        assert len(terms) == 2
        assert terms[0].kernels[1] is not terms[1].kernels[1]
        roots = [term.kernels[0].covar_factor.detach().numpy() for term in terms]
        np.testing.assert_allclose(sum(root @ root.T for root in roots), covariance)


def test_results_follow_the_units_of_each_variable_and_the_order_of_its_dimensions():
    data, _ = pair(0.8)
    plain = data.gaps.fill(kernels=kernels(), joint=True, check=False, **QUICK)
    scaled = data.assign(chl=(1e4 * data["chl"]).transpose("x", "y"))
    found = gaps.fill_gaps(scaled, kernels=kernels(), joint=True, check=False, **QUICK)
    assert found.mean["chl"].dims == found.std["chl"].dims == found.gaps["chl"].dims == ("x", "y")
    np.testing.assert_allclose(found.mean["chl"].T, 1e4 * plain.mean["chl"], rtol=1e-5)
    np.testing.assert_allclose(found.std["chl"].T, 1e4 * plain.std["chl"], rtol=1e-4)
    np.testing.assert_allclose(found.std["sst"], plain.std["sst"], rtol=1e-4)
    assert found.report["chl"].noise_std == pytest.approx(1e4 * plain.report["chl"].noise_std, rel=1e-4)


@pytest.mark.usefixtures("quick_choice")
def test_variables_on_other_grids_or_without_variation_are_filled_by_themselves():
    data, _ = pair(0.8)
    data["series"] = data["sst"].isel(x=0)
    data["flat"] = xr.zeros_like(data["sst"]).where(data["sst"] > 12)
    data["label"] = ("y", ["a"] * SHAPE[0])
    options = {"kernels": {"y": gpytorch.kernels.RBFKernel()}, "joint": True}
    with pytest.raises(ValueError, match=r"variables 'sst', 'chl': kernels: got the axis 'z'"):
        data[["sst", "chl"]].gaps.fill(joint=True, kernels={"z": gpytorch.kernels.RBFKernel()}, **QUICK)
    found = data.gaps.fill(check=False, **options, **QUICK)
    assert list(found.mean.data_vars) == list(data.data_vars)
    assert found.model["sst"] is found.model["chl"]
    assert found.model["series"] is not found.model["sst"]
    for name in ("series", "flat"):
        assert found.report[name].notes[-1] == "filled separately: no other variable could be filled with it"
    models = data[["sst", "chl", "series"]].gaps.model(check=False, **options, **QUICK)
    assert models["sst"] is models["chl"]
    assert len(models["sst"].train_targets) == int(data["sst"].count() + data["chl"].count())


def test_joint_is_refused_where_it_means_nothing(monkeypatch):
    data, _ = pair(0.8)
    with pytest.raises(ValueError, match="joint: got True with a DataArray, expected an xarray Dataset"):
        data["sst"].gaps.fill(joint=True)
    with pytest.raises(ValueError, match="joint: got 'yes', expected True or False"):
        data.gaps.fill(joint="yes")
    monkeypatch.setattr(fill_module, "MAX_CELLS_IN_MEMORY", 100)
    with pytest.raises(ValueError, match="joint: got 2 x 18 x 16 cells, too many for memory"):
        data.gaps.fill(joint=True, **QUICK)
