"""The wheel that users install, in an environment that has nothing else of this project."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import numpy as np
import pytest

PROJECT = Path(__file__).parents[1]
GENEROUS_SECONDS = 600  # a deadline for a machine that is busy with other work, not an expectation


def run(*command, **options):
    """Runs a command; returns what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=GENEROUS_SECONDS, env=environment, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The programs of a new environment with the wheel. It borrows the dependencies, which take minutes to install."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=PROJECT)
    (wheel,) = folder.glob("*.whl")
    environment = folder / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    paths = sysconfig.get_paths(vars={"base": str(environment), "platbase": str(environment)})
    # Folders that a .pth file names are searched for modules, but not for further .pth files: no editable installation.
    borrowed = Path(paths["purelib"]) / "borrowed.pth"
    borrowed.write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = Path(paths["scripts"]) / "python"
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    return python.parent


def test_the_wheel_fills_a_file(programs, tmp_path):
    values = np.sin(np.arange(12.0))[:, None] * np.cos(np.arange(9.0) / 2)
    values[3:5, 2:4] = np.nan
    np.save(tmp_path / "in.npy", values)
    run(str(programs / "gpytorch-gaps"), "fill", "in.npy", "-o", "out.npy", "--quiet", "--steps", "5", cwd=tmp_path)
    filled, seen = np.load(tmp_path / "out.npy"), ~np.isnan(values)
    assert np.isfinite(filled).all()
    np.testing.assert_array_equal(filled[seen], values[seen])


def test_the_wheel_is_what_is_imported(programs, tmp_path):
    """It has the marker for type checkers, and nothing beside the package."""
    found = run(str(programs / "python"), "-c", "import gpytorch_gaps; print(gpytorch_gaps.__file__)", cwd=tmp_path)
    package = Path(found.strip()).parent
    assert programs.parent in package.parents
    assert (package / "py.typed").exists()
    (record,) = package.parent.glob("gpytorch_gaps-*.dist-info/RECORD")
    tops = {line.split("/")[0].split(",")[0] for line in record.read_text().splitlines()}
    assert {top for top in tops if not top.endswith(".dist-info")} - {".."} == {"gpytorch_gaps"}
