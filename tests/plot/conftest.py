"""Figures without a screen, none of which outlives its test."""

import pytest

matplotlib = pytest.importorskip("matplotlib", reason="plots need matplotlib")
plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(scope="module", autouse=True)
def _no_screen():
    before = matplotlib.get_backend()
    plt.switch_backend("Agg")
    with matplotlib.rc_context({"figure.dpi": 60}):
        yield
    plt.switch_backend(before)


@pytest.fixture(autouse=True)
def _no_figure_left():
    yield
    plt.close("all")
