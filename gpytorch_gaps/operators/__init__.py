"""LinearOperators over the solvers: thin faces that plug into GPyTorch's conjugate gradients and Lanczos."""

from gpytorch_gaps.operators.fill_gaps import FillGapsOperator
from gpytorch_gaps.operators.penalized_gaps import PenalizedGapsOperator
from gpytorch_gaps.operators.selected_kronecker import SelectedKroneckerOperator
from gpytorch_gaps.operators.selected_kronecker_added_diag import SelectedKroneckerAddedDiagOperator
from gpytorch_gaps.operators.selected_kronecker_diag import SelectedKroneckerDiagOperator

__all__ = [
    "FillGapsOperator",
    "PenalizedGapsOperator",
    "SelectedKroneckerAddedDiagOperator",
    "SelectedKroneckerDiagOperator",
    "SelectedKroneckerOperator",
]
