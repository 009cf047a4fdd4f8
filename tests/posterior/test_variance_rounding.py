"""The stated error of exact variances where they are far below the prior's, against longer arithmetic.

At a noise of 1e-12 of the prior variance, ``k - g'A^-1 g`` keeps three digits of float64.
"""

import numpy as np
import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import MaternKernel, RBFKernel
from linear_operator import settings as upstream

import gpytorch_gaps as gaps
from gpytorch_gaps import settings
from tests.workflow._pairs import Model, gappy, with_length

pytestmark = pytest.mark.skipif(np.finfo(np.longdouble).eps > 1e-18, reason="long doubles are no longer than doubles")

KERNELS = {
    "rough": (lambda: MaternKernel(nu=0.5), 0.4),
    "once differentiable": (lambda: MaternKernel(nu=1.5), 0.1),
    "smooth": (RBFKernel, 0.4),
    "very smooth": (RBFKernel, 1.5),
}


def model_of(kernel, length, noise, shape):
    axes, values = gappy(shape, 0.3, 1)
    grid, x, y = gaps.from_array(values, axes)
    kernels = [with_length(kernel(), length) for _ in shape]
    likelihood = gaps.GappyGridLikelihood(noise_constraint=GreaterThan(1e-30))
    model = Model(x, y, likelihood, gaps.GappyGridKernel(kernels, grid)).double()
    model.likelihood.noise = noise
    return model.eval(), grid


def long_variances(model, x):
    """``k - |L^-1 g|^2`` with ``A = L L'``, in long doubles, from float64 kernel matrices of the axes."""

    def covariance(a, b):
        pairs = enumerate(model.covar_module.kernels)
        axes = [kernel(a[:, i : i + 1], b[:, i : i + 1]).to_dense().detach().numpy() for i, kernel in pairs]
        return axes[0].astype(np.longdouble) * axes[1].astype(np.longdouble)

    (train,), noise = model.train_inputs, np.longdouble(model.likelihood.noise.item())
    matrix = covariance(train, train)
    matrix = 0.5 * (matrix + matrix.T) + noise * np.eye(len(train), dtype=np.longdouble)
    columns, variance = covariance(train, x), np.ones(len(x), dtype=np.longdouble)
    for j in range(len(matrix)):
        pivot = np.sqrt(matrix[j, j])
        below, row = matrix[j + 1 :, j] / pivot, columns[j] / pivot
        matrix[j + 1 :, j + 1 :] -= np.outer(below, below)
        columns[j + 1 :] -= np.outer(below, row)
        variance -= row**2
    return torch.from_numpy(variance.astype(np.float64))


def stated(model, x):
    with torch.no_grad(), settings.variance_method("exact"), gaps.record_solves() as solves:
        variance = model(x).lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2)
    return variance, solves.variances[0]


@pytest.mark.parametrize("noise", [1e-6, 1e-8, 1e-10, 1e-12])
@pytest.mark.parametrize("case", KERNELS)
def test_the_stated_error_of_solves_includes_cancellation(case, noise):
    """A bound at every point, on the grid, between cells and beyond, by every method, and not an idle one."""
    model, grid = model_of(*KERNELS[case], noise, (9, 8))
    x = torch.cat([grid.points()[::3], grid.points()[1:40:7] + 0.013, grid.points()[-1:] + 0.2])
    expected = long_variances(model, x)
    for method, max_cholesky in (("auto", 800), ("fill", 0), ("ignore", 0)):
        with settings.gap_method(method), upstream.max_cholesky_size(max_cholesky):
            variance, report = stated(model, x)
        off = (variance - expected).abs()
        assert bool((off <= report.error).all()), method
        assert float((report.error / expected).median()) <= max(3e-6, 60 * 2.2e-16 / noise)


@pytest.mark.parametrize("noise", [1e-3, 1e-6, 1e-8, 1e-10, 1e-12])
@pytest.mark.parametrize("length", [0.4, 1.0])
def test_the_stated_error_of_the_closed_form_includes_cancellation(length, noise):
    model, grid = model_of(RBFKernel, length, noise, (18, 16))
    x = grid.points()
    with upstream.max_cholesky_size(0):
        variance, report = stated(model, x)
    # beyond, the eigenvalues to keep are rounding: some processors round more of them up than there are observations
    assert report.rank > 0 or noise < 1e-6
    expected = long_variances(model, x)
    assert bool(((variance - expected).abs() <= report.error).all())
    assert float((report.error / expected).max()) <= 0.1
