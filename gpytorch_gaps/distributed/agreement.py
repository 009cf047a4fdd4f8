"""What the ranks of a run were given must be the same: told apart before anything is worked on."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from gpytorch_gaps.distributed.ranks import Ranks
from gpytorch_gaps.files import digest
from gpytorch_gaps.kronecker.truncated import TruncatedEigen


def describe_kernel(kernel: Kernel | Tensor) -> str:
    """Its classes and hyperparameters in a word, or its matrix."""
    if isinstance(kernel, Tensor):
        return f"a matrix #{digest(kernel)}"
    names = [type(module).__name__ for module in kernel.modules() if isinstance(module, Kernel)]
    state = [value for value in kernel.state_dict().values() if torch.is_tensor(value)]
    return f"{' of '.join(names)} #{digest(*state)}"


def describe_values(values: Any) -> str:
    """The content of an array in memory, in a word; nothing of one that is not, of which ranks read their part only."""
    if isinstance(values, np.ndarray) and not isinstance(values, np.memmap) and values.dtype.kind in "fiub":
        numbers = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    elif isinstance(values, Tensor):
        numbers = values.detach().contiguous().view(-1).view(torch.uint8)
    else:
        return ""
    whole = numbers[: numbers.numel() // 8 * 8].view(torch.int64)
    # wraps around, as fast as memory is read; the second sum sees what changes places
    stride = whole[::3]
    return f"#{int(whole.sum())}.{int(stride.sum())}.{int(numbers[numbers.numel() // 8 * 8 :].sum())}"


def same_basis(basis: TruncatedEigen, ranks: Ranks) -> TruncatedEigen:
    """The first rank's: eigenvectors of another machine may be of the other sign, or turned among themselves."""
    if ranks.size == 1:
        return basis
    own = ([tuple(v.shape) for v in basis.vectors], basis.level, basis.error)
    shapes, level, error = ranks.gather(own, "the basis")[0]
    vectors = _filled_alike(basis.vectors, shapes)
    values = _filled_alike(basis.values, [shape[-1:] for shape in shapes])
    for tensor in (*vectors, *values):
        ranks.broadcast(tensor, "the basis")
    return TruncatedEigen(tuple(vectors), tuple(values), level, error)


def _filled_alike(own: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Tensors to receive what the first rank sends, which is what it has."""
    return [
        (tensor if tensor.shape == torch.Size(shape) else tensor.new_empty(*shape)).contiguous()
        for tensor, shape in zip(own, shapes, strict=True)
    ]
