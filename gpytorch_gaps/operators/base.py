"""The base class of operators with Kronecker factors, and checks of their arguments."""

import math
from typing import Any

import torch
from linear_operator.operators import ConstantDiagLinearOperator, DiagLinearOperator, LinearOperator
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gpytorch_gaps.utils.precision import full_float32


class KroneckerFactorsOperator(LinearOperator):
    """An operator with Kronecker factors as positional arguments, and indices and options as keywords.

    Factors may be batched. Keyword tensors, such as flat cell indices, are not, except for those that subclasses list
    in `_batched_kwargs`, which have the batch dimensions of the factors. With `out_dtype`, factors have a higher
    precision than results: the kernel of a float32 model is evaluated in float64. Products are in the precision of the
    right-hand side.
    """

    _batched_kwargs: tuple[str, ...] = ()

    @property
    def factors(self) -> tuple[Tensor, ...]:
        return self._args

    @property
    def dtype(self) -> torch.dtype:
        return self._kwargs.get("out_dtype") or self._args[0].dtype

    def _factors_for(self, x: Tensor) -> tuple[Tensor, ...]:
        """The factors in the precision of x."""
        return tuple(factor.to(x.dtype) for factor in self.factors)

    @property
    def device(self) -> torch.device:
        return self._args[0].device

    def _factor_batch_shape(self) -> torch.Size:
        batched = [self._kwargs[name].shape[:-1] for name in self._batched_kwargs]
        return torch.broadcast_shapes(*(factor.shape[:-2] for factor in self.factors), *batched)

    def _rebuild(self, factor_map: Any, kwarg_map: Any = None) -> Any:
        """The same operator with a function applied to every factor and every batched keyword."""
        kwargs = dict(self._kwargs)
        for name in self._batched_kwargs:
            kwargs[name] = (kwarg_map or factor_map)(kwargs[name])
        return type(self)(*(factor_map(factor) for factor in self.factors), **kwargs)

    def _as_float64(self) -> Any:
        """The operator in float64 and detached, for solves."""
        return self.to(torch.float64)._rebuild(lambda t: t.detach())

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> Any:
        return self._rebuild(
            lambda t: t.expand(*batch_shape, *t.shape[-2:]), lambda t: t.expand(*batch_shape, t.size(-1))
        )

    def _expanded(self) -> Any:
        """The operator with the full batch shape on every factor, so that batch indices apply to each."""
        return self._expand_batch(self.batch_shape)

    def _permute_batch(self, *dims: int) -> Any:
        lead = len(dims)
        return self._expanded()._rebuild(lambda t: t.permute(*dims, *range(lead, t.dim())))

    def _unsqueeze_batch(self, dim: int) -> Any:
        return self._expanded()._rebuild(lambda t: t.unsqueeze(dim))

    def _index_batch(self, batch_indices: tuple[Any, ...]) -> Any:
        return self._expanded()._rebuild(lambda t: t[batch_indices]) if batch_indices else self

    @full_float32()  # called in a backward pass, outside of other such blocks
    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        return super()._bilinear_derivative(left_vecs, right_vecs)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Moves and casts like :meth:`torch.Tensor.to`. Accepts device strings; indices stay integers."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)

        def move(value: Any) -> Any:
            if not torch.is_tensor(value):
                return value
            return value.to(device, dtype if value.is_floating_point() else None, non_blocking)

        moved = {name: move(value) for name, value in self._kwargs.items()}
        if dtype is not None and moved.get("out_dtype") is not None:
            moved["out_dtype"] = None  # that of the factors
        return type(self)(*(move(factor) for factor in self.factors), **moved)


def check_factors(name: str, factors: tuple[Tensor, ...], square: bool) -> None:
    """Checks the factors of operator `name`: tensors of matching shape, dtype, device and batch."""
    if not factors:
        raise ValueError(f"{name}: factors: got none, expected one matrix per axis")
    for axis, factor in enumerate(factors):
        if not torch.is_tensor(factor):
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


def as_noise(name: str, noise: float | Tensor, factors: tuple[Tensor, ...]) -> Tensor:
    """The noise as a tensor of shape (*batch, 1) in the precision of the factors, checked."""
    dtype, device = factors[0].dtype, factors[0].device
    value = noise if torch.is_tensor(noise) else torch.tensor(float(noise), dtype=dtype, device=device)
    value = value.unsqueeze(-1) if value.dim() == 0 else value
    if value.size(-1) != 1:
        raise ValueError(f"{name}: noise: got shape {tuple(value.shape)}, expected one value (or (*batch, 1))")
    if value.dtype != dtype or value.device != device:
        raise ValueError(f"{name}: noise: is {value.dtype} on {value.device}, the factors {dtype} on {device}")
    return value


def entries_of(operator: LinearOperator, rows: Tensor, columns: Tensor) -> Tensor:
    """Some entries of an operator, for positions that broadcast. Differentiable. shape: (*batch, *positions)"""
    rows, columns = torch.broadcast_tensors(rows, columns)
    dims = len(operator.batch_shape) + rows.dim()
    batch = [
        torch.arange(size, device=rows.device).view(-1, *[1] * (dims - 1 - dim))
        for dim, size in enumerate(operator.batch_shape)
    ]
    return operator._get_indices(rows, columns, *batch)
