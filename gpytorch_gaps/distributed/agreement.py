"""What the ranks of a run were given must be the same: told apart before anything is worked on."""

import hashlib
import math
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel
from torch import Tensor
from torch.nn import Module

from gpytorch_gaps.utils.files import digest

_SOME = 2**22  # numbers that are looked at at a time


def describe_kernel(kernel: Kernel | Tensor) -> str:
    """Its classes and hyperparameters in a word, or its matrix."""
    if isinstance(kernel, Tensor):
        return f"a matrix #{digest(kernel)}"
    names = [describe_module(module) for module in kernel.modules() if isinstance(module, Kernel)]
    state = [value for value in kernel.state_dict().values() if torch.is_tensor(value)]
    return f"{' of '.join(names)} #{digest(*state)}"


def describe_module(module: Module) -> str:
    """Its class, and the numbers and words it was made with: a Matern kernel's nu is no parameter."""
    own = {
        name: value
        for name, value in sorted(vars(module).items())
        if isinstance(value, int | float | str) and not name.startswith("_") and name != "training"
    }
    return f"{type(module).__name__}({', '.join(f'{name}={value}' for name, value in own.items())})"


def describe_values(values: Any) -> str:
    """The content of an array in memory, in a word; nothing of one that is not, of which ranks read their part only."""
    if isinstance(values, np.memmap) or not isinstance(values, np.ndarray | Tensor):
        return ""
    if isinstance(values, np.ndarray) and values.dtype.kind not in "fiub":
        return ""
    found = hashlib.blake2b(digest_size=6)
    step = max(1, _SOME // max(1, math.prod(values.shape[1:])))
    for start in range(0, len(values), step):
        part = values[start : start + step]
        part = part.detach().cpu().numpy() if isinstance(part, Tensor) else part
        found.update(np.ascontiguousarray(np.ma.getdata(part)).view(np.uint8).data)
        if isinstance(part, np.ma.MaskedArray):
            found.update(np.ascontiguousarray(np.ma.getmaskarray(part)).data)
    return f"#{found.hexdigest()}"
