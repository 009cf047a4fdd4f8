"""A fit in progress: its steps, and the states to which it can be reset."""

import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NoReturn

import linear_operator
import torch
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models import ExactGP
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor
from torch.optim import Optimizer

from gpytorch_gaps import settings
from gpytorch_gaps.distributed.columns import average_gradients
from gpytorch_gaps.distributed.communicator import SINGLE, Communicator
from gpytorch_gaps.kernels.grid_kernel import GappyGridKernel
from gpytorch_gaps.linalg.products import kron_matmul_flops
from gpytorch_gaps.reports import SolveRecord, record_solves
from gpytorch_gaps.solvers.warm_start import WarmStart
from gpytorch_gaps.training.bounds import bounds_of
from gpytorch_gaps.training.checkpoint import Checkpoint
from gpytorch_gaps.training.finish import CONVERGED_GAIN_NATS, FINISH_PROBES_FACTOR, QuasiNewton
from gpytorch_gaps.training.history import FitError, History, count_iterations, logdet_error
from gpytorch_gaps.utils.threads import threads_for

_STEPS_BETWEEN_WEIGHINGS = 10  # optimizer steps between two searches for gross errors


class TrainingRun:
    """A fit in progress.

    `state` is the state after the last completed step, `last_finite_state` the last one with a finite loss; see
    :meth:`snapshot`. `finish` is the L-BFGS optimizer of the last steps, None before.
    """

    def __init__(
        self,
        model: ExactGP,
        mll: MarginalLogLikelihood,
        optimizer: Optimizer,
        warm_start: WarmStart | None = None,
        comm: Communicator = SINGLE,
    ) -> None:
        self.model, self.mll, self.optimizer, self.warm_start = model, mll, optimizer, warm_start
        self.comm = comm
        self.finish: QuasiNewton | None = None
        self._finish_warm_start: WarmStart | None = None  # fixed probes for the last steps of a run without warm start
        self.history = History()
        # one entry for every evaluation of the loss in the current step
        self._losses: list[float] = []
        self._records: list[SolveRecord] = []
        self._gradient_seconds: list[float] = []
        self.mark_start()

    def mark_start(self) -> None:
        """Stores the current state, from which the run continues and to which it falls back."""
        self.state = self.last_finite_state = self.snapshot()

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Takes one step of the optimizer and appends it to the history."""
        started, sent_before = time.perf_counter(), self.comm.traffic.total
        noise = _mean_noise(self.model.likelihood)
        for entries in (self._losses, self._records, self._gradient_seconds):
            entries.clear()
        if self.finish is None and len(self.history) % _STEPS_BETWEEN_WEIGHINGS == 0:
            self.weigh()
        optimizer: Any = self.finish or self.optimizer
        optimizer.step(self._evaluate)
        if not self._losses:
            came, expected = "an optimizer that never evaluates the loss", "one whose step(closure) calls the closure"
            raise ValueError(f"fit: optimizer: got {came}, expected {expected}")
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self._refuse_non_finite("parameters", trained)
        history, solves = self.history, [solve for record in self._records for solve in record]
        error = logdet_error(self._records[0])
        gain = None if self.finish is None else self.finish.expected_gain * history.num_observations
        history._append(
            noise=noise,
            iterations=sum(map(count_iterations, self._records)),
            worst_residual=max((solve.worst_residual for solve in solves), default=None),
            standard_error=None if error is None else error / history.num_observations,
            seconds=time.perf_counter() - started,
            solve_seconds=sum(solve.seconds for solve in solves),
            gradient_seconds=sum(self._gradient_seconds),
            sent_bytes=self.comm.traffic.total - sent_before,
            expected_gain=gain,
            loss=self._losses[0],
        )
        self.state = self.snapshot()

    def weigh(self) -> bool:
        """Finds the gross errors, for a robust likelihood. Returns whether other observations are distrusted now."""
        likelihood = self.model.likelihood
        if getattr(likelihood, "gross_errors", None) is None:
            return False
        before = likelihood.distrusted
        try:
            likelihood.weigh(self.model)
        except (NanError, NotPSDError) as error:
            self._fail(f"the covariance cannot be factorized: {error}", error)
        variance = self.comm.broadcast(likelihood.gross_errors.variance, "gross errors")
        self.history.num_distrusted = int((variance > 0).sum())
        return not torch.equal(before, likelihood.distrusted)

    def begin_finish(self) -> bool:
        """Replaces the optimizer by L-BFGS if the loss is a deterministic function of the parameters.

        It is not if two evaluations differ: with dropout in a network, or with new probes for a batch of models.
        """
        self._make_finish()
        try:
            first, second = (float(self._evaluate()) for _ in range(2))
        except FitError:
            first, second = 0.0, math.inf
        if abs(first - second) * self.history.num_observations <= CONVERGED_GAIN_NATS:
            return True
        self.restore(self.state)
        return False

    def finish_step(self) -> bool:
        """Takes one L-BFGS step. Returns False, and undoes it, if it leads to a loss that is not finite."""
        try:
            self.step()
        except FitError:
            self.restore(self.state)
            return False
        return True

    @property
    def converged(self) -> bool:
        """Whether the expected gain of the last two steps is almost zero, and the curvature is known."""
        last = self.history.expected_gain[-2:]
        known = self.finish is not None and len(last) == 2 and self.finish.knows_curvature
        return known and all(gain is not None and gain <= CONVERGED_GAIN_NATS for gain in last)

    def _make_finish(self) -> QuasiNewton:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        self.finish = QuasiNewton(parameters, bounds_of(self.model))
        num_probes = FINISH_PROBES_FACTOR * settings.current().num_probes
        self._finish_warm_start = WarmStart(num_probes) if self.warm_start is None else None
        return self.finish

    # -- the loss ----------------------------------------------------------------------------------------------------

    def _evaluate(self) -> Tensor:
        """The loss, with gradients of the parameters. An optimizer calls this at least once per step."""
        self.model.zero_grad()
        try:
            with self._threads(), record_solves() as record, self._warm_started(), settings.group(self.comm):
                output = self.model(*self.model.train_inputs)
                loss = -self.mll(output, self.model.train_targets).sum()
                # all processes use the loss of the first, so that they take the same decisions
                value = self.comm.from_main(loss.item(), loss.device, "likelihoods")
                if not math.isfinite(value):
                    self._fail(f"the loss is {value}")
                self.last_finite_state = self.state  # if a later evaluation in this step fails, it is undone
                started = time.perf_counter()
                loss.backward()
                average_gradients(self.model, self.comm)
                self._gradient_seconds.append(time.perf_counter() - started)
        except (NanError, NotPSDError) as error:
            self._fail(f"the covariance cannot be factorized: {error}", error)
        self._losses.append(value)
        self._records.append(record)
        self.history.num_observations = output.event_shape.numel()
        gradients = [(name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None]
        self._refuse_non_finite("gradients", gradients)
        return loss.detach().new_tensor(value)

    def _threads(self) -> AbstractContextManager:
        """The number of threads for products with the observations and all probes; unchanged without a grid."""
        grids = [part.grid for part in self.model.modules() if isinstance(part, GappyGridKernel)]
        if not grids:
            return nullcontext()
        columns = 1 + linear_operator.settings.num_trace_samples.value()
        flops = max(kron_matmul_flops([(size, size) for size in grid.shape], columns) for grid in grids)
        return threads_for(flops, columns * max(grid.num_cells for grid in grids))

    @property
    def _active_warm_start(self) -> WarmStart | None:
        return self.warm_start or self._finish_warm_start

    @contextmanager
    def _warm_started(self) -> Iterator[None]:
        """Uses the warm start, if any. In the last steps, its tolerances are tight enough to avoid bias."""
        memory = self._active_warm_start
        if memory is None:
            yield
            return
        if memory is self._finish_warm_start:
            # Discards the preconditioners of the last step: a resumed run has none, and must take the same steps.
            memory.load_state_dict(memory.state_dict())
        with settings.warm_start(memory), nullcontext() if self.finish is None else memory.settling():
            yield

    @contextmanager
    def repeatable(self) -> Iterator[None]:
        """Makes evaluations of the loss a smooth function, with fixed probes and tight solves, in the last steps."""
        memory = self._active_warm_start
        assert memory is not None
        tolerance, memory.tolerance = memory.tolerance, settings.current().train_tolerance
        try:
            yield
        finally:
            memory.tolerance = tolerance

    def summary(self) -> dict[str, Any]:
        """The last step in a few words, for the progress bar."""
        noise = self.history.noise[-1]
        shown = {"loss": f"{self.history.loss[-1]:.4f}", "CG": self.history.iterations[-1]}
        return shown if noise is None else {**shown, "noise": f"{noise:.3g}"}

    # -- states ------------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Copies everything that the next step depends on."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        memory = self._active_warm_start
        warm_start = {} if memory is None else {"warm_start": memory.state_dict()}
        return {
            **warm_start,
            "step": len(self.history),
            "model": copy.deepcopy(self.model.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "finish": None if self.finish is None else copy.deepcopy(self.finish.state_dict()),
            "rng": {"cpu": torch.get_rng_state(), "cuda": cuda},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Resets to a snapshot, except for the random state, which only a resumed checkpoint sets."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.finish = self._finish_warm_start = None
        if state["finish"] is not None:
            self._make_finish().load_state_dict(state["finish"])
        memory = self._active_warm_start
        if memory is not None and "warm_start" in state:
            memory.load_state_dict(state["warm_start"])
        elif memory is not None:
            memory.forget()

    def fall_back(self, file: Checkpoint | None) -> None:
        """Resets to the last parameters with a finite loss. The checkpoint is replaced too: it may hold later ones."""
        self.state = self.last_finite_state
        self.restore(self.state)
        self.history.stopped = "interrupted"
        if file is not None:
            with suppress(OSError):  # the error of the fit is more important than this one
                file.save()

    def interrupt(self, error: BaseException, file: Checkpoint | None) -> None:
        """Undoes the unfinished step, saves the state, and adds both to the exception."""
        self.restore(self.state)
        self.history._truncate(self.state["step"])
        self.history.stopped = "interrupted"
        saved = ""
        if file is not None:
            with suppress(OSError):  # the original error may be a full disk
                file.save()
                saved = f"; fit(..., checkpoint={str(file.path)!r}) continues from there"
        error.add_note(f"fit: interrupted; the model holds the parameters after {len(self.history)} steps{saved}")
        with suppress(AttributeError):  # exceptions with slots
            error.history = self.history  # type: ignore[attr-defined]

    # -- failures ----------------------------------------------------------------------------------------------------

    def _refuse_non_finite(self, kind: str, named: Sequence[tuple[str, Tensor]]) -> None:
        if bad := [name for name, tensor in named if not tensor.isfinite().all()]:
            self._fail(f"{kind} are not finite: {', '.join(bad)}")

    def _fail(self, what: str, cause: Exception | None = None) -> NoReturn:
        step = len(self.history)
        trained = [(name, p.detach()) for name, p in self.model.named_parameters() if p.requires_grad]
        bad = [name for name, p in trained if not p.isfinite().all()]
        ranges = ", ".join(f"{name} in [{p.min():.3g}, {p.max():.3g}]" for name, p in trained[:8] if p.numel())
        where = f"not finite: {', '.join(bad)}" if bad else ranges
        restored = "those at the start" if step == 0 else "the last ones with a finite loss"
        raise FitError(
            f"fit, step {step}: {what} (parameters {where}). The model was reset to {restored}. Try: a lower lr, "
            "torch.float64, or a noise_constraint such as GreaterThan(1e-4) on the likelihood; check the targets for "
            "NaN.",
            step,
            self.history,
        ) from cause


def _mean_noise(likelihood: Any) -> float | None:
    noise = getattr(likelihood, "noise", None)
    return float(noise.detach().double().mean()) if isinstance(noise, Tensor) else None
