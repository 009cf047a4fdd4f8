"""The benchmark of several processes, at sizes that show no speed."""

import numpy as np
import pytest

from benchmarks import distributed
from tests._ranks import run_ranks


def by_ranks(command, **_):
    """What torchrun would do with this command, by processes that run already."""
    count, job = (command[command.index(name) + 1] for name in ("--nproc-per-node", "--job"))
    run_ranks(int(count), "tests.distributed._work", "benchmark", job)


def test_tables_compare_one_process_with_two(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(distributed.subprocess, "run", by_ranks)
    options = "--processes 1 2 --shape 24 12 2 --train 12 10 --steps 2 --only strong training --output"
    found = distributed.main([*options.split(), str(tmp_path)])
    printed = capsys.readouterr().out
    assert "cores: " in printed
    assert "| processes | threads each | cells |" in printed
    one, two = found["strong"]
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["off"] < 1e-6
    assert two["sent"] < 12 * two["weights"] + 100
    assert found["training"][1]["off"] < 1e-6
    assert found["training"][1]["sent"] > 0
    assert (tmp_path / "results.json").exists()


@pytest.mark.parametrize("off", [0.0, 1e-3])
def test_differences_are_relative_to_one_process(tmp_path, off):
    values = np.random.default_rng(0).standard_normal((300, 4))
    np.save(tmp_path / "a.npy", values * (1.0 + off))
    np.save(tmp_path / "b.npy", values)
    assert distributed.difference(tmp_path / "a.npy", tmp_path / "b.npy") == pytest.approx(off)
    one = {"loss": [1.0], "parameters": {"a": [2.0]}}
    other = {"loss": [1.0], "parameters": {"a": [2.0 * (1.0 + off)]}}
    assert distributed.parameter_difference(other, one) == pytest.approx(off)
