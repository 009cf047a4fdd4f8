"""Preconditioners of covariances: low-rank in the eigenvectors of a Kronecker product, and sparse by neighbours."""

from gpytorch_gaps.preconditioners.eigen import EigenPreconditioner, ShiftedEigenPreconditioner
from gpytorch_gaps.preconditioners.neighbours import NeighbourLists, NeighbourPreconditioner, neighbour_lists

__all__ = [
    "EigenPreconditioner",
    "NeighbourLists",
    "NeighbourPreconditioner",
    "ShiftedEigenPreconditioner",
    "neighbour_lists",
]
