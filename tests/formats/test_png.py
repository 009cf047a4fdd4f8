"""PNG images: the same pixels but for the gaps."""

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from gpytorch_gaps.formats import open_file, png

SHAPE = (6, 5)
GAP = (slice(2, 4), slice(1, 3))


def noise(shape=SHAPE, dtype="uint8", low=1):
    return np.random.default_rng(0).integers(low, np.iinfo(dtype).max, shape).astype(dtype)


def transparency():
    """0 in the gap, and not quite opaque elsewhere."""
    alpha = noise(low=100)
    alpha[GAP] = 0
    return alpha


def saved(tmp_path, pixels, **about):
    path = tmp_path / "in.png"
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(path, **about)
    return path


def pixels_of(path):
    with Image.open(path) as image:
        return np.array(image)


def mask(opened):
    return np.ma.getmaskarray(opened.data)


def again(tmp_path, opened, value):
    filled = np.where(mask(opened), value, np.ma.getdata(opened.data) + 1e-9)
    opened.write(filled, tmp_path / "out.png")
    return pixels_of(tmp_path / "out.png")


@pytest.mark.parametrize("channels", [1, 3])
def test_transparent_pixels_are_gaps(tmp_path, channels):
    before = np.dstack([noise((*SHAPE, channels)), transparency()])
    opened = open_file(saved(tmp_path, before))
    gap = transparency() == 0
    assert opened.data.shape == (SHAPE if channels == 1 else (*SHAPE, 3))
    np.testing.assert_array_equal(mask(opened).reshape(*SHAPE, -1), np.dstack([gap] * channels))
    expected = before.copy()
    expected[GAP] = [7] * channels + [255]
    result = again(tmp_path, opened, 7.4)
    assert result.dtype == np.uint8
    np.testing.assert_array_equal(result, expected)


def test_gaps_that_were_not_filled_stay_transparent(tmp_path):
    before = np.dstack([noise((*SHAPE, 3)), transparency()])
    opened = open_file(saved(tmp_path, before))
    filled = np.where(mask(opened), np.nan, 1.0)
    filled[2, 1] = 9.0
    opened.write(filled, tmp_path / "out.png")
    before[2, 1] = [9, 9, 9, 255]
    np.testing.assert_array_equal(pixels_of(tmp_path / "out.png"), before)


@pytest.mark.parametrize(
    "pixels", [noise(), noise((*SHAPE, 3)), noise(dtype="uint16")], ids=["gray", "colour", "gray of 16 bits"]
)
def test_gap_values(tmp_path, pixels):
    pixels[GAP] = 0
    pixels[0, 0, ...] = 1
    if pixels.ndim == 3:
        pixels[0, 1] = [0, 0, 5]  # one channel is no gap
    opened = open_file(saved(tmp_path, pixels), gap_value=0)
    assert opened.data.dtype == pixels.dtype
    gap = np.zeros(pixels.shape, dtype=bool)
    gap[GAP] = True
    np.testing.assert_array_equal(mask(opened), gap)
    result = again(tmp_path, opened, 1e9)
    assert result.dtype == pixels.dtype
    np.testing.assert_array_equal(result, np.where(gap, np.iinfo(pixels.dtype).max, pixels))


@pytest.mark.parametrize("shape", [SHAPE, (*SHAPE, 3)])
def test_no_fill_is_a_gap_again(tmp_path, shape):
    pixels = noise(shape)
    pixels[GAP] = 0
    opened = open_file(saved(tmp_path, pixels), gap_value=0)
    result = again(tmp_path, opened, 0.0)
    expected = pixels.copy()
    expected[GAP] = 1 if len(shape) == 2 else [1, 0, 0]
    np.testing.assert_array_equal(result, expected)
    assert not mask(open_file(tmp_path / "out.png", gap_value=0)).any()


def test_a_transparent_gray_of_16_bits(tmp_path):
    pixels = noise(dtype="uint16")
    pixels[GAP] = 513
    opened = open_file(saved(tmp_path, pixels, transparency=513))
    assert mask(opened).sum() == (pixels == 513).sum()
    result = again(tmp_path, opened, 513.0)
    np.testing.assert_array_equal(result, np.where(pixels == 513, 512, pixels))
    with Image.open(tmp_path / "out.png") as image:
        assert image.info["transparency"] == 513


@pytest.mark.parametrize(("pixels", "key"), [(noise(), 9), (noise((*SHAPE, 3)), (9, 8, 7))], ids=["gray", "colour"])
def test_a_transparent_colour_becomes_alpha(tmp_path, pixels, key):
    pixels[GAP] = key
    opened = open_file(saved(tmp_path, pixels, transparency=key))
    gap = mask(opened).reshape(*SHAPE, -1).all(axis=2)
    np.testing.assert_array_equal(gap, (pixels == key).reshape(*SHAPE, -1).all(axis=2))
    result = again(tmp_path, opened, 20.0)
    assert (result[..., -1] == 255).all()
    assert (result[GAP][..., :-1] == 20).all()
    np.testing.assert_array_equal(result[~gap][:, :-1], pixels.reshape(*SHAPE, -1)[~gap])


