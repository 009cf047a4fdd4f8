"""TIFF images through tifffile: bands and pages, their number type, and where on Earth they lie.

The GDAL_NODATA tag tells the value of a gap. Written again: the first series of images, with its layout, compression
(deflate where that cannot be written or loses information), resolution and geographic tags; overviews are left out.
"""

import copy
import io
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from gpytorch_gaps.formats.opened import Opened, reading, require_numbers, single_array
from gpytorch_gaps.formats.values import ArrayFile, as_array
from gpytorch_gaps.utils.files import atomic_write

METADATA, NODATA = 42112, 42113  # of GDAL: an XML text, and the value of a gap
# Scale, tie points, transformation, keys, doubles and texts of GeoTIFF; metadata and gap value of GDAL; RPC camera.
GEOGRAPHY = (33550, 33922, 34264, 34735, 34736, 34737, METADATA, NODATA, 50844)
# Document, maker, model, page, date, artist, computer; XMP; copyright; colour profile.
DOCUMENT = (269, 271, 272, 285, 306, 315, 316, 700, 33432, 34675)
DEFLATE = 8
CLASSIC_BYTES = 2**32 - 2**25  # what offsets of 32 bits reach, with room for tags
# Items of GDAL's metadata that are true of values, and not of their standard deviations.
OF_VALUES = re.compile(rb"""\s*<Item\b[^>]*\b(role=["']offset["']|name=["']STATISTICS_)[^>]*>.*?</Item>""", re.DOTALL)
NEGATIVE_SCALE = re.compile(rb"""(<Item\b[^>]*\brole=["']scale["'][^>]*>\s*)-""")
LOSSLESS = (1, 5, DEFLATE, 32773, 32946, 34925, 50000)  # none, LZW, deflate, packbits, old deflate, LZMA, zstd


class Tiff(ArrayFile):
    suffixes = (".tif", ".tiff")
    packages = ("tifffile",)

    options: dict[str, Any]  # for TiffWriter.write
    container: dict[str, Any]  # for TiffWriter

    @classmethod
    def read(cls, path: Path, variable: str | None, gap_value: float | None) -> Opened:
        import tifffile

        with reading(path, "a TIFF image"), tifffile.TiffFile(path) as file:
            held, palette = file.series[0].asarray(), file.series[0].keyframe.photometric == 3
            nodata = _nodata(file.series[0].keyframe)
            options, others = _options(file.series[0]), len(file.series) - 1
            container = {"bigtiff": file.is_bigtiff, "byteorder": file.byteorder}
        require_numbers(path, "the image", held.shape, held.dtype)
        if palette:
            raise ValueError(f"{path}: its pixels are colours of a palette, expected numbers, such as gray or RGB")
        if others:
            warnings.warn(f"{path}: only the first of {others + 1} series of images is read and written", stacklevel=3)
        held = held.astype(held.dtype.newbyteorder("="), copy=False)
        opened = cls(path, held, [value for value in (nodata, gap_value) if value is not None])
        opened.options, opened.container = options, container
        return opened

    def _write_again(self, filled: Any, path: Path, lossless: bool) -> None:
        array = self._converted(filled, lossless)
        options = _possible(self.options, self.container, array.dtype)
        if lossless:  # what marks a gap in the file may well be one of the numbers now
            options["extratags"] = [tag for tag in options["extratags"] if tag[0] != NODATA]
        content = _encoded(array, self.container, options)
        atomic_write(path, lambda stream: stream.write(content))

    def _of_deviations(self) -> Opened:
        """Stored values read as ``scale x stored + offset``, their deviations as ``|scale| x stored``."""
        result = copy.copy(self)
        result.options = {**self.options, "extratags": [_of_deviations(tag) for tag in self.options["extratags"]]}
        return result

    @classmethod
    def _write_new(cls, opened: Opened, filled: Any, path: Path) -> None:
        array = as_array(opened, filled, path)
        color = array.ndim == 3 and array.shape[-1] == 3 and array.dtype == np.uint8
        content = _encoded(array, {}, {"photometric": "rgb" if color else "minisblack", "compression": DEFLATE})
        atomic_write(path, lambda stream: stream.write(content))

    @classmethod
    def _refuse(cls, opened: Opened, path: Path, lossless: bool) -> None:
        shape = tuple(single_array(opened, opened.data, path).shape)
        if len(shape) not in (2, 3) and not isinstance(opened, cls):
            raise ValueError(
                f"output: {opened.path} has the shape {shape}, but a {path.suffix} image is written from two or three "
                "dimensions; write .npy, .npz, .nc or .zarr"
            )


def _nodata(page: Any) -> float | None:
    """The value of a gap; None where there is none, or where it is NaN, which is a gap without being told."""
    if NODATA not in page.tags:
        return None
    text = str(page.tags[NODATA].value).strip("\0 ")
    value = float(text) if text else np.nan
    if np.isnan(value):
        return None
    return int(text) if text.lstrip("+-").isdigit() else value


def _options(series: Any) -> dict[str, Any]:
    """What tells TiffWriter to lay the images out as they are."""
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
        "description": _text(page.description) or None,
        "software": _text(page.software) or False,  # None would be "tifffile.py"
        "extratags": [
            (tag.code, tag.dtype, tag.count, _text(tag.value), _on_first_page_alone(series, tag.code))
            for tag in page.tags
            if tag.code in (*GEOGRAPHY, *DOCUMENT)
        ],
    }


def _of_deviations(tag: tuple) -> tuple:
    """A tag, as :func:`_options` lists them, without what is not true of deviations."""
    code, kind, _, value, *rest = tag
    if code != METADATA:
        return tag
    text = NEGATIVE_SCALE.sub(rb"\1", OF_VALUES.sub(b"", value))
    return code, kind, len(text) + 1, text, *rest  # counted with the NUL at its end


def _text(value: Any) -> Any:
    """Text as bytes, for tifffile takes no other letters than those of ASCII in a string."""
    return value.encode() if isinstance(value, str) else value


def _on_first_page_alone(series: Any, code: int) -> bool:
    return len(series.pages) > 1 and code not in getattr(series.pages[1], "tags", {code: None})


def _encoded(array: np.ndarray, container: dict[str, Any], options: dict[str, Any]) -> bytes:
    import tifffile

    stream = io.BytesIO()
    container = {**container, "bigtiff": container.get("bigtiff") or array.nbytes > CLASSIC_BYTES}
    with tifffile.TiffWriter(stream, **container) as writer:
        writer.write(array, metadata=None, **options)
    return stream.getvalue()


def _possible(options: dict[str, Any], container: dict[str, Any], dtype: np.dtype) -> dict[str, Any]:
    """`options`, or plain deflate where their compression needs a package that is not there or another number type."""
    trial = {key: options[key] for key in ("compression", "predictor")}
    predictor = {None: None, 2: 2, 3: 3}.get(options["predictor"])
    if predictor is not None:
        trial["predictor"] = 3 if dtype.kind == "f" else 2
    try:
        _encoded(np.zeros((16, 16), dtype), container, {"photometric": "minisblack", **trial})
    except Exception:  # whatever the missing codec says
        trial = {"compression": DEFLATE, "predictor": None}
    return {**options, **trial}
