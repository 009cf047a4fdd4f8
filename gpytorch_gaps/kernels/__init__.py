"""GPyTorch kernels on a grid.

Importing this package patches GPyTorch's sums and products of kernels: see
:func:`gpytorch_gaps.kernels.composite.patch_composite_kernels`.
"""

from gpytorch_gaps.kernels.composite import patch_composite_kernels
from gpytorch_gaps.kernels.grid_kernel import GappyGridKernel
from gpytorch_gaps.kernels.interpolated import preconditioned_ski
from gpytorch_gaps.kernels.sphere import SphereKernel

__all__ = ["GappyGridKernel", "SphereKernel", "preconditioned_ski"]

patch_composite_kernels()
