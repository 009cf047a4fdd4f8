"""linear_operator's own harness, unmodified, over circulant operators and over products with one as a factor."""

import unittest

import pytest
import torch
from linear_operator.operators import ConstantDiagLinearOperator, DiagLinearOperator
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase, RectangularLinearOperatorTestCase

from gpytorch_gaps.operators import (
    SelectedKroneckerAddedDiagOperator,
    SelectedKroneckerDiagOperator,
    SelectedKroneckerOperator,
)
from tests import _dense as dense
from tests._torus import circulant, written_out

TRAIN = torch.tensor([0, 2, 3, 5, 7, 8, 11])
SOME = torch.tensor([0, 3, 5])


def with_nugget(op):
    """Condition numbers that conjugate gradients in float32 can take."""
    table = op.table.clone()
    zero_lag = (..., *[0] * len(op.torus))
    table[zero_lag] = table[zero_lag] + 1.5 * torch.eye(op.num_dense[0], dtype=table.dtype)
    return op.with_table(table)


class Circulant:
    batch = ()
    torus, positions, dense = (8, 7), (3, SOME), 0

    def create_linear_op(self):
        rows = {"torus": self.torus, "rows": self.positions, "dense": self.dense}
        return with_nugget(circulant(**rows, batch=self.batch, dtype=torch.float32))

    def evaluate_linear_op(self, linear_op):
        return written_out(linear_op)


class TestTorus(Circulant, LinearOperatorTestCase, unittest.TestCase):
    seed = 0


class TestSphereBatch(Circulant, LinearOperatorTestCase, unittest.TestCase):
    seed = 0
    batch = (2,)
    torus, positions, dense = (6,), (5,), 2


class Rectangular:
    batch = ()
    dense = 0

    def create_linear_op(self):
        kind = {"dense": self.dense, "batch": self.batch, "dtype": torch.float32}
        return circulant((8, 5), (SOME, 2), (2, 4), **kind)

    def evaluate_linear_op(self, linear_op):
        return written_out(linear_op)


class TestRectangularTorus(Rectangular, RectangularLinearOperatorTestCase, unittest.TestCase):
    seed = 0


class TestRectangularSphereBatch(TestRectangularTorus):
    batch = (3,)
    dense = 2


def kron(factors):
    return dense.kron([factor if torch.is_tensor(factor) else written_out(factor) for factor in factors])


class SelectedKronecker:
    batch = ()
    dense = 0
    should_call_cg = False  # conjugate gradients of our own

    def kernel(self):
        kind = {"dense": self.dense, "batch": self.batch, "dtype": torch.float32}
        block = with_nugget(circulant((6,), (2,), **kind) if self.dense else circulant((6, 5), (2, 2), **kind))
        matrix = dense.random_psd(3, batch=self.batch, floor=1.0).float()
        return SelectedKroneckerOperator(block, matrix, row_index=TRAIN, col_index=TRAIN)

    def create_linear_op(self):
        return self.kernel()

    def evaluate_linear_op(self, linear_op):
        return kron(linear_op.factors)[..., TRAIN, :][..., TRAIN]


class TestSelectedKronecker(SelectedKronecker, LinearOperatorTestCase, unittest.TestCase):
    seed = 0


class AddedDiag(SelectedKronecker):
    def diagonal(self):
        return ConstantDiagLinearOperator(torch.full((*self.batch, 1), 0.7), diag_shape=len(TRAIN))

    def create_linear_op(self):
        return SelectedKroneckerAddedDiagOperator(self.kernel(), self.diagonal())

    def evaluate_linear_op(self, linear_op):
        kernel = kron(linear_op._linear_op.factors)[..., TRAIN, :][..., TRAIN]
        return kernel + torch.diag_embed(linear_op._diag_tensor._diag)


class TestAddedConstantDiagBatch(AddedDiag, LinearOperatorTestCase, unittest.TestCase):
    seed = 0
    batch = (3,)


class TestAddedDiagSphere(AddedDiag, LinearOperatorTestCase, unittest.TestCase):
    seed = 0
    dense = 2

    def diagonal(self):
        return DiagLinearOperator(torch.linspace(0.3, 1.1, len(TRAIN)).expand(*self.batch, -1).clone())


class TestAddedProductDiag(AddedDiag, LinearOperatorTestCase, unittest.TestCase):
    seed = 0

    def diagonal(self):
        axes = (torch.tensor([0.5, 1.0, 0.7, 0.9]), torch.tensor([0.6, 1.3, 0.8]))
        return SelectedKroneckerDiagOperator(*(a.expand(*self.batch, -1).clone() for a in axes), index=TRAIN)


class RectangularKronecker:
    batch = ()
    rows, columns = torch.tensor([7, 0, 3, 3, 5]), torch.tensor([1, 11, 4, 0, 2, 8])

    def create_linear_op(self):
        torch.manual_seed(0)
        block = circulant((8, 5), (SOME, 2), (2, 2), batch=self.batch, dtype=torch.float32)
        matrix = torch.randn(*self.batch, 2, 3)
        return SelectedKroneckerOperator(matrix, block, row_index=self.rows, col_index=self.columns)

    def evaluate_linear_op(self, linear_op):
        return kron(linear_op.factors)[..., self.rows, :][..., self.columns]


class TestRectangularKroneckerBatch(RectangularKronecker, RectangularLinearOperatorTestCase, unittest.TestCase):
    seed = 0
    batch = (3,)


if __name__ == "__main__":
    pytest.main([__file__])
