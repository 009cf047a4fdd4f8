"""What every format has in common: which files are taken, which outputs, and what becomes of one in another."""

import importlib
import os
import sys
from importlib.util import find_spec

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from PIL import Image

import gpytorch_gaps
from gpytorch_gaps.formats import check_output, open_file
from gpytorch_gaps.formats.opened import FORMATS
from gpytorch_gaps.utils.files import atomic_write_store

NAN = float("nan")
NETCDF = pytest.param(".nc", marks=pytest.mark.skipif(find_spec("h5py") is None, reason="netCDF 4 needs h5py"))
ARRAY = np.array([[1.0, NAN, 3.0], [4.5, -0.0, NAN]])
FILLED = np.array([[1.0, 2.25, 3.0], [4.5, -0.0, 1 / 3]])


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def source(folder, suffix):
    """`ARRAY` in a file of some format."""
    path = folder / f"in{suffix}"
    if suffix == ".npy":
        np.save(path, ARRAY)
    elif suffix == ".npz":
        np.savez(path, a=ARRAY, y=np.array([10.0, 20.0]), x=np.array([1, 2, 4]))
    elif suffix == ".csv":
        path.write_text("y,1,2,4\n10,1.0,,3.0\n20,4.5,-0.0,\n")
    elif suffix in (".tif", ".tiff"):
        Image.fromarray(ARRAY.astype("float32")).save(path)
    else:
        data = xr.Dataset({"a": (("y", "x"), ARRAY)}, {"y": [10.0, 20.0], "x": [1, 2, 4]})
        data.to_zarr(path, consolidated=False) if suffix == ".zarr" else data.to_netcdf(path, engine="scipy")
    return path


def filled(opened):
    """`FILLED`, of the kind that was opened."""
    data = opened.data
    if isinstance(data, pd.DataFrame):
        return pd.DataFrame(FILLED, data.index, data.columns)
    return data.copy(data=FILLED) if isinstance(data, xr.DataArray) else FILLED.astype(data.dtype)


def content(path):
    """The only array, and its coordinates where the format has them."""
    with open_file(path) as opened:
        data = opened.data
        if isinstance(data, pd.DataFrame):
            return data.to_numpy(), [data.index.to_numpy(), data.columns.to_numpy()]
        if isinstance(data, xr.DataArray):
            return data.values, [data[dim].values if dim in data.coords else None for dim in data.dims]
        return np.array(data), list((opened.axes or {}).values())


# -- from one format to another --------------------------------------------------------------------------------------


# From each format to two others, and to each from two others, among them its own.
PAIRS = {
    ".npy": [".npy", ".nc", ".csv"],
    ".npz": [".npz", ".nc", ".csv", ".tif"],
    ".nc": [".nc", ".zarr", ".npz", ".npy"],
    ".zarr": [".zarr", ".csv", ".tiff"],
    ".csv": [".csv", ".npz", ".zarr", ".npy"],
    ".tif": [".tif", ".nc", ".csv"],
}


@pytest.mark.parametrize(("before", "after"), [(before, after) for before, others in PAIRS.items() for after in others])
def test_conversions(tmp_path, before, after):
    if after == ".nc":
        pytest.importorskip("h5py")
    path = source(tmp_path, before)
    with open_file(path) as opened:
        check_output(tmp_path / f"out{after}", opened)
        opened.write(filled(opened), tmp_path / f"out{after}")
    array, axes = content(tmp_path / f"out{after}")
    dtype = "float32" if before == ".tif" else "float64"  # of a table, float32 are the digits that tell them apart
    np.testing.assert_array_equal(array.astype(dtype), FILLED.astype(dtype))
    assert np.signbit(array[1, 1])
    if before in (".npz", ".nc", ".zarr", ".csv") and after in (".npz", ".nc", ".zarr", ".csv"):
        np.testing.assert_array_equal(axes[0], [10, 20])
        np.testing.assert_array_equal(axes[1], [1, 2, 4])


