"""The positions of stations, from auxiliary coordinates such as ``lat(station)``, ``lon(station)``, ``elev(station)``.

Stations are points on a sphere. Their coordinates are those of the frame at the middle of all stations,

    east, north, up = (180 / pi) R (cos(lat) cos(lon), cos(lat) sin(lon), sin(lat)),

so that distances are chords in degrees of latitude, and a degree of longitude has the length cos(lat). If the stations
lie within a small part of the sphere, `up` is almost constant and is left out. An elevation is a separate column, with
its own length-scale.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpytorch_gaps.filling.axes.axis import Axis
from gpytorch_gaps.filling.axes.calendars import is_date
from gpytorch_gaps.filling.axes.encodings import Numbers
from gpytorch_gaps.filling.axes.meaning import meaning

_FLAT = 0.02  # if the range of `up`, relative to the extent, is smaller, the region is treated as a plane


@dataclass(frozen=True, eq=False)
class LocalFrame:
    """Latitudes and longitudes, and optionally elevations, as points in the frame at the middle of some stations.

    :param frame: unit vectors to the east, to the north and upwards. shape: (3, 3)
    :param columns: number of vectors that are used: 2, or 3 in a large region.
    """

    frame: np.ndarray
    columns: int

    @classmethod
    def of(cls, latitude: np.ndarray, longitude: np.ndarray) -> "LocalFrame":
        """The frame of some stations.

        >>> frame = LocalFrame.of(np.array([59.0, 61.0]), np.array([10.0, 12.0]))
        >>> frame("station", np.array([[59.0, 10.0, 35.0], [61.0, 12.0, 80.0]])).round(2).tolist()
        [[-0.5, -1.0, 35.0], [0.5, 1.0, 80.0]]
        """
        points = _on_sphere(latitude, longitude)
        middle = points.mean(axis=0)
        frame = _frame(np.arctan2(middle[2], np.hypot(middle[0], middle[1])), np.arctan2(middle[1], middle[0]))
        east, north, up = np.ptp(points @ frame.T, axis=0)
        return cls(frame, 2 if up <= _FLAT * max(east, north) else 3)

    def __call__(self, name: str, array: np.ndarray) -> np.ndarray:
        if array.ndim != 2 or array.shape[1] not in (2, 3):
            raise ValueError(f"{name}: got coordinates of shape {array.shape}, expected (m, 2) or (m, 3): latitudes, "
                             "longitudes and, if the stations have them, elevations")  # fmt: skip
        points = np.degrees(_on_sphere(array[:, 0], array[:, 1]) @ self.frame.T)
        return np.concatenate([points[:, : self.columns], array[:, 2:]], axis=1)


def station_axis(field: Any, dim: Any) -> Axis | str:
    """The axis of a dimension of a DataArray whose auxiliary coordinates are positions in space.

    :param field: the DataArray.
    :param dim: the dimension.
    :return: the axis; or a text with the reason why positions are not used, empty if there are no positions.
    """
    used = _positions(field, dim)
    if not used:
        return ""
    numbers = np.stack([np.asarray(one.values, dtype=np.float64) for one in used], axis=1)
    names, note = ", ".join(str(one.name) for one in used), ""
    if not np.isfinite(numbers[:, :2]).all():
        missing = int((~np.isfinite(numbers[:, :2]).all(axis=1)).argmax())
        return f"{dim}: {names} are not used, because entry {missing} has none: taken for labels"
    if not np.isfinite(numbers).all() or (len(used) == 3 and np.ptp(numbers[:, 2]) == 0):
        note = f"{dim}: {used[2].name} is not used, because some are missing or all are equal"
        numbers = numbers[:, :2]
    on_sphere = meaning(str(used[0].name), used[0].attrs) == "latitude"
    encoding = LocalFrame.of(numbers[:, 0], numbers[:, 1]) if on_sphere else Numbers(numbers.shape[1])
    points = encoding(str(dim), numbers)
    if len(np.unique(points, axis=0)) < len(points):
        return f"{dim}: {names} are not used, because two entries are at the same place: taken for labels"
    return Axis(str(dim), "group", points, encoding=encoding, coordinates=numbers, note=note)


def _positions(field: Any, dim: Any) -> list[Any]:
    """Latitude and longitude, or x and y, and a vertical coordinate if there is one; empty if there are none."""
    if not _are_names(field, dim):
        return []
    along = [
        one for name, one in field.coords.items() if one.dims == (dim,) and name != dim and one.dtype.kind in "iuf"
    ]
    kinds: dict[str, list[Any]] = {}
    for one in along:
        kinds.setdefault(meaning(str(one.name), one.attrs) or "", []).append(one)
    degrees = [*kinds.get("latitude", []), *kinds.get("longitude", [])]
    plane = [one for axis in "xy" for one in along if _is_projected(axis, str(one.name), one.attrs)]
    found = degrees if len(degrees) == 2 and "latitude" in kinds and "longitude" in kinds else plane
    return [*found, *kinds.get("vertical", [])[:1]] if len(found) == 2 else []


def _are_names(field: Any, dim: Any) -> bool:
    """Whether the coordinates of a dimension are only names of its entries. Those of a ship's track are times."""
    if dim not in field.indexes:
        return True
    own = field.coords[dim]
    if own.dtype.kind in "iu":
        return meaning(str(dim), own.attrs) in (None, "label")
    return own.dtype.kind in "OUST" and not (len(own) and is_date(own.values[0]))


def _is_projected(axis: str, name: str, attributes: Any) -> bool:
    standard = str(attributes.get("standard_name", ""))
    return standard == f"projection_{axis}_coordinate" or (
        not standard and name.lower() in (axis, {"x": "easting", "y": "northing"}[axis])
    )


def of_labels(field: Any, dim: Any) -> Sequence[str] | None:
    """The names of places without coordinates, from an auxiliary coordinate of distinct texts."""
    for one in field.coords.values():
        if one.dims == (dim,) and one.dtype.kind in "OUST":
            names = [str(entry) for entry in one.values]
            if len(set(names)) == len(names):
                return names
    return None


def _on_sphere(latitude: np.ndarray, longitude: np.ndarray) -> np.ndarray:
    """Points of the unit sphere. shape: (m, 3)"""
    phi, theta = np.radians(latitude), np.radians(longitude)
    return np.stack([np.cos(phi) * np.cos(theta), np.cos(phi) * np.sin(theta), np.sin(phi)], axis=1)


def _frame(phi: float, theta: float) -> np.ndarray:
    """Unit vectors to the east, to the north and upwards at a latitude and longitude, in radians. shape: (3, 3)"""
    sin, cos = np.sin, np.cos
    return np.array(
        [
            [-sin(theta), cos(theta), 0.0],
            [-sin(phi) * cos(theta), -sin(phi) * sin(theta), cos(phi)],
            [cos(phi) * cos(theta), cos(phi) * sin(theta), sin(phi)],
        ]
    )
