"""One basis for all ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpytorch_gaps.distributed.communicator import Communicator
from gpytorch_gaps.linalg.truncated import TruncatedEigen


def same_basis(basis: TruncatedEigen, ranks: Communicator) -> TruncatedEigen:
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