@pytest.mark.parametrize("after", [".npy", ".npz", NETCDF, ".zarr", ".csv"])
def test_one_dimension(tmp_path, after):
    np.savez(tmp_path / "in.npz", a=np.array([1.0, NAN]), time=np.array(["2001-01-01", "2001-01-03"], "M8[ns]"))
    opened = open_file(tmp_path / "in.npz")
    opened.write(np.array([1.0, 2.0]), tmp_path / f"out{after}")
    array, _ = content(tmp_path / f"out{after}")
    assert array.ravel().tolist() == [1, 2]
    if after == ".csv":
        assert (tmp_path / "out.csv").read_text() == "time,a\n2001-01-01,1.0\n2001-01-03,2.0\n"


def test_integers_stay_integers(tmp_path):
    np.save(tmp_path / "in.npy", np.array([[1, 99], [3, 4]], "int16"))
    opened = open_file(tmp_path / "in.npy", gap_value=99)
    result = np.array([[1, 7.6], [3, 4]])
    for suffix in (".npz", ".zarr", ".tif"):
        opened.write(result, tmp_path / f"out{suffix}")
        array, _ = content(tmp_path / f"out{suffix}")
        assert array.dtype == "int16"
        assert array.tolist() == [[1, 8], [3, 4]]
        opened.write(result, tmp_path / f"out{suffix}", lossless=True)
        array, _ = content(tmp_path / f"out{suffix}")
        np.testing.assert_array_equal(array, result)


@pytest.mark.parametrize(
    ("header", "after"),
    [(header, ".npz") for header in ("values", "index", "columns", "name")]
    + [(header, ".zarr") for header in ("values", "row", "column")],
)
@pytest.mark.filterwarnings("ignore:.*Zarr V3 specification")
def test_tables_of_any_header(tmp_path, header, after):
    (tmp_path / "in.csv").write_text(f"{header},u,v\nx,1,\ny,3,4\n")
    opened = open_file(tmp_path / "in.csv")
    opened.write(opened.data.fillna(2.0), tmp_path / f"out{after}")
    if after == ".npz":
        arrays = dict(np.load(tmp_path / "out.npz"))
    else:
        with open_file(tmp_path / f"out{after}") as result:
            arrays = {name: variable.values for name, variable in result.dataset.variables.items()}
    assert arrays[header].tolist() == ["x", "y"]
    assert sorted(map(str, (array.tolist() for array in arrays.values()))) == sorted(
        ["['x', 'y']", "['u', 'v']", "[[1.0, 2.0], [3.0, 4.0]]"]
    )


def test_several_variables(tmp_path):
    xr.Dataset({"a": (("y", "x"), ARRAY), "b": ("y", [NAN, 1.0])}, {"x": [1, 2, 4]}).to_zarr(
        tmp_path / "in.zarr", consolidated=False
    )
    with open_file(tmp_path / "in.zarr") as opened:
        opened.write(opened.data.fillna(7.0), tmp_path / "out.npz")
        for suffix in (".npy", ".csv", ".tif", ".png"):
            with pytest.raises(
                ValueError, match=rf"output: .*in\.zarr has the variables a, b, but a \{suffix} file holds one; pick it"
            ):
                check_output(tmp_path / f"out{suffix}", opened)
    arrays = dict(np.load(tmp_path / "out.npz"))
    assert set(arrays) == {"a", "b", "x"}
    assert arrays["b"].tolist() == [7, 1]
    with open_file(tmp_path / "in.zarr", variable="b") as opened:
        opened.write(opened.data.fillna(7.0), tmp_path / "out.npy")
    assert np.load(tmp_path / "out.npy").tolist() == [7, 1]


def test_a_table_has_two_dimensions(tmp_path):
    np.save(tmp_path / "in.npy", np.ones((2, 3, 4)))
    with pytest.raises(ValueError, match=r"output: .*in\.npy has the shape \(2, 3, 4\), but a \.csv table has two"):
        check_output(tmp_path / "out.csv", open_file(tmp_path / "in.npy"))


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".nc", ".zarr", ".csv", ".tif"])
def test_what_is_of_another_shape_is_refused(tmp_path, suffix):
    with open_file(source(tmp_path, suffix)) as opened:
        before = names(tmp_path)
        part = opened.data[:, :2] if suffix not in (".csv",) else opened.data.iloc[:, :2]
        with pytest.raises(ValueError, match=rf"filled: got .*2.*, expected .*3.*, as in .*in\{suffix}"):
            opened.write(part, tmp_path / f"out{suffix}")
    assert names(tmp_path) == before


