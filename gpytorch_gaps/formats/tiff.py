"""TIFF images through tifffile: bands and pages, number type, and geographic tags.

The tag GDAL_NODATA contains the number that marks a gap. The first series of images is written again, with its layout,
resolution, geographic tags and compression. Deflate replaces a compression that cannot be written or loses information.
Overviews are not written. (GDAL, through rasterio, would lose pages, byte order, number types and unknown tags.)
"""

import copy
import io
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from gpytorch_gaps.formats.arrays import ArrayFile, native
from gpytorch_gaps.formats.geotiff import image_axes
from gpytorch_gaps.formats.opened import OpenedFile, reading, require_numbers
from gpytorch_gaps.utils.files import atomic_write

METADATA_TAG, NODATA_TAG = 42112, 42113  # tags of GDAL: an XML text, and the number that marks a gap
# GeoTIFF: scale, tie points, transformation, keys, doubles, texts; GDAL: metadata, gap value; RPC camera.
GEOGRAPHIC_TAGS = (33550, 33922, 34264, 34735, 34736, 34737, METADATA_TAG, NODATA_TAG, 50844)
# Document name, maker, model, page name, date, artist, computer; XMP; copyright; colour profile.
DOCUMENT_TAGS = (269, 271, 272, 285, 306, 315, 316, 700, 33432, 34675)
DEFLATE = 8
LOSSLESS = (1, 5, DEFLATE, 32773, 32946, 34925, 50000)  # none, LZW, deflate, packbits, old deflate, LZMA, zstd
CLASSIC_BYTES = 2**32 - 2**25  # largest size of an image with 32-bit offsets, with space for tags
# Items of GDAL's metadata that describe values but not their standard deviations.
VALUE_ITEMS = re.compile(rb"""\s*<Item\b[^>]*\b(role=["']offset["']|name=["']STATISTICS_)[^>]*>.*?</Item>""", re.DOTALL)
NEGATIVE_SCALE = re.compile(rb"""(<Item\b[^>]*\brole=["']scale["'][^>]*>\s*)-""")


class TiffFile(ArrayFile):
    suffixes = (".tif", ".tiff")
    packages = ("tifffile",)
    dimensions = range(2, 4)
    limits = "image has two or three dimensions"

    container: dict[str, Any]  # arguments of TiffWriter; the `options` are those of its method `write`

    @classmethod
    def read(cls, path: Path, variable: str | None, gap_value: float | None) -> OpenedFile:
        import tifffile

        with reading(path, "a TIFF image"), tifffile.TiffFile(path) as file:
            series = file.series[0]
            held, palette = series.asarray(), series.keyframe.photometric == 3
            nodata, options, others = _nodata(series.keyframe), _options(series), len(file.series) - 1
            container = {"bigtiff": file.is_bigtiff, "byteorder": file.byteorder}
            axes = image_axes(series, held.shape)
        require_numbers(path, "the image", held.shape, held.dtype)
        if palette:
            raise ValueError(f"{path}: its pixels are colours of a palette, expected numbers, such as gray or RGB")
        if others:
            warnings.warn(f"{path}: only the first of {others + 1} series of images is read and written", stacklevel=3)
        opened = cls(path, native(held), [value for value in (nodata, gap_value) if value is not None])
        opened.options, opened.container, opened.axes = options, container, axes
        opened.coordinates = [None if known is None else (name, known) for name, known in axes.items()]
        return opened

    def _write_again(self, filled: Any, path: Path, lossless: bool) -> None:
        array = self._stored(filled, lossless)
        options = _possible(self.options, self.container, array.dtype)
        if lossless:  # the number that marks a gap may be an ordinary number of the result
            options["extratags"] = [tag for tag in options["extratags"] if tag[0] != NODATA_TAG]
        content = _encoded(array, self.container, options)
        atomic_write(path, lambda stream: stream.write(content))

    @classmethod
    def _save(cls, array: np.ndarray, path: Path, **options: Any) -> None:
        color = array.ndim == 3 and array.shape[-1] == 3 and array.dtype == np.uint8
        content = _encoded(array, {}, {"photometric": "rgb" if color else "minisblack", "compression": DEFLATE})
        atomic_write(path, lambda stream: stream.write(content))

    def _of_deviations(self, deviations: Any) -> OpenedFile:
        """Values are ``scale x stored + offset``; their standard deviations are ``|scale| x stored``."""
        result = copy.copy(self)
        result.options = {**self.options, "extratags": [_tag_of_deviations(tag) for tag in self.options["extratags"]]}
        return result


