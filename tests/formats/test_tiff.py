"""TIFF images: the same numbers but for the gaps, and the same tags."""

from xml.etree import ElementTree

import numpy as np
import pytest
import tifffile

from gpytorch_gaps.formats import open_file, tiff

NAN = float("nan")
NODATA = 42113
UNSTABLE = {273, 279, 324, 325}  # where strips and tiles lie, and how long they are


def noise(shape=(20, 33), dtype="float32"):
    rng = np.random.default_rng(0)
    if np.dtype(dtype).kind == "f":
        array = rng.normal(size=shape).astype(dtype)
        array[rng.random(shape) < 0.2] = NAN
        array.flat[0], array.flat[1] = -0.0, NAN
        return array
    return rng.integers(1, 99, shape).astype(dtype)


def geography(nodata):
    return [
        (33550, "d", 3, (0.5, 0.25, 0.0), True),
        (33922, "d", 6, (0.0, 0.0, 0.0, 5.5, 50.25, 0.0), True),
        (34735, "H", 8, (1, 1, 0, 1, 1024, 0, 1, 2), True),
        (34736, "d", 2, (6378137.0, 298.25), True),
        (34737, "s", 0, "WGS 84|", True),
        (42112, "s", 0, "<GDALMetadata><Item>Größe in °C</Item></GDALMetadata>".encode(), True),
        (NODATA, "s", 0, nodata, True),
    ]


def saved(tmp_path, array, **options):
    tifffile.imwrite(tmp_path / "in.tif", array, **options)
    return tmp_path / "in.tif"


def pages(path):
    """Tags of each page."""
    with tifffile.TiffFile(path) as file:
        return [
            {tag.code: (int(tag.dtype), tag.value) for tag in page.tags if tag.code not in UNSTABLE}
            for page in file.pages
        ]


def gaps(opened):
    data = np.ma.getdata(opened.data)
    return np.ma.getmaskarray(opened.data) | (np.isnan(data) if data.dtype.kind == "f" else False)


def again(tmp_path, opened, value, **options):
    filled = np.where(gaps(opened), value, np.ma.getdata(opened.data).astype("float64") + 1e-9)
    opened.write(filled, tmp_path / "out.tif", **options)
    return tifffile.imread(tmp_path / "out.tif")


def scaled(path):
    """What GDAL's readers make of a file: ``scale x stored + offset``, band by band."""
    metadata = ElementTree.fromstring(pages(path)[0][42112][1])
    found = {(item.get("role"), item.get("sample")): float(item.text) for item in metadata if item.get("role")}
    stored = tifffile.imread(path).astype("float64")
    for band in range(len(stored)):
        stored[band] = stored[band] * found.get(("scale", str(band)), 1.0) + found.get(("offset", str(band)), 0.0)
    return stored


@pytest.mark.parametrize("lossless", [False, True])
def test_deviations_read_with_the_scale_and_without_the_offset(tmp_path, lossless):
    metadata = """<GDALMetadata>
      <Item name="STATISTICS_MEAN" sample="0">1234</Item>
      <Item name="OFFSET" sample="0" role="offset">-273.15</Item><Item name="SCALE" sample="0" role="scale">0.01</Item>
      <Item name="OFFSET" sample="1" role='offset'>500</Item>
      <Item name="SCALE" sample="1" role="scale">-2</Item>
      <Item name="UNITTYPE">degrees</Item></GDALMetadata>"""
    path = saved(
        tmp_path, noise((2, 20, 33), "int16"), photometric="minisblack", planarconfig="separate",
        extratags=[(42112, "s", 0, metadata, True), (NODATA, "s", 0, "7", True)],
    )  # fmt: skip
    opened = open_file(path)
    deviations = np.random.default_rng(1).random((2, 20, 33))
    opened.write_deviations(deviations, tmp_path / "std.tif")
    np.testing.assert_allclose(scaled(tmp_path / "std.tif"), deviations * np.reshape([0.01, 2.0], (2, 1, 1)))
    assert "STATISTICS" not in pages(tmp_path / "std.tif")[0][42112][1]
    assert "UNITTYPE" in pages(tmp_path / "std.tif")[0][42112][1]
    again(tmp_path, opened, 55.4, lossless=lossless)  # values keep their offset
    assert pages(tmp_path / "out.tif")[0][42112] == pages(path)[0][42112]


