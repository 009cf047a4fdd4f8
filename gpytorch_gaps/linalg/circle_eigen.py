"""Eigenvectors of a covariance whose stationary axes close: longitudes all around the globe, for example.

If the levels of an axis are all places of its circle, the Fourier transform diagonalises the covariance itself, and not
only a larger matrix that contains it. In real numbers, this is the Hartley transform H, symmetric and orthogonal, with
``H x = Re F x - Im F x``. If there is also a dense axis, there is one small matrix for every frequency k:

    K = (I ⊗ H) diag_k(L_k) (I ⊗ H),    L_k = V_k T_k V_k',    K = Q T Q',    Q = (I ⊗ H) diag_k(V_k)

The cost is one eigen-decomposition of size a for every frequency, with a the number of levels of the dense axis. (For a
matrix of all cells, the cost is the third power of their number.) The frequencies k and -k share V_k, since the
covariance is even.

>>> lags = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
>>> circle = CirculantOperator(lags.reshape(1, 1, 3), torus=(4,), row_positions=(4,))
>>> values, basis = circle_eigh(circle)
>>> eye = torch.eye(4, dtype=torch.float64)
>>> Q = basis._matmul(eye)
>>> torch.allclose(Q * values @ Q.mT, circle.to_dense()), torch.allclose(Q.mT @ Q, eye)
(True, True)
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpytorch_gaps.linalg.circulant import FFT_SLOWDOWN, CirculantOperator
from gpytorch_gaps.linalg.frequencies import by_frequency, conjugate_pairs


@dataclass(frozen=True)
class CircleBasis:
    """``Q = (I ⊗ H) diag_k(V_k)``, or its transpose, as an operator.

    A column of Q has two numbers: an eigenvector of V_k, and a frequency k, which is fastest.

    :param vectors: V_k for one of every pair of frequencies, shape (*batch, F, a, r).
    :param circles: places n_i on every circle.
    :param pairs: pairs of frequencies, from :func:`conjugate_pairs`.
    :param transposed: whether this is Q'.
    """

    vectors: Tensor
    circles: tuple[int, ...]
    pairs: tuple[Tensor, Tensor, Tensor]
    transposed: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.vectors.dtype

    @property
    def num_places(self) -> int:
        """Places on all circles, as many as frequencies."""
        return math.prod(self.circles)

    @property
    def shape(self) -> torch.Size:
        rows, columns = (self.num_places * size for size in self.vectors.shape[-2:])
        return torch.Size((*self.vectors.shape[:-3], *((columns, rows) if self.transposed else (rows, columns))))

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    @property
    def mT(self) -> "CircleBasis":
        return replace(self, transposed=not self.transposed)

    def to(self, dtype: torch.dtype) -> "CircleBasis":
        return replace(self, vectors=self.vectors.to(dtype))

    def last(self, count: int) -> "CircleBasis":
        """The eigenvectors of the `count` largest eigenvalues at every frequency."""
        return replace(self, vectors=self.vectors[..., -count:])

    @property
    def product_flops(self) -> float:
        """The cost of a product with one column, in FLOPs of matrix products."""
        rows, columns = self.vectors.shape[-2:]
        transform = 2.5 * self.num_places * math.log2(max(2, self.num_places)) * rows
        return FFT_SLOWDOWN * transform + 2.0 * self.num_places * rows * columns

    def _matmul(self, x: Tensor) -> Tensor:
        """``Q x`` or ``Q' x``. shape: (*batch, m, C) -> (*batch, q, C)"""
        return self._project(x) if self.transposed else self._expand(x)

    def _project(self, x: Tensor) -> Tensor:
        """``Q' x``: all places of every level of the dense axis are transformed, then every frequency is rotated."""
        _, _, place = self.pairs
        grid = x.unflatten(-2, (self.vectors.size(-2), *self.circles))
        spectrum = torch.fft.rfftn(grid, dim=self._circle_dims, norm="ortho").flatten(-1 - len(self.circles), -2)
        sides = torch.cat([spectrum.real - spectrum.imag, spectrum.real + spectrum.imag], -1)  # at k, and at -k
        rotated = self.vectors.mT @ sides.transpose(-3, -2)  # shape: (*batch, F, r, 2 C)
        both = torch.cat(rotated.chunk(2, -1), -3).index_select(-3, place)  # shape: (*batch, n, r, C)
        return both.transpose(-3, -2).flatten(-3, -2)

    def _expand(self, x: Tensor) -> Tensor:
        """``Q x``: every frequency is rotated back, then transformed."""
        first, second, _ = self.pairs
        levels = x.unflatten(-2, (self.vectors.size(-1), self.num_places)).transpose(-3, -2)
        sides = torch.cat([levels.index_select(-3, first), levels.index_select(-3, second)], -1)
        at, opposite = (0.5 * self.vectors @ sides).transpose(-3, -2).chunk(2, -1)  # shape: (*batch, a, F, C)
        half = (*self.circles[:-1], self.circles[-1] // 2 + 1)
        spectrum = torch.complex(opposite + at, opposite - at).unflatten(-2, half)
        grid = torch.fft.irfftn(spectrum, s=self.circles, dim=self._circle_dims, norm="ortho")
        return grid.flatten(-2 - len(self.circles), -2)

    @property
    def _circle_dims(self) -> tuple[int, ...]:
        return tuple(range(-1 - len(self.circles), -1))

    def quotients(self, covariance: CirculantOperator) -> Tensor:
        """``q' K q`` for every eigenvector, differentiable in the table of a covariance. shape: (*batch, q)"""
        matrices = by_frequency(covariance.spectrum(), len(self.circles))
        return self.of_all(((matrices @ self.vectors) * self.vectors).sum(-2))

    def of_all(self, values: Tensor) -> Tensor:
        """Copies numbers of one of every pair of frequencies to all columns. shape: (*batch, F, r) -> (*batch, q)"""
        _, _, place = self.pairs
        return values.index_select(-2, place % values.size(-2)).mT.flatten(-2)


def circle_eigh(covariance: CirculantOperator) -> tuple[Tensor, CircleBasis]:
    """Eigenvalues and eigenvectors of a symmetric covariance on whole circles, in float64.

    :return: shape (*batch, m), in the order of the columns of Q; and Q.
    """
    matrices = by_frequency(covariance.detach().spectrum(), len(covariance.torus))
    values, vectors = torch.linalg.eigh(0.5 * (matrices + matrices.mT))
    basis = CircleBasis(vectors, covariance.torus, conjugate_pairs(covariance.torus, vectors.device))
    return basis.of_all(values), basis
