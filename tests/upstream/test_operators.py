"""Traps in LinearOperator itself: how operators are rebuilt, cast, decomposed and preconditioned."""

import unittest

import gpytorch
import linear_operator
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import (
    AddedDiagLinearOperator,
    ConstantDiagLinearOperator,
    DenseLinearOperator,
    DiagLinearOperator,
    KroneckerProductDiagLinearOperator,
    KroneckerProductLinearOperator,
    LinearOperator,
    to_linear_operator,
)
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase

from tests.upstream._helpers import changed, exponential, normal

ADDED_DIAG = "gpytorch_gaps.operators.SelectedKroneckerAddedDiagOperator"
BASE = "gpytorch_gaps.operators.base"


class Selected(LinearOperator):
    """Rows and columns of a dense matrix: the smallest operator with indices, a cache and a count of its making."""

    made = 0

    def __init__(self, matrix, *, row_index, col_index, memo=None):
        super().__init__(matrix, row_index=row_index, col_index=col_index, memo=memo)
        self.matrix, self.row_index, self.col_index, self.memo = matrix, row_index, col_index, memo
        Selected.made += 1

    @property
    def dtype(self):
        return self.matrix.dtype

    def _size(self):
        return torch.Size((*self.matrix.shape[:-2], len(self.row_index), len(self.col_index)))

    def _scatter(self, cells, values):
        return cells.index_add(-2, self.col_index, values)

    def _matmul(self, rhs):
        columns = rhs.unsqueeze(-1) if rhs.dim() == 1 else rhs
        cells = columns.new_zeros(*columns.shape[:-2], self.matrix.size(-1), columns.size(-1))
        result = (self.matrix @ self._scatter(cells, columns))[..., self.row_index, :]
        return result.squeeze(-1) if rhs.dim() == 1 else result

    def _with(self, matrix, row_index=None, col_index=None):
        row_index = self.row_index if row_index is None else row_index
        col_index = self.col_index if col_index is None else col_index
        return type(self)(matrix, row_index=row_index, col_index=col_index, memo=self.memo)

    def _transpose_nonbatch(self):
        return self._with(self.matrix.mT, self.col_index, self.row_index)

    def _getitem(self, row_index, col_index, *batch_indices):
        return self._with(self.matrix[batch_indices], self.row_index[row_index], self.col_index[col_index])

    def _get_indices(self, row_index, col_index, *batch_indices):
        return self.matrix[(*batch_indices, self.row_index[row_index], self.col_index[col_index])]

    def _expand_batch(self, batch_shape):
        return self._with(self.matrix.expand(*batch_shape, *self.matrix.shape[-2:]))


class TransposesToItself(Selected):
    def _transpose_nonbatch(self):
        return self


class ScattersByCopy(Selected):
    def _scatter(self, cells, values):
        return cells.index_copy(-2, self.col_index, values)


class ExpandsByAnotherName(Selected):
    def _expand_batch(self, shape):
        return super()._expand_batch(shape)


def selected(kind=Selected, memo=None, dtype=torch.float64):
    index = torch.tensor([0, 2, 3, 5, 6])
    matrix = (exponential(7, 0.3) + torch.eye(7, dtype=torch.float64)).to(dtype)
    return kind(matrix.requires_grad_(), row_index=index, col_index=index, memo=memo)


# -- the preconditioner ------------------------------------------------------------------------------------------------


def no_preconditioner(operator):
    return None, None, None


def overridden(override=no_preconditioner):
    noise = ConstantDiagLinearOperator(torch.ones(1, dtype=torch.float64), diag_shape=5)
    kernel = to_linear_operator(exponential(5, 0.1))
    return AddedDiagLinearOperator(kernel, noise, preconditioner_override=override)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("evaluate_kernel", lambda operator: operator.evaluate_kernel()),
        ("add_jitter", lambda operator: operator.add_jitter()),
        ("mul", lambda operator: operator * 2.0),
        ("expand", lambda operator: operator.expand(2, 5, 5)),
        ("add", lambda operator: operator + DiagLinearOperator(torch.ones(5, dtype=torch.float64))),
    ],
)
def test_preconditioner_override_is_dropped(name, change):
    """Trap: `preconditioner_override` is lost on the way. Answered by a subclass of AddedDiagLinearOperator."""
    operator = overridden()
    assert operator.preconditioner_override is no_preconditioner
    kept = getattr(change(operator), "preconditioner_override", None)
    assert kept is None, changed(f"preconditioner_override now survives {name}", ADDED_DIAG)


