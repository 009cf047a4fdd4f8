"""Products and steps that a CUDA graph could hold: static shapes, and no number is read by the host.

``make_fx`` traces them with fake tensors, which have no numbers: a read raises. What was traced is then run on other
numbers of the same shape. As with CUDA graphs, everything is called a few times before, so that what is worked out once
has been. On the stand-in device the same calls make no copy and no wait.
"""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from gpytorch_gaps.linalg.eigen import kron_eigh
from gpytorch_gaps.linalg.masked_grid import MaskedGrid
from gpytorch_gaps.linalg.products import kron_matmul
from gpytorch_gaps.preconditioners import EigenPreconditioner, ShiftedEigenPreconditioner
from gpytorch_gaps.solvers.formulations.spectral import SpectralGaps
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.goal import Goal
from gpytorch_gaps.solvers.krylov import ConjugateGradients
from tests import _dense as dense
from tests import _standin as standin
from tests._standin import count_transfers, to_host

SHAPE = (6, 5, 4)
FACTORS = [dense.matern32(6), dense.se(5), dense.matern32(4)]
INDEX = dense.observed("random", SHAPE)
GAPS = dense.gaps_of(INDEX, SHAPE)
NOISE = torch.full((1,), 0.05, dtype=torch.float64)
CELLS = 120
WARM_UP = 6
DTYPES = {"float64": torch.float64, "float32": torch.float32}
COLUMNS = {"one": 1, "three": 3}


def _system(to):
    return GapSystem([to(factor) for factor in FACTORS], to(INDEX), to(NOISE))


def _mask(to):
    mask = torch.zeros(CELLS, dtype=torch.bool)
    mask[INDEX] = True
    return MaskedGrid(to(mask.view(SHAPE)))


def _bases(to, dtype):
    return [to(basis.to(dtype)) for basis in (dense.randn(6, 3), dense.randn(5, 2), dense.randn(4, 2))]


def _kron_matmul(to, dtype):
    factors = [to(factor.to(dtype)) for factor in FACTORS]
    return (lambda x: kron_matmul(factors, x)), CELLS


def _rectangular(to, dtype):
    factors = [basis.mT for basis in _bases(to, dtype)]
    return (lambda x: kron_matmul(factors, x)), CELLS


def _spectral(to, dtype):
    system = _system(to)
    rhs = to(dense.randn(len(INDEX), 1))
    return SpectralGaps(system, rhs, Goal.of(system, rhs, 1e-2)).matmul, None


def _gram(to, dtype):
    grid, bases = _mask(to), _bases(to, dtype)
    return (lambda x: grid.gram(bases, x[:, 0].view(3, 2, 2)).flatten().unsqueeze(-1)), 12


def _eigen_preconditioner(to, dtype):
    system = _system(to)
    return EigenPreconditioner(system.eigen(), system.train_index, system.noise, 20).solve, len(INDEX)


def _shifted_preconditioner(to, dtype):
    system = _system(to)
    return ShiftedEigenPreconditioner(system.eigen(), system.gap_index, system.noise, 20).solve, len(GAPS)


def _shifted_solve(to, dtype):
    eigen, noise = kron_eigh([to(factor) for factor in FACTORS]).to(dtype), to(NOISE.to(dtype))
    return (lambda x: eigen.shifted_solve(noise, x)), CELLS


def _step(to, dtype, preconditioned=False):
    """Two of them, from the residual x."""
    system = _system(to)
    solve = EigenPreconditioner(system.eigen(), system.train_index, system.noise, 20).solve

    def steps(x):
        descent = ConjugateGradients(system.matmul, x.clone(), precondition=solve if preconditioned else None)
        for _ in range(2):
            descent.step()
        return torch.cat([descent.solution, descent.residual])

    return steps, len(INDEX)


# name -> the function of one matrix, and how many rows that has, from how to move tensors and a dtype
PRODUCTS = {
    "kron_matmul": _kron_matmul,
    "kron_matmul, rectangular": _rectangular,
    "GapSystem.matmul": lambda to, _: (_system(to).matmul, len(INDEX)),
    "GapSystem.gap_matmul": lambda to, _: (_system(to).gap_matmul, len(GAPS)),
    "KroneckerEigen.shifted_solve": _shifted_solve,
    "SpectralGaps.matmul": _spectral,
    "EigenPreconditioner.solve": _eigen_preconditioner,
    "ShiftedEigenPreconditioner.solve": _shifted_preconditioner,
    "MaskedGrid.gram": _gram,
    "a step of conjugate gradients": _step,
    "a preconditioned step": lambda to, dtype: _step(to, dtype, preconditioned=True),
}


def made(name, to, dtype):
    function, rows = PRODUCTS[name](to, dtype)
    return function, function.__self__._target.size(-2) if rows is None else rows


@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_traced_without_numbers_and_run_on_others(name, dtype, columns):
    function, rows = made(name, lambda tensor: tensor, dtype)
    first, second = (dense.randn(rows, columns, seed=seed).to(dtype) for seed in (0, 1))
    for _ in range(WARM_UP):
        function(first)
    graph = make_fx(lambda x: function(x), tracing_mode="fake", _allow_non_fake_inputs=True)(first)
    expected = function(second)
    result = graph(second)
    assert result.shape == expected.shape
    assert result.dtype == dtype
    torch.testing.assert_close(result, expected, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-5)
    assert not torch.equal(result, graph(first))


def test_a_read_is_refused():
    """That the tests above can fail."""

    def reads(x):
        return x * float(x.norm())

    with pytest.raises(Exception, match=r"data-dependent|item"):
        make_fx(reads, tracing_mode="fake")(dense.randn(3, 1))


@pytest.mark.skipif(bool(standin.UNAVAILABLE), reason=standin.UNAVAILABLE)
@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_on_a_device_nothing_is_copied_and_nobody_waits(name, dtype, columns):
    here, rows = made(name, lambda tensor: tensor, dtype)
    there, _ = made(name, standin.to_standin, dtype)
    x = dense.randn(rows, columns).to(dtype)
    moved = standin.to_standin(x)
    for _ in range(WARM_UP):
        there(moved)
    with count_transfers() as counts:
        result = there(moved)
    assert counts.events == []
    torch.testing.assert_close(to_host(result), here(x), rtol=1e-4 if dtype == torch.float32 else 1e-10, atol=1e-5)
