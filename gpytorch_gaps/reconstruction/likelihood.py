"""The log marginal likelihood of a grid, and its derivatives, in terms of the weights of a basis.

With ``K = Phi T Phi'``, N observations, ``H = s2 T^-1 + G``, ``G = Phi' W'W Phi``, ``H w = b = Phi' W' y``, and
``B = s2 T^(-1/2) H^-1 T^(-1/2)``, the posterior variance in units of the prior,

    -2 log p = (y'y - b'w) / s2 + N log(2 pi s2) - log|B| .

A derivative of the kernel is ``Y = T^(-1/2) Phi' dK Phi T^(-1/2)`` in the basis. With ``v = T^(-1/2) w``,

    2 d log p = v' Y v - tr((I - B) Y),        2 d log p / d log s2 = |y - W Phi w|^2 / s2 - N + tr(I - B) .

If only factor i depends on the hyperparameter, with the derivative ``Y_i = t_i^(-1/2) Phi_i' dK_i Phi_i t_i^(-1/2)``,
then Y is Y_i on axis i and the identity on the others. With S_i the sum of ``v v' - (I - B)`` over equal positions on
the other axes, ``2 d log p = <S_i, Y_i>``. The part of ``dK`` outside the basis is as small as the truncated part of K.

A :class:`ReferenceMatrix` gives B0, a good approximation of B. The rest is estimated with probes z of random signs:

    tr((B0 - B) Y) = E ((B0 - B) z)' Y z ,       B z = T^(-1/2) H^-1 s2 T^(-1/2) z

takes one solve per probe. ``log|B0| - log|B| = tr log(F^-1 H F^-T)`` with ``F F' = H0`` takes one Lanczos process per
probe. If gaps are scattered, H is close to H0, and few probes are needed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpytorch_gaps.reconstruction.reference_matrix import ReferenceMatrix
from gpytorch_gaps.reconstruction.sharding import ShardedWeights
from gpytorch_gaps.reconstruction.weight_solver import WeightSolver
from gpytorch_gaps.solvers.krylov import ConjugateGradients

_MOST_EXACT_WEIGHTS = 1000  # with at most so many weights, the dense block contains all functions
_MOST_PAIR_NUMBERS = 2**26  # largest size of the table of pair products of eigenvectors for the dense block
_LANCZOS_REDUCTION = 1e-3  # reduction of the residual; the relative error of a log-determinant is about its square


@dataclass(frozen=True)
class Derivatives:
    """Derivatives of the log-likelihood: ``d log p = <S_i, Y_i> / 2`` for every axis, and d log p / d log s2.

    :param axes: S_i, shape (r_i, r_i) each.
    :param noise: derivative with respect to the logarithm of the noise variance.
    :param probes: estimates of single probes minus their mean; empty if nothing was estimated.
    """

    axes: tuple[Tensor, ...]
    noise: float
    probes: tuple["Derivatives", ...] = ()

    def __add__(self, other: "Derivatives") -> "Derivatives":
        axes = tuple(one + two for one, two in zip(self.axes, other.axes, strict=True))
        return Derivatives(axes, self.noise + other.noise, self.probes)

    def __mul__(self, factor: float) -> "Derivatives":
        return Derivatives(tuple(factor * one for one in self.axes), factor * self.noise, self.probes)


class StreamedLikelihood:
    """The likelihood at given hyperparameters. The constructor solves for the weights.

    :param solver: the solver for the weights of the posterior mean, given the data minus their prior mean.
    :param rhs: ``b = Phi' W' y`` of these data.
    :param norm: ``|y|``.
    :param start: starting values of the weights.
    """

    def __init__(self, solver: WeightSolver, rhs: Tensor, norm: float, start: Tensor | None = None) -> None:
        self.space, self.solver, self._rhs, self._norm = solver.space, solver, rhs, norm
        weights = self.space.weights
        if isinstance(weights, ShardedWeights):
            raise ValueError(
                f"kernels: got {weights.size} weights, divided among several processes; expected a smoother kernel, "
                "which keeps fewer eigenvectors, or one process"
            )
        if weights.size <= _MOST_EXACT_WEIGHTS and _pair_numbers(weights.basis.vectors) <= _MOST_PAIR_NUMBERS:
            solver.use_block(self.space.leading_block(weights.size))
        self.solution = solver.solve(start)
        self.reference = ReferenceMatrix(self.space, solver.block)
        self._kept = self.space.products > 0
        self._roots = self.space.products.sqrt()
        self._inverse_roots = torch.where(self._kept, 1.0 / self._roots, 0.0)

    @property
    def is_exact(self) -> bool:
        """Whether the likelihood is exact, so that no probes are needed."""
        return self.reference.is_exact

    # -- the value -----------------------------------------------------------------------------------------------------

    def value(self, num_probes: int, seed: int) -> tuple[float, float]:
        """``log p(y)`` in nats, and its standard error: infinite for a single probe, zero if the value is exact.

        :param num_probes: number of Lanczos processes.
        :param seed: seed of the random signs.
        """
        space = self.space
        explained = float(space.weights.dot(self._rhs + self.solution.left, self.solution.weights))
        terms = (self._norm**2 - explained) / space.noise + space.num_train * math.log(2.0 * math.pi * space.noise)
        terms += self.reference.log_determinant()
        if self.is_exact:
            return -0.5 * terms, 0.0
        found = torch.tensor([self._log_determinant_left(probe, seed) for probe in range(num_probes)])
        error = float(found.std()) / math.sqrt(num_probes) if num_probes > 1 else math.inf
        return -0.5 * (terms + float(found.mean())), 0.5 * error

    def _log_determinant_left(self, probe: int, seed: int) -> float:
        """``z' log(F^-1 H F^-T) z`` by a Lanczos process, computed by conjugate gradients for ``F z``."""
        space, signs = self.space, random_signs(self._kept, probe, seed)
        residual, shape = self.reference.root_matmul(signs).view(-1, 1), signs.shape
        run = ConjugateGradients(
            lambda x: space.matmul(x.view(shape), torch.float32).view(-1, 1),
            residual,
            precondition=lambda x: self.reference.solve(x.view(shape)).reshape(-1, 1),
            keep_lanczos=True,
        )

        def size() -> float:
            return space.weights.total(space.weights.dot(run.residual, self.reference.solve(run.residual.view(shape))))

        first = size()
        for _ in range(self.solver.max_iterations):
            run.step()
            if size() <= _LANCZOS_REDUCTION**2 * first:
                break
        values, vectors = torch.linalg.eigh(run.lanczos()[0])
        return first * float((vectors[0].square() * values.clamp_min(torch.finfo(values.dtype).tiny).log()).sum())

    # -- derivatives ---------------------------------------------------------------------------------------------------

    def derivatives(self, num_probes: int, seed: int) -> Derivatives:
        """Derivatives with respect to the factors of the kernel, and to the noise.

        :param num_probes: number of solves for the part that the reference matrix does not give.
        :param seed: seed of the random signs.
        """
        space, axes = self.space, range(len(self.space.basis.ranks))
        scaled = self._inverse_roots * self.solution.weights
        known = Derivatives(
            tuple(along(axis, scaled, scaled) - self.reference.explained_along(axis) for axis in axes),
            0.5 * (self._square_of_residual() / space.noise - space.num_train + self.reference.explained()),
        )
        if self.is_exact or not num_probes:
            return known
        found = [self._left_by_probe(probe, seed) for probe in range(num_probes)]
        mean = _sum(found) * (1.0 / num_probes)
        return replace(known + mean, probes=tuple(one + mean * -1.0 for one in found))

    def _left_by_probe(self, probe: int, seed: int) -> Derivatives:
        """An estimate of the rest beyond the reference matrix: minus ``((B0 - B) z) z'``, summed along every axis."""
        signs = random_signs(self._kept, probe, seed)
        rhs = self.space.noise * self._inverse_roots * signs
        found = self.solver.for_rhs(rhs, self.solver.tolerance).solve()
        left = self._inverse_roots * (self.reference.solve(rhs) - found.weights)
        sums = [along(axis, left, signs) for axis in range(left.dim())]
        return Derivatives(tuple(-0.5 * (one + one.mT) for one in sums), 0.5 * float((left * signs).sum()))

    def _square_of_residual(self) -> float:
        """``|y - W Phi w|^2``"""
        total, weights = self.space.weights.dot, self.solution.weights
        explained = total(weights, self._rhs + self.space.shift * weights + self.solution.left)
        return max(0.0, self._norm**2 - float(explained))


