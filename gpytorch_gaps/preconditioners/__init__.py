"""Low-rank eigen preconditioners, as tensors and closures."""

from gpytorch_gaps.preconditioners.eigen import EigenPreconditioner, ShiftedEigenPreconditioner

__all__ = ["EigenPreconditioner", "ShiftedEigenPreconditioner"]
