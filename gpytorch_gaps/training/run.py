"""A fit under way: its steps, and the states to which it can be put back."""

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
from gpytorch_gaps.distributed.communicator import ALONE, Ranks
from gpytorch_gaps.kernels.grid_kernel import GappyGridKernel
from gpytorch_gaps.linalg.products import kron_matmul_flops
from gpytorch_gaps.reports import SolveRecord, record_solves
from gpytorch_gaps.solvers.warm_start import WarmStart
from gpytorch_gaps.training.checkpoint import Checkpoint
from gpytorch_gaps.training.finish import ENOUGH, MORE_PROBES, QuasiNewton
from gpytorch_gaps.training.history import FitError, History, count_iterations, logdet_error
from gpytorch_gaps.utils.threads import threads_for


class Run:
    """A fit under way: its steps, and the states to which it can be put back."""

    def __init__(
        self,
        model: ExactGP,
        mll: MarginalLogLikelihood,
        optimizer: Optimizer,
        memory: WarmStart | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model, self.mll, self.optimizer, self.memory = model, mll, optimizer, memory
        self.ranks = ranks
        self.finish: QuasiNewton | None = None  # takes the place of the optimizer in the last steps
        self._finish_memory: WarmStart | None = None  # whose probes stay the same then, if there is no other
        self.history = History()
        self._losses: list[float] = []  # of every evaluation in this step
        self._records: list[SolveRecord] = []  # likewise
        self._gradient_seconds = 0.0  # likewise
        self.begin()

    def begin(self) -> None:
        """Takes the present state as the one to go on from, and to fall back to."""
        self.now = self.last_finite = self.snapshot()

    def step(self) -> None:
        started, sent = time.perf_counter(), self.ranks.traffic.total
        noise = _mean_noise(self.model.likelihood)
        self._records.clear()
        self._losses.clear()
        self._gradient_seconds = 0.0
        optimizer: Any = self.finish or self.optimizer
        optimizer.step(self._evaluate)
        if not self._losses:
            came, expected = "one that never evaluates the loss", "one whose step(closure) calls the closure"
            raise ValueError(f"fit: optimizer: got {came}, expected {expected}")
        self._refuse_non_finite(
            "parameters", [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        )
        history = self.history
        history.noise.append(noise)
        history.iterations.append(sum(map(count_iterations, self._records)))
        residuals = [solve.worst_residual for record in self._records for solve in record]
        history.worst_residual.append(max(residuals, default=None))
        error = logdet_error(self._records[0])
        history.standard_error.append(None if error is None else error / history.num_observations)
        history.seconds.append(time.perf_counter() - started)
        history.solve_seconds.append(sum(solve.seconds for record in self._records for solve in record))
        history.gradient_seconds.append(self._gradient_seconds)
        history.sent_bytes.append(self.ranks.traffic.total - sent)
        history.expected_gain.append(
            None if self.finish is None else self.finish.expected_gain * history.num_observations
        )
        history.loss.append(self._losses[0])
        self.now = self.snapshot()

    # -- the last steps ----------------------------------------------------------------------------------------------

    def begin_finish(self) -> bool:
        """Has the next steps be those of `finish`; False where the loss is no function of the parameters.

        Then two evaluations differ: with dropout in a network, or other probes every time for a batch of models.
        """
        self._make_finish()
        try:
            first, second = (float(self._evaluate()) for _ in range(2))
        except FitError:
            first, second = 0.0, math.inf
        if abs(first - second) * self.history.num_observations <= ENOUGH:
            return True
        self.restore(self.now)
        return False

    def finish_step(self) -> bool:
        """One of the last steps; False, and undone, where it leads to a loss that is not finite."""
        try:
            self.step()
        except FitError:
            self.restore(self.now)
            return False
        return True

    @property
    def arrived(self) -> bool:
        """Whether the last two steps were expected to gain next to nothing, by a curvature that is known."""
        last = self.history.expected_gain[-2:]
        known = self.finish is not None and len(last) == 2 and self.finish.knows_curvature
        return known and all(gain is not None and gain <= ENOUGH for gain in last)

    def _make_finish(self) -> QuasiNewton:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        self.finish = QuasiNewton(parameters)
        self._finish_memory = WarmStart(MORE_PROBES * settings.current().num_probes) if self.memory is None else None
        return self.finish

    def _evaluate(self) -> Tensor:
        """The loss, and its gradients in the parameters. Optimizers call it once a step, or more often."""
        self.model.zero_grad()
        try:
            with self._threads(), record_solves() as record, self._remembering(), settings.group(self.ranks):
                output = self.model(*self.model.train_inputs)
                loss = -self.mll(output, self.model.train_targets).sum()
                # the first rank's: what is decided by it, is decided alike
                value = self.ranks.number(loss.item(), loss.device, "likelihoods")
                if not math.isfinite(value):
                    self._fail(f"the loss is {value}")
                self.last_finite = self.now  # later evaluations of a step fall back to its first
                started = time.perf_counter()
                loss.backward()
                average_gradients(self.model, self.ranks)
                self._gradient_seconds += time.perf_counter() - started
        except (NanError, NotPSDError) as error:
            self._fail(f"the covariance cannot be factorized: {error}", error)
        self._losses.append(value)
        self._records.append(record)
        self.history.num_observations = output.event_shape.numel()
        gradients = [(name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None]
        self._refuse_non_finite("gradients", gradients)
        return loss.detach().new_tensor(value)

    def _threads(self) -> AbstractContextManager:
        """For the products of a step, with the observations and all probes; of other models, nothing is known."""
        grids = [part.grid for part in self.model.modules() if isinstance(part, GappyGridKernel)]
        if not grids:
            return nullcontext()
        columns = 1 + linear_operator.settings.num_trace_samples.value()
        flops = max(kron_matmul_flops([(size, size) for size in grid.shape], columns) for grid in grids)
        return threads_for(flops, columns * max(grid.num_cells for grid in grids))

    @property
    def _memory_now(self) -> WarmStart | None:
        return self.memory or self._finish_memory

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        """With what there is to remember; in the last steps the same probes every time, and solves without a bias."""
        memory = self._memory_now
        if memory is None:
            yield
            return
        with settings.warm_start(memory), nullcontext() if self.finish is None else memory.settling():
            yield

    def latest(self) -> dict[str, Any]:
        """The last step in a few words, for the bar."""
        noise = self.history.noise[-1]
        shown = {"loss": f"{self.history.loss[-1]:.4f}", "CG": self.history.iterations[-1]}
        return shown if noise is None else {**shown, "noise": f"{noise:.3g}"}

    # -- states to go back to ----------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Copies of all that the next step depends on."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        memory = self._memory_now
        remembered = {} if memory is None else {"warm_start": memory.state_dict()}
        return {
            **remembered,
            "step": len(self.history),
            "model": copy.deepcopy(self.model.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "finish": None if self.finish is None else copy.deepcopy(self.finish.state_dict()),
            "rng": {"cpu": torch.get_rng_state(), "cuda": cuda},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """All but the random state, which is the user's unless a checkpoint is resumed."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.finish = self._finish_memory = None
        if state["finish"] is not None:
            self._make_finish().load_state_dict(state["finish"])
        memory = self._memory_now
        if memory is not None and "warm_start" in state:
            memory.load_state_dict(state["warm_start"])
        elif memory is not None:
            memory.forget()

    def fall_back(self, file: Checkpoint | None) -> None:
        """To the last parameters with a finite loss, in the checkpoint too: it may hold the very ones that fail."""
        self.now = self.last_finite
        self.restore(self.now)
        self.history.stopped = "interrupted"
        if file is not None:
            with suppress(OSError):  # what failed first matters more
                file.save()

    def interrupt(self, error: BaseException, file: Checkpoint | None) -> None:
        """Undoes the unfinished step, saves, and tells the exception's reader where things stand."""
        self.restore(self.now)
        self.history._cut(self.now["step"])
        self.history.stopped = "interrupted"
        saved = ""
        if file is not None:
            with suppress(OSError):  # a full disk may be the very error that brought us here
                file.save()
                saved = f"; fit(..., checkpoint={str(file.path)!r}) goes on from there"
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
        extent = ", ".join(f"{name} in [{p.min():.3g}, {p.max():.3g}]" for name, p in trained[:8] if p.numel())
        where = f"not finite: {', '.join(bad)}" if bad else extent
        back = "The parameters are those it started from" if step == 0 else "The last with a finite loss are put back"
        raise FitError(
            f"fit, step {step}: {what} (parameters {where}). {back}. Try: a lower lr, torch.float64, or a "
            "noise_constraint such as GreaterThan(1e-4) on the likelihood; check the targets for NaN.",
            step,
            self.history,
        ) from cause


def _mean_noise(likelihood: Any) -> float | None:
    noise = getattr(likelihood, "noise", None)
    return float(noise.detach().double().mean()) if isinstance(noise, Tensor) else None
