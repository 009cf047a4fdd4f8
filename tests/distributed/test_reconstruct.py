"""`reconstruct` by several processes gives what one gives, and sends no more than its weights for an iteration."""

import re
from itertools import pairwise

import numpy as np
import pytest

from tests._ranks import RanksFailed, run_ranks
from tests.distributed import _work as work

WORK = "tests.distributed._work"


def alone(shape, options):
    return work.told(work.solve(None, shape, **options))


def check_same(results, expected, tolerance=1e-8):
    """Slices that make up the whole, in order, and the same account of it."""
    assert results[0]["rows"][0] == 0
    for before, after in pairwise(results):
        assert before["rows"][1] == after["rows"][0]
    mean = np.concatenate([result["mean"] for result in results])
    assert mean.shape == expected["mean"].shape
    assert np.linalg.norm(mean - expected["mean"]) <= tolerance * np.linalg.norm(expected["mean"])
    for result in results:
        assert result["converged"]
        assert result["processes"] == len(results)
        # sums in another order: where iterations are many, some more or less
        assert abs(result["iterations"] - expected["iterations"]) <= 1 + 0.05 * expected["iterations"]
        for name in ("rank", "num_train", "basis_size", "ranks"):
            assert result[name] == expected[name], name
        for name in ("iterations", "residual", "error_in_std"):
            assert result[name] == results[0][name], name


CASES = {
    "one axis": ((30,), {}),
    "two axes, random gaps": ((14, 11), {}),
    "three axes, a block": ((9, 8, 7), {"gaps_as": "block"}),
    "four axes, whole slices": ((6, 5, 4, 3), {"gaps_as": "slices"}),
    "no gaps": ((12, 7), {"gaps_as": "none"}),
    "float32": ((14, 11), {"dtype": "float32"}),
    "large noise": ((14, 11), {"noise": 10.0}),
    "small noise": ((14, 11), {"noise": 1e-6, "gaps_as": "block", "tolerance": 1e-5}),
    "a carried first axis": ((40, 3), {"lengthscale": 0.1}),
    "slices that are swept in another order": ((17, 4, 5), {"lengthscale": 0.8}),
}


def with_counts(cases, by_four):
    """Two ranks for every case, four for some: more are more of the same."""
    return [(case, 2) for case in cases] + [(case, 4) for case in by_four]


@pytest.mark.parametrize(("case", "count"), with_counts(CASES, ["slices that are swept in another order"]))
def test_the_same_mean(case, count):
    shape, options = CASES[case]
    results = run_ranks(count, WORK, "reconstruct", shape, options)
    check_same(results, alone(shape, options), 1e-6 if case == "small noise" else 1e-8)


FULL = {
    "two axes": ((14, 11), {}),
    "three axes, a block": ((9, 8, 7), {"gaps_as": "block"}),
    "an axis shorter than the ranks": ((9, 3), {}),
    "four axes": ((6, 3, 5, 2), {"gaps_as": "slices"}),
    "with a dense block": ((24, 20), {"gaps_as": "block", "lengthscale": 0.5, "noise": 1e-4, "tolerance": 1e-7}),
}


@pytest.mark.parametrize(("case", "count"), with_counts(FULL, ["an axis shorter than the ranks"]))
def test_a_kernel_that_does_not_truncate(case, count):
    """Weights are in parts, each rank has its own; a product transposes."""
    shape, options = FULL[case]
    options = {"kind": "Matern", **options}
    results = run_ranks(count, WORK, "reconstruct", shape, options)
    check_same(results, alone(shape, options))
    assert sum(np.prod(result["weights"]) for result in results) == np.prod(shape)
    for result in results:
        assert result["messages"]["transposes"] > 2 * result["iterations"]
    if case == "with a dense block":
        assert results[0]["rank"] > 0


@pytest.mark.parametrize("count", [2, 4])
def test_what_is_sent_for_an_iteration_is_as_long_as_the_basis(count):
    """Whatever the size of the grid: the box of weights, in float32 while iterating, in float64 for residuals."""
    for shape in ((40, 30), (160, 120)):
        (first, *others) = run_ranks(count, WORK, "reconstruct", shape, {"tolerance": 1e-6})
        box = np.prod(first["ranks"])
        # a product in float32, a scalar; the residuals in float64 are as many as there are passes
        assert first["bytes_per_iteration"] <= box * (4 + 8) + 64
        assert f"{count} processes, each of which sent" in first["text"]
        assert all(other["bytes"] == first["bytes"] for other in others)


def test_points_anywhere_and_slices_of_others():
    points = [[0.1, 0.2], [0.55, 0.91]]
    result = work.solve(None, (14, 11))
    for at, whole in run_ranks(2, WORK, "reconstruct_at", (14, 11), {}, points):
        np.testing.assert_allclose(at, result.at(points).numpy(), rtol=1e-7)
        np.testing.assert_allclose(whole, result.slab(0, 14).numpy(), rtol=1e-7, atol=1e-9)


def test_points_of_weights_in_parts_are_refused():
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, WORK, "reconstruct_at", (14, 11), {"kind": "Matern"}, [[0.1, 0.2]])
    assert all("divided among several processes" in error for error in failed.value.errors.values())


# -- what is read and written ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4])
def test_each_rank_reads_its_slices_only(tmp_path, count):
    shape = (13, 6, 5)
    np.save(tmp_path / "values.npy", work.field(shape))
    results = run_ranks(count, WORK, "only_own_slices", str(tmp_path / "values.npy"))
    check_same(results, alone(shape, {}))
    for result in results:
        assert (result["read"][0][0], result["read"][-1][1]) == result["rows"]
    assert sum(stop - start for result in results for start, stop in result["read"]) == shape[0]


