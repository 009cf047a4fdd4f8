"""The axes of a DataArray: coordinates, or positions of stations, interpreted by CF attributes and its raster."""

from dataclasses import replace
from typing import Any

from gpytorch_gaps.filling.axes.axis import Axes, Axis
from gpytorch_gaps.filling.axes.describe import describe_axes
from gpytorch_gaps.filling.axes.georeference import grid_mapping, is_geographic, of_raster
from gpytorch_gaps.filling.axes.stations import of_labels, station_axis


def axes_of(field: Any, axes: Axes = None, dataset: Any = None) -> list[Axis]:
    """One description per dimension of a DataArray.

    :param field: the DataArray.
    :param axes: coordinates to use instead of its own.
    :param dataset: the Dataset that it comes from, which may contain its grid mapping.
    """
    names = [str(dim) for dim in field.dims]
    known = [field.coords[dim] if dim in field.indexes else None for dim in field.dims]
    geographic = is_geographic(grid_mapping(field, dataset))
    attributes = [
        of_raster(name, {} if one is None else one.attrs, geographic) for name, one in zip(names, known, strict=True)
    ]
    if axes is not None:
        return describe_axes(field.shape, axes, names, attributes)
    found = [station_axis(field, dim) for dim in field.dims]
    coordinates: list[Any] = []
    for dim, one, places in zip(field.dims, known, found, strict=True):
        if isinstance(places, Axis):
            coordinates.append(None)
        elif places:
            coordinates.append([f"{entry}" for entry in (range(field.sizes[dim]) if one is None else one.values)])
        else:
            coordinates.append(_auxiliary(field, dim) if one is None else one.values)
    described = describe_axes(field.shape, coordinates, names, attributes)
    return [
        places if isinstance(places, Axis) else replace(axis, note=places or axis.note)
        for axis, places in zip(described, found, strict=True)
    ]


def _auxiliary(field: Any, dim: Any) -> Any:
    """Times or names along a dimension without coordinates, from auxiliary coordinates; None if there are none."""
    times = [one for one in field.coords.values() if one.dims == (dim,) and one.dtype.kind == "M"]
    return times[0].values if len(times) == 1 else of_labels(field, dim)
