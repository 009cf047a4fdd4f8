"""The quantity of a coordinate, from its CF attributes or its name.

A standard name has priority over the unit, the unit over the attribute ``axis``, and this over the name of the
dimension. The name is only used if there is nothing else: ``lat`` in metres is not a latitude.
"""

import re
from collections.abc import Mapping
from typing import Any

_ANGLES = ("", "degree", "degrees", "deg", "°")  # units that do not determine which angle it is
_BY_STANDARD_NAME = {
    **dict.fromkeys(("latitude", "gridlatitude"), "latitude"),
    **dict.fromkeys(("longitude", "gridlongitude"), "longitude"),
    **dict.fromkeys(("platformid", "platformname", "realization", "region", "areatype"), "label"),
}
_BY_UNIT = {
    **dict.fromkeys(("degreesnorth", "degreenorth", "degreen", "degreesn", "degn"), "latitude"),
    **dict.fromkeys(("degreeseast", "degreeeast", "degreee", "degreese", "dege"), "longitude"),
}
_BY_NAME = {
    **dict.fromkeys(("lat", "latitude", "lats", "navlat", "rlat"), "latitude"),
    **dict.fromkeys(("lon", "long", "longitude", "lons", "navlon", "rlon"), "longitude"),
    **dict.fromkeys(("elev", "elevation", "alt", "altitude", "height", "depth", "z"), "vertical"),
    **dict.fromkeys(("band", "bands", "channel", "channels"), "label"),
    **dict.fromkeys(("member", "realization", "ensemble", "variable"), "label"),
}
_VERTICAL = ("altitude", "height", "surfacealtitude", "heightabovemeansealevel", "depth")  # standard names
_STATION = re.compile(r"(station|site|gauge|platform|sensor|buoy|wmo)s?(id|ids|code|codes|number|no|nr)?")
_ID = re.compile(r"(.*_|.*-|.* )?(id|ids|code|codes)", re.IGNORECASE)
_OF_NUMBERS = frozenset((
    "x", "y", "t", "time", "date", "datetime", "timestamp", "year", "month", "week", "day", "hour", "minute", "second",
    "dayofyear", "doy", "level", "lev", "plev", "pressure", "distance", "easting", "northing", "lead", "step", "age",
    "wavelength", "frequency", "temperature",
))  # fmt: skip


def meaning(name: str, attributes: Mapping[str, Any]) -> str | None:
    """``"latitude"``, ``"longitude"``, ``"vertical"`` or ``"label"``; ``"number"`` for other known quantities; or None.

    :param name: the name of the coordinate.
    :param attributes: its CF attributes.

    >>> meaning("y", {"units": "degrees North"}), meaning("lat", {"units": "m"}), meaning("station", {})
    ('latitude', 'number', 'label')
    """
    standard, unit = _word(attributes.get("standard_name", "")), _word(attributes.get("units", ""))
    if attributes.get("cf_role") == "timeseries_id" or standard in _BY_STANDARD_NAME:
        return _BY_STANDARD_NAME.get(standard, "label")
    if unit in _BY_UNIT:
        return _BY_UNIT[unit]
    if standard in _VERTICAL or attributes.get("axis") == "Z":
        return "vertical"
    if unit not in (*_ANGLES, "1") or standard.startswith("projection"):
        return _BY_NAME.get(_word(name)) if _BY_NAME.get(_word(name)) == "vertical" else "number"
    word = _word(name)
    if word in _BY_NAME:
        return _BY_NAME[word]
    if unit in _ANGLES[1:] and attributes.get("axis") in ("X", "Y"):
        return "longitude" if attributes["axis"] == "X" else "latitude"
    if _STATION.fullmatch(word):
        return "label"
    return "number" if word in _OF_NUMBERS else None


def is_id(name: str) -> bool:
    """Whether a name is that of identifiers, such as ``row_id``."""
    return _ID.fullmatch(name.strip()) is not None


def _word(text: Any) -> str:
    """The text in lower case, without spaces and underscores."""
    return re.sub(r"[\s_\-.]+", "", str(text).lower())
