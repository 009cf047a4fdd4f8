"""Every format through the command line; formats themselves are tested next door."""

import json

import numpy as np
import pytest


def two_variables(field):
    xarray = pytest.importorskip("xarray")
    times = np.datetime64("2020-01-01") + np.arange(12)
    coordinates = {"time": times, "x": np.arange(9) * 0.5}
    other = np.where(np.isnan(field), field, 2 * field)
    return xarray.Dataset({"sst": (("time", "x"), field), "ice": (("time", "x"), other)}, coordinates)


@pytest.fixture
def netcdf(tmp_path, field):
    pytest.importorskip("h5netcdf")
    two_variables(field).to_netcdf(tmp_path / "in.nc", engine="h5netcdf")
    return tmp_path / "in.nc"


def opened(path):
    import xarray

    kind = {"engine": "zarr", "consolidated": False} if path.suffix == ".zarr" else {"engine": "h5netcdf"}
    with xarray.open_dataset(path, **kind) as dataset:
        return dataset.load()


def test_all_variables_of_a_netcdf_file(netcdf, tmp_path, fill):
    pytest.importorskip("matplotlib")
    std, picture = tmp_path / "std.nc", tmp_path / "p.png"
    code, out, err = fill(netcdf, "-o", tmp_path / "out.nc", "--std", std, "--plot", picture, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert sorted(found["report"]) == ["ice", "sst"]
    before, after, deviations = opened(netcdf), opened(tmp_path / "out.nc"), opened(std)
    for name in ("sst", "ice"):
        assert after[name].notnull().all()
        assert (after[name].where(before[name].notnull()) == before[name]).sum() == 98
        assert ((deviations[name] > 0) == before[name].isnull()).all()
        assert (tmp_path / f"p_{name}.png").exists()
    assert "time: 12 times" in found["report"]["sst"]["axes"][0]


def test_one_variable_of_a_netcdf_file(netcdf, tmp_path, fill):
    code, _, err = fill(netcdf, "-o", tmp_path / "out.nc", "--variable", "sst")
    assert code == 0, err
    after = opened(tmp_path / "out.nc")
    assert after["sst"].notnull().all()
    assert after["ice"].isnull().sum() == 10
    code, _, err = fill(netcdf, "-o", tmp_path / "out2.nc", "--variable", "wind")
    assert code == 1
    assert "ice, sst" in err or "sst, ice" in err
    code, _, err = fill(netcdf, "-o", tmp_path / "out.npy")
    assert code == 1
    assert "--variable" in err


def test_a_file_is_filled_in_place_if_forced(netcdf, fill):
    assert fill(netcdf, "-o", netcdf)[0] == 1
    assert fill(netcdf, "-o", netcdf, "--force")[0] == 0
    assert opened(netcdf)["sst"].notnull().all()


def test_a_small_zarr_store_has_standard_deviations_too(tmp_path, field, fill):
    pytest.importorskip("zarr")
    source = tmp_path / "in.zarr"
    two_variables(field)[["sst"]].chunk({"time": 5}).to_zarr(source, consolidated=False)
    code, _, err = fill(source, "-o", tmp_path / "out.zarr", "--std", tmp_path / "std.zarr")
    assert code == 0, err
    assert opened(tmp_path / "out.zarr")["sst"].notnull().all()
    assert ((opened(tmp_path / "std.zarr")["sst"] > 0) == np.isnan(field)).all()
    assert fill(source, "-o", source, "--force")[0] == 0
    assert opened(source)["sst"].notnull().all()


def test_times_that_are_out_of_order(tmp_path, field, fill):
    """Rows may come in any order, and stay in it."""
    pytest.importorskip("h5netcdf")
    dataset = two_variables(field)[["sst"]]
    order = np.random.default_rng(1).permutation(12)
    for name, one in (("sorted", dataset), ("mixed", dataset.isel(time=order))):
        one.to_netcdf(tmp_path / f"{name}.nc", engine="h5netcdf")
        assert fill(tmp_path / f"{name}.nc", "-o", tmp_path / f"{name}_out.nc")[0] == 0
    mixed, whole = opened(tmp_path / "mixed_out.nc"), opened(tmp_path / "sorted_out.nc")
    np.testing.assert_array_equal(mixed["time"], dataset["time"][order])
    np.testing.assert_allclose(mixed.sortby("time")["sst"], whole["sst"], atol=1e-4)


def test_a_table(tmp_path, fill):
    pytest.importorskip("pandas")
    rows = [f"2020-01-{day:02},{np.sin(day):.3f},{'' if day in (4, 5) else day},x" for day in (3, 1, 2, *range(4, 20))]
    (tmp_path / "in.csv").write_text("\n".join(["date,a,b,remark", *rows]) + "\n")
    code, _, err = fill(tmp_path / "in.csv", "-o", tmp_path / "out.csv")
    assert code == 0, err
    before, after = ((tmp_path / name).read_text().splitlines() for name in ("in.csv", "out.csv"))
    changed = [i for i, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
    assert [before[i][:10] for i in changed] == ["2020-01-04", "2020-01-05"]


def test_an_image_with_a_gap_value(tmp_path, fill):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    pixels = np.add.outer(np.arange(14), np.arange(10))[..., None] * np.array([4, 5, 6]) + 20
    pixels = pixels.astype(np.uint8)
    pixels[4:7, 3:6] = 0
    image.fromarray(pixels).save(tmp_path / "in.png")
    picture = tmp_path / "p.png"
    code, _, err = fill(tmp_path / "in.png", "-o", tmp_path / "o.png", "--gap-value", 0, "--plot", picture)
    assert code == 0, err
    result = np.array(image.open(tmp_path / "o.png"))
    known = pixels.any(axis=2)
    np.testing.assert_array_equal(result[known], pixels[known])
    assert (result[~known] > 0).all()
    code, _, err = fill(tmp_path / "in.png", "-o", tmp_path / "o2.png", "--std", tmp_path / "std.png")
    assert code == 1
    assert "floating numbers" in err


def test_a_tiff_and_an_archive(tmp_path, field, fill):
    tifffile = pytest.importorskip("tifffile")
    tifffile.imwrite(tmp_path / "in.tif", field.astype(np.float32))
    assert fill(tmp_path / "in.tif", "-o", tmp_path / "out.tif")[0] == 0
    assert np.isfinite(tifffile.imread(tmp_path / "out.tif")).all()
    np.savez(tmp_path / "in.npz", sst=field, y=np.arange(12) * 2.0, x=np.arange(9) * 3.0)
    code, out, _ = fill(tmp_path / "in.npz", "-o", tmp_path / "out.npz", "--json")
    assert code == 0
    assert "22" in json.loads(out)["report"]["values"]["axes"][0]  # the extent, by the coordinates
    with np.load(tmp_path / "out.npz") as archive:
        assert np.isfinite(archive["sst"]).all()
        assert sorted(archive) == ["sst", "x", "y"]


def test_variables_of_a_file_are_filled_together(netcdf, tmp_path, fill):
    code, out, err = fill(netcdf, "-o", tmp_path / "out.nc", "--joint", "--json")
    assert code == 0, err
    report = json.loads(out)["report"]
    assert "filled together with sst" in " ".join(report["ice"]["notes"])
    assert report["ice"]["shape"] == [12, 9]
    assert opened(tmp_path / "out.nc")["ice"].notnull().all()
    code, _, err = fill(netcdf, "-o", tmp_path / "one.nc", "--joint", "--variable", "sst")
    assert code == 1
    assert "--joint" in err
