"""The steps of `fit_reconstruction`, and the state from which they continue."""

import math
import time
import warnings
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from gpytorch_gaps.distributed.agreement import describe_kernel, describe_values
from gpytorch_gaps.distributed.communicator import SINGLE, Communicator, split_evenly
from gpytorch_gaps.linalg.truncated import TruncatedEigen, truncated_eigh
from gpytorch_gaps.reconstruction.hyperparameters import Hyperparameters
from gpytorch_gaps.reconstruction.inputs import Problem
from gpytorch_gaps.reconstruction.learned import LearnedKernels, LearningStep
from gpytorch_gaps.reconstruction.learning_data import LEARNING_LEVEL, GridData, every_kth, strides_for
from gpytorch_gaps.reconstruction.likelihood import StreamedLikelihood
from gpytorch_gaps.reconstruction.prior_mean import describe_mean
from gpytorch_gaps.reconstruction.scoring import Score, score
from gpytorch_gaps.reconstruction.sharding import ReplicatedWeights, broadcast_product
from gpytorch_gaps.reconstruction.weight_solver import WeightSolver
from gpytorch_gaps.reconstruction.weight_space import WeightSpace
from gpytorch_gaps.reports import NotConvergedWarning
from gpytorch_gaps.utils.checkpoint import CheckpointFile
from gpytorch_gaps.utils.files import digest

_LARGEST_CHANGE = 0.7  # largest change of a logarithm in one step: the curvature changes with distance
_SOLVE_SHARE = 0.2  # error of a solve, as a fraction of the distance to the maximum
_LOOSEST_SOLVE = 0.3  # largest error of a solve, in posterior standard deviations
_PART_TOLERANCE = 0.5  # distance to the maximum for a part of the data at which all data are used
_SHORT_STEP = 0.3  # change of a logarithm over which the curvature hardly changes
_NEAR = 10.0  # distance, in standard deviations, within which the likelihood is close to a parabola
_MOST_PAIRS = 5
_LEAST_DAMPING = 1 / 16
_FEWEST_PROBES = 2  # smallest number of probes that gives an estimate of their error
_PROBE_SHARE = 0.3  # part of the tolerance for the error of probes
_DECISIONS = "steps"
_VERSION = 1
_SAME = 1e-8  # largest relative difference of sums over the same values


