"""What a person gets wrong is named: the argument, what came, and what was expected."""

import datetime
import re

import numpy as np
import pytest
import torch
from linear_operator.operators import DiagLinearOperator

import gpytorch_gaps as gaps
from gpytorch_gaps.operators import (
    FillGapsOperator,
    PenalizedGapsOperator,
    SelectedKroneckerAddedDiagOperator,
    SelectedKroneckerDiagOperator,
)
from gpytorch_gaps.operators import (
    SelectedKroneckerOperator as Selected,
)

FACTORS = [torch.eye(4).double() + 0.1, torch.eye(3).double() + 0.1]
INDEX = torch.tensor([0, 2, 5, 7, 11])
RHS = torch.ones(5).double()


def kernel():
    return Selected(*FACTORS, row_index=INDEX)


CASES = {
    "off the grid": (
        lambda: Selected(*FACTORS, row_index=torch.tensor([0, -1])),
        "row_index: entry 1 is -1",
    ),
    "beyond the grid": (
        lambda: Selected(*FACTORS, col_index=torch.tensor([12])),
        "col_index: entry 0 is 12",
    ),
    "gap off the grid": (
        lambda: FillGapsOperator(*FACTORS, noise=0.1, gap_index=torch.tensor([-1])),
        "gap_index: entry 0 is -1, expected cells 0 to 11",
    ),
    "noise off the grid": (
        lambda: SelectedKroneckerDiagOperator(torch.ones(4), torch.ones(3), index=torch.tensor([12])),
        "index: entry 0 is 12",
    ),
    "a mask": (lambda: Selected(*FACTORS, row_index=torch.ones(12, dtype=torch.bool)), "nonzero"),
    "a list of factors": (lambda: Selected(FACTORS), "got list, expected a tensor; pass *factors"),
    "a lazy factor": (lambda: Selected(DiagLinearOperator(torch.ones(3))), "call .to_dense()"),
    "batches": (
        lambda: Selected(torch.ones(2, 3, 3), torch.ones(3, 3, 3)),
        "that broadcast",
    ),
    "short diagonal": (
        lambda: kernel().add_diagonal(torch.ones(7).double()),
        "diag: got shape (7,), expected ()",
    ),
    "dtype of the noise": (lambda: kernel().add_diagonal(torch.tensor(0.1)), "the diagonal is torch.float32"),
    "negative noise": (lambda: kernel().add_diagonal(-0.1).solve(RHS), "noise: got -0.1, expected"),
    "asymmetric factor": (
        lambda: (
            Selected(torch.arange(9.0).reshape(3, 3), row_index=torch.tensor([0, 1]))
            .add_diagonal(1.0)
            .solve(torch.ones(2))
        ),
        "factors: axis 0",
    ),
    "noise axes": (
        lambda: kernel() + SelectedKroneckerDiagOperator(torch.ones(6).double(), torch.ones(2).double(), index=INDEX),
        "axis_noise: got axes of (6, 2) levels, expected (4, 3)",
    ),
    "added float": (lambda: SelectedKroneckerAddedDiagOperator(kernel(), 0.1), "got SelectedKroneckerOperator, float"),
    "short right-hand side": (
        lambda: kernel().add_diagonal(0.1).solve(RHS[:3]),
        "right_tensor: got shape (3,)",
    ),
    "short quadratic form": (
        lambda: kernel().add_diagonal(0.1).inv_quad(RHS[:3]),
        "inv_quad_rhs: got shape (3,)",
    ),
    "NaN right-hand side": (lambda: kernel().add_diagonal(0.1).solve(RHS * torch.nan), "rhs: got NaN"),
    "no penalty": (
        lambda: PenalizedGapsOperator(*FACTORS, noise=0.1, gap_index=torch.tensor([1]), penalty=None),
        "penalty: got None, expected a number above 0",
    ),
    "vector of noises": (
        lambda: FillGapsOperator(*FACTORS, noise=torch.ones(2).double(), gap_index=torch.tensor([1])),
        "noise: got shape (2,), expected one value",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_argument_is_named(name):
    wrong, message = CASES[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        wrong()


def test_constant_jitter_keeps_the_noise_constant():
    operator = kernel().add_diagonal(0.1).add_jitter(1e-3)
    with gaps.settings.gap_method("fill"), gaps.record_solves() as solves:
        solution = operator.solve(RHS)
    assert solves[-1].method == "fill"
    torch.testing.assert_close(operator.to_dense() @ solution, RHS, rtol=1e-5, atol=1e-5)


def test_a_lazy_right_hand_side_is_welcome():
    operator = kernel().add_diagonal(0.1)
    cross = Selected(*FACTORS, col_index=INDEX)
    torch.testing.assert_close(operator.solve(cross.mT), operator.solve(cross.to_dense().mT))


def test_float32_kernels_that_are_symmetric_to_rounding_only_are_filled_to_tolerance():
    torch.manual_seed(0)
    x = torch.linspace(0, 1, 25)
    factor = torch.exp(-(x[:, None] - x).abs() / 0.3)
    factor = factor + 1e-6 * torch.rand(25, 25)
    index = torch.randperm(625)[:300]
    operator = Selected(factor, factor, row_index=index).add_diagonal(0.05)
    with gaps.settings.gap_method("fill"), gaps.record_solves() as solves:
        operator.solve(torch.randn(300))
    assert solves[-1].converged


def test_numpy_scalars_are_numbers():
    with gaps.settings.preconditioner_rank(np.int64(10)), gaps.settings.solve_tolerance(np.float32(1e-3)):
        assert gaps.settings.preconditioner_rank.value() == 10


def test_dates_of_any_calendar_are_days_and_other_objects_are_refused():
    xarray = pytest.importorskip("xarray")
    dates = np.array([datetime.date(2000, 1, 1), datetime.date(2000, 1, 4), datetime.date(2001, 1, 1)], dtype=object)
    array = xarray.DataArray(np.arange(3.0), dims="time", coords={"time": dates})
    grid, _, _ = gaps.from_xarray(array)
    assert grid.axes[0].flatten().tolist() == [0.0, 3.0, 366.0]
    strange = np.array([{1}, {2}, {3}], dtype=object)
    with pytest.raises(ValueError, match="coordinate 'time' holds set"):
        gaps.from_xarray(xarray.DataArray(np.arange(3.0), dims="time", coords={"time": ("time", strange)}))


def test_reports_read_well():
    operator = kernel().add_diagonal(0.1)
    with gaps.record_solves() as solves:
        operator.inv_quad_logdet(RHS, logdet=True)
    assert "converged" in str(solves[-1])
    assert "standard error 0" in str(solves.logdets[-1])


def test_an_index_that_leaves_the_grid_in_place_is_noticed_and_not_written_to():
    index = torch.tensor([0, 1])
    Selected(*FACTORS, row_index=index)
    assert not vars(index)
    index[1] = -1
    with pytest.raises(ValueError, match="entry 1 is -1"):
        Selected(*FACTORS, row_index=index)