def test_zarr_is_cut_at_its_chunks(tmp_path):
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(tmp_path / "values.zarr", shape=(20, 9), chunks=(6, 9), dtype="float64")
    array[:] = work.field((20, 9))
    results = run_ranks(2, WORK, "from_zarr", str(tmp_path / "values.zarr"))
    check_same(results, alone((20, 9), {}))
    assert results[0]["rows"] == (0, 12)


def test_slabs_of_its_own():
    results = run_ranks(2, WORK, "from_own_slabs", (13, 9))
    check_same(results, alone((13, 9), {}))


@pytest.mark.parametrize("kind", ["RBF", "Matern"])
def test_one_file_is_written_by_all(tmp_path, kind):
    path, options = str(tmp_path / "mean.npy"), {"kind": kind}
    for listed in run_ranks(2, WORK, "write", (14, 11), path, options):
        assert listed == ["mean.npy"]
    np.testing.assert_allclose(np.load(path), alone((14, 11), options)["mean"], rtol=1e-7, atol=1e-9)


# -- what is refused -------------------------------------------------------------------------------------------------

DIFFERENCES = {
    "noise": ([{}, {"noise": 2e-2}], r"noise: got 0\.01 on rank 0 and 0\.02 on rank 1, expected the same on all ranks"),
    "tolerance": ([{}, {"tolerance": 1e-3}], "tolerance: got 1e-09 on rank 0 and 0.001 on rank 1"),
    "dtype": ([{}, {"dtype": "float32"}], r"values: got \(12, 7\) of torch.float64 .* of torch.float32 .* on rank 1"),
    "kernel": (
        [{}, {"kind": "Matern"}],
        r"axis 0: got RBFKernel\(\) .* and MaternKernel\(nu=1.5\) .* on rank 1",
    ),
    "gaps": ([{}, {"gaps_as": "block"}], "values: got .*, expected the same on all ranks"),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_ranks_that_differ_are_refused_by_all(case):
    options, message = DIFFERENCES[case]
    check_refused("reconstruct_differing", ((12, 7), options), message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("one value", "values: got"),
        ("two swapped", "values: got"),
        ("two swapped later", "values: got"),
        ("mask", "values: got"),
        ("nu", "kernels: axis 0: got MaternKernel.*nu=1.5.*nu=2.5"),
        ("dtype", "values: got"),
        ("shape", "values: got"),
        ("axis", "axis 1: got"),
        ("kernel", "kernels: axis 0: got"),
    ],
)
def test_other_data_are_refused_by_all(change, message):
    check_refused("other_values", (change,), message)


def test_more_ranks_than_slices():
    check_refused("reconstruct", ((2, 30), {}), "got 2 slices along the first axis for 4 processes", count=4)


def check_refused(name, args, message, count=2):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(count, WORK, name, *args)
    assert len(failed.value.errors) == count
    for error in failed.value.errors.values():
        assert re.search(message, error.splitlines()[0]), error


def test_views_of_any_strides_and_offsets_are_taken():
    for result in run_ranks(2, WORK, "odd_views"):
        assert result["converged"]


def test_what_a_save_that_was_killed_leaves_is_no_checkpoint(tmp_path):
    (tmp_path / "state.0of2.tmp").touch()
    (tmp_path / "state[1].0of3").touch()
    options = {"kind": "Matern", "checkpoint": str(tmp_path / "state")}
    assert all(result["converged"] for result in run_ranks(2, WORK, "reconstruct", (14, 11), options))
    check_refused(
        "reconstruct",
        ((14, 11), options),
        r"found state\.\dof2, written by 2 processes; expected one written by 4",
        count=4,
    )


@pytest.mark.parametrize("kind", ["RBF", "Matern"])
def test_a_killed_run_resumes(tmp_path, kind):
    """With weights that all ranks have, and with weights in parts, each saved by its own rank."""
    shape, path, options = (16, 12), str(tmp_path / "mean.npy"), {"gaps_as": "block", "memory": 1.0, "kind": kind}
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, WORK, "solve_until", shape, path, 20, options)
    assert failed.value.errors[1] is None
    assert list(tmp_path.glob("mean.npy.checkpoint*"))
    expected = alone(shape, options)
    for result in run_ranks(2, WORK, "solve_until", shape, path, None, options):
        assert result["iterations"] < expected["iterations"]
    np.testing.assert_allclose(np.load(path), expected["mean"], rtol=0, atol=1e-6)
    assert [found.name for found in tmp_path.iterdir()] == ["mean.npy"]


# -- failures --------------------------------------------------------------------------------------------------------


def test_a_rank_that_fails_tells_the_others():
    with pytest.raises(RanksFailed) as failed:
        run_ranks(4, WORK, "dies_while_reading", "raises")
    errors = failed.value.errors
    assert errors[3].startswith("OSError: the disk is gone")
    for rank in range(3):
        assert (
            f"RankError: rank {rank} of 4: rank 3 failed (reading its slices): OSError: the disk is gone"
            in errors[rank]
        )


def test_a_rank_that_is_killed_ends_the_others():
    with pytest.raises(RanksFailed) as failed:
        run_ranks(4, WORK, "dies_while_reading", "killed")
    errors = failed.value.errors
    assert errors[3] is None
    for rank in range(3):
        assert f"RankError: rank {rank} of 4: no answer from another rank (reading its slices)" in errors[rank]


def test_a_rank_that_hangs_ends_the_others_within_the_timeout():
    """The others end while it hangs, which it does until it is killed."""
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, WORK, "dies_while_reading", "hangs", timeout=2.0, hangs=[1])
    assert "no answer from another rank" in failed.value.errors[0]
