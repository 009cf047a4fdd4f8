"""A checkpoint is complete, belongs to the problem at hand, or is refused by name."""

import pytest
import torch

from gpytorch_gaps.utils.checkpoint import CheckpointFile


def test_what_is_saved_is_read_and_removed(tmp_path):
    file = CheckpointFile(tmp_path / "deep" / "run.pt", "fit", version=2)
    assert file.read({"step"}) is None
    file.save({"step": 3, "weights": torch.arange(3.0)})
    assert torch.equal(file.read({"step", "weights"})["weights"], torch.arange(3.0))
    file.remove()
    file.remove()
    assert file.read({"step"}) is None


@pytest.mark.parametrize("keys", [{"step"}, {"other"}])
def test_another_version_or_content_is_refused(tmp_path, keys):
    CheckpointFile(tmp_path / "run.pt", "fit", version=1).save({"step": 3})
    file = CheckpointFile(tmp_path / "run.pt", "fit", version=1 if "other" in keys else 2)
    with pytest.raises(ValueError, match=r"checkpoint: .*run\.pt is not a checkpoint of this version.*written by fit"):
        file.read(keys)


def test_another_problem_is_refused(tmp_path):
    file = CheckpointFile(tmp_path / "run.pt", "fit", version=1)
    file.require_same([])
    with pytest.raises(ValueError, match=r"run\.pt belongs to another run: noise differs; .*move it away"):
        file.require_same(["noise differs"])
