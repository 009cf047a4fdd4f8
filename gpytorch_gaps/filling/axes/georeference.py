"""Whether the x and y of a raster are degrees or lengths, from the description of its coordinate reference system.

CF and rioxarray store the description in a variable without dimensions. The attribute ``grid_mapping`` of a field is
its name. Its ``crs_wkt`` is a text such as ``PROJCS["WGS 84 / UTM zone 30N", ...`` or ``GEOGCS["WGS 84", ...``.
"""

import re
from collections.abc import Mapping
from typing import Any

_PROJECTED = re.compile(r"\bPROJ(CS|CRS|ECTEDCRS)\s*[\[(]", re.IGNORECASE)
_GEOGRAPHIC = re.compile(r"\b(GEOGCS|GEOGCRS|GEOGRAPHICCRS|GEODCRS|GEODETICCRS)\s*[\[(]", re.IGNORECASE)
_NAMES = ("spatial_ref", "crs", "projection", "grid_mapping")  # names of variables that describe the system
_DEGREES = {"x": {"standard_name": "longitude"}, "y": {"standard_name": "latitude"}}


def is_geographic(description: Mapping[str, Any]) -> bool | None:
    """Whether coordinates are degrees, from the attributes of a grid mapping; None if it is not clear.

    >>> is_geographic({"crs_wkt": 'PROJCS["UTM", GEOGCS["WGS 84"]]'}), is_geographic({"crs_wkt": 'GEOGCS["WGS 84"]'})
    (False, True)
    """
    text = str(description.get("crs_wkt") or description.get("spatial_ref") or description.get("crs") or "")
    if _PROJECTED.search(text) or "+proj=utm" in text:
        return False
    if _GEOGRAPHIC.search(text) or "+proj=longlat" in text or re.search(r"epsg:4326\b", text, re.IGNORECASE):
        return True
    mapping = description.get("grid_mapping_name")
    return None if mapping is None else str(mapping).endswith("latitude_longitude")


def grid_mapping(field: Any, dataset: Any = None) -> dict[str, Any]:
    """Attributes of the grid mapping of a DataArray, from one of its coordinates or a variable of its Dataset."""
    named = field.attrs.get("grid_mapping", field.encoding.get("grid_mapping"))
    for name in (named, *_NAMES):
        for holder in (field.coords, {} if dataset is None else dataset.variables):
            if name is not None and name in holder and holder[name].ndim == 0:
                return dict(holder[name].attrs)
    return {"crs": field.attrs["crs"]} if "crs" in field.attrs else {}


def of_raster(name: str, attributes: Mapping[str, Any], geographic: bool | None) -> Mapping[str, Any]:
    """The attributes of x or y, or those of longitude or latitude if the reference system has degrees."""
    return {**_DEGREES[name.lower()], **attributes} if geographic and name.lower() in _DEGREES else attributes
