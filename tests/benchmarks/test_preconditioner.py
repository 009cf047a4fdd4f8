"""The preconditioner study on a 12 x 12 grid: rows are complete, ranks do what they should, failures are shown."""

import json
from dataclasses import fields

import pytest

from benchmarks.preconditioner import (
    METHODS,
    NOISE,
    TOLERANCE,
    Row,
    main,
    measure,
    num_observed,
    random_gaps_problem,
    summarise,
    table,
)

SIZE, THETA = 12, 1.0


@pytest.fixture(autouse=True)
def _one_solve_each(monkeypatch):
    monkeypatch.setattr("benchmarks.preconditioner.REPEATS", 1)


@pytest.fixture(scope="module")
def numerical_rank():
    """Eigenvalues that show beside the noise, to the tolerance: fewer than there are observations."""
    system, _ = random_gaps_problem(SIZE, THETA, seed=0)
    rank = int((system.eigen().products > NOISE * TOLERANCE).sum())
    assert rank < num_observed(SIZE)
    return rank


def run_main(directory, *, ranks, cap):
    options = {"--size": [SIZE], "--thetas": [THETA], "--ranks": ranks, "--seeds": [2], "--cap": [cap]}
    arguments = [str(word) for option, values in options.items() for word in (option, *values)]
    main([*arguments, "--output", str(directory)])
    return json.loads((directory / "preconditioner.json").read_text())


def test_files_and_rows_are_complete(tmp_path, capsys, numerical_rank):
    content = run_main(tmp_path, ranks=[10, numerical_rank], cap=5000)
    cases = {(row["method"], row["rank"], row["seed"]) for row in content["rows"]}
    assert cases == {(method, rank, seed) for method in METHODS for rank in (0, 10, numerical_rank) for seed in (0, 1)}
    assert len(content["rows"]) == len(cases)
    assert all(set(row) == {field.name for field in fields(Row)} for row in content["rows"])
    assert all(row["outcome"] == "converged" and row["residual"] <= 1e-6 for row in content["rows"])
    assert all(row["cg_seconds"] > 0 and row["setup_seconds"] < row["total_seconds"] for row in content["rows"])
    assert all((row["setup_gflop"] > 0) == (row["rank"] > 0) for row in content["rows"])
    assert content["machine"]["threads"]
    assert content["problem"]["size"] == SIZE
    printed, written = capsys.readouterr().out, (tmp_path / "preconditioner.md").read_text()
    for text in (printed, written):
        assert content["machine"]["cpu"] in text
        assert table(summarise([Row(**row) for row in content["rows"]])) in text
    assert (tmp_path / "preconditioner.png").read_bytes().startswith(b"\x89PNG")


def test_the_numerical_rank_leaves_nothing_to_iterate_on(numerical_rank):
    without, full = (measure(SIZE, THETA, "ignore", rank, seed=0, cap=5000) for rank in (0, numerical_rank))
    assert without.outcome == full.outcome == "converged"
    assert full.iterations <= 2
    assert without.iterations >= 30 * full.iterations


def test_a_run_over_its_cap_is_never_shown_as_converged(tmp_path, numerical_rank):
    rows = [Row(**row) for row in run_main(tmp_path, ranks=[2, numerical_rank], cap=5)["rows"]]
    outcomes = {(row.method, row.rank): row.outcome for row in rows}
    assert outcomes["ignore", 0] == outcomes["ignore", 2] == outcomes["fill", 0] == "capped"
    assert outcomes["ignore", numerical_rank] == "converged"
    assert all(row.iterations == 5 and row.residual > 1e-6 for row in rows if row.outcome == "capped")
    lines = {line.split(" | ")[3]: line for line in table(summarise(rows)).splitlines() if line.startswith("| ignore")}
    assert "2 of 2 capped" in lines["0"]
    assert "2 of 2 capped" in lines["2"]
    assert lines["2"].count("unknown") == 2
    assert "capped" not in lines[str(numerical_rank)]
    assert lines[str(numerical_rank)].count("≤") == 2


def test_more_ranks_than_observations_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--size", str(SIZE), "--ranks", "73", "--output", str(tmp_path)])
    assert "expected 0 .. 72" in capsys.readouterr().err
