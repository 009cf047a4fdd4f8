"""The command as a process of its own."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

COMMAND = [sys.executable, "-m", "gpytorch_gaps"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def test_an_error_is_one_line_and_a_code(tmp_path):
    done = subprocess.run(
        [*COMMAND, "fill", "none.npy", "-o", "out.npy"],
        cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "gpytorch-gaps: error: none.npy: no such file\n"
    assert done.stdout == ""


@pytest.mark.skipif(os.name != "posix", reason="interrupts are sent otherwise")
def test_an_interrupt_leaves_everything_as_it_was(tmp_path, field):
    values = np.random.default_rng(0).random((600, 600))  # white noise on as many cells takes minutes
    values[20:30, 20:30] = np.nan
    np.save(tmp_path / "in.npy", values)
    (tmp_path / "out.npy").write_bytes(b"old")
    running = subprocess.Popen(
        [*COMMAND, "fill", "in.npy", "-o", "out.npy", "--force"],
        cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a shell's background jobs ignore
    )  # fmt: skip
    try:
        _wait_until_busy(running, tmp_path / "in.npy")
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 130
    assert (out, err) == ("", "gpytorch-gaps: interrupted\n")
    assert (tmp_path / "out.npy").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.npy", "out.npy"]


def _wait_until_busy(running, source):
    """Until the file is mapped, which comes after all imports, or some seconds where that cannot be seen."""
    maps, deadline = f"/proc/{running.pid}/maps", time.monotonic() + 60
    while time.monotonic() < deadline and running.poll() is None:
        if not os.path.exists(maps):
            time.sleep(15)
            return
        with open(maps) as stream:
            if str(source) in stream.read():
                time.sleep(1.0)
                return
        time.sleep(0.1)
