"""Evans & Nair (2018), eq. (3.8): a spectral shift makes the fill-gaps matrix a low-rank one plus a constant.

``V (K + s2 I)^-1 V' = J + zeta I``, and J is replaced by its p largest eigenvalues ``1 / (lambda + s2) - zeta``, which
belong to the p *smallest* eigenvalues of K. The paper finds that it rarely pays; it is off unless asked for.
"""

from torch import Tensor

from gpytorch_gaps.linalg.eigen import KroneckerEigen, leading_products_stable
from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner


class ShiftedEigenPreconditioner(LowRankPreconditioner):
    """``P = V Q S_p' [(T_p + s2)^-1 - zeta] S_p Q' V' + zeta I`` with zeta half of ``1 / (lambda_p + s2)``.

    Evans & Nair (2018), eq. (3.8), with the mid-range shift of the paper.

    :param eigen: of the Kronecker product K.
    :param gap_index: flat cells of the gaps, shape (L,).
    :param noise: s2, shape (*batch, 1).
    :param rank: p, at most the number of cells.

    >>> import torch
    >>> from gpytorch_gaps.linalg.eigen import kron_eigh
    >>> eigen, noise = kron_eigh([torch.eye(4, dtype=torch.float64)]), torch.ones(1, dtype=torch.float64)
    >>> ShiftedEigenPreconditioner(eigen, torch.tensor([0, 2]), noise, rank=1).rank
    1
    """

    def __init__(self, eigen: KroneckerEigen, gap_index: Tensor, noise: Tensor, rank: int) -> None:
        values, positions = leading_products_stable(eigen.values, min(rank, eigen.num_cells), largest=False)
        inverse = 1.0 / (values + noise)
        self.shift = 0.5 * inverse.min(-1, keepdim=True).values
        super().__init__(eigen.vectors, positions, inverse - self.shift, gap_index, self.shift)
