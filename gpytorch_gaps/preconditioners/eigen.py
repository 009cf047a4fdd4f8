"""The low-rank eigen preconditioners of Evans & Nair (2018), eqs. (3.7) and (3.8).

For ignore-gaps, eq. (3.7): the observed block of K with only its p largest eigenvalues, plus the noise.

For fill-gaps, eq. (3.8): ``V (K + s2 I)^-1 V' = J + zeta I``, where J is approximated by its p largest eigenvalues
``1 / (lambda + s2) - zeta``. These belong to the p *smallest* eigenvalues of K. According to the paper, this rarely
saves time. It is off by default.
"""

import math

from torch import Tensor

from gpytorch_gaps.linalg.eigen import KroneckerEigen, largest_left_out, leading_products_stable
from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner


class EigenPreconditioner(LowRankPreconditioner):
    """``P = W Q S_p' T_p S_p Q' W' + D``, D constant or one noise per observation.

    Evans & Nair (2018), eq. (3.7), with two differences. The p x p matrix is symmetric, and its Gram matrix is
    contracted from the mask axis by axis, so that the set-up, which the paper calls prohibitive at 10^9 cells, stays
    cheap. For solves, the dropped part of the trace is spread over the diagonal.

    :param eigen: eigen-decomposition of the Kronecker product K.
    :param train_index: flat cells of the observations, shape (N,).
    :param noise: D, shape (*batch, 1) or (*batch, N).
    :param rank: p, at most the number of cells.
    :param trace: trace of ``W K W'``, shape batch. None: as in the paper, nothing is added to D.

    >>> import torch
    >>> from gpytorch_gaps.linalg.eigen import kron_eigh
    >>> kernel, cells = torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=torch.float64), torch.tensor([0, 1])
    >>> noise = torch.tensor([0.5], dtype=torch.float64)
    >>> exact = EigenPreconditioner(kron_eigh([kernel]), cells, noise, rank=2)
    >>> torch.allclose(exact.matmul(torch.eye(2).double()), kernel + 0.5 * torch.eye(2))
    True
    """

    def __init__(
        self, eigen: KroneckerEigen, train_index: Tensor, noise: Tensor, rank: int, trace: Tensor | None = None
    ) -> None:
        values, positions = leading_products_stable(eigen.values, min(rank, eigen.num_cells))
        smallest = float(noise.min())
        left_over = largest_left_out(eigen.values, positions) / smallest if smallest > 0 else math.inf
        super().__init__(eigen.matrices, positions, values, train_index, noise, left_over=left_over, trace=trace)


class ShiftedEigenPreconditioner(LowRankPreconditioner):
    """``P = V Q S_p' [(T_p + s2)^-1 - zeta] S_p Q' V' + zeta I`` with zeta half of ``1 / (lambda_p + s2)``.

    Evans & Nair (2018), eq. (3.8), with the mid-range shift of the paper.

    :param eigen: eigen-decomposition of the Kronecker product K.
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
        super().__init__(eigen.matrices, positions, inverse - self.shift, gap_index, self.shift)
