"""Random shapes, gaps, kernels, noises and methods against dense float64 algebra: values, residuals and gradients."""

import math
import warnings
from dataclasses import dataclass

import hypothesis.strategies as st
import linear_operator
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from linear_operator.operators import ConstantDiagLinearOperator, DiagLinearOperator

from gpytorch_gaps import NotConvergedWarning, record_solves
from gpytorch_gaps import settings as gap_settings
from gpytorch_gaps.linalg.selection import kron_block, product_at, unravel
from gpytorch_gaps.operators import SelectedKroneckerDiagOperator, SelectedKroneckerOperator
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.logdet.whole_grid import gap_side_logdet

TOLERANCE = 1e-10


@dataclass
class Case:
    factors: list[torch.Tensor]
    index: torch.Tensor
    noise_kind: str
    noise: list[torch.Tensor]
    method: str
    rank: int | None
    seed: int

    @property
    def shape(self):
        return tuple(len(factor) for factor in self.factors)


def factor(kind, size, scale, seed):
    x = torch.linspace(0, 1, size, dtype=torch.float64)
    distance = (x.unsqueeze(-1) - x).abs()
    if kind == "se":
        return torch.exp(-((distance / scale) ** 2))
    if kind == "matern":
        scaled = math.sqrt(3) * distance / scale
        return (1 + scaled) * torch.exp(-scaled)
    if kind == "periodic":
        return torch.exp(-2 * torch.sin(math.pi * distance) ** 2 / scale)
    if kind == "identity":
        return torch.eye(size, dtype=torch.float64) * scale
    root = torch.randn(size, max(1, size - 1), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return scale * root @ root.mT  # rank-deficient


@st.composite
def cases(draw):
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    kinds = st.sampled_from(["se", "matern", "periodic", "identity", "low rank"])
    factors = [factor(draw(kinds), m, draw(st.floats(0.1, 2.0)), draw(st.integers(0, 99))) for m in sizes]
    cells = math.prod(sizes)
    seed = draw(st.integers(0, 2**20))
    order = torch.randperm(cells, generator=torch.Generator().manual_seed(seed))
    index = order[: draw(st.integers(1, cells))]
    kind = draw(st.sampled_from(["constant", "product", "point"]))
    level = 10.0 ** draw(st.floats(-6, 2))
    spread = torch.Generator().manual_seed(seed + 1)
    if kind == "constant":
        noise = [torch.tensor([level], dtype=torch.float64)]
    elif kind == "point":
        noise = [level * (0.5 + torch.rand(len(index), dtype=torch.float64, generator=spread))]
    else:
        noise = [0.5 + torch.rand(m, dtype=torch.float64, generator=spread) for m in sizes]
        noise[0] = noise[0] * level
    methods = ["auto", "ignore", "cholesky"] + (["fill", "penalize", "spectral"] if kind != "point" else [])
    rank = draw(st.one_of(st.none(), st.integers(0, 8)))
    return Case(factors, index, kind, noise, draw(st.sampled_from(methods)), rank, seed)


def operator_of(case, factors, noise):
    kernel = SelectedKroneckerOperator(*factors, row_index=case.index, col_index=case.index)
    if case.noise_kind == "constant":
        return kernel + ConstantDiagLinearOperator(noise[0], diag_shape=len(case.index))
    if case.noise_kind == "point":
        return kernel + DiagLinearOperator(noise[0])
    return kernel + SelectedKroneckerDiagOperator(*noise, index=case.index)


def dense_of(case, factors, noise):
    matrix = kron_block(factors, case.index, case.index)
    if case.noise_kind == "product":
        return matrix + torch.diag(product_at(noise, unravel(case.index, case.shape)))
    return matrix + torch.diag(noise[0].expand(len(case.index)))


def leaves(case):
    return [[t.clone().requires_grad_(True) for t in group] for group in (case.factors, case.noise)]


def symmetric(grad):
    """A kernel matrix moves symmetrically: only that part of its gradient is defined."""
    return 0.5 * (grad + grad.mT) if grad.dim() == 2 else grad


def check(case):
    generator = torch.Generator().manual_seed(case.seed)
    rhs = torch.randn(len(case.index), 2, dtype=torch.float64, generator=generator)
    factors, noise = leaves(case)
    dense = dense_of(case, factors, noise)
    exact = (rhs * torch.linalg.solve(dense, rhs)).sum() + torch.logdet(dense)
    expected = torch.autograd.grad(exact, [*factors, *noise])
    condition = float(torch.linalg.cond(dense.detach()))

    factors, noise = leaves(case)
    operator = operator_of(case, factors, noise)
    with (
        warnings.catch_warnings(),
        gap_settings.gap_method(case.method),
        gap_settings.preconditioner_rank(case.rank),
        gap_settings.solve_tolerance(TOLERANCE),
        gap_settings.train_tolerance(TOLERANCE),
        gap_settings.logdet_method("exact"),
        linear_operator.settings.max_cholesky_size(0),
        record_solves() as solves,
    ):
        warnings.simplefilter("ignore", NotConvergedWarning)
        solution = operator.solve(rhs).detach()
        quad, logdet = operator.inv_quad_logdet(rhs, logdet=True)
        actual = torch.autograd.grad(quad + logdet, [*factors, *noise])

    matrix = dense.detach()
    residual = (rhs - matrix @ solution).norm(dim=0) / rhs.norm(dim=0)
    rounding = 1e-14 * condition
    torch.testing.assert_close(solves[0].residual, residual, rtol=1e-3, atol=1e-13 + rounding)
    assert solves[0].converged == bool((solves[0].residual <= TOLERANCE).all())
    if case.method != "penalize":  # whose accuracy is bounded by its penalty
        assert solves[0].converged or rounding > 0.01 * TOLERANCE
    if not all(report.converged for report in solves):
        return
    slack = 1e-7 + 10 * rounding + 10 * TOLERANCE * condition
    torch.testing.assert_close(quad + logdet, exact.detach(), rtol=slack, atol=slack * (1 + float(quad.detach())))
    for got, want in zip(actual, expected, strict=True):
        scale = float(symmetric(want).norm())
        assert float((symmetric(got) - symmetric(want)).norm()) <= slack * (1 + scale)


def check_gap_side(case):
    """The block identity subtracts what the whole grid adds, so its rounding is that of the whole grid's matrix."""
    if case.noise_kind != "constant":
        return
    factors, noise = leaves(case)
    system = GapSystem(case.factors, case.index, case.noise[0])
    value = gap_side_logdet(system, factors, noise[0])
    actual = torch.autograd.grad(value, [*factors, *noise])
    factors, noise = leaves(case)
    exact = torch.logdet(dense_of(case, factors, noise))
    expected = torch.autograd.grad(exact, [*factors, *noise])
    everything = kron_block(case.factors, *[torch.arange(math.prod(case.shape))] * 2)
    largest, level = float(torch.linalg.eigvalsh(everything)[-1]), float(case.noise[0])
    slack = 1e-9 + 1e-13 * (1 + largest / level)
    torch.testing.assert_close(value, exact, rtol=slack, atol=slack)
    for got, want in zip(actual, expected, strict=True):
        assert float((symmetric(got) - symmetric(want)).norm()) <= slack * (1 + float(want.norm()) + 1 / level)


quick = settings(max_examples=100, derandomize=True, suppress_health_check=list(HealthCheck))
long = settings(max_examples=2000, suppress_health_check=list(HealthCheck))


@quick
@given(cases())
def test_no_mismatch_with_dense_algebra(case):
    check(case)
    check_gap_side(case)


@pytest.mark.benchmark
@long
@given(cases())
def test_no_mismatch_with_dense_algebra_in_2000_examples(case):
    check(case)
    check_gap_side(case)
