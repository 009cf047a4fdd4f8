"""The benchmark of neighbours on some hundred cells: rows are complete, caps are shown, models are those they name."""

import importlib.util
import json
import math
from dataclasses import fields, replace

import pytest
import torch

from benchmarks._neighbour_likelihoods import dense_log_likelihood, gpboost_part, log_likelihood, training_part
from benchmarks._neighbour_problems import GAPS, KERNELS, Problem
from benchmarks._neighbour_tables import COLUMNS, Row, tables
from benchmarks.neighbours import PARTS, columns_of, main, solve
from gpytorch_gaps import settings

PROBLEM = Problem((20, 18), "clouds", "Matern-3/2", 0.1, 1e-2)
SUM = "Matern-3/2 + long squared-exponential"


@pytest.fixture
def _small(monkeypatch):
    monkeypatch.setattr("benchmarks.neighbours.warm_up", lambda: None)


@pytest.mark.usefixtures("_small")
def test_parts_and_files_are_complete(tmp_path, capsys):
    kernels = ["Matern-1/2", SUM]
    table = ["--grids", "9x8", "--lengths", "0.2", "--noise", "1e-2", "--kernels", *kernels]
    others = ["--grid", "15x14", "--repeats", "1", "--small-grid", "12x12", "--seeds", "2"]
    main(["--parts", *PARTS[:4], *table, *others, "--output", str(tmp_path)])
    content = json.loads((tmp_path / "neighbours.json").read_text())
    cases = {(row["kernel"], row["gaps"], row["column"]) for row in content["table"]}
    assert cases == {
        (kernel, where, column)
        for kernel in kernels
        for where in GAPS
        for column in COLUMNS
        if (kernel, column) != (SUM, "fill")
    }
    assert all(set(row) == {field.name for field in fields(Row)} for row in content["table"])
    assert all(row["converged"] and row["residual"] <= 1e-6 for row in content["table"])
    assert {row["num_neighbours"] for row in content["table"] if row["column"] == "neighbours"} == {20}
    assert [row["preconditioner"] for row in content["likelihood"]] == ["eigen", "neighbours"] * 6
    assert [row["preconditioner"] for row in content["training"]] == ["eigen", "auto"] * 4
    printed, written = capsys.readouterr().out, (tmp_path / "neighbours.md").read_text()
    for text in (printed, written):
        assert content["machine"]["cpu"] in text
        assert "threads" in text
        assert all(f"## {part}" in text for part in PARTS[:4])
        assert '| kernel, noise | gaps | `"fill"` | rank 300 | 20 neighbours | `"auto"`, no neighbours |' in text


def test_a_solve_over_its_cap_is_never_shown_as_converged(monkeypatch):
    for module in ("neighbours", "_neighbour_tables"):
        monkeypatch.setattr(f"benchmarks.{module}.CAP", 3)
    row = solve(replace(PROBLEM, noise=1e-4), "fill")
    assert not row.converged
    assert row.iterations_text == "> 3"
    (_, table, _, compact, _), by_auto = tables([row]), replace(row, column="auto")
    assert "| > 3 (" in table
    assert "| > 3 |" in compact
    assert "0 of 1 rows in at most 60" in tables([by_auto])[-1]


def test_large_grids_are_not_solved_by_every_method():
    large = replace(PROBLEM, shape=(300, 365))
    assert columns_of(large, None) == ["neighbours", "auto"]
    assert columns_of(large, ["fill"]) == ["fill"]
    assert columns_of(replace(PROBLEM, kernel=SUM), None) == ["eigen", "neighbours", "before", "auto"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_model_has_the_covariance_of_the_problem(kernel):
    problem = replace(PROBLEM, kernel=kernel)
    model = problem.model(problem.draw())
    covariance = model.covar_module(*model.train_inputs).to_dense()
    expected = problem.covariance().to_dense()
    assert torch.allclose(covariance + 1e-2 * torch.eye(len(covariance)).double(), expected, atol=1e-12)
    assert float(covariance.diagonal().mean().detach()) == pytest.approx(1.0)


@pytest.mark.parametrize("where", GAPS)
def test_about_as_much_is_missing_as_is_said(where):
    share = replace(PROBLEM, shape=(80, 80), gaps=where).missing().double().mean()
    assert float(share) == pytest.approx(0.5 if where == "clouds" else 0.4, abs=0.02)


def test_log_likelihoods_and_gradients_are_those_of_dense_algebra():
    values = PROBLEM.draw()
    truth, slope = dense_log_likelihood(PROBLEM, values)
    torch.manual_seed(0)
    with settings.num_neighbours(len(PROBLEM.index()) - 1):  # which is exact
        found = log_likelihood(PROBLEM, values, "neighbours")
    assert found.value == pytest.approx(truth, abs=1e-4)
    assert torch.allclose(found.gradient, slope, rtol=1e-4, atol=1e-4)
    assert "neighbours" in found.how
    assert 0 < found.value_seconds < found.seconds


def test_training_states_its_error():
    rows, (title, table) = training_part((16, 15), [0.1], [1e-2], 1)
    assert "120 observations" in title
    assert table.count("`auto`") == table.count("`eigen`") == 2
    assert all(math.isfinite(row["stated"]) for row in rows)


def test_gpboost_is_skipped_where_it_is_missing():
    if importlib.util.find_spec("gpboost"):
        pytest.skip("GPBoost is installed")
    rows, (text,) = gpboost_part((8, 8), (8, 8))
    assert not rows
    assert "skipped" in text
