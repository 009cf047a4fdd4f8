"""LinearOperators on top of the solvers, for use inside GPyTorch."""

from gpytorch_gaps.linalg.circulant import CirculantOperator
from gpytorch_gaps.linalg.interpolation import GridInterpolation
from gpytorch_gaps.operators.fill_gaps import FillGapsOperator
from gpytorch_gaps.operators.interpolated_kronecker import InterpolatedKroneckerOperator
from gpytorch_gaps.operators.interpolated_kronecker_added_diag import InterpolatedKroneckerAddedDiagOperator
from gpytorch_gaps.operators.kernel_rows import KernelRowsOperator
from gpytorch_gaps.operators.khatri_rao import KhatriRaoOperator
from gpytorch_gaps.operators.selected_kronecker import SelectedKroneckerOperator
from gpytorch_gaps.operators.selected_kronecker_added_diag import (
    PenalizedGapsOperator,
    SelectedKroneckerAddedDiagOperator,
)
from gpytorch_gaps.operators.selected_kronecker_diag import SelectedKroneckerDiagOperator
from gpytorch_gaps.operators.selected_kronecker_sum import (
    SelectedKroneckerSumAddedDiagOperator,
    SelectedKroneckerSumOperator,
)

__all__ = [
    "CirculantOperator",
    "FillGapsOperator",
    "GridInterpolation",
    "InterpolatedKroneckerAddedDiagOperator",
    "InterpolatedKroneckerOperator",
    "KernelRowsOperator",
    "KhatriRaoOperator",
    "PenalizedGapsOperator",
    "SelectedKroneckerAddedDiagOperator",
    "SelectedKroneckerDiagOperator",
    "SelectedKroneckerOperator",
    "SelectedKroneckerSumAddedDiagOperator",
    "SelectedKroneckerSumOperator",
]
