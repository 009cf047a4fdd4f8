"""What ranks do in the tests: functions of a process group, in processes of their own."""

import os
import signal
import time
from unittest import mock

import numpy as np
import torch
from gpytorch.kernels import MaternKernel, RBFKernel

import gpytorch_gaps as gaps
from gpytorch_gaps import distributed
from gpytorch_gaps.distributed.ranks import Ranks
from gpytorch_gaps.solvers import weights


def field(shape, gaps_as="random", dtype="float64", seed=0):
    """Smooth values with noise and gaps."""
    rng = np.random.default_rng(seed)
    values = np.zeros(())
    for axis, size in enumerate(shape):
        values = np.add.outer(values, np.sin((3 + axis) * np.linspace(0, 1, size) + axis))
    values = values + 0.1 * rng.standard_normal(shape)
    if gaps_as == "random":
        values[rng.random(shape) < 0.4] = np.nan
    elif gaps_as == "block":
        values[tuple(slice(size // 4, 3 * size // 4 + 1) for size in shape)] = np.nan
    elif gaps_as == "slices":
        values[1 : shape[0] // 2] = np.nan
    return values.astype(dtype)


def kernels_of(kind, count, lengthscale):
    made = []
    for _ in range(count):
        kernel = RBFKernel() if kind == "RBF" else MaternKernel(nu=1.5)
        kernel.lengthscale = lengthscale
        made.append(kernel)
    return made


def axes_of(shape):
    return [np.linspace(0, 1, size) for size in shape]


def solve(group, shape, *, gaps_as="random", kind="RBF", lengthscale=0.3, noise=1e-2, dtype="float64", **options):
    """:param kind: "Matern" keeps all eigenvectors, and has weights in parts however few they are."""
    with mock.patch.object(weights, "_FEW", 0 if kind == "Matern" else weights._FEW):
        return gaps.reconstruct(
            field(shape, gaps_as, dtype),
            axes_of(shape),
            kernels_of(kind, len(shape), lengthscale),
            noise,
            group=group,
            progress=False,
            **{"tolerance": 1e-9, **options},
        )


def told(result):
    """All that a test looks at."""
    report = result.report
    return {
        "rows": result.rows,
        "mean": result.slab(*result.rows).numpy(),
        "weights": tuple(result.weights.shape),
        "iterations": report.iterations,
        "converged": report.converged,
        "residual": report.worst_residual,
        "system_residual": report.system_residual,
        "basis_size": report.basis_size,
        "rank": report.rank,
        "num_train": report.num_train,
        "processes": report.num_processes,
        "messages": report.traffic.messages,
        "bytes": report.traffic.bytes,
        "bytes_per_iteration": report.bytes_per_iteration,
        "text": str(report),
        "ranks": report.ranks,
    }


def reconstruct(group, shape, options):
    return told(solve(group, shape, **options))


def reconstruct_at(group, shape, options, points):
    result = solve(group, shape, **options)
    return result.at(points).numpy(), result.slab(0, shape[0]).numpy()


def reconstruct_differing(group, shape, by_rank):
    """Every rank with options of its own."""
    return told(solve(group, shape, **by_rank[Ranks(group).rank]))


def other_values(group, change):
    values = field((12, 7))
    if Ranks(group).rank == 1:
        if change == "one value":
            values[3, 3] = 0.5
        elif change == "dtype":
            values = values.astype("float32")
        elif change == "shape":
            values = values[:-1]
        elif change == "two swapped":
            values[0, :2] = values[0, 1::-1]
        elif change == "infinite":
            values[11, 6] = np.inf
    axes = axes_of(values.shape)
    if change == "axis" and Ranks(group).rank == 1:
        axes[1] = axes[1] + 1e-9
    kernels = kernels_of("RBF", 2, 0.3)
    if change == "kernel" and Ranks(group).rank == 1:
        kernels[0].lengthscale = 0.31
    return told(gaps.reconstruct(values, axes, kernels, 1e-2, group=group, progress=False))


class Watched:
    """An array-like that remembers what was read of it."""

    def __init__(self, array):
        self._array, self.shape, self.dtype, self.read = array, array.shape, array.dtype, []

    def __getitem__(self, which):
        self.read.append((which.start, which.stop))
        return self._array[which]


def only_own_slices(group, path):
    values = Watched(np.load(path, mmap_mode="r"))
    result = gaps.reconstruct(
        values, axes_of(values.shape), kernels_of("RBF", 3, 0.3), 1e-2, group=group, progress=False, tolerance=1e-9
    )
    return {**told(result), "read": values.read}


def from_zarr(group, path):
    import zarr

    values = zarr.open_array(path, mode="r")
    return told(
        gaps.reconstruct(
            values, axes_of(values.shape), kernels_of("RBF", 2, 0.3), 1e-2, group=group, progress=False, tolerance=1e-9
        )
    )


def from_own_slabs(group, shape):
    own = distributed.own_slices(shape[0], Ranks(group))
    values = field(shape)[own]
    slabs = (values[start : start + 2] for start in range(0, len(values), 2))
    return told(
        gaps.reconstruct(
            slabs, axes_of(shape), kernels_of("RBF", 2, 0.3), 1e-2, group=group, progress=False, tolerance=1e-9
        )
    )


def write(group, shape, path, options):
    solve(group, shape, output=path, **options)
    return sorted(os.listdir(os.path.dirname(path)))


def dies_while_reading(group, how):
    """The last rank, at its first slab."""

    def slabs():
        own = distributed.own_slices(12, Ranks(group))
        if Ranks(group).rank == Ranks(group).size - 1:
            fail(how)
        yield field((12, 7))[own]

    return told(gaps.reconstruct(slabs(), axes_of((12, 7)), kernels_of("RBF", 2, 0.3), 1e-2, group=group))


def fail(how):
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hangs":
        time.sleep(60)
    raise OSError("the disk is gone")


def collectives(group):
    """Every way of sending, with parts of different lengths, and what was counted."""
    ranks = Ranks(group)
    total = ranks.sum(torch.full((3,), float(ranks.rank + 1), dtype=torch.float64), "sums")
    parts = [torch.full((rank + 1, 2), 10.0 * ranks.rank + rank) for rank in range(ranks.size)]
    found = ranks.exchange(parts, [(ranks.rank + 1, 2)] * ranks.size, "transposes")
    number = ranks.number(float(ranks.rank), torch.device("cpu"), "numbers")
    return {
        "sum": total.tolist(),
        "exchanged": [part.tolist() for part in found],
        "number": number,
        "gathered": ranks.gather(ranks.rank, "words"),
        "bytes": ranks.traffic.bytes,
        "text": str(ranks.traffic),
    }
