"""What the README shows works, word for word."""

import re
from pathlib import Path

import numpy as np
import torch

README = Path(__file__).parent.parent / "README.md"


def examples():
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_gaps_are_filled_word_for_word(capsys):
    names = {}
    exec(compile(examples()[0], str(README), "exec"), names)
    seen, result, t = names["seen"], names["result"], names["t"]
    gaps = np.isnan(seen)
    assert np.array_equal(result.mean[~gaps], seen[~gaps])
    truth = np.sin(6 * t[:, None]) * np.cos(4 * t)
    error = (result.mean - truth)[gaps]
    assert np.sqrt(np.mean(error**2)) < 0.1 * truth.std()
    assert np.mean(np.abs(error) < 2 * result.std[gaps]) > 0.9
    assert "withheld as far from data as the gaps" in capsys.readouterr().out


def test_exact_gp_runs_word_for_word(capsys):
    _, code = examples()
    names = {}
    torch.manual_seed(0)
    exec(compile(code, str(README), "exec"), names)
    assert all(report.converged for report in names["solves"])
    t, gaps = names["t"], names["values"].isnan()
    truth = torch.sin(6 * t[:, None]) * torch.cos(4 * t)
    error, deviation = (names["filled"] - truth)[gaps], names["deviation"][gaps]
    assert error.square().mean().sqrt() < 0.1 * truth.std()
    # the noise of 0.1 is in the deviation, not in the error of the latent field
    assert (error.abs() < 2 * deviation).double().mean() > 0.9
    assert 0.08 < deviation.min() < 0.12
    assert "converged" in capsys.readouterr().out


def test_commands_are_make_targets():
    makefile = (README.parent / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)$", README.read_text(), flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