@pytest.mark.parametrize(
    ("array", "options"),
    [
        (noise(), {}),
        (noise(dtype="float64"), {"byteorder": ">"}),
        (noise(dtype="float16"), {"bigtiff": True}),
        (noise(), {"compression": "zlib", "tile": (16, 32)}),
        (noise(), {"compression": "lzma", "rowsperstrip": 7}),
        (noise((3, 20, 33)), {"photometric": "minisblack"}),
        (noise((3, 20, 33)), {"photometric": "minisblack", "metadata": None}),
        (noise((5, 20, 33)), {"photometric": "minisblack", "planarconfig": "separate"}),
        (noise((20, 33, 5)), {"photometric": "minisblack", "planarconfig": "contig"}),
        (noise((20, 33, 3)), {"photometric": "minisblack", "planarconfig": "contig", "extrasamples": [0, 0]}),
        (noise((16, 32, 32)), {"photometric": "minisblack", "tile": (16, 16, 16)}),
        (noise((2, 20, 33, 3)), {"photometric": "rgb"}),
        (noise((1, 33)), {"resolution": (72.5, 300), "resolutionunit": "CENTIMETER", "software": "a camera"}),
        (noise(), {"description": "Größe in °C".encode(), "metadata": None}),
        (noise(), {"software": False, "metadata": None}),
        (noise(), {"datetime": "2001:02:03 04:05:06", "extratags": [(315, "s", 0, "an artist", True)]}),
        (noise(), {"photometric": "miniswhite", "extratags": [(700, "B", 5, b"<xmp>", True)]}),
        (noise((3, 20, 33)), {"photometric": "minisblack", "extratags": geography("nan")}),
    ],
)
def test_tiff_again(tmp_path, array, options):
    opened = open_file(saved(tmp_path, array, **options))
    np.testing.assert_array_equal(gaps(opened), np.isnan(array))
    result = again(tmp_path, opened, 1.5)
    before = tifffile.imread(tmp_path / "in.tif")
    assert result.dtype == before.dtype
    assert result.shape == before.shape
    gap = np.isnan(array)
    np.testing.assert_array_equal(result[~gap].view(f"u{array.itemsize}"), array[~gap].view(f"u{array.itemsize}"))
    assert (result[gap] == 1.5).all()
    assert pages(tmp_path / "out.tif") == pages(tmp_path / "in.tif")
    with tifffile.TiffFile(tmp_path / "in.tif") as one, tifffile.TiffFile(tmp_path / "out.tif") as other:
        assert (one.byteorder, one.is_bigtiff) == (other.byteorder, other.is_bigtiff)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["in.tif", "out.tif"]


@pytest.mark.parametrize(
    ("dtype", "nodata", "value"),
    [
        ("uint8", "7", 7),
        ("int16", "-9999 ", -9999),
        ("float32", "-3.4028234663852886e+38", np.finfo("float32").min),
        ("float32", "0.1", np.float32(0.1)),
        ("int64", "-9223372036854775808", np.iinfo("int64").min),
        ("uint16", "65535.0", 65535),
    ],
)
def test_the_gap_value_of_the_file(tmp_path, dtype, nodata, value):
    array = noise(dtype=dtype)
    array[3:5, 7:9] = value
    gap = (array == value) | np.isnan(array)
    assert 4 <= gap.sum() < array.size
    opened = open_file(saved(tmp_path, array, extratags=geography(nodata)))
    np.testing.assert_array_equal(gaps(opened), gap)
    result = again(tmp_path, opened, 55.4)
    assert result.dtype == array.dtype
    np.testing.assert_array_equal(result[~gap], array[~gap])
    np.testing.assert_array_equal(result[gap], np.full(gap.sum(), 55.4).astype(dtype))
    tags = pages(tmp_path / "out.tif")
    assert tags == pages(tmp_path / "in.tif")
    assert tags[0][NODATA][1].strip() == nodata.strip()


def test_no_fill_is_a_gap_again(tmp_path):
    array = noise(dtype="uint8")
    array[0, :3] = [100, 101, 50]
    opened = open_file(saved(tmp_path, array, extratags=geography("100")), gap_value=101)
    assert gaps(opened).sum() == 2
    again(tmp_path, opened, 100.0)
    assert tifffile.imread(tmp_path / "out.tif")[0, :3].tolist() == [99, 99, 50]
    assert not gaps(open_file(tmp_path / "out.tif", gap_value=101)).any()


def test_lossless_is_every_number_as_it_is(tmp_path):
    array = noise(dtype="uint8")
    array[0, 0] = 0
    opened = open_file(saved(tmp_path, array, compression="zlib", predictor=True, extratags=geography("0")))
    deviations = np.random.default_rng(1).random(array.shape)
    deviations[1, 1] = 0.0  # would be a gap, by the tag of the file
    opened.write(deviations, tmp_path / "out.tif", lossless=True)
    result = open_file(tmp_path / "out.tif")
    np.testing.assert_array_equal(result.data, deviations)
    tags, before = pages(tmp_path / "out.tif")[0], pages(tmp_path / "in.tif")[0]
    assert NODATA not in tags
    assert all(tags[code] == before[code] for code in (33550, 33922, 34735, 34736, 34737, 42112))


