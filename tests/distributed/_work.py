"""What ranks do in the tests: functions of a process group, in processes of their own."""

import os
import signal
import time
from contextlib import nullcontext
from functools import partial
from unittest import mock

import gpytorch
import linear_operator
import numpy as np
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, RFFKernel, ScaleKernel

import gpytorch_gaps as gaps
from gpytorch_gaps import distributed
from gpytorch_gaps.distributed.communicator import Communicator
from gpytorch_gaps.reconstruction import checkpoint as weight_checkpoint
from gpytorch_gaps.reconstruction import draws, learning_data, likelihood, sharding
from tests._ranks import JOIN_SECONDS


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
    if kind == "sum":
        return [kernels_of("RBF", count, length) for length in (lengthscale, lengthscale / 3)]
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
    with mock.patch.object(sharding, "_MAX_REPLICATED_WEIGHTS", 0 if kind == "Matern" else 2**20):
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
        "error_in_std": report.error_in_std,
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


def standard_deviations(group, shape, options, block):
    """:param block: cells whose noise is drawn at a time."""
    with mock.patch.object(draws, "_BLOCK_NUMBERS", block):
        return solve(group, shape, **options).std_slab(0, shape[0]).numpy()


def reconstruct_at(group, shape, options, points):
    result = solve(group, shape, **options)
    return result.at(points).numpy(), result.slab(0, shape[0]).numpy()


def reconstruct_differing(group, shape, by_rank):
    """Every rank with options of its own."""
    return told(solve(group, shape, **by_rank[Communicator(group).rank]))


def other_values(group, change):
    values = field((12, 7))
    if Communicator(group).rank == 1:
        if change == "one value":
            values[3, 3] = 0.5
        elif change == "dtype":
            values = values.astype("float32")
        elif change == "shape":
            values = values[:-1]
        elif change == "two swapped":
            values[0, :2] = values[0, 1::-1]
        elif change == "two swapped later":
            values[0, 1:3] = values[0, 2:0:-1]
        elif change == "mask":
            values = np.ma.masked_array(values, np.eye(12, 7))
        elif change == "infinite":
            values[11, 6] = np.inf
    if change == "mask" and Communicator(group).rank == 0:
        values = np.ma.masked_array(values, np.zeros((12, 7)))
    axes = axes_of(values.shape)
    if change == "axis" and Communicator(group).rank == 1:
        axes[1] = axes[1] + 1e-9
    kernels = kernels_of("RBF", 2, 0.3)
    if change == "kernel" and Communicator(group).rank == 1:
        kernels[0].lengthscale = 0.31
    if change == "nu":
        kernels[0] = MaternKernel(nu=2.5 if Communicator(group).rank == 1 else 1.5)
    return told(gaps.reconstruct(values, axes, kernels, 1e-2, group=group, progress=False))


def odd_views(group):
    """A tensor that begins at no multiple of eight bytes, and one that is transposed."""
    whole = torch.from_numpy(field((14, 7), dtype="float32"))
    kernels = kernels_of("RBF", 2, 0.3)
    for values in (whole[1:], whole.mT.contiguous().mT):
        result = gaps.reconstruct(values, None, kernels, 1e-2, group=group, progress=False)
    return told(result)


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
    own = distributed.own_slices(shape[0], group)
    values = field(shape)[own]
    slabs = (values[start : start + 2] for start in range(0, len(values), 2))
    return told(
        gaps.reconstruct(
            slabs, axes_of(shape), kernels_of("RBF", 2, 0.3), 1e-2, group=group, progress=False, tolerance=1e-9
        )
    )


def solve_until(group, shape, path, iterations, options):
    """Saves after every iteration; the last rank is killed after so many."""
    ranks, watch = Communicator(group), weight_checkpoint.WeightCheckpoint.watch

    def watched(self, weights, done):
        watch(self, weights, done)
        if done == iterations and ranks.rank == ranks.size - 1:
            fail("killed")

    with (
        mock.patch.object(weight_checkpoint, "_SECONDS_BETWEEN_SAVES", 0.0),
        mock.patch.object(weight_checkpoint.WeightCheckpoint, "watch", watched),
    ):
        return told(solve(group, shape, output=path, **options))


def write(group, shape, path, options):
    solve(group, shape, output=path, **options)
    return sorted(os.listdir(os.path.dirname(path)))


def dies_while_reading(group, how):
    """The last rank, at its first slab."""

    def slabs():
        own = distributed.own_slices(12, group)
        if Communicator(group).rank == Communicator(group).size - 1:
            fail(how)
        yield field((12, 7))[own]

    return told(gaps.reconstruct(slabs(), axes_of((12, 7)), kernels_of("RBF", 2, 0.3), 1e-2, group=group))


def fail(how):
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hangs":
        signal.pause()
    raise OSError("the disk is gone")


