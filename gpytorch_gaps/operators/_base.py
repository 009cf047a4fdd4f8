"""What our operators share: Kronecker factors as positional arguments, and flat cell indices that are never batched."""

from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor


class KroneckerFactorsOperator(LinearOperator):
    """An operator built from batched factors (positional) and keyword tensors without batch, or with their own rule.

    Subclasses list the keyword tensors that carry the factors' batch dimensions in `_batched_kwargs`.
    """

    _batched_kwargs: tuple[str, ...] = ()

    @property
    def factors(self) -> tuple[Tensor, ...]:
        return self._args

    @property
    def dtype(self) -> torch.dtype:
        return self._args[0].dtype

    @property
    def device(self) -> torch.device:
        return self._args[0].device

    def _factor_batch_shape(self) -> torch.Size:
        batched = [self._kwargs[name].shape[:-1] for name in self._batched_kwargs]
        return torch.broadcast_shapes(*(factor.shape[:-2] for factor in self.factors), *batched)

    def _rebuild(self, factor_map: Any, kwarg_map: Any = None) -> Any:
        """The same operator with every factor, and every batched keyword, mapped."""
        kwargs = dict(self._kwargs)
        for name in self._batched_kwargs:
            kwargs[name] = (kwarg_map or factor_map)(kwargs[name])
        return type(self)(*(factor_map(factor) for factor in self.factors), **kwargs)

    def _wide(self) -> Any:
        """In float64 and detached, for solves."""
        return self._rebuild(lambda t: t.detach().double())

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> Any:
        return self._rebuild(
            lambda t: t.expand(*batch_shape, *t.shape[-2:]), lambda t: t.expand(*batch_shape, t.size(-1))
        )

    def _expanded(self) -> Any:
        """With the whole batch shape on every factor, so that batch indices mean the same on each."""
        return self._expand_batch(self.batch_shape)

    def _permute_batch(self, *dims: int) -> Any:
        lead = len(dims)
        return self._expanded()._rebuild(lambda t: t.permute(*dims, *range(lead, t.dim())))

    def _unsqueeze_batch(self, dim: int) -> Any:
        return self._expanded()._rebuild(lambda t: t.unsqueeze(dim))

    def _index_batch(self, batch_indices: tuple[Any, ...]) -> Any:
        return self._expanded()._rebuild(lambda t: t[batch_indices]) if batch_indices else self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Moves and casts like :meth:`torch.Tensor.to`: device strings are understood, indices stay integers."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)

        def move(value: Any) -> Any:
            if not torch.is_tensor(value):
                return value
            return value.to(device, dtype if value.is_floating_point() else None, non_blocking)

        moved = {name: move(value) for name, value in self._kwargs.items()}
        return type(self)(*(move(factor) for factor in self.factors), **moved)


def check_factors(name: str, factors: tuple[Tensor, ...], square: bool) -> None:
    """Raises a ValueError that names what is wrong with the factors of operator `name`."""
    if not factors:
        raise ValueError(f"{name}: factors: got none, expected one matrix an axis")
    for axis, factor in enumerate(factors):
        if not torch.is_tensor(factor):
            raise ValueError(f"{name}: factors: axis {axis}: got {type(factor).__name__}, expected a tensor")
        if factor.dim() < 2 or (square and factor.size(-1) != factor.size(-2)):
            wanted = "(*batch, m, m)" if square else "(*batch, q, m)"
            raise ValueError(f"{name}: factors: axis {axis}: got shape {tuple(factor.shape)}, expected {wanted}")
        if factor.dtype != factors[0].dtype:
            raise ValueError(f"{name}: factors: axis {axis} is {factor.dtype}, axis 0 is {factors[0].dtype}")
        if factor.device != factors[0].device:
            raise ValueError(f"{name}: factors: axis {axis} is on {factor.device}, axis 0 on {factors[0].device}")


def same_cells(first: Tensor, second: Tensor) -> bool:
    """Whether two indices name the same cells in the same order; by identity first, which costs no host copy."""
    return (
        first is second
        or (first.data_ptr() == second.data_ptr() and first.shape == second.shape)
        or torch.equal(first, second)
    )


def check_index(name: str, argument: str, index: Tensor, factors: tuple[Tensor, ...]) -> None:
    """The type and place of an index; its range is checked by indexing itself, without a host copy."""
    if not torch.is_tensor(index) or index.dtype != torch.long or index.dim() != 1:
        came = f"{index.dtype} of shape {tuple(index.shape)}" if torch.is_tensor(index) else type(index).__name__
        raise ValueError(f"{name}: {argument}: got {came}, expected a 1-D int64 tensor of flat cells")
    if index.device != factors[0].device:
        raise ValueError(f"{name}: {argument}: is on {index.device}, the factors on {factors[0].device}")
