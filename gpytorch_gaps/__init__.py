"""Exact Gaussian processes on grids with gaps, as a GPyTorch plugin.

Public names are imported on first use (PEP 562): ``import gpytorch_gaps`` loads neither torch nor xarray.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from gpytorch_gaps.filling.accessor import register_with_xarray
from gpytorch_gaps.utils.version import installed_version

if TYPE_CHECKING:  # what `__getattr__` below finds, for type checkers and editors
    from gpytorch_gaps import botorch as botorch
    from gpytorch_gaps import distributed, formats, operators, preconditioners, settings
    from gpytorch_gaps import plot as plot
    from gpytorch_gaps.filling.fill import fill_gaps
    from gpytorch_gaps.filling.gap_filler import GapFiller as GapFiller
    from gpytorch_gaps.filling.process.report import FillReport
    from gpytorch_gaps.filling.results.evaluation import DistanceScore, Evaluation
    from gpytorch_gaps.filling.results.filled import Filled
    from gpytorch_gaps.filling.results.points import Estimate
    from gpytorch_gaps.grid.cartesian import CartesianGrid
    from gpytorch_gaps.grid.data import from_array, from_points, from_xarray
    from gpytorch_gaps.kernels import GappyGridKernel, SphereKernel, preconditioned_ski
    from gpytorch_gaps.laplace import LaplaceGP, LaplaceMarginalLogLikelihood
    from gpytorch_gaps.likelihoods import GappyGridLikelihood
    from gpytorch_gaps.posterior.sampling import sample_posterior
    from gpytorch_gaps.posterior.scoring import Score, leave_out, score
    from gpytorch_gaps.reconstruction import sizing
    from gpytorch_gaps.reconstruction.learn import fit_reconstruction
    from gpytorch_gaps.reconstruction.learned import LearnedKernels, LearningStep
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
    from gpytorch_gaps.training.uncertainty import HyperparameterUncertainty

    __version__: str

__all__ = [
    "ApproximateVarianceWarning",
    "CalibrationWarning",
    "CartesianGrid",
    "DistanceScore",
    "Estimate",
    "Evaluation",
    "FillReport",
    "Filled",
    "FitError",
    "GappyGridKernel",
    "GappyGridLikelihood",
    "History",
    "HyperparameterUncertainty",
    "LaplaceGP",
    "LaplaceMarginalLogLikelihood",
    "LearnedKernels",
    "LearningStep",
    "LogdetReport",
    "NotConvergedWarning",
    "Reconstruction",
    "ReconstructionReport",
    "Score",
    "SolveReport",
    "SphereKernel",
    "VarianceReport",
    "WarmStart",
    "distributed",
    "fill_gaps",
    "fit",
    "fit_reconstruction",
    "formats",
    "from_array",
    "from_points",
    "from_xarray",
    "leave_out",
    "operators",
    "preconditioned_ski",
    "preconditioners",
    "reconstruct",
    "record_solves",
    "sample_posterior",
    "score",
    "settings",
    "sizing",
]  # not `botorch`, `plot` and `GapFiller`, which need BoTorch, matplotlib and scikit-learn: `import *` works without

# Public name -> the module that defines it, or that it is.
_HOMES = {
    "ApproximateVarianceWarning": "reports",
    "CalibrationWarning": "reports",
    "CartesianGrid": "grid.cartesian",
    "DistanceScore": "filling.results.evaluation",
    "Estimate": "filling.results.points",
    "Evaluation": "filling.results.evaluation",
    "FillReport": "filling.process.report",
    "Filled": "filling.results.filled",
    "FitError": "training.history",
    "GapFiller": "filling.gap_filler",
    "GappyGridKernel": "kernels",
    "GappyGridLikelihood": "likelihoods",
    "History": "training.history",
    "HyperparameterUncertainty": "training.uncertainty",
    "LaplaceGP": "laplace",
    "LaplaceMarginalLogLikelihood": "laplace",
    "LearnedKernels": "reconstruction.learned",
    "LearningStep": "reconstruction.learned",
    "LogdetReport": "reports",
    "NotConvergedWarning": "reports",
    "Reconstruction": "reconstruction.result",
    "ReconstructionReport": "reconstruction.report",
    "Score": "posterior.scoring",
    "SolveReport": "reports",
    "SphereKernel": "kernels",
    "VarianceReport": "reports",
    "WarmStart": "solvers.warm_start",
    "botorch": "botorch",
    "distributed": "distributed",
    "fill_gaps": "filling.fill",
    "fit": "training.fit",
    "fit_reconstruction": "reconstruction.learn",
    "formats": "formats",
    "from_array": "grid.data",
    "from_points": "grid.data",
    "from_xarray": "grid.data",
    "leave_out": "posterior.scoring",
    "operators": "operators",
    "plot": "plot",
    "preconditioned_ski": "kernels",
    "preconditioners": "preconditioners",
    "reconstruct": "reconstruction.reconstruct",
    "record_solves": "reports",
    "sample_posterior": "posterior.sampling",
    "score": "posterior.scoring",
    "settings": "settings",
    "sizing": "reconstruction.sizing",
}

register_with_xarray()
logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless the user configures logging


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Imports a public name or a submodule when it is first used."""
        value = installed_version() if name == "__version__" else _load(name)
        globals()[name] = value
        return value


def _load(name: str) -> Any:
    """Imports a public name from its module. Any other name is imported as a submodule, if there is one."""
    home = f"{__name__}.{_HOMES.get(name, name)}"
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name != home:
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(module, name, module)
