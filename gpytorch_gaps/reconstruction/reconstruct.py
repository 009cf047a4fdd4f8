"""The posterior mean of a grid that is too large for a model: given hyperparameters, up to 10^9 cells, slab by slab.

The values are read once. Only the mask of the grid is kept in memory, one byte per cell. The unknowns are the weights
of the kernel's eigenvectors (:mod:`gpytorch_gaps.reconstruction.weight_space`). They give the mean at any point.

Several processes divide a grid by slices of its first axis: each reads, masks and writes its own slices, and they
exchange weights (:mod:`gpytorch_gaps.reconstruction.sharding`).
"""

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.distributed.communicator import Communicator, communicator_for, split_evenly
from gpytorch_gaps.reconstruction.checkpoint import WeightCheckpoint
from gpytorch_gaps.reconstruction.draws import draw_weights
from gpytorch_gaps.reconstruction.inputs import Kernels, Problem
from gpytorch_gaps.reconstruction.prior_mean import PriorMean, mean_of_slices
from gpytorch_gaps.reconstruction.report import ReconstructionReport, announce
from gpytorch_gaps.reconstruction.result import Reconstruction
from gpytorch_gaps.reconstruction.sharding import ShardedWeights, broadcast_basis, distribute_weights
from gpytorch_gaps.reconstruction.slabs import read_slabs
from gpytorch_gaps.reconstruction.variance import DrawnVariance
from gpytorch_gaps.reconstruction.weight_solver import WeightSolution, WeightSolver
from gpytorch_gaps.reconstruction.weight_space import WeightSpace
from gpytorch_gaps.utils.precision import full_float32


def reconstruct(
    values: Any,
    axes: Sequence[ArrayLike | Tensor | None] | None,
    kernels: Kernels,
    noise: float | Tensor,
    *,
    mean: PriorMean = 0.0,
    tolerance: float = 1e-2,
    max_iterations: int = 2000,
    memory: float = 2**31,
    checkpoint: str | Path | None = None,
    output: str | Path | None = None,
    draws: int = 0,
    seed: int = 0,
    noise_axis: int | None = None,
    progress: bool = True,
    group: Any = None,
) -> Reconstruction:
    """The posterior mean of ``y = f + noise`` on a grid with gaps, where f is a GP.

    Its kernel is a product over axes, or a sum of such products.

    Cost if gaps are scattered: about ten sweeps over the grid of ``4 M r`` FLOPs, with r the rank of the longest axis.
    A rough kernel keeps all its eigenvectors. The weights then need several times the memory of the grid.

    >>> import numpy as np, gpytorch_gaps as gaps
    >>> from gpytorch.kernels import RBFKernel
    >>> values = np.sin(np.arange(40.0))[:, None] * np.cos(np.arange(30.0))
    >>> values[10:13, 5:9] = np.nan
    >>> result = gaps.reconstruct(values, None, [RBFKernel(), RBFKernel()], noise=1e-4, progress=False)
    >>> result.slab(10, 13).isnan().any().item(), result.report.converged
    (False, True)

    :param values: the grid, with NaN in gaps: a tensor, an array, a ``numpy.memmap``, any object that is sliced like
        one, or an iterable of slabs along the first axis. Values are read once and not modified.
    :param axes: coordinates of each axis, shape (m_i,) or (m_i, d_i). None, for one axis or for all: 0, 1, .., m_i - 1.
    :param kernels: one GPyTorch kernel per axis, with its hyperparameters, or its matrix, shape (m_i, m_i). For a sum
        of products, one such list for each term: ``[[long_x, long_t], [short_x, short_t]]``.
    :param noise: the noise variance s2, above zero; or one for each level of `noise_axis`, shape (m_k,).
    :param mean: the prior mean of f: a number; a background with the shape of `values`, in memory or sliced; or a
        function of coordinates, such as the mean module of a model or a linear trend, shape (Q, D) -> (Q,).
    :param tolerance: largest error of the mean, at every point, in units of the posterior standard deviation there.
        ``report.error_in_std`` is the bound that was reached.
    :param max_iterations: largest total number of conjugate gradient iterations.
    :param memory: bytes that the preconditioner may take if gaps are clustered.
    :param checkpoint: a file from which the same call continues after an interruption.
    :param output: an ``.npy`` file to write the mean to. It appears once it is complete. Until then,
        ``<output>.partial`` and ``<output>.checkpoint`` let the same call continue after an interruption.
    :param draws: number of posterior draws from which standard deviations are estimated, such as 16; 0 for none. Each
        takes one solve like that of the mean, and one more pass over the grid. ``report.std_error`` is the error of
        the standard deviations.
    :param seed: seed of the draws.
    :param noise_axis: the axis whose levels differ in noise, such as an axis of stations or channels.
    :param progress: whether to show progress bars.
    :param group: a process group of ``torch.distributed``, such as the result of
        :func:`gpytorch_gaps.distributed.process_group`. All its members make the same call, divide the work by slices
        of the first axis, and get the same mean. An array contains the whole grid, and each process reads its slices.
        An iterable yields only the slabs of these slices (:func:`gpytorch_gaps.distributed.own_slices`). Files must be
        on a file system that all processes share.
    :return: the posterior mean, which is evaluated in parts.
    :raises ValueError: if an argument is wrong, if nothing is observed, or if a checkpoint belongs to another problem.
    :raises RankError: if another process of the group fails.
    """
    comm = communicator_for(group, "reconstruct")
    options: dict[str, Any] = {"mean": mean, "tolerance": tolerance, "max_iterations": max_iterations, "memory": memory}
    options.update(checkpoint=checkpoint, output=output, draws=draws, seed=seed, noise_axis=noise_axis)
    problem = comm.run_on_all("checking its arguments", lambda: Problem(values, axes, kernels, noise, **options))
    problem.require_same(values, comm)
    with torch.no_grad(), full_float32(), settings.progress(progress if comm.is_main else False):
        return _reconstruct(problem, comm)


