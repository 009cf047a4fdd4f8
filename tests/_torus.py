"""Circulant operators of known kernels, and what they are written out: the lag of every pair of places, one by one."""

import itertools

import torch

from gpytorch_gaps.linalg.circulant import CirculantOperator


def lag_table(torus, dense=0, batch=(), seed=0, dtype=torch.float64):
    """Covariances by lag, decreasing: positive definite matrices. shape: (*batch, a, a, n_1 // 2 + 1, ...)"""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.rand(max(1, dense), generator=generator, dtype=torch.float64)
    squared = (3.0 * (levels.unsqueeze(-1) - levels)).square().reshape(len(levels), len(levels), *[1] * len(torus))
    for axis, places in enumerate(torus):
        lags = torch.arange(places // 2 + 1, dtype=torch.float64).square() / (2.0 + axis) ** 2
        squared = squared + lags.reshape([-1 if axis == other else 1 for other in range(len(torus))])
    lengths = 0.7 + torch.rand(torch.Size(batch), generator=generator, dtype=torch.float64)
    return torch.exp(-squared.sqrt() / lengths.reshape(*batch, *[1] * squared.dim())).to(dtype)


def written_out(op):
    """Entry by entry, from the definition: the table at the shorter way round every circle."""
    sides = []
    for num_dense, positions in zip(op.num_dense, (op.row_positions, op.col_positions), strict=True):
        own = [range(p) if isinstance(p, int) else p.tolist() for p in positions]
        sides.append(list(itertools.product(range(num_dense), *own)))
    rows = []
    for first in sides[0]:
        row = []
        for second in sides[1]:
            pairs = zip(first[1:], second[1:], op.torus, strict=True)
            lags = [min((i - j) % places, (j - i) % places) for i, j, places in pairs]
            row.append(op.table[(..., first[0], second[0], *lags)])
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, -2)


def circulant(torus, rows, columns=None, dense=0, **kind):
    return CirculantOperator(lag_table(torus, dense, **kind), torus=torus, row_positions=rows, col_positions=columns)
