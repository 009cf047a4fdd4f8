"""Low-rank eigen preconditioners, as tensors and closures."""

from gpytorch_gaps.preconditioners.eigen import EigenPreconditioner
from gpytorch_gaps.preconditioners.shifted_eigen import ShiftedEigenPreconditioner

__all__ = ["EigenPreconditioner", "ShiftedEigenPreconditioner"]