def test_preconditioner_override_never_reaches_training():
    """Trap: `log_prob` evaluates the kernel first, which drops the override. See SelectedKroneckerAddedDiagOperator."""
    calls = []

    def spy(operator):
        calls.append(operator)
        return no_preconditioner(operator)

    operator = overridden(spy)
    zeros = torch.zeros(5, dtype=torch.float64)
    with linear_operator.settings.max_cholesky_size(0):
        operator.inv_quad_logdet(zeros, logdet=True)
        assert calls, "the override is not asked by inv_quad_logdet either: this canary tests nothing"
        calls.clear()
        MultivariateNormal(zeros, operator).log_prob(zeros)
    assert not calls, changed("log_prob now uses preconditioner_override", ADDED_DIAG)


def test_subclass_from_add_survives_evaluation():
    """The remedy's hook: evaluating ``K + D`` adds kernel and noise anew, so `__add__` decides what comes out.

    Used by operators/selected_kronecker.
    """

    class Own(AddedDiagLinearOperator):
        pass

    class OwnKernel(DenseLinearOperator):
        def __add__(self, other):
            return Own(self, other)

    noise = ConstantDiagLinearOperator(torch.ones(1, dtype=torch.float64), diag_shape=5)
    plain = AddedDiagLinearOperator(OwnKernel(exponential(5, 0.1)), noise)
    message = changed("evaluate_kernel no longer rebuilds the sum by kernel + noise", ADDED_DIAG)
    assert type(plain.evaluate_kernel()) is Own, message
    assert type(Own(*plain.linear_ops).add_jitter()) is Own, changed("add_jitter no longer keeps the class", ADDED_DIAG)


# -- rebuilding and casting --------------------------------------------------------------------------------------------


def test_every_function_rebuilds_the_operator():
    """Trap: Functions work on ``cls(*args, **kwargs)``, not on the operator. Answered by cheap constructors, a cache.

    Attributes set after construction are lost; a keyword that is no tensor rides along as the same object.
    """
    memo = {}
    operator = selected(memo=memo)
    operator.extra = "set later"
    rebuilt = operator.representation_tree()(*operator.representation())
    where = "gpytorch_gaps.utils.cache"
    assert rebuilt is not operator, changed("representation_tree no longer rebuilds", where)
    assert not hasattr(rebuilt, "extra"), changed("rebuilt operators now keep attributes", where)
    assert rebuilt.memo is memo, changed("keywords that are no tensors no longer ride along as they are", where)
    for name, call in (
        ("matmul", lambda: operator @ torch.ones(5, 1, dtype=torch.float64)),
        ("solve", lambda: operator.solve(torch.ones(5, 1, dtype=torch.float64))),
        ("inv_quad_logdet", lambda: operator.inv_quad_logdet(torch.ones(5, 1, dtype=torch.float64), logdet=True)[0]),
    ):
        with linear_operator.settings.max_cholesky_size(0):
            before = Selected.made
            result = call()
            between = Selected.made
            result.sum().backward()
        assert between > before, changed(f"{name} no longer rebuilds the operator", where)
        assert Selected.made > between, changed(f"the backward of {name} no longer rebuilds the operator", where)


def test_base_to_casts_indices():
    """Trap: `to(dtype)` makes floats of index tensors. Answered by KroneckerFactorsOperator.to."""
    cast = selected().to(torch.float32)
    assert cast.matrix.dtype == torch.float32
    message = changed("LinearOperator.to no longer casts index tensors to float", f"{BASE}.KroneckerFactorsOperator.to")
    assert cast.row_index.dtype == torch.float32, message


@pytest.mark.parametrize("device", ["meta", "cuda", "no such device"])
def test_base_to_ignores_device_strings(device):
    """Trap: `to("cuda")` returns an operator that has not moved, without a word. See KroneckerFactorsOperator.to."""
    where = f"{BASE}.KroneckerFactorsOperator.to"
    moved = selected().to(device)
    assert moved.matrix.device.type == "cpu", changed(f"LinearOperator.to({device!r}) is no longer ignored", where)
    assert selected().to(torch.device("meta")).matrix.device.type == "meta"  # as a torch.device it is understood


