"""`torchrun`, as users start it, with a rank that is killed or hangs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests._ranks import JOIN_SECONDS
from tests.distributed import _script as script
from tests.distributed import _work as work

ROOT = Path(__file__).parents[2]


def torchrun(folder, how, *, count=2, restarts=0):
    """How it ended, and what it said."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command = [*launcher, "--max-restarts", str(restarts), str(Path(script.__file__)), str(folder), how]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=2 * JOIN_SECONDS
    )
    return done.returncode, done.stdout + done.stderr


def mean_of(folder):
    return np.load(folder / "mean.npy")


def test_a_killed_rank_is_started_again_and_goes_on_from_the_checkpoint(tmp_path):
    code, said = torchrun(tmp_path, "killed", restarts=1)
    assert code == 0, said
    assert "SIGKILL" in said or "exitcode: -9" in said
    alone = work.solve(None, script.SHAPE, **script.OPTIONS)
    np.testing.assert_allclose(mean_of(tmp_path), alone.slab(0, script.SHAPE[0]).numpy(), rtol=0, atol=1e-6)
    assert json.loads((tmp_path / "result.json").read_text())["iterations"] < alone.report.iterations
    assert sorted(path.name for path in tmp_path.iterdir()) == ["left", "mean.npy", "result.json"]


def test_a_rank_that_hangs_ends_the_run_within_the_timeout(tmp_path):
    """The run ends while one rank hangs, which it does until it is killed."""
    code, said = torchrun(tmp_path, "hangs")
    assert code != 0
    assert "RankError: rank 0 of 2: no answer from another rank" in said
