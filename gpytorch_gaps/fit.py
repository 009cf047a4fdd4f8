"""Fits the hyperparameters of an ExactGP: ascends its log marginal likelihood, and keeps account of every step.

>>> history = fit(model, steps=200, checkpoint="run.pt")  # doctest: +SKIP
>>> print(history)  # doctest: +SKIP
84 steps, plateau reached: loss 1.31 -> 0.207 nats per observation (best 0.206), noise 0.0102, 903 CG iterations, 12.1 s
"""

import copy
import hashlib
import math
import numbers
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from gpytorch.constraints import Interval
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from gpytorch.models import ExactGP
from gpytorch.priors import Prior
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor
from torch.optim import Adam, Optimizer
from tqdm import tqdm

from gpytorch_gaps.grid import CartesianGrid
from gpytorch_gaps.reports import SolveRecord, record_solves

PLATEAU_WINDOW = 5
"""Losses averaged before they are compared, so that neither Adam's overshoot nor noisy log-determinants end a run."""

_CHECKPOINT_FORMAT = 1


@dataclass
class History:
    """What every step of a fit did, one entry a step, each at the parameters *before* that step's update.

    CG iterations, residuals and standard errors are those that this package's operators report.
    """

    loss: list[float] = field(default_factory=list)
    """Negative log marginal likelihood (and priors) per observation, summed over a batch of GPs."""
    noise: list[float | None] = field(default_factory=list)
    """Mean of ``likelihood.noise``; None if there is none."""
    iterations: list[int] = field(default_factory=list)
    """Of conjugate gradients: solves and log-determinants, over all evaluations of the loss in the step."""
    worst_residual: list[float | None] = field(default_factory=list)
    """Largest relative residual of the step's solves; None if none were reported."""
    standard_error: list[float | None] = field(default_factory=list)
    """Of the log-determinant, per observation; 0 where it is exact, None where it is biased or not reported."""
    seconds: list[float] = field(default_factory=list)
    num_observations: int = 0
    """Of each GP: ``loss * num_observations`` is in nats."""
    stopped: str = ""
    """``"steps"``, ``"plateau"`` or ``"interrupted"``; empty under way."""

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def best_loss(self) -> float:
        return min(self.loss, default=math.inf)

    @property
    def converged(self) -> bool:
        """Whether the loss had stopped falling, rather than the steps run out."""
        return self.stopped == "plateau"

    def as_dict(self) -> dict[str, list]:
        """The columns, of one length, as plotting and ``pandas.DataFrame`` take them."""
        return {name: list(values) for name, values in vars(self).items() if isinstance(values, list)}

    def __str__(self) -> str:
        ended = {"steps": "all done", "plateau": "plateau reached"}.get(self.stopped, self.stopped or "under way")
        if not self.loss:
            return f"0 steps, {ended}"
        noise = "" if self.noise[-1] is None else f", noise {self.noise[-1]:.3g}"
        return (
            f"{len(self)} steps, {ended}: loss {self.loss[0]:.4g} -> {self.loss[-1]:.4g} "
            f"nats per observation (best {self.best_loss:.4g}){noise}, {sum(self.iterations)} CG iterations, "
            f"{sum(self.seconds):.3g} s"
        )

    def _cut(self, length: int) -> None:
        """Forgets steps that were not completed."""
        for values in vars(self).values():
            if isinstance(values, list):
                del values[length:]


class FitError(RuntimeError):
    """Loss, gradient or parameters are no longer finite; `history` holds the steps up to there."""

    def __init__(self, message: str, step: int, history: History) -> None:
        super().__init__(message)
        self.step, self.history = step, history


