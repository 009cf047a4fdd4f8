"""The command as a process of its own."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

DEADLINE_SECONDS = 300  # for a machine that is busy with other work, not an expectation

# The command line, with a `fill_gaps` that tells when it runs, and runs until it is interrupted.
SCRIPT = """
import sys
from pathlib import Path
import torch
import gpytorch_gaps
from gpytorch_gaps.__main__ import main

def endless(*arguments, **options):
    Path(sys.argv[1]).touch()
    while True:
        torch.ones(100, 100) @ torch.ones(100, 100)

gpytorch_gaps.fill_gaps = endless
assert main(["fill", "none.npy", "-o", "out.npy"]) == 1
sys.exit(main(["fill", "in.npy", "-o", "out.npy", "--force"]))
"""


@pytest.mark.skipif(os.name != "posix", reason="interrupts are sent otherwise")
def test_errors_and_an_interrupt_are_one_line_and_leave_everything_as_it_was(tmp_path):
    folder, busy = tmp_path / "folder", tmp_path / "busy"
    folder.mkdir()
    np.save(folder / "in.npy", np.array([1.0, np.nan, 3.0]))
    (folder / "out.npy").write_bytes(b"old")
    running = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(busy)],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a shell's background jobs ignore
    )  # fmt: skip
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not busy.exists() and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=DEADLINE_SECONDS)
    finally:
        running.kill()
    assert err == "gpytorch-gaps: error: none.npy: no such file\ngpytorch-gaps: interrupted\n"
    assert (running.returncode, out) == (130, "")
    assert (folder / "out.npy").read_bytes() == b"old"
    assert sorted(path.name for path in folder.iterdir()) == ["in.npy", "out.npy"]