class Learner:
    """Steps to the hyperparameters with the largest likelihood.

    :param problem: the checked arguments.
    :param values: the values of the problem. A checkpoint keeps a hash of them.
    :param probes: largest number of random probes.
    :param tolerance: largest length of the last step, in standard deviations.
    :param comm: processes that share the slices of the grid, and take the same steps.
    """

    def __init__(
        self, problem: Problem, values: Any, probes: int, tolerance: float, comm: Communicator = SINGLE
    ) -> None:
        self._comm = comm
        self.problem, self.tolerance, self._most_probes = problem, tolerance, probes
        self.hyperparameters = Hyperparameters(problem.kernels, problem.noise)
        self.steps: list[LearningStep] = []
        self.converged, self._uses_all = False, False
        self._strides: tuple[int, ...] = ()  # strides of the cells that the first steps use
        self._damping, self._before, self._probes = 1.0, math.inf, _FEWEST_PROBES
        self._value, self._deviations = (math.nan, math.nan), [math.nan] * len(self.hyperparameters)
        self._last: tuple[Tensor, Tensor] | None = None  # last step, and the gradient before it
        self._pairs: list[tuple[Tensor, Tensor]] = []  # steps, and the change of the negative gradient by each
        self._norms: dict[bool, float] = {}  # norms of all data (True) and of a part (False)
        self._all = GridData(problem.grid, problem.slabs, problem.mean)
        self._file = None
        if problem.checkpoint is not None:
            self._about = self._description(values)
            self._file = CheckpointFile(problem.checkpoint, "fit_reconstruction", _VERSION)
            self._resume(self._file)
        if not self._strides:
            self._strides = strides_for(problem.grid.shape, self._basis(self._all).ranks)
            if problem.grid.shape[0] < comm.size * self._strides[0]:
                self._strides = (1,) * len(self._strides)  # too few slices for the processes
        self._uses_all = self._uses_all or max(self._strides) == 1
        self._part = None if self._uses_all else every_kth(self._all, self._strides, comm)

    @property
    def _data(self) -> GridData:
        return self._all if self._part is None else self._part

    def step(self) -> None:
        """Evaluate the likelihood, change the hyperparameters, and save."""
        begun, data, own = time.perf_counter(), self._data, self.hyperparameters
        likelihood, basis = self._likelihood(data)
        derivatives = likelihood.derivatives(self._probes, self.problem.seed)
        found = self._of_main(score(likelihood.space, derivatives, own.derivatives(data.grid, basis)))
        found = self._with_curvature(found)
        distance = self._comm.from_main(found.distance, data.grid.device, _DECISIONS)
        if not math.isfinite(distance):
            raise ValueError(f"kernels: the gradient of the likelihood is not finite at {own.values}")
        enough = distance <= (self.tolerance if self._uses_all else _PART_TOLERANCE)
        self.converged = enough and self._uses_all
        if self.converged:
            self._value = likelihood.value(max(_FEWEST_PROBES, self._probes), self.problem.seed)
            self._deviations = found.deviations.tolist()
        solution, seconds = likelihood.solution, time.perf_counter() - begun
        numbers = (likelihood.space.num_train, solution.iterations, seconds, solution.error_in_std)
        self.steps.append(LearningStep(own.values, distance, found.probe_error, *numbers))
        # if gaps are clustered, the curvature may be underestimated: a step that increased the distance was too long
        too_long = distance > self._before
        self._damping = max(_LEAST_DAMPING, 0.5 * self._damping) if too_long else min(1.0, 2.0 * self._damping)
        change = self._damping * found.step(_LARGEST_CHANGE)
        own.set(self._comm.broadcast(own.vector + change, _DECISIONS))
        self._last = (change, found.gradient)
        self._choose_probes(found)
        self._before = distance
        if enough and not self._uses_all:  # switch to all data: results for a part do not hold for them
            self._part, self._uses_all, self._before, self._last, self._pairs = None, True, math.inf, None, []
        self._save()

    def _of_main(self, found: Score) -> Score:
        """The score of the main process: rounding differs between machines, and steps must not."""
        return Score(
            self._comm.broadcast(found.gradient, _DECISIONS),
            self._comm.broadcast(found.information, _DECISIONS),
            self._comm.broadcast(found.probes, _DECISIONS) if len(found.probes) else found.probes,
        )

    def _likelihood(self, data: GridData) -> tuple[StreamedLikelihood, TruncatedEigen]:
        """The likelihood at the current hyperparameters. The tolerance of its solve depends on the last distance."""
        problem, basis = self.problem, self._basis(data)
        weights = ReplicatedWeights(
            basis, self._comm, split_evenly(data.grid.shape[0], self._comm.size, data.slabs.chunk)
        )
        mask, rhs, norm = data.read(weights)
        space = WeightSpace(mask, weights, self.hyperparameters.noise)
        if not space.num_train:
            raise ValueError(f"values: got {space.num_cells} entries, all of them gaps; expected an observation")
        self._recognize(norm)
        tolerance = max(_SOLVE_SHARE * self.tolerance, min(_LOOSEST_SOLVE, _SOLVE_SHARE * self._before))
        solver = WeightSolver(space, rhs, tolerance, problem.max_iterations, problem.memory, lambda *_: None)
        return StreamedLikelihood(solver, rhs, norm), basis

    def _with_curvature(self, found: Score) -> Score:
        """The score with a curvature that is corrected by the last short steps near the maximum."""
        if self._last is not None:
            step, gradient = self._last
            if self._before <= _NEAR and float(step.abs().max()) <= _SHORT_STEP:
                self._pairs = [*self._pairs[1 - _MOST_PAIRS :], (step, gradient - found.gradient)]
        return found.corrected(self._pairs)

    def _choose_probes(self, found: Score) -> None:
        """Chooses the number of probes for the tolerance, from their error in this step."""
        if len(found.probes):
            error = self._comm.from_main(found.probe_error, found.probes.device, _DECISIONS)
            needed = len(found.probes) * (error / (_PROBE_SHARE * self.tolerance)) ** 2
            self._probes = max(_FEWEST_PROBES, min(self._most_probes, math.ceil(needed)))

    def _basis(self, data: GridData) -> TruncatedEigen:
        """The eigenvectors of the kernel at the current hyperparameters. Their signs do not change between steps."""

        def decompose() -> TruncatedEigen:
            found = truncated_eigh(self.hyperparameters.factors(data.grid), LEARNING_LEVEL * self.hyperparameters.noise)
            return replace(found, vectors=tuple(_with_lasting_signs(own) for own in found.vectors))

        return broadcast_product(self._comm.run_on_all("decomposing the kernels", decompose), self._comm)

    def result(self) -> LearnedKernels:
        """The result. Warns if it has not converged."""
        if not self.converged:
            warnings.warn(
                f"fit_reconstruction: after {len(self.steps)} steps, the maximum of the likelihood is estimated to be "
                f"{self.steps[-1].distance:.2g} standard deviations away, expected at most {self.tolerance:g}. Try: "
                "more steps, or other starting values of the hyperparameters.",
                NotConvergedWarning,
                stacklevel=4,
            )
        own = self.hyperparameters
        deviations = dict(zip(own.names, self._deviations, strict=True))
        return LearnedKernels(
            own.copies(), own.noise, own.values, deviations, *self._value, list(self.steps), self.converged
        )

    # -- the checkpoint ------------------------------------------------------------------------------------------------

    def _description(self, values: Any) -> dict[str, str]:
        """Everything that must be the same in two runs with the same checkpoint."""
        problem = self.problem
        return {
            "values": f"{tuple(problem.slabs.shape)} {describe_values(values)}",
            "axes": digest(*problem.grid.axes),
            "kernels": " ".join(describe_kernel(kernel) for kernel in problem.kernels),
            "mean": describe_mean(problem.mean),
            "numbers": str((problem.noise, self.tolerance, self._most_probes, problem.seed)),
        }

    def _save(self) -> None:
        if self._file is not None and self._comm.is_main:
            self._file.save(
                {
                    "about": self._about,
                    "vector": self.hyperparameters.vector,
                    "steps": [asdict(step) for step in self.steps],
                    "numbers": [self._damping, self._before, self._probes, *self._value],
                    "deviations": self._deviations,
                    "flags": [self.converged, self._uses_all],
                    "norms": self._norms,
                    "curvature": [self._last, self._pairs],
                    "strides": self._strides,
                }
            )

    def _resume(self, file: CheckpointFile) -> None:
        content = file.read(
            {"about", "vector", "steps", "numbers", "deviations", "flags", "norms", "curvature", "strides"}
        )
        if content is None:
            return
        file.require_same([f"{name} differ" for name, own in self._about.items() if content["about"].get(name) != own])
        self.hyperparameters.set(content["vector"])
        self.steps = [LearningStep(**step) for step in content["steps"]]
        self._damping, self._before, self._probes, *value = content["numbers"]
        self._value, self._deviations, self._norms = (value[0], value[1]), content["deviations"], content["norms"]
        self.converged, self._uses_all = content["flags"]
        self._last, self._pairs = content["curvature"]
        self._strides = content["strides"]

    def _recognize(self, norm: float) -> None:
        """Check that the data have the norm of those of the checkpoint."""
        known = self._norms.setdefault(self._uses_all, norm)
        if self._file is not None and abs(known - norm) > _SAME * known:
            self._file.require_same(["values or mean differ"])


def _with_lasting_signs(vectors: Tensor) -> Tensor:
    """Eigenvectors with signs such that their products with a fixed vector are positive. shape: (m, r)"""
    generator = torch.Generator().manual_seed(len(vectors))
    fixed = torch.randn(len(vectors), generator=generator, dtype=vectors.dtype).to(vectors.device)
    return vectors * torch.where(fixed @ vectors < 0, -1.0, 1.0)
