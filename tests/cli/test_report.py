"""The page of ``gpytorch-gaps report``, and that its options have the defaults of Python."""

import base64
import inspect
import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import gpytorch_gaps as gaps
from gpytorch_gaps.__main__ import main
from gpytorch_gaps.cli.fill import fill_options
from gpytorch_gaps.cli.parser import make_parser

pytest.importorskip("matplotlib")


class Page(HTMLParser):
    """Texts, headings and images of a page, whose tags are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.images, self.headings, self.links = [], [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        known = dict(attributes)
        if tag == "img":
            self.images.append(known)
        if tag in ("link", "script", "iframe") or "href" in known:
            self.links.append(known)
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)

    def handle_decl(self, declaration):
        assert declaration == "DOCTYPE html"


def write_formats(folder, field):
    """The field as a file of each kind."""
    times = pd.date_range("2000-01-01", periods=12)
    table = pd.DataFrame(field[:, :3], times.rename("date"), ["Rome <1>", "Oslo", "Bern"])
    np.save(folder / "in.npy", field)
    table.to_csv(folder / "in.csv")
    array = xr.DataArray(field, {"time": times, "x": np.arange(9.0)}, ("time", "x"))
    xr.Dataset({"a": array}).to_netcdf(folder / "in.nc", engine="h5netcdf")


@pytest.mark.parametrize("kind", ["npy", "csv", "nc"])
def test_every_format_gives_one_page_that_fetches_nothing(kind, tmp_path, field, run):
    write_formats(tmp_path, field)
    code, out, err = run("report", tmp_path / f"in.{kind}", "-o", tmp_path / "r.html", "--steps", 2, "--folds", 1)
    assert (code, err) == (0, "")
    assert str(tmp_path / "r.html") in out
    text = (tmp_path / "r.html").read_text()
    page = Page(text)
    assert page.headings[0] == f"in.{kind}"
    assert page.links == []
    assert not re.search(r'(src|url)\s*[=(]\s*["\']?(https?:)?//', text)
    pictures = [base64.b64decode(image["src"].partition("base64,")[2]) for image in page.images]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert all(image["alt"] for image in page.images)
    for heading in ("The model", "What was done and assumed"):
        assert heading in page.headings
    words = " ".join(page.texts)
    assert "length-scale" in words
    if kind == "nc":
        assert "time: 12 times, 11 days" in words
    if kind == "csv":
        assert "Rome <1>" not in text  # escaped, or in a picture
    if kind != "csv":  # too few observations to withhold any
        assert "How good it is" in page.headings
        assert "fold 1" in words
        assert len(pictures) == 3


def test_without_std_check_and_model_the_page_says_less(tmp_path, field, run):
    write_formats(tmp_path, field)
    code, _, _ = run("report", tmp_path / "in.npy", "-o", tmp_path / "r.html", "--steps", 1, "--no-check", "--no-std")
    assert code == 0
    assert "How good it is" not in Page((tmp_path / "r.html").read_text()).headings
    np.save(tmp_path / "level.npy", np.array([1.0, np.nan, 1.0]))
    code, _, _ = run("report", tmp_path / "level.npy", "-o", tmp_path / "level.html")
    page = Page((tmp_path / "level.html").read_text())
    assert code == 0
    assert "The model" not in page.headings
    assert any("all observations are equal" in text for text in page.texts)


def test_existing_pages_and_other_names_are_refused_before_any_work(tmp_path, field, run, monkeypatch):
    write_formats(tmp_path, field)
    monkeypatch.setattr(gaps, "fill_gaps", lambda *_, **__: pytest.fail("was called"))
    (tmp_path / "r.html").write_text("old")
    code, _, err = run("report", tmp_path / "in.npy", "-o", tmp_path / "r.html")
    assert code == 1
    assert "exists; --force replaces it" in err
    code, _, err = run("report", tmp_path / "in.npy", "-o", tmp_path / "r.pdf")
    assert code == 1
    assert "expected a name that ends in .html" in err


@pytest.mark.parametrize("command", ["fill", "report"])
def test_the_command_line_has_the_defaults_of_fill_gaps(command):
    name = {"fill": "out.npy", "report": "out.html"}[command]
    options = make_parser().parse_args([command, "in.npy", "-o", name])
    passed = fill_options(options, {}, {})
    parameters = inspect.signature(gaps.fill_gaps).parameters
    assert set(passed) <= set(parameters)
    for option, value in passed.items():
        if option != "progress":  # no bars in files: they depend on the terminal
            assert value == parameters[option].default, option


def test_the_report_has_the_folds_of_evaluate():
    options = make_parser().parse_args(["report", "in.npy", "-o", "out.html"])
    assert options.folds == inspect.signature(gaps.Filled.evaluate).parameters["folds"].default


def test_help_lists_the_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "report" in capsys.readouterr().out
