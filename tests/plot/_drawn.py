"""What a picture shows, read off the figure and not off what it was made from."""

from types import SimpleNamespace

import numpy as np
from matplotlib.collections import QuadMesh


def image_of(ax):
    """The one picture in ax, drawn on pixels or as a mesh."""
    (image,) = [*ax.images, *(one for one in ax.collections if isinstance(one, QuadMesh))]
    return image


def value_at(ax, x, y):
    """What the pixel at a coordinate shows: a number, masked in a gap."""
    column, row = ax.transData.transform((x, y))
    event = SimpleNamespace(x=column, y=row, canvas=ax.figure.canvas)
    return np.ma.asarray(image_of(ax).get_cursor_data(event)).squeeze()[()]


def values_at(ax, xs, ys):
    """shape: (len(ys), len(xs)), NaN in gaps"""
    return np.array([[np.ma.filled(np.ma.asarray(value_at(ax, x, y)), np.nan) for x in xs] for y in ys], dtype=float)


def colour_bars(figure):
    return [ax for ax in figure.axes if ax.get_label() == "<colorbar>"]


def panels_of(figure):
    return [ax for ax in figure.axes if ax.get_label() != "<colorbar>"]


def patches_of(ax):
    """What is shaded as gaps."""
    return [one for one in [*ax.patches, *ax.collections] if one.get_label() == "gaps"]


def rises(ax):
    """Whether y rises upwards."""
    (_, low), (_, high) = ax.transData.transform([(0, min(ax.get_ylim())), (0, max(ax.get_ylim()))])
    return bool(low < high)


def tick_texts(axis):
    """Those of the ticks that are seen."""
    low, high = sorted(axis.get_view_interval())
    texts = [text.get_text() for text in axis.get_ticklabels()]
    seen = [low <= place <= high for place in axis.get_ticklocs()]
    return [text for text, one in zip(texts, seen, strict=True) if one and text]


def pixel_at(ax, x, y):
    """The colour that a coordinate is drawn in, from 0 to 255."""
    if ax.figure.stale:
        ax.figure.canvas.draw()
    shown = np.asarray(ax.figure.canvas.buffer_rgba())[..., :3].astype(int)
    column, row = ax.transData.transform((x, y))
    return shown[shown.shape[0] - 1 - int(row), int(column)]


def is_grey(colour):
    return np.ptp(colour) <= 2 and colour.max() < 255


def same(a, b):
    """Whether two objects of xarray, pandas or torch, or two arrays, are the same."""
    for method in ("identical", "equals", "equal"):
        if hasattr(a, method):
            return bool(getattr(a, method)(b))
    return np.array_equal(a, b)
