"""Evaluates the kernels of float32 models in float64.

Solves amplify the rounding of a kernel by k / s2. In float32, not only the result is rounded: distances of coordinates
near 2,000, or the argument of a periodic kernel's exponential, lose further digits. Axes are short, so float64 is cheap
here. Parameters, buffers and coordinates are cast for the evaluation only; gradients flow to the float32 parameters.

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

_lock = threading.RLock()  # parameters are replaced while a module is evaluated


def covariance_in_float64(
    kernel: Kernel, x1: Tensor, x2: Tensor, *, diag: bool = False, columns_selected: bool = False, **params: Any
) -> Tensor:
    """``k(x1, x2)``, dense: in float64 for float32 inputs, else in their own precision.

    A kernel that cannot be evaluated in float64, because it creates float32 tensors itself, is evaluated in float32.

    :param columns_selected: whether the kernel's `active_dims` have already been applied to x1 and x2.
    """
    module = _Evaluation(kernel, columns_selected)
    if x1.dtype != torch.float32:
        return module(x1, x2, diag=diag, **params)
    try:
        with _lock, _in_float64(module):
            return module(x1.double(), x2.double(), diag=diag, **params)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # mixed precisions; any other error is raised again below
        return module(x1, x2, diag=diag, **params)


@contextmanager
def _in_float64(module: torch.nn.Module) -> Iterator[None]:
    """Replaces float32 parameters and buffers by their float64 casts inside the block.

    Every module is visited once, even if it is used several times: ``torch.func.functional_call`` would replace and
    restore the parameters of a shared module twice.
    """
    casts: dict[int, Tensor] = {}  # one cast for a tensor that several modules share
    stores: list[dict[str, Any]] = [own for part in module.modules() for own in (part._parameters, part._buffers)]
    replaced = [(own, name, tensor) for own in stores for name, tensor in own.items() if _is_float32(tensor)]
    averages = [part._buffers for part in module.modules() if isinstance(part, _NormBase) and part.training]
    for own, name, tensor in replaced:
        own[name] = casts.setdefault(id(tensor), tensor.double())
    try:
        yield
    finally:
        for own, name, tensor in replaced:
            if any(own is running for running in averages):  # a batch norm in training mode updates these
                tensor.copy_(own[name])
            own[name] = tensor


def _is_float32(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype == torch.float32


class _Evaluation(torch.nn.Module):
    """Evaluates a kernel at once, while its parameters are replaced; GPyTorch's own call is lazy."""

    def __init__(self, kernel: Kernel, columns_selected: bool) -> None:
        super().__init__()
        self.kernel, self._columns_selected = kernel, columns_selected

    def forward(self, x1: Tensor, x2: Tensor, **params: Any) -> Tensor:
        call = Module.__call__ if self._columns_selected else type(self.kernel).__call__
        return to_dense(call(self.kernel, x1, x2, **params))
