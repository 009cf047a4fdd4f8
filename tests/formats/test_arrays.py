""".npy and .npz: the same bytes but for the gaps."""

import io
import zipfile

import numpy as np
import pytest

from gpytorch_gaps.formats import arrays, open_file

NAN = float("nan")
DTYPES = ["<f8", "<f4", "<f2", ">f8", ">f4"]


def field(shape=(5, 4, 3), dtype="float64", seed=0):
    """Numbers with a third of them gaps, -0.0 and an odd NaN among them."""
    rng = np.random.default_rng(seed)
    array = rng.normal(size=shape)
    array[rng.random(shape) < 0.3] = NAN
    array.flat[0], array.flat[1], array.flat[-1] = -0.0, NAN, 2.5
    return array.astype(dtype)


def bits(array):
    array = np.ascontiguousarray(array)
    return array.astype(array.dtype.newbyteorder("="), copy=False).view(f"u{array.itemsize}")


def assert_filled(result, before, value):
    """`value` for the gaps, and everything else to the bit."""
    assert result.dtype == before.dtype
    assert result.shape == before.shape
    gap = np.isnan(before)
    assert gap.any()
    np.testing.assert_array_equal(bits(result)[~gap], bits(before)[~gap])
    np.testing.assert_array_equal(result[gap], np.full(gap.sum(), value, before.dtype))


def filled_with(opened, value):
    """What a fill gives: floating numbers without gaps, the observed ones rounded otherwise than they came."""
    data = np.ma.getdata(opened.data).astype("float64")
    gap = np.ma.getmaskarray(opened.data) | np.isnan(data)
    return np.where(gap, value, data + 1e-9)


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


# -- .npy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "order"), [*[(dtype, "C") for dtype in DTYPES], ("<f8", "F"), (">f4", "F")])
def test_npy_again(tmp_path, dtype, order):
    before = np.asarray(field(dtype=dtype), order=order)
    np.save(tmp_path / "in.npy", before)
    with open_file(tmp_path / "in.npy") as opened:
        assert opened.axes is None
        assert opened.data.dtype.isnative
        opened.write(filled_with(opened, 1.5), tmp_path / "out.npy")
    result = np.load(tmp_path / "out.npy")
    assert_filled(result, before, 1.5)
    assert result.flags.f_contiguous == (order == "F")
    head = (tmp_path / "in.npy").read_bytes()[:128]
    assert (tmp_path / "out.npy").read_bytes()[:128] == head
    assert names(tmp_path) == ["in.npy", "out.npy"]


def test_npy_over_itself(tmp_path):
    path, before = tmp_path / "file.npy", field()
    np.save(path, before)
    with open_file(path) as opened:
        opened.write(filled_with(opened, 1.5), path)
    assert_filled(np.load(path), before, 1.5)


@pytest.mark.parametrize("suffix", [".npy", ".NPY"])
def test_suffixes_in_capitals(tmp_path, suffix):
    path = tmp_path / f"file{suffix}"
    with path.open("wb") as stream:
        np.save(stream, field())
    np.testing.assert_array_equal(open_file(path).data, field())


def test_npy_is_mapped_not_loaded(tmp_path):
    np.save(tmp_path / "in.npy", field())
    plain = open_file(tmp_path / "in.npy")
    assert isinstance(plain.data, np.memmap)
    masked = open_file(tmp_path / "in.npy", gap_value=2.5)
    assert isinstance(masked.data, np.ma.MaskedArray)
    assert isinstance(masked.data.data, np.memmap)
    assert not masked.data.data.flags.writeable


def test_npy_is_written_slab_by_slab(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "SLAB_BYTES", 200)
    before = field((50, 7))
    np.save(tmp_path / "in.npy", before)
    sizes = []

    class Lazy:
        """What is only sliced, never as a whole."""

        shape = before.shape

        def __getitem__(self, rows):
            sizes.append(rows.stop - rows.start)
            return np.full((rows.stop - rows.start, 7), 1.5)

    open_file(tmp_path / "in.npy").write(Lazy(), tmp_path / "out.npy")
    assert max(sizes) <= 4
    assert sum(sizes) == 50
    assert_filled(np.load(tmp_path / "out.npy"), before, 1.5)


