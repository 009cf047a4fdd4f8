"""Short descriptions of kernels and arrays, by which processes check that they were given the same arguments."""

import hashlib
import math
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel
from torch import Tensor
from torch.nn import Module

from gpytorch_gaps.linalg.masked_grid import blocks
from gpytorch_gaps.utils.files import digest

_HASH_NUMBERS = 2**22  # numbers that are hashed at a time


def describe_kernel(kernel: Kernel | Tensor) -> str:
    """The classes of a kernel and a hash of its hyperparameters, or a hash of its matrix.

    >>> from gpytorch.kernels import RBFKernel
    >>> describe_kernel(RBFKernel()) == describe_kernel(RBFKernel())
    True
    """
    if isinstance(kernel, Tensor):
        return f"a matrix #{digest(kernel)}"
    names = [describe_module(module) for module in kernel.modules() if isinstance(module, Kernel)]
    state = [value for value in kernel.state_dict().values() if torch.is_tensor(value)]
    return f"{' of '.join(names)} #{digest(*state)}"


def describe_module(module: Module) -> str:
    """The class, and its constructor's plain arguments, which are not in the state: the nu of a Matern kernel."""
    own = {
        name: value
        for name, value in sorted(vars(module).items())
        if isinstance(value, int | float | str) and not name.startswith("_") and name != "training"
    }
    return f"{type(module).__name__}({', '.join(f'{name}={value}' for name, value in own.items())})"


def describe_values(values: Any) -> str:
    """A hash of an array in memory; empty for other sources, of which every process reads only its part."""
    if isinstance(values, np.memmap) or not isinstance(values, np.ndarray | Tensor):
        return ""
    if isinstance(values, np.ndarray) and values.dtype.kind not in "fiub":
        return ""
    found = hashlib.blake2b(digest_size=6)
    for rows in blocks(len(values), _HASH_NUMBERS // max(1, math.prod(values.shape[1:]))):
        part = values[rows]
        part = part.detach().cpu().numpy() if isinstance(part, Tensor) else part
        found.update(np.ascontiguousarray(np.ma.getdata(part)).view(np.uint8).data)
        if isinstance(part, np.ma.MaskedArray):
            found.update(np.ascontiguousarray(np.ma.getmaskarray(part)).data)
    return f"#{found.hexdigest()}"
