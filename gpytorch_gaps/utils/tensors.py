"""Equality of tensors, and look-ups in tables: of entries, and of equal rows."""

import torch
from torch import Tensor


def same_values(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors agree in shape, dtype, device and content.

    Two views of the same memory are equal without a comparison, which would make the host wait for a device.

    >>> x = torch.tensor([1.0, 2.0])
    >>> same_values(x, x.clone()), same_values(x, x.double())
    (True, False)
    """
    if first is second:
        return True
    if (first.shape, first.dtype, first.device) != (second.shape, second.dtype, second.device):
        return False
    return (first.data_ptr() == second.data_ptr() and first.stride() == second.stride()) or torch.equal(first, second)


def first_equal_row(table: Tensor, rows: Tensor) -> Tensor:
    """Position in `table` `(m, d)` of the first row equal to each of `rows` `(*, d)`, -1 where there is none.

    The columns are folded into one key. Each pair (key so far, next column) is coded by the first equal entries in the
    table, which gives an integer below (m+1)². Coding again at every column keeps the key small for any number of
    columns.

    >>> table = torch.tensor([[0.0, 1.0], [0.0, 2.0], [5.0, 1.0]])
    >>> first_equal_row(table, torch.tensor([[5.0, 1.0], [5.0, 2.0]])).tolist()
    [2, -1]
    """
    base = len(table) + 1
    table_key, key = table[:, 0], rows[..., 0]
    for table_column, column in zip(table[:, 1:].unbind(-1), rows[..., 1:].unbind(-1), strict=True):
        # A code of -1 gives a negative key, or else a multiple of the base: no row of the table has either.
        key = first_equal(table_key, key) * base + first_equal(table_column, column) + 1
        table_key = first_equal(table_key, table_key) * base + first_equal(table_column, table_column) + 1
    return first_equal(table_key, key)


def first_equal(table: Tensor, queries: Tensor) -> Tensor:
    """Position in `table` `(m,)` of the first entry equal to each query, -1 where there is none."""
    ordered, order = table.sort(stable=True)
    rank = torch.searchsorted(ordered, queries.contiguous()).clamp(max=len(table) - 1)
    return torch.where(ordered[rank] == queries, order[rank], -1)


def look_up(table: Tensor, places: Tensor) -> Tensor:
    """Entries of the last dimension at places of any shape, by ``index_select``: three times as fast as indexing.

    shape: (*batch, n) and (*positions) -> (*batch, *positions)

    >>> look_up(torch.tensor([5.0, 6.0, 7.0]), torch.tensor([[0], [2]])).tolist()
    [[5.0], [7.0]]
    """
    return table.index_select(-1, places.flatten()).reshape(*table.shape[:-1], *places.shape)