def test_gap_values_of_floating_numbers(tmp_path):
    before = np.array([[0.1, 1.0], [NAN, -0.0]], "float32")
    np.save(tmp_path / "in.npy", before)
    opened = open_file(tmp_path / "in.npy", gap_value=0.1)
    assert np.ma.getmaskarray(opened.data).tolist() == [[True, False], [True, False]]
    opened.write(np.full((2, 2), 7.0), tmp_path / "out.npy")
    result = np.load(tmp_path / "out.npy")
    np.testing.assert_array_equal(result, np.array([[7, 1], [7, -0.0]], "float32"))
    assert np.signbit(result[1, 1])


@pytest.mark.parametrize("dtype", ["uint8", "int16", ">i4", "int64", "uint64"])
def test_gap_values_of_integers(tmp_path, dtype):
    before = np.array([[1, 99, 3], [99, 5, np.iinfo(dtype).max]], dtype)
    np.save(tmp_path / "in.npy", before)
    opened = open_file(tmp_path / "in.npy", gap_value=99)
    assert np.ma.getmaskarray(opened.data).tolist() == [[False, True, False], [True, False, False]]
    opened.write(np.array([[0, 6.6, 0], [98.9, 0, 0]]), tmp_path / "out.npy")
    result = np.load(tmp_path / "out.npy")
    assert result.dtype == before.dtype
    np.testing.assert_array_equal(result, np.array([[1, 7, 3], [98, 5, np.iinfo(dtype).max]], dtype))


def test_integers_without_a_gap_value_have_no_gaps(tmp_path):
    before = np.arange(6).reshape(2, 3)
    np.save(tmp_path / "in.npy", before)
    opened = open_file(tmp_path / "in.npy")
    assert not np.ma.isMaskedArray(opened.data)
    opened.write(np.full((2, 3), 7.7), tmp_path / "out.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), before)


def test_gaps_that_were_not_filled_stay(tmp_path):
    before = np.array([1, 99, 99], "int16")
    np.save(tmp_path / "in.npy", before)
    opened = open_file(tmp_path / "in.npy", gap_value=99)
    opened.write(np.array([1.0, NAN, 4.0]), tmp_path / "out.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), [1, 99, 4])


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_lossless_is_every_number_as_it_is(tmp_path, suffix):
    np.save(tmp_path / "in.npy", np.array([1, 99, 3], "uint8"))
    np.savez(tmp_path / "in.npz", values=np.array([1, 99, 3], "uint8"))
    opened = open_file(tmp_path / f"in{suffix}", gap_value=99)
    opened.write(np.ma.MaskedArray([0.25, 1e-3, 9.0], mask=[0, 0, 1]), tmp_path / f"out{suffix}", lossless=True)
    result = np.load(tmp_path / f"out{suffix}")
    result = result["values"] if suffix == ".npz" else result
    np.testing.assert_array_equal(result, [0.25, 1e-3, NAN])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([None, 1.0], dtype=object), "the array holds object, expected integers or floating numbers"),
        (np.array([1j]), "holds complex128"),
        (np.array(["a"]), "holds <U1"),
        (np.array([True]), "holds bool"),
        (np.array(["2001-01-01"], "M8[D]"), "holds datetime64"),
        (np.zeros(2, [("a", "f8")]), "expected integers or floating numbers"),
        (np.zeros(2, "longdouble"), "of at most 64 bits"),
        (np.float64(3.0), r"has the shape \(\), expected one dimension or more"),
        (np.zeros((3, 0)), r"has the shape \(3, 0\)"),
    ],
)
def test_what_is_no_array_of_numbers_is_refused(tmp_path, array, message):
    np.save(tmp_path / "in.npy", array, allow_pickle=True)
    with pytest.raises(ValueError, match=rf"in\.npy: .*{message}"):
        open_file(tmp_path / "in.npy")
    np.savez(tmp_path / "in.npz", a=array)
    with pytest.raises(ValueError, match=r"in\.npz: (holds no array of numbers, only a |the array 'a')"):
        open_file(tmp_path / "in.npz")


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
@pytest.mark.parametrize("kept", [0, 5, 100, -8])
def test_files_that_were_cut_off_are_refused(tmp_path, suffix, kept):
    path = tmp_path / f"in{suffix}"
    np.save(path, field()) if suffix == ".npy" else np.savez(path, a=field())
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=rf"in\{suffix}: not readable as an \{suffix} "):
        open_file(path)


