"""The curvature of the likelihood at the end of a fit, by differences of gradients.

Steps are a tenth of a standard deviation. They are short enough for a difference to approximate a derivative, and long
enough for estimated gradients. These have the same probes at all points, and solves to ``settings.train_tolerance``.
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.reports import NotConvergedWarning
from gpytorch_gaps.training.coordinates import Coordinates
from gpytorch_gaps.training.history import FitError
from gpytorch_gaps.training.uncertainty import HyperparameterUncertainty

_STEP = 0.1  # step of differences, in standard deviations given all other hyperparameters
_LONGEST_STEP = 0.1  # longest step of a logarithm
_FIRST_STEP, _FIRST_STEP_OF_VALUES = 0.02, 1e-3  # steps that determine the others: of a logarithm, relative to a value
_WIDEST = 2.0  # largest standard deviation of a logarithm, along any direction
_WIDEST_VALUE = 1e3  # the same for a value without bounds, in standard deviations given all others
_FAR = 0.125  # nats from the optimum: half a standard deviation
_MEAN_TOLERANCE = 1e-4  # tolerance of the mode of a LaplaceGP


def measure(run: Any) -> HyperparameterUncertainty | None:
    """The uncertainty of the hyperparameters; None, with a warning, if there are no derivatives.

    :param run: the :class:`~gpytorch_gaps.training.run.TrainingRun`, after its last step.
    """
    if run.finish is None and not run.begin_finish():
        warnings.warn(
            "fit: uncertainty: not known, since two evaluations of the likelihood differ. Try: "
            'settings.logdet_method("exact"), and no dropout',
            NotConvergedWarning,
            stacklevel=4,
        )
        return None
    coordinates = Coordinates(run.model)
    at = coordinates.present()
    bounded = coordinates.is_bounded.to(at.device)
    current = settings.current()
    tolerance = min(_MEAN_TOLERANCE, current.mean_tolerance or _MEAN_TOLERANCE)
    try:
        with coordinates.restored(), run.repeatable(), settings.mean_tolerance(tolerance):

            def gradient(point: Tensor) -> Tensor:
                coordinates.set(point)
                run._evaluate()
                return run.history.num_observations * coordinates.gradient(point)

            here = gradient(at)
            hessian, conditional = _hessian(gradient, at, here, bounded)
    except FitError as error:
        warnings.warn(
            f"fit: uncertainty: not known, since derivatives fail: {error}", NotConvergedWarning, stacklevel=4
        )
        return None
    finally:
        run.model.zero_grad()
    axes, unknown = _axes(hessian, torch.where(bounded, 1.0, _WIDEST_VALUE / _WIDEST * conditional))
    gain = 0.5 * float((axes.mT @ here).square().sum())
    if gain > _FAR:
        warnings.warn(
            f"fit: uncertainty: the optimum is expected to be {gain:.2g} nats above the last hyperparameters, "
            f"{(2.0 * gain) ** 0.5:.2g} standard deviations away; standard errors hold at an optimum. Try: more steps, "
            "with patience",
            NotConvergedWarning,
            stacklevel=4,
        )
    with torch.enable_grad():
        own = at.clone().requires_grad_()
        values = coordinates.values(own)
        (slopes,) = torch.autograd.grad(values.sum(), own)
    covariance = axes @ axes.mT
    names = coordinates.names
    return HyperparameterUncertainty(
        names=names,
        values=values.detach(),
        standard_errors=slopes.abs() * covariance.diagonal().sqrt(),
        coordinates=at,
        covariance=covariance,
        axes=axes,
        unknown=[name for name, flag in zip(names, unknown.tolist(), strict=True) if flag],
        expected_gain=gain,
    )


def _hessian(gradient: Any, at: Tensor, here: Tensor, bounded: Tensor) -> tuple[Tensor, Tensor]:
    """The derivatives of the gradient, symmetrised, and the standard deviation of every entry given all others.

    shape: (P, P), (P,)
    """
    first = torch.where(bounded, _FIRST_STEP, _FIRST_STEP_OF_VALUES * at.abs().clamp_min(1.0))
    rows, conditional = [], []
    for entry, tried in enumerate(first.tolist()):
        unit = torch.zeros_like(at)
        unit[entry] = 1.0
        curvature = float((gradient(at + tried * unit) - here)[entry]) / tried
        deviation = curvature**-0.5 if curvature > 0.0 else tried / _STEP
        step = min(_STEP * deviation, _LONGEST_STEP) if bool(bounded[entry]) else _STEP * deviation
        rows.append((gradient(at + step * unit) - gradient(at - step * unit)) / (2.0 * step))
        conditional.append(deviation)
    hessian = torch.stack(rows)
    return 0.5 * (hessian + hessian.mT), at.new_tensor(conditional)


def _axes(hessian: Tensor, units: Tensor) -> tuple[Tensor, Tensor]:
    """Principal axes of the covariance, one standard deviation long, and flags of coordinates that are not determined.

    Negative and small eigenvalues are raised until standard deviations are `_WIDEST` units. shape: (P, P), (P,)

    :param units: units in which coordinates are compared. shape: (P,)
    """
    eigenvalues, vectors = torch.linalg.eigh(units.unsqueeze(-1) * hessian * units)
    least = _WIDEST**-2
    share = vectors[:, eigenvalues < least].square().sum(-1)
    return units.unsqueeze(-1) * vectors / eigenvalues.clamp_min(least).sqrt(), share > 0.5
