"""The log density of observations under a sum of products, against torch."""

import pytest
import torch

from gpytorch_gaps.autograd.summed_products import summed_products_log_prob


def positive_definite(size, seed):
    root = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return root @ root.mT / size + torch.eye(size, dtype=torch.float64)


def test_value_and_gradients_are_those_of_torch():
    cells = [torch.tensor([0, 0, 1, 2, 2, 3, 3]), torch.tensor([0, 2, 1, 0, 1, 1, 2])]
    picks = [torch.eye(size, dtype=torch.float64)[at] for size, at in zip((4, 3), cells, strict=True)]
    # two products over both axes, and a factor of the observations themselves
    factors = [[positive_definite(4, 0), positive_definite(3, 1)], [positive_definite(4, 2), positive_definite(3, 3)]]
    factors.append([positive_definite(7, 4)])
    leaves = [torch.linspace(0.1, 0.7, 7, dtype=torch.float64), torch.tensor([0.5, 1.5, 0.2], dtype=torch.float64)]
    leaves += [factor for term in factors for factor in term]
    for leaf in leaves:
        leaf.requires_grad_(True)
    noise, scales = leaves[:2]
    residual = torch.linspace(-1, 2, 7, dtype=torch.float64)
    ours = summed_products_log_prob(residual, noise, scales, factors, [picks, picks, [None]])
    covariance = torch.diag(noise) + scales[2] * factors[2][0]
    for scale, term in zip(scales[:2], factors[:2], strict=True):
        covariance = covariance + scale * torch.stack([f[c][:, c] for f, c in zip(term, cells, strict=True)]).prod(0)
    theirs = torch.distributions.MultivariateNormal(torch.zeros_like(residual), covariance).log_prob(residual)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    for mine, other in zip(torch.autograd.grad(3 * ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        symmetric = other if other.dim() < 2 else (other + other.mT) / 2  # torch takes the lower triangle only
        torch.testing.assert_close(mine / 3, symmetric, rtol=1e-9, atol=1e-12)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(
            summed_products_log_prob(residual, noise, scales, factors, [picks, picks, [None]]), noise, create_graph=True
        )