def fit(
    model: ExactGP,
    steps: int = 100,
    *,
    lr: float = 0.1,
    optimizer: Optimizer | Callable[..., Optimizer] | None = None,
    progress: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 10,
    patience: int | None = 20,
    min_improvement: float = 0.1,
    mll: MarginalLogLikelihood | None = None,
) -> History:
    """Maximises the log marginal likelihood of `model` over its parameters that require a gradient.

    The model and its likelihood are left in eval mode, ready to predict, however the fit ends. Should loss or gradient
    become NaN or infinite, a :class:`FitError` is raised and the model put back to its last parameters with a finite
    loss. Any other exception, Ctrl-C included, passes through once the unfinished step is undone and, with
    `checkpoint`, the state saved; it carries the steps done as its attribute `history`.

    :param steps: in all, those of a resumed checkpoint included.
    :param lr: the learning rate; a ready optimizer has its own.
    :param optimizer: a class or function called as ``optimizer(parameters, lr=lr)``, or a ready Optimizer of
        parameters of the model. Adam by default. L-BFGS works: a step may evaluate the loss many times.
    :param progress: whether to show a bar, on stderr.
    :param checkpoint: a file to which the state is saved at the start, every `checkpoint_every` steps and at the end.
        If it exists, the run resumes from it, with its parameters, optimizer and torch random state: the trajectory is
        that of an uninterrupted run, bit for bit on the same machine. A finished run returns at once. A checkpoint of
        other data, parameters or optimizer is refused.
    :param patience: stops after so many steps without improvement of the mean of the last five losses by
        `min_improvement` nats (all observations together, not per observation); None never stops early.
    :param mll: maximised in place of ``ExactMarginalLogLikelihood(model.likelihood, model)``.
    """
    _check_numbers(steps, lr, checkpoint_every, patience, min_improvement)
    mll = _checked_mll(model, mll)
    run = _Run(model, mll, _make_optimizer(model, optimizer, lr))
    plateau = _Plateau(patience, min_improvement)
    file = None if checkpoint is None else _Checkpoint(Path(checkpoint), run)
    if file is not None:
        file.resume_or_start()
    for loss in run.history.loss:
        plateau.add(loss * run.history.num_observations)
    model.train()
    try:
        with tqdm(total=int(steps), initial=len(run.history), desc="fit", disable=not progress) as bar:
            while len(run.history) < steps and not plateau.reached:
                run.step()
                plateau.add(run.history.loss[-1] * run.history.num_observations)
                bar.set_postfix(run.latest(), refresh=False)
                bar.update()
                if file is not None and len(run.history) % checkpoint_every == 0:
                    file.save()
        run.history.stopped = "plateau" if plateau.reached else "steps"
        if file is not None:
            file.save()
    except FitError:
        run.fall_back(file)
        raise
    except BaseException as error:
        run.interrupt(error, file)
        raise
    finally:
        model.eval()
    return run.history


class _Plateau:
    """Counts the steps since the windowed mean last fell by enough."""

    def __init__(self, patience: int | None, min_improvement: float) -> None:
        self._patience, self._min_improvement = patience, min_improvement
        self._window: deque[float] = deque(maxlen=PLATEAU_WINDOW)
        self._best, self._waited = math.inf, 0

    def add(self, nats: float) -> None:
        self._window.append(nats)
        if len(self._window) < PLATEAU_WINDOW:
            return
        mean = sum(self._window) / PLATEAU_WINDOW
        if mean < self._best - self._min_improvement:
            self._best, self._waited = mean, 0
        else:
            self._waited += 1

    @property
    def reached(self) -> bool:
        return self._patience is not None and self._waited >= self._patience


