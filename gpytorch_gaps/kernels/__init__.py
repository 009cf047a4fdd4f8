"""GPyTorch kernels on a grid.

Importing this package patches GPyTorch's sums and products of kernels: see
:func:`gpytorch_gaps.kernels.composite.patch_composite_kernels`.
"""

from gpytorch_gaps.kernels.composite import patch_composite_kernels
from gpytorch_gaps.kernels.grid_kernel import GappyGridKernel
from gpytorch_gaps.kernels.interpolated import preconditioned_ski

__all__ = ["GappyGridKernel", "preconditioned_ski"]

patch_composite_kernels()
