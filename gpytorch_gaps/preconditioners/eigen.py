"""Evans & Nair (2018), eq. (3.7): the observed block of K with its p largest eigenvalues only, plus the noise."""

import math

from torch import Tensor

from gpytorch_gaps.linalg.eigen import KroneckerEigen, largest_left_out, leading_products_stable
from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner


class EigenPreconditioner(LowRankPreconditioner):
    """``P = W Q S_p' T_p S_p Q' W' + D``, D constant or one noise per observation.

    Evans & Nair (2018), eq. (3.7). Differs from the paper in that the p x p matrix is symmetric and its Gram matrix is
    contracted from the mask axis by axis, so that the set-up the paper calls prohibitive at 10^9 cells stays cheap; and
    that solves are preconditioned with what is left out of the trace spread over the diagonal.

    :param eigen: of the Kronecker product K.
    :param train_index: flat cells of the observations, shape (N,).
    :param noise: D, shape (*batch, 1) or (*batch, N).
    :param rank: p, at most the number of cells.
    :param trace: of ``W K W'``, shape batch. None: as in the paper, nothing is added to D.

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
        super().__init__(eigen.vectors, positions, values, train_index, noise, left_over=left_over, trace=trace)
