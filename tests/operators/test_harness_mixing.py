"""linear_operator's own harness, unmodified, over the operators that mix kernels.

The operators are scattered points against a grid, sums with and without noise, and posterior covariances, each without
a batch and with one batch dimension.
"""

import unittest

import pytest
import torch
from linear_operator.operators import (
    ConstantDiagLinearOperator,
    DenseLinearOperator,
    DiagLinearOperator,
    RootLinearOperator,
    SumLinearOperator,
)
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase, RectangularLinearOperatorTestCase

from gpytorch_gaps.operators import (
    KhatriRaoOperator,
    SelectedKroneckerOperator,
    SelectedKroneckerSumAddedDiagOperator,
    SelectedKroneckerSumOperator,
)
from gpytorch_gaps.posterior.covariance import PosteriorCovarianceOperator
from tests._dense import kron, kron_vectors

TRAIN = torch.tensor([0, 2, 3, 5, 7, 8, 11])
TEST = torch.tensor([1, 2, 4, 6, 10])
BATCHES = {"": (), "Batch": (3,)}


def over_batches(harness):
    """Runs a recipe through the harness once per batch shape: as Test<name> and Test<name>Batch."""

    def register(recipe):
        for suffix, batch in BATCHES.items():
            name = f"Test{recipe.__name__}{suffix}"
            members = {"seed": 0, "batch": batch, "__module__": __name__, "__qualname__": name}
            globals()[name] = type(name, (recipe, harness, unittest.TestCase), members)
        return recipe

    return register


def spd(*sizes, batch=(), seed=0):
    """Well-conditioned factors: the harness compares float32 Lanczos decompositions."""
    generator = torch.Generator().manual_seed(seed)
    roots = [torch.randn(*batch, size, size, generator=generator) for size in sizes]
    return [root @ root.mT / size + torch.eye(size) for root, size in zip(roots, sizes, strict=True)]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kronecker(batch, seed=0):
    return SelectedKroneckerOperator(*spd(4, 3, batch=batch, seed=seed), row_index=TRAIN, col_index=TRAIN)


def evaluate(op):
    """Written out from the tensors alone, by none of the operators' own code."""
    if isinstance(op, SelectedKroneckerOperator):
        return kron(op.factors)[..., op.row_index, :][..., op.col_index]
    if isinstance(op, KhatriRaoOperator):
        rows = kron_vectors(op.factors)[..., op.col_index]
        return rows.mT if op.transposed else rows
    if isinstance(op, SumLinearOperator):
        return sum(evaluate(part) for part in op.linear_ops)
    if isinstance(op, RootLinearOperator):
        root = op.root.tensor
        return root @ root.mT
    if isinstance(op, ConstantDiagLinearOperator):
        return torch.diag_embed(op.diag_values.expand(*op.batch_shape, op.diag_shape))
    if isinstance(op, DiagLinearOperator):
        return torch.diag_embed(op._diag)
    if isinstance(op, PosteriorCovarianceOperator):
        cross, train = evaluate(op.parts.cross), evaluate(op.parts.train)
        train = 0.5 * (train + train.mT)  # so that its gradient is symmetric, as ours is
        return evaluate(op.parts.prior) - cross @ torch.linalg.solve(train, cross.mT)
    return op.tensor


class Recipe:
    batch = ()

    def evaluate_linear_op(self, linear_op):
        return evaluate(linear_op)


# -- scattered points against a grid ---------------------------------------------------------------------------------


@over_batches(RectangularLinearOperatorTestCase)
class KhatriRao(Recipe):
    transposed = False

    def create_linear_op(self):
        factors = [normal(*self.batch, 5, size, seed=size) for size in (4, 3)]
        return KhatriRaoOperator(*factors, col_index=TRAIN, transposed=self.transposed)


@over_batches(RectangularLinearOperatorTestCase)
class KhatriRaoTransposed(KhatriRao):
    transposed = True


