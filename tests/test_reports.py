"""Reports of solves and log-determinants: who gets them, and what is said when a solve fails."""

import copy
import warnings

import pytest
import torch
from linear_operator.operators import ConstantDiagLinearOperator

from gpytorch_gaps import settings
from gpytorch_gaps.operators import SelectedKroneckerOperator
from gpytorch_gaps.reports import (
    LogdetReport,
    NotConvergedWarning,
    SolveReport,
    _recorders,
    record_solves,
    report_logdet,
    report_solve,
)


def solve_report(converged=True, residual=(1e-9, 3e-8), **changes):
    fields = {
        "method": "fill",
        "iterations": 12,
        "residual": torch.tensor(residual, dtype=torch.float64),
        "seconds": 0.25,
        "rank": 0,
        "num_rhs": 2,
        "converged": converged,
        "tolerance": 1e-6,
    }
    return SolveReport(**{**fields, **changes})


def logdet_report():
    return LogdetReport("exact", torch.tensor(1.0), torch.tensor(0.0), 0)


def silently(report):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report_solve(report, "something else")


# -- recording ---------------------------------------------------------------------------------------------------------


def test_solves_are_recorded_in_order():
    first, second = solve_report(), solve_report(method="ignore")
    with record_solves() as solves:
        silently(first)
        silently(second)
    assert len(solves) == 2
    assert solves[0] is first
    assert solves[-1] is second
    assert solves.logdets == []


def test_log_determinants_are_kept_apart():
    report = logdet_report()
    with record_solves() as solves:
        report_logdet(report)
    assert len(solves) == 0
    assert solves.logdets == [report]


def test_nested_records_all_get_the_report():
    with record_solves() as outer:
        silently(solve_report(method="fill"))
        with record_solves() as inner:
            silently(solve_report(method="ignore"))
            report_logdet(logdet_report())
        silently(solve_report(method="cholesky"))
    assert [report.method for report in outer] == ["fill", "ignore", "cholesky"]
    assert [report.method for report in inner] == ["ignore"]
    assert (len(outer.logdets), len(inner.logdets)) == (1, 1)
    assert inner.logdets is not outer.logdets


def test_two_empty_blocks_are_told_apart():
    """They compare equal: leaving the inner one must not end the outer."""
    with record_solves() as outer:
        with record_solves() as inner:
            pass
        silently(solve_report())
    assert (len(outer), len(inner)) == (1, 0)


def test_nothing_is_recorded_after_the_block():
    with record_solves() as solves:
        pass
    silently(solve_report())
    report_logdet(logdet_report())
    assert len(solves) == len(solves.logdets) == 0
    assert _recorders == []


def test_an_exception_ends_the_block_and_keeps_what_was_recorded():
    def broken():
        with record_solves() as solves:
            kept.append(solves)
            silently(solve_report())
            raise KeyError

    kept = []
    with pytest.raises(KeyError):
        broken()
    silently(solve_report())
    assert len(kept[0]) == 1
    assert _recorders == []


def test_records_can_be_copied():
    with record_solves() as solves:
        silently(solve_report())
        report_logdet(logdet_report())
    other = copy.deepcopy(solves)
    assert [report.iterations for report in other] == [12]
    assert len(other.logdets) == 1


# -- warnings ----------------------------------------------------------------------------------------------------------


def test_a_converged_solve_says_nothing():
    silently(solve_report(converged=True))


def test_a_failed_solve_tells_residual_tolerance_and_advice():
    report = solve_report(converged=False, residual=(1e-9, 4.2e-3), iterations=37)
    with record_solves() as solves, pytest.warns(NotConvergedWarning) as caught:
        report_solve(report, "a larger preconditioner_rank")
    message = str(caught[0].message)
    assert len(caught) == 1
    assert "4.2e-03" in message  # the worst column, not the mean
    assert "1.0e-06" in message
    assert "37 iterations" in message
    assert "'fill'" in message
    assert "Try: a larger preconditioner_rank." in message
    assert solves[0] is report


def test_a_failed_solve_is_recorded_even_where_warnings_are_errors():
    with record_solves() as solves, warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(NotConvergedWarning):
            report_solve(solve_report(converged=False), "anything")
    assert len(solves) == 1


def test_nan_is_the_worst_residual():
    report = solve_report(converged=False, residual=(float("nan"), 1e-9))
    assert report.worst_residual != report.worst_residual
    with pytest.warns(NotConvergedWarning, match="nan"):
        report_solve(report, "anything")


def test_no_right_hand_sides():
    report = solve_report(residual=(), num_rhs=0)
    assert report.worst_residual == 0.0
    assert "0.0e+00 of 0 right-hand sides" in str(report)


# -- what a report says ------------------------------------------------------------------------------------------------


def test_text_of_a_report():
    text = str(solve_report(rank=30, flops=2.5e9, reason="only 3 gaps"))
    assert text == (
        "fill, rank 30: converged in 12 iterations, worst residual 3.0e-08 of 2 right-hand sides, 2.5 GFLOP, 0.25 s "
        "(only 3 gaps)"
    )
    assert "rank" not in str(solve_report(rank=0))
    assert "NOT CONVERGED" in str(solve_report(converged=False))


def test_reports_compare_without_an_error():
    """``report in solves`` and ``solves.index(report)`` compare reports."""
    first, second = solve_report(), solve_report()
    assert first in [second, first]
    assert [second, first].index(first) == 1


# -- whole solves ------------------------------------------------------------------------------------------------------


def system(noise=1e-4):
    x = torch.linspace(0, 1, 12, dtype=torch.float64)
    factor = torch.exp(-(x[:, None] - x).abs() / 0.5)
    index = torch.arange(0, 144, 2)
    kernel = SelectedKroneckerOperator(factor, factor, row_index=index, col_index=index)
    dense = torch.kron(factor, factor)[index][:, index] + noise * torch.eye(72, dtype=torch.float64)
    diagonal = ConstantDiagLinearOperator(torch.tensor([noise], dtype=torch.float64), diag_shape=72)
    return kernel + diagonal, dense


@pytest.mark.parametrize("method", ["fill", "ignore", "cholesky"])
def test_the_residual_reported_is_that_of_the_original_system(method):
    operator, dense = system()
    rhs = torch.randn(72, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with settings.gap_method(method), settings.solve_tolerance(1e-8), record_solves() as solves:
        solution = operator.solve(rhs)
    (report,) = solves
    assert (report.method, report.converged, report.num_rhs, report.tolerance) == (method, True, 3, 1e-8)
    true = (rhs - dense @ solution).norm(dim=-2) / rhs.norm(dim=-2)
    assert report.residual.shape == (3,)
    torch.testing.assert_close(report.residual, true, rtol=1e-3, atol=1e-13)
    assert bool((true <= 1e-8).all())
    assert (report.iterations == 0) == (method == "cholesky")


def test_a_solve_that_runs_out_of_iterations_warns_with_what_it_reached():
    operator, dense = system()
    rhs = torch.randn(72, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    context = (settings.gap_method("ignore"), settings.preconditioner_rank(0), settings.max_iterations(3))
    with context[0], context[1], context[2], record_solves() as solves, pytest.warns(NotConvergedWarning) as caught:
        solution = operator.solve(rhs)
    (report,) = solves
    true = ((rhs - dense @ solution).norm(dim=-2) / rhs.norm(dim=-2)).max()
    assert not report.converged
    assert report.iterations == 3
    assert report.worst_residual == pytest.approx(float(true), rel=1e-10)
    assert f"{float(true):.1e}" in str(caught[0].message)
    assert "preconditioner_rank" in str(caught[0].message)
