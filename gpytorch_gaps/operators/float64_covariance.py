"""Kernels of float32 models, evaluated in float64: their axes are short, and their rounding is amplified by k / s2.

A float32 kernel rounds more than its result: distances of coordinates near 2,000, or the argument of a periodic
kernel's exponential, lose further digits on the way. Here parameters, buffers and coordinates are cast, not the model;
gradients flow back into the float32 parameters.

>>> from gpytorch.kernels import RBFKernel
>>> covariance_in_float64(RBFKernel(), torch.zeros(2, 1), torch.ones(2, 1)).dtype
torch.float64
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gpytorch import Module
from gpytorch.kernels import Kernel
from linear_operator import to_dense
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

_lock = threading.RLock()  # a module's own parameters are replaced while it is evaluated


def covariance_in_float64(
    kernel: Kernel, x1: Tensor, x2: Tensor, *, diag: bool = False, taken: bool = False, **params: Any
) -> Tensor:
    """``k(x1, x2)``, dense: in float64 for float32 inputs, else in their own precision.

    A kernel that cannot be evaluated in float64, since it makes float32 tensors of its own, is evaluated as it is.

    :param taken: whether the kernel's `active_dims` have been taken already.
    """
    module = _Evaluation(kernel, taken)
    if x1.dtype != torch.float32:
        return module(x1, x2, diag=diag, **params)
    try:
        with _lock, _in_float64(module):
            return module(x1.double(), x2.double(), diag=diag, **params)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # of mixed precisions; anything else is raised again
        return module(x1, x2, diag=diag, **params)


@contextmanager
def _in_float64(module: torch.nn.Module) -> Iterator[None]:
    """Float32 parameters and buffers are their float64 casts inside.

    Every module is visited once, however often it is used: ``torch.func.functional_call`` would replace, and restore,
    those of a shared one twice.
    """
    casts: dict[int, Tensor] = {}  # of tensors that several modules share
    stores: list[dict[str, Any]] = [own for part in module.modules() for own in (part._parameters, part._buffers)]
    replaced = [(own, name, tensor) for own in stores for name, tensor in own.items() if _is_float32(tensor)]
    averages = [part._buffers for part in module.modules() if isinstance(part, _NormBase) and part.training]
    for own, name, tensor in replaced:
        own[name] = casts.setdefault(id(tensor), tensor.double())
    try:
        yield
    finally:
        for own, name, tensor in replaced:
            if any(own is running for running in averages):  # of a network inside
                tensor.copy_(own[name])
            own[name] = tensor


def _is_float32(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype == torch.float32


class _Evaluation(torch.nn.Module):
    """Evaluates while parameters are replaced: GPyTorch's own call is lazy."""

    def __init__(self, kernel: Kernel, taken: bool) -> None:
        super().__init__()
        self.kernel, self._taken = kernel, taken

    def forward(self, x1: Tensor, x2: Tensor, **params: Any) -> Tensor:
        call = Module.__call__ if self._taken else type(self.kernel).__call__
        return to_dense(call(self.kernel, x1, x2, **params))
