"""What ``fill_gaps`` is compared with does what it says."""

import numpy as np
import pytest

from benchmarks.fill import along, month_by_month, scattered, withheld

RNG = np.random.default_rng(0)
ROWS, COLUMNS = np.meshgrid(np.arange(20.0), np.arange(30.0), indexing="ij")
PLANE = 2 * ROWS - 3 * COLUMNS


@pytest.mark.parametrize("fill", [along(-1), along(0), scattered("linear")], ids=["rows", "columns", "griddata"])
def test_linear_peers_are_exact_on_a_plane(fill):
    seen = PLANE.copy()
    seen[4:9, 5:12] = np.nan
    np.testing.assert_allclose(fill(seen), PLANE, atol=1e-9)


def test_nearest_neighbour_and_beyond_the_hull():
    seen = PLANE.copy()
    seen[:, 0] = np.nan
    np.testing.assert_allclose(scattered("linear")(seen)[:, 0], PLANE[:, 1])
    np.testing.assert_allclose(scattered("nearest")(seen)[:, 0], PLANE[:, 1])


def test_fields_are_filled_one_after_the_other():
    months = np.stack([PLANE, PLANE + 100])
    months[1, 3, 3] = np.nan
    np.testing.assert_allclose(month_by_month(scattered("linear"))(months), np.stack([PLANE, PLANE + 100]))


@pytest.mark.parametrize(("shape", "share"), [("random", 0.1), ("clouds", 0.15)])
def test_what_is_withheld_was_observed(shape, share):
    values = RNG.standard_normal((60, 80))
    values[RNG.random((60, 80)) < 0.3] = np.nan
    held = withheld(values, shape, (4.0, 4.0), seed=0)
    assert not np.isnan(values[held]).any()
    assert held.sum() / np.isfinite(values).sum() == pytest.approx(share, abs=0.04)
    together = (held[1:] & held[:-1]).sum() / held.sum()
    assert together > 0.5 if shape == "clouds" else together < 0.2
