"""Exact Gaussian processes on grids with gaps, as a GPyTorch plugin."""

from gpytorch_gaps import operators, preconditioners, settings
from gpytorch_gaps.data import from_array, from_points, from_xarray
from gpytorch_gaps.grid import CartesianGrid
from gpytorch_gaps.reports import LogdetReport, NotConvergedWarning, SolveReport, record_solves

__version__ = "0.1.0"

__all__ = [
    "CartesianGrid",
    "LogdetReport",
    "NotConvergedWarning",
    "SolveReport",
    "from_array",
    "from_points",
    "from_xarray",
    "operators",
    "preconditioners",
    "record_solves",
    "settings",
]