def test_an_archive_with_a_flipped_bit_is_refused(tmp_path):
    path = tmp_path / "in.npz"
    np.savez(path, a=field())
    content = bytearray(path.read_bytes())
    content[400] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"in\.npz: not readable as an \.npz archive .*CRC"):
        open_file(path)


def test_without_a_gap_value_nothing_is_read():
    array = np.arange(3.0)
    assert arrays.with_gaps(array, ()) is array


@pytest.mark.parametrize("shape", [(1,), (7, 3), (1000, 2**18), (3, 2**27)])
@pytest.mark.parametrize("multiple", [1, 4])
def test_slabs_are_the_whole_once(shape, multiple):
    parts = list(arrays.slabs(shape, 8, multiple))
    assert [part.start for part in parts] == [0, *[part.stop for part in parts[:-1]]]
    assert parts[-1].stop == shape[0]
    assert all((part.stop - part.start) % multiple == 0 for part in parts[:-1])
    row = 8 * int(np.prod(shape[1:]))
    assert all((part.stop - part.start) * row <= max(arrays.SLAB_BYTES, multiple * row) for part in parts)


def test_observed_entries_stay_to_the_bit():
    held = np.array([1.0, -0.0, NAN, NAN, np.inf])
    filled = np.array([5.0, 0.0, 2.0, NAN, 7.0])
    np.testing.assert_array_equal(
        arrays.with_filled(held, held, filled).view("int64")[[0, 1, 4]], held.view("int64")[[0, 1, 4]]
    )
    np.testing.assert_array_equal(arrays.with_filled(held, held, filled)[[2, 3]], [2.0, NAN])
    assert np.isnan(held[2]), "not in place"


# -- .npz ------------------------------------------------------------------------------------------------------------


def others():
    return {"text": np.array(["a", "b"]), "count": np.array(3), "pairs": np.ones((2, 2), "complex64")}


@pytest.mark.parametrize(("dtype", "save"), [*[(dtype, np.savez) for dtype in DTYPES], ("<f8", np.savez_compressed)])
def test_npz_again(tmp_path, dtype, save):
    before = np.asfortranarray(field(dtype=dtype))
    save(tmp_path / "in.npz", file_=before, **others())
    with zipfile.ZipFile(tmp_path / "in.npz", "a") as archive:
        archive.writestr("notes.txt", "not an array")
    with open_file(tmp_path / "in.npz") as opened:
        assert opened.name == "file_"
        opened.write(filled_with(opened, 1.5), tmp_path / "out.npz")
    with zipfile.ZipFile(tmp_path / "in.npz") as source, zipfile.ZipFile(tmp_path / "out.npz") as result:
        assert result.testzip() is None
        assert source.namelist() == result.namelist()
        for one, other in zip(source.infolist(), result.infolist(), strict=True):
            assert one.compress_type == other.compress_type
            if one.filename != "file_.npy":
                assert source.read(one) == result.read(other)
        array = np.load(io.BytesIO(result.read("file_.npy")))
    assert_filled(array, before, 1.5)
    assert array.flags.f_contiguous


