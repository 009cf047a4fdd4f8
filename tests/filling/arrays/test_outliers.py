"""Wild values: they are found where they are, do not move what is filled, and nothing is lost without them."""

import numpy as np
import pytest
from gpytorch.kernels import MaternKernel, RBFKernel
from hypothesis import given
from hypothesis import strategies as st

import gpytorch_gaps as gaps
from gpytorch_gaps.filling.arrays.outliers import find_wild
from gpytorch_gaps.filling.axes.axis import Axis

T = np.linspace(0, 1, 24)
TRUTH = np.sin(6 * T[:, None]) * np.cos(4 * T)
QUICK = {"kernels": [RBFKernel(), RBFKernel()], "steps": 15, "check": False, "progress": False}


def axes_of(shape, labels=()):
    kinds = ["label" if number in labels else "number" for number in range(len(shape))]
    return [
        Axis(str(i), kind, np.arange(float(m))[:, None]) for i, (kind, m) in enumerate(zip(kinds, shape, strict=True))
    ]


def with_gross_errors(values, share=0.05, seed=0):
    """The values with errors of 10 to 1000 standard deviations, and their flags."""
    generator = np.random.default_rng(seed)
    wild = ~np.isnan(values) & (generator.random(values.shape) < share)
    size = np.nanstd(values) * 10 ** generator.uniform(1, 3, values.shape)
    return np.where(wild, values + size * generator.choice([-1, 1], values.shape), values), wild


def gappy_field(seed=0):
    generator = np.random.default_rng(seed)
    values = TRUTH + 0.03 * generator.standard_normal(TRUTH.shape)
    values[9:15, 6:13] = np.nan
    return values


NORMAL = np.random.default_rng(0).standard_normal((200, 30))
WITHOUT = {
    "noise": NORMAL,
    "counts": np.floor(np.exp(NORMAL)),
    "rain": np.where(NORMAL < 0.3, 0.0, np.random.default_rng(1).gamma(0.5, 8.0, NORMAL.shape)),
    "a front": np.where(np.arange(30) < 3, 50.0, 0.0) + 0.1 * NORMAL,
    "a line": np.where((np.arange(200) == 7)[:, None], 50.0, 0.0) + 0.1 * NORMAL,
    "a peak": 50 * np.exp(-((np.arange(200)[:, None] - 60) ** 2 + (np.arange(30) - 12) ** 2) / 8) + 0.1 * NORMAL,
    "a wave": np.sin(np.arange(200)[:, None] / 9) + 0.001 * NORMAL,
    "classes": np.where(NORMAL < 1.6, 0.0, 1.0),
    "a constant": np.ones((200, 30)),
    "few values": np.where(np.arange(6000).reshape(200, 30) < 5, NORMAL, np.nan),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_no_value_is_wild_that_its_neighbours_or_the_data_explain(name):
    assert not find_wild(WITHOUT[name], axes_of((200, 30))).any()


@given(seed=st.integers(0, 10_000), gap_share=st.floats(0.0, 0.4), label=st.booleans())
def test_gross_errors_are_found(seed, gap_share, label):
    generator = np.random.default_rng(seed)
    level = 100.0 * np.arange(12) if label else 0.0
    values = np.sin(np.arange(80) / 7 + generator.uniform(0, 6))[:, None] + np.zeros(12)
    values += generator.uniform(0.01, 2) * generator.standard_normal(values.shape)
    values[generator.random(values.shape) < gap_share] = np.nan
    values, wild = with_gross_errors(values, seed=seed)
    found = find_wild(values + level, axes_of(values.shape, (1,) if label else ()))
    assert (found & ~wild).sum() <= 1  # one in a hundred such tables has a value that is taken for wild
    assert (found & wild).sum() >= 0.8 * wild.sum()  # some hundred observations tell little of their tails


def test_units_and_order_do_not_matter():
    values, _ = with_gross_errors(NORMAL)
    found = find_wild(values, axes_of(values.shape))
    assert found.any()
    assert np.array_equal(find_wild(1e-6 * values - 3e-5, axes_of(values.shape)), found)
    assert np.array_equal(find_wild(values.T, axes_of(values.T.shape)), found.T)
    assert np.array_equal(find_wild(values[::-1], axes_of(values.shape)), found[::-1])


def test_gross_errors_do_not_move_what_is_filled():
    clean = gappy_field()
    wild_values, wild = with_gross_errors(clean)
    hole = np.isnan(clean)
    expected, result = (gaps.fill_gaps(values, [T, T], **QUICK) for values in (clean, wild_values))
    errors = [np.sqrt(np.mean((one.mean - TRUTH)[hole] ** 2)) for one in (expected, result)]
    assert errors[1] < 1.1 * errors[0] + 0.001
    assert np.array_equal(result.distrusted, wild)
    assert result.report.num_distrusted == wild.sum()
    assert np.array_equal(result.mean[~hole], wild_values[~hole])  # what was observed stays, believed or not
    assert np.isnan(result.std[wild]).all()
    assert (result.std[~hole & ~wild] == 0).all()
    assert any(note.startswith(f"{wild.sum()} wild values not used") for note in result.report.notes)


def test_without_wild_values_nothing_changes():
    believed, searched = (gaps.fill_gaps(gappy_field(), [T, T], robust=robust, **QUICK) for robust in (False, True))
    assert np.array_equal(believed.mean, searched.mean)
    assert np.array_equal(believed.std, searched.std, equal_nan=True)
    assert not searched.distrusted.any()


def test_smoothing_replaces_wild_values():
    values = gappy_field()
    values[3, 4] = 1e4
    result = gaps.fill_gaps(values, [T, T], smooth=True, **QUICK)
    assert result.distrusted[3, 4]
    assert abs(result.mean[3, 4] - TRUTH[3, 4]) < 0.1
    assert np.isfinite(result.std).all()


def test_robust_finds_what_only_the_model_can_see():
    values = gappy_field()
    values[18, 18] += 0.8  # within the range of the data, 25 times the noise
    seen = [gaps.fill_gaps(values, [T, T], robust=robust, **QUICK).distrusted for robust in ("auto", True)]
    assert not seen[0].any()
    assert np.argwhere(seen[1]).tolist() == [[18, 18]]


def test_every_variable_of_a_dataset_has_its_own_wild_values():
    xarray = pytest.importorskip("xarray")
    first, second = gappy_field(), 1000.0 + 50.0 * gappy_field(1)
    second[2, 2] = 1e6
    data = xarray.Dataset({"a": (("x", "y"), first), "b": (("x", "y"), second)}, {"x": T, "y": T})
    for joint in (False, True):
        result = data.gaps.fill(
            joint=joint,
            steps=5,
            check=False,
            std=False,
            progress=False,
            kernels={"x": MaternKernel(), "y": MaternKernel()},
        )
        assert {name: report.num_distrusted for name, report in result.report.items()} == {"a": 0, "b": 1}
        assert bool(result.distrusted["b"][2, 2])
        assert "1 wild value not used: 1e+06 at x 0.0869565, y 0.0869565" in " ".join(result.report["b"].notes)


def test_other_words_than_auto_are_refused():
    with pytest.raises(ValueError, match="robust: got 'yes', expected True, False or 'auto'"):
        gaps.fill_gaps(gappy_field(), robust="yes")
