"""Circulant factors where their tensors live, on the CPU, the accelerator and the stand-in for one.

What is asserted of copies was measured: products make none; a model copies the coordinates of an axis to the host once,
when it looks for a lattice, and nothing in the steps that follow.
"""

import linear_operator
import pytest
import torch

import gpytorch_gaps as gaps
from gpytorch_gaps import settings
from gpytorch_gaps.linalg.circulant import CirculantOperator
from gpytorch_gaps.operators import SelectedKroneckerOperator
from tests import _dense as dense
from tests import _standin as standin
from tests._devices import CPU, devices, on_standin
from tests._standin import count_transfers
from tests._torus import circulant, lag_table, written_out
from tests.workflow._block_pairs import BLOCKS
from tests.workflow.test_against_dense import log_likelihood

MAX_CHOLESKY = linear_operator.settings.max_cholesky_size
SOME = torch.tensor([0, 2, 3])
OPERATORS = {
    "a torus": lambda: circulant((8, 7), (4, SOME)),
    "rectangular": lambda: circulant((8, 7), (SOME, 3), (4, 4)),
    "a sphere": lambda: circulant((6,), (6,), dense=3),
    "a batch": lambda: circulant((6,), (SOME,), dense=2, batch=(2,)),
}


def check(got, expected, device, tolerance=1e-9):
    assert got.device == device
    assert got.shape == expected.shape
    assert dense.relative(got.detach().cpu(), expected.detach()) <= tolerance


@devices
@pytest.mark.parametrize("name", OPERATORS)
def test_products_stay_on_their_device(name, device):
    host = OPERATORS[name]()
    host = host.with_table(host.table.requires_grad_(True))
    op, matrix = host.to(device), written_out(host)
    assert op.device == device
    assert {own.device for own in (*op.row_positions, *op.col_positions) if torch.is_tensor(own)} <= {device}
    x, y = dense.randn(op.size(-1), 2), dense.randn(*matrix.shape[:-1], 2, seed=1)
    check(op @ x.to(device), matrix @ x, device)
    check(op.mT @ y.to(device), matrix.mT @ y, device)
    check(op.to_dense(), matrix, device)
    (gradient,) = op._bilinear_derivative(y.to(device), x.to(device).expand(*matrix.shape[:-2], *x.shape))
    (expected,) = host._bilinear_derivative(y, x.expand(*matrix.shape[:-2], *x.shape))
    check(gradient, expected, device)


@on_standin
@pytest.mark.parametrize("name", OPERATORS)
def test_products_neither_copy_nor_wait(name):
    op = OPERATORS[name]().to(standin.DEVICE)
    x = standin.to_standin(dense.randn(op.size(-1), 2))
    with count_transfers() as counts:
        op @ x
        op.mT @ (op @ x)
        op.to_dense()
    assert counts.events == []


def noisy(device, sphere=False):
    """A block and an axis, with constant noise, the tensors that collect gradients, and the matrix on the CPU."""
    torus, rows, levels = ((6,), (4,), 3) if sphere else ((8, 7), (4, 3), 0)
    table = lag_table(torus, levels).to(device).requires_grad_(True)
    factor = dense.random_psd(4).to(device).requires_grad_(True)
    index = dense.observed("random", (12, 4))
    block = CirculantOperator(table, torus=torus, row_positions=rows)
    kernel = SelectedKroneckerOperator(block, factor, row_index=index.to(device))
    noise = torch.tensor(0.1, dtype=torch.float64)
    return kernel.add_diagonal(noise.to(device)), [table, factor], index


def by_hand(sphere):
    operator, inputs, index = noisy(CPU, sphere)
    block, factor = operator.factors
    matrix = dense.select(dense.kron([block.to_dense(), factor]), index)
    return matrix + 0.1 * torch.eye(len(index), dtype=torch.float64), inputs


