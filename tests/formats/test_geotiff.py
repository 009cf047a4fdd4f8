"""Where the pixels of a GeoTIFF lie, and what its dimensions are."""

import numpy as np
import pytest
import tifffile

from gpytorch_gaps.filling.arrays.adapters import adapt
from gpytorch_gaps.formats import open_file

SCALE, TIE = (33550, "d", 3, (10.0, 20.0, 0.0)), (33922, "d", 6, (0.0, 0.0, 0.0, 500000.0, 4000000.0, 0.0))
MATRIX = (34264, "d", 16, (10.0, 0, 0, 500000.0, 0, -20.0, 0, 4000000.0, 0, 0, 0, 0, 0, 0, 0, 1))


def keys(model, raster=1):
    return 34735, "H", 12, (1, 1, 0, 2, 1024, 0, 1, model, 1025, 0, 1, raster)


def axes_of(path, array, *tags, **options):
    tifffile.imwrite(path, array, extratags=[(*tag, True) for tag in tags], photometric="minisblack", **options)
    opened = open_file(path)
    return opened.axes, [axis.kind for axis in adapt(opened.data, opened.axes).axes]


@pytest.mark.parametrize("place", [(SCALE, TIE), (MATRIX,)], ids=["tie point", "transformation"])
def test_pixels_lie_where_the_tags_say(tmp_path, place):
    axes, kinds = axes_of(tmp_path / "a.tif", np.zeros((3, 4), "f4"), *place, keys(model=1))
    assert (list(axes), kinds) == (["y", "x"], ["number", "number"])
    np.testing.assert_allclose(axes["x"], [500005, 500015, 500025, 500035])
    np.testing.assert_allclose(axes["y"], [3999990, 3999970, 3999950])
    middles, _ = axes_of(tmp_path / "b.tif", np.zeros((3, 4), "f4"), *place, keys(model=1, raster=2))
    np.testing.assert_allclose(middles["x"], [500000, 500010, 500020, 500030])


def test_pixels_in_degrees_are_latitudes_and_longitudes(tmp_path):
    scale, tie = (33550, "d", 3, (0.5, 0.5, 0.0)), (33922, "d", 6, (0.0, 0.0, 0.0, 10.0, 50.0, 0.0))
    axes, kinds = axes_of(tmp_path / "a.tif", np.zeros((3, 4), "f4"), scale, tie, keys(model=2))
    assert (list(axes), kinds) == (["latitude", "longitude"], ["latitude", "longitude"])
    assert axes["latitude"].tolist() == [49.75, 49.25, 48.75]


@pytest.mark.parametrize(("shape", "config"), [((3, 4, 2), "contig"), ((2, 3, 4), "separate")])
def test_bands_are_labels_wherever_they_are(tmp_path, shape, config):
    axes, kinds = axes_of(tmp_path / "a.tif", np.zeros(shape, "u2"), planarconfig=config)
    assert sorted(axes) == ["band", "x", "y"]
    assert kinds == ["label" if name == "band" else "position" for name in axes]


def test_a_rotated_image_has_no_coordinates(tmp_path):
    matrix = (34264, "d", 16, (10.0, 5.0, 0, 0, 5.0, -20.0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1))
    axes, kinds = axes_of(tmp_path / "a.tif", np.zeros((3, 4), "f4"), matrix, keys(model=1))
    assert axes == {"y": None, "x": None}
    assert kinds == ["position", "position"]
