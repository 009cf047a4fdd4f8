"""What ``fill`` does with a plain array: results, options, what is said."""

import json

import numpy as np
import pytest

import gpytorch_gaps
from gpytorch_gaps.__main__ import main
from tests._covering import in_turn


@pytest.fixture
def source(tmp_path, field):
    path = tmp_path / "in.npy"
    np.save(path, field)
    return path


def test_gaps_are_filled_and_what_was_observed_is_untouched(source, field, tmp_path, fill):
    code, out, err = fill(source, "-o", tmp_path / "out.npy")
    filled = np.load(tmp_path / "out.npy")
    known = ~np.isnan(field)
    assert (code, err) == (0, "")
    np.testing.assert_array_equal(filled[known], field[known])
    assert np.isfinite(filled).all()
    assert np.ptp(filled[~known]) > 0
    for word in ("12 x 9", "10 gaps", "kernel: ", "mean: ", "time: ", str(tmp_path / "out.npy")):
        assert word in out
    for word in ("held-out", "standard deviations: "):  # neither was asked for
        assert word not in out


def test_the_held_out_check_is_reported(source, tmp_path, run):
    _, out, _ = run("fill", source, "-o", tmp_path / "a.npy", "--steps", 3)
    assert "held-out RMSE" in out


def test_standard_deviations_are_computed_on_request(source, field, tmp_path, fill):
    code, out, _ = fill(source, "-o", tmp_path / "out.npy", "--std", tmp_path / "std.npy")
    std = np.load(tmp_path / "std.npy")
    assert code == 0
    assert str(tmp_path / "std.npy") in out
    np.testing.assert_array_equal(std > 0, np.isnan(field))


def test_a_picture_is_drawn(source, tmp_path, fill):
    pytest.importorskip("matplotlib")
    code, out, _ = fill(source, "-o", tmp_path / "out.npy", "--plot", tmp_path / "p.png")
    assert code == 0
    assert "standard deviations: " in out  # the picture shows them
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = fill(source, "-o", tmp_path / "out2.npy", "--plot", tmp_path / "p.svg", "--no-std")
    assert code == 0
    assert "standard deviations: " not in out
    assert b"<svg" in (tmp_path / "p.svg").read_bytes()


def test_a_picture_that_fails_does_not_cost_the_filling(source, tmp_path, fill, monkeypatch):
    results = pytest.importorskip("gpytorch_gaps.plot.results")

    def broken(*_, **__):
        raise ValueError("no ink")

    monkeypatch.setattr(results, "fill", broken)
    code, _, err = fill(source, "-o", tmp_path / "out.npy", "--plot", tmp_path / "p.png")
    assert code == 1
    assert "is written" in err
    assert "no ink" in err
    assert np.isfinite(np.load(tmp_path / "out.npy")).all()


def test_smooth_replaces_what_was_observed(source, field, tmp_path, fill):
    assert fill(source, "-o", tmp_path / "out.npy", "--smooth")[0] == 0
    known = ~np.isnan(field)
    smooth = np.load(tmp_path / "out.npy")
    assert (smooth[known] != field[known]).any()
    assert abs(smooth - np.nanmean(field)).max() < 5


def test_the_seed_is_what_a_result_depends_on(source, tmp_path, fill):
    for name in ("a", "b"):
        fill(source, "-o", tmp_path / f"{name}.npy", "--seed", 3)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy"))


def test_periods_go_to_their_axes(source, tmp_path, fill):
    code, out, _ = fill(source, "-o", tmp_path / "out.npy", "--period", "0=6", "--period", "0=4")
    assert code == 0
    assert "axis 0 has a cycle of 6 and 4" in out
    code, _, err = fill(source, "-o", tmp_path / "out2.npy", "--period", "month=6")
    assert code == 1
    assert "'month'" in err


