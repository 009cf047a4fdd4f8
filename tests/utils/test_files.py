"""Files that are whole or not there, and arrays that grow beside their place until they are."""

import json
import os

import numpy as np
import pytest
import torch

from gpytorch_gaps.reconstruction.output import ResumableNpy
from gpytorch_gaps.utils.files import atomic_save, atomic_write, refuse_directory

SHAPE = (6, 3, 2)


def content(seed=0, shape=SHAPE, dtype="float64"):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def grow(path, array, name="a", stop=None):
    """Appends two slices at a time up to `stop`, from wherever the file is; what it began from, and the file."""
    file = ResumableNpy(path, array.shape, str(array.dtype), name)
    begun = file.rows
    assert 0 <= begun <= len(array), "no such slice"
    while file.rows < (len(array) if stop is None else stop):
        file.append(array[file.rows : file.rows + 2])
    return begun, file


# -- atomic_write -----------------------------------------------------------------------------------------------------


def test_a_file_appears_with_all_of_its_content(tmp_path):
    path = tmp_path / "file"
    seen = []

    def write(stream):
        stream.write(b"first")
        stream.flush()
        seen.append(path.exists())
        stream.write(b" second")

    atomic_write(path, write)
    assert seen == [False]
    assert path.read_bytes() == b"first second"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [OSError("no space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("before", [None, b"old"])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, before, error):
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)

    def write(stream):
        stream.write(b"half")
        raise error

    with pytest.raises(type(error)):
        atomic_write(path, write)
    assert (path.read_bytes() if path.exists() else None) == before
    assert names(tmp_path) == ([] if before is None else ["file"])


def test_what_a_killed_write_left_does_not_matter(tmp_path):
    (tmp_path / "file.tmp").write_bytes(b"half of a longer content")
    atomic_write(tmp_path / "file", lambda stream: stream.write(b"whole"))
    assert (tmp_path / "file").read_bytes() == b"whole"
    assert names(tmp_path) == ["file"]


def test_tensors_are_read_back_by_the_safe_loader(tmp_path):
    path = tmp_path / "file.pt"
    saved = {"weights": torch.arange(3.0, dtype=torch.float64), "count": 3, "name": "a"}
    atomic_save(path, saved)
    loaded = torch.load(path, weights_only=True)
    assert torch.equal(loaded["weights"], saved["weights"])
    assert (loaded["count"], loaded["name"]) == (3, "a")


def test_directories_are_refused(tmp_path):
    with pytest.raises(ValueError, match=f"checkpoint: got the directory {tmp_path}, expected a file"):
        refuse_directory("checkpoint", tmp_path)
    refuse_directory("checkpoint", tmp_path / "not there")
    with pytest.raises(ValueError, match="output: got the directory"):
        ResumableNpy(tmp_path, SHAPE, "float64", "a")
    with pytest.raises(ValueError, match=r"output: the directory of .* does not exist"):
        ResumableNpy(tmp_path / "nowhere" / "file.npy", SHAPE, "float64", "a")


# -- an array that grows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 3, 2), (1, 4)])
def test_a_whole_array(tmp_path, shape, dtype):
    path, array = tmp_path / "file.npy", content(shape=shape, dtype=dtype)
    _, file = grow(path, array)
    assert not path.exists(), "whole, but not yet in its place"
    file.finish()
    saved = np.load(path)
    assert saved.dtype == dtype
    np.testing.assert_array_equal(saved, array)
    assert names(tmp_path) == ["file.npy"]


def test_an_unfinished_array_is_not_put_in_its_place(tmp_path):
    path = tmp_path / "file.npy"
    _, file = grow(path, content(), stop=4)
    with pytest.raises(ValueError, match="4 slices are written, expected 6"):
        file.finish()
    assert not path.exists()


def test_it_goes_on_from_where_it_was(tmp_path):
    path, array = tmp_path / "file.npy", content()
    grow(path, array, stop=4)
    assert names(tmp_path) == ["file.npy.partial", "file.npy.partial.json"]
    begun, file = grow(path, array)
    assert begun == 4
    file.finish()
    np.testing.assert_array_equal(np.load(path), array)
    assert names(tmp_path) == ["file.npy"]


def test_what_is_on_disk_counts_and_nothing_else(tmp_path, monkeypatch):
    """The record is written after the slab: interrupted in between, the slab is written again."""
    path, array = tmp_path / "file.npy", content()
    _, file = grow(path, array, stop=2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            file.append(array[2:4])
    begun, file = grow(path, array)
    assert begun == 2
    file.finish()
    np.testing.assert_array_equal(np.load(path), array)


@pytest.mark.parametrize("change", ["name", "shape", "dtype"])
def test_another_one_starts_afresh(tmp_path, change):
    path = tmp_path / "file.npy"
    grow(path, content(), stop=4)
    shape = (6, 2, 3) if change == "shape" else SHAPE
    other = content(1, shape, "float32" if change == "dtype" else "float64")
    begun, file = grow(path, other, name="b" if change == "name" else "a")
    assert begun == 0
    file.finish()
    np.testing.assert_array_equal(np.load(path), other)
    assert names(tmp_path) == ["file.npy"]


def test_one_that_was_begun_over_is_not_taken_for_what_it_was(tmp_path):
    """A is stopped after 4 slices; B begins in its place and is stopped at once; A comes back.

    Its slices are gone: to go on after them would leave zeros in the finished file.
    """
    path, array = tmp_path / "file.npy", content()
    grow(path, array, name="a", stop=4)
    ResumableNpy(path, SHAPE, "float64", "b")
    begun, file = grow(path, array, name="a")
    assert begun == 0, "slices count as written that B has overwritten"
    file.finish()
    np.testing.assert_array_equal(np.load(path), array)


def test_a_file_that_is_there_stays_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "file.npy"
    np.save(path, content(7))
    _, file = grow(path, content(), stop=4)
    np.testing.assert_array_equal(np.load(path), content(7))
    del file
    grow(path, content())[1].finish()
    np.testing.assert_array_equal(np.load(path), content())


RECORDS = {
    "empty": b"",
    "cut off": b'{"name": "a (6, 3',
    "no text": b"\xff\xfe\x00",
    "no object": b"[1, 2]",
    "a number": b"4",
    "no rows": json.dumps({"name": f"a {SHAPE} float64"}).encode(),
    "no name": b'{"rows": 4}',
    "rows that are no number": json.dumps({"name": f"a {SHAPE} float64", "rows": "many"}).encode(),
    "rows of nothing": json.dumps({"name": f"a {SHAPE} float64", "rows": None}).encode(),
    "more rows than there are": json.dumps({"name": f"a {SHAPE} float64", "rows": 99}).encode(),
    "fewer than none": json.dumps({"name": f"a {SHAPE} float64", "rows": -2}).encode(),
}


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_that_cannot_be_understood_starts_afresh(tmp_path, record):
    path, array = tmp_path / "file.npy", content()
    grow(path, array, stop=4)
    (tmp_path / "file.npy.partial.json").write_bytes(RECORDS[record])
    begun, file = grow(path, array)
    assert begun == 0
    file.finish()
    np.testing.assert_array_equal(np.load(path), array)
    assert names(tmp_path) == ["file.npy"]


@pytest.mark.parametrize("damage", ["missing", "empty", "cut off", "no npy"])
def test_a_partial_file_that_is_not_what_its_record_says_starts_afresh(tmp_path, damage):
    """As after a crash of the machine, which need not write files in the order they were written in."""
    path, array = tmp_path / "file.npy", content()
    grow(path, array, stop=4)
    partial = tmp_path / "file.npy.partial"
    if damage == "missing":
        partial.unlink()
    else:
        whole = partial.read_bytes()
        partial.write_bytes({"empty": b"", "cut off": whole[: len(whole) // 2], "no npy": b"x" * len(whole)}[damage])
    begun, file = grow(path, array)
    assert begun == 0
    file.finish()
    np.testing.assert_array_equal(np.load(path), array)


def test_a_record_left_by_a_kill_right_after_the_last_step(tmp_path):
    """The file is in its place, its record not yet gone."""
    path, array = tmp_path / "file.npy", content()
    _, file = grow(path, array)
    record = (tmp_path / "file.npy.partial.json").read_bytes()
    file.finish()
    (tmp_path / "file.npy.partial.json").write_bytes(record)
    begun, file = grow(path, array)
    assert begun == 0
    file.finish()
    np.testing.assert_array_equal(np.load(path), array)
    assert names(tmp_path) == ["file.npy"]


def test_slabs_of_another_precision_are_cast_and_of_another_shape_refused(tmp_path):
    path, array = tmp_path / "file.npy", content()
    file = ResumableNpy(path, SHAPE, "float32", "a")
    file.append(array[:5])
    with pytest.raises(ValueError, match=r"got a slab of shape .* at slice 5, expected slices of shape"):
        file.append(array[:2, :2])
    assert file.rows == 5
    file.append(array[5:])
    file.finish()
    np.testing.assert_array_equal(np.load(path), array.astype("float32"))
