"""Dense float64 references: kernels, Kronecker products, gap patterns, and the matrix ``K_XX + D`` written out in full.

Nothing here uses the package, except :func:`build`, which makes the operator under test from the same ingredients.
"""

from functools import reduce

import torch
from linear_operator.operators import ConstantDiagLinearOperator, DiagLinearOperator

from gpytorch_gaps.autograd.dense import dense_logdet
from gpytorch_gaps.linalg.selection import kron_block
from gpytorch_gaps.operators import (
    SelectedKroneckerAddedDiagOperator,
    SelectedKroneckerDiagOperator,
    SelectedKroneckerOperator,
)
from gpytorch_gaps.solvers import solve
from gpytorch_gaps.solvers.config import SolveConfig

# -- kernels on one axis ---------------------------------------------------------------------------------------------


def _points(n):
    return torch.linspace(0.0, 1.0, n, dtype=torch.float64) if n > 1 else torch.zeros(1, dtype=torch.float64)


def se(n, theta=0.3):
    """The paper's squared exponential ``exp(-d^2 / theta^2)``."""
    x = _points(n)
    return torch.exp(-(((x[:, None] - x) / theta) ** 2))


def matern32(n, length=0.3):
    x = _points(n)
    d = (x[:, None] - x).abs() * 3**0.5 / length
    return (1.0 + d) * torch.exp(-d)


def periodic(n, length=0.7):
    """On equispaced points of one period: circulant, so its eigenvalues come in pairs."""
    x = torch.arange(n, dtype=torch.float64) / n
    return torch.exp(-2.0 * torch.sin(torch.pi * (x[:, None] - x)).square() / length**2)


def toeplitz(lags):
    """The matrix of an axis that is given by lag; a matrix as it is."""
    level = torch.arange(len(lags), device=lags.device)
    return lags[(level.unsqueeze(-1) - level).abs()] if lags.dim() == 1 else lags


def ard(n, lengths=(0.4, 1.1, 0.7), seed=0):
    """A grouped axis: n scattered points of several input columns, one length each."""
    x = torch.randn(n, len(lengths), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = x / torch.tensor(lengths, dtype=torch.float64)
    return torch.exp(-0.5 * torch.cdist(x, x).square())


def random_psd(n, seed=0, floor=0.1, batch=()):
    root = torch.randn(*batch, n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.mT / n + floor * torch.eye(n, dtype=torch.float64)


def identity(n):
    """Every eigenvalue repeated."""
    return torch.eye(n, dtype=torch.float64)


# -- Kronecker products and selections -------------------------------------------------------------------------------


def kron(factors):
    """Written out, last axis fastest, batches broadcast."""

    def pair(a, b):
        product = a[..., :, None, :, None] * b[..., None, :, None, :]
        return product.reshape(*product.shape[:-4], a.size(-2) * b.size(-2), a.size(-1) * b.size(-1))

    return reduce(pair, factors)


def kron_vectors(vectors):
    return reduce(lambda a, b: (a[..., :, None] * b[..., None, :]).flatten(-2), vectors)


def observed(pattern, shape, fraction=0.4, seed=0):
    """Flat observed cells, ascending, with about `fraction` of the grid as gaps in the given pattern."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(shape, dtype=torch.bool)
    cells = mask.numel()
    if pattern == "random":
        mask.view(-1)[torch.randperm(cells, generator=generator)[: round(fraction * cells)]] = False
    elif pattern == "block":
        side = fraction ** (1.0 / len(shape))
        lengths = [max(1, round(side * size)) for size in shape]
        starts = [(size - length) // 2 for size, length in zip(shape, lengths, strict=True)]
        mask[tuple(slice(s, s + n) for s, n in zip(starts, lengths, strict=True))] = False
    elif pattern == "slice":
        mask[torch.randperm(shape[0], generator=generator)[: max(1, round(fraction * shape[0]))]] = False
    elif pattern == "one gap":
        mask.view(-1)[cells // 2] = False
    elif pattern == "one observation":
        mask[:] = False
        mask.view(-1)[cells // 3] = True
    elif pattern != "none":
        raise ValueError(f"pattern: got {pattern!r}")
    return mask.view(-1).nonzero().squeeze(-1)


def gaps_of(index, shape):
    mask = torch.ones(shape, dtype=torch.bool).view(-1)
    mask[index] = False
    return mask.nonzero().squeeze(-1)


def select(matrix, rows, columns=None):
    return matrix[..., rows, :][..., rows if columns is None else columns]


# -- the system, dense and ours --------------------------------------------------------------------------------------


def diagonal(noise, index):
    """The diagonal of D: `noise` is a tuple of axis vectors, or a tensor (*batch, 1) or (*batch, N)."""
    if isinstance(noise, tuple):
        return kron_vectors(noise)[..., index]
    return noise.expand(*noise.shape[:-1], len(index))


def system(factors, index, noise):
    """``K_XX + D`` in full."""
    return select(kron(factors), index) + torch.diag_embed(diagonal(noise, index))


def build(factors, index, noise):
    """The operator under test."""
    kernel = SelectedKroneckerOperator(*factors, row_index=index, col_index=index)
    if isinstance(noise, tuple):
        return SelectedKroneckerAddedDiagOperator(kernel, SelectedKroneckerDiagOperator(*noise, index=index))
    if noise.size(-1) == 1 and len(index) > 1:
        constant = ConstantDiagLinearOperator(noise, diag_shape=len(index))
        return SelectedKroneckerAddedDiagOperator(kernel, constant)
    return SelectedKroneckerAddedDiagOperator(kernel, DiagLinearOperator(noise))


def leaves(*tensors):
    """Copies that collect gradients."""
    return [tensor.detach().clone().requires_grad_(True) for tensor in tensors]


def with_leaves(factors, noise):
    """Leaf copies of factors and noise, and the list of all of them."""
    factors = leaves(*factors)
    noise = tuple(leaves(*noise)) if isinstance(noise, tuple) else leaves(noise)[0]
    return factors, noise, [*factors, *(noise if isinstance(noise, tuple) else (noise,))]


def symmetric(gradient):
    """The part of a factor's gradient that matters.

    A factor is symmetric, so only the symmetric part of its gradient acts on it; which antisymmetric part autograd
    returns depends on how an expression was written, e.g. ``-u x'`` or its transpose
    for ``u = A^-1 g`` and ``x = A^-1 b``.
    """
    return 0.5 * (gradient + gradient.mT)


def gradients(value, inputs, num_factors):
    """Gradients of a scalar. Those of the factors are symmetrised."""
    result = torch.autograd.grad(value, inputs)
    return [symmetric(g) if i < num_factors else g for i, g in enumerate(result)]


def relative(got, expected):
    """``||got - expected|| / ||expected||``."""
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300))


def check_each(got, expected, dtype, tolerance):
    """Named results, one by one: of that precision, of the expected shape, and close."""
    for name, value in expected.items():
        assert got[name].dtype == dtype, name
        assert got[name].shape == value.shape, name
        error = relative(got[name], value)
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def solve_system(system, rhs, *, guess=None, **config):
    """The solution and its report, by a configuration with some values changed."""
    solved = solve.solve_system(system, rhs, SolveConfig(**config), guess=guess, of_data="mean_tolerance" in config)
    return solved.solution, solved.report


def data_side_logdet(factors, index, noise):
    """``log|W K W' + D|`` by Cholesky, differentiable."""
    matrix = kron_block([factor.double() for factor in factors], index, index)
    diagonal = noise.double().expand(*noise.shape[:-1], len(index))
    return dense_logdet(matrix + torch.diag_embed(diagonal))
