"""The interface of a kernel on a grid, for modules below `kernels`."""

from abc import abstractmethod
from typing import Any

from gpytorch.kernels import Kernel
from torch import Tensor

from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.grid.cells import Cells


class GridKernel(Kernel):
    """A kernel with the grid on which its inputs lie, implemented by :class:`gpytorch_gaps.GappyGridKernel`."""

    grid: CartesianGrid
    solutions: Any
    """Solutions for the last training data, a ``posterior.last_solutions.LastSolutions``. The kernel owns it."""

    @abstractmethod
    def cells_of(self, x: Tensor, training: bool = True) -> Cells | None:
        """Points `(N, D)` as cells of this grid, or of the grid of their own coordinates; None if scattered."""
