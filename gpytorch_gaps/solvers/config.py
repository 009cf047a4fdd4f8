"""The configuration of a solve: one frozen value, read from ``gpytorch_gaps.settings`` once, by an operator.

Nothing below the operators reads a setting. A part of a computation that needs other values makes a changed copy:

>>> SolveConfig(method="fill").replace(tolerance=1e-8).tolerance
1e-08
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from gpytorch_gaps.distributed.communicator import SINGLE, Communicator
from gpytorch_gaps.reports import SolveRecord

if TYPE_CHECKING:
    from gpytorch_gaps.solvers.system import NoisySystem
    from gpytorch_gaps.solvers.warm_start import WarmStart


@dataclass(frozen=True)
class SolveConfig:
    """All values that determine how a solve, a log-determinant or a variance is computed.

    Two equal configurations give the same numbers. ``settings`` documents the meaning of each value.

    >>> SolveConfig(rank=100) == SolveConfig().replace(rank=100)
    True
    """

    method: str = "auto"
    preconditioner: "str | Callable[[NoisySystem], Any]" = "auto"
    """"auto", "eigen", "neighbours", "none", or a function that makes one for a system."""
    rank: int | None = None
    """Rank of the eigen preconditioner. None: chosen from the spectrum. 0: none."""
    num_neighbours: int | None = None
    """Neighbours of each observation in the "neighbours" preconditioner. None: chosen after a few trial iterations."""
    tolerance: float = 1e-6
    """Relative residual of the original system that every column must reach."""
    mean_tolerance: float | None = None
    """Certified error of posterior means, in posterior standard deviations. None: only `tolerance` applies."""
    max_iterations: int = 2000
    dense_size: float = 800
    """Rows up to which "auto" factorises densely."""
    penalty: float | None = None
    """Penalty of the "penalize" method. None: large enough to cost no accuracy."""
    mixed_precision: bool = False
    train_tolerance: float = 1e-6
    """`tolerance` inside the marginal log likelihood."""
    loosest_tolerance: float = math.inf
    """Upper limit of all tolerances, including those of a warm start: ``linear_operator.settings.cg_tolerance``."""
    logdet_method: str = "auto"
    num_probes: int = 10
    repeat_probes: bool = False
    """Whether every estimate draws the same probes."""
    variance_method: str = "auto"
    variance_samples: int = 64
    memory: float = 2.0**29
    """Bytes that a prediction may hold at once beyond its inputs and its result."""
    expected_columns: int = 0
    """Right-hand sides that will follow in chunks: preconditioners are chosen for all of them together."""
    communicator: Communicator = field(default=SINGLE, compare=False)
    """Processes that share the columns of a likelihood."""
    warm_start: "WarmStart | None" = field(default=None, compare=False)
    """What likelihoods keep from one training step to the next."""
    records: tuple[SolveRecord, ...] = field(default=(), compare=False, repr=False)
    """Records that were active when the configuration was made: later solves are reported to them too."""

    def replace(self, **changes: Any) -> "SolveConfig":
        """A copy with some values changed."""
        return dataclasses.replace(self, **changes)

    def for_training(self) -> "SolveConfig":
        """The configuration of solves inside a marginal log likelihood."""
        return self.replace(tolerance=self.train_tolerance, mean_tolerance=None)

    def iteration_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """The precision that iterations start in; residuals are always float64."""
        return torch.float32 if self.mixed_precision or model_dtype == torch.float32 else torch.float64

    @property
    def preconditioners(self) -> tuple[str, ...]:
        """The preconditioners that a plan may choose from: "eigen", "neighbours", "own". Empty for none."""
        if callable(self.preconditioner):
            return ("own",)
        if self.preconditioner == "auto":
            return ("eigen", "neighbours") if self.rank is None else ("eigen",) if self.rank else ()
        return () if self.preconditioner == "none" else (self.preconditioner,)

    def planned_columns(self, columns: int) -> int:
        """The number of right-hand sides that a plan is made for. `columns` of them are solved for now."""
        return max(columns, self.expected_columns)

    @property
    def solution_key(self) -> tuple[Any, ...]:
        """The values that the solution for the data depends on: equal keys mean equal solutions."""
        return (
            self.method,
            self.preconditioner,
            self.rank,
            self.num_neighbours,
            self.tolerance,
            self.mean_tolerance,
            self.max_iterations,
            self.dense_size,
            self.penalty,
            self.mixed_precision,
        )
