"""Several processes on one problem, on one machine or many, by ``torch.distributed``."""

from gpytorch_gaps.distributed.columns import average_gradients
from gpytorch_gaps.distributed.communicator import RankError, Ranks, Traffic, own_slices
from gpytorch_gaps.distributed.launch import process_group

__all__ = ["RankError", "Ranks", "Traffic", "average_gradients", "own_slices", "process_group"]
