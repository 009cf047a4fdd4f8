"""The benchmark of the sphere on some hundred cells: the field has its kernel, and half of it is missing."""

import math

import numpy as np
import pytest
import torch

from benchmarks import sphere


def matern(distance, length):
    scaled = math.sqrt(3) * distance / length
    return (1 + scaled) * np.exp(-scaled)


def test_the_field_and_the_model_have_the_same_kernel():
    axes = sphere.axes_of(60, 3)
    draws = np.stack([sphere.draw(axes, seed).ravel() for seed in range(2000)])
    places = sphere.on_the_sphere(axes[0], axes[1]).reshape(-1, 3)
    away = np.linalg.norm(places[:, None] - places, axis=-1)
    later = np.abs(np.subtract.outer(axes[2], axes[2]))
    expected = np.kron(matern(away, sphere.LENGTH), matern(later, sphere.MEMORY))
    assert np.allclose(draws.T @ draws / len(draws), expected, atol=0.12)
    model, grid = sphere.sphere_model(axes, draws[0].reshape(3, 6, 3))
    covariance = model.covar_module(grid.points()).to_dense().detach()
    assert torch.allclose(covariance, torch.from_numpy(expected), atol=1e-12)


def test_half_of_the_cells_are_missing_and_land_is_so_always():
    gaps = sphere.missing(sphere.axes_of(2, 12))
    assert gaps.mean() == pytest.approx(sphere.MISSING, abs=0.02)
    assert gaps.all(axis=-1).mean() == pytest.approx(0.3, abs=0.02)


def test_steps_across_the_date_line_are_found():
    mean = np.tile(np.arange(12.0), (5, 1))[..., None]
    assert sphere.seam(mean) == 11  # from 11 back to 0, elsewhere 1
    assert sphere.seam(np.sin(np.pi / 6 * (mean + 1))) == pytest.approx(1.0, abs=0.6)


def test_results_are_stated(tmp_path):
    facts = sphere.main(["--degrees", "15", "--months", "3", "--draws", "30", "--std", "--output", str(tmp_path)])
    assert facts["shape"] == [12, 24, 3]
    assert facts["scores"]["count"] + facts["observations"] == 12 * 24 * 3
    assert 0.88 < facts["scores"]["coverage"] < 0.99
    assert facts["rmse expected by draws"] == pytest.approx(facts["rmse"], rel=0.15)
    assert facts["warnings"] == []
    assert {"mean", "30 draws", "standard deviations"} == set(facts["wall"])
    assert (tmp_path / "sphere.md").read_text().count("|") > 10
