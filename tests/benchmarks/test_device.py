"""The device benchmark at tiny sizes: on the CPU, on the stand-in device, and where there is no float64."""

import json
import math

import pytest
import torch

from benchmarks import device as benchmark
from tests import _standin as standin

TINY = ["--cells", "150", "--gemm", "16", "--repeats", "1"]
on_standin = pytest.mark.skipif(bool(standin.UNAVAILABLE), reason=standin.UNAVAILABLE)


@pytest.mark.parametrize("device", ["cpu", pytest.param(str(standin.DEVICE), marks=on_standin, id="stand-in")])
def test_every_measurement_is_made(device, tmp_path, capsys):
    benchmark.main(["--device", device, *TINY, "--json", str(tmp_path / "device.json")])
    printed = capsys.readouterr().out
    assert printed.startswith("device: ")
    assert "torch: " in printed
    assert "threads: " in printed
    rows = json.loads((tmp_path / "device.json").read_text())["rows"]
    assert [row["what"] for row in rows].count("iteration of conjugate gradients") == 2
    assert sum(row["what"].startswith("Kronecker product") for row in rows) == 4
    models = [row for row in rows if row["iterations"] is not None]
    assert [row["what"].split(",")[0] for row in models] == ["training step", "mean of every cell"] * 2
    assert [row["dtype"] for row in models] == ["float64"] * 2 + ["float32, refined"] * 2
    for row in rows:
        assert row["milliseconds"] > 0
        assert math.isfinite(row["gflops"])
        assert row["what"] in printed
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    assert len(ratios) == 6
    assert min(ratios) > 0


def test_without_float64_products_only(monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "has_float64", lambda device: False)
    benchmark.main(["--device", "cpu", *TINY])
    printed = capsys.readouterr().out
    assert "has no float64, which solves need: float32 products only." in printed
    assert "Kronecker product" in printed
    assert "float64 |" not in printed
    assert "training step" not in printed


def test_the_default_is_the_accelerator_or_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert benchmark.default_device() == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert benchmark.default_device() == torch.device("mps")


def test_float64_is_told_by_trying(monkeypatch):
    assert benchmark.has_float64(torch.device("cpu"))

    def refuses(*_, **__):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    monkeypatch.setattr(torch, "ones", refuses)
    assert not benchmark.has_float64(torch.device("cpu"))
