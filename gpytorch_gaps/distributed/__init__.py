"""Several processes that share one problem, on one machine or many, through ``torch.distributed``."""

from gpytorch_gaps.distributed.columns import average_gradients
from gpytorch_gaps.distributed.communicator import Communicator, RankError, Traffic, own_slices
from gpytorch_gaps.distributed.launch import process_group

__all__ = ["Communicator", "RankError", "Traffic", "average_gradients", "own_slices", "process_group"]
