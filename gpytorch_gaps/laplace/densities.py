"""``log p(y | f)``, its slope and its information, per observation: the inputs of Laplace's approximation.

A GPyTorch likelihood can be used if ``likelihood(f)`` is a distribution with one ``log_prob`` per value of f. Slopes
and curvatures come from automatic differentiation. Some likelihoods have a rule of their own here, for one of two
reasons: their density over- or underflows, or it is not log-concave. If it is not, the curvature -d2 log p / df2 may be
negative, but the precision of a Gaussian observation cannot be. The information is then the expected one,

    E_y[-d2 log p / df2]        (Fisher's information; Hartmann & Vanhatalo 2019 for Student's t)

or, if that has no closed form, its lower bound ``(dE[y] / df)^2 / Var[y]``.
"""

from functools import singledispatch
from typing import Any

import torch
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    BetaLikelihood,
    LaplaceLikelihood,
    Likelihood,
    MultitaskGaussianLikelihood,
    NegativeBinomialLikelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from torch import Tensor


@singledispatch
def log_density(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """``log p(y | f)`` of every observation. shape: (N,)"""
    return likelihood(f).log_prob(y)


@log_density.register
def _(likelihood: BernoulliLikelihood, f: Tensor, y: Tensor) -> Tensor:
    return torch.special.log_ndtr((2.0 * y - 1.0) * f)  # the probability itself underflows below f = -38


@singledispatch
def information(likelihood: Likelihood, f: Tensor, slope: Tensor) -> Tensor:
    """The precision of the Gaussian observation that replaces each observation. shape: (N,)

    :param slope: ``d log p / df`` as a differentiable function of f. shape: (N,)
    """
    return -_derivative(slope, f)


@information.register
def _(likelihood: StudentTLikelihood, f: Tensor, slope: Tensor) -> Tensor:
    freedom = likelihood.deg_free
    return ((freedom + 1.0) / ((freedom + 3.0) * likelihood.noise)).expand(f.shape).to(f.dtype)


@information.register
def _(likelihood: BetaLikelihood, f: Tensor, slope: Tensor) -> Tensor:
    share = torch.sigmoid(f)
    alpha, beta = likelihood.scale * share + 1.0, likelihood.scale * (1.0 - share) + 1.0  # the parameters of GPyTorch
    return (likelihood.scale * share * (1.0 - share)).square() * (torch.polygamma(1, alpha) + torch.polygamma(1, beta))


@information.register
def _(likelihood: NegativeBinomialLikelihood, f: Tensor, slope: Tensor) -> Tensor:
    counts = likelihood(f)
    return _derivative(counts.mean, f).square() / counts.variance


def is_curvature(likelihood: Likelihood) -> bool:
    """Whether the information is the curvature of ``-log p``."""
    return information.dispatch(type(likelihood)) is information.dispatch(object)


def derivatives(likelihood: Likelihood, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``log p``, its slope and its information. Differentiable in parameters, and in f if it requires a gradient.

    shape: (N,) each
    """
    with torch.enable_grad():
        f = f if f.requires_grad else f.detach().requires_grad_()
        value = log_density(likelihood, f, y)
        if value.shape != f.shape:
            raise ValueError(
                f"likelihood: got {type(likelihood).__name__} with a log_prob of shape {tuple(value.shape)}, expected "
                f"one for every value of f: {tuple(f.shape)}"
            )
        slope = _derivative(value, f)
        return value, slope, information(likelihood, f, slope)


def curvature(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """``-d2 log p / df2``, which may be negative. shape: (N,)"""
    with torch.enable_grad():
        f = f.detach().requires_grad_()
        return -_derivative(_derivative(log_density(likelihood, f, y), f), f).detach()


@singledispatch
def step_information(likelihood: Likelihood, f: Tensor, y: Tensor, information: Tensor) -> Tensor:
    """The precision of the Gaussian observations of one step towards the mode, if it is not log-concave. shape: (N,)

    It is the larger one of information and curvature. With the information alone, steps would be too long where the
    data are more informative than expected.
    """
    return torch.maximum(information, curvature(likelihood, f, y))


@step_information.register
def _(likelihood: StudentTLikelihood, f: Tensor, y: Tensor, information: Tensor) -> Tensor:
    """The precision of an EM step, with Student's t as a mixture of normal distributions.

    No such step decreases ``log p``. Outliers have small weights, and do not slow down the others.
    """
    freedom = likelihood.deg_free.detach()
    return (freedom + 1.0) / (freedom * likelihood.noise.detach() + (y - f).square())


def _derivative(value: Tensor, f: Tensor) -> Tensor:
    """The derivative of every entry of `value` by the same entry of f; zero if it does not depend on f."""
    if not value.requires_grad:
        return torch.zeros_like(f)
    (found,) = torch.autograd.grad(value.sum(), f, create_graph=True, allow_unused=True)
    return torch.zeros_like(f) if found is None else found


# -- which observations a likelihood can have --------------------------------------------------------------------------


@singledispatch
def _expected(likelihood: Likelihood, y: Tensor) -> tuple[Tensor, str]:
    """Flags of the possible observations, and a description of them for messages."""
    return torch.ones_like(y, dtype=torch.bool), "finite numbers"


@_expected.register
def _(likelihood: BernoulliLikelihood, y: Tensor) -> tuple[Tensor, str]:
    return (y == 0) | (y == 1), "0 or 1"


@_expected.register(PoissonLikelihood)
@_expected.register(NegativeBinomialLikelihood)
def _(likelihood: Any, y: Tensor) -> tuple[Tensor, str]:
    return (y >= 0) & (y == y.round()), "counts 0, 1, 2, .."


@_expected.register
def _(likelihood: BetaLikelihood, y: Tensor) -> tuple[Tensor, str]:
    return (y > 0) & (y < 1), "shares between 0 and 1, both excluded"


def check_likelihood(likelihood: Any) -> None:
    """Raises a ValueError if it is not a likelihood, or needs several latent functions."""
    name = type(likelihood).__name__
    if not isinstance(likelihood, Likelihood):
        raise ValueError(f"likelihood: got {name}, expected a gpytorch likelihood")
    if isinstance(likelihood, SoftmaxLikelihood | MultitaskGaussianLikelihood):
        raise ValueError(f"likelihood: got {name} with several latent functions, expected a likelihood with one")
    if isinstance(likelihood, LaplaceLikelihood):
        raise ValueError(
            f"likelihood: got {name}, whose log-density has a kink and no curvature beside it; expected a smooth one, "
            "such as StudentTLikelihood"
        )
    if getattr(likelihood, "gross_errors", None) is not None:
        raise ValueError(f"likelihood: got a robust {name}, which only an ExactGP can have; try StudentTLikelihood")


def check_observations(likelihood: Likelihood, y: Any, rows: int, name: str) -> None:
    """Raises a ValueError that names the first observation that is impossible under the likelihood.

    :param rows: the expected number of observations.
    :param name: name of the argument, for messages.
    """
    if not torch.is_tensor(y) or y.shape != (rows,) or y.is_complex():
        came = f"{tuple(y.shape)} of {y.dtype}" if torch.is_tensor(y) else type(y).__name__
        raise ValueError(f"{name}: got {came}, expected a tensor of real numbers of shape ({rows},)")
    y = y.double()
    possible, words = _expected(likelihood, y)
    bad = (~(possible & y.isfinite())).nonzero().squeeze(-1).tolist()
    if bad:
        many = f"; {len(bad)} of {rows} observations are not" if len(bad) > 1 else ""
        raise ValueError(
            f"{name}: observation {bad[0]} is {y[bad[0]].item():g}, expected {words} with a "
            f"{type(likelihood).__name__}{many}"
        )