def _nodata(page: Any) -> float | None:
    """The number that marks a gap; None if there is none, or if it is NaN, which is always a gap."""
    if NODATA_TAG not in page.tags:
        return None
    text = str(page.tags[NODATA_TAG].value).strip("\0 ")
    value = float(text) if text else np.nan
    if np.isnan(value):
        return None
    return int(text) if text.lstrip("+-").isdigit() else value


def _options(series: Any) -> dict[str, Any]:
    """Arguments of ``TiffWriter.write`` for the layout and tags of a series."""
    page = series.keyframe
    color = page.photometric in (2, 6)  # RGB, and YCbCr, which is read as RGB
    several = page.samplesperpixel > 1
    return {
        "photometric": 2 if color else page.photometric,
        "planarconfig": page.planarconfig if several else None,
        "extrasamples": page.extrasamples if several and page.extrasamples else None,
        "compression": page.compression if page.compression in LOSSLESS else DEFLATE,
        "predictor": page.predictor if page.predictor != 1 else None,
        "tile": page.tile if page.is_tiled else None,
        "rowsperstrip": None if page.is_tiled else page.rowsperstrip,
        "resolution": page.resolution if 282 in page.tags else None,
        "resolutionunit": page.resolutionunit if 296 in page.tags else None,
        "description": _as_bytes(page.description) or None,
        "software": _as_bytes(page.software) or False,  # None would become "tifffile.py"
        "extratags": [
            (tag.code, tag.dtype, tag.count, _as_bytes(tag.value), _is_on_first_page_only(series, tag.code))
            for tag in page.tags
            if tag.code in (*GEOGRAPHIC_TAGS, *DOCUMENT_TAGS)
        ],
    }


def _as_bytes(value: Any) -> Any:
    """Text as bytes: tifffile accepts only ASCII in strings."""
    return value.encode() if isinstance(value, str) else value


def _is_on_first_page_only(series: Any, code: int) -> bool:
    return len(series.pages) > 1 and code not in getattr(series.pages[1], "tags", {code: None})


def _tag_of_deviations(tag: tuple) -> tuple:
    """A tag, in the form of `_options`, without the items that describe only values."""
    code, kind, _, value, *rest = tag
    if code != METADATA_TAG:
        return tag
    text = NEGATIVE_SCALE.sub(rb"\1", VALUE_ITEMS.sub(b"", value))
    return code, kind, len(text) + 1, text, *rest  # the count includes the NUL at the end


def _encoded(array: np.ndarray, container: dict[str, Any], options: dict[str, Any]) -> bytes:
    import tifffile

    stream = io.BytesIO()
    container = {**container, "bigtiff": container.get("bigtiff") or array.nbytes > CLASSIC_BYTES}
    with tifffile.TiffWriter(stream, **container) as writer:
        writer.write(array, metadata=None, **options)
    return stream.getvalue()


def _possible(options: dict[str, Any], container: dict[str, Any], dtype: np.dtype) -> dict[str, Any]:
    """`options`, with deflate if their compression needs a missing package or another number type."""
    trial = {key: options[key] for key in ("compression", "predictor")}
    if options["predictor"] in (2, 3):
        trial["predictor"] = 3 if dtype.kind == "f" else 2
    try:
        _encoded(np.zeros((16, 16), dtype), container, {"photometric": "minisblack", **trial})
    except Exception:  # codecs raise many types
        trial = {"compression": DEFLATE, "predictor": None}
    return {**options, **trial}
