"""The stress tests on grids of a hundred cells: rows are complete, caps and limits are shown, results are kept."""

import json
from dataclasses import fields

import pytest

from benchmarks._runs import Row
from benchmarks.stress import WORK, default_methods, main, peer_ratios, shape_of

TOLERANCE = 1e-6
PEERS = ("numpy_fill", "cholesky", "masked_kronecker")


def run_main(directory, *more, size="12x12", methods=("FG",), gappiness=(0.4,), cap=20.0):
    options = {"--size": [size], "--methods": methods, "--gappiness": gappiness, "--cap": [cap], "--gemm-size": [32]}
    arguments = [str(word) for option, values in options.items() for word in (option, *values)]
    main([*arguments, "--theta", "0.5", "--noise", "1e-2", "--output", str(directory), *more])
    content = json.loads((directory / "stress.json").read_text())
    return [Row(**row) for row in content["rows"]], content


@pytest.fixture(scope="module")
def every_method(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stress")
    rows, content = run_main(directory, "--tighter", methods=list(WORK))
    return directory, {row.method: row for row in rows}, content


@pytest.fixture
def _without_figure(monkeypatch):
    monkeypatch.setattr("benchmarks.stress.plot", lambda *_: None)


def test_rows_are_complete(every_method):
    _, rows, content = every_method
    assert list(rows) == list(WORK)
    assert all(set(row) == {field.name for field in fields(Row)} for row in content["rows"])
    for row in rows.values():
        assert row.outcome == "converged"
        if row.method != "reconstruct":
            assert row.residual <= TOLERANCE
        if row.method not in PEERS:
            assert row.error_in_std <= 1e-2
        assert row.total_seconds == pytest.approx(row.read_seconds + row.setup_seconds + row.solve_seconds)
        assert row.total_seconds > 0
        assert row.memory_gib >= row.before_gib > 0
        assert row.repeats >= 1


def test_methods_agree_on_the_mean(every_method):
    _, rows, _ = every_method
    assert all(row.rmse == pytest.approx(rows["cholesky"].rmse, rel=1e-4) for row in rows.values())


def test_a_reconstruction_says_more(every_method):
    row = every_method[1]["reconstruct"]
    assert row.kernel_error <= 2 * TOLERANCE
    assert 0 < row.basis_size <= 144
    assert row.gemm_gflops_64 > 0
    assert row.gemm_gflops_32 > 0
    assert row.gemm_ratio == pytest.approx(row.solve_seconds * row.gemm_gflops_64 / row.gflop)
    assert row.tighter == "converged"
    assert 0 < row.change < 1e-3


def test_files_are_complete_and_no_others(every_method):
    directory, rows, content = every_method
    text = (directory / "stress.md").read_text()
    assert content["machine"]["cpu"] in text
    assert peer_ratios(list(rows.values()))[0] in text
    assert (directory / "stress.png").read_bytes().startswith(b"\x89PNG")
    assert {file.name for file in directory.iterdir()} == {"stress.json", "stress.md", "stress.png"}


def test_a_run_over_its_cap_is_shown_as_capped_and_run_again_with_a_larger_one(tmp_path):
    for cap, outcome in ((1e-4, "capped"), (20.0, "converged")):
        (row,), _ = run_main(tmp_path, "--resume", cap=cap)
        assert row.outcome == outcome
        assert row.cap == cap
        assert ("capped at 0.0001 s" in (tmp_path / "stress.md").read_text()) == (outcome == "capped")
        assert (row.total_seconds is None) == (outcome == "capped")


@pytest.mark.usefixtures("_without_figure")
def test_resume_runs_what_is_missing(tmp_path):
    (first,), _ = run_main(tmp_path, gappiness=[0.3])
    rows, _ = run_main(tmp_path, "--resume", gappiness=[0.3, 0.6])
    assert rows[0] == first
    assert [row.gappiness for row in rows] == [0.3, 0.6]
    with pytest.raises(SystemExit, match="another problem"):
        run_main(tmp_path, "--resume", "--gaps", "clouds")


@pytest.mark.usefixtures("_without_figure")
def test_clouds_of_a_video_with_a_rough_kernel(tmp_path):
    more = ("--gaps", "clouds", "--kernel", "matern32", "--scratch", str(tmp_path / "inputs"))
    (row,), content = run_main(tmp_path, *more, size="9x8x3", methods=["reconstruct"])
    assert row.outcome == "converged"
    assert row.tighter is None
    assert content["problem"]["kernel"] == "matern32"
    assert [file.name for file in (tmp_path / "inputs").iterdir()] == ["9x8x3-clouds-0.4-seed0.npy"]


@pytest.mark.usefixtures("_without_figure")
def test_what_does_not_fit_into_memory_is_not_run(tmp_path):
    (row,), _ = run_main(tmp_path, "--memory", "1e-6")
    assert row.outcome == "not run"
    assert "13 vectors" in row.note
    assert "not run" in (tmp_path / "stress.md").read_text()


def test_sizes_are_names_or_shapes():
    assert shape_of("10k") == (100, 100)
    assert shape_of("4x5x6") == (4, 5, 6)
    assert "cholesky" in default_methods(10_000)
    assert "cholesky" not in default_methods(16_588_800)


@pytest.mark.parametrize("size", ["4x5", "100", "2x5x6", "axb"])
def test_other_sizes_are_refused(size, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run_main(tmp_path, size=size)
    assert "expected 10k, 16m, 1b" in capsys.readouterr().err
