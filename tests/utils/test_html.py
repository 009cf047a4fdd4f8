"""Tables for notebooks."""

from html.parser import HTMLParser

import numpy as np
import pytest
import torch
import xarray as xr
from gpytorch.kernels import RBFKernel

import gpytorch_gaps as gaps
from gpytorch_gaps.utils.html import table


class Texts(HTMLParser):
    """The texts of a page, and its tags, every one of which is closed."""

    def __init__(self, html):
        super().__init__()
        self.open, self.texts = [], []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_every_entry_is_escaped():
    page = table([("<b>", "a & b")], header=["<script>", '"'], title="<i>")
    assert Texts(page).texts == ["<i>", "<script>", '"', "<b>", "a & b"]


@pytest.fixture(scope="module")
def result():
    values = xr.DataArray(np.sin(np.arange(40.0) / 3), dims="t<0", name="x&y")
    values[4:6] = np.nan
    options = {"kernels": [RBFKernel()], "steps": 2, "check": False, "progress": False}
    return gaps.fill_gaps(xr.Dataset({"a<b": values}), **options)


def test_results_reports_and_grids_are_tables(result):
    texts = Texts(result._repr_html_()).texts
    assert "a<b" in texts
    assert "t<0: 40 positions" in texts
    report = result.report["a<b"]
    assert "40 cells, 2 gaps (5 %)" in " ".join(Texts(report._repr_html_()).texts)
    solve = Texts(report.solve._repr_html_()).texts
    assert solve[:3] == ["SolveReport", "method", "cholesky"]
    grid = Texts(gaps.CartesianGrid([torch.arange(3.0), torch.tensor([[0.0, 1.0], [2.0, 3.0]])])._repr_html_()).texts
    assert grid[0] == "CartesianGrid, 6 cells"
    assert grid[-4:] == ["axis 1", "2", "0, 1", "2, 3"]


def test_tables_have_no_colours_of_their_own_and_fetch_nothing(result):
    for page in (result._repr_html_(), result.report["a<b"].solve._repr_html_()):
        assert not any(word in page for word in ("color", "background", "http", "<script", "<style"))
        assert len(page) < 10_000