def failures_in_harness(kind, *tests):
    """Which of these tests of the shipped harness fail on an operator of this kind."""

    class Case(LinearOperatorTestCase, unittest.TestCase):
        seed = 0

        def create_linear_op(self):
            return selected(kind, dtype=torch.float32)

        def evaluate_linear_op(self, operator):
            return operator.matrix[..., operator.row_index, :][..., operator.col_index]

    result = unittest.TestResult()
    unittest.TestSuite([Case(test) for test in tests]).run(result)
    return {case._testMethodName for case, _ in result.failures + result.errors}


@pytest.mark.parametrize(
    ("kind", "caught_by"),
    [
        (TransposesToItself, "test_rmatmul_matrix"),
        (ScattersByCopy, "test_getitem_tensor_index"),
        (ExpandsByAnotherName, "test_expand"),
    ],
)
def test_harness_catches(kind, caught_by):
    """Trap: `_transpose_nonbatch` returning self, `index_copy` for scatter, `_expand_batch(other_name)`.

    The shipped harness, which tests/operators runs over every operator of ours, must go on catching each.
    """
    assert failures_in_harness(Selected, caught_by) == set(), f"the harness refuses a sound operator in {caught_by}"
    where = "gpytorch_gaps.operators and tests/operators, which need a test of their own now"
    assert failures_in_harness(kind, caught_by) == {caught_by}, changed(
        f"{caught_by} of the harness no longer catches {kind.__name__}", where
    )


# -- Kronecker products and decompositions -----------------------------------------------------------------------------


def test_orders_of_grids_differ():
    """Trap: Kronecker products run last axis fastest, `create_data_from_grid` first axis fastest. See CartesianGrid."""
    where = "gpytorch_gaps.grid.cartesian.CartesianGrid"
    axes = [torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0, 3.0])]
    factors = [torch.exp(-(axis[:, None] - axis).abs()) for axis in axes]
    product = KroneckerProductLinearOperator(*factors).to_dense()
    assert torch.equal(product, torch.kron(*factors)), changed(
        "KroneckerProductLinearOperator no longer runs last axis fastest", where
    )
    points = gpytorch.utils.grid.create_data_from_grid(axes)
    first_fastest = torch.cartesian_prod(*reversed(axes)).flip(-1)
    message = changed("create_data_from_grid no longer runs first axis fastest", where)
    assert torch.equal(points, first_fastest), message


def test_diagonalization_above_800_is_lanczos():
    """Trap: `diagonalization()` of a factor above 800 gives 100 Ritz values. Answered by kronecker/eigen's `eigh`."""
    where = "gpytorch_gaps.linalg.eigen"
    exact, _ = to_linear_operator(exponential(800, 0.1)).diagonalization()
    assert len(exact) == 800
    partial, _ = to_linear_operator(exponential(801, 0.1)).diagonalization()
    message = changed("diagonalization() of a matrix of 801 is no longer by Lanczos", where)
    assert len(partial) <= linear_operator.settings.max_root_decomposition_size.value() == 100, message
    assert partial.sum() < 0.99 * 801, message  # the trace is lost with them


def test_kronecker_solve_with_product_noise_is_lanczos_above_800():
    """Trap: with noise that is a product over axes, upstream's own Kronecker solve diagonalizes each factor so.

    (With one constant noise it does not: the product takes `_symeig`.) Answered by kronecker/eigen.
    """
    factors = [exponential(801, 0.1), exponential(2, 0.1)]
    kernel = KroneckerProductLinearOperator(*factors)
    diagonals = [
        ConstantDiagLinearOperator(torch.full((1,), value, dtype=torch.float64), diag_shape=size)
        for value, size in ((0.1, 801), (0.2, 2))
    ]
    product = KroneckerProductDiagLinearOperator(*diagonals)
    constant = ConstantDiagLinearOperator(torch.full((1,), 0.02, dtype=torch.float64), diag_shape=2 * 801)
    rhs = normal(2 * 801, 1)

    def error(noise):
        solution = (kernel + noise)._solve(rhs)
        return (kernel @ solution + 0.02 * solution - rhs).norm() / rhs.norm()

    where = "gpytorch_gaps.linalg.eigen"
    assert error(constant) < 1e-6, changed("the Kronecker solve with constant noise is no longer exact", where)
    assert error(product) > 0.1, changed("the Kronecker solve with product noise is now exact above 800", where)
