"""What fill_gaps logs."""

import logging
import subprocess
import sys

import numpy as np
from gpytorch.kernels import RBFKernel

import gpytorch_gaps as gaps

VALUES = np.sin(np.arange(40.0) / 3)
VALUES[4:6] = np.nan


def test_phases_and_choices_are_logged_with_info_and_solves_with_debug(caplog):
    with caplog.at_level(logging.DEBUG, "gpytorch_gaps"):
        gaps.fill_gaps(VALUES, kernels=[RBFKernel()], steps=2, progress=False)
    by_level = {level: [r.getMessage() for r in caplog.records if r.levelno == level] for level in (10, 20)}
    for phase in ("training: ", "held-out check: ", "mean: ", "standard deviations: "):
        assert sum(message.startswith(phase) for message in by_level[20]) == 1
    assert any(message.startswith("kernel: as given; noise ") for message in by_level[20])
    assert any(message.startswith("withheld observations: RMSE ") for message in by_level[20])
    assert any(message.startswith("solve: cholesky") for message in by_level[10])


def test_nothing_is_printed_without_a_handler():
    code = "import logging, gpytorch_gaps; logging.getLogger('gpytorch_gaps.filling').error('lost')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr == ""