@devices
@pytest.mark.parametrize("max_cholesky", [800, 0], ids=["dense", "iterative"])
@pytest.mark.parametrize("sphere", [False, True], ids=["torus", "sphere"])
def test_solves_and_likelihoods_stay_on_their_device(sphere, max_cholesky, device):
    matrix, own_inputs = by_hand(sphere)
    rhs = dense.randn(len(matrix), 1)
    operator, inputs, _ = noisy(device, sphere)
    ours = rhs.to(device)
    with (
        settings.logdet_method("exact"),
        settings.solve_tolerance(1e-12),
        settings.train_tolerance(1e-12),
        settings.preconditioner("neighbours"),
        settings.dense_size(800),
        MAX_CHOLESKY(max_cholesky),
        count_transfers() as counts,
    ):
        solution = operator.solve(ours)
        quad, logdet = operator.inv_quad_logdet(ours, logdet=True)
        gradients = torch.autograd.grad(quad + logdet, inputs)
    assert counts.within(gaps).copies == 0, counts.by_line
    check(solution, torch.linalg.solve(matrix, rhs), device)
    value = (rhs * torch.linalg.solve(matrix, rhs)).sum() + torch.linalg.slogdet(matrix).logabsdet
    check(quad + logdet, value, device)
    table, factor = torch.autograd.grad(value, own_inputs)
    check(gradients[0], table, device, 1e-8)
    check(dense.symmetric(gradients[1]), dense.symmetric(factor), device, 1e-8)


@on_standin
@pytest.mark.parametrize("method", ["exact", "stochastic"])
@pytest.mark.parametrize("case", ["a torus and time", "a sphere and time", "a torus plus a product"])
def test_steps_of_a_model_copy_nothing(case, method):
    results = []
    for device in (standin.DEVICE, CPU):
        model = BLOCKS[case](small=True).ours.to(device)
        size = 800 if method == "exact" else 0
        with settings.logdet_method(method), settings.dense_size(size), MAX_CHOLESKY(size):
            for _ in range(2):
                model.zero_grad()
                torch.manual_seed(0)
                with count_transfers() as counts:
                    value = log_likelihood(model)
                    value.backward()
                results.append([value, *(p.grad for p in model.parameters())])
        assert counts.copies == 0, counts.by_line
    for first, second in zip(results[1], results[3], strict=True):
        assert torch.allclose(standin.to_host(first), second, rtol=1e-6, atol=1e-7)


@on_standin
def test_predictions_on_another_device():
    for case in ("a torus and time", "a sphere and time"):
        results = []
        for device in (CPU, standin.DEVICE):
            pair = BLOCKS[case](small=True)
            model = pair.ours.to(device).eval()
            with torch.no_grad(), MAX_CHOLESKY(800):
                posterior = model(pair.test_x.to(device))
                results.append([posterior.mean, posterior.variance])
        expected, got = results
        for ours, theirs in zip(got, expected, strict=True):
            check(ours, theirs, standin.DEVICE, 1e-8)


@on_standin
def test_what_lives_elsewhere_is_refused():
    op = OPERATORS["a torus"]()
    there = op.to(standin.DEVICE)
    with pytest.raises(standin.MixedDevicesError):
        there @ dense.randn(op.size(-1), 1)
    with pytest.raises(standin.MixedDevicesError):
        op @ standin.to_standin(dense.randn(op.size(-1), 1))
    with pytest.raises(ValueError, match="axis 1 is on cpu"):
        SelectedKroneckerOperator(there, dense.random_psd(2))
    with pytest.raises(ValueError, match="axis 1 is on privateuseone:0"):
        SelectedKroneckerOperator(dense.random_psd(2), there)
    with pytest.raises(ValueError, match="row_index: is on cpu"):
        SelectedKroneckerOperator(there, row_index=torch.tensor([0, 1]))
    model = BLOCKS["a torus"](small=True).ours
    (points,), kernel = model.train_inputs, standin.to_standin(model).covar_module
    with pytest.raises(ValueError, match=r"x1: got torch.float64 on cpu, expected torch.float64 on privateuseone:0"):
        kernel(points).to_dense()