# -- inputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["file", "file.txt", "file.npy.gz", ".npy", "", "directory"])
def test_other_suffixes_are_refused(tmp_path, name):
    (tmp_path / "directory").mkdir()
    with pytest.raises(ValueError, match=r": got the suffix '.*', expected one of \.csv, \.nc, \.npy, \.npz"):
        open_file(tmp_path / name if name else "")
    np.save(tmp_path / "in.npy", ARRAY)
    with pytest.raises(ValueError, match=r"got the suffix"):
        open_file(tmp_path / "in.npy").write(FILLED, tmp_path / name if name else "")


@pytest.mark.parametrize("suffix", sorted(FORMATS))
def test_files_that_are_not_there(tmp_path, suffix):
    with pytest.raises(FileNotFoundError, match=rf"nowhere\{suffix}: no such file"):
        open_file(tmp_path / f"nowhere{suffix}")
    (tmp_path / f"broken{suffix}").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=rf"broken\{suffix}: no such file"):
        open_file(str(tmp_path / f"broken{suffix}"))


@pytest.mark.parametrize("suffix", sorted(FORMATS))
def test_directories_and_files_are_told_apart(tmp_path, suffix):
    path = tmp_path / f"in{suffix}"
    path.write_bytes(b"") if suffix == ".zarr" else path.mkdir()
    came, expected = ("a file", "a directory") if suffix == ".zarr" else ("a directory", "a file")
    with pytest.raises(ValueError, match=rf"in\{suffix}: got {came}, expected {expected} for a \{suffix}"):
        open_file(path)


@pytest.mark.parametrize("suffix", [".npy", ".tif", ".png"])
def test_arrays_without_a_name_have_no_variables(tmp_path, suffix):
    (tmp_path / f"in{suffix}").write_bytes(b"")
    with pytest.raises(ValueError, match=rf"got the variable 'a', but a \{suffix} file holds one array without a name"):
        open_file(tmp_path / f"in{suffix}", variable="a")


def test_packages_are_imported_when_they_are_needed(tmp_path, monkeypatch):
    np.save(tmp_path / "in.npy", ARRAY)
    (tmp_path / "in.csv").write_text("a\n1\n")
    monkeypatch.setattr(gpytorch_gaps, "formats", gpytorch_gaps.formats)  # to be put back
    for name in [name for name in sys.modules if name.startswith("gpytorch_gaps.formats")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("xarray", "pandas", "scipy", "h5netcdf", "h5py", "zarr", "dask", "tifffile", "PIL", "PIL.Image"):
        monkeypatch.setitem(sys.modules, name, None)
    formats = importlib.import_module("gpytorch_gaps.formats")
    assert formats.open_file is not open_file, "afresh"
    formats.open_file(tmp_path / "in.npy").write(FILLED, tmp_path / "out.npz")
    for suffix, package in ((".csv", "pandas"), (".zarr", "xarray"), (".tif", "tifffile"), (".png", "PIL.Image")):
        message = rf"out\{suffix}: a \{suffix} file needs {package}: pip install 'gpytorch-gaps\[files\]'"
        with pytest.raises(ImportError, match=message):
            formats.check_output(tmp_path / f"out{suffix}", formats.open_file(tmp_path / "in.npy"))
    with pytest.raises(ImportError, match=r"in\.csv: a \.csv file needs pandas"):
        formats.open_file(tmp_path / "in.csv")


# -- outputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".npy", ".csv", ".zarr"])
def test_places_that_are_not_there_are_refused(tmp_path, suffix):
    np.save(tmp_path / "in.npy", ARRAY)
    opened = open_file(tmp_path / "in.npy")
    with pytest.raises(ValueError, match=rf"output: the directory of .*out\{suffix} does not exist; expected one that"):
        check_output(tmp_path / "nowhere" / f"out{suffix}", opened)
    occupied = tmp_path / f"out{suffix}"
    if suffix == ".zarr":
        occupied.mkdir()
        (occupied / "thesis.tex").write_text("years of work")
        message = r"output: .*out\.zarr exists and is not a zarr store; expected a new name or a zarr store"
    else:
        occupied.mkdir()
        message = r"output: got the directory .*, expected a file"
    with pytest.raises(ValueError, match=message):
        opened.write(FILLED, occupied)
    assert occupied.is_dir()
    assert suffix != ".zarr" or (occupied / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
def test_places_that_one_may_only_read_are_refused(tmp_path, monkeypatch, suffix):
    np.save(tmp_path / "in.npy", ARRAY)
    opened = open_file(tmp_path / "in.npy")
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK))
    with pytest.raises(ValueError, match=rf"output: no permission to write in the directory of .*out\{suffix}"):
        check_output(tmp_path / f"out{suffix}", opened)


