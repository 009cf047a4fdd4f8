"""Entries of operators, and the gradient of ``tr(P^-1 A)`` for the neighbours preconditioner, from a few entries."""

from collections.abc import Sequence
from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpytorch_gaps.preconditioners.neighbours import NeighbourPreconditioner
from gpytorch_gaps.utils.precision import float64_entries


def trace_gradient(
    representation_tree: Any, tensors: Sequence[Tensor], preconditioner: NeighbourPreconditioner, weight: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradient of ``weight tr(P^-1 A)`` for the tensors that A is made of, P held fixed.

    :param representation_tree: builds A from its tensors.
    :param weight: shape batch.
    """
    leaves = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors]
    learned = [leaf for leaf in leaves if leaf.requires_grad]
    totals: list[Tensor | None] = [None] * len(learned)
    for rows, columns, weights in preconditioner.inverse_entries():
        with torch.enable_grad(), float64_entries():
            entries = entries_of(representation_tree(*leaves), rows, columns)
            value = (entries.double() * weights * weight.double().unsqueeze(-1)).sum()
            parts = torch.autograd.grad(value, learned, allow_unused=True)
        totals = [
            old if new is None else new if old is None else old + new for old, new in zip(totals, parts, strict=True)
        ]
    found = iter(totals)
    return tuple(next(found) if leaf.requires_grad else None for leaf in leaves)


def entries_of(operator: LinearOperator, rows: Tensor, columns: Tensor) -> Tensor:
    """Some entries of an operator, for positions that broadcast. Differentiable. shape: (*batch, *positions)"""
    rows, columns = torch.broadcast_tensors(rows, columns)
    dims = len(operator.batch_shape) + rows.dim()
    batch = [
        torch.arange(size, device=rows.device).view(-1, *[1] * (dims - 1 - dim))
        for dim, size in enumerate(operator.batch_shape)
    ]
    return operator._get_indices(rows, columns, *batch)
