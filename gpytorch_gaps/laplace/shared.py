"""One preconditioner for several solves: the matrices ``K + D`` of Newton's method differ in the noise alone.

Where ``D / c <= D' <= c D``, the eigenvalues of ``(K + D)^-1 (K + D')`` lie between 1 / c and c: what preconditions the
one matrix well serves the other nearly as well, and costs neither a plan nor a set-up.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from gpytorch_gaps.solvers.system import NoisySystem

_FURTHEST = 2.0  # c


@contextmanager
def reusing(system: NoisySystem, preconditioner: Any) -> Iterator[None]:
    """Inside, solves of a system use a preconditioner that is at hand, if there is one."""
    system.reused_preconditioner = preconditioner
    try:
        yield
    finally:
        system.reused_preconditioner = None


class SharedPreconditioner:
    """The last preconditioner that was set up, and the noise that it was set up for."""

    def __init__(self) -> None:
        self._preconditioner: Any = None
        self._noise: Tensor | None = None

    @contextmanager
    def serving(self, system: NoisySystem) -> Iterator[None]:
        """Inside, solves of a system use the preconditioner if the noise is close; otherwise they set up the next."""
        serves = self._noise is not None and _distance(self._noise, system.noise) <= math.log(_FURTHEST)
        with reusing(system, self._preconditioner if serves else None):
            yield
        if not serves and system.last_preconditioner is not None:
            self._preconditioner, self._noise = copy.copy(system.last_preconditioner), system.noise
            self._preconditioner.left_over = math.inf  # not known for another matrix


def _distance(noise: Tensor, other: Tensor) -> float:
    return float((other / noise).log().abs().max())