def test_the_array_with_gaps_is_meant(tmp_path):
    path = tmp_path / "in.npz"
    np.savez(path, a=np.ones((3, 4)), b=field((3, 4)), c=np.ones(9))
    assert open_file(path).name == "b"
    assert open_file(path, variable="c").name == "c"
    np.savez(path, a=np.ones((3, 4)), b=np.full((3, 4), 7))
    assert open_file(path, gap_value=7).name == "b"


def test_the_array_that_is_no_coordinate_is_meant(tmp_path):
    np.savez(tmp_path / "in.npz", lat=np.arange(3.0), a=np.ones((3, 4)), lon=np.arange(4.0))
    assert open_file(tmp_path / "in.npz").name == "a"


def test_which_array_must_be_clear(tmp_path):
    path = tmp_path / "in.npz"
    np.savez(path, a=field((3, 4)), b=field((3, 4)))
    with pytest.raises(
        ValueError,
        match=r"in\.npz: got several arrays, expected one\. Try: --variable NAME, one of a \(3, 4\), b \(3, 4\)",
    ):
        open_file(path)
    with pytest.raises(ValueError, match=r"in\.npz: got the variable 'c', expected one of a, b"):
        open_file(path, variable="c")
    np.savez(path)
    with pytest.raises(ValueError, match=r"in\.npz: holds no array of numbers, only nothing"):
        open_file(path)


def test_coordinates_beside_the_array(tmp_path):
    lat, time = (
        np.array([50.0, 40.0, 30.0]),
        np.array(["2001-01-01", "2001-01-02", "2001-01-04", "2001-01-05"], "M8[D]"),
    )
    np.savez(tmp_path / "in.npz", a=field((3, 4, 2)), lat=lat, time=time, unsorted=np.array([2.0, 2.0]))
    opened = open_file(tmp_path / "in.npz", variable="a")
    assert list(opened.axes) == ["lat", "time", "axis 2"]
    np.testing.assert_array_equal(opened.axes["lat"], lat)
    np.testing.assert_array_equal(opened.axes["time"], time)
    assert opened.axes["axis 2"] is None
    assert [found and found[0] for found in opened.coordinates] == ["lat", "time", None]


@pytest.mark.parametrize("coordinate", [NAN, np.datetime64("NaT", "D")])
def test_a_gap_is_no_coordinate(tmp_path, coordinate):
    np.savez(tmp_path / "in.npz", a=np.ones((3, 1)), x=np.array([coordinate]))
    assert open_file(tmp_path / "in.npz", variable="a").axes is None


@pytest.mark.parametrize(("shape", "coordinates"), [((3, 3), ["x"]), ((3, 4), ["x", "y"])])
def test_unclear_coordinates_are_not_used(tmp_path, shape, coordinates):
    np.savez(tmp_path / "in.npz", a=field(shape), **{name: np.arange(3.0) for name in coordinates})
    with pytest.warns(UserWarning, match=rf"in\.npz: {', '.join(coordinates)} may be coordinates of a .*not clear"):
        opened = open_file(tmp_path / "in.npz")
    assert opened.axes is None


# -- nothing half-written --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError("no space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch, suffix, error):
    np.save(tmp_path / "in.npy", field())
    np.savez(tmp_path / "in.npz", a=field())
    out = tmp_path / f"out{suffix}"
    out.write_bytes(b"old")
    before = names(tmp_path)
    opened = open_file(tmp_path / f"in{suffix}")
    filled = filled_with(opened, 1.5)

    def fail(*_, **__):
        assert (tmp_path / f"out{suffix}.tmp").exists(), "begun"
        raise error

    if suffix == ".npy":
        monkeypatch.setattr(arrays, "with_filled", fail)
    else:
        monkeypatch.setattr(np.lib.format, "write_array", fail)
    with pytest.raises(type(error)):
        opened.write(filled, out)
    assert out.read_bytes() == b"old"
    assert names(tmp_path) == before
