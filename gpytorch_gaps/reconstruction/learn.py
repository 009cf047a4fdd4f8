"""Hyperparameters of a grid that is too large for a model, by its exact marginal likelihood.

A step of Fisher's scoring (:mod:`gpytorch_gaps.reconstruction.scoring`) takes one pass over the values, one solve for
the mean, one solve per probe, and products of the size of the basis. The first steps use every k-th cell, the last
steps all cells.

This function is separate from :func:`reconstruct` for two reasons: it reads the values once per step, a reconstruction
only once; and hyperparameters are useful for other grids and other methods too.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpytorch.kernels import Kernel
from numpy.typing import ArrayLike
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.distributed.communicator import communicator_for
from gpytorch_gaps.reconstruction.inputs import Problem
from gpytorch_gaps.reconstruction.learned import LearnedKernels
from gpytorch_gaps.reconstruction.learner import Learner
from gpytorch_gaps.reconstruction.prior_mean import PriorMean
from gpytorch_gaps.utils.checks import check_integer, check_number
from gpytorch_gaps.utils.precision import full_float32
from gpytorch_gaps.utils.progress import with_bar


def fit_reconstruction(
    values: Any,
    axes: Sequence[ArrayLike | Tensor | None] | None,
    kernels: Sequence[Kernel | Tensor],
    noise: float | Tensor,
    *,
    mean: PriorMean = 0.0,
    steps: int = 30,
    tolerance: float = 0.1,
    probes: int = 8,
    max_iterations: int = 2000,
    memory: float = 2**31,
    checkpoint: str | Path | None = None,
    seed: int = 0,
    progress: bool = True,
    group: Any = None,
) -> LearnedKernels:
    """Learn the hyperparameters of the kernels and the noise from up to 10^9 cells, for :func:`reconstruct`.

    It maximizes the marginal likelihood of all observations, and needs no more memory than a reconstruction. The values
    are read once per step. Kernels must be smooth enough to truncate: if all eigenvectors are kept, the weights take
    several times the memory of the grid.

    >>> import numpy as np, gpytorch_gaps as gaps
    >>> from gpytorch.kernels import RBFKernel, ScaleKernel
    >>> x, noise = np.linspace(0, 1, 40), 0.1 * np.random.default_rng(0).standard_normal((40, 40))
    >>> values = np.sin(9 * x)[:, None] * np.cos(7 * x) + noise
    >>> values[10:13, 5:9] = np.nan
    >>> kernels = [ScaleKernel(RBFKernel()), RBFKernel()]
    >>> learned = gaps.fit_reconstruction(values, [x, x], kernels, noise=1.0, progress=False)
    >>> learned.converged, round(learned.noise, 3)
    (True, 0.01)
    >>> result = gaps.reconstruct(values, [x, x], learned.kernels, learned.noise, progress=False)

    :param values: the grid, with NaN in gaps: a tensor, an array, or any object that is sliced like one. Not modified.
    :param axes: coordinates of each axis, as in :func:`reconstruct`.
    :param kernels: one GPyTorch kernel per axis, with starting values, or the matrix of an axis without
        hyperparameters. Parameters that do not require a gradient are not learned. A variance is learned if one of the
        kernels is a ``ScaleKernel``. The kernels are not modified.
    :param noise: the noise variance to start from.
    :param mean: the prior mean, as in :func:`reconstruct`.
    :param steps: largest number of steps.
    :param tolerance: largest length of the last step, in standard deviations of the hyperparameters given the data.
    :param probes: largest number of random probes. Each takes one solve per step. If gaps are scattered, two are
        enough. If the basis is small, none are needed. ``probe_error`` of a step is the error that they cause.
    :param max_iterations: largest number of conjugate gradient iterations per solve.
    :param memory: bytes that the preconditioner may take if gaps are clustered.
    :param checkpoint: a file that is written after every step. The same call continues from it.
    :param seed: seed of the probes.
    :param progress: whether to show progress bars.
    :param group: a process group of ``torch.distributed``, as in :func:`reconstruct`. Each process reads its slices of
        the first axis at every step, and all get the same hyperparameters.
    :return: the kernels and the noise.
    :raises ValueError: if an argument is wrong, if nothing is observed, or if a checkpoint belongs to another problem.
    :raises RankError: if another process of the group fails.
    """
    if getattr(values, "shape", None) is None:
        raise ValueError(f"values: got {type(values).__name__}, expected an array: every step reads the values again")
    comm = communicator_for(group, "fit_reconstruction")
    options: dict[str, Any] = {"mean": mean, "max_iterations": max_iterations, "memory": memory, "seed": seed}
    problem = comm.run_on_all(
        "checking its arguments", lambda: Problem(values, axes, kernels, noise, checkpoint=checkpoint, **options)
    )
    steps = check_integer("steps", steps, at_least=1)
    probes = check_integer("probes", probes, at_least=2)
    tolerance = check_number("tolerance", tolerance, above=0)
    problem.require_same(values, comm)
    comm.require_same({"steps": steps, "probes": probes, "tolerance": tolerance})
    with torch.no_grad(), full_float32(), settings.progress(progress if comm.is_main else False):
        learner = Learner(problem, values, probes, tolerance, comm)
        with with_bar(None, "learning", total=steps, unit="step") as bar:
            bar.update(len(learner.steps))
            while len(learner.steps) < steps and not learner.converged:
                learner.step()
                bar.set_postfix(distance=f"{learner.steps[-1].distance:.2g}", refresh=False)
                bar.update()
        return learner.result()
