"""PNG images through Pillow: 8-bit gray or RGB, 16-bit gray, each with alpha or without.

A pixel is a gap if its alpha is 0, or if all its channels are `gap_value`. `data` are the colours without alpha, masked
at the gaps. When the image is written again, filled pixels become opaque, and the alpha of other pixels does not
change. Palettes are converted to RGB, a transparent 8-bit colour to alpha, and gray of fewer than 8 bits to 8 bits.
"""

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from gpytorch_gaps.formats.arrays import ArrayFile, with_filled
from gpytorch_gaps.formats.opened import OpenedFile, reading, single_array
from gpytorch_gaps.utils.dtypes import equal_to, is_gap, next_to
from gpytorch_gaps.utils.files import atomic_write

SIGNATURE = b"\x89PNG\r\n\x1a\n"
MODES = {"1": "L", "L": "L", "LA": "LA", "RGB": "RGB", "RGBA": "RGBA", "P": "RGB", "PA": "RGBA"}
WITH_ALPHA = {"L": "LA", "RGB": "RGBA", "LA": "LA", "RGBA": "RGBA"}
COPIED_CHUNKS = (b"cHRM", b"cICP", b"gAMA", b"sRGB", b"iTXt", b"tEXt", b"zTXt")  # colour spaces and texts


class PngFile(ArrayFile):
    suffixes = (".png",)
    packages = ("PIL.Image",)

    alpha: np.ndarray | None  # the `options` are resolution, colour profile, texts, EXIF, a transparent 16-bit gray

    @classmethod
    def read(cls, path: Path, variable: str | None, gap_value: float | None) -> OpenedFile:
        from PIL import Image

        with reading(path, "a PNG image"):
            with path.open("rb") as stream:
                start = stream.read(26)
            if start[:8] != SIGNATURE:
                raise ValueError("its first bytes are not those of a PNG file")
            depth, color = start[24], start[25]
        if depth == 16 and color != 0:
            raise ValueError(
                f"{path}: has 16 bits per colour, of which Pillow keeps 8; expected 8, 16 bits of gray, or a .tif"
            )
        with reading(path, "a PNG image"), Image.open(path) as image:
            pixels, alpha = _pixels(image)
            frames = getattr(image, "n_frames", 1)
            kept = ("dpi", "icc_profile", "exif", *["transparency"] * (depth == 16))
            options = {key: image.info[key] for key in kept if key in image.info}
            options["pnginfo"] = _copied_chunks(path)
        if frames > 1:
            warnings.warn(f"{path}: only the first of {frames} images is read and written", stacklevel=3)
        opened = cls(path, pixels)
        opened.reserved = [value for value in (gap_value, options.get("transparency")) if value is not None]
        opened.alpha, opened.options = alpha, options
        gap = np.zeros(pixels.shape[:2], dtype=bool) if alpha is None else alpha == 0
        for value in opened.reserved:
            gap |= equal_to(pixels, value).reshape(*gap.shape, -1).all(axis=2)
        opened.data = np.ma.MaskedArray(pixels, mask=gap if pixels.ndim == 2 else np.dstack([gap] * pixels.shape[2]))
        return opened

    def _write_again(self, filled: Any, path: Path, lossless: bool) -> None:
        pixels = self._stored(filled, lossless)
        if self.alpha is not None:
            pixels = np.dstack([pixels, np.where(self._filled_pixels(filled), 255, self.alpha).astype(np.uint8)])
        self._save(pixels, path, **self.options)

    def _filled_pixels(self, filled: Any) -> np.ndarray:
        new = is_gap(self.data) & ~is_gap(filled)
        return new if new.ndim == 2 else new.all(axis=2)

    def _stored(self, filled: Any, lossless: bool) -> np.ndarray:
        """A colour marks a gap if all of its channels do, so that it is enough to change one of them."""
        if lossless or self.held.ndim == 2:
            return super()._stored(filled, lossless)
        pixels = with_filled(self.held, self.data, filled)
        for value in self.reserved:
            marked = self._filled_pixels(filled) & equal_to(pixels, value).all(axis=2)
            if marked.any():
                pixels[marked, 0] = next_to(value, pixels.dtype, self.reserved)
        return pixels

    @classmethod
    def _save(cls, array: np.ndarray, path: Path, **options: Any) -> None:
        from PIL import Image

        pixels = array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array
        stream = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(pixels)).save(stream, "PNG", **options)
        atomic_write(path, lambda out: out.write(stream.getvalue()))

    @classmethod
    def _refuse(cls, opened: OpenedFile, path: Path, lossless: bool) -> None:
        one = single_array(opened, opened.data, path)
        shape = tuple(one.shape)
        dtype = np.asarray(one.iloc[:1]).dtype if hasattr(one, "iloc") else one.dtype
        possible = len(shape) == 2 and dtype in (np.uint8, np.uint16)
        possible |= len(shape) == 3 and shape[-1] in (1, 2, 3, 4) and dtype == np.uint8
        if lossless or not possible:
            got = "floating numbers" if lossless else f"{dtype} of the shape {shape}"
            raise ValueError(
                f"output: {opened.path} would give {got}, but a .png image has 8 bits of (height, width[, channels]) "
                "or 16 bits of (height, width); write .tif or .npy"
            )


def _pixels(image: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Colours, and alpha if there is any."""
    if image.mode.startswith("I"):
        return np.array(image).astype(np.uint16), None
    mode = MODES[image.mode]
    if "transparency" in image.info:
        mode = WITH_ALPHA[mode]
    array = np.array(image.convert(mode))
    if mode in ("L", "RGB"):
        return array, None
    return (array[..., 0] if mode == "LA" else array[..., :3]), array[..., -1]


def _copied_chunks(path: Path) -> Any:
    """The `COPIED_CHUNKS` of a PNG file. A chunk is its length, name, content and checksum."""
    from PIL.PngImagePlugin import PngInfo

    found = PngInfo()
    with path.open("rb") as stream:
        stream.seek(len(SIGNATURE))
        while len(start := stream.read(8)) == 8:
            content = stream.read(int.from_bytes(start[:4], "big"))
            stream.seek(4, io.SEEK_CUR)
            if start[4:] in COPIED_CHUNKS:
                found.add(start[4:], content)
    return found
