"""Conjugate gradients where a read waits for a device: the solutions of the CPU, and one wait every ten iterations.

On the stand-in device of ``tests/_standin.py``, which counts every wait, whoever asked for it.
"""

import math

import pytest
import torch

from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.krylov import ITERATIONS_BETWEEN_READS, ConjugateGradients, conjugate_gradients
from gpytorch_gaps.solvers.matrix_system import MatrixSystem
from gpytorch_gaps.solvers.solve import solve_with_lanczos
from tests import _standin as standin
from tests._covering import covering
from tests._standin import count_transfers, to_host, to_standin
from tests.upstream._helpers import normal, with_spectrum

pytestmark = pytest.mark.skipif(bool(standin.UNAVAILABLE), reason=standin.UNAVAILABLE)

SPECTRA = {  # eigenvalues, and the iterations that a residual of TOLERANCE takes
    5: torch.tensor([0.5, 1.0, 3.0, 9.0, 20.0]).repeat(60),
    10: torch.linspace(1.0, 10.0, 10).repeat(30),
    37: torch.linspace(1.0, 13.0, 300),
    200: torch.logspace(0.0, 2.58, 600),
}
TOLERANCE = 0.95e-9  # at which no residual rises again before it is read


def until(rhs, tolerance=TOLERANCE):
    """Not read here."""
    norms = rhs.norm(dim=-2)
    return lambda residual: (residual.norm(dim=-2) <= tolerance * norms).all()


def on_both(matrix, rhs, precondition=None, **options):
    """Solution, iterations and Lanczos matrices on the CPU and on the device, there with its waits."""
    own = None if precondition is None else (lambda r: precondition * r)
    here = conjugate_gradients(lambda v: matrix @ v, rhs, stop=until(rhs), precondition=own, **options)
    matrix, rhs, precondition = to_standin([matrix, rhs, precondition])
    own = None if precondition is None else (lambda r: precondition * r)
    stop = until(rhs)
    with count_transfers() as counts:
        there = conjugate_gradients(lambda v: matrix @ v, rhs, stop=stop, precondition=own, **options)
    assert counts.copies == 0
    return here, to_host(list(there)), counts.syncs


