"""The comparison with LatentKroneckerGP, on a few short curves."""

import json
from importlib.util import find_spec

import pytest
import torch

from benchmarks import lcbench
from tests._defaults import defaults_kept

pytestmark = pytest.mark.skipif(find_spec("botorch") is None, reason="botorch is not installed")


def few(task="", count=6, seed=0):
    """Curves of six configurations over seven epochs."""
    generator = torch.Generator().manual_seed(seed)
    configurations = torch.rand(count, 2, dtype=torch.float64, generator=generator)
    values = 1 - torch.exp(-torch.linspace(0, 3, 7, dtype=torch.float64) * (0.5 + configurations[:, :1]))
    return lcbench.cut(configurations, values, seed)


def test_curves_keep_their_beginning():
    curves = few(count=50)
    assert curves.seen[:, 0].all()
    assert (curves.seen[:, 1:] <= curves.seen[:, :-1]).all()
    assert 0 < curves.stopped.sum() < 50
    assert torch.equal(curves.ends, curves.values[curves.stopped, -1])


def test_hyperparameters_are_compared_in_the_same_model():
    """The likelihood of a model that is already trained is that of its own training."""
    with defaults_kept():
        found = lcbench.ours(few(), steps=30, lr=0.1)
    assert found["likelihood"] == pytest.approx(-found["history"][-1], abs=0.2)  # a step later


def test_the_command_prints_and_writes_what_it_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lcbench, "load", few)
    with defaults_kept():
        lcbench.main(["--tasks", "adult", "--curves", "6", "--steps", "3", "--json", str(tmp_path / "found.json")])
    ours, theirs = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert (ours["model"], theirs["model"]) == ("GappyGridModel", "LatentKroneckerGP")
    assert all(
        torch.tensor([row["rmse"], row["log_score"], row["likelihood"]]).isfinite().all() for row in (ours, theirs)
    )
    assert "| adult | GappyGridModel |" in capsys.readouterr().out