@pytest.mark.parametrize("suffix", [".npy", ".csv"])
def test_outputs_that_are_there_are_replaced(tmp_path, suffix):
    opened = open_file(source(tmp_path, suffix))
    (tmp_path / f"out{suffix}").write_bytes(b"something longer than what will be written" * 1000)
    opened.write(filled(opened), tmp_path / f"out{suffix}")
    array, _ = content(tmp_path / f"out{suffix}")
    np.testing.assert_array_equal(array, FILLED.astype(array.dtype))


# -- stores ----------------------------------------------------------------------------------------------------------


def fill_store(text):
    def write(partial):
        partial.mkdir()
        (partial / "zarr.json").write_text(text)

    return write


def test_a_store_takes_the_place_of_the_former(tmp_path):
    path = tmp_path / "out.zarr"
    atomic_write_store(path, fill_store("first"))
    (path / "leftover").write_text("of the first")
    atomic_write_store(path, fill_store("second"))
    assert names(path) == ["zarr.json"]
    assert (path / "zarr.json").read_text() == "second"
    assert names(tmp_path) == ["out.zarr"]


def test_neighbours_of_a_store_are_let_alone(tmp_path):
    (tmp_path / "out.zarr.old").mkdir()
    (tmp_path / "out.zarr.old" / "kept").write_text("by the user")
    atomic_write_store(tmp_path / "out.zarr", fill_store("first"))
    atomic_write_store(tmp_path / "out.zarr", fill_store("second"))
    with pytest.raises(KeyboardInterrupt):
        atomic_write_store(tmp_path / "other.zarr", interrupted)
    assert (tmp_path / "out.zarr.old" / "kept").read_text() == "by the user"
    assert names(tmp_path) == ["out.zarr", "out.zarr.old"]


def interrupted(partial):
    fill_store("half")(partial)
    raise KeyboardInterrupt


def test_a_store_behind_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    atomic_write_store(tmp_path / "elsewhere" / "store", fill_store("first"))
    (tmp_path / "out.zarr").symlink_to(tmp_path / "elsewhere" / "store")
    atomic_write_store(tmp_path / "out.zarr", fill_store("second"))
    assert (tmp_path / "out.zarr").is_symlink()
    assert (tmp_path / "elsewhere" / "store" / "zarr.json").read_text() == "second"
    assert (names(tmp_path), names(tmp_path / "elsewhere")) == (["elsewhere", "out.zarr"], ["store"])


@pytest.mark.parametrize("before", [False, True])
def test_a_store_that_fails_leaves_what_was_there(tmp_path, before):
    path = tmp_path / "out.zarr"
    if before:
        atomic_write_store(path, fill_store("old"))
    with pytest.raises(KeyboardInterrupt):
        atomic_write_store(path, interrupted)
    assert names(tmp_path) == (["out.zarr"] if before else [])
    assert not before or (path / "zarr.json").read_text() == "old"


def test_a_swap_that_was_killed_halfway_is_undone(tmp_path):
    path = tmp_path / "out.zarr"
    atomic_write_store(path, fill_store("old"))
    path.rename(tmp_path / ".out.zarr.former")  # here it was killed
    fill_store("new")(tmp_path / "out.zarr.tmp")
    with pytest.raises(KeyboardInterrupt):
        atomic_write_store(path, interrupted)
    assert (path / "zarr.json").read_text() == "old"
    assert names(tmp_path) == ["out.zarr"]