class _Run:
    """A fit under way: its steps, and the states to which it can be put back."""

    def __init__(self, model: ExactGP, mll: MarginalLogLikelihood, optimizer: Optimizer) -> None:
        self.model, self.mll, self.optimizer = model, mll, optimizer
        self.history = History()
        self._losses: list[float] = []  # of every evaluation in this step
        self._records: list[SolveRecord] = []  # likewise
        self.begin()

    def begin(self) -> None:
        """Takes the present state as the one to go on from, and to fall back to."""
        self.now = self.last_finite = self.snapshot()

    def step(self) -> None:
        started = time.perf_counter()
        noise = _mean_noise(self.model.likelihood)
        self._records.clear()
        self._losses.clear()
        self.optimizer.step(self._evaluate)  # type: ignore[arg-type]  # annotated as float, but documented as Tensor
        if not self._losses:
            _refuse("optimizer", "one that never evaluates the loss", "one whose step(closure) calls the closure")
        self._refuse_non_finite(
            "parameters", [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        )
        history = self.history
        history.noise.append(noise)
        history.iterations.append(sum(map(_iterations, self._records)))
        residuals = [solve.worst_residual for record in self._records for solve in record]
        history.worst_residual.append(max(residuals, default=None))
        error = _logdet_error(self._records[0])
        history.standard_error.append(None if error is None else error / history.num_observations)
        history.seconds.append(time.perf_counter() - started)
        history.loss.append(self._losses[0])
        self.now = self.snapshot()

    def _evaluate(self) -> Tensor:
        """The loss, and its gradients in the parameters. Optimizers call it once a step, or more often."""
        self.model.zero_grad()
        try:
            with record_solves() as record:
                output = self.model(*self.model.train_inputs)
                loss = -self.mll(output, self.model.train_targets).sum()
                if not loss.isfinite():
                    self._fail(f"the loss is {loss.item()}")
                self.last_finite = self.now  # later evaluations of a step fall back to its first
                loss.backward()
        except (NanError, NotPSDError) as error:
            self._fail(f"the covariance cannot be factorized: {error}", error)
        self._losses.append(loss.item())
        self._records.append(record)
        self.history.num_observations = output.event_shape.numel()
        gradients = [(name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None]
        self._refuse_non_finite("gradients", gradients)
        return loss.detach()

    def latest(self) -> dict[str, Any]:
        """The last step in a few words, for the bar."""
        noise = self.history.noise[-1]
        shown = {"loss": f"{self.history.loss[-1]:.4f}", "CG": self.history.iterations[-1]}
        return shown if noise is None else {**shown, "noise": f"{noise:.3g}"}

    # -- states to go back to ----------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Copies of all that the next step depends on."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return {
            "step": len(self.history),
            "model": copy.deepcopy(self.model.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "rng": {"cpu": torch.get_rng_state(), "cuda": cuda},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """All but the random state, which is the user's unless a checkpoint is resumed."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def fall_back(self, file: "_Checkpoint | None") -> None:
        """To the last parameters with a finite loss, in the checkpoint too: it may hold the very ones that fail."""
        self.now = self.last_finite
        self.restore(self.now)
        self.history.stopped = "interrupted"
        if file is not None:
            with suppress(OSError):  # what failed first matters more
                file.save()

    def interrupt(self, error: BaseException, file: "_Checkpoint | None") -> None:
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


class _Checkpoint:
    """A file with a run's last complete step, as tensors and plain Python data, and the problem it belongs to."""

    def __init__(self, path: Path, run: _Run) -> None:
        if path.is_dir():
            _refuse("checkpoint", f"the directory {path}", "a file, which need not exist")
        self.path, self.run, self.problem = path, run, _problem(run)

    def resume_or_start(self) -> None:
        if self.path.exists():
            self._resume(self._read())
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.save()  # a path that cannot be written is better found now than in an hour

    def save(self) -> None:
        """Atomic: whoever is killed meanwhile leaves the file before or the file after."""
        state, history = self.run.now, copy.deepcopy(self.run.history)
        history._cut(state["step"])
        content = {"format": _CHECKPOINT_FORMAT, "problem": self.problem, "history": vars(history), **state}
        partial = self.path.with_name(self.path.name + ".tmp")
        try:
            with partial.open("wb") as stream:
                torch.save(content, stream)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(partial, self.path)
        finally:
            partial.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        advice = "expected one written by fit; move it away to start afresh"
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:
            kind = type(error).__name__  # torch's message would send the reader elsewhere
            raise ValueError(f"checkpoint: {self.path} cannot be read ({kind}); {advice}") from error
        expected = {"format", "problem", "history", *self.run.now}
        if not isinstance(content, dict) or not expected <= content.keys() or content["format"] != _CHECKPOINT_FORMAT:
            raise ValueError(f"checkpoint: {self.path} is not a checkpoint of this version; {advice}")
        return content

    def _resume(self, content: dict[str, Any]) -> None:
        if differences := _differences(content["problem"], self.problem):
            raise ValueError(
                f"checkpoint: {self.path} belongs to another run: {'; '.join(differences)}. Expected the same data, "
                "model and optimizer; give another path, or move the file away to start afresh"
            )
        self.run.restore(content)
        self.run.history = History(**{**content["history"], "stopped": ""})
        torch.set_rng_state(content["rng"]["cpu"])
        if torch.cuda.is_available():
            for device, state in enumerate(content["rng"]["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(state, device)
        self.run.begin()


def _problem(run: _Run) -> dict[str, Any]:
    """What a checkpoint must share with the run that resumes it."""
    model, optimizer = run.model, run.optimizer
    named = list(model.named_parameters())
    fixed = [parameter for _, parameter in named if not parameter.requires_grad]
    for module in model.modules():
        if isinstance(module, Interval | Prior | CartesianGrid):
            fixed.extend(module.buffers())
    return {
        "train_inputs": [_fingerprint(inputs) for inputs in model.train_inputs],
        "train_targets": _fingerprint(model.train_targets),
        "modules": {name or "model": type(module).__name__ for name, module in model.named_modules()},
        "parameters": {name: f"{tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' fixed'}" for name, p in named},
        "fixed values (parameters, bounds, priors, grid)": _digest(*fixed),
        "objective": type(run.mll).__name__,
        "optimizer": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        "parameters of each optimizer group": [len(group["params"]) for group in optimizer.param_groups],
        "lr": float(optimizer.defaults.get("lr", math.inf)),
    }


def _fingerprint(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} #{_digest(tensor)}"


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]


def _differences(theirs: dict[str, Any], ours: dict[str, Any], prefix: str = "") -> list[str]:
    """In words, entry by entry."""
    found = []
    for key in dict.fromkeys([*theirs, *ours]):
        there, here = theirs.get(key, "absent"), ours.get(key, "absent")
        if isinstance(there, dict) and isinstance(here, dict):
            found += _differences(there, here, f"{prefix}{key}: ")
        elif there != here:
            found.append(f"{prefix}{key}: {there} in the checkpoint, {here} here")
    return found


def _iterations(record: SolveRecord) -> int:
    """Of solves and log-determinants. Probes solved along with the right-hand side are reported as both: count one."""
    shared = Counter(solve.iterations for solve in record if "log-determinant" in solve.reason)
    total = sum(solve.iterations for solve in record)
    for logdet in record.logdets:
        if shared[logdet.iterations]:
            shared[logdet.iterations] -= 1
        else:
            total += logdet.iterations
    return total


def _logdet_error(record: SolveRecord) -> float | None:
    """Standard error of the sum of all log-determinants, whose probes are independent."""
    errors = [logdet.standard_error for logdet in record.logdets]
    known = [error.double().square().sum().item() for error in errors if error is not None]
    return math.sqrt(sum(known)) if errors and len(known) == len(errors) else None


def _mean_noise(likelihood: Any) -> float | None:
    noise = getattr(likelihood, "noise", None)
    return float(noise.detach().double().mean()) if isinstance(noise, Tensor) else None


def _checked_mll(model: ExactGP, mll: MarginalLogLikelihood | None) -> MarginalLogLikelihood:
    if not isinstance(model, ExactGP):
        _refuse("model", type(model).__name__, "a gpytorch.models.ExactGP")
    if model.train_inputs is None or model.train_targets is None or not model.train_targets.numel():
        _refuse("model", "one without training data", "train_inputs and train_targets; see set_train_data")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        _refuse("model", "no parameter that requires a gradient", "at least one to fit")
    if mll is None:
        return ExactMarginalLogLikelihood(model.likelihood, model)
    if not isinstance(mll, MarginalLogLikelihood):
        _refuse("mll", type(mll).__name__, "a gpytorch.mlls.MarginalLogLikelihood")
    if mll.model is not model or mll.likelihood is not model.likelihood:
        _refuse("mll", "one of another model or likelihood", "that of model and model.likelihood")
    return mll


def _make_optimizer(model: ExactGP, given: Optimizer | Callable[..., Optimizer] | None, lr: float) -> Optimizer:
    if not isinstance(given, Optimizer):
        if given is not None and not callable(given):
            _refuse("optimizer", type(given).__name__, "an Optimizer, its class, or a function of (params, lr)")
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        given = (given or Adam)(parameters, lr=lr)
        if not isinstance(given, Optimizer):
            _refuse("optimizer", f"a function that returns {type(given).__name__}", "one that returns an Optimizer")
    own = set(map(id, model.parameters()))
    foreign = sum(id(parameter) not in own for group in given.param_groups for parameter in group["params"])
    if foreign:
        _refuse("optimizer", f"one of {foreign} parameters that are not the model's", "one of the model's own only")
    return given


def _check_numbers(steps: Any, lr: Any, checkpoint_every: Any, patience: Any, min_improvement: Any) -> None:
    for name, value, minimum in (
        ("steps", steps, 0),
        ("checkpoint_every", checkpoint_every, 1),
        ("patience", patience, 1),
    ):
        whole = isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= minimum
        if not whole and not (name == "patience" and value is None):
            _refuse(name, repr(value), f"an integer, at least {minimum}{' or None' if name == 'patience' else ''}")
    for name, value in (("lr", lr), ("min_improvement", min_improvement)):
        real = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
        if not real or value < 0 or (name == "lr" and value == 0):
            _refuse(name, repr(value), f"a finite number, {'above' if name == 'lr' else 'at least'} 0")


def _refuse(argument: str, came: str, expected: str) -> NoReturn:
    raise ValueError(f"fit: {argument}: got {came}, expected {expected}")
