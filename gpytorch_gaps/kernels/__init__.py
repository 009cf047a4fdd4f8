"""GPyTorch kernels that know a grid."""

from gpytorch_gaps.kernels.grid_kernel import GappyGridKernel

__all__ = ["GappyGridKernel"]
