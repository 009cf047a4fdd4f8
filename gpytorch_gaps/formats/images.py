"""PNG images through Pillow: gray or RGB of 8 bits, gray of 16 bits, each with alpha or without.

A pixel is a gap where its alpha is 0, or where all its channels are `gap_value`. `data` are the colours without alpha,
masked at the gaps. Written again, alpha is opaque where a gap was filled and as it was elsewhere. Palettes become RGB,
a transparent colour of 8 bits becomes alpha, gray of fewer than 8 bits becomes 8 bits.
"""

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from gpytorch_gaps.formats.opened import Opened, reading, single_array
from gpytorch_gaps.formats.values import ArrayFile, as_array, beside, equal_to, is_gap, put
from gpytorch_gaps.utils.files import atomic_write

SIGNATURE = b"\x89PNG\r\n\x1a\n"
MODES = {"1": "L", "L": "L", "LA": "LA", "RGB": "RGB", "RGBA": "RGBA", "P": "RGB", "PA": "RGBA"}
WITH_ALPHA = {"L": "LA", "RGB": "RGBA", "LA": "LA", "RGBA": "RGBA"}

CARRIED = (b"cHRM", b"cICP", b"gAMA", b"sRGB", b"iTXt", b"tEXt", b"zTXt")  # what the colours mean; texts


class Png(ArrayFile):
    suffixes = (".png",)
    packages = ("PIL.Image",)

    alpha: np.ndarray | None
    about: dict[str, Any]  # resolution, colours, texts, EXIF, the gray of 16 bits that is transparent

    @classmethod
    def read(cls, path: Path, variable: str | None, gap_value: float | None) -> Opened:
        from PIL import Image

        with reading(path, "a PNG image"):
            with path.open("rb") as stream:
                start = stream.read(26)
            if start[:8] != SIGNATURE:
                raise ValueError("it does not begin as one")
            depth, color = start[24], start[25]
        if depth == 16 and color != 0:
            raise ValueError(
                f"{path}: has 16 bits a colour, of which Pillow keeps 8; expected 8, 16 bits of gray, or a .tif"
            )
        with reading(path, "a PNG image"), Image.open(path) as image:
            pixels, alpha = _pixels(image)
            frames = getattr(image, "n_frames", 1)
            about: dict[str, Any] = {
                key: image.info[key] for key in ("dpi", "icc_profile", "exif") if key in image.info
            }
            if depth == 16 and "transparency" in image.info:
                about["transparency"] = image.info["transparency"]
            about["pnginfo"] = _carried(path)
        if frames > 1:
            warnings.warn(f"{path}: only the first of {frames} images is read and written", stacklevel=3)
        values = [value for value in (gap_value, about.get("transparency")) if value is not None]
        gap = np.zeros(pixels.shape[:2], dtype=bool) if alpha is None else alpha == 0
        for value in values:
            gap |= equal_to(pixels, value).reshape(*gap.shape, -1).all(axis=2)
        opened = cls(path, pixels)
        opened.data = np.ma.MaskedArray(pixels, mask=gap if pixels.ndim == 2 else np.dstack([gap] * pixels.shape[2]))
        opened.reserved = values
        opened.alpha, opened.about = alpha, about
        return opened

    def _write_again(self, filled: Any, path: Path, lossless: bool) -> None:
        pixels = self._converted(filled, lossless)
        if self.alpha is not None:
            pixels = np.dstack([pixels, np.where(self._filled_pixels(filled), 255, self.alpha).astype(np.uint8)])
        _save(pixels, path, **self.about)

    def _filled_pixels(self, filled: Any) -> np.ndarray:
        new = is_gap(self.data) & ~is_gap(filled)
        return new if new.ndim == 2 else new.all(axis=2)

    def _converted(self, filled: Any, lossless: bool) -> np.ndarray:
        """A colour is a gap where all of its channels are, so that it is enough to move one of them."""
        if lossless or self.held.ndim == 2:
            return super()._converted(filled, lossless)
        pixels = put(self.held, self.data, filled)
        for value in self.reserved:
            again = self._filled_pixels(filled) & equal_to(pixels, value).all(axis=2)
            if again.any():
                pixels[again, 0] = beside(value, pixels.dtype, self.reserved)
        return pixels

    @classmethod
    def _write_new(cls, opened: Opened, filled: Any, path: Path) -> None:
        _save(as_array(opened, filled, path), path)

    @classmethod
    def _refuse(cls, opened: Opened, path: Path, lossless: bool) -> None:
        one = single_array(opened, opened.data, path)
        shape = tuple(one.shape)
        dtype = np.asarray(one.iloc[:1]).dtype if hasattr(one, "iloc") else one.dtype
        possible = len(shape) == 2 and dtype in (np.uint8, np.uint16)
        possible |= len(shape) == 3 and shape[-1] in (1, 2, 3, 4) and dtype == np.uint8
        if lossless or not possible:
            got = "floating numbers" if lossless else f"{dtype} of the shape {shape}"
            raise ValueError(
                f"output: {opened.path} would give {got}, but a .png image holds 8 bits of (height, width[, channels]) "
                "or 16 bits of (height, width); write .tif or .npy"
            )


def _pixels(image: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Colours, and alpha where there is any."""
    if image.mode.startswith("I"):
        return np.array(image).astype(np.uint16), None
    mode = MODES[image.mode]
    if "transparency" in image.info:
        mode = WITH_ALPHA[mode]
    array = np.array(image.convert(mode))
    if mode in ("L", "RGB"):
        return array, None
    return (array[..., 0] if mode == "LA" else array[..., :3]), array[..., -1]


def _carried(path: Path) -> Any:
    """The `CARRIED` chunks of a PNG file: length, name, content, checksum."""
    from PIL.PngImagePlugin import PngInfo

    found = PngInfo()
    with path.open("rb") as stream:
        stream.seek(len(SIGNATURE))
        while len(start := stream.read(8)) == 8:
            content = stream.read(int.from_bytes(start[:4], "big"))
            stream.seek(4, io.SEEK_CUR)
            if start[4:] in CARRIED:
                found.add(start[4:], content)
    return found


def _save(pixels: np.ndarray, path: Path, **about: Any) -> None:
    from PIL import Image

    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[..., 0]
    stream = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(stream, "PNG", **about)
    atomic_write(path, lambda out: out.write(stream.getvalue()))