def _reconstruct(problem: Problem, comm: Communicator) -> Reconstruction:
    """Decompose the kernels, read the values, solve for the weights, and write the output."""
    begun = time.perf_counter()
    basis = broadcast_basis(comm.run_on_all("decomposing the kernels", problem.basis), comm)
    decomposed = time.perf_counter()
    slabs, levels = problem.slabs, problem.levels
    weights = distribute_weights(basis, comm, split_evenly(basis.shape[0], comm.size, slabs.chunk))
    slabs.rows = weights.own_rows
    if problem.draws and isinstance(weights, ShardedWeights):
        raise ValueError(
            f"draws: got {problem.draws} for {weights.size} weights, divided among several processes; expected "
            "draws=0, a smoother kernel, which keeps fewer eigenvectors, or one process"
        )
    scale = None if levels.scale is None else levels.of_slices
    grid, rhs, norm = read_slabs(slabs, weights, partial(mean_of_slices, problem.mean, problem.grid), scale)
    space = WeightSpace(grid, weights, problem.noise, problem.memory)
    if not space.num_train:
        raise ValueError(f"values: got {space.num_cells} entries, all of them gaps; expected at least one observation")
    read = time.perf_counter()
    state = WeightCheckpoint(problem.checkpoint, weights, problem.noise, rhs)
    solver = WeightSolver(space, rhs, problem.tolerance, problem.max_iterations, problem.memory, state.watch)
    started, sent_before = time.perf_counter(), comm.traffic.total
    found = solver.solve(state.start)
    sent = comm.traffic.total - sent_before
    state.save(found.weights, found.iterations)
    misfit = space.misfit(found.weights, rhs, norm)
    truncation = problem.truncation_error if weights.size < space.num_cells else 0.0
    kernel_part = misfit * math.hypot(truncation, basis.error / problem.noise)
    report = replace(
        _report(solver, found, math.hypot(found.error_in_std, kernel_part)),
        misfit=misfit,
        seconds=time.perf_counter() - started,
        read_seconds=read - decomposed,
        setup_seconds=decomposed - begun,
        bytes_per_iteration=sent / max(1, found.iterations),
    )
    variance, report = _with_draws(problem, solver, state, report)
    announce(report, kernel_part)
    result = Reconstruction(
        problem.grid, problem.terms, weights, found.weights, problem.mean, slabs.dtype, report, variance, levels
    )
    if problem.output is not None:
        result.write(problem.output)
        if report.converged:
            comm.run_on_all("removing its checkpoint", state.remove)
    return result


def _with_draws(
    problem: Problem, solver: WeightSolver, state: WeightCheckpoint, report: ReconstructionReport
) -> tuple[DrawnVariance | None, ReconstructionReport]:
    """Variances from draws, if draws were requested, and the report with their accuracy."""
    if not problem.draws:
        return None, report
    started = time.perf_counter()
    draws = draw_weights(solver, problem.draws, problem.seed, state.draws, state.keep_draw)
    variance = DrawnVariance(solver.space, draws, problem.diagonals)
    errors = variance.errors(problem.seed)
    return variance, replace(
        report,
        num_draws=len(draws),
        std_error=errors.nearly_all,
        median_std_error=errors.median,
        std_truncation=errors.truncation,
        draw_seconds=time.perf_counter() - started,
    )


def _report(solver: WeightSolver, found: WeightSolution, error_in_std: float) -> ReconstructionReport:
    """The report of a solve, without times."""
    space, tolerance = solver.space, solver.tolerance
    basis, comm = space.basis, space.weights.comm
    expected = f"about {solver.expected_iterations:.0f} iterations if the gaps are scattered"
    return ReconstructionReport(
        method="spectral",
        iterations=found.iterations,
        residual=torch.tensor([found.residual], dtype=torch.float64),
        seconds=0.0,
        rank=found.rank,
        num_rhs=1,
        converged=error_in_std <= tolerance,
        tolerance=math.inf,  # the residual is only reported
        error_in_std=error_in_std,
        std_tolerance=tolerance,
        refinements=found.passes,
        flops=found.flops,
        expected_seconds=solver.expected_seconds(),
        reason=f"{'all eigenvectors of every axis are kept: this is fill-gaps; ' if basis.is_full else ''}{expected}",
        kernel_error=basis.error / space.noise,
        shape=basis.shape,
        num_train=space.num_train,
        ranks=basis.ranks,
        basis_size=space.weights.size,
        num_processes=comm.size,
        traffic=copy.deepcopy(comm.traffic),
    )
