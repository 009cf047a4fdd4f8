"""Checks of the arguments of operators."""

import math
from collections.abc import Sequence

import torch
from linear_operator.operators import ConstantDiagLinearOperator, DiagLinearOperator, LinearOperator
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gpytorch_gaps.linalg.circulant import CirculantOperator
from gpytorch_gaps.linalg.factors import Factor


def check_factors(name: str, factors: Sequence[Factor], square: bool) -> None:
    """Checks the factors of operator `name`: of matching shape, dtype, device and batch."""
    if not factors:
        raise ValueError(f"{name}: factors: got none, expected one matrix per axis")
    for axis, factor in enumerate(factors):
        if not torch.is_tensor(factor) and not (isinstance(factor, CirculantOperator) and not square):
            hint = "call .to_dense() on it" if isinstance(factor, LinearOperator) else "pass *factors, one per axis"
            raise ValueError(f"{name}: factors: axis {axis}: got {type(factor).__name__}, expected a tensor; {hint}")
        if factor.dim() < 2 or (square and factor.size(-1) != factor.size(-2)):
            wanted = "(*batch, m, m)" if square else "(*batch, q, m)"
            raise ValueError(f"{name}: factors: axis {axis}: got shape {tuple(factor.shape)}, expected {wanted}")
        if factor.dtype != factors[0].dtype:
            raise ValueError(f"{name}: factors: axis {axis} is {factor.dtype}, axis 0 is {factors[0].dtype}")
        if factor.device != factors[0].device:
            raise ValueError(f"{name}: factors: axis {axis} is on {factor.device}, axis 0 on {factors[0].device}")
    check_batches(f"{name}: factors", *(factor.shape[:-2] for factor in factors))


def check_batches(name: str, *shapes: torch.Size) -> None:
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError as error:
        came = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"{name}: got batch shapes {came}, expected ones that broadcast") from error


_checked = WeakTensorKeyDictionary()  # index -> (number of cells, version) for which it was found valid


def check_index(name: str, argument: str, index: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Checks that an index is 1-D, int64, on the device, and holds cells of a grid of this shape.

    A negative cell would silently count from the end. The range is checked once for each index tensor, not whenever
    an operator is rebuilt, and again after a change in place.
    """
    if not torch.is_tensor(index) or index.dtype != torch.long or index.dim() != 1:
        came = f"{index.dtype} of shape {tuple(index.shape)}" if torch.is_tensor(index) else type(index).__name__
        hint = "; a mask becomes one by .flatten().nonzero().squeeze(-1)" if came.startswith("torch.bool") else ""
        raise ValueError(f"{name}: {argument}: got {came}, expected a 1-D int64 tensor of flat cells{hint}")
    if index.device != device:
        raise ValueError(f"{name}: {argument}: is on {index.device}, the factors on {device}")
    cells = math.prod(shape)
    state = None if index.is_inference() else (cells, index._version)
    if state is not None and _checked.get(index) == state:
        return
    outside = ((index < 0) | (index >= cells)).nonzero()
    if len(outside):
        entry = int(outside[0])
        raise ValueError(
            f"{name}: {argument}: entry {entry} is {int(index[entry])}, expected cells 0 to {cells - 1}; "
            "CartesianGrid.index_of gives -1 for points off the grid"
        )
    _checked[index] = state


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
