"""Pictures of a filling: before, after and the standard deviation."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from gpytorch_gaps.filling.axes.index_grid import is_a
from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.plot.fields import panels
from gpytorch_gaps.plot.inputs import read_field
from gpytorch_gaps.plot.lines import series


def fill(
    result: Any,
    *,
    values: Any = None,
    truth: Any = None,
    axes: Any = None,
    variable: Any = None,
    rgb: bool = False,
    slices: int | Sequence[int] | None = None,
) -> Figure:
    """Draw the result of ``fill_gaps``: before, after and the standard deviation; a series as a line with a band.

    :param result: an object with `mean`, `std` (None for no error bars) and `gaps`, a mask of the gaps.
    :param values: the field before; needed only if `result` has no `gaps`.
    :param truth: the true field, if known, for one more panel.
    :param axes: the coordinates of each dimension, or a mapping from names to these, if `result.mean` has none.
    :param variable: which variable, if the result is of an xarray Dataset.
    :param rgb: whether the last dimension is red, green, blue and maybe opacity.
    :param slices: number of slices along the first dimension, or along that of bands or labels, evenly spaced; or their
        positions. Default: all of up to eight bands, four slices of other dimensions.
    :return: the Figure.
    :raises ValueError: if `result` has no mean, if neither `values` nor its gaps are known, or if shapes differ.

    >>> import numpy as np
    >>> from types import SimpleNamespace
    >>> from gpytorch_gaps import plot
    >>> gaps = np.eye(3, dtype=bool)
    >>> figure = plot.fill(SimpleNamespace(mean=np.ones((3, 3)), std=0.1 * gaps, gaps=gaps))
    >>> [ax.get_title() for ax in figure.axes][:3]
    ['observed', 'filled', 'standard deviation']
    """

    def pick(name: str, given: Any) -> Any:
        if not is_a(given, "xarray", "Dataset"):
            return given
        known = list(given.data_vars)
        wanted = known[0] if variable is None and len(known) == 1 else variable
        if wanted not in known:
            raise ValueError(f"variable: got {variable!r}; expected one of {name}'s, {known}")
        return given[wanted]

    if not hasattr(result, "mean"):
        raise ValueError(f"result: got {type(result).__name__}; expected an object with mean, std and gaps")
    mean, std = pick("mean", result.mean), pick("std", getattr(result, "std", None))
    truth, before = pick("truth", truth), pick("values", values)
    after = read_field("result.mean", mean, axes, rgb)
    if before is None:
        before = _with_gaps(mean, pick("gaps", getattr(result, "gaps", None)))
    if after.ndim == 1:
        listed = axes.axes if isinstance(axes, CartesianGrid) else axes
        listed = list(listed.values()) if isinstance(listed, Mapping) else listed
        ax = series(None if listed is None else listed[0], mean, std, before, truth)
        figure = ax.get_figure(root=True)
        assert figure is not None
        return figure
    shown = {"observed": before, "filled": mean}
    shown |= {} if truth is None else {"truth": truth}
    shown |= {} if std is None else {"standard deviation": std}
    return panels(shown, axes, uncertain=("standard deviation",) if std is not None else (), rgb=rgb, slices=slices)


def _with_gaps(mean: Any, gaps: Any) -> np.ma.MaskedArray:
    """The mean with its gaps masked: the field before it was filled."""
    if gaps is None:
        raise ValueError("values: got None; expected the values before filling, because result has no gaps")
    field, mask = read_field("result.mean", mean), read_field("result.gaps", gaps)
    if mask.values.shape != field.values.shape:
        raise ValueError(f"result.gaps: got shape {mask.values.shape}; expected {field.values.shape}, as result.mean")
    return np.ma.masked_array(field.values, mask=(mask.values.filled(1) != 0) | np.ma.getmaskarray(field.values))
