"""Roots of the factors of a prior, for draws: symmetric roots of matrices, and roots of tori by FFT."""

import warnings

import torch
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from gpytorch_gaps.autograd.kernel_root import circulant_root, kernel_root, symmetric_root
from gpytorch_gaps.linalg.circulant import CirculantOperator
from gpytorch_gaps.linalg.factors import Factor, negative_share

_SAME_LEVELS = 1e-7  # allowed difference of covariances, as a fraction of the largest


def wide_root(factor: Factor) -> Factor:
    """A root with one column per normal number of a draw: symmetric, or the root of a torus."""
    if not isinstance(factor, CirculantOperator):
        return symmetric_root(factor)
    share = negative_share(factor)
    if share:
        warnings.warn(
            f"draws: the padding of {' x '.join(map(str, factor.torus))} places is too short for the range of the "
            f"kernel. Eigenvalues down to {-share:.1e} of the largest are replaced by zero, so that covariances of "
            "draws have errors of that order. Try: shorter length-scales, or one kernel per axis.",
            NumericalWarning,
            stacklevel=2,
        )
    return circulant_root(factor)


def has_two_roots(train: Factor, cross: Factor, prior: Factor) -> bool:
    """Whether rows and columns lie on one torus: they have the same levels on the dense axis."""
    if not isinstance(cross, CirculantOperator):  # rows and columns may have no common lattice
        return torch.is_tensor(train) and torch.is_tensor(prior)
    if cross.num_dense == (1, 1):
        return True
    sides = [own for own in (train, cross, prior) if isinstance(own, CirculantOperator)]
    if len(sides) < 3 or cross.num_dense[0] != cross.num_dense[1]:
        return False
    # the levels are the same if there are as many and their covariances at lag zero are the same
    here, across, there = (own.table.detach().flatten(-len(own.torus))[..., 0] for own in sides)
    differences = torch.stack([(here - across).abs().amax(), (there - across).abs().amax()])
    return bool((differences <= _SAME_LEVELS * here.abs().amax()).all())


def two_wide_roots(train: Factor, cross: Factor, prior: Factor) -> tuple[Factor, Factor]:
    """Roots of both blocks of a joint covariance, from the same normal numbers."""
    if not isinstance(cross, CirculantOperator):
        assert torch.is_tensor(train)
        assert torch.is_tensor(prior)
        root = symmetric_root(joint_covariance(train, cross, prior))
        return root[..., : train.size(-1), :], root[..., train.size(-1) :, :]
    sides = cross.row_positions, cross.col_positions
    test, observed = (CirculantOperator(cross.table, torus=cross.torus, row_positions=side) for side in sides)
    return wide_root(observed), wide_root(test)


def joint_covariance(train: Tensor, cross: Tensor, prior: Tensor) -> Tensor:
    """``[[K_XX, K_X*], [K_*X, K_**]]``, in float64."""
    batch = torch.broadcast_shapes(*(block.shape[:-2] for block in (train, cross, prior)))
    train, cross, prior = (block.double().expand(*batch, *block.shape[-2:]) for block in (train, cross, prior))
    return torch.cat([torch.cat([train, cross.mT], -1), torch.cat([cross, prior], -1)], -2)


def joint_root(train: Tensor, cross: Tensor, prior: Tensor) -> Tensor:
    if train.shape == cross.shape and torch.equal(train, cross) and torch.equal(train, prior):  # the axis itself
        root, _ = kernel_root(prior)
        return torch.cat([root, root], -2)
    return kernel_root(joint_covariance(train, cross, prior))[0]
