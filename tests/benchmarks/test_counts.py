"""The benchmark of counts and classes, on some hundred cells."""

import json

import torch

from benchmarks import counts


def test_the_latent_function_has_the_length_scale_that_it_is_drawn_with():
    generator = torch.Generator().manual_seed(0)
    f = torch.stack([counts.draw_latent(30, 3.0, generator) for _ in range(200)]) - counts._LEVEL
    assert abs(f.std() / counts._SCALE - 1) < 0.05
    at_three = (f[:, 3:] * f[:, :-3]).mean() / f.square().mean()
    assert abs(at_three - torch.exp(torch.tensor(-0.5))) < 0.05


def test_half_of_the_cells_are_missing():
    held = counts.missing_cells(100, torch.Generator().manual_seed(0))
    assert abs(held.double().mean() - 0.5) < 0.03


def test_methods_are_compared_on_the_same_data(tmp_path, capsys):
    sizes = ["--small", "12", "--inducing", "4", "--side", "30", "--steps", "3"]
    rows = counts.main([*sizes, "--output", str(tmp_path)])
    assert [(row["data"], row["method"]) for row in rows[:4]] == [
        (name, method) for name in ("poisson", "bernoulli") for method in ("LaplaceGP", "variational")
    ]
    assert all(row["log_score"] < 0 for row in rows[:4])
    assert 0.5 < rows[4]["coverage"] <= 1
    assert json.loads((tmp_path / "counts.json").read_text())["runs"] == rows
    assert "| 30 x 30 counts | LaplaceGP | 3 |" in capsys.readouterr().out
