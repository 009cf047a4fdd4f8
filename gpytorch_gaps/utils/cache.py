"""A cache of results that were computed from tensors, valid while these tensors hold the same data.

GPyTorch rebuilds an operator from its tensors in every autograd Function, so an operator passes its cache on as an
argument. An entry is found by the memory address, layout and version of its tensors. It keeps them alive, so their
memory cannot be reused for other data, and a change in place gives them another version. (Writes through ``t.data`` or
``t.numpy()`` do not change the version and go unnoticed, as in autograd.)

>>> import torch
>>> cache, x = TensorCache(), torch.ones(3)
>>> cache.cached("sum", [x], lambda: float(x.sum()))
3.0
>>> cache.cached("sum", [x], lambda: 0.0)  # not computed again
3.0
>>> _ = x.add_(1.0)
>>> cache.cached("sum", [x], lambda: float(x.sum()))
6.0
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor


class TensorCache:
    """The most recently used results. Copies and pickles start empty.

    :param size: largest number of entries.
    """

    def __init__(self, size: int = 6) -> None:
        self._size = size
        self._entries: OrderedDict[Hashable, tuple[Any, tuple[Tensor, ...]]] = OrderedDict()

    def cached(self, name: Hashable, tensors: Sequence[Tensor], compute: Callable[[], Any]) -> Any:
        """``compute()``, or its earlier result for the same name and tensors."""
        if any(tensor.is_inference() for tensor in tensors):
            return compute()  # without a version, a change in place would go unnoticed
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
