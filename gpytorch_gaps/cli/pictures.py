"""Before, after and uncertainty, drawn without a screen."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from gpytorch_gaps.filling.fill import Filled
from gpytorch_gaps.utils.files import atomic_write

_MOST = 4_000_000  # cells that a picture can show anything of


def draw(result: Filled, axes: Any, variable: str | None) -> Any:
    """A figure of the result, or of one of its variables."""
    import matplotlib

    matplotlib.use("Agg")
    from gpytorch_gaps import plot

    def pick(given: Any) -> Any:
        one = given[variable] if hasattr(given, "data_vars") else given
        return one if one is None else _thinned(one)

    mean, gaps, std = pick(result.mean), pick(result.gaps), pick(result.std)
    if np.ma.isMaskedArray(mean) and mean.dtype == np.uint8 and mean.ndim == 3:
        return plot.fill(Filled(mean, std, gaps, None, None), rgb=mean.shape[-1] == 3)
    shown = axes if mean.shape == result_shape(result, variable) else None
    return plot.fill(Filled(mean, std, gaps, None, None), axes=shown)


def result_shape(result: Filled, variable: str | None) -> tuple[int, ...]:
    mean = result.mean[variable] if hasattr(result.mean, "data_vars") else result.mean
    return tuple(mean.shape)


def save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    kind = path.suffix.lower().removeprefix(".")
    atomic_write(path, lambda stream: figure.savefig(stream, format=kind, dpi=120))
    pyplot.close(figure)


def _thinned(values: Any) -> Any:
    """Every so many cells of each long axis, where there are more than a picture can show."""
    cells = math.prod(values.shape)
    if cells <= _MOST:
        return values
    step = math.ceil((cells / _MOST) ** (1 / len(values.shape)))
    return values[tuple(slice(None, None, step) for _ in values.shape)]
