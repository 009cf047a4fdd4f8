from functools import partial

import numpy as np
import pytest

from gpytorch_gaps.__main__ import main
from gpytorch_gaps.cli import demo
from gpytorch_gaps.filling.learning import learn


def test_the_methods_of_the_paper_agree(capsys):
    assert main(["demo", "--methods"]) == 0
    printed = capsys.readouterr().out
    for method in ("auto", "fill", "ignore", "ignore, rank 200", "penalize", "spectral", "cholesky"):
        assert method in printed
    assert "largest difference between methods" in printed


def test_the_scene_is_filled_better_than_by_interpolation(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(demo, "SHAPE", (24, 36))
    monkeypatch.setattr(demo, "fill_gaps", partial(demo.fill_gaps, steps=10))
    monkeypatch.setattr(demo, "LOST_LINES", (11,))
    monkeypatch.setattr(learn, "FIRST_STEPS", 3)
    picture = tmp_path / "pictures" / "demo.png"
    assert main(["demo", "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for words in ("time:", "method:", "RMSE in the gaps", "linear interpolation has", "95 % intervals cover"):
        assert words in printed
    assert str(picture) in printed


def test_the_scene_has_clouds_dead_pixels_and_lost_lines():
    scene = demo.make_scene()
    assert scene.truth.shape == (96, 144)
    assert 0.3 < scene.gaps.mean() < 0.5
    assert scene.gaps[list(demo.LOST_LINES)].all()
    assert 12 < scene.truth.min() < scene.truth.max() < 26
    assert abs((scene.measured - scene.truth).std() - demo.NOISE_KELVIN) < 0.01
    np.testing.assert_array_equal(scene.seen[~scene.gaps], scene.measured[~scene.gaps])


def test_a_picture_of_another_kind_is_refused(tmp_path, capsys):
    assert main(["demo", "--output", str(tmp_path / "demo.txt")]) == 1
    assert ".png" in capsys.readouterr().err


def test_a_missing_command_is_an_error(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "COMMAND" in capsys.readouterr().err