def collectives(group):
    """Every way of sending, with parts of different lengths, and what was counted."""
    ranks = Communicator(group)
    total = ranks.sum(torch.full((3,), float(ranks.rank + 1), dtype=torch.float64), "sums")
    parts = [torch.full((rank + 1, 2), 10.0 * ranks.rank + rank) for rank in range(ranks.size)]
    found = ranks.exchange(parts, [(ranks.rank + 1, 2)] * ranks.size, "transposes")
    number = ranks.from_main(float(ranks.rank), torch.device("cpu"), "numbers")
    return {
        "sum": total.tolist(),
        "exchanged": [part.tolist() for part in found],
        "number": number,
        "gathered": ranks.gather(ranks.rank, "words"),
        "bytes": ranks.traffic.bytes,
        "text": str(ranks.traffic),
    }


# -- training --------------------------------------------------------------------------------------------------------


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, covar_module):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = covar_module

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def model_of(case, shape=(9, 8)):
    """A model whose log-determinant is estimated; `case` says by which of the ways there are."""
    values = torch.from_numpy(field(shape, "block" if case == "clouds" else "random"))
    axes = [torch.linspace(0, 1, size, dtype=torch.float64) for size in shape]
    grid, x, y = gaps.from_array(values, axes)
    kernel = gaps.GappyGridKernel([RBFKernel(), MaternKernel(nu=2.5)], grid)
    covariance = ScaleKernel(kernel)
    likelihood = gaps.GappyGridLikelihood()
    if case == "a sum":
        covariance = ScaleKernel(kernel) + ScaleKernel(gaps.GappyGridKernel([MaternKernel(), RBFKernel()], grid))
    if case == "a noise per level":
        likelihood = gaps.GappyGridLikelihood(grid=grid, noise_axis=0)
    return Model(x, y, likelihood, covariance).double()


def train(group, case, *, steps=3, num_probes=6, rank=None, seed=0, own_loop=False, **options):
    """Losses, parameters and gradients of a few steps with a stochastic log-determinant."""
    if options.get("warm_start"):
        options["warm_start"] = gaps.WarmStart(num_probes, 1e-9, loosest=1e-9)
    torch.manual_seed(seed if Communicator(group).is_main else 99)
    model = model_of(case)
    with (
        linear_operator.settings.max_cholesky_size(0),
        linear_operator.settings.num_trace_samples(num_probes),
        gaps.settings.logdet_method("stochastic"),
        gaps.settings.preconditioner_rank(rank),
        gaps.settings.train_tolerance(1e-10),
        gaps.record_solves() as record,
    ):
        if own_loop:
            history = own_training_loop(model, steps, group, seed)
        else:
            history = gaps.fit(model, steps, group=group, progress=False, **options)
    return {
        "loss": history.loss,
        "noise": history.noise,
        "sent": history.sent_bytes,
        "text": "" if own_loop else str(history),
        "parameters": {name: p.detach().numpy() for name, p in model.named_parameters()},
        "gradients": {name: p.grad.numpy() for name, p in model.named_parameters()},
        "columns": sum(report.num_rhs for report in record),
        "errors": history.standard_error,
        "reasons": [report.reason for report in record.logdets],
        "after": torch.rand(1).item(),
    }


def own_training_loop(model, steps, group, seed):
    torch.manual_seed(seed)  # the same on every rank
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    history = gaps.History()
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        with gaps.settings.group(group):
            loss = -mll(model(*model.train_inputs), model.train_targets)
            loss.backward()
        distributed.average_gradients(model, group)
        optimizer.step()
        history.loss.append(loss.item())
    return history


def train_case(group, case, options):
    return train(group, case, **options)


def train_variant(group, variant):
    """Ways to train that are no more than Adam on everything."""
    torch.manual_seed(0 if Communicator(group).is_main else 99)
    model, options = model_of("one product"), {}
    if variant == "only the mean":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("mean"))
    elif variant == "a buffer":
        model.covar_module = ScaleKernel(RFFKernel(num_samples=5, num_dims=2)).double() + model.covar_module
    elif variant == "L-BFGS":
        options["optimizer"] = partial(torch.optim.LBFGS, max_iter=4)
    elif variant == "a prior":
        kernel = model.covar_module.base_kernel.kernels[0]
        kernel.register_prior("prior", gpytorch.priors.GammaPrior(3.0, 6.0), "lengthscale")
    elif variant == "float32":
        model = model.float()
    with (
        linear_operator.settings.max_cholesky_size(0),
        gaps.settings.logdet_method("stochastic"),
        gaps.settings.train_tolerance(1e-10 if variant != "float32" else 1e-6),
    ):
        history = gaps.fit(model, 3, group=group, progress=False, **options)
    return history.loss, {name: p.detach().numpy() for name, p in model.named_parameters()}


