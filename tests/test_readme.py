"""What the README shows works, word for word."""

import re
from pathlib import Path

import torch

README = Path(__file__).parent.parent / "README.md"


def test_example_runs_word_for_word(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    dtype = torch.get_default_dtype()
    names = {}
    torch.manual_seed(0)
    try:
        exec(compile(code, str(README), "exec"), names)
    finally:
        torch.set_default_dtype(dtype)
    assert names["solves"][-1].converged
    x = names["x"]
    truth = torch.sin(6 * x[:, None]) * torch.cos(4 * x)
    gaps = names["values"].isnan()
    error = (names["filled"].reshape(100, 100) - truth)[gaps].square().mean().sqrt()
    assert error < 0.1 * truth.std()
    assert "converged" in capsys.readouterr().out


def test_commands_are_make_targets():
    makefile = (README.parent / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)$", README.read_text(), flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
