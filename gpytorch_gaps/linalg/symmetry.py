"""How symmetric a large matrix is, and its symmetric part: in blocks of rows and columns that fit in cache.

A transpose that is read as a whole is read from memory, number by number; so are the copies that would be made of it.

>>> matrix = torch.tensor([[1.0, 2.0], [4.0, 3.0]])
>>> symmetric_part(matrix).tolist()
[[1.0, 3.0], [3.0, 3.0]]
>>> largest_and_asymmetry(matrix)
(4.0, 2.0)
"""

import torch
from torch import Tensor

from gpytorch_gaps.linalg.masked_grid import blocks

_BLOCK = 512  # rows and columns: 2 MiB of float64


def symmetric_part(matrix: Tensor) -> Tensor:
    """``(A + A') / 2``, a new matrix. shape: (m, m)"""
    result = torch.empty_like(matrix)
    parts = list(blocks(matrix.size(-1), _BLOCK))
    for number, rows in enumerate(parts):
        for columns in parts[number:]:
            block = 0.5 * (matrix[rows, columns] + matrix[columns, rows].mT)
            result[rows, columns] = block
            result[columns, rows] = block.mT
    return result


def largest_and_asymmetry(matrix: Tensor) -> tuple[float, float]:
    """``max |A|`` and ``max |A - A'|``, NaN or infinite if an entry is. shape: (m, m)"""
    found, parts = [], list(blocks(matrix.size(-1), _BLOCK))
    for number, rows in enumerate(parts):
        for columns in parts[number:]:
            upper, lower = matrix[rows, columns], matrix[columns, rows].mT
            found.append(torch.stack([upper.abs().amax(), lower.abs().amax(), (upper - lower).abs().amax()]))
    upper, lower, apart = torch.stack(found).amax(0).tolist()
    return max(upper, lower), apart
