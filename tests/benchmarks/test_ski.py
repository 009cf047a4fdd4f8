"""The benchmark of structured kernel interpolation on a small problem: rows are complete, failures are shown."""

from benchmarks.ski import TOLERANCE, main

SMALL = ["--points", "900", "--shape", "24", "18", "--lengthscale", "0.2", "--noise", "1e-3", "--ranks", "5"]


def test_rows_and_what_they_say(capsys):
    rows = main([*SMALL, "--cap", "2000"])
    assert [(row.kernel, row.preconditioner) for row in rows] == [
        (kernel, name) for kernel in ("SE", "Matern-5/2") for name in ("eigenvectors", "pivoted Cholesky")
    ]
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        assert ours.residual <= TOLERANCE
        assert theirs.residual <= 2 * TOLERANCE  # it stops on its recursive residual
        assert 10 * ours.iterations <= theirs.iterations
    printed = capsys.readouterr().out
    assert "threads" in printed
    assert printed.count("pivoted Cholesky") == 2


def test_what_does_not_converge_is_shown(capsys):
    rows = main([*SMALL, "--cap", "12"])
    assert not rows[1].converged
    assert f"> {rows[1].iterations} (at " in capsys.readouterr().out
