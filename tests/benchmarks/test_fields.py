"""The stress tests' data, and the NumPy peer of their solves."""

import functools

import numpy as np
import pytest
import torch

from benchmarks._fields import cloud_gaps, membrane, random_gaps, rastrigin, squared_exponential, write_gappy
from benchmarks._numpy_fill import numpy_fill

SHAPE = (40, 30, 20)
CUTS = [(0, 40), (0, 1), (1, 18), (17, 40), (39, 40), (33, 99)]


@pytest.mark.parametrize(
    "gaps",
    [
        random_gaps(SHAPE, 0.3, seed=1),
        random_gaps((40, 7), 0.3, seed=1),
        cloud_gaps(SHAPE, 0.3, seed=1),
        cloud_gaps((40, 7), 0.3, seed=1),
        cloud_gaps((40, 5, 6, 7), 0.3, seed=1, scale=0.5),
    ],
)
def test_gaps_do_not_depend_on_the_slabs(gaps):
    whole = gaps.slab(0, gaps.shape[0])
    assert whole.shape == gaps.shape
    assert whole.dtype == bool
    for start, stop in CUTS:
        np.testing.assert_array_equal(gaps.slab(start, stop), whole[start:stop])


def test_membrane_does_not_depend_on_the_slabs():
    field = membrane(SHAPE)
    whole = field.slab(0, 40)
    assert whole.shape == SHAPE
    assert whole.dtype == np.float32
    for start, stop in CUTS:
        np.testing.assert_allclose(field.slab(start, stop), whole[start:stop], rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", [random_gaps, cloud_gaps])
def test_seeds_give_different_gaps(make):
    first, again, other = (make(SHAPE, 0.5, seed=seed).slab(0, 40) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert 0.3 < (first != other).mean() < 0.7


@pytest.mark.parametrize("shape", [(101, 111, 121), (9, 7, 5)])
@pytest.mark.parametrize("seed", [0, 1])
def test_membrane_is_standardised(shape, seed):
    values = membrane(shape, seed=seed).slab(0, shape[0]).astype(np.float64)
    assert abs(values.mean()) < 1e-5
    assert values.var() == pytest.approx(1, abs=1e-4)


def test_membrane_vanishes_on_its_frame_alone():
    values = membrane(SHAPE).slab(0, 40)
    for edge in (values[0], values[-1], values[:, 0], values[:, -1]):
        assert np.abs(edge).max() < 1e-5
    assert np.abs(values[1:-1, 1:-1]).max(axis=(0, 1)).min() > 0.1


@pytest.mark.parametrize("duration", [1.0, 2.0])
def test_membrane_obeys_the_wave_equation(duration):
    shape = (121, 131, 141)
    values = membrane(shape, duration=duration).slab(0, shape[0]).astype(np.float64)
    x, y, t = (
        np.diff(values, n=2, axis=axis) * ((size - 1) / length) ** 2
        for axis, size, length in zip(range(3), shape, (1, 1, duration), strict=True)
    )
    x, y, t = x[:, 1:-1, 1:-1], y[1:-1, :, 1:-1], t[1:-1, 1:-1]
    assert np.linalg.norm(x + y - t) < 0.02 * np.linalg.norm(t)


def test_membrane_fits_the_kernel():
    """A grid of 41^3 with theta = 0.1: the smooth part of a GP keeps all but a thousandth of the field."""
    size = 41
    values = torch.from_numpy(membrane((size,) * 3).slab(0, size)).double()
    eigenvalues, vectors = torch.linalg.eigh(squared_exponential(size, 0.1))
    rotated = torch.einsum("xyt,xa,yb,tc->abc", values, vectors, vectors, vectors)
    spectrum = torch.einsum("a,b,c->abc", eigenvalues, eigenvalues, eigenvalues)
    missed = rotated * 1e-4 / (spectrum.clamp_min(0) + 1e-4)
    assert missed.norm() < 1e-3 * rotated.norm()


def test_membrane_needs_three_axes():
    with pytest.raises(ValueError, match="axes"):
        membrane((10, 10))
    with pytest.raises(ValueError, match="inside its frame"):
        membrane((2, 10, 10))


@pytest.mark.parametrize("gappiness", [0.05, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(150, 140, 60), (400, 300)])
@pytest.mark.parametrize("make", [random_gaps, cloud_gaps, functools.partial(cloud_gaps, scale=0.03)])
def test_share_of_gaps(make, shape, gappiness):
    share = 1 - make(shape, gappiness, seed=3).slab(0, shape[0]).mean()
    assert share == pytest.approx(gappiness, abs=0.01)


@pytest.mark.parametrize(("gappiness", "share"), [(0.0, 1.0), (1.0, 0.0)])
def test_random_gaps_at_the_ends(gappiness, share):
    assert random_gaps(SHAPE, gappiness, seed=0).slab(0, 40).mean() == share


def test_random_gaps_are_independent():
    gaps = ~random_gaps((200, 201, 20), 0.25, seed=0).slab(0, 200)
    for axis in range(3):
        near, far = np.delete(gaps, 0, axis), np.delete(gaps, -1, axis)
        assert (near & far).mean() == pytest.approx(0.25**2, abs=2e-3)


@pytest.mark.parametrize("gappiness", [0.1, 0.3])
def test_clouds_are_clusters(gappiness):
    gaps = ~cloud_gaps((100, 90, 80), gappiness, seed=0).slab(0, 100)
    for axis in range(3):
        near, far = np.delete(gaps, 0, axis), np.delete(gaps, -1, axis)
        assert (near & far).sum() > 0.75 * near.sum()


def test_clouds_move_from_frame_to_frame():
    """The overlap with an earlier time is larger at an offset along y than in place."""
    gaps = ~cloud_gaps((100, 101, 101), 0.3, seed=0).slab(0, 100)
    step = 5
    early, late = gaps[..., :-step], gaps[..., step:]
    in_place = (early & late).mean()
    assert (early[:, step:] & late[:, :-step]).mean() > 1.1 * in_place
    assert (early[:, :-step] & late[:, step:]).mean() < in_place


def test_clouds_are_exact_sums():
    gaps = cloud_gaps(SHAPE, 0.3, seed=0)
    assert (np.abs(gaps.rows).max() * np.abs(gaps.columns).max(axis=1).sum()) <= 2**24
    for each in (gaps.rows, gaps.columns):
        np.testing.assert_array_equal(each, np.rint(each))
    single = gaps.rows @ gaps.columns
    np.testing.assert_array_equal(single, gaps.rows.astype(np.float64) @ gaps.columns.astype(np.float64))


def test_clouds_need_two_axes():
    with pytest.raises(ValueError, match="two axes"):
        cloud_gaps((10,), 0.5, seed=0)


@pytest.mark.parametrize("slab_cells", [1, 5000, 2**24])
def test_a_gappy_field_is_written_slab_by_slab(tmp_path, monkeypatch, capsys, slab_cells):
    monkeypatch.setattr("benchmarks._fields._SLAB_CELLS", slab_cells)
    field, gaps = membrane(SHAPE), cloud_gaps(SHAPE, 0.4, seed=2)
    mapped = write_gappy(tmp_path / "gappy.npy", field, gaps, progress=False)
    assert isinstance(mapped, np.memmap)
    assert capsys.readouterr().err == ""
    stored = np.load(tmp_path / "gappy.npy")
    assert stored.dtype == np.float32
    np.testing.assert_array_equal(stored, mapped)
    expected = np.where(gaps.slab(0, 40), field.slab(0, 40), np.nan)
    np.testing.assert_allclose(stored, expected, rtol=0, atol=1e-5)


def test_write_gappy_shows_a_bar(tmp_path, capsys):
    write_gappy(tmp_path / "gappy.npy", membrane(SHAPE), random_gaps(SHAPE, 0.4, seed=2))
    assert "24.0k" in capsys.readouterr().err


def test_write_gappy_refuses_other_shapes(tmp_path):
    with pytest.raises(ValueError, match="shape"):
        write_gappy(tmp_path / "gappy.npy", membrane(SHAPE), random_gaps((40, 30), 0.4, seed=2))


def test_rastrigin_is_standardised():
    values = rastrigin(51)
    assert values.shape == (51, 51)
    assert float(values.mean()) == pytest.approx(0, abs=1e-12)
    assert float(values.std()) == pytest.approx(1)
    assert values.argmin() == 51 * 25 + 25  # the origin


def test_the_squared_exponential_is_that_of_the_paper():
    factor = squared_exponential(11, 0.2)
    assert factor.dtype == torch.float64
    assert float(factor[0, 2]) == pytest.approx(np.exp(-1))


@pytest.mark.parametrize("noise", [1e-6, 1e-2])
@pytest.mark.parametrize("gappiness", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(15, 15), (5, 7, 6)])
def test_numpy_fill_is_the_dense_solve(shape, gappiness, noise):
    factors = [squared_exponential(size, 0.1 + 0.01 * size).numpy() for size in shape]
    observed = random_gaps(shape, gappiness, seed=0).slab(0, shape[0])
    values = np.where(observed, np.random.default_rng(0).standard_normal(shape), np.nan)
    a, iterations = numpy_fill(factors, observed, values, noise, 1e-8)
    dense = functools.reduce(np.kron, factors)[np.ix_(observed.ravel(), observed.ravel())]
    dense += noise * np.eye(len(dense))
    y = values[observed]
    assert a.shape == shape
    assert not a[~observed].any()
    assert np.linalg.norm(dense @ a[observed] - y) <= 1.01e-8 * np.linalg.norm(y)
    bound = 1e-8 * np.linalg.norm(y) / np.linalg.eigvalsh(dense)[0]
    assert np.linalg.norm(a[observed] - np.linalg.solve(dense, y)) <= 1.01 * bound
    assert (iterations == 0) == (gappiness == 0)


def test_numpy_fill_leaves_its_inputs_alone():
    factor = squared_exponential(12, 0.1).numpy()
    observed = random_gaps((12, 12), 0.3, seed=0).slab(0, 12)
    values = rastrigin(12).numpy()
    before = factor.copy(), observed.copy(), values.copy()
    numpy_fill([factor, factor], observed, values, 1e-2, 1e-6)
    for each, was in zip((factor, observed, values), before, strict=True):
        np.testing.assert_array_equal(each, was)


def test_numpy_fill_says_when_it_is_capped():
    factor = squared_exponential(20, 0.1).numpy()
    observed = random_gaps((20, 20), 0.5, seed=0).slab(0, 20)
    with pytest.raises(RuntimeError, match="after 3 iterations"):
        numpy_fill([factor, factor], observed, rastrigin(20).numpy(), 1e-4, 1e-6, cap=3)
