"""Kernels of float32 models, evaluated in float64: their axes are short, and their rounding is amplified by k / s2.

A float32 kernel rounds more than its result: distances of coordinates near 2,000, or the argument of a periodic
kernel's exponential, lose further digits on the way. Here parameters, buffers and coordinates are cast, not the model;
gradients flow back into the float32 parameters.

>>> from gpytorch.kernels import RBFKernel
>>> wide_covariance(RBFKernel(), torch.zeros(2, 1), torch.ones(2, 1)).dtype
torch.float64
"""

import threading
from typing import Any

import torch
from gpytorch import Module
from gpytorch.kernels import Kernel
from linear_operator import to_dense
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

_lock = threading.RLock()  # a module's own parameters are replaced while it is evaluated


def wide_covariance(
    kernel: Kernel, x1: Tensor, x2: Tensor, *, diag: bool = False, taken: bool = False, **params: Any
) -> Tensor:
    """``k(x1, x2)``, dense: in float64 for float32 inputs, else in their own precision.

    A kernel that cannot be evaluated in float64, since it makes float32 tensors of its own, is evaluated as it is.

    :param taken: whether the kernel's `active_dims` have been taken already.
    """
    module = _Evaluation(kernel, taken)
    if x1.dtype != torch.float32:
        return module(x1, x2, diag=diag, **params)
    with _lock:
        named = [*module.named_parameters(), *module.named_buffers()]
        wide = {name: tensor.double() for name, tensor in named if tensor.dtype == torch.float32}
        try:
            value = torch.func.functional_call(module, wide, (x1.double(), x2.double()), {"diag": diag, **params})
        except RuntimeError:  # of mixed precisions; anything else is raised again
            return module(x1, x2, diag=diag, **params)
    for prefix, part in module.named_modules():  # running averages, of a network inside
        if isinstance(part, _NormBase) and part.training:
            for name, buffer in part.named_buffers(prefix, recurse=False):
                buffer.copy_(wide.get(name, buffer))
    return value


class _Evaluation(torch.nn.Module):
    """Evaluates while parameters are replaced: GPyTorch's own call is lazy."""

    def __init__(self, kernel: Kernel, taken: bool) -> None:
        super().__init__()
        self.kernel, self._taken = kernel, taken

    def forward(self, x1: Tensor, x2: Tensor, **params: Any) -> Tensor:
        call = Module.__call__ if self._taken else type(self.kernel).__call__
        return to_dense(call(self.kernel, x1, x2, **params))
