"""What the canaries share: the message of a dead one, a plain ExactGP, matrices with prescribed spectra."""

import os
import subprocess
import sys

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal


def changed(what, where):
    """The message of a canary: what upstream no longer does, and which module of ours was written for it."""
    return f"upstream has changed: {what}; see {where}, which works around it"


def raised(call, kind=Exception):
    """The exception of this kind that the call raised, or None."""
    try:
        call()
    except kind as error:
        return error
    return None


def in_subprocess(code):
    """Standard output of a fresh interpreter that has not imported this package."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment, timeout=600
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def with_spectrum(eigenvalues, seed=0):
    """A symmetric float64 matrix with these eigenvalues and random eigenvectors."""
    generator = torch.Generator().manual_seed(seed)
    size = len(eigenvalues)
    vectors = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    matrix = vectors * eigenvalues.double() @ vectors.mT
    return 0.5 * (matrix + matrix.mT)


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def residuals(matrix, solution, rhs):
    """Relative residual of every column, in float64."""
    return (matrix @ solution.double() - rhs).norm(dim=-2) / rhs.norm(dim=-2)


def exponential(size, lengthscale):
    """``exp(-|x - x'| / l)`` on the unit interval: a full-rank covariance of unit variance."""
    x = torch.linspace(0, 1, size, dtype=torch.float64)
    return torch.exp(-(x[:, None] - x).abs() / lengthscale)


class PlainGP(gpytorch.models.ExactGP):
    """Zero mean, any kernel, in float64."""

    def __init__(self, train_x, train_y, likelihood, kernel):
        super().__init__(train_x, train_y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = kernel
        self.double()

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def gaussian_likelihood(noise):
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = noise
    return likelihood
