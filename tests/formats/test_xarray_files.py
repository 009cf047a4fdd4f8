"""netCDF 3, netCDF 4 and zarr: the same file but for the gaps, as they are stored there."""

import shutil
import struct
import sys
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

from gpytorch_gaps.filling.arrays.adapters import adapt
from gpytorch_gaps.formats import arrays, netcdf, open_file, xarray_files

NAN = float("nan")
HDF5 = pytest.mark.skipif(find_spec("h5py") is None, reason="netCDF 4 needs h5py")
NETCDF = ["netcdf3", pytest.param("netcdf4", marks=HDF5)]
STORES = ["zarr2", "zarr3"]
KINDS = [*NETCDF, *STORES]
TWO = ["netcdf3", "zarr3"]  # for what does not depend on how a kind stores its numbers


def noise(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def climate():
    """Floating and packed numbers with gaps, and about everything that a file may have beside them."""
    temperature = noise(6, 4, 5).astype("float32")
    temperature[1, 2, 3] = temperature[5, 0, :] = NAN
    temperature[0, 0, 0] = -0.0
    rain = np.round(noise(6, 4, 5, seed=1), 3)
    rain[0, 0, 1] = rain[2:4, 1] = NAN
    time = np.datetime64("2001-01-01", "ns") + np.arange(6) * np.timedelta64(6, "h")
    data = xr.Dataset(
        {
            "temperature": (("time", "lat", "lon"), temperature, {"units": "K", "long_name": "temperature in °"}),
            "rain": (("time", "lat", "lon"), rain, {"units": "mm", "grid_mapping": "crs"}),
            "crs": ((), np.int32(0), {"grid_mapping_name": "latitude_longitude"}),
            "station": (("lat",), np.array(["a", "bb", "c", "d"], dtype=object)),
            "time_bounds": (("time", "side"), np.stack([time, time + np.timedelta64(6, "h")], axis=1)),
        },
        {
            "time": ("time", time, {"bounds": "time_bounds"}),
            "lat": ("lat", np.linspace(50, 53, 4), {"units": "degrees_north"}),
            "lon": ("lon", np.arange(5.0)),
            "area": (("lat", "lon"), noise(4, 5, seed=2)),
        },
        {"title": "a climate", "version": np.int32(3)},
    )
    data.time.encoding = {"units": "hours since 2000-01-01", "calendar": "standard", "dtype": "int32"}
    data.time_bounds.encoding = dict(data.time.encoding)
    data.temperature.encoding = {"_FillValue": np.float32(1e20)}
    data.rain.encoding = {"dtype": "int16", "scale_factor": 1e-3, "add_offset": 1.0, "_FillValue": np.int16(-999)}
    return data


def save(folder, data, kind, name="in"):
    path = folder / f"{name}.{'zarr' if kind in STORES else 'nc'}"
    if kind in STORES:
        for name in ("temperature", "rain"):
            if name in data and data[name].ndim == 3:
                data[name].encoding["chunks"] = (4, 2, 5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of texts, which zarr 3 has not settled yet
            data.to_zarr(path, zarr_format=int(kind[-1]), consolidated=kind == "zarr2")
    elif kind == "netcdf3":
        data.to_netcdf(path, engine="scipy", format="NETCDF3_64BIT")
    else:
        for name in ("temperature", "rain"):
            if name in data and data[name].ndim == 3:
                data[name].encoding |= {"zlib": True, "chunksizes": (3, 2, 5)}
        data.to_netcdf(path, engine="h5netcdf", unlimited_dims={"time"} & set(data.dims))
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The climate in a file of each kind, written once, to be read alone."""
    return cache(lambda kind: save(tmp_path_factory.mktemp(kind), climate(), kind))


def stored(path):
    """The file as it is stored, undecoded."""
    engine = "zarr" if path.is_dir() else "scipy" if path.read_bytes()[:3] == b"CDF" else "h5netcdf"
    options = {"consolidated": False} if engine == "zarr" else {}
    raw = {"mask_and_scale": False, "decode_times": False, "decode_coords": False, "decode_timedelta": False}
    with xr.open_dataset(path, engine=engine, **raw, **options) as data:
        return data.load()


stored_once = cache(stored)  # for what does not change


def encoding(variable):
    """Chunks, compression and number type."""
    return {key: str(value) for key, value in variable.encoding.items() if key not in ("source", "object_codec")}


def assert_same_but_for(result, before, **filled):
    """Everything to the bit, but for the stored numbers of `filled` where `before` has its fill value."""
    assert list(map(str, result.attrs.items())) == list(map(str, before.attrs.items()))
    assert set(result.variables) == set(before.variables)
    assert result.encoding.get("unlimited_dims") == before.encoding.get("unlimited_dims")
    for name, one in before.variables.items():
        other = result.variables[name]
        assert one.dims == other.dims
        assert one.dtype == other.dtype
        assert str(one.attrs) == str(other.attrs)
        assert encoding(one) == encoding(other)
        expected = one.values.copy()
        if name in filled:
            gap = expected == one.attrs["_FillValue"]
            assert gap.any()
            expected[gap] = filled[name]
        assert expected.tobytes() == other.values.tobytes() or expected.dtype.kind in "OTU"
        np.testing.assert_array_equal(expected, other.values)


def filled_with(opened, **chosen):
    """What a fill gives, the observed entries rounded otherwise than they came."""
    return opened.data.map(lambda one: (one + 1e-9).fillna(chosen.get(one.name, 2.0)), keep_attrs=True)


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


# -- the same format -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_everything_but_the_gaps_is_written_as_it_was(tmp_path, source, kind):
    path = source(kind)
    with open_file(path) as opened:
        assert set(opened.data.data_vars) == {"temperature", "rain"}
        assert opened.axes is None
        opened.write(filled_with(opened, temperature=2.5, rain=1.2344), tmp_path / f"out{path.suffix}")
    result, before = stored(tmp_path / f"out{path.suffix}"), stored_once(path)
    assert_same_but_for(result, before, temperature=2.5, rain=234)
    assert names(tmp_path) == [f"out{path.suffix}"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_variable(tmp_path, source, kind):
    path = source(kind)
    with open_file(path, variable="rain") as opened:
        assert isinstance(opened.data, xr.DataArray)
        assert opened.name == "rain"
        turned = opened.data.fillna(3.0).transpose("lon", "time", "lat").rename(None)
        opened.write(turned, tmp_path / f"out{path.suffix}")
    assert_same_but_for(stored(tmp_path / f"out{path.suffix}"), stored_once(path), rain=2000)


@pytest.mark.parametrize("kind", TWO)
def test_over_itself(tmp_path, source, kind):
    former = source(kind)
    path = tmp_path / former.name
    (shutil.copytree if former.is_dir() else shutil.copy)(former, path)
    with open_file(path) as opened:
        opened.write(filled_with(opened), path)
    assert_same_but_for(stored(path), stored_once(former), temperature=2.0, rain=1000)
    assert names(tmp_path) == [path.name]


@pytest.mark.parametrize("kind", TWO)
def test_slab_by_slab(tmp_path, source, monkeypatch, kind):
    monkeypatch.setattr(arrays, "SLAB_BYTES", 300)
    path = source(kind)
    with open_file(path) as opened:
        opened.write(filled_with(opened), tmp_path / f"out{path.suffix}")
    assert_same_but_for(stored(tmp_path / f"out{path.suffix}"), stored_once(path), temperature=2.0, rain=1000)


@pytest.mark.parametrize("kind", STORES)
def test_stores_are_read_chunk_by_chunk(source, kind):
    with open_file(source(kind)) as opened:
        assert opened.data.rain.chunks == ((4, 2), (2, 2), (5,))


@pytest.mark.parametrize("kind", NETCDF)
def test_netcdf_is_read_when_it_is_needed(source, kind):
    with open_file(source(kind)) as opened:
        assert not opened.data.rain.variable._in_memory


@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
@pytest.mark.parametrize("kind", STORES)
def test_consolidated_stores_stay_so(tmp_path, kind):
    path = save(tmp_path, climate()[["rain", "crs", "time_bounds"]], kind)
    zarr.consolidate_metadata(path)
    with open_file(path) as opened:
        opened.write(opened.data.fillna(2.0), tmp_path / "out.zarr")
    with xr.open_zarr(tmp_path / "out.zarr", consolidated=True) as data:
        assert not data.rain.isnull().any()


def test_a_store_that_one_may_only_read(tmp_path):
    path = save(tmp_path, climate()[["rain", "crs", "time_bounds"]], "zarr2")
    files = [path, *path.rglob("*")]
    for entry in files:
        entry.chmod(0o500 if entry.is_dir() else 0o400)
    try:
        with open_file(path) as opened:
            opened.write(opened.data.fillna(2.0), tmp_path / "out.zarr")
    finally:
        for entry in files:
            entry.chmod(0o700)
    result = tmp_path / "out.zarr"
    assert all(entry.stat().st_mode & 0o200 for entry in (result, *result.rglob("*")))


@pytest.mark.parametrize("kind", TWO)
def test_gaps_that_were_not_filled_stay(tmp_path, kind):
    data = xr.Dataset({"a": ("x", np.array([1, 2, 3], "int16"))})
    data.a.attrs["_FillValue"] = np.int16(2)
    data.a[2] = 2
    path = save(tmp_path, data, kind)
    with open_file(path) as opened:
        opened.write(opened.data.copy(data=[9.0, NAN, 5.0]), tmp_path / f"out{path.suffix}")
    assert stored(tmp_path / f"out{path.suffix}").a.values.tolist() == [1, 2, 5]


def with_records(path):
    """A netCDF 3 file of records: a(time, x), b(time) and a scalar, by hand, for scipy misplaces the latter."""

    def text(name):
        return struct.pack(">i", len(name)) + name.encode().ljust(-len(name) % 4 + len(name), b"\0")

    a = np.array([[1, 2, 3], [4, -1, 6]], ">f4")
    b = np.array([-1, 8], ">i2")
    fill = {"a": (5, struct.pack(">f", -1.0)), "b": (3, struct.pack(">hxx", -1))}
    header = b""
    records = {"a": ((0, 1), 5, 12), "b": ((0,), 3, 4)}
    for _ in range(2):  # the second time, the length of the header is known
        begin = len(header)
        header = b"CDF\x01" + struct.pack(">i", 2)
        header += struct.pack(">ii", 10, 2) + text("time") + struct.pack(">i", 0) + text("x") + struct.pack(">i", 3)
        header += struct.pack(">ii", 0, 0)
        header += struct.pack(">ii", 11, 3)
        offset = begin + 4
        for name, (dims, number_type, size) in records.items():
            header += text(name) + struct.pack(f">{1 + len(dims)}i", len(dims), *dims)
            kind, value = fill[name]
            header += struct.pack(">ii", 12, 1) + text("_FillValue") + struct.pack(">ii", kind, 1) + value
            header += struct.pack(">iii", number_type, size, offset)
            offset += size
        header += text("crs") + struct.pack(">i", 0) + struct.pack(">ii", 0, 0) + struct.pack(">iii", 4, 4, begin)
    rows = b"".join(a[i].tobytes() + b[i : i + 1].tobytes() + b"\x80\x01" for i in range(2))
    path.write_bytes(header + struct.pack(">i", 77) + rows)


def test_records_stay_where_they_are(tmp_path):
    with_records(tmp_path / "in.nc")
    with open_file(tmp_path / "in.nc") as opened:
        np.testing.assert_array_equal(opened.data.a, [[1, 2, 3], [4, NAN, 6]])
        np.testing.assert_array_equal(opened.data.b, [NAN, 8])
        opened.write(opened.data.fillna(5.0), tmp_path / "out.nc")
        opened.write(opened.data.fillna(5.0), tmp_path / "lossless.nc", lossless=True)
    before, after = ((tmp_path / name).read_bytes() for name in ("in.nc", "out.nc"))
    changed = [i for i in range(len(before)) if before[i] != after[i]]
    records = len(before) - 2 * 16
    assert len(after) == len(before)
    assert set(changed) <= {*range(records + 12, records + 14), *range(records + 20, records + 24)}
    for name in ("out.nc", "lossless.nc"):
        result = stored(tmp_path / name)
        np.testing.assert_array_equal(result.a, [[1, 2, 3], [4, 5, 6]])
        np.testing.assert_array_equal(result.b, [5, 8])
        assert result.crs == 77


@HDF5
def test_groups_stay(tmp_path, source):
    path = Path(shutil.copy(source("netcdf4"), tmp_path))
    climate()[["rain"]].to_netcdf(path, engine="h5netcdf", group="more", mode="a")
    with open_file(path) as opened:
        opened.write(filled_with(opened), tmp_path / "out.nc")
    with (
        xr.open_dataset(path, engine="h5netcdf", group="more") as before,
        xr.open_dataset(tmp_path / "out.nc", engine="h5netcdf", group="more") as after,
    ):
        xr.testing.assert_identical(before, after)


# -- packed numbers and gap values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TWO)
def test_packed_numbers_are_rounded_and_clipped_and_never_the_fill_value(tmp_path, kind):
    data = xr.Dataset({"rain": ("x", [1.5, *[NAN] * 5])})
    data.rain.encoding = {
        "dtype": "int16", "scale_factor": 1e-3, "add_offset": 1.0, "_FillValue": np.int16(-1000)
    }  # fmt: skip
    path = save(tmp_path, data, kind)
    with open_file(path) as opened:
        filled = opened.data.copy(data=[0.0, 1e9, -1e9, 0.0, 1.0006, 0.5])
        opened.write(filled, tmp_path / f"out{path.suffix}")
    assert stored(tmp_path / f"out{path.suffix}").rain.values.tolist() == [500, 32767, -32768, -1001, 1, -500]


@pytest.mark.parametrize("kind", KINDS)
def test_unsigned_numbers_in_signed_ones(tmp_path, kind):
    raw = xr.Dataset({"a": ("x", np.array([-1, 7, -56], "int8"))})  # 255, 7, 200
    raw.a.attrs = {"_Unsigned": "true", "_FillValue": np.int8(-1)}
    path = save(tmp_path, raw, kind)
    with open_file(path) as opened:
        np.testing.assert_array_equal(opened.data, [NAN, 7, 200])
        for value, expected in ((190.2, 190 - 256), (1e9, 254 - 256), (-5.0, 0)):
            opened.write(opened.data.fillna(value), tmp_path / f"out{path.suffix}")
            assert stored(tmp_path / f"out{path.suffix}").a.values.tolist() == [expected, 7, -56]


@pytest.mark.parametrize("kind", TWO)
def test_gap_values(tmp_path, kind):
    data = xr.Dataset(
        {"a": ("x", np.array([0.1, 2.0, NAN, -0.0], "float32")), "b": ("y", np.array([3, 7, 3], "int32"))}
    )
    path = save(tmp_path, data, kind)
    for name, gap_value, after in (("a", 0.1, [5.0, 2.0, 5.0, -0.0]), ("b", 3, [5, 7, 5])):
        with open_file(path, variable=name, gap_value=gap_value) as opened:
            opened.write(opened.data.fillna(5.0), tmp_path / f"out{path.suffix}")
        result = stored(tmp_path / f"out{path.suffix}")[name]
        assert result.dtype == data[name].dtype
        np.testing.assert_array_equal(result, after)


@pytest.mark.parametrize("kind", TWO)
def test_a_gap_value_of_packed_numbers(tmp_path, kind):
    data = xr.Dataset({"a": ("x", [1.1, 1.2, 1.3])})
    data.a.encoding = {"dtype": "int16", "scale_factor": 0.1, "add_offset": 1.0, "_FillValue": np.int16(-1)}
    path = save(tmp_path, data, kind)
    with open_file(path, gap_value=1.2) as opened:
        np.testing.assert_array_equal(np.isnan(opened.data), [False, True, False])
        opened.write(opened.data.fillna(1.21), tmp_path / f"out{path.suffix}")
    assert stored(tmp_path / f"out{path.suffix}").a.values.tolist() == [1, 1, 3]


@pytest.mark.parametrize("kind", TWO)
def test_integers_without_a_gap_value_have_no_gaps(tmp_path, kind):
    path = save(tmp_path, xr.Dataset({"a": ("x", np.arange(3, dtype="int32"))}), kind)
    with open_file(path) as opened:
        assert opened.data.dtype == "int32"
        opened.write(opened.data + 0.7, tmp_path / f"out{path.suffix}")
    assert stored(tmp_path / f"out{path.suffix}").a.values.tolist() == [0, 1, 2]


# -- every number as it is -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*Zarr V3 specification")
@pytest.mark.parametrize("kind", KINDS)
def test_lossless_is_every_number_as_it_is(tmp_path, source, kind):
    path = source(kind)
    out = tmp_path / f"out{path.suffix}"
    with open_file(path) as opened:
        deviations = opened.data.map(lambda one: xr.ones_like(one, dtype="float64") / 3).transpose("lon", "lat", "time")
        opened.write(deviations, out, lossless=True)
    with open_file(out) as result:
        for name in ("temperature", "rain"):
            assert result.data[name].dims == ("time", "lat", "lon")
            assert result.data[name].dtype == "float64"
            np.testing.assert_array_equal(result.data[name], np.full((6, 4, 5), 1 / 3))
    after, before = stored(out), stored_once(path)
    assert after.rain.attrs["units"] == "mm"
    assert not {"scale_factor", "add_offset"} & set(after.rain.attrs)
    for name in ("time", "time_bounds", "area", "crs", "station", "lat"):
        assert after[name].attrs == before[name].attrs or name in ("area", "lat")  # NaN is not NaN
        assert after[name].dtype == before[name].dtype or after[name].dtype.kind in "OTU"
        np.testing.assert_array_equal(after[name], before[name])
    if kind in STORES:
        assert zarr.open_group(out, mode="r").metadata.zarr_format == int(kind[-1])
    if kind == "netcdf3":
        assert out.read_bytes()[:4] == b"CDF\x02"


# -- other formats ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*Zarr V3 specification")
@pytest.mark.parametrize(("kind", "suffix"), [("netcdf3", ".zarr"), pytest.param("zarr2", ".nc", marks=HDF5)])
def test_netcdf_and_zarr_become_each_other(tmp_path, source, kind, suffix):
    with open_file(source(kind)) as opened:
        opened.write(opened.data.fillna(2.0), tmp_path / f"out{suffix}")
    result = stored(tmp_path / f"out{suffix}")
    assert result.time.attrs["units"] == "hours since 2000-01-01"
    assert result.time.attrs["bounds"] == "time_bounds"
    assert result.rain.attrs["grid_mapping"] == "crs"
    assert result.attrs["title"] == "a climate"
    with open_file(tmp_path / f"out{suffix}") as opened:
        before = climate()
        filled = before.assign({name: before[name].fillna(2.0) for name in ("temperature", "rain")})
        np.testing.assert_array_equal(opened.data.temperature, filled.temperature)
        packing = 1e-3 * np.rint((before.rain - 1) / 1e-3) + 1
        np.testing.assert_array_equal(opened.data.rain, packing.fillna(2.0))
        np.testing.assert_array_equal(opened.dataset.time, filled.time)
        np.testing.assert_array_equal(opened.dataset.time_bounds, filled.time_bounds)


@HDF5
def test_attributes_that_netcdf_cannot_hold(tmp_path):
    path = save(tmp_path, xr.Dataset({"a": ("x", [1.0, NAN])}, attrs={"more": {"a": 1}}), "zarr3")
    with (
        open_file(path) as opened,
        pytest.raises(ValueError, match=r"output: .*in\.zarr cannot be written as .*out\.nc \(.*more"),
    ):
        opened.write(opened.data.fillna(1.0), tmp_path / "out.nc")
    assert names(tmp_path) == ["in.zarr"]


# -- what cannot be read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TWO)
def test_which_variables(tmp_path, source, kind):
    path = source(kind)
    for name in ("snow", "lat"):
        with pytest.raises(ValueError, match=rf"{path.name}: got the variable '{name}', expected one of .*rain"):
            open_file(path, variable=name)
    with pytest.raises(
        ValueError, match=rf"{path.name}: the variable 'station' holds .*, expected integers or floating"
    ):
        open_file(path, variable="station")
    path = save(tmp_path, xr.Dataset({"station": ("x", ["a"]), "scalar": 1.0}), kind)
    with pytest.raises(ValueError, match=rf"{path.name}: holds no variable of numbers with dimensions, only .*scalar"):
        open_file(path)


@pytest.mark.parametrize("kind", NETCDF)
@pytest.mark.parametrize("kept", [0, 3, 8, 40, -200])
def test_files_that_were_cut_off_are_refused(tmp_path, source, kind, kept):
    path = tmp_path / "in.nc"
    path.write_bytes(source(kind).read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"in\.nc: not readable as a \.nc file \("):
        open_file(path)


@pytest.mark.parametrize("content", [b"CDF\x05" + bytes(100), b"PK\x03\x04", b"time,a\n1,2\n"])
def test_what_is_no_netcdf_is_refused(tmp_path, content):
    (tmp_path / "in.nc").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"in\.nc: not readable as a \.nc file \(its first bytes are not those of netCDF 3"
    ):
        open_file(tmp_path / "in.nc")


@pytest.mark.parametrize("kind", STORES)
def test_broken_stores_are_refused(tmp_path, kind):
    path = save(tmp_path, climate()[["rain", "crs", "time_bounds"]], kind)
    meta = path / "rain" / (".zarray" if kind == "zarr2" else "zarr.json")
    meta.write_text(meta.read_text()[:20])
    with pytest.raises(ValueError, match=r"in\.zarr: not readable as a \.zarr file \("):
        open_file(path)


def test_directories_without_a_store_are_refused(tmp_path):
    (tmp_path / "in.zarr").mkdir()
    with pytest.raises(ValueError, match=r"in\.zarr: not readable as a \.zarr file \("):
        open_file(tmp_path / "in.zarr")
    (tmp_path / "in.zarr" / "zarr.json").write_text("{")
    with pytest.raises(ValueError, match=r"in\.zarr: not readable as a \.zarr file \("):
        open_file(tmp_path / "in.zarr")


@pytest.mark.parametrize("kind", TWO)
def test_times_of_an_unknown_calendar_are_numbers(tmp_path, kind):
    data = xr.Dataset({"a": ("time", [1.0, NAN])}, {"time": [0, 1]})
    data.time.attrs = {"units": "days since 2000-01-01", "calendar": "of the moon"}
    path = save(tmp_path, data, kind)
    with open_file(path) as opened:
        np.testing.assert_array_equal(opened.data.time, [0, 1])
        opened.write(opened.data.fillna(5.0), tmp_path / f"out{path.suffix}")
    after = stored(tmp_path / f"out{path.suffix}")
    assert after.time.attrs == data.time.attrs
    np.testing.assert_array_equal(after.a, [1, 5])


@pytest.mark.parametrize("installed", [True, False])
def test_a_year_of_360_days_is_known_with_and_without_cftime(tmp_path, monkeypatch, installed):
    data = xr.Dataset({"a": ("time", np.arange(48.0))}, {"time": 30 * np.arange(48)})
    data.time.attrs = {"units": "days since 1850-01-01", "calendar": "360_day"}
    path = save(tmp_path, data, "netcdf3")
    if not installed:
        monkeypatch.setitem(sys.modules, "cftime", None)
    with open_file(path) as opened:
        assert opened.data.time.dtype.kind == ("O" if installed else "i")
        (axis,) = adapt(opened.data).axes
    assert (axis.kind, axis.year) == ("time", 360.0)
    np.testing.assert_array_equal(axis.points[:, 0], data.time)


@pytest.mark.parametrize("kind", TWO)
def test_deviations_of_packed_numbers_are_floating_numbers_that_say_what_they_are(tmp_path, kind):
    attrs = {"units": "K", "long_name": "warmth", "standard_name": "air_temperature", "valid_max": np.int16(3000)}
    data = xr.Dataset({"a": ("x", np.array([280.0, NAN, 281.0]), attrs)})
    data.a.encoding = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 273.15, "_FillValue": np.int16(-1)}
    path = save(tmp_path, data, kind)
    with open_file(path) as opened:
        opened.write_deviations(
            adapt(opened.data.compute()).wrap_like_input(np.array([0.0, 0.5, 0.0])), tmp_path / f"out{path.suffix}"
        )
    after = stored(tmp_path / f"out{path.suffix}")
    assert after.a.values.tolist() == [0.0, 0.5, 0.0]
    assert {key: after.a.attrs[key] for key in after.a.attrs if key != "_FillValue"} == {
        "units": "K",
        "long_name": "standard deviation of warmth",
        "standard_name": "air_temperature standard_error",
    }


def test_a_package_that_is_not_there_is_named(tmp_path, monkeypatch):
    (tmp_path / "in.nc").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    monkeypatch.setattr(netcdf, "HDF5", ("h5netcdf", "no_such_package"))
    message = r"{}: a \.nc file needs no_such_package: pip install 'gpytorch-gaps\[files\]'"
    with pytest.raises(ImportError, match=message.format(r"in\.nc")):
        open_file(tmp_path / "in.nc")
    np.save(tmp_path / "in.npy", noise(3))
    with pytest.raises(ImportError, match=message.format(r"out\.nc")):
        open_file(tmp_path / "in.npy").check(tmp_path / "out.nc")


# -- nothing half-written --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lossless", "error"), [(False, KeyboardInterrupt()), (True, OSError("no space left on device"))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch, kind, lossless, error):
    path = save(tmp_path, xr.Dataset({"a": ("x", [1.0, NAN]), "b": ("x", [NAN, 1.0])}), kind)
    out = tmp_path / f"out{path.suffix}"
    former = save(tmp_path, xr.Dataset({"old": ("x", [1.0, 2.0])}), kind, "out")
    assert former == out

    def fail(*_, **__):
        assert (tmp_path / f"{out.name}.tmp").exists(), "begun"
        raise error

    monkeypatch.setattr(xarray_files, "packed", fail)
    monkeypatch.setattr(xr.Dataset, "to_netcdf", fail)

    def half(self, partial, **options):
        Path(partial).mkdir()
        fail()

    monkeypatch.setattr(xr.Dataset, "to_zarr", half)
    with open_file(path) as opened, pytest.raises(type(error)):
        opened.write(filled_with(opened), out, lossless=lossless)
    assert stored(out).old.values.tolist() == [1, 2]
    assert names(tmp_path) == sorted([path.name, out.name])
