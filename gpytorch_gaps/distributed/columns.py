"""A training step on several processes: each solves for some of the columns of the likelihood.

The marginal log likelihood of many observations takes one solve for the data and one for each probe of the
log-determinant, all independent of each other. Every process holds the model and the data, and solves for its share of
these columns. Value and gradient are sums over processes:

    log|A| ~ 1/k sum_j f(z_j) = sum_processes  (k_own / k) (1 / k_own sum_{own j} f(z_j))

A step sends a few numbers and the gradients of the parameters, and nothing while iterating. All processes draw the same
probes, so that the sum equals that of a single process with the same seed.
"""

import math
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Module, Parameter

from gpytorch_gaps.distributed.communicator import Communicator, RankError, split_evenly

T = TypeVar("T")
_SAME = 1e-6  # relative: rounding on another machine differs by less, another step of training by more


class _SumOverRanks(Function):
    """A sum over processes. In the backward pass, each process gets the gradient with respect to its own part.

    It is multiplied by the number of processes, because gradients are averaged over the processes later.
    """

    @staticmethod
    def forward(ctx: Any, ranks: Communicator, own: Tensor, *of: Tensor) -> Tensor:
        ctx.size, ctx.others = ranks.size, len(of)
        return ranks.sum(own.detach().clone(), "likelihoods")

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return None, grad_outputs[0] * ctx.size, *[None] * ctx.others


def sum_over_ranks(ranks: Communicator, own: Tensor, of: Iterable[Tensor] = ()) -> Tensor:
    """The sum of a tensor over processes, whose gradients :func:`average_gradients` completes.

    :param of: tensors to keep in the autograd graph of processes whose contribution is zero.
    """
    return own if ranks.size == 1 else _SumOverRanks.apply(ranks, own, *of)


class Share:
    """The columns of a likelihood that this process solves for: some probes and, on the main process, the data.

    :param num_probes: number of probes of all processes together.
    """

    def __init__(self, ranks: Communicator, num_probes: int) -> None:
        self.ranks, self.num_probes = ranks, num_probes
        own = split_evenly(num_probes + 1, ranks.size)[ranks.rank]  # the data are column 0
        self.has_data = own.start == 0
        self.probes = slice(max(own.start - 1, 0), max(own.stop - 1, 0))

    @property
    def count(self) -> int:
        """Number of own probes."""
        return self.probes.stop - self.probes.start

    @property
    def weight(self) -> float:
        """Weight of the mean over the own probes in the mean over all."""
        return self.count / self.num_probes

    def of(self, estimates: Tensor | None) -> Tensor:
        """The estimates of the probes of all processes. shape: (own probes, *batch) -> (probes, *batch)"""
        if self.ranks.size == 1 and estimates is not None:
            return estimates
        own = None if estimates is None else estimates.detach().cpu()
        return torch.cat([part for part in self.ranks.gather(own, "likelihoods") if part is not None])

    def last(self, own: float) -> float:
        """The number of the process that has the last column."""
        ranks = self.ranks
        return ranks.gather(own, "likelihoods")[min(ranks.size, self.num_probes + 1) - 1]


def same_problem(ranks: Communicator, choice: T, tensors: Iterable[Tensor | None]) -> T:
    """The choice of the main process. Sums of the tensors must agree between processes.

    :param tensors: data and hyperparameters.
    :raises RankError: if they differ.
    """
    known = [tensor.detach().double() for tensor in tensors if tensor is not None and tensor.is_floating_point()]
    sums = torch.stack([part for tensor in known for part in (tensor.sum(), tensor.square().sum())]).tolist()
    (first, wanted), *others = ranks.gather((choice, sums), "likelihoods")
    for rank, (_, theirs) in enumerate(others, 1):
        same = len(theirs) == len(wanted) and all(
            math.isclose(a, b, rel_tol=_SAME, abs_tol=_SAME) or a != a for a, b in zip(theirs, wanted, strict=True)
        )
        if not same:
            raise RankError(
                f"{ranks}: data or hyperparameters of rank {rank} are not those of rank 0, expected the same on all. "
                "Use the same seed on all ranks; in your own loop, call average_gradients() after backward()."
            )
    return first


def average_gradients(parameters: Module | Iterable[Parameter], group: Any = None) -> None:
    """Complete the gradients after ``loss.backward()`` inside ``settings.group(group)``.

    Every process then has the gradients of the whole loss. ``fit(group=...)`` calls this itself.

    >>> import gpytorch_gaps as gaps
    >>> layer = torch.nn.Linear(2, 1)
    >>> layer(torch.ones(2)).backward()
    >>> with gaps.distributed.process_group() as group:
    ...     gaps.distributed.average_gradients(layer, group)
    >>> layer.weight.grad.tolist()
    [[1.0, 1.0]]

    :param parameters: a module, or parameters. Their `grad` is replaced.
    :param group: the process group of the likelihood; None for this process alone.
    :return: nothing.
    """
    ranks = group if isinstance(group, Communicator) else Communicator(group)
    if isinstance(parameters, Module):
        parameters = parameters.parameters()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if ranks.size == 1 or not trained:
        return
    known = torch.tensor([float(p.grad is not None) for p in trained], device=trained[0].device)
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    flat = torch.cat([known.double(), *(part.detach().reshape(-1).double() for part in parts)])
    flat = ranks.sum(flat, "gradients")
    found = flat[len(trained) :].div(ranks.size).split([p.numel() for p in trained])
    for parameter, here, gradient in zip(trained, flat[: len(trained)].tolist(), found, strict=True):
        if here:  # on some process
            parameter.grad = gradient.view_as(parameter).to(parameter.dtype)


def same_start(model: Module, ranks: Communicator) -> None:
    """Give all processes the parameters, buffers and random state of the main process."""
    if ranks.size == 1:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            ranks.broadcast(tensor, "the start")
    states = ranks.gather((torch.get_rng_state(), _cuda_state()), "the start")[0]
    torch.set_rng_state(states[0])
    if states[1] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[1])


def _cuda_state() -> Tensor | None:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else None