def test_json_is_all_that_is_printed(source, tmp_path, run):
    code, out, _ = run("fill", source, "-o", tmp_path / "out.npy", "--steps", 3, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["version"] == gpytorch_gaps.__version__
    assert found["path"] == str(tmp_path / "out.npy")
    assert found["seconds"] > 0
    report = found["report"]["values"]
    assert (report["cells"], report["gaps"]) == (108, 10)
    assert report["held_out"]["rmse"] > 0


def test_quiet_is_quiet_but_for_errors(source, tmp_path, fill):
    assert fill(source, "-o", tmp_path / "out.npy", "--quiet") == (0, "", "")
    code, out, err = fill(source, "-o", tmp_path / "out.npy", "--quiet")
    assert (code, out) == (1, "")
    assert err.startswith("gpytorch-gaps: error: ")


def test_a_warning_is_one_line(source, tmp_path, fill, monkeypatch):
    import warnings

    inner = gpytorch_gaps.fill_gaps

    def warned(*arguments, **options):
        for _ in range(2):
            warnings.warn("stopped\nearly", gpytorch_gaps.NotConvergedWarning, stacklevel=1)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        return inner(*arguments, **options)

    monkeypatch.setattr(gpytorch_gaps, "fill_gaps", warned)
    code, out, err = fill(source, "-o", tmp_path / "a.npy")
    assert (code, err) == (0, "gpytorch-gaps: warning: stopped early\n")
    _, _, err = fill(source, "-o", tmp_path / "b.npy", "--quiet")
    assert err == ""
    _, out, _ = fill(source, "-o", tmp_path / "c.npy", "--json")
    assert json.loads(out)["warnings"] == ["stopped early"]


def test_a_defect_says_that_it_is_one(source, tmp_path, fill, monkeypatch):
    def broken(*_, **__):
        raise KeyError("lost")

    monkeypatch.setattr(gpytorch_gaps, "fill_gaps", broken)
    code, _, err = fill(source, "-o", tmp_path / "a.npy")
    assert code == 1
    assert "unexpected KeyError" in err
    assert "Traceback" not in err
    assert "Traceback" in fill(source, "-o", tmp_path / "a.npy", "--traceback")[2]


def test_an_interrupt_keeps_what_was_there(source, tmp_path, fill, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    old = tmp_path / "out.npy"
    old.write_bytes(b"old")
    monkeypatch.setattr(np.lib.format, "open_memmap", interrupted)  # while the result is written
    code, out, err = fill(source, "-o", old, "--force")
    assert (code, out) == (130, "")
    assert err == "gpytorch-gaps: interrupted\n"
    assert old.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.npy", "out.npy"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fill"],
        ["fill", "in.npy"],
        ["fill", "in.npy", "-o", "out.npy", "--steps", "0"],
        ["fill", "in.npy", "-o", "out.npy", "--seed", "-1"],
        ["fill", "in.npy", "-o", "out.npy", "--memory", "none"],
        ["fill", "in.npy", "-o", "out.npy", "--period", "time"],
        ["fill", "in.npy", "-o", "out.npy", "--period", "time=-1"],
        ["fill", "in.npy", "-o", "out.npy", "--quiet", "--json"],
        ["fill", "in.npy", "-o", "out.npy", "--std", "std.npy", "--no-std"],
        ["mend", "in.npy"],
    ],
)
def test_wrong_usage_is_told_apart(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: gpytorch-gaps" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["fill", "--help"], ["inspect", "--help"], ["demo", "--help"]])
def test_help_has_an_example(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0
    assert "gpytorch-gaps" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"gpytorch-gaps {gpytorch_gaps.__version__}\n"


def test_transforms_bounds_and_quantiles(field, tmp_path, fill):
    rain = np.where(field < 5.1, 0.0, field - 5.1)
    rain[np.isnan(field)] = np.nan
    np.save(tmp_path / "in.npy", rain)
    low, high = tmp_path / "low.npy", tmp_path / "high.npy"
    asked = ["--quantile", f"0.025={low}", "--quantile", f"0.975={high}", "--bounds", "0,", "--transform", "boxcox"]
    code, out, _ = fill(tmp_path / "in.npy", "-o", tmp_path / "out.npy", *asked)
    assert code == 0
    assert "transform: boxcox, power" in out
    assert f"{high} (97.5 % quantiles)" in out
    filled, low, high = (np.load(tmp_path / name) for name in ("out.npy", "low.npy", "high.npy"))
    gap = np.isnan(field)
    for own in (filled, low, high):
        np.testing.assert_array_equal(own[~gap], rain[~gap])
    assert (low >= 0).all()
    assert (low[gap] <= filled[gap]).all()
    wet = gap & (filled > 0)
    assert wet.any()
    assert (filled[wet] < high[wet]).all()


@in_turn(
    given=[
        ["--bounds", "0"],
        ["--bounds", ","],
        ["--bounds", "a,b"],
        ["--transform", "square"],
        ["--quantile", "1.5=a.npy"],
        ["--quantile", "0.5"],
    ]
)
def test_options_of_transforms_are_checked(source, tmp_path, run, given):
    with pytest.raises(SystemExit) as stopped:
        run("fill", source, "-o", tmp_path / "out.npy", *given)
    assert stopped.value.code == 2


def test_a_quantile_has_one_file(source, tmp_path, run):
    both = ["--quantile", f"0.5={tmp_path / 'a.npy'}", "--quantile", f"0.5={tmp_path / 'b.npy'}"]
    code, _, err = run("fill", source, "-o", tmp_path / "out.npy", *both)
    assert (code, "--quantile: got a probability twice" in err) == (1, True)