@pytest.mark.parametrize("key", [None, 0])
def test_palettes_become_colours(tmp_path, key):
    image = Image.fromarray(noise((*SHAPE, 3))).quantize(4)
    opened = open_file(saved(tmp_path, image, **({} if key is None else {"transparency": key})))
    np.testing.assert_array_equal(np.ma.getdata(opened.data), np.array(image.convert("RGB")))
    expected = np.zeros(SHAPE, dtype=bool) if key is None else np.array(image) == key
    np.testing.assert_array_equal(mask(opened)[..., 0], expected)


@pytest.mark.parametrize(("bits", "step"), [(1, 255), (2, 85), (4, 17)])
def test_gray_of_few_bits_becomes_8(tmp_path, bits, step):
    levels = noise(low=0) >> (8 - bits)
    image = Image.fromarray(levels.astype(bool)) if bits == 1 else Image.fromarray(levels * step)
    opened = open_file(saved(tmp_path, image, **({} if bits == 1 else {"bits": bits})))
    np.testing.assert_array_equal(opened.data, levels * step)


def test_what_the_file_tells_of_itself_stays(tmp_path):
    info = PngInfo()
    info.add_text("Title", "A field with gaps")
    info.add_itxt("Größe", "°C", "de", "Größe", zip=True)
    info.add(b"gAMA", (45455).to_bytes(4, "big"))
    exif = Image.Exif()
    exif[0x010E] = "described"
    about = {"pnginfo": info, "dpi": (300, 150), "icc_profile": b"profile", "exif": exif}
    opened = open_file(saved(tmp_path, noise(), **about), gap_value=1)
    again(tmp_path, opened, 2.0)
    with Image.open(tmp_path / "in.png") as before, Image.open(tmp_path / "out.png") as after:
        before.load()
        after.load()
        assert set(before.info) == {"Title", "Größe", "gamma", "dpi", "icc_profile", "exif"}
        assert after.info == before.info
        assert after.text["Größe"].lang == "de"


def test_only_the_first_image_of_an_animation(tmp_path):
    path = saved(tmp_path, noise(), save_all=True, append_images=[Image.fromarray(noise()[::-1])])
    with pytest.warns(UserWarning, match=r"in\.png: only the first of 2 images is read and written"):
        opened = open_file(path)
    np.testing.assert_array_equal(opened.data, noise())


@pytest.mark.parametrize("kept", [0, 8, 20, 60, -30])
def test_files_that_were_cut_off_are_refused(tmp_path, kept):
    path = saved(tmp_path, noise((60, 50)))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"in\.png: not readable as a PNG image \("):
        open_file(path)


def test_other_images_are_refused(tmp_path):
    Image.fromarray(noise()).save(tmp_path / "in.png", "JPEG")
    with pytest.raises(
        ValueError, match=r"in\.png: not readable as a PNG image \(its first bytes are not those of a PNG file\)"
    ):
        open_file(tmp_path / "in.png")


@pytest.mark.parametrize("color", [2, 4, 6])
def test_colours_of_16_bits_are_refused(tmp_path, color):
    content = bytearray(saved(tmp_path, noise()).read_bytes())
    content[24:26] = bytes([16, color])
    (tmp_path / "in.png").write_bytes(content)
    with pytest.raises(ValueError, match=r"in\.png: has 16 bits per colour, of which Pillow keeps 8; expected 8,"):
        open_file(tmp_path / "in.png")


def test_floating_numbers_are_refused(tmp_path):
    opened = open_file(saved(tmp_path, noise()))
    with pytest.raises(ValueError, match=r"output: .*in\.png would give floating numbers, but a \.png image has"):
        opened.write(np.ones(SHAPE), tmp_path / "out.png", lossless=True)
    np.save(tmp_path / "in.npy", np.ones(SHAPE))
    with pytest.raises(ValueError, match=r"output: .*in\.npy would give float64 of the shape \(6, 5\)"):
        open_file(tmp_path / "in.npy").check(tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()


@pytest.mark.parametrize(
    "array",
    [noise(), noise(dtype="uint16"), noise((*SHAPE, 1)), noise((*SHAPE, 2)), noise((*SHAPE, 3)), noise((*SHAPE, 4))],
)
def test_arrays_become_images(tmp_path, array):
    array.flat[0] = 0
    np.save(tmp_path / "in.npy", array.astype(array.dtype.newbyteorder(">")))
    open_file(tmp_path / "in.npy", gap_value=0).write(np.full(array.shape, 5.0), tmp_path / "out.png")
    array.flat[0] = 5
    np.testing.assert_array_equal(pixels_of(tmp_path / "out.png").reshape(array.shape), array)


@pytest.mark.parametrize("error", [OSError("no space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch, error):
    opened = open_file(saved(tmp_path, noise()))
    (tmp_path / "out.png").write_bytes(b"old")

    def half(path, write):
        def and_fail(stream):
            stream.write(b"half")
            raise error

        atomic_write(path, and_fail)

    atomic_write = png.atomic_write
    monkeypatch.setattr(png, "atomic_write", half)
    with pytest.raises(type(error)):
        opened.write(np.ones(SHAPE), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes() == b"old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["in.png", "out.png"]
