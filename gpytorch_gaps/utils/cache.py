"""Remembers what was worked out from tensors, for as long as these tensors hold the same data.

GPyTorch rebuilds an operator from its tensors in every autograd Function, so an operator's caches must ride along as an
argument. An entry is found by the memory, layout and version of its tensors, and keeps them alive, so that memory
cannot be reused for other data, nor changed in place, without the entry missing. (Writes behind autograd's back,
through ``t.data`` or ``t.numpy()``, leave no version: they go unnoticed, here as in autograd.)
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor


class TensorCache:
    """A few most recently used entries. Copies and pickles of it start empty."""

    def __init__(self, size: int = 6) -> None:
        self._size = size
        self._entries: OrderedDict[Hashable, tuple[Any, tuple[Tensor, ...]]] = OrderedDict()

    def cached(self, name: Hashable, tensors: Sequence[Tensor], compute: Callable[[], Any]) -> Any:
        """``compute()``, or what it gave the last time for the same name and tensors."""
        if any(tensor.is_inference() for tensor in tensors):
            return compute()  # inference tensors have no version: a change in place would go unnoticed
        key = (name, tuple(_identity(tensor) for tensor in tensors))
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key][0]
        value = compute()
        self._entries[key] = (value, tuple(tensor.detach() for tensor in tensors))
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)
        return value

    def __reduce__(self) -> tuple[type["TensorCache"], tuple[int]]:
        return TensorCache, (self._size,)


def _identity(tensor: Tensor) -> Hashable:
    return tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), tensor.dtype, tensor.device