def along(axis: int, left: Tensor, right: Tensor) -> Tensor:
    """Products of two boxes, summed over all axes but one. shape: (r_1, .., r_d) twice -> (r_i, r_i)"""
    first, second = (box.movedim(axis, 0).reshape(box.size(axis), -1) for box in (left, right))
    return first @ second.mT


def random_signs(kept: Tensor, probe: int, seed: int) -> Tensor:
    """Random signs for the functions that are kept, zeros elsewhere, in float64.

    A sign depends only on the positions of its function. It does not change if a kernel changes, and with it the
    number of functions.
    """
    number = _scramble(_scramble(torch.tensor(seed, device=kept.device)) + probe)
    for size in kept.shape:
        number = _scramble(number.unsqueeze(-1) + torch.arange(size, device=kept.device))
    return torch.where(kept, 1.0 - 2.0 * (number & 1).double(), 0.0)


def _scramble(number: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele, Lea & Flood 2014), with a first multiplication; int64 arithmetic wraps."""
    for shift, factor in ((31, -0x61C8864680B583EB), (30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        number = (number ^ ((number >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return number ^ ((number >> 31) & ((1 << 33) - 1))


def _sum(parts: Sequence[Derivatives]) -> Derivatives:
    total, *others = parts
    for one in others:
        total = total + one
    return total


def _pair_numbers(vectors: Sequence[Tensor]) -> int:
    return sum(len(own) * own.size(-1) * (own.size(-1) + 1) // 2 for own in vectors)
