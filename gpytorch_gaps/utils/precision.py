"""Full float32 precision in products, for any setting of torch.

``torch.set_float32_matmul_precision("high")`` makes CUDA multiply in TF32, with 10 bits of mantissa instead of 23, and
some CPUs in bfloat16, with 7. For a kernel matrix, an error of 1e-3 of its largest entry is far above the noise, and
conjugate gradients do not converge on products with varying errors.

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

# The setting belongs to the process: the first block to start saves the user's value, the last to end restores it.
_lock = threading.Lock()
_inside = 0
_put_back: Callable[[], None] | None = None


class full_float32(ContextDecorator):
    """Context and decorator: float32 products have full precision inside. It may be nested and used in threads.

    A backward pass runs later, outside of the block. Autograd Functions must enter it in `backward` too.
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
    """Whether float32 products currently have full precision."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # set through the torch 2.9 API; the older getter then raises
        return all(backend.fp32_precision in ("ieee", "none") for backend in _backends())


_float64_entries: ContextVar[bool] = ContextVar("float64_entries", default=False)


@contextmanager
def float64_entries() -> Iterator[None]:
    """Inside, kernel entries that were computed in float64 are not rounded to the precision of the model."""
    token = _float64_entries.set(True)
    try:
        yield
    finally:
        _float64_entries.reset(token)


def cast_entries(entries: Tensor, dtype: torch.dtype) -> Tensor:
    """Kernel entries in the precision of the model, or unchanged inside :func:`float64_entries`."""
    return entries if _float64_entries.get() else entries.to(dtype)


def _set_full() -> Callable[[], None] | None:
    """Sets full precision. Returns a function that restores the user's setting, or None if nothing was changed."""
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
        put_backends_back()  # the name sets all backends; the user may have set one

    torch.set_float32_matmul_precision("highest")
    return put_name_back


def _backends() -> list[Any]:
    """Backends with a separate precision setting (torch 2.9)."""
    found = [getattr(getattr(torch.backends, name, None), "matmul", None) for name in ("cuda", "mkldnn")]
    return [backend for backend in found if _has_precision(backend)]


def _has_precision(backend: Any) -> bool:
    try:
        return hasattr(backend, "fp32_precision")
    except (AssertionError, RuntimeError):  # older torch raises for an unknown attribute
        return False
