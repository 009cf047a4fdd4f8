"""Exact Gaussian processes on grids with gaps, as a GPyTorch plugin."""

from gpytorch_gaps import distributed, operators, preconditioners, settings
from gpytorch_gaps.filling.accessor import register
from gpytorch_gaps.filling.fill import Filled, fill_gaps
from gpytorch_gaps.filling.report import FillReport
from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.grid.data import from_array, from_points, from_xarray
from gpytorch_gaps.kernels import GappyGridKernel
from gpytorch_gaps.kernels.terms import teach_sums_and_products
from gpytorch_gaps.likelihoods import GappyGridLikelihood
from gpytorch_gaps.posterior.sampling import sample_posterior
from gpytorch_gaps.posterior.scoring import Score, leave_out, score
from gpytorch_gaps.reconstruction import sizing
from gpytorch_gaps.reconstruction.reconstruct import reconstruct
from gpytorch_gaps.reconstruction.report import ReconstructionReport
from gpytorch_gaps.reconstruction.result import Reconstruction
from gpytorch_gaps.reports import (
    ApproximateVarianceWarning,
    CalibrationWarning,
    LogdetReport,
    NotConvergedWarning,
    SolveReport,
    VarianceReport,
    record_solves,
)
from gpytorch_gaps.solvers.warm_start import WarmStart
from gpytorch_gaps.training.fit import fit
from gpytorch_gaps.training.history import FitError, History

__version__ = "0.1.0"

teach_sums_and_products()
register()

__all__ = [
    "ApproximateVarianceWarning",
    "CalibrationWarning",
    "CartesianGrid",
    "FillReport",
    "Filled",
    "FitError",
    "GappyGridKernel",
    "GappyGridLikelihood",
    "History",
    "LogdetReport",
    "NotConvergedWarning",
    "Reconstruction",
    "ReconstructionReport",
    "Score",
    "SolveReport",
    "VarianceReport",
    "WarmStart",
    "distributed",
    "fill_gaps",
    "fit",
    "from_array",
    "from_points",
    "from_xarray",
    "leave_out",
    "operators",
    "preconditioners",
    "reconstruct",
    "record_solves",
    "sample_posterior",
    "score",
    "settings",
    "sizing",
]