def train_differing(group, what):
    """The last rank is given another model, or other data."""
    model, options = model_of("one product"), {}
    if Communicator(group).rank == Communicator(group).size - 1:
        if what == "targets":
            model.train_targets[3] += 1e-6
        elif what == "inputs":
            model.train_inputs[0][3, 0] += 1e-9
        elif what == "dtype":
            model = model.float()
        elif what == "shape":
            model.set_train_data(model.train_inputs[0][1:], model.train_targets[1:], strict=False)
        elif what == "kernel":
            model = model_of("a sum")
        elif what == "nu":
            model.covar_module.base_kernel.kernels[1].nu = 0.5
        elif what == "patience":
            options["patience"] = 5
        elif what == "probes":
            linear_operator.settings.num_trace_samples._set_value(3)
    if what == "rate":
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        optimizer.param_groups[0]["lr"] = 0.1 if Communicator(group).is_main else 0.01
        options["optimizer"] = optimizer
    try:
        return gaps.fit(model, 2, group=group, progress=False, **options).loss
    finally:
        linear_operator.settings.num_trace_samples._set_value(10)


def train_until(group, path, steps, stop_at):
    """Killed, with the last rank's hand, after so many steps."""
    ranks, torch_step = Communicator(group), torch.optim.Adam.step
    taken = [0]

    def step(self, *args, **kwargs):
        taken[0] += 1
        if taken[0] > stop_at and ranks.rank == ranks.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch_step(self, *args, **kwargs)

    with mock.patch.object(torch.optim.Adam, "step", step):
        return train(group, "one product", steps=steps, checkpoint=path, checkpoint_every=1)


def train_by_hand(group, mistake):
    """A loop of its own, with one of the mistakes that are made there."""
    torch.manual_seed(0)
    model = model_of("one product")
    if mistake == "other data" and not Communicator(group).is_main:
        model.train_targets[3] += 0.1
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    model.train()
    with linear_operator.settings.max_cholesky_size(0), gaps.settings.logdet_method("stochastic"):
        for _ in range(2):
            optimizer.zero_grad()
            with gaps.settings.group(group):
                (-mll(model(*model.train_inputs), model.train_targets)).backward()
            if mistake != "gradients that are not averaged":
                distributed.average_gradients(model, group)
            optimizer.step()


# -- groups ----------------------------------------------------------------------------------------------------------


def wrong_group(group, what):
    import torch.distributed as dist

    given = "gloo" if what == "other type" else dist.new_group([0])
    try:
        Communicator(given)
    except ValueError as error:
        return str(error)
    return "member"


def groups_in_turn(group):
    """Groups of this process and the other, three times. The other process is late."""
    import torch.distributed as dist

    rank = Communicator(group).rank
    dist.destroy_process_group()  # that of the harness
    sums = []
    for _ in range(3):
        with distributed.process_group(timeout=JOIN_SECONDS) as own:
            sums.append(float(own.sum(torch.tensor(rank + 1.0), "sums")))
        time.sleep(0.3 * rank)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the harness to end
    return sums


def after_the_end(group):
    import torch.distributed as dist

    result = solve(group, (8, 6))
    dist.destroy_process_group()
    try:
        result.write("nowhere.npy")
    except distributed.RankError as error:
        return str(error)
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def benchmark(group, job):
    """A job of ``benchmarks.distributed``, which makes its own group where torchrun starts it."""
    from benchmarks import distributed as benchmarked

    with mock.patch.object(distributed, "process_group", return_value=nullcontext(group)):
        benchmarked.main(["--job", job])


def learn(group, shape, options):
    """Hyperparameters by `fit_reconstruction`, and which slices this process has read.

    :param options: its own, and `enough`: cells of the first part; `exact`: weights up to which nothing is estimated.
    """
    values, read = field(shape, options.pop("gaps_as", "random")), set()

    class Recorded:
        shape, dtype = values.shape, values.dtype

        def __getitem__(self, rows):
            read.update(range(*rows.indices(len(values))))
            return values[rows]

    kernels = kernels_of("RBF", len(shape), 0.5)
    kernels[0] = ScaleKernel(kernels[0])
    with (
        mock.patch.object(learning_data, "PART_CELLS", options.pop("enough", 2**21)),
        mock.patch.object(likelihood, "_MOST_EXACT_WEIGHTS", options.pop("exact", 1000)),
    ):
        learned = gaps.fit_reconstruction(
            Recorded(), axes_of(shape), kernels, 0.1, group=group, progress=False, **options
        )
    return {
        "read": read,
        "values": list(learned.values.values()),
        "deviations": list(learned.deviations.values()),
        "log_likelihood": learned.log_likelihood,
        "log_likelihood_error": learned.log_likelihood_error,
        "num_train": [step.num_train for step in learned.steps],
        "converged": learned.converged,
    }
