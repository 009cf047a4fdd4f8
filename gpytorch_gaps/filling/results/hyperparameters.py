"""The hyperparameters of a filling in words: length-scales and periods in the units of the axes, and the noise."""

import math
from collections.abc import Sequence

from gpytorch.kernels import (
    AdditiveKernel,
    IndexKernel,
    Kernel,
    MaternKernel,
    PeriodicKernel,
    ProductKernel,
    ScaleKernel,
)

from gpytorch_gaps.filling.axes.axis import Axis
from gpytorch_gaps.filling.results.fitted import Fitted
from gpytorch_gaps.kernels import SphereKernel
from gpytorch_gaps.kernels.circle import CircleKernel

_NAMES = {"RBFKernel": "squared exponential"}


def describe_model(fitted: Fitted) -> list[tuple[str, str]]:
    """Headings and texts: each term of the kernel, axis by axis, the noise and the mean."""
    axes, learned = fitted.filling.source.axes, fitted.chosen.learned
    transform = fitted.filling.transform
    rows = [] if transform is None else [("values", f"transformed by {transform.words}")]
    for number, term in enumerate(learned.terms):
        prefix = f"term {number + 1}: " if len(learned.terms) > 1 else ""
        rows.append((f"{prefix}standard deviation", f"{math.sqrt(float(term.scale.detach())):.3g}"))
        for kernel, block in zip(term.kernels, term.blocks, strict=True):
            along = [axes[axis] for axis in block]
            rows.append((f"{prefix}along {' and '.join(axis.name for axis in along)}", in_words(kernel, along)))
    rows.append(("noise", f"standard deviation {math.sqrt(fitted.chosen.noise):.3g}"))
    return rows


def in_words(kernel: Kernel, axes: Sequence[Axis]) -> str:
    """A kernel with its hyperparameters, in the units of its axes."""
    if isinstance(kernel, ScaleKernel):
        return f"{float(kernel.outputscale.detach()):.3g} times {in_words(kernel.base_kernel, axes)}"
    if isinstance(kernel, AdditiveKernel | ProductKernel):
        joined = " plus " if isinstance(kernel, AdditiveKernel) else " times "
        return joined.join(in_words(part, axes) for part in kernel.kernels)
    if isinstance(kernel, CircleKernel):
        return in_words(kernel.base_kernel, axes)
    if isinstance(kernel, SphereKernel):
        scale = math.degrees(float(kernel.base_kernel.lengthscale.detach()) / kernel.radius)
        return f"{_name(kernel.base_kernel)} of the distance on the sphere, length-scale {scale:.3g} degrees"
    if isinstance(kernel, IndexKernel):
        return f"free covariance of {kernel.covar_factor.shape[-2]} labels"
    if isinstance(kernel, PeriodicKernel):
        period, shape = (float(one.detach()) for one in (kernel.period_length, kernel.lengthscale))
        return f"{f'a cycle of {period:.6g} {_unit(axes)}'.strip()} with length-scale {shape:.3g} within it"
    if not kernel.has_lengthscale:
        return _name(kernel)
    scales = kernel.lengthscale.detach().flatten().tolist()
    words = " and ".join(f"{scale:.3g}" for scale in scales)
    return f"{_name(kernel)}, length-scale{'s' * (len(scales) > 1)} {words} {_unit(axes)}".strip()


def _name(kernel: Kernel) -> str:
    if isinstance(kernel, MaternKernel):
        return f"Matern-{int(2 * kernel.nu)}/2"
    name = type(kernel).__name__
    return _NAMES.get(name, name.removesuffix("Kernel"))


def _unit(axes: Sequence[Axis]) -> str:
    units = {axis.unit or ("cells" if axis.kind == "position" else "") for axis in axes}
    return units.pop() if len(units) == 1 else ""
