"""Laplace's approximation by dense algebra, with gradients through the mode by the implicit function theorem."""

from dataclasses import dataclass

import gpytorch
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

import gpytorch_gaps as gaps

SIDE = 30


class Model(gaps.LaplaceGP):
    def __init__(self, x, y, likelihood, grid):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = ScaleKernel(gaps.GappyGridKernel([RBFKernel(), MaternKernel(nu=1.5)], grid))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def latent(side=SIDE):
    t = torch.linspace(0, 4, side, dtype=torch.float64)
    return 2 * torch.sin(t).unsqueeze(-1) * torch.cos(t) + 0.5


def likelihood_and_data(name, f, seed=0):
    """A likelihood, and observations of it, whose latent function is about f."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(f.shape, generator=generator, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
    rate = torch.nn.functional.softplus(2 * f)
    if name == "bernoulli":
        return gpytorch.likelihoods.BernoulliLikelihood(), (uniform < torch.special.ndtr(f)).double()
    if name == "poisson":
        return gpytorch.likelihoods.PoissonLikelihood(), torch.poisson(rate, generator=generator)
    if name == "negative binomial":
        return gpytorch.likelihoods.NegativeBinomialLikelihood(), torch.poisson(rate, generator=generator)
    if name == "beta":
        return gpytorch.likelihoods.BetaLikelihood(), torch.sigmoid(f + torch.special.ndtri(uniform))
    if name == "student":
        likelihood = gpytorch.likelihoods.StudentTLikelihood()
        likelihood.noise, likelihood.deg_free = 0.05, 4.0
        wild = 3.0 * (torch.rand(f.shape, generator=generator, dtype=torch.float64) < 0.05)
        return likelihood, f + (0.2 + wild) * torch.special.ndtri(uniform)
    likelihood = gaps.GappyGridLikelihood()
    likelihood.noise = 0.1
    return likelihood, f + 0.3 * torch.special.ndtri(uniform)


def information(likelihood, f, y):
    """As the documentation has it: Fisher's for Student's t and Beta, a bound for counts, else the curvature."""
    if isinstance(likelihood, gpytorch.likelihoods.StudentTLikelihood):
        freedom = likelihood.deg_free
        return ((freedom + 1) / (freedom + 3) / likelihood.noise).expand(f.shape)
    if isinstance(likelihood, gpytorch.likelihoods.BetaLikelihood):
        share, scale = torch.sigmoid(f), likelihood.scale
        trigammas = torch.polygamma(1, share * scale + 1) + torch.polygamma(1, (1 - share) * scale + 1)
        return (scale * share * (1 - share)) ** 2 * trigammas
    if isinstance(likelihood, gpytorch.likelihoods.NegativeBinomialLikelihood):
        return torch.sigmoid(f) ** 2 / (torch.nn.functional.softplus(f) / (1 - likelihood.probs))
    return -derivative(derivative(log_density(likelihood, f, y), f), f)


def log_density(likelihood, f, y):
    if isinstance(likelihood, gpytorch.likelihoods.BernoulliLikelihood):
        return torch.where(y == 1, torch.special.log_ndtr(f), torch.special.log_ndtr(-f))
    return likelihood(f).log_prob(y)


def derivative(value, f):
    return torch.autograd.grad(value.sum(), f, create_graph=True)[0]


@dataclass
class DenseLaplace:
    log_marginal: float
    gradients: dict
    mean: Tensor
    variance: Tensor


def dense_laplace(model, x):
    """What dense algebra says of a model, and of the latent function at x."""
    train_x, y, likelihood = model.train_inputs[0], model.train_targets.double(), model.likelihood
    kernel, mean = dense_kernel(model), model.mean_module(train_x)
    K = kernel(train_x, train_x)
    f = _mode(K.detach(), mean.detach(), likelihood, y).requires_grad_()
    slope = derivative(log_density(likelihood, f, y), f)
    curvature = -derivative(slope, f).detach()
    identity = torch.eye(len(y), dtype=torch.float64)
    fixed_point = mean + K @ derivative(log_density(likelihood, f, y), f)  # f at the mode
    moved = torch.linalg.solve(identity + K.detach() * curvature, fixed_point - fixed_point.detach())
    f = f.detach() + moved  # with the gradient that the mode has
    weights = torch.linalg.solve(K + 1e-11 * identity, f - mean)
    W = information(likelihood, f, y)
    objective = log_density(likelihood, f, y).sum() - 0.5 * weights @ (f - mean)
    value = objective - 0.5 * torch.linalg.slogdet(identity + W.unsqueeze(-1) * K).logabsdet
    value.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    with torch.no_grad():
        cross = kernel(x, train_x)
        half = W.clamp_min(0).sqrt()
        core = identity + half.unsqueeze(-1) * K * half
        explained = torch.linalg.solve(core, half.unsqueeze(-1) * cross.mT)
        variance = kernel(x, x).diagonal() - (cross * half * explained.mT).sum(-1)
        return DenseLaplace(float(value), gradients, model.mean_module(x) + cross @ slope, variance)


def dense_kernel(model):
    """The covariance as a function of two sets of points, by GPyTorch's kernels alone."""
    scale, (first, second) = model.covar_module, model.covar_module.base_kernel.kernels

    def of(a, b):
        return scale.outputscale * first(a[:, :1], b[:, :1]).to_dense() * second(a[:, 1:], b[:, 1:]).to_dense()

    return of


def _mode(K, mean, likelihood, y):
    """Newton's method with the expected or observed curvature, whichever is larger, and halved steps."""
    weights = torch.zeros_like(y)

    def objective(weights):
        return log_density(likelihood, mean + K @ weights, y).sum().detach() - 0.5 * weights @ K @ weights

    for _ in range(500):
        f = (mean + K @ weights).requires_grad_()
        slope = derivative(log_density(likelihood, f, y), f)
        W = torch.maximum(-derivative(slope, f), information(likelihood, f, y)).detach()
        slope, offset = slope.detach(), (f - mean).detach()
        target = torch.linalg.solve(torch.eye(len(y), dtype=torch.float64) + W.unsqueeze(-1) * K, W * offset + slope)
        step, share = target - weights, 1.0
        while objective(weights + share * step) < objective(weights) - 1e-11 and share > 1e-9:
            share /= 2
        weights = weights + share * step
        if step.norm() < 1e-10 * (1 + weights.norm()):
            break
    return mean + K @ weights
