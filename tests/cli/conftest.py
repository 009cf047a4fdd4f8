import numpy as np
import pytest

from gpytorch_gaps.__main__ import main
from gpytorch_gaps.filling.learning import choose, learn
from gpytorch_gaps.filling.learning.candidates import candidates


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """One kernel and one step of training: these tests do not look at what is learned."""
    monkeypatch.setattr(choose, "candidates", lambda *given: candidates(*given)[:1])
    monkeypatch.setattr(learn, "FIRST_STEPS", 1)
    monkeypatch.setattr(learn, "FURTHER_STEPS", 1)


@pytest.fixture
def field():
    """A wave with a hole and lost cells. shape: (12, 9)"""
    values = np.sin(np.arange(12) / 3)[:, None] * np.cos(np.arange(9) / 4) + 5.0
    values[3:6, 2:5] = values[9, 7] = np.nan
    return values


@pytest.fixture
def run(capsys):
    """Runs a command; gives its exit code, what it printed and what it complained of."""

    def call(*arguments):
        code = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def fill(run):
    """``fill`` in a hurry."""
    return lambda *arguments: run("fill", *arguments, "--steps", 3, "--no-check")
