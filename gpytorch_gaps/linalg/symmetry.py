"""The symmetric part of a large matrix, and how asymmetric it is, in blocks of rows and columns that fit in cache.

Reading a whole transpose would fetch single numbers from memory, and so would copies of it.

>>> matrix = torch.tensor([[1.0, 2.0], [4.0, 3.0]])
>>> symmetric_part(matrix).tolist()
[[1.0, 3.0], [3.0, 3.0]]
>>> largest_and_asymmetry(matrix)
(4.0, 2.0)
"""

import torch
from torch import Tensor

from gpytorch_gaps.linalg.masked_grid import blocks

_BLOCK_ROWS = 512  # rows and columns: 2 MiB of float64


def symmetric_part(matrix: Tensor) -> Tensor:
    """``(A + A') / 2`` as a new matrix. shape: (m, m)"""
    result = torch.empty_like(matrix)
    parts = list(blocks(matrix.size(-1), _BLOCK_ROWS))
    for number, rows in enumerate(parts):
        for columns in parts[number:]:
            block = 0.5 * (matrix[rows, columns] + matrix[columns, rows].mT)
            result[rows, columns] = block
            result[columns, rows] = block.mT
    return result


def largest_and_asymmetry(matrix: Tensor) -> tuple[float, float]:
    """``max |A|`` and ``max |A - A'|``; NaN or infinite if an entry is. shape: (m, m)"""
    found, parts = [], list(blocks(matrix.size(-1), _BLOCK_ROWS))
    for number, rows in enumerate(parts):
        for columns in parts[number:]:
            upper, lower = matrix[rows, columns], matrix[columns, rows].mT
            found.append(torch.stack([upper.abs().amax(), lower.abs().amax(), (upper - lower).abs().amax()]))
    upper, lower, apart = torch.stack(found).amax(0).tolist()
    return max(upper, lower), apart
