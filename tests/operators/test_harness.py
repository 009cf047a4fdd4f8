"""linear_operator's own harness, unmodified, over every operator: square, rectangular and batched.

The harness solves with Cholesky forbidden (``max_cholesky_size(0)``) and enforced, and checks that conjugate
gradients were called, or not, accordingly.
"""

import unittest
from functools import reduce

import pytest
import torch
from linear_operator.operators import ConstantDiagLinearOperator, DiagLinearOperator
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase, RectangularLinearOperatorTestCase

from gpytorch_gaps.operators import (
    FillGapsOperator,
    SelectedKroneckerAddedDiagOperator,
    SelectedKroneckerDiagOperator,
    SelectedKroneckerOperator,
)

TRAIN = torch.tensor([0, 2, 3, 5, 7, 8, 11])
GAPS = torch.tensor([1, 4, 6, 9, 10])


def factors(*shapes, batch=()):
    torch.manual_seed(0)
    result = []
    for q, m in shapes:
        matrix = torch.randn(*batch, q, m)
        result.append(matrix @ matrix.mT / m + torch.eye(m) if q == m else matrix)
    return result


def kron(matrices):
    def pair(a, b):
        product = a[..., :, None, :, None] * b[..., None, :, None, :]
        return product.reshape(*product.shape[:-4], a.size(-2) * b.size(-2), a.size(-1) * b.size(-1))

    return reduce(pair, matrices)


class SelectedKronecker:
    batch = ()
    should_call_cg = False  # conjugate gradients of our own

    def create_linear_op(self):
        return SelectedKroneckerOperator(*factors((4, 4), (3, 3), batch=self.batch), row_index=TRAIN, col_index=TRAIN)

    def evaluate_linear_op(self, linear_op):
        return kron(linear_op.factors)[..., TRAIN, :][..., TRAIN]


class TestSelectedKronecker(SelectedKronecker, LinearOperatorTestCase, unittest.TestCase):
    seed = 0


class TestSelectedKroneckerBatch(SelectedKronecker, LinearOperatorTestCase, unittest.TestCase):
    seed = 0
    batch = (3,)


class Rectangular:
    batch = ()
    rows, columns = torch.tensor([7, 0, 3, 3, 5]), torch.tensor([1, 11, 4, 0, 2, 8])

    def create_linear_op(self):
        matrices = factors((2, 4), (5, 3), batch=self.batch)
        return SelectedKroneckerOperator(*matrices, row_index=self.rows, col_index=self.columns)

    def evaluate_linear_op(self, linear_op):
        return kron(linear_op.factors)[..., self.rows, :][..., self.columns]


class TestSelectedKroneckerRectangular(Rectangular, RectangularLinearOperatorTestCase, unittest.TestCase):
    seed = 0


class TestSelectedKroneckerRectangularBatch(Rectangular, RectangularLinearOperatorTestCase, unittest.TestCase):
    seed = 0
    batch = (3,)


class AddedDiag:
    batch = ()
    should_call_cg = False  # conjugate gradients of our own

    def diagonal(self):
        return ConstantDiagLinearOperator(torch.full((*self.batch, 1), 0.7), diag_shape=len(TRAIN))

    def create_linear_op(self):
        kernel = SelectedKroneckerOperator(*factors((4, 4), (3, 3), batch=self.batch), row_index=TRAIN, col_index=TRAIN)
        return SelectedKroneckerAddedDiagOperator(kernel, self.diagonal())

    def evaluate_linear_op(self, linear_op):
        kernel = kron(linear_op._linear_op.factors)[..., TRAIN, :][..., TRAIN]
        return kernel + torch.diag_embed(linear_op._diag_tensor._diag)


class TestAddedConstantDiag(AddedDiag, LinearOperatorTestCase, unittest.TestCase):
    seed = 0


class TestAddedConstantDiagBatch(AddedDiag, LinearOperatorTestCase, unittest.TestCase):
    seed = 0
    batch = (3,)


class TestAddedDiag(AddedDiag, LinearOperatorTestCase, unittest.TestCase):
    seed = 0

    def diagonal(self):
        return DiagLinearOperator(torch.linspace(0.3, 1.1, len(TRAIN)).expand(*self.batch, -1).clone())


class TestAddedDiagBatch(TestAddedDiag):
    batch = (3,)


class TestAddedProductDiag(AddedDiag, LinearOperatorTestCase, unittest.TestCase):
    seed = 0

    def diagonal(self):
        axes = (torch.tensor([0.5, 1.0, 0.7, 0.9]), torch.tensor([0.6, 1.3, 0.8]))
        return SelectedKroneckerDiagOperator(*(a.expand(*self.batch, -1).clone() for a in axes), index=TRAIN)


class TestAddedProductDiagBatch(TestAddedProductDiag):
    batch = (3,)


class FillGaps:
    batch = ()
    should_call_cg = False  # conjugate gradients of our own

    def create_linear_op(self):
        noise = torch.full((*self.batch, 1), 0.4)
        return FillGapsOperator(*factors((4, 4), (3, 3), batch=self.batch), noise=noise, gap_index=GAPS)

    def evaluate_linear_op(self, linear_op):
        matrix = kron(linear_op.factors) + linear_op.noise.unsqueeze(-1) * torch.eye(12)
        return matrix.inverse()[..., GAPS, :][..., GAPS]


class TestFillGaps(FillGaps, LinearOperatorTestCase, unittest.TestCase):
    seed = 0


class TestFillGapsBatch(FillGaps, LinearOperatorTestCase, unittest.TestCase):
    seed = 0
    batch = (3,)


if __name__ == "__main__":
    pytest.main([__file__])