@pytest.mark.parametrize("bigtiff", [False, True])
def test_large_images_get_offsets_of_64_bits(tmp_path, monkeypatch, bigtiff):
    monkeypatch.setattr(tiff, "CLASSIC_BYTES", 1000 if bigtiff else 10000)
    again(tmp_path, open_file(saved(tmp_path, noise())), 1.0)
    with tifffile.TiffFile(tmp_path / "out.tif") as file:
        assert file.is_bigtiff == bigtiff


def test_a_compression_that_cannot_be_written_becomes_deflate(tmp_path, monkeypatch):
    opened = open_file(saved(tmp_path, noise(), compression="lzma"))
    encoded = tiff._encoded

    def without_lzma(array, container, options):
        if options.get("compression") == 34925:
            raise KeyError("requires a package")
        return encoded(array, container, options)

    monkeypatch.setattr(tiff, "_encoded", without_lzma)
    result = again(tmp_path, opened, 1.0)
    np.testing.assert_array_equal(result, np.nan_to_num(noise(), nan=1.0))
    assert pages(tmp_path / "out.tif")[0][259][1] == 8


def test_only_the_first_series(tmp_path):
    with tifffile.TiffWriter(tmp_path / "in.tif") as writer:
        writer.write(noise(), metadata=None)
        writer.write(noise((5, 6)), metadata=None)
    with pytest.warns(UserWarning, match=r"in\.tif: only the first of 2 series of images is read and written"):
        opened = open_file(tmp_path / "in.tif")
    assert opened.data.shape == (20, 33)


@pytest.mark.parametrize("kept", [0, 2, 8, 100, -100])
def test_files_that_were_cut_off_are_refused(tmp_path, kept):
    path = saved(tmp_path, noise(), compression="zlib")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"in\.tif: not readable as a TIFF image \("):
        open_file(path)


def test_what_is_no_image_of_numbers_is_refused(tmp_path):
    (tmp_path / "in.tif").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    with pytest.raises(ValueError, match=r"in\.tif: not readable as a TIFF image \(not a TIFF file"):
        open_file(tmp_path / "in.tif")
    saved(tmp_path, noise(dtype="uint8") > 50)
    with pytest.raises(ValueError, match=r"in\.tif: the image holds bool, expected integers or floating numbers"):
        open_file(tmp_path / "in.tif")
    saved(tmp_path, noise(dtype="uint8"), photometric="palette", colormap=np.zeros((3, 256), "uint16"))
    with pytest.raises(ValueError, match=r"in\.tif: its pixels are colours of a palette, expected numbers"):
        open_file(tmp_path / "in.tif")
    with pytest.raises(ValueError, match=r"in\.tif: got the variable 'a', but a \.tif file holds one array"):
        open_file(tmp_path / "in.tif", variable="a")


@pytest.mark.parametrize(
    ("array", "photometric"),
    [
        (noise(dtype="float64"), 1),
        (noise((4, 20, 33)), 1),
        (noise((20, 33, 3), "uint8"), 2),
        (noise((20, 33, 3)), 1),
        (noise(dtype="int64"), 1),
    ],
)
def test_arrays_become_images(tmp_path, array, photometric):
    np.save(tmp_path / "in.npy", array)
    open_file(tmp_path / "in.npy").write(np.full(array.shape, 1.5), tmp_path / "out.tiff")
    result = tifffile.imread(tmp_path / "out.tiff")
    assert result.dtype == array.dtype
    np.testing.assert_array_equal(result, np.nan_to_num(array, nan=1.5))
    assert pages(tmp_path / "out.tiff")[0][262][1] == photometric


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4, 5)])
def test_other_dimensions_are_refused(tmp_path, shape):
    np.save(tmp_path / "in.npy", np.zeros(shape))
    with pytest.raises(ValueError, match=r"output: .*in\.npy has the shape .*, but a \.tif image has two"):
        open_file(tmp_path / "in.npy").check(tmp_path / "out.tif")


@pytest.mark.parametrize("error", [OSError("no space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch, error):
    opened = open_file(saved(tmp_path, noise()))
    (tmp_path / "out.tif").write_bytes(b"old")

    def half(path, write):
        def and_fail(stream):
            stream.write(b"half")
            raise error

        atomic_write(path, and_fail)

    atomic_write = tiff.atomic_write
    monkeypatch.setattr(tiff, "atomic_write", half)
    with pytest.raises(type(error)):
        opened.write(np.ones((20, 33)), tmp_path / "out.tif")
    assert (tmp_path / "out.tif").read_bytes() == b"old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["in.tif", "out.tif"]
