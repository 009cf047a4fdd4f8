"""The paper's approximation: ``log|K_XX + s2 I| ~ sum_{i <= N} log(N/M lambda_i + s2)``, lambda_i the N largest of K.

Cheap and biased: it ignores where the gaps are, and a likelihood built on it inflates the noise. For comparison.
"""

from collections.abc import Sequence

from torch import Tensor

from gpytorch_gaps.autograd.rayleigh import frozen_eigenvalues
from gpytorch_gaps.linalg.products import kron_diagonal
from gpytorch_gaps.solvers.gap_system import GapSystem


def nystrom_logdet(system: GapSystem, factors: Sequence[Tensor], noise: Tensor) -> Tensor:
    """Constant noise only. Differentiable in factors and noise. shape: batch"""
    if not system.constant_noise:
        raise ValueError(
            "logdet_method: got 'nystrom' with one noise per point, expected constant noise, or a product over axes; "
            "use 'stochastic'"
        )
    products = kron_diagonal(frozen_eigenvalues(factors, system.eigen().vectors))
    largest = products.topk(min(system.num_train, system.num_cells), dim=-1).values
    # cells observed twice can make N > M: the eigenvalues beyond M are zero
    beyond = max(0, system.num_train - system.num_cells) * noise.double().log().sum(-1)
    return (system.num_train / system.num_cells * largest + noise.double()).log().sum(-1) + beyond
