"""The coordinates of the pixels of a TIFF image, from its geographic tags, and the names of its dimensions."""

from typing import Any

import numpy as np

_PROJECTED, _GEOGRAPHIC = 1, 2  # values of GTModelTypeGeoKey
_PIXEL_IS_POINT = 2  # value of GTRasterTypeGeoKey: coordinates belong to the middle of a pixel, not to its corner
_NAMES = {"Y": "y", "X": "x", "S": "band", "C": "channel", "Z": "z", "T": "time"}  # from the letters of tifffile


def image_axes(series: Any, shape: tuple[int, ...]) -> dict[str, np.ndarray | None]:
    """The coordinates of every dimension by name; None if they are not known.

    If coordinates are in degrees, the names are latitude and longitude.

    :param series: a series of tifffile.
    :param shape: the shape of its array.
    """
    letters = series.axes if len(series.axes) == len(shape) else "?" * len(shape)
    names = [_NAMES.get(letter, f"axis {i}") for i, letter in enumerate(letters)]
    if len(set(names)) < len(names):
        names = [f"axis {i}" for i in range(len(names))]
    axes: dict[str, np.ndarray | None] = dict.fromkeys(names)
    tags = getattr(series.keyframe, "geotiff_tags", None) or {}
    if "Y" not in letters or "X" not in letters:
        return axes
    ground = _ground(tags, shape[letters.index("Y")], shape[letters.index("X")])
    if ground is None:
        return axes
    in_degrees = int(tags.get("GTModelTypeGeoKey", _PROJECTED)) == _GEOGRAPHIC
    renamed = {"y": "latitude", "x": "longitude"} if in_degrees else {}
    return {renamed.get(name, name): ground.get(name, known) for name, known in axes.items()}


def _ground(tags: dict[str, Any], rows: int, columns: int) -> dict[str, np.ndarray] | None:
    """Coordinates of the centres of pixels; None if there are none, or if the image is rotated."""
    middle = 0.0 if tags.get("GTRasterTypeGeoKey") == _PIXEL_IS_POINT else 0.5
    row, column = np.arange(rows) + middle, np.arange(columns) + middle
    if "ModelPixelScale" in tags and len(tags.get("ModelTiepoint", ())) == 6:
        (step_x, step_y, *_), (i, j, _, x, y, _) = tags["ModelPixelScale"], tags["ModelTiepoint"]
        return {"y": y - (row - j) * step_y, "x": x + (column - i) * step_x}
    if "ModelTransformation" in tags:
        matrix = np.asarray(tags["ModelTransformation"], dtype=np.float64).reshape(4, 4)
        if matrix[0, 1] == 0 and matrix[1, 0] == 0:
            return {"y": matrix[1, 3] + row * matrix[1, 1], "x": matrix[0, 3] + column * matrix[0, 0]}
    return None
