"""GPyTorch kernels that know a grid."""

from gpytorch_gaps.kernels.gappy_grid_kernel import GappyGridKernel

__all__ = ["GappyGridKernel"]
