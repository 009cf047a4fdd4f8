"""Products with a long Toeplitz matrix whose entries vanish beyond some lag, one block at a time.

Transforms of a million numbers do not fit in the cache of a processor. If covariances are negligible beyond the lag r,
a block of outputs depends on the inputs of this block and of r places on either side. Short transforms of overlapping
pieces are then enough (the overlap-save method).

>>> lags = torch.exp(-torch.arange(200_000.0, dtype=torch.float64))
>>> short = ShortRange.of(lags, torch.float64)
>>> x = torch.ones(1, 200_000, dtype=torch.float64)
>>> short.reach < 50, f"{float(short.product(x, 200_000)[0, 1000]):.4f}", f"{float(2 * lags.sum() - 1):.4f}"
(True, '2.1640', '2.1640')
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_LEAST_PLACES = 2**16  # smallest length of an axis; shorter transforms fit in the cache
_LEAST_BLOCK = 2**13  # smallest length of the transforms
_BLOCKS_PER_AXIS = 8  # smallest number of blocks
_REACHES_PER_BLOCK = 4  # smallest ratio of a block to the reach: up to half of each transform is overlap
_NUMBERS = 2**17  # numbers that are transformed together


@dataclass(frozen=True)
class ShortRange:
    """The matrix with entries ``lags[|i - j|]``, without lags that are below rounding.

    :param reach: r, the largest lag that is used.
    :param spectrum: transform of the lags on a circle of one block.
    :param block: places on this circle.
    """

    reach: int
    spectrum: Tensor  # shape: (block // 2 + 1,)
    block: int

    @classmethod
    def of(cls, lags: Tensor, dtype: torch.dtype) -> "ShortRange | None":
        """The matrix of the given lags; None if the axis is short, or its range is long.

        :param lags: covariance by lag, one for every level of the axis, shape (m,).
        :param dtype: precision of products: lags are left out if their sum is below one unit of rounding of the
            largest row sum.
        """
        if len(lags) < _LEAST_PLACES:
            return None
        sizes = lags.detach().double().abs()
        beyond = sizes.flip(0).cumsum(0).flip(0)  # from each lag on
        negligible = beyond <= 0.5 * torch.finfo(dtype).eps * (2.0 * beyond[0] - sizes[0])
        reach = max(0, int((~negligible).sum()) - 1)
        block = max(_LEAST_BLOCK, 2 ** (_REACHES_PER_BLOCK * max(1, reach) - 1).bit_length())
        if _BLOCKS_PER_AXIS * block > len(lags):
            return None
        around = torch.arange(block, device=lags.device)
        lag = torch.minimum(around, block - around)
        kept = torch.where(lag <= reach, lags.detach()[lag], 0.0).to(dtype)
        return cls(reach, torch.fft.rfft(kept).real, block)

    def product(self, x: Tensor, num_rows: int) -> Tensor:
        """The product with columns along the last dimension. shape: (C, m) -> (C, num_rows)"""
        step = self.block - 2 * self.reach
        blocks = -(-num_rows // step)
        padded = x.new_zeros(len(x), blocks * step + 2 * self.reach)
        inside = min(x.size(-1), padded.size(-1) - self.reach)
        padded[:, self.reach : self.reach + inside] = x[:, :inside]
        result = x.new_empty(len(x), blocks, step)
        at_once = max(1, _NUMBERS // self.block)
        for column, pieces in enumerate(padded.unfold(-1, self.block, step)):  # shape: (blocks, block)
            for start in range(0, blocks, at_once):
                image = torch.fft.irfft(self.spectrum * torch.fft.rfft(pieces[start : start + at_once]), n=self.block)
                result[column, start : start + at_once] = image[:, self.reach : self.reach + step]
        return result.flatten(1)[:, :num_rows]
