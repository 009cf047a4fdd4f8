"""Traps in linear_operator's conjugate gradients: what `gpytorch_gaps.solvers.krylov` is for."""

import gpytorch
import linear_operator
import torch
from linear_operator.operators import to_linear_operator
from linear_operator.utils import linear_cg

from tests.upstream._helpers import changed, exponential, normal, residuals, with_spectrum

SOLVER = "gpytorch_gaps.solvers.krylov"


class Counted:
    """A product that counts how often it was asked for."""

    def __init__(self, matrix):
        self.matrix, self.calls = matrix, 0

    def __call__(self, rhs):
        self.calls += 1
        return self.matrix @ rhs


def kernel_like(size=200, largest=10.0, noise=1e-2):
    """Eigenvalues that decay as a smooth kernel's, on top of the noise."""
    return with_spectrum(largest * torch.logspace(0, -9, size, dtype=torch.float64) + noise)


def test_division_guard_makes_1e_6_unreachable():
    """Trap: `linear_cg` has eps=1e-10, so it crawls below a residual of 1e-5. See solvers/krylov."""
    matrix, rhs = kernel_like(), normal(200, 1)
    stalled, reached = Counted(matrix), Counted(matrix)
    default = residuals(matrix, linear_cg(stalled, rhs, tolerance=1e-6, max_iter=500), rhs)
    tiny = torch.finfo(rhs.dtype).tiny
    guarded = residuals(matrix, linear_cg(reached, rhs, tolerance=1e-6, max_iter=500, eps=tiny), rhs)
    assert guarded < 1e-6, changed("a smaller eps no longer lets linear_cg converge to 1e-6", SOLVER)
    assert reached.calls < 200, changed("a smaller eps no longer makes linear_cg converge fast", SOLVER)
    assert default > 1e-6, changed("linear_cg no longer stalls above 1e-6 with its own eps", SOLVER)
    assert stalled.calls > 500, changed("linear_cg no longer runs out of iterations with its own eps", SOLVER)


def test_solve_leaves_guard_and_tolerance_to_linear_cg(monkeypatch):
    """Trap: the base `_solve` passes neither eps nor tolerance. Answered by the `_solve` of our operators.

    It looks `linear_cg` up in `linear_operator.utils` when called, as the shipped harness expects; ours does not call
    it at all.
    """
    asked = []
    monkeypatch.setattr(linear_operator.utils, "linear_cg", lambda _, rhs, **kwargs: asked.append(kwargs) or rhs)
    to_linear_operator(torch.eye(3))._solve(torch.ones(3, 1))
    assert len(asked) == 1, changed("LinearOperator._solve no longer calls linear_operator.utils.linear_cg", SOLVER)
    for name in ("eps", "tolerance"):
        assert name not in asked[0], changed(f"LinearOperator._solve now chooses {name} itself", SOLVER)


def test_stopping_rule_is_the_mean_over_columns():
    """Trap: one hard column hides among easy ones. Answered by the `stop` of solvers/krylov."""
    matrix = with_spectrum(torch.logspace(0, -4, 200, dtype=torch.float64))
    easy = torch.linalg.eigh(matrix).eigenvectors[:, -19:]
    rhs = torch.cat([normal(200, 1), easy], -1)
    error = residuals(matrix, linear_cg(matrix.matmul, rhs, tolerance=1e-2, max_iter=2000), rhs)
    assert error.mean() <= 1e-2
    assert error.max() > 10 * 1e-2, changed("linear_cg no longer stops on the mean residual over columns", SOLVER)


def test_at_least_eleven_iterations():
    """Trap: `linear_cg` does not look at its tolerance before the eleventh product. See solvers/krylov."""
    product = Counted(2 * torch.eye(50, dtype=torch.float64))  # solved by one step
    linear_cg(product, normal(50, 1), tolerance=1e-2, max_iter=100)
    assert product.calls == 1 + 11, changed("linear_cg no longer makes eleven products at least", SOLVER)


def test_lanczos_matrices_are_cut_off_at_twenty():
    """Trap: tridiagonal matrices stop at 20 however long the iteration. Answered by solvers/krylov."""
    _, lanczos = linear_cg(kernel_like().matmul, normal(200, 1), n_tridiag=1, tolerance=1e-6, max_iter=100)
    assert lanczos.size(-1) == 20, changed("Lanczos matrices are no longer cut off at 20", SOLVER)


def test_default_tolerances_are_loose():
    """Trap: a relative residual of 1 will do in training, 0.01 in prediction. See settings.current."""
    where = "gpytorch_gaps.settings.current"
    assert linear_operator.settings.cg_tolerance.value() == 1, changed("cg_tolerance is no longer 1", where)
    assert gpytorch.settings.eval_cg_tolerance.value() == 0.01, changed("eval_cg_tolerance is no longer 0.01", where)
    matrix, rhs = exponential(801, 0.1), normal(801, 1)
    matrix.diagonal().add_(1e-3)
    error = residuals(matrix, to_linear_operator(matrix).solve(rhs), rhs)
    assert error > 0.1, changed("a solve by default is no longer off by more than a tenth of its data", where)


def test_dense_cholesky_up_to_800(monkeypatch):
    """Trap: small tests skip conjugate gradients unless `max_cholesky_size(0)`. See solvers/planning/plans."""
    where = "gpytorch_gaps.solvers.planning.plans"
    calls = []

    def spy(*args, **kwargs):
        calls.append(args[1].size(-2))
        return linear_cg(*args, **kwargs)

    monkeypatch.setattr(linear_operator.utils, "linear_cg", spy)

    def solve(size):
        return to_linear_operator(exponential(size, 0.1)).solve(torch.ones(size, 1, dtype=torch.float64))

    solve(800)
    assert calls == [], changed("a system of 800 is no longer solved by Cholesky", where)
    solve(801)
    assert calls == [801], changed("a system of 801 is no longer solved by conjugate gradients", where)
    with linear_operator.settings.max_cholesky_size(0):
        solve(5)
    assert calls == [801, 5], changed("max_cholesky_size(0) no longer forces conjugate gradients", where)


def test_float32_stalls():
    """Trap: in float32 the true residual stays near 2e-4 however long one iterates. Answered by solvers/refine."""
    matrix, rhs = kernel_like(largest=50.0), normal(200, 1)
    narrow, tiny = matrix.float(), torch.finfo(torch.float32).tiny
    for max_iter in (500, 2000):
        solution = linear_cg(narrow.matmul, rhs.float(), tolerance=1e-6, eps=tiny, max_iter=max_iter)
        error = residuals(matrix, solution, rhs)
        message = changed("linear_cg in float32 no longer stalls near 2e-4", "gpytorch_gaps.solvers.refine")
        assert 2e-5 < error < 2e-3, message
    double = linear_cg(matrix.matmul, rhs, tolerance=1e-6, eps=torch.finfo(rhs.dtype).tiny, max_iter=500)
    assert residuals(matrix, double, rhs) < 1e-6  # the system itself is not to blame
