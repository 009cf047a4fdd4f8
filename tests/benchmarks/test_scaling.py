"""Scaling on a few thousand cells: rows are complete, fits are right, peers that gave up are not tried again."""

import itertools
import json
import math

import pytest
import torch

from benchmarks._runs import Case, Problem, Row, solve_by_masked_kronecker, true_residual
from benchmarks.scaling import SHAPES, TILES, exponent, main, solve_by_dense_gpytorch, solve_by_ski

SIZES = ["4x4x5", "5x6x7"]
METHODS = ["reconstruct", "dense"]


def run_main(directory, *more, methods=METHODS, cap=20.0):
    options = {"--sizes": SIZES, "--methods": methods, "--cap": [cap], "--gemm-size": [32], "--noise": [1e-2]}
    arguments = [str(word) for option, values in options.items() for word in (option, *values)]
    main([*arguments, "--theta", "0.5", "--output", str(directory), *more])
    return [Row(**row) for row in json.loads((directory / "scaling.json").read_text())["rows"]]


def test_rows_and_files_are_complete(tmp_path):
    rows = run_main(tmp_path)
    assert [(row.size, row.method) for row in rows] == [(size, method) for size in SIZES for method in METHODS]
    for row in rows:
        assert row.outcome == "converged"
        assert row.error_in_std <= 1e-2 if row.method == "reconstruct" else row.residual <= 1e-2
        assert row.total_seconds == pytest.approx(row.read_seconds + row.setup_seconds + row.solve_seconds)
        assert row.memory_gib > 0
    text = (tmp_path / "scaling.md").read_text()
    assert "## Exponents" in text
    assert "| spectral, streamed | 0 |" in text
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_a_peer_that_was_capped_is_not_tried_on_more_cells(tmp_path):
    rows = run_main(tmp_path, methods=["masked_kronecker"], cap=1e-4)
    assert [row.outcome for row in rows] == ["capped", "not run"]
    assert rows[1].note == "capped at 80 cells"
    rows = run_main(tmp_path, "--resume", methods=["masked_kronecker"])
    assert [row.outcome for row in rows] == ["converged", "converged"]


@pytest.mark.parametrize("solve", [solve_by_masked_kronecker, solve_by_ski, solve_by_dense_gpytorch])
def test_peers_solve_the_same_system(solve):
    problem = Problem("random", "se", 0.3, 1e-2, 1e-6, None, 1e-6, 0)
    case = Case(problem, (4, 5, 6), 0.5, "")
    generator = torch.Generator().manual_seed(0)
    index = torch.randperm(120, generator=generator)[:60].sort().values
    y = torch.randn(60, 1, generator=generator, dtype=torch.float64)
    assert true_residual(case, index, y, solve(case, index, y).solution) <= 1e-6


def test_exponents_are_slopes_of_logarithms():
    rows = [
        Row(f"{size}x{size}", 0.5, "dense", 1.0, "converged", total_seconds=3e-6 * size**3.0, memory_gib=2.0)
        for size in (10, 100, 1000)
    ]
    assert exponent(rows, "total_seconds", 0) == pytest.approx(1.5)
    assert exponent(rows, "memory_gib", 0) == pytest.approx(0.0, abs=1e-12)
    assert exponent(rows, "total_seconds", 10_000) == pytest.approx(1.5)
    assert exponent(rows, "total_seconds", 100_000) is None


def test_sizes_reach_a_billion():
    cells = [math.prod(shape) for shape in SHAPES]
    assert cells[0] < 20_000
    assert cells[-1] == 1_003_622_400
    assert all(3.5 < larger / smaller < 4.5 for smaller, larger in itertools.pairwise(cells))


def test_every_tile_size_is_measured(tmp_path, capsys):
    main(["--tiles", "--tiles-shape", "20x15x4", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "tiles.json").read_text())["rows"]
    assert {(row["tile"], row["precision"]) for row in rows} == {(t, p) for t in TILES for p in ("float32", "float64")}
    assert all(row["seconds"] > 0 for row in rows)
    assert "| 2^14 |" in (tmp_path / "tiles.md").read_text()
    assert "| 2^21 |" in capsys.readouterr().out
