"""Files and data that cannot be handled: exit code 1 and one line, before any work where that can be."""

import numpy as np
import pytest

import gpytorch_gaps


@pytest.fixture
def idle(monkeypatch):
    """Fails if anything is computed."""

    def computed(*_, **__):
        raise AssertionError("it was computed after all")

    monkeypatch.setattr(gpytorch_gaps, "fill_gaps", computed)


def refused(result, *words):
    code, out, err = result
    assert (code, out) == (1, "")
    assert err.startswith("gpytorch-gaps: error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def saved(path, values):
    np.save(path, values)
    return path


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("a.npy", b"no array", "not readable as an .npy"),
        ("a.npy", b"", "not readable as an .npy"),
        ("a.npz", b"PK\x03\x04 and no more", "not readable as an .npz"),
        ("a.nc", b"CDF\x01", "not readable as a .nc"),
        ("a.csv", b"\xff\xfe\x00", "not readable as a table"),
        ("a.png", b"\x89PNG", "not readable as a PNG"),
        ("a.tif", b"II*\x00", "not readable as"),
        ("a.hdf", b"", "expected one of"),
        ("a", b"", "expected one of"),
    ],
)
def test_a_file_that_cannot_be_read(name, content, word, tmp_path, run, idle):
    (tmp_path / name).write_bytes(content)
    refused(run("fill", tmp_path / name, "-o", tmp_path / "out.npy"), name, word)
    refused(run("inspect", tmp_path / name), name, word)


def test_a_file_that_is_missing(tmp_path, run, idle):
    refused(run("fill", tmp_path / "in.npy", "-o", tmp_path / "out.npy"), "in.npy", "no such file")
    refused(run("inspect", tmp_path / "in.zarr"), "in.zarr", "no such file")


def test_output_paths_are_checked_before_any_work(tmp_path, field, run, idle):
    source, there = saved(tmp_path / "in.npy", field), saved(tmp_path / "there.npy", field)
    refused(run("fill", source, "-o", tmp_path / "out.doc"), "'.doc'")
    refused(run("fill", source, "-o", tmp_path / "out"), "''")
    refused(run("fill", source, "-o", tmp_path / "nowhere" / "out.npy"), "does not exist")
    refused(run("fill", source, "-o", tmp_path / "out.png"), "png")  # floating numbers
    refused(run("fill", source, "-o", there), "there.npy", "--force")
    out = tmp_path / "out.npy"
    refused(run("fill", source, "-o", out, "--std", tmp_path / "std.doc"), "'.doc'")
    refused(run("fill", source, "-o", out, "--std", there), "there.npy", "--force")
    refused(run("fill", source, "-o", out, "--std", out), "cannot hold", "to another file")
    refused(run("fill", source, "-o", out, "--std", source, "--force"), "in.npy", "another file")
    refused(run("fill", source, "-o", out, "--plot", tmp_path / "p.npy"), "--plot", ".png")
    refused(run("fill", source, "-o", out, "--plot", tmp_path / "nowhere" / "p.png"), "--plot", "does not exist")


def test_a_name_where_there_are_none(tmp_path, field, run, idle):
    source = saved(tmp_path / "in.npy", field)
    refused(run("fill", source, "-o", tmp_path / "out.npy", "--variable", "sst"), "'sst'")


@pytest.mark.parametrize("shape", [(12, 9), (30,)])
def test_nothing_but_gaps(shape, tmp_path, fill):
    source = saved(tmp_path / "in.npy", np.full(shape, np.nan))
    refused(fill(source, "-o", tmp_path / "out.npy"), "all of them gaps")
    assert not (tmp_path / "out.npy").exists()


def test_infinities(tmp_path, field, fill):
    field[4, 7] = np.inf
    source = saved(tmp_path / "in.npy", field)
    refused(fill(source, "-o", tmp_path / "out.npy"), "(4, 7)", "inf")
    code = fill(source, "-o", tmp_path / "out.npy", "--gap-value", "inf")[0]
    assert code == 0
    assert np.isfinite(np.load(tmp_path / "out.npy")).all()


@pytest.mark.parametrize("values", [np.zeros((0, 4)), np.array(3.0), np.zeros(5, complex), np.array(["a", "b"])])
def test_arrays_that_are_none(values, tmp_path, run, idle):
    refused(run("fill", saved(tmp_path / "in.npy", values), "-o", tmp_path / "out.npy"), "in.npy", "expected")


def test_coordinates_that_come_twice(tmp_path, field, fill):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("h5netcdf")
    x = np.arange(9.0)
    x[5] = x[4]
    xarray.DataArray(field, {"x": x}, ("y", "x"), "sst").to_netcdf(tmp_path / "in.nc", engine="h5netcdf")
    refused(fill(tmp_path / "in.nc", "-o", tmp_path / "out.nc"), "x", "4.0 twice")
    (tmp_path / "in.csv").write_text("date,a\n2020-01-01,1\n2020-01-02,\n2020-01-01,3\n")
    refused(fill(tmp_path / "in.csv", "-o", tmp_path / "out.csv"), "2020-01-01", "again in row 4")