@covering(needed=SPECTRA, shape=[(1,), (4,), (2, 3)], preconditioned=[False, True], lanczos=[False, True])
def test_one_wait_every_ten_iterations(needed, shape, preconditioned, lanczos):
    *batch, columns = shape
    matrix = with_spectrum(SPECTRA[needed])
    size = len(matrix)
    if batch:
        matrix = torch.stack([matrix, 3.0 * matrix])
    weights = torch.linspace(0.5, 2.0, size, dtype=torch.float64).unsqueeze(-1) if preconditioned else None
    rhs = normal(*batch, size, columns) * torch.logspace(-6, 6, columns, dtype=torch.float64)
    here, there, syncs = on_both(matrix, rhs, weights, max_iterations=1000, lanczos=lanczos)
    if not preconditioned:
        assert abs(here[1] - needed) <= 0.05 * needed
    assert here[1] <= there[1] <= here[1] + ITERATIONS_BETWEEN_READS
    assert there[1] % ITERATIONS_BETWEEN_READS == 0
    assert syncs <= there[1] // ITERATIONS_BETWEEN_READS
    residual = (rhs - matrix @ there[0]).norm(dim=-2) / rhs.norm(dim=-2)
    assert residual.max() <= 2 * TOLERANCE
    if lanczos:
        logs = [torch.linalg.eigh(found[2]) for found in (here, there)]
        first, second = ((values.log() * vectors[..., 0, :].square()).sum(-1) for values, vectors in logs)
        torch.testing.assert_close(second, first, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("budget", [1, 9, 10, 11, 25])
def test_the_budget_is_kept_and_ends_without_a_look(budget):
    matrix, rhs = with_spectrum(torch.linspace(1, 100, 80)), normal(80, 2)
    here, there, syncs = on_both(matrix, rhs, max_iterations=budget)
    assert there[1] == budget
    assert syncs == (budget - 1) // ITERATIONS_BETWEEN_READS
    torch.testing.assert_close(there[0], here[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("preconditioned", [False, True])
def test_columns_that_are_done_stay_where_they_are(dtype, preconditioned):
    """Solved at once, at zero, and in a few iterations, beside one that needs many; none is divided by nothing."""
    eigenvalues = torch.linspace(1.0, 30.0, 60, dtype=torch.float64)
    matrix, rhs = torch.diag(eigenvalues), normal(60, 5)
    rhs[:, 1] = 0.0
    rhs[:, 2] = 0.0
    rhs[7, 2] = 1e-20  # an eigenvector
    rhs[3:, 3] = 0.0  # three of them
    precondition = torch.linspace(1.0, 2.0, 60, dtype=torch.float64).unsqueeze(-1) if preconditioned else None
    dense = torch.linalg.solve(matrix, rhs)
    matrix, rhs, precondition = to_standin(
        [matrix.to(dtype), rhs.to(dtype), None if precondition is None else precondition.to(dtype)]
    )
    own = None if precondition is None else (lambda r: precondition * r)
    x, iterations, tridiagonal = conjugate_gradients(
        lambda v: matrix @ v, rhs, stop=lambda r: False, max_iterations=400, precondition=own, lanczos=True
    )
    assert iterations == 400 or dtype == torch.float32  # which stalls
    x, tridiagonal = to_host([x, tridiagonal])
    assert torch.equal(x[:, 1], torch.zeros_like(x[:, 1]))
    error = (x.double() - dense).norm(dim=0) / dense.norm(dim=0).clamp_min(1e-300)
    assert error.max() <= (1e-5 if dtype == torch.float32 else 1e-13)
    assert tridiagonal.isfinite().all()
    assert torch.linalg.eigvalsh(tridiagonal).min() > 0.1


def test_nothing_is_read_by_a_step():
    matrix, rhs = to_standin([with_spectrum(torch.linspace(1, 9, 50)), normal(50, 3)])
    descent = ConjugateGradients(lambda v: matrix @ v, rhs / rhs.norm(dim=-2))
    with count_transfers() as counts:
        for _ in range(40):
            descent.step()
    assert counts.events == []
    assert descent.steps == descent.ratios == []


def test_a_stalled_float32_iteration_ends():
    """Where rounding never lets the residual reach what is asked for; size and verdict in one read."""
    matrix, rhs = with_spectrum(torch.logspace(0, 7, 200)).float(), normal(200, 3).float()
    matrix, rhs = to_standin([matrix, rhs])
    with count_transfers() as counts:
        _, iterations, _ = conjugate_gradients(lambda v: matrix @ v, rhs, stop=until(rhs, 1e-30), max_iterations=20_000)
    assert 150 <= iterations < 20_000
    assert counts.syncs <= iterations // ITERATIONS_BETWEEN_READS


@pytest.mark.parametrize("lanczos", [False, True])
@pytest.mark.parametrize("mixed_precision", [False, True])
def test_a_whole_solve(lanczos, mixed_precision):
    matrix = with_spectrum(torch.linspace(1.0, 60.0, 300))
    rhs = normal(300, 3)
    config, results = SolveConfig(mixed_precision=mixed_precision), []
    for own, columns in ((matrix, rhs), to_standin([matrix, rhs])):
        product = lambda x, own=own: own.to(x.dtype) @ x  # noqa: E731
        system = MatrixSystem(product, 300, columns.device)
        with count_transfers() as counts:
            results.append(solve_with_lanczos(system, columns, None, config, lanczos=lanczos))
    here, there = results
    assert counts.copies == 0
    assert counts.syncs <= math.ceil(there.report.iterations / ITERATIONS_BETWEEN_READS) + 4
    torch.testing.assert_close(to_host(there.solution), here.solution, rtol=0, atol=1e-4)
    assert there.report.converged
    if lanczos:
        logs = [torch.linalg.eigh(to_host(found.lanczos).double()) for found in results]
        first, second = ((values.log() * vectors[..., 0, :].square()).sum(-1) for values, vectors in logs)
        torch.testing.assert_close(second, first, rtol=1e-6, atol=1e-6)
