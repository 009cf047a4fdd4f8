"""Several processes on one problem, on one machine or many, by ``torch.distributed``."""

from gpytorch_gaps.distributed.launch import process_group
from gpytorch_gaps.distributed.ranks import RankError, Ranks, Traffic, own_slices
from gpytorch_gaps.distributed.training import average_gradients

__all__ = ["RankError", "Ranks", "Traffic", "average_gradients", "own_slices", "process_group"]
