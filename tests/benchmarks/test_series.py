"""The benchmark of long series runs, and puts back what it watches."""

import torch

from benchmarks import series
from gpytorch_gaps.filling.process import pipeline


def test_stages_and_decompositions_are_printed(capsys):
    before = torch.linalg.eigh, pipeline.time
    seconds = series.main(["--places", "80", "--steps", "1"])
    assert {"training", "mean", "standard deviations"} <= set(seconds)
    printed = capsys.readouterr().out
    assert "80 places" in printed
    assert "cholesky_ex" in printed
    assert (torch.linalg.eigh, pipeline.time) == before
