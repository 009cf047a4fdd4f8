"""float32 products stay float32 where the package makes them, whatever precision torch was told to use."""

import sys
import threading

import linear_operator
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gpytorch_gaps as gaps
from gpytorch_gaps import settings
from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.matrix_system import MatrixSystem
from gpytorch_gaps.solvers.solve import solve_with_lanczos
from gpytorch_gaps.utils.precision import full_float32, is_full
from tests import _dense as dense
from tests._covering import in_turn
from tests._dense import solve_system
from tests.workflow._pairs import CASES
from tests.workflow.test_devices import predicted, trained

PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "addmm_", "baddbmm_", "mv", "addmv", "matmul", "dot"}
by_newer_names = pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9 has one name for the setting"
)


@pytest.fixture(autouse=True)
def _as_before():
    yield
    for backend in (torch.backends.cuda.matmul, torch.backends.mkldnn):
        backend = getattr(backend, "matmul", backend)
        if hasattr(backend, "fp32_precision"):
            backend.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


# -- the block ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("users", ["highest", "high", "medium"])
def test_inside_and_after(users):
    torch.set_float32_matmul_precision(users)
    with full_float32():
        assert torch.get_float32_matmul_precision() == "highest"
        with full_float32():
            assert is_full()
        assert is_full()
    assert torch.get_float32_matmul_precision() == users


@pytest.mark.parametrize("users", ["highest", "high", "medium"])
def test_after_an_exception(users):
    torch.set_float32_matmul_precision(users)

    @full_float32()
    def fails():
        assert is_full()
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fails()
        assert torch.get_float32_matmul_precision() == users


def test_two_threads_whoever_leaves_first():
    torch.set_float32_matmul_precision("high")
    entered, leave, seen = threading.Event(), threading.Event(), []

    def other():
        with full_float32():
            entered.set()
            leave.wait(10)
            seen.append(is_full())

    with full_float32():
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(10)
    assert is_full()  # the other thread is still inside
    leave.set()
    thread.join()
    assert seen == [True]
    assert torch.get_float32_matmul_precision() == "high"


@by_newer_names
@pytest.mark.parametrize("name", ["cuda", "mkldnn"])
def test_set_by_the_newer_names(name):
    """`get_float32_matmul_precision` raises for these names."""
    backend = getattr(torch.backends, name).matmul
    backend.fp32_precision = "tf32" if name == "cuda" else "bf16"
    before = backend.fp32_precision
    assert not is_full()
    with full_float32():
        assert is_full()
        assert backend.fp32_precision == "ieee"
    assert backend.fp32_precision == before


@by_newer_names
def test_what_the_user_set_for_one_backend_does_not_spread():
    torch.backends.cuda.matmul.allow_tf32 = True
    before = torch.backends.mkldnn.matmul.fp32_precision
    with full_float32():
        assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    torch.backends.cuda.matmul.allow_tf32 = False


# -- where it is in force ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("users", ["high", "medium"])
def test_closures_of_solves_see_full_precision(users):
    torch.set_float32_matmul_precision(users)
    matrix, seen = dense.random_psd(30, floor=0.5), []

    def solve(product):
        rhs = dense.randn(30, 2)
        solve_with_lanczos(MatrixSystem(product, 30, rhs.device), rhs, None, SolveConfig(mixed_precision=True))

    def matmul(x):
        seen.append(torch.get_float32_matmul_precision())
        return matrix.to(x.dtype) @ x

    solve(matmul)
    assert set(seen) == {"highest"}
    assert torch.get_float32_matmul_precision() == users

    class Fails(Exception):
        pass

    def fails(x):
        raise Fails

    with pytest.raises(Fails):
        solve(fails)
    assert torch.get_float32_matmul_precision() == users


class Reduced(TorchDispatchMode):
    """Gathers float32 products that are not full float32 and that a module of the package is on the way to."""

    def __init__(self):
        super().__init__()
        self.products, self.found = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in PRODUCTS and any(torch.is_tensor(a) and a.dtype == torch.float32 for a in args):
            self.products += 1
            if not is_full():
                frame, folder = sys._getframe(1), gaps.__file__.removesuffix("__init__.py")
                while frame is not None and not frame.f_code.co_filename.startswith(folder):
                    frame = frame.f_back
                if frame is not None:
                    self.found.append((name, frame.f_code.co_filename, frame.f_lineno))
        return func(*args, **(kwargs or {}))


@in_turn(case=CASES, max_cholesky=[800, 0], logdet=["exact", "exact", "stochastic", "stochastic"])
def test_a_float32_model_makes_no_reduced_product(case, max_cholesky, logdet):
    """Training, its backward pass and predictions. The backward passes of upstream's kernels are torch's own."""
    torch.set_float32_matmul_precision("high")
    pair = CASES[case](small=True)
    model = pair.ours.float()
    with (
        linear_operator.settings.max_cholesky_size(max_cholesky),
        settings.logdet_method(logdet),
        settings.solve_tolerance(1e-4),
        settings.train_tolerance(1e-4),
        Reduced() as reduced,
    ):
        trained(model, steps=1)
        predicted(model, pair.test_x.float())
    assert reduced.products >= 5  # most are in float64
    assert reduced.found == []
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize("users", ["high", "medium"])
def test_a_float32_model_is_the_same(users):
    results = []
    for precision in ("highest", users):
        torch.set_float32_matmul_precision(precision)
        pair = CASES["two axes"](small=True)
        model = pair.ours.float()
        torch.manual_seed(0)
        with linear_operator.settings.max_cholesky_size(0), settings.logdet_method("exact"):
            results.append([*trained(model), *predicted(model, pair.test_x.float())])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(second, first, rtol=0, atol=0)


def test_a_float32_system_is_solved_the_same():
    factors = [dense.matern32(12).float(), dense.matern32(10).float()]
    index = dense.observed("block", (12, 10))
    rhs, found = dense.randn(len(index), 2).float(), []
    for precision in ("highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        system = GapSystem(factors, index, torch.full((1,), 0.05))
        found.append(solve_system(system, rhs, method="ignore", rank=0)[0])
        assert torch.get_float32_matmul_precision() == precision
    assert torch.equal(*found)
