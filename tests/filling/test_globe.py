"""Global fields: whatever the longitudes begin with, the filled field goes on across the date line."""

import numpy as np
import pytest
import torch
import xarray as xr

import gpytorch_gaps as gaps
from gpytorch_gaps.filling.learning import candidates as kernels_module
from tests.kernels.test_sphere import FUNCTIONS, brute_force

LAT = np.array([-90.0, -75, -60, -41, -20, 0, 22, 40, 63, 77, 90])  # both poles; latitudes need not be regular
LON = np.arange(-180.0, 180.0, 20.0)
RNG = np.random.default_rng(0)


def field():
    """A draw of a field on the sphere with noise, and gaps on both sides of the date line and of a pole."""
    points = torch.cartesian_prod(torch.from_numpy(LAT), torch.from_numpy(LON))
    covariance = brute_force(points, points, FUNCTIONS["Matern"][1], "chordal").numpy()
    root = np.linalg.cholesky(covariance + 1e-6 * np.eye(len(covariance)))
    values = (root @ RNG.standard_normal(len(root))).reshape(len(LAT), len(LON))
    values = values + 0.1 * RNG.standard_normal(values.shape)
    missing = RNG.random(values.shape) < 0.2
    missing[3:6, [0, 1, -1, -2]] = missing[9:, 5:12] = True
    return np.where(missing, np.nan, values)


FIELD = field()
GLOBES = {
    "from -180": (LON, FIELD),
    "from 0": (np.arange(0.0, 360.0, 20.0), np.roll(FIELD, 9, 1)),
    "both ends": (np.append(LON, 180.0), np.concatenate([FIELD, FIELD[:, :1]], 1)),
}


@pytest.fixture(scope="module")
def filled():
    """All of them, by a kernel on the sphere."""
    listed = kernels_module.candidates
    with pytest.MonkeyPatch.context() as patch:
        on_sphere = lambda task: [one for one in listed(task) if one[0] == "Matern-3/2 on the sphere"]  # noqa: E731
        patch.setattr("gpytorch_gaps.filling.learning.choose.candidates", on_sphere)
        found = {}
        for name, (longitudes, values) in GLOBES.items():
            degrees = {"units": "degrees_north"}, {"standard_name": "longitude"}
            coords = {"y": ("y", LAT, degrees[0]), "x": ("x", longitudes, degrees[1])}
            array = xr.DataArray(values, coords, ("y", "x"))
            found[name] = gaps.fill_gaps(array, steps=10, check=False, progress=False)
        return found


@pytest.mark.parametrize("name", GLOBES)
def test_a_global_field_is_filled_as_by_dense_algebra_on_the_sphere(filled, name):
    found, (longitudes, values) = filled[name], GLOBES[name]
    assert found.report.kernel.startswith("Matern-3/2 on the sphere")
    assert not any("not treated as a sphere" in note for note in found.report.notes)
    model = found.model
    (kernel,), scale = model.covar_module.base_kernel.kernels, model.covar_module.outputscale.item()
    length, noise = kernel.base_kernel.lengthscale.item(), model.likelihood.noise.item()

    def matern(distance):
        scaled = 3**0.5 * distance / length
        return scale * (1 + scaled) * torch.exp(-scaled)

    x = torch.cartesian_prod(torch.from_numpy(LAT), torch.from_numpy(longitudes))
    known = torch.from_numpy(np.isfinite(values)).flatten()
    covariance = brute_force(x, x, matern, "chordal")
    with torch.no_grad():
        prior = model.mean_module(x)
    noisy = covariance[known][:, known] + noise * torch.eye(int(known.sum()), dtype=torch.float64)
    residual = torch.from_numpy(values).flatten()[known] - prior[known]
    mean = prior + covariance[:, known] @ torch.linalg.solve(noisy, residual)
    gap = ~known.reshape(values.shape).numpy()
    np.testing.assert_allclose(found.mean.values[gap], mean.reshape(values.shape).numpy()[gap], rtol=0, atol=1e-5)


def test_where_longitudes_begin_does_not_matter(filled):
    one, other, both = (filled[name] for name in GLOBES)
    for own, turned, closed in ((one.mean, other.mean, both.mean), (one.std, other.std, both.std)):
        np.testing.assert_allclose(np.roll(turned.values, -9, 1), own.values, rtol=0, atol=1e-6)
        np.testing.assert_allclose(closed.values[:, 0], closed.values[:, -1], rtol=0, atol=1e-9)


def test_points_on_the_other_side_of_the_date_line(filled):
    found = filled["from -180"]
    east, west = (found.at([[20.0, longitude]]) for longitude in (190.0, -170.0))
    np.testing.assert_allclose(east.mean, west.mean, rtol=1e-9)
    np.testing.assert_allclose(east.std, west.std, rtol=1e-9)