@over_batches(RectangularLinearOperatorTestCase)
class KhatriRaoRepeatedCells(Recipe):
    """Cells in any order, some twice, and a batch on one factor alone."""

    def create_linear_op(self):
        factors = [normal(*self.batch, 5, 4), normal(5, 3, seed=1)]
        return KhatriRaoOperator(*factors, col_index=torch.tensor([7, 0, 3, 3, 11, 5]))


# -- sums ------------------------------------------------------------------------------------------------------------


class Sum(Recipe):
    should_test_sample = True

    def other(self):
        raise NotImplementedError

    def create_linear_op(self):
        return SelectedKroneckerSumOperator(kronecker(self.batch), self.other())


@over_batches(LinearOperatorTestCase)
class SumTwoKronecker(Sum):
    def other(self):
        return kronecker(self.batch, seed=1)


@over_batches(LinearOperatorTestCase)
class SumLowRank(Sum):
    def other(self):
        return RootLinearOperator(normal(*self.batch, len(TRAIN), 2))


@over_batches(LinearOperatorTestCase)
class SumDense(Sum):
    def other(self):
        return DenseLinearOperator(spd(len(TRAIN), batch=self.batch, seed=2)[0])


class SumOtherGrid(Sum):
    """Kronecker products on two grids, a low-rank term, and a batch on the first term alone."""

    def other(self):
        return SelectedKroneckerOperator(*spd(2, 4, seed=1), row_index=torch.arange(7), col_index=torch.arange(7))

    def create_linear_op(self):
        return SelectedKroneckerSumOperator(kronecker(self.batch), self.other(), RootLinearOperator(normal(7, 1)))


class Constant:
    def noise(self):
        return ConstantDiagLinearOperator(torch.full((*self.batch, 1), 0.7), diag_shape=len(TRAIN))


class PerPoint:
    def noise(self):
        return DiagLinearOperator(torch.linspace(0.3, 1.1, len(TRAIN)).expand(*self.batch, -1).clone())


class AddedDiag:
    should_call_cg = False  # conjugate gradients of our own

    def create_linear_op(self):
        return SelectedKroneckerSumAddedDiagOperator(super().create_linear_op(), self.noise())


@over_batches(LinearOperatorTestCase)
class SumTwoKroneckerPlusConstant(AddedDiag, Constant, SumTwoKronecker):
    pass


@over_batches(LinearOperatorTestCase)
class SumLowRankPlusPerPoint(AddedDiag, PerPoint, SumLowRank):
    pass


@over_batches(LinearOperatorTestCase)
class SumDensePlusPerPoint(AddedDiag, PerPoint, SumDense):
    pass


@over_batches(LinearOperatorTestCase)
class SumOtherGridPlusConstant(AddedDiag, Constant, SumOtherGrid):
    pass


# -- posterior covariances -------------------------------------------------------------------------------------------


@over_batches(LinearOperatorTestCase)
class Posterior(Recipe):
    should_test_sample = True
    # its root is a Cholesky factor whatever the size: a Lanczos root loses variance
    should_call_lanczos = False

    def terms(self):
        return [spd(4, 3, batch=self.batch)]

    def create_linear_op(self):
        def block(rows, columns):
            return [SelectedKroneckerOperator(*f, row_index=rows, col_index=columns) for f in self.terms()]

        noise = ConstantDiagLinearOperator(torch.full((*self.batch, 1), 0.7), diag_shape=len(TRAIN))
        train, prior, cross = block(TRAIN, TRAIN), block(TEST, TEST), block(TEST, TRAIN)
        if len(train) == 1:
            return PosteriorCovarianceOperator(prior[0], cross[0], train[0] + noise)
        train = SelectedKroneckerSumOperator(*train) + noise
        return PosteriorCovarianceOperator(SelectedKroneckerSumOperator(*prior), SumLinearOperator(*cross), train)


class TestPosteriorOfSum(Posterior, LinearOperatorTestCase, unittest.TestCase):
    seed = 0

    def terms(self):
        return [spd(4, 3, batch=self.batch, seed=seed) for seed in (0, 1)]


if __name__ == "__main__":
    pytest.main([__file__])
