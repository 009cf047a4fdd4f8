"""Isotropic kernels on the sphere."""

import math
from typing import Any, ClassVar

import torch
from gpytorch.kernels import AdditiveKernel, Kernel, MaternKernel, ProductKernel, RBFKernel, RQKernel, ScaleKernel
from linear_operator import to_dense
from torch import Tensor

from gpytorch_gaps.kernels.blocks import Period

_DISTANCES = ("chordal", "great_circle")


class SphereKernel(Kernel):
    """A kernel of the distance of two points on a sphere, given by latitude and longitude in degrees.

    It has no seams at the poles and the date line. On a block (latitude, longitude) of a :class:`GappyGridKernel` with
    regular longitudes, products use FFTs along circles of latitude. Latitudes need not be regular:

        chord^2 = 4 r^2 (sin^2((lat - lat') / 2) + cos(lat) cos(lat') sin^2((lon - lon') / 2))

    :param base_kernel: a kernel of the distance: ``RBFKernel``, ``MaternKernel``, ``RQKernel``, and scales, sums and
        products of them, without ARD. Its length-scale has the unit of `radius`.
    :param distance: "chordal", straight through the sphere, is valid for all these kernels. "great_circle", along its
        surface, is valid for the exponential kernel only, ``MaternKernel(nu=0.5)``.
    :param radius: radius of the sphere. Use 6371 for length-scales in kilometres on the Earth.
    :raises ValueError: if the base kernel is not a covariance on the sphere, or the distance is unknown.

    >>> kernel = SphereKernel(MaternKernel(nu=1.5))
    >>> date_line = torch.tensor([[0.0, -180.0], [0.0, 180.0], [90.0, 10.0], [90.0, -60.0]])
    >>> covariance = kernel(date_line).to_dense()
    >>> covariance[0, 1].item(), covariance[2, 3].item()  # the same points
    (1.0, 1.0)
    """

    stationary_columns: ClassVar[dict[int, Period]] = {1: 360.0}
    """The covariance depends only on differences of longitudes: see :mod:`gpytorch_gaps.kernels.blocks`."""

    def __init__(self, base_kernel: Kernel, distance: str = "chordal", radius: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if distance not in _DISTANCES:
            raise ValueError(f"SphereKernel: distance: got {distance!r}, expected one of {', '.join(_DISTANCES)}")
        if not radius > 0:
            raise ValueError(f"SphereKernel: radius: got {radius}, expected a number above 0")
        _check_base(base_kernel, distance)
        self.base_kernel, self.distance, self.radius = base_kernel, distance, float(radius)

    @property
    def batch_shape(self) -> torch.Size:
        return self.base_kernel.batch_shape

    @property
    def is_stationary(self) -> bool:
        """False: the covariance changes if latitudes are shifted."""
        return False

    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **params: Any
    ) -> Tensor:
        if last_dim_is_batch:
            raise ValueError("last_dim_is_batch: got True, expected False: latitude and longitude belong together")
        for name, x in (("x1", x1), ("x2", x2)):
            if x.size(-1) != 2:
                raise ValueError(f"SphereKernel: {name}: got {x.size(-1)} columns, expected latitude and longitude")
        if not diag:
            x1, x2 = x1.unsqueeze(-2), x2.unsqueeze(-3)
        away = self._distances(x1, x2)
        # the kernel depends on the distance only: evaluate one row of covariances with the origin
        origin = away.new_zeros(1, 1)
        batch_dims = away.dim() - (1 if diag else 2) if self.batch_shape else 0
        flat = self.base_kernel(origin, away.flatten(batch_dims).unsqueeze(-1), **params)
        return to_dense(flat).squeeze(-2).unflatten(-1, away.shape[batch_dims:])

    def _distances(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Distances of points that broadcast, without loss of digits for close ones."""
        latitude, longitude = (0.5 * math.pi / 180.0 * (x1[..., i] - x2[..., i]) for i in (0, 1))
        cosines = torch.cos(x1[..., 0] * (math.pi / 180.0)) * torch.cos(x2[..., 0] * (math.pi / 180.0))
        squared = latitude.sin().square() + cosines * longitude.sin().square()
        half = squared.clamp(torch.finfo(squared.dtype).tiny, 1.0).sqrt()  # half a chord of the unit sphere
        return 2.0 * self.radius * (half if self.distance == "chordal" else half.asin())

    def __getitem__(self, index: Any) -> "SphereKernel":
        return SphereKernel(self.base_kernel[index], self.distance, self.radius, active_dims=self.active_dims)


def _check_base(kernel: Kernel, distance: str) -> None:
    """Checks that a kernel is a function of the distance and a covariance on the sphere."""
    if isinstance(kernel, ScaleKernel):
        return _check_base(kernel.base_kernel, distance)
    if isinstance(kernel, AdditiveKernel | ProductKernel):
        for child in kernel.kernels:
            _check_base(child, distance)
        return None
    name = f"SphereKernel: base_kernel: got {type(kernel).__name__}"
    if not isinstance(kernel, RBFKernel | MaternKernel | RQKernel):
        raise ValueError(f"{name}, expected a function of the distance: RBFKernel, MaternKernel or RQKernel")
    if kernel.ard_num_dims not in (None, 1):
        raise ValueError(f"{name} with ard_num_dims={kernel.ard_num_dims}, expected None: there is one distance")
    if distance == "great_circle" and not (isinstance(kernel, MaternKernel) and kernel.nu == 0.5):
        raise ValueError(
            f"{name}, expected MaternKernel(nu=0.5): no smoother kernel is a covariance of great-circle distances; use "
            "distance='chordal'"
        )
    return None
