"""What the rest of the package knows of a kernel on a grid, so that no floor imports a higher one."""

from abc import abstractmethod
from typing import Any

from gpytorch.kernels import Kernel
from torch import Tensor

from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.grid.cells import Cells


class GridKernel(Kernel):
    """A kernel that knows the grid its inputs lie on; :class:`gpytorch_gaps.GappyGridKernel` is the one there is."""

    grid: CartesianGrid
    solutions: Any
    """Solutions for the data last conditioned on: a ``posterior.last_solutions.LastSolutions``."""

    @abstractmethod
    def cells_of(self, x: Tensor, training: bool = True) -> Cells | None:
        """The points x `(N, D)` as cells of this grid or of one of their own; None if they are scattered."""
