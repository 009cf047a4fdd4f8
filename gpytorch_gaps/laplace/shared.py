"""One preconditioner for several solves: the matrices ``K + D`` of Newton's method differ only in the noise.

If ``D / c <= D' <= c D``, the eigenvalues of ``(K + D)^-1 (K + D')`` lie between 1 / c and c. A good preconditioner of
one matrix is then nearly as good for the other, and it needs neither a new plan nor a new set-up.
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
    """Inside, solves of a system use the given preconditioner, unless it is None."""
    system.reused_preconditioner = preconditioner
    try:
        yield
    finally:
        system.reused_preconditioner = None


class SharedPreconditioner:
    """The last preconditioner that was set up, and its noise."""

    def __init__(self) -> None:
        self._preconditioner: Any = None
        self._noise: Tensor | None = None

    @contextmanager
    def serving(self, system: NoisySystem) -> Iterator[None]:
        """Inside, solves of a system use the preconditioner if its noise is close. Otherwise they set up a new one."""
        serves = self._noise is not None and _distance(self._noise, system.noise) <= math.log(_FURTHEST)
        with reusing(system, self._preconditioner if serves else None):
            yield
        if not serves and system.last_preconditioner is not None:
            self._preconditioner, self._noise = copy.copy(system.last_preconditioner), system.noise
            self._preconditioner.left_over = math.inf  # not known for another matrix


def _distance(noise: Tensor, other: Tensor) -> float:
    return float((other / noise).log().abs().max())
