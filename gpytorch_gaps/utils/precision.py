"""float32 products in full, whatever torch has been told to make of them.

``torch.set_float32_matmul_precision("high")`` has CUDA multiply in TF32, with 10 bits in place of 23, and some CPUs in
bfloat16 with 7. Networks do not mind. A kernel matrix does: an error of 1e-3 of its largest entry is far above the
noise, and conjugate gradients do not converge on a matrix that is another one at every product.

>>> torch.set_float32_matmul_precision("high")
>>> with full_float32():
...     torch.get_float32_matmul_precision()
'highest'
>>> torch.get_float32_matmul_precision()
'high'
>>> torch.set_float32_matmul_precision("highest")
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

# The setting belongs to the process: whoever comes first keeps what the user had, whoever leaves last puts it back.
_lock = threading.Lock()
_inside = 0
_put_back: Callable[[], None] | None = None


class full_float32(ContextDecorator):
    """Inside, or in the function it decorates, float32 products are full float32. May be nested, and in threads.

    A backward pass runs later, outside of the block: functions that have one of their own enter it there too.
    """

    def __enter__(self) -> None:
        global _inside, _put_back
        with _lock:
            if not _inside:
                _put_back = _set_full()
            _inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _inside, _put_back
        with _lock:
            _inside -= 1
            if not _inside and _put_back is not None:
                _put_back()
                _put_back = None


def is_full() -> bool:
    """Whether float32 products are full float32 here and now."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # set by the names that torch 2.9 brought, of which the older function refuses to speak
        return all(backend.fp32_precision in ("ieee", "none") for backend in _backends())


_float64_entries: ContextVar[bool] = ContextVar("float64_entries", default=False)


@contextmanager
def float64_entries() -> Iterator[None]:
    """Inside, entries of kernels that are known in float64 are given in float64, whatever the model's precision."""
    token = _float64_entries.set(True)
    try:
        yield
    finally:
        _float64_entries.reset(token)


def cast_entries(entries: Tensor, dtype: torch.dtype) -> Tensor:
    """Entries of a kernel in the precision of its model, unless they are wanted as they are."""
    return entries if _float64_entries.get() else entries.to(dtype)


def _set_full() -> Callable[[], None] | None:
    """What puts the user's setting back; None where there is nothing to change."""
    if is_full():
        return None
    backends = _backends()
    before = [backend.fp32_precision for backend in backends]

    def put_backends_back() -> None:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision

    try:
        name = torch.get_float32_matmul_precision()
    except RuntimeError:
        for backend in backends:
            backend.fp32_precision = "ieee"
        return put_backends_back

    def put_name_back() -> None:
        torch.set_float32_matmul_precision(name)
        put_backends_back()  # the name stands for all of them, the user may have meant one

    torch.set_float32_matmul_precision("highest")
    return put_name_back


def _backends() -> list[Any]:
    """Those that have a setting of their own, as of torch 2.9."""
    found = [getattr(getattr(torch.backends, name, None), "matmul", None) for name in ("cuda", "mkldnn")]
    return [backend for backend in found if _has_precision(backend)]


def _has_precision(backend: Any) -> bool:
    try:
        return hasattr(backend, "fp32_precision")
    except (AssertionError, RuntimeError):  # older torch names what it does not know
        return False
