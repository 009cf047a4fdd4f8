"""Run by torchrun: a reconstruction that one rank leaves, by its own hand, the first time.

torchrun --nproc-per-node 2 tests/distributed/_script.py FOLDER killed|hangs|no
"""

import json
import os
import signal
import sys
import warnings
from pathlib import Path

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import gpytorch_gaps as gaps
from gpytorch_gaps.distributed.communicator import Communicator
from gpytorch_gaps.reconstruction import checkpoint as weight_checkpoint
from tests._ranks import JOIN_SECONDS, limit_answers
from tests.distributed import _work as work

SHAPE = (16, 12)
OPTIONS = {"gaps_as": "block", "memory": 1.0}


def leave(how, folder):
    """Once: a run that was started again goes on."""
    left = folder / "left"
    if how == "no" or left.exists():
        return
    left.touch()
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def main(folder, how):
    torch.set_num_threads(1)
    weight_checkpoint._SECONDS_BETWEEN_SAVES = 0.0
    with gaps.distributed.process_group(timeout=JOIN_SECONDS) as group:
        if how == "hangs":
            limit_answers(group, 4.0)
        ranks = Communicator(group)
        watch = weight_checkpoint.WeightCheckpoint.watch

        def watched(self, weights, iterations):
            watch(self, weights, iterations)
            if ranks.rank == ranks.size - 1 and iterations == 20:
                leave(how, folder)

        weight_checkpoint.WeightCheckpoint.watch = watched
        made = work.solve(group, SHAPE, output=str(folder / "mean.npy"), **OPTIONS)
        if ranks.is_main:
            (folder / "result.json").write_text(json.dumps({"iterations": made.report.iterations}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
