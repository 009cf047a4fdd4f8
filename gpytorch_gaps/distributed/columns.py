"""A training step by several processes: every rank solves for some of the columns.

The log marginal likelihood of many observations takes one solve for the data and one for each probe of the
log-determinant, which know nothing of each other. So every rank has the model and the data, and its share of these
columns; value and gradient are sums over ranks:

    log|A| ~ 1/k sum_j f(z_j) = sum_ranks  (k_rank / k) (1 / k_rank sum_{j here} f(z_j))

What is sent for a step are a few numbers, and the gradients of the parameters. Nothing is sent while iterating. Probes
are drawn by all ranks alike, so that the sum is that of one process with the same seed.
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
_ALIKE = 1e-6  # relative: rounding on another machine is less, another step of training more


class _SumOverRanks(Function):
    """A sum of what every rank has. Gradients go to the own part, times the ranks: they are averaged in the end."""

    @staticmethod
    def forward(ctx: Any, ranks: Communicator, own: Tensor, *of: Tensor) -> Tensor:
        ctx.size, ctx.others = ranks.size, len(of)
        return ranks.sum(own.detach().clone(), "likelihoods")

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return None, grad_outputs[0] * ctx.size, *[None] * ctx.others


def sum_over_ranks(ranks: Communicator, own: Tensor, of: Iterable[Tensor] = ()) -> Tensor:
    """:param of: what the sum is a function of, also for a rank that has no part of it, and no gradient."""
    return own if ranks.size == 1 else _SumOverRanks.apply(ranks, own, *of)


class Share:
    """Which of the columns of a likelihood are this rank's: the data's, of the first rank, and some probes."""

    def __init__(self, ranks: Communicator, num_probes: int) -> None:
        self.ranks, self.num_probes = ranks, num_probes
        own = split_evenly(num_probes + 1, ranks.size)[ranks.rank]  # the data are column 0
        self.has_data = own.start == 0
        self.probes = slice(max(own.start - 1, 0), max(own.stop - 1, 0))

    @property
    def count(self) -> int:
        return self.probes.stop - self.probes.start

    @property
    def weight(self) -> float:
        return self.count / self.num_probes

    def of(self, estimates: Tensor | None) -> Tensor:
        """What the probes of all ranks have estimated. shape: (own probes, *batch) -> (probes, *batch)"""
        if self.ranks.size == 1 and estimates is not None:
            return estimates
        own = None if estimates is None else estimates.detach().cpu()
        return torch.cat([part for part in self.ranks.gather(own, "likelihoods") if part is not None])

    def last(self, own: float) -> float:
        """What the rank of the last column has found."""
        ranks = self.ranks
        return ranks.gather(own, "likelihoods")[min(ranks.size, self.num_probes + 1) - 1]


def same_problem(ranks: Communicator, choice: T, tensors: Iterable[Tensor | None]) -> T:
    """The first rank's choice, if all have the same data and hyperparameters, as far as their sums tell."""
    known = [tensor.detach().double() for tensor in tensors if tensor is not None and tensor.is_floating_point()]
    sums = torch.stack([part for tensor in known for part in (tensor.sum(), tensor.square().sum())]).tolist()
    (first, wanted), *others = ranks.gather((choice, sums), "likelihoods")
    for rank, (_, theirs) in enumerate(others, 1):
        same = len(theirs) == len(wanted) and all(
            math.isclose(a, b, rel_tol=_ALIKE, abs_tol=_ALIKE) or a != a for a, b in zip(theirs, wanted, strict=True)
        )
        if not same:
            raise RankError(
                f"{ranks}: data or hyperparameters of rank {rank} are not those of rank 0, expected the same on all. "
                "Random data and models want one seed; a training loop of your own average_gradients after backward"
            )
    return first


def average_gradients(parameters: Module | Iterable[Parameter], group: Any = None) -> None:
    """After ``loss.backward()`` inside ``settings.group(group)``: the gradients of the loss, the same on every rank."""
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
        if here:  # for somebody
            parameter.grad = gradient.view_as(parameter).to(parameter.dtype)


def same_start(model: Module, ranks: Communicator) -> None:
    """The first rank's parameters, buffers and random state, for all."""
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
