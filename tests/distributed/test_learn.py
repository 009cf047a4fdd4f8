"""`fit_reconstruction` by several processes: the hyperparameters that one process learns, of slices read by each."""

import numpy as np
import pytest

from tests._ranks import RanksFailed, run_ranks
from tests.distributed import _work as work

WORK = "tests.distributed._work"
CASES = {
    "a dense block of all functions": ((14, 11), {}),
    "probes": ((18, 15, 11), {"exact": 0}),
    "first every other cell": ((96, 90), {"enough": 2000}),
    "one axis, a block": ((200,), {"gaps_as": "block"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_hyperparameters(case):
    shape, options = CASES[case]
    alone = work.learn(None, shape, dict(options))
    found = run_ranks(2, WORK, "learn", shape, options)
    assert alone["converged"]
    assert (alone["log_likelihood_error"] > 0) == ("exact" in options)
    assert (len(set(alone["num_train"])) > 1) == ("enough" in options)
    for own in found:
        assert set(own["num_train"]) == set(alone["num_train"])  # the number of steps may differ by rounding
        for name in ("values", "deviations", "log_likelihood", "log_likelihood_error"):
            np.testing.assert_allclose(own[name], alone[name], rtol=1e-3)
        assert own["values"] == found[0]["values"]
    assert not found[0]["read"] & found[1]["read"]
    assert found[0]["read"] | found[1]["read"] == set(range(shape[0]))


def test_a_run_resumes(tmp_path):
    shape, options = (14, 11), {"checkpoint": str(tmp_path / "state.pt")}
    expected = work.learn(None, shape, {})
    with pytest.raises(RanksFailed, match="after 2 steps"):
        run_ranks(2, WORK, "learn", shape, {**options, "steps": 2})
    whole = run_ranks(2, WORK, "learn", shape, options)
    assert all(set(own["num_train"]) == set(expected["num_train"]) for own in whole)
    np.testing.assert_allclose(whole[1]["values"], expected["values"], rtol=1e-6)


def test_more_processes_than_slices_are_refused():
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, WORK, "learn", (1, 30), {})
    assert all("got 1 slices along the first axis for 2 processes" in error for error in failed.value.errors.values())
