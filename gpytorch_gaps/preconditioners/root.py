"""``P = R R' + D`` for a tall matrix R, and its inverse by the matrix inversion lemma.

For sums of kernels, whose terms share no eigenbasis: R holds the leading eigenvectors of each, side by side.

    P^-1   = D^-1 - D^-1 R (I + R' D^-1 R)^-1 R' D^-1
    log|P| = log|D| + log|I + R' D^-1 R|
"""

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor


class RootPreconditioner:
    """``P = R R' + D`` in float64, whatever the precision of what it is applied to.

    :param root: R, shape (*batch, N, p).
    :param diagonal: D, shape (*batch, N).

    Cost: set-up 2 N p^2 + p^3 / 3; then 4 N p a column.
    """

    def __init__(self, root: Tensor, diagonal: Tensor) -> None:
        self.root, self.diagonal = root.detach().double(), diagonal.detach().double()
        self._cholesky = psd_safe_cholesky(_core(self.root, self.diagonal))

    @property
    def rank(self) -> int:
        return self.root.size(-1)

    def solve(self, x: Tensor) -> Tensor:
        """``P^-1 x``, in the precision of x. shape: (*batch, N, C)"""
        diagonal = self.diagonal.unsqueeze(-1)
        scaled = x.double() / diagonal
        inner = torch.cholesky_solve(self.root.mT @ scaled, self._cholesky)
        return (scaled - (self.root @ inner) / diagonal).to(x.dtype)

    @staticmethod
    def logdet(root: Tensor, diagonal: Tensor) -> Tensor:
        """``log|P|``, differentiable. shape: batch"""
        factor = psd_safe_cholesky(_core(root.double(), diagonal.double()))
        return 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) + diagonal.double().log().sum(-1)


def _core(root: Tensor, diagonal: Tensor) -> Tensor:
    """``I + R' D^-1 R``. shape: (*batch, p, p)"""
    core = root.mT @ (root / diagonal.unsqueeze(-1))
    return core + torch.eye(core.size(-1), dtype=core.dtype, device=core.device)
