"""What iterates compiles as one graph: a Kronecker product and a step of conjugate gradients, without a break.

``fullgraph=True`` makes a break an error. The backend is "aot_eager", which traces and functionalises as the default
backend does: Inductor would also need a C++ compiler, and the time to run it.
"""

import pytest
import torch

from gpytorch_gaps.linalg.products import kron_matmul
from gpytorch_gaps.solvers.krylov import ConjugateGradients
from tests import _dense as dense
from tests._devices import real_devices

SHAPE = (6, 5, 4)
INDEX = dense.observed("random", SHAPE)


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@real_devices
@pytest.mark.parametrize("columns", [1, 3])
def test_a_kronecker_product_compiles_as_one_graph(columns, device):
    factors = [factor.to(device) for factor in (dense.se(6), dense.randn(3, 5), dense.matern32(4))]
    x = dense.randn(6 * 5 * 4, columns).to(device)
    torch.testing.assert_close(compiled(kron_matmul)(factors, x), kron_matmul(factors, x), rtol=1e-12, atol=1e-12)


@real_devices
@pytest.mark.parametrize(("preconditioned", "lanczos"), [(False, False), (True, True)])
def test_a_step_of_conjugate_gradients_compiles_as_one_graph(preconditioned, lanczos, device):
    """Every step after the first, which allocates what the others update in place."""
    factors, index = [factor.to(device) for factor in (dense.se(6), dense.matern32(5), dense.se(4))], INDEX.to(device)
    weights = torch.linspace(0.5, 2.0, len(index), dtype=torch.float64, device=device).unsqueeze(-1)

    def matmul(x):
        field = x.new_zeros(6 * 5 * 4, x.size(-1)).index_copy(0, index, x)
        return kron_matmul(factors, field)[index] + 0.1 * x

    def run():
        rhs = dense.randn(len(index), 2).to(device)
        precondition = (lambda r: weights * r) if preconditioned else None
        return ConjugateGradients(matmul, rhs, precondition=precondition, keep_lanczos=lanczos)

    eager, traced = run(), run()
    for each in (eager, traced):
        each.step()
    step = compiled(traced.step)
    for _ in range(4):
        eager.step()
        step()
        torch.testing.assert_close(traced.solution, eager.solution, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(traced.residual, eager.residual, rtol=1e-8, atol=1e-12)
    if lanczos:
        torch.testing.assert_close(traced.lanczos(), eager.lanczos(), rtol=1e-8, atol=1e-10)
