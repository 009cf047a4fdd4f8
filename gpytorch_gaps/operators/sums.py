"""A registry of the classes of sums ``a + b`` of our covariances.

A Kronecker product plus a diagonal is a covariance of noisy observations. The sum of two Kronecker products is a sum of
kernels. The modules of the sums import those of the terms, so that the terms cannot import the sums. Instead, the
classes of sums are registered here.
"""

from collections.abc import Callable

import torch
from linear_operator.operators import ConstantDiagLinearOperator, DiagLinearOperator, LinearOperator
from torch import Tensor

Rule = Callable[[LinearOperator, LinearOperator], LinearOperator]
_rules: dict[str, Rule] = {}


def register_sum(kind: str, rule: Rule) -> None:
    """Registers the class of sums of a Kronecker product with another operator.

    :param kind: "diagonal", "interpolated diagonal" or "kernel".
    """
    _rules[kind] = rule


def add(kind: str, kernel: LinearOperator, other: LinearOperator) -> LinearOperator:
    return _rules[kind](kernel, other)


def as_diagonal(operator: LinearOperator, diag: float | Tensor) -> DiagLinearOperator:
    """The diagonal that ``operator.add_diagonal(diag)`` adds: constant for a single value, else one entry per row."""
    if not operator.is_square:
        raise ValueError(f"add_diagonal: got an operator of shape {tuple(operator.shape)}, expected a square one")
    rows, batch = operator.size(-1), operator.batch_shape
    if not torch.is_tensor(diag):
        diag = torch.tensor(float(diag), dtype=operator.dtype, device=operator.device)
    check_batches("add_diagonal: diag", batch, diag.shape[:-1])
    if diag.dim() == 0 or diag.size(-1) == 1:
        return ConstantDiagLinearOperator(diag.expand(*batch, 1), diag_shape=rows)
    if diag.size(-1) != rows:
        raise ValueError(f"add_diagonal: diag: got shape {tuple(diag.shape)}, expected (), (1,) or ({rows},)")
    return DiagLinearOperator(diag.expand(*batch, rows))


def check_batches(name: str, *shapes: torch.Size) -> None:
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError as error:
        came = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"{name}: got batch shapes {came}, expected ones that broadcast") from error
