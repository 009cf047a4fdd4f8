"""`fit` by several processes: every one solves for some columns, and all get what one process gets."""

import numpy as np
import pytest

from tests._ranks import RanksFailed, run_ranks
from tests.distributed import _work as work

WORK = "tests.distributed._work"

CASES = {
    "one product": ("one product", {}),
    "one product, preconditioned": ("one product", {"rank": 20}),
    "clouds": ("clouds", {}),
    "a sum": ("a sum", {}),
    "a noise per level": ("a noise per level", {}),
    "fewer probes than ranks": ("one product", {"num_probes": 2}),
    "one probe": ("one product", {"num_probes": 1}),
    "warm starts": ("one product", {"warm_start": True, "steps": 5}),
    "warm starts of a sum": ("a sum", {"warm_start": True, "steps": 4}),
    "a finish": ("one product", {"patience": 1, "min_improvement": 1e3, "steps": 9}),
    "a loop of its own": ("one product", {"own_loop": True}),
}


def check_same(result, expected, tolerance=1e-6):
    assert result["loss"] == pytest.approx(expected["loss"], rel=tolerance)
    for kind in ("parameters", "gradients"):
        assert result[kind].keys() == expected[kind].keys()
        for name, value in expected[kind].items():
            np.testing.assert_allclose(result[kind][name], value, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(
    ("case", "count"),
    [(case, 2) for case in CASES] + [(case, 4) for case in ("fewer probes than ranks", "warm starts")],
)
def test_the_same_steps(case, count):
    name, options = CASES[case]
    expected = work.train(None, name, **options)
    results = run_ranks(count, WORK, "train_case", name, options)
    for result in results:
        check_same(result, expected)
        assert result["reasons"] == expected["reasons"]
        assert result["parameters"].keys() == results[0]["parameters"].keys()
        for parameter, value in results[0]["parameters"].items():
            np.testing.assert_array_equal(result["parameters"][parameter], value)
        assert result["after"] == results[0]["after"], "random states have parted"
        if not options.get("own_loop"):
            assert result["errors"] == pytest.approx(expected["errors"], rel=1e-5)
            assert result["loss"] == results[0]["loss"]
    if not options.get("warm_start"):
        assert results[0]["after"] == expected["after"]
        assert sum(result["columns"] for result in results) == expected["columns"], "columns are solved for once"


@pytest.mark.parametrize("variant", ["only the mean", "a buffer", "L-BFGS", "a prior", "float32"])
def test_other_ways_to_train_are_shared_too(variant):
    losses, parameters = work.train_variant(None, variant)
    tolerance = 1e-3 if variant == "float32" else 1e-6
    for found, own in run_ranks(2, WORK, "train_variant", variant):
        assert found == pytest.approx(losses, rel=tolerance)
        for name, value in parameters.items():
            np.testing.assert_allclose(own[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("count", [2, 4])
def test_what_is_sent_for_a_step(count):
    """Gradients of the parameters, and a few numbers: nothing of the size of the data."""
    for result in run_ranks(count, WORK, "train_case", "one product", {}):
        parameters = sum(value.size for value in result["parameters"].values())
        # what every probe has estimated goes as an object, whose wrapping is longer than itself
        assert all(0 < sent <= 8 * (2 * parameters + 8) + 1000 for sent in result["sent"])
        assert "sent per step" in result["text"]


def test_alone_nothing_is_sent():
    result = work.train(None, "one product")
    assert result["sent"] == [0, 0, 0]
    assert "sent" not in result["text"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("targets", "train_targets: got"),
        ("inputs", "train_inputs: got"),
        ("dtype", "train_inputs: got .*float64.*float32"),
        ("shape", "train_inputs: got"),
        ("kernel", "modules: .* on rank 1"),
        ("nu", "modules: got .*nu=2.5.*nu=0.5"),
        ("patience", "patience: got 10 on rank 0 and 5 on rank 1"),
        ("probes", "num_trace_samples: got 10 on rank 0 and 3 on rank 1"),
        ("rate", r"optimizer: groups: got .*0\.1.*0\.01"),
    ],
)
def test_ranks_that_differ_are_refused_by_all(what, message):
    with pytest.raises(RanksFailed, match="expected the same on all ranks") as failed:
        run_ranks(2, WORK, "train_differing", what)
    assert sorted(failed.value.errors) == [0, 1]
    with pytest.raises(RanksFailed, match=message):
        raise failed.value


def test_a_killed_run_resumes(tmp_path):
    path = str(tmp_path / "run.pt")
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, WORK, "train_until", path, 5, 3)
    assert failed.value.errors[1] is None
    assert "RankError: rank 0 of 2: no answer from another rank" in failed.value.errors[0]
    expected = work.train(None, "one product", steps=5)
    for result in run_ranks(2, WORK, "train_until", path, 5, 10):
        check_same(result, expected)
        assert len(result["loss"]) == 5
    # and by another number of processes
    for result in run_ranks(4, WORK, "train_until", path, 7, 10):
        check_same(result, work.train(None, "one product", steps=7))


@pytest.mark.parametrize("mistake", ["other data", "gradients that are not averaged"])
def test_mistakes_of_a_loop_of_its_own_are_found(mistake):
    run_ranks(2, WORK, "train_by_hand", "none")
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, WORK, "train_by_hand", mistake)
    assert all(
        "data or hyperparameters of rank 1 are not those of rank 0" in said for said in failed.value.errors.values()
    )
