"""linear_operator's own harness, unmodified, over interpolated Kronecker products: square, rectangular and batched."""

import unittest

import pytest
import torch
from linear_operator.operators import ConstantDiagLinearOperator, DiagLinearOperator
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase, RectangularLinearOperatorTestCase

from gpytorch_gaps.operators import (
    GridInterpolation,
    InterpolatedKroneckerAddedDiagOperator,
    InterpolatedKroneckerOperator,
)
from tests.operators.test_harness import factors, kron

AXES = [torch.linspace(0.0, 1.0, 6), torch.linspace(-1.0, 1.0, 5)]


# apart from each other, and from the border, so that the covariance is as well conditioned as the harness expects
POINTS = torch.tensor([[0.2, -0.5], [0.33, 0.4], [0.41, -0.1], [0.55, 0.5], [0.62, -0.45], [0.7, 0.12], [0.8, -0.2]])
ROWS = GridInterpolation.cubic(AXES, POINTS)
CELLS = torch.tensor([3, 0, 7, 7, 15])


class Interpolated:
    batch = ()
    should_call_cg = False  # conjugate gradients of our own

    def create_linear_op(self):
        return InterpolatedKroneckerOperator(*factors((6, 6), (5, 5), batch=self.batch), rows=ROWS)

    def evaluate_linear_op(self, linear_op):
        w = ROWS.dense().to(linear_op.dtype)
        return w @ kron(linear_op.factors) @ w.mT


class TestInterpolated(Interpolated, LinearOperatorTestCase, unittest.TestCase):
    seed = 0


class TestInterpolatedBatch(Interpolated, LinearOperatorTestCase, unittest.TestCase):
    seed = 0
    batch = (3,)


class Rectangular:
    batch = ()

    def create_linear_op(self):
        matrices = factors((6, 4), (5, 4), batch=self.batch)
        columns = GridInterpolation.selecting(CELLS, (4, 4))
        return InterpolatedKroneckerOperator(*matrices, rows=ROWS, columns=columns)

    def evaluate_linear_op(self, linear_op):
        return (ROWS.dense().to(linear_op.dtype) @ kron(linear_op.factors))[..., CELLS]


class TestInterpolatedRectangular(Rectangular, RectangularLinearOperatorTestCase, unittest.TestCase):
    seed = 0


class TestInterpolatedRectangularBatch(Rectangular, RectangularLinearOperatorTestCase, unittest.TestCase):
    seed = 0
    batch = (3,)


class AddedDiag:
    batch = ()
    should_call_cg = False  # conjugate gradients of our own

    def diagonal(self):
        return ConstantDiagLinearOperator(torch.full((*self.batch, 1), 0.7), diag_shape=len(ROWS))

    def create_linear_op(self):
        kernel = InterpolatedKroneckerOperator(*factors((6, 6), (5, 5), batch=self.batch), rows=ROWS)
        return InterpolatedKroneckerAddedDiagOperator(kernel, self.diagonal())

    def evaluate_linear_op(self, linear_op):
        w = ROWS.dense().to(linear_op.dtype)
        kernel = w @ kron(linear_op._linear_op.factors) @ w.mT
        return kernel + torch.diag_embed(linear_op._diag_tensor._diag)


class TestInterpolatedAddedConstantDiag(AddedDiag, LinearOperatorTestCase, unittest.TestCase):
    seed = 0


class TestInterpolatedAddedConstantDiagBatch(AddedDiag, LinearOperatorTestCase, unittest.TestCase):
    seed = 0
    batch = (3,)


class TestInterpolatedAddedDiag(AddedDiag, LinearOperatorTestCase, unittest.TestCase):
    seed = 0

    def diagonal(self):
        return DiagLinearOperator(torch.linspace(0.3, 1.1, len(ROWS)).expand(*self.batch, -1).clone())


class TestInterpolatedAddedDiagBatch(TestInterpolatedAddedDiag):
    batch = (3,)


if __name__ == "__main__":
    pytest.main([__file__])
