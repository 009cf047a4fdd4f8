"""``gaps.reconstruct`` against a dense GP: values, certificates, reports, files, kills, and what a user gets wrong."""

import copy
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import warnings
from functools import reduce
from itertools import permutations
from pathlib import Path

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel
from linear_operator.utils.warnings import NumericalWarning

import gpytorch_gaps as gaps
from gpytorch_gaps import NotConvergedWarning, ReconstructionReport, SolveReport, record_solves
from gpytorch_gaps.linalg.masked_grid import MaskedGrid
from gpytorch_gaps.reconstruction import checkpoint as states
from gpytorch_gaps.reconstruction import inputs as reconstruct_inputs
from gpytorch_gaps.reconstruction import result as module
from gpytorch_gaps.reconstruction.output import ResumableNpy
from gpytorch_gaps.utils.checkpoint import CheckpointFile
from tests import _dense as dense
from tests import _standin as standin
from tests._covering import covering

NAN = float("nan")
NOISE = 0.01


# -- problems, and a GP by the book ----------------------------------------------------------------------------------


def with_length(kernel, length):
    kernel.lengthscale = length
    return kernel


def se(length=0.4, **options):
    return with_length(RBFKernel(**options), length)


def matern(length=0.4, nu=1.5, **options):
    return with_length(MaternKernel(nu=nu, **options), length)


def kernels_for(axes):
    """Smooth and rough, with ARD on groups."""
    made = []
    for i, axis in enumerate(axes):
        columns = axis.shape[1] if np.ndim(axis) == 2 else None
        made.append((se if i % 2 == 0 else matern)(0.4 + 0.1 * i, ard_num_dims=columns))
    return made


def points_of(axes):
    """All cells of the grid, last axis fastest, written out."""
    tables = [torch.as_tensor(np.asarray(axis), dtype=torch.float64) for axis in axes]
    tables = [table.reshape(len(table), -1) for table in tables]
    cells = torch.cartesian_prod(*(torch.arange(len(table)) for table in tables)).view(-1, len(tables))
    return torch.cat([table[cells[:, i]] for i, table in enumerate(tables)], -1)


def covariance(kernels, axes, a, b):
    """Products of the kernels, or of the matrices, of each axis."""
    result, column = 1.0, 0
    for kernel, axis in zip(kernels, axes, strict=True):
        width = np.asarray(axis).shape[1] if np.ndim(axis) == 2 else 1
        columns = slice(column, column + width)
        column += width
        wide = copy.deepcopy(kernel).double().eval()
        with torch.no_grad():
            result = result * wide(a[..., columns], b[..., columns]).to_dense()
    return result


class Exact:
    """The posterior mean in dense float64."""

    def __init__(self, values, axes, kernels, noise=NOISE, mean=0.0):
        self.axes, self.kernels, self.prior_mean = axes, kernels, mean
        self.cells = points_of(axes)
        y = torch.as_tensor(np.asarray(values, dtype=np.float64)).flatten()
        self.observed = ~y.isnan()
        self.y = y[self.observed] - mean
        kernel = covariance(kernels, axes, self.cells, self.cells)
        system = kernel[self.observed][:, self.observed] + noise * torch.eye(len(self.y), dtype=torch.float64)
        self.root = torch.linalg.cholesky(system)
        self.a = torch.cholesky_solve(self.y.unsqueeze(-1), self.root).squeeze(-1)
        self.grid = (kernel[:, self.observed] @ self.a + mean).view([len(axis) for axis in axes])

    def at(self, points):
        points = torch.as_tensor(np.asarray(points), dtype=torch.float64)
        rows = covariance(self.kernels, self.axes, points, self.cells[self.observed])
        return rows @ self.a + self.prior_mean

    def deviation(self, points):
        """The posterior standard deviation of f."""
        points = torch.as_tensor(np.asarray(points), dtype=torch.float64)
        rows = covariance(self.kernels, self.axes, points, self.cells[self.observed])
        each = points.unsqueeze(-2)  # a batch of single points
        prior = covariance(self.kernels, self.axes, each, each).expand(len(points), 1, 1).flatten()
        return (prior - torch.linalg.solve_triangular(self.root, rows.mT, upper=False).square().sum(0)).sqrt()

    def error_in_std(self, result, points=None):
        """The largest error of a mean, in units of the posterior standard deviation."""
        points = self.cells if points is None else points
        return float(((result.at(points) - self.at(points)).abs() / self.deviation(points)).max())


def field(axes, pattern="random", fraction=0.3, seed=0, noise=NOISE):
    """Smooth values with noise, NaN in the gaps."""
    shape = tuple(len(axis) for axis in axes)
    values = sum(
        np.sin(3.0 * (i + 1) * np.asarray(axis).reshape(len(axis), -1).sum(-1)).reshape(
            [-1 if k == i else 1 for k in range(len(axes))]
        )
        for i, axis in enumerate(axes)
    )
    values = values + math.sqrt(noise) * dense.randn(*shape, seed=seed).numpy()
    gaps_too = np.full(values.size, NAN)
    index = dense.observed(pattern, shape, fraction, seed).numpy()
    gaps_too[index] = values.ravel()[index]
    return gaps_too.reshape(shape)


def lines(*sizes):
    return [np.linspace(0.0, 1.0, size) for size in sizes]


def run(values, axes, kernels, noise=NOISE, **options):
    return gaps.reconstruct(values, axes, kernels, noise, **{"progress": False, **options})


def whole(result):
    return result.slab(0, result.shape[0])


SHAPES = {"1 axis": (40,), "2 axes": (14, 17), "3 axes": (7, 8, 9), "4 axes": (4, 5, 3, 6)}


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["none", "one gap", "one observation", "random", "block", "slice"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_mean_equals_a_dense_gp(shape, pattern):
    axes = lines(*SHAPES[shape])
    kernels, values = kernels_for(axes), field(axes, pattern)
    exact = Exact(values, axes, kernels, mean=0.7)
    result = run(values, axes, kernels, mean=0.7, tolerance=1e-7)
    assert result.report.converged
    assert result.shape == SHAPES[shape]
    torch.testing.assert_close(whole(result), exact.grid, rtol=0, atol=1e-6)
    torch.testing.assert_close(result.at(exact.cells), exact.grid.flatten(), rtol=0, atol=1e-6)
    between = dense.randn(50, len(axes)).sigmoid()
    torch.testing.assert_close(result.at(between), exact.at(between), rtol=0, atol=1e-6)


def test_the_default_tolerance_gives_six_digits():
    axes = lines(14, 17)
    kernels, values = kernels_for(axes), field(axes)
    result = run(values, axes, kernels)
    assert dense.relative(whole(result), Exact(values, axes, kernels).grid) < 2e-6


def test_clustered_gaps_are_filled_as_well_as_asked_for():
    """Deep inside of a gap the system of the weights is nearly singular: a small residual is not yet a small error.

    Where half of the grid is one gap, and the report says "converged" to 1e-6, four digits are not too much to ask.
    """
    axes = lines(40, 36)
    kernels, values = [se(0.15), se(0.15)], field(axes, "block", 0.5, noise=1e-4)
    result = run(values, axes, kernels, 1e-4)
    error = dense.relative(whole(result), Exact(values, axes, kernels, 1e-4).grid)
    assert not result.report.converged or error < 1e-4, f"{result.report}, yet the mean is off by {error:.1e}"


@pytest.mark.parametrize("noise", [1e-6, 1e-3, 10.0])
def test_noise_of_every_size(noise):
    axes = lines(12, 11)
    kernels, values = [se(0.3), matern(0.5)], field(axes)
    result = run(values, axes, kernels, noise, tolerance=1e-11)
    assert dense.relative(whole(result), Exact(values, axes, kernels, noise).grid) < 1e-6


def test_groups_of_coordinates():
    """Stations: scattered points of two or three columns each, beside a plain axis."""
    axes = [dense.randn(9, 3).numpy(), np.linspace(0, 1, 8), dense.randn(5, 2, seed=1).numpy()]
    kernels, values = kernels_for(axes), field(axes)
    exact = Exact(values, axes, kernels)
    result = run(values, axes, kernels, tolerance=1e-7)
    torch.testing.assert_close(whole(result), exact.grid, rtol=0, atol=1e-6)
    points = dense.randn(30, 6, seed=5)
    torch.testing.assert_close(result.at(points), exact.at(points), rtol=0, atol=1e-6)


@pytest.mark.parametrize("which", ["all", "some", "of a tensor"])
def test_axes_that_are_not_given_count_from_zero(which):
    counted = [np.arange(9.0), np.arange(8.0)]
    kernels, values = [se(2.0), matern(3.0)], field(counted)
    axes = None if which == "all" else [None, [float(i) for i in range(8)]]
    given_values = torch.as_tensor(values) if which == "of a tensor" else values
    result = run(given_values, axes, kernels, tolerance=1e-7)
    exact = Exact(values, counted, kernels)
    torch.testing.assert_close(whole(result), exact.grid, rtol=0, atol=1e-6)
    torch.testing.assert_close(result.at([[2.5, 3.25]]), exact.at([[2.5, 3.25]]), rtol=0, atol=1e-6)


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


AXES = {
    "list": lambda a: a.tolist(),
    "tuple": lambda a: tuple(a.tolist()),
    "float32": lambda a: a.astype(np.float32),
    "tensor": torch.as_tensor,
    "float32 tensor": lambda a: torch.as_tensor(a, dtype=torch.float32),
    "tensor with gradient": lambda a: torch.tensor(a, requires_grad=True),
    "big-endian": lambda a: a.astype(">f8"),
    "read-only": read_only,
    "flipped": lambda a: a[::-1].copy()[::-1],
    "strided": lambda a: np.repeat(a, 2)[::2],
    "a column": lambda a: a[:, None],
}


@pytest.mark.parametrize("kind", AXES)
def test_kinds_of_axes(kind):
    """Coordinates that are exact in every precision; no warning about any of them."""
    plain = [np.arange(8) / 8.0, np.arange(6) / 4.0]
    kernels, values = [se(0.3), matern(0.5)], field(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = run(values, [AXES[kind](axis) for axis in plain], kernels, tolerance=1e-7)
    torch.testing.assert_close(whole(result), Exact(values, plain, kernels).grid, rtol=0, atol=1e-6)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_order_of_axes_does_not_matter(order):
    axes = lines(11, 4, 7)
    kernels, values = [se(0.5), matern(0.3), se(0.9)], field(axes)
    expected = whole(run(values, axes, kernels, tolerance=1e-7))
    turned = run(
        np.ascontiguousarray(values.transpose(order)), [axes[i] for i in order], [kernels[i] for i in order],
        tolerance=1e-7,
    )  # fmt: skip
    torch.testing.assert_close(whole(turned), expected.permute(order), rtol=0, atol=1e-8)


def test_axes_that_are_not_sorted():
    axes = [np.array([0.3, -1.0, 0.9, 0.1, 0.5]), np.array([2.0, 0.0, 1.0, -1.0])]
    kernels, values = kernels_for(axes), field(axes)
    torch.testing.assert_close(
        whole(run(values, axes, kernels, tolerance=1e-7)), Exact(values, axes, kernels).grid, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 5), (5, 1, 4)])
def test_axes_of_one_point(shape):
    axes = [np.linspace(0, 1, size) if size > 1 else np.zeros(1) for size in shape]
    kernels = kernels_for(axes)
    values = field(axes, "one gap" if math.prod(shape) > 1 else "none")
    torch.testing.assert_close(
        whole(run(values, axes, kernels, tolerance=1e-7)), Exact(values, axes, kernels).grid, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("scale", [1e-70, 1e-30, 1e-6, 1e6, 1e30, 1e70])
def test_values_of_any_unit(scale):
    """In other units of the values, with a model in the same: the same mean, error bound and number of iterations."""
    axes = lines(14, 17)
    kernels, values = kernels_for(axes), field(axes)
    with torch.no_grad():
        matrices = [
            kernel.double()(torch.as_tensor(axis)).to_dense() for kernel, axis in zip(kernels, axes, strict=True)
        ]
    plain = run(values, axes, matrices)
    scaled = run(scale * values, axes, [scale**2 * matrices[0], matrices[1]], scale**2 * NOISE)
    assert scaled.report.converged
    assert scaled.report.error_in_std == pytest.approx(plain.report.error_in_std, rel=0.5)  # a residual of float32
    assert dense.relative(whole(scaled) / scale, whole(plain)) < 1e-5
    assert abs(scaled.report.iterations - plain.report.iterations) <= 1


def test_the_mean_is_subtracted_and_added_again():
    axes = lines(9, 8)
    kernels, values = kernels_for(axes), field(axes)
    expected = whole(run(values, axes, kernels, tolerance=1e-7))
    shifted = run(values + 1e3, axes, kernels, mean=1e3, tolerance=1e-7)
    torch.testing.assert_close(whole(shifted) - 1e3, expected, rtol=0, atol=1e-8)
    point = run(values, axes, kernels, tolerance=1e-7).at([[0.21, 0.77]])
    torch.testing.assert_close(shifted.at([[0.21, 0.77]]) - 1e3, point, rtol=0, atol=1e-8)
    # from far away nothing is known but the mean
    torch.testing.assert_close(
        shifted.at([[1e6, 0.5], [0.5, -1e6]]), torch.full((2,), 1e3, dtype=torch.float64), rtol=0, atol=1e-12
    )


def test_data_that_equal_the_mean():
    axes = lines(6, 5)
    result = run(np.full((6, 5), 2.5), axes, kernels_for(axes), mean=2.5)
    assert torch.equal(whole(result), torch.full((6, 5), 2.5, dtype=torch.float64))
    assert result.report.iterations == 0
    assert result.report.worst_residual == 0.0


# -- off the grid ----------------------------------------------------------------------------------------------------


def test_extrapolation_equals_a_dense_gp_and_goes_to_the_mean():
    """Outside of the grid what was dropped weighs more, up to the root of the tolerance: a tight one is asked for."""
    axes = lines(16, 15)
    kernels, values = [se(0.3), se(0.4)], field(axes)
    exact = Exact(values, axes, kernels, mean=3.0)
    result = run(values, axes, kernels, mean=3.0, tolerance=1e-13)
    steps = torch.linspace(1.0, 4.0, 40, dtype=torch.float64)
    outside = torch.stack([steps, steps.flip(0) - 2.0], -1)
    torch.testing.assert_close(result.at(outside), exact.at(outside), rtol=0, atol=1e-6)
    assert abs(float(result.at([[40.0, 0.5]])) - 3.0) < 1e-12


@pytest.mark.parametrize("tolerance", [1.0, 1e-2, 1e-4])
def test_extrapolation_is_within_what_the_report_certifies(tolerance):
    axes = lines(16, 15)
    kernels, values = [se(0.3), se(0.4)], field(axes)
    result = run(values, axes, kernels, tolerance=tolerance)
    outside = 1.0 + dense.randn(100, 2).abs()
    error = Exact(values, axes, kernels).error_in_std(result, outside)
    assert 0 < error <= result.report.error_in_std <= tolerance


def test_points_in_any_form_and_any_number(monkeypatch):
    axes = lines(9, 8)
    kernels, values = kernels_for(axes), field(axes)
    result = run(values, axes, kernels, tolerance=1e-7)
    points = dense.randn(23, 2).sigmoid()
    expected = result.at(points)
    assert expected.shape == (23,)
    assert torch.equal(result.at(points.tolist()), expected)
    assert torch.equal(result.at(points.numpy()), expected)
    assert result.at(np.zeros((0, 2))).shape == (0,)
    monkeypatch.setattr(module, "_SLAB_NUMBERS", 20)  # two points at a time
    torch.testing.assert_close(result.at(points), expected)
    torch.testing.assert_close(result.at(points.float()), expected, rtol=0, atol=1e-5)
    assert not result.at(points.clone().requires_grad_(True)).requires_grad


POINTS = {
    "one point": ([0.1, 0.2], r"points: got shape \(2,\), expected \(Q, 2\)"),
    "columns": ([[0.1, 0.2, 0.3]], r"points: got shape \(1, 3\), expected \(Q, 2\)"),
    "NaN": ([[0.1, NAN]], "points: got NaN or infinite"),
    "infinite": ([[0.1, math.inf]], "points: got NaN or infinite"),
}


@pytest.mark.parametrize("case", POINTS)
def test_points_that_are_wrong(case):
    points, message = POINTS[case]
    axes = lines(5, 4)
    with pytest.raises(ValueError, match=message):
        run(field(axes), axes, kernels_for(axes)).at(points)


# -- slabs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [1, 100, 2**22])
def test_slabs_are_parts_of_the_whole(monkeypatch, numbers):
    axes = lines(11, 4, 5)
    kernels, values = kernels_for(axes), field(axes)
    expected = whole(run(values, axes, kernels, tolerance=1e-7))
    monkeypatch.setattr(module, "_SLAB_NUMBERS", numbers)
    result = run(values, axes, kernels, tolerance=1e-7)
    for start, stop in [(0, 11), (0, 1), (10, 11), (3, 8)]:
        slab = result.slab(start, stop)
        assert slab.shape == (stop - start, 4, 5)
        torch.testing.assert_close(slab, expected[start:stop], rtol=0, atol=1e-7)
    assert result.slab(4, 4).shape == (0, 4, 5)


@pytest.mark.parametrize("wanted", [(-1, 3), (0, 12), (5, 4), (12, 12)])
def test_slabs_outside_of_the_grid(wanted):
    axes = lines(11, 4)
    result = run(field(axes), axes, kernels_for(axes))
    with pytest.raises(ValueError, match=rf"slab: got {wanted[0]} to {wanted[1]}, expected slices from 0 to 11"):
        result.slab(*wanted)


# -- kernels ---------------------------------------------------------------------------------------------------------


def test_kernels_are_used_in_float64_and_left_as_they_are():
    axes = lines(9, 8)
    values = field(axes)
    kernels = [ScaleKernel(se(0.3)), matern(0.5)]
    kernels[0].outputscale = 1.7
    kernels[1].eval()
    before = [copy.deepcopy(kernel.state_dict()) for kernel in kernels]
    result = run(values, axes, kernels, tolerance=1e-7)
    result.at([[0.1, 0.2]])
    for kernel, state, training in zip(kernels, before, (True, False), strict=True):
        assert kernel.training == training
        for name, tensor in kernel.state_dict().items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, state[name])
        for parameter in kernel.parameters():
            assert parameter.requires_grad
            assert parameter.grad is None
    torch.testing.assert_close(whole(result), Exact(values, axes, kernels).grid, rtol=0, atol=1e-6)
    kernels[0].base_kernel.lengthscale = 9.0  # later changes do not reach a result
    torch.testing.assert_close(result.at([[0.0, 0.0]]), result.slab(0, 1)[0, :1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["double", "float32", "gradient", "mixed", "same twice"])
def test_matrices_for_kernels(kind):
    axes = lines(9, 9)
    kernels = [se(0.3), se(0.3)] if kind == "same twice" else [se(0.3), matern(0.5)]
    values = field(axes)
    with torch.no_grad():
        x = torch.as_tensor(axes[0])
        matrices = [copy.deepcopy(kernel).double()(x).to_dense() for kernel in kernels]
    matrices = {
        "double": matrices,
        "float32": [matrix.float() for matrix in matrices],
        "gradient": [matrix.clone().requires_grad_(True) for matrix in matrices],
        "mixed": [matrices[0], kernels[1]],
        "same twice": [matrices[0], matrices[0]],
    }[kind]
    before = [matrix.detach().clone() for matrix in matrices if torch.is_tensor(matrix)]
    result = run(values, axes, matrices, tolerance=1e-7)
    atol = 1e-4 if kind == "float32" else 1e-6
    torch.testing.assert_close(whole(result), Exact(values, axes, kernels).grid, rtol=0, atol=atol)
    tensors = [matrix for matrix in matrices if torch.is_tensor(matrix)]
    for matrix, copied in zip(tensors, before, strict=True):
        assert torch.equal(matrix.detach(), copied)
    assert not whole(result).requires_grad
    with pytest.raises(ValueError, match="points: an axis has a matrix in place of a kernel, expected kernels"):
        result.at([[0.1, 0.2]])


def test_leading_blocks_of_one_matrix_serve_axes_of_different_lengths():
    """White noise along both axes: the mean is the data, shrunk, where there are any."""
    eye = torch.eye(8, dtype=torch.float64)
    values = field(lines(3, 8))
    result = run(values, None, [eye[:3, :3], eye], 1.0)
    expected = torch.as_tensor(np.nan_to_num(values)) / 2.0
    torch.testing.assert_close(whole(result), expected, rtol=0, atol=1e-6)


def test_periodic_sums_products_and_kernels_of_low_rank():
    """Periodic ones, with pairs of eigenvalues; sums and products; a kernel of lower rank."""
    axes = [np.arange(12) / 12.0, np.linspace(0, 1, 9), np.linspace(-1, 1, 6)]
    kernels = [PeriodicKernel(), se(0.5) + matern(0.2) * se(0.4), gpytorch.kernels.LinearKernel()]
    values = field(axes)
    exact = Exact(values, axes, kernels)
    result = run(values, axes, kernels, tolerance=1e-7)
    torch.testing.assert_close(whole(result), exact.grid, rtol=0, atol=1e-6)
    points = dense.randn(20, 3).sigmoid()
    torch.testing.assert_close(result.at(points), exact.at(points), rtol=0, atol=1e-6)


def test_a_noise_that_drowns_everything_leaves_the_mean():
    axes = lines(6, 5)
    result = run(field(axes), axes, kernels_for(axes), 1e12, mean=0.5)
    torch.testing.assert_close(whole(result), torch.full((6, 5), 0.5, dtype=torch.float64), rtol=0, atol=1e-9)


# -- precision, modes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["array", "tensor"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_results_have_the_precision_of_the_values(tmp_path, dtype, kind):
    axes = lines(9, 8)
    kernels = kernels_for(axes)
    values = np.nan_to_num(field(axes), nan=0.0).round(3) if dtype == np.int32 else field(axes)
    values = (10 * values).astype(dtype)
    expected = torch.float32 if dtype == np.float32 else torch.float64
    given_values = torch.as_tensor(values) if kind == "tensor" else values
    result = run(given_values, axes, kernels, tolerance=1e-7, output=tmp_path / "mean.npy")
    assert result.dtype == whole(result).dtype == result.at([[0.1, 0.2]]).dtype == expected
    saved = np.load(tmp_path / "mean.npy")
    assert saved.dtype == str(expected).removeprefix("torch.")
    np.testing.assert_array_equal(saved, whole(result).numpy())
    atol = 1e-5 if dtype == np.float32 else 1e-6
    torch.testing.assert_close(whole(result).double(), Exact(values, axes, kernels).grid, rtol=0, atol=atol)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_result_serves_inside_and_outside_of_a_mode(tmp_path, mode):
    """Made under a mode, a result serves outside of it, and the other way round."""
    axes = lines(9, 8)
    kernels, values = kernels_for(axes), torch.as_tensor(field(axes))
    outside = run(values, axes, kernels, tolerance=1e-7)
    with mode():
        inside = run(values, axes, kernels, tolerance=1e-7, output=tmp_path / "a.npy")
        points = inside.at([[0.1, 0.2]])
        assert torch.equal(outside.at([[0.1, 0.2]]), points)
    assert torch.equal(whole(inside), whole(outside))
    assert torch.equal(inside.at([[0.1, 0.2]]), points)
    inside.write(tmp_path / "b.npy")
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()
    assert not whole(inside).requires_grad
    assert torch.is_grad_enabled()


def test_the_default_dtype_does_not_matter():
    axes = lines(9, 8)
    kernels, values = kernels_for(axes), field(axes)
    expected = whole(run(values, axes, kernels))
    torch.set_default_dtype(torch.float64)
    try:
        got = whole(run(values, axes, kernels))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got, expected)


def test_twice_is_the_same():
    axes = lines(14, 17)
    kernels, values = kernels_for(axes), field(axes, "block")
    assert torch.equal(whole(run(values, axes, kernels)), whole(run(values, axes, kernels)))


@pytest.mark.parametrize("noise", [torch.tensor(NOISE), torch.tensor([NOISE], requires_grad=True), np.float32(NOISE)])
def test_noises_of_other_types(noise):
    axes = lines(9, 8)
    kernels, values = kernels_for(axes), field(axes)
    torch.testing.assert_close(
        whole(run(values, axes, kernels, noise)), whole(run(values, axes, kernels, float(noise)))
    )


# -- certificates ----------------------------------------------------------------------------------------------------


@covering(
    pattern=["random", "block", "slice", "one observation", "none"], tolerance=[1.0, 1e-2, 1e-5], noise=[1e-4, 1.0]
)
def test_the_mean_is_within_what_the_report_certifies(pattern, tolerance, noise):
    axes = lines(13, 12)
    kernels, values = [se(0.3), matern(0.2)], field(axes, pattern)
    result = run(values, axes, kernels, noise, tolerance=tolerance)
    assert result.report.converged
    error = Exact(values, axes, kernels, noise).error_in_std(result)
    assert error <= result.report.error_in_std <= tolerance


MISSED = {  # shape, kernel, pattern, share of gaps, noise: zeros in the gaps left a relative residual below 1e-6
    "one iteration": ((40, 44), [matern(0.3, 0.5), matern(0.3, 0.5)], "random", 0.05, 1e-8),
    "a tenth off": ((40, 44), [matern(0.05), matern(0.05)], "random", 0.3, 1e-6),
    "half off": ((40, 44), [matern(0.05), matern(0.05)], "random", 0.3, 1e-7),
    "a block": ((30, 28), [matern(0.3, 0.5), matern(0.3, 0.5)], "block", 0.3, 1e-7),
}


@pytest.mark.parametrize("case", MISSED)
def test_a_small_residual_is_not_taken_for_a_small_error(case):
    shape, kernels, pattern, share, noise = MISSED[case]
    axes = lines(*shape)
    values = field(axes, pattern, share, noise=noise)
    result = run(values, axes, kernels, noise)
    assert result.report.converged
    assert Exact(values, axes, kernels, noise).error_in_std(result) <= result.report.error_in_std <= 1e-2


def test_noise_far_too_small_for_the_data_is_named():
    """Eigenvalues were dropped for residuals of the size of the noise; these are 500 times as large."""
    axes = lines(20, 20)
    values = 10.0 * field(axes, noise=1.0)
    with pytest.warns(NotConvergedWarning, match=r"a larger noise: .* the RMS residual of the data is \d"):
        result = run(values, axes, [se(0.5), se(0.5)], 1e-4)
    assert result.report.misfit > 400
    assert result.report.error_in_std > 1e-2


def test_a_large_tolerance_drops_much_and_a_small_one_little():
    axes = lines(13, 12)
    kernels, values = [se(0.3), se(0.2)], field(axes)
    sizes = [run(values, axes, kernels, tolerance=tolerance).report.basis_size for tolerance in (10.0, 1e-2, 1e-5)]
    assert sizes[0] < sizes[1] < sizes[2] < 13 * 12


def test_a_kernel_that_float64_does_not_resolve_is_told():
    axes = lines(30, 30)
    kernels = [se(1.0), se(1.0)]
    with pytest.warns(NumericalWarning, match="the kernel is known only to .* times the noise"):
        result = run(np.ones((30, 30)), axes, kernels, 1e-17, max_iterations=5)
    assert result.report.kernel_error > 1.0


# -- reports ---------------------------------------------------------------------------------------------------------


def own_residual(result, exact, noise):
    """Residual of the system of the weights, dense: relative, and weighted as in the certificate."""
    basis = result._basis
    rows = dense.kron(basis.vectors)[exact.observed]
    products, w = basis.products.flatten(), result.weights.flatten()
    kept = products > 0
    target = (rows.mT @ exact.y) * kept
    left = target - (rows.mT @ (rows @ w)) * kept - torch.where(kept, noise / products, 0.0) * w
    return float(left.norm() / target.norm()), float((products.sqrt() * left).norm() / noise)


@pytest.mark.parametrize("pattern", ["random", "block"])
@pytest.mark.parametrize("options", [{}, {"tolerance": 1e-4}, {"max_iterations": 4}])
def test_the_report_is_true(pattern, options):
    axes = lines(14, 17)
    kernels, values = kernels_for(axes), field(axes, pattern)
    with warnings.catch_warnings(), record_solves() as solves:
        warnings.simplefilter("ignore", NotConvergedWarning)
        result = run(values, axes, kernels, 1e-4, **options)
    report = result.report
    exact = Exact(values, axes, kernels, 1e-4)
    own, certified = own_residual(result, exact, 1e-4)
    misfit = (exact.y - whole(result).flatten()[exact.observed]).square().mean().sqrt() / 1e-2
    assert report.worst_residual == pytest.approx(own, rel=1e-2, abs=1e-13)
    assert report.misfit == pytest.approx(float(misfit), rel=0.1)
    assert certified <= report.error_in_std <= math.hypot(1.01 * certified, report.misfit * report.std_tolerance / 400)
    assert report.residual.shape == (1,)
    assert report.std_tolerance == options.get("tolerance", 1e-2)
    assert report.converged == (report.error_in_std <= report.std_tolerance) == ("max_iterations" not in options)
    assert solves == [report]
    assert isinstance(report, SolveReport)
    assert isinstance(report, ReconstructionReport)
    assert report.method == "spectral"
    assert report.shape == (14, 17)
    assert report.num_train == int((~np.isnan(values)).sum())
    assert report.num_rhs == 1
    assert report.iterations <= options.get("max_iterations", 2000)
    assert report.basis_size <= math.prod(report.ranks)
    assert report.ranks == tuple(result.weights.shape)
    assert min(report.seconds, report.read_seconds, report.setup_seconds) >= 0.0
    assert report.flops > 0
    assert report.refinements >= 1
    text = str(report)
    for part in ("14 x 17 cells", f"{report.num_train} observed", "which leave out", "standard deviations"):
        assert part in text
    assert ("NOT CONVERGED" in text) == (not report.converged)
    assert repr(report).startswith("<ReconstructionReport ")


def test_a_full_basis_is_called_fill_gaps():
    axes = lines(9, 8)
    full = run(field(axes), axes, [matern(0.1, 0.5), matern(0.1, 0.5)])
    assert full.report.ranks == (9, 8)
    assert "fill-gaps" in str(full.report)
    assert "fill-gaps" not in str(run(field(axes), axes, [se(2.0), matern(0.1, 0.5)]).report)


def test_not_converged_warns():
    axes = lines(14, 17)
    kernels, values = kernels_for(axes), field(axes, "block")
    with pytest.warns(NotConvergedWarning, match=r"'spectral' stopped after 3 iterations .* Try: .*max_iterations"):
        result = run(values, axes, kernels, 1e-4, max_iterations=3)
    assert not result.report.converged
    assert result.report.iterations == 3


def test_converged_does_not_warn():
    axes = lines(14, 17)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(field(axes), axes, kernels_for(axes))


def test_clustered_gaps_take_a_dense_block_within_memory():
    values, axes, kernels, noise = clustered()
    free = run(values, axes, kernels, noise)
    tight = run(values, axes, kernels, noise, memory=1.0)
    assert free.report.rank > 0
    assert free.report.rank**2 * 8 < 2**31
    assert tight.report.rank == 0
    assert free.report.iterations < tight.report.iterations
    assert dense.relative(whole(free), whole(tight)) < 1e-3


@pytest.mark.parametrize("progress", [True, False])
def test_a_progress_bar_is_shown_or_not(monkeypatch, capfd, tmp_path, progress):
    """With no patience at all there would be a bar for everything."""
    monkeypatch.setattr("gpytorch_gaps.utils.progress._DELAY_SECONDS", 0.0)
    axes = lines(9, 8)
    gaps.reconstruct(
        field(axes), axes, kernels_for(axes), NOISE, progress=progress, output=tmp_path / "mean.npy"
    )  # fmt: skip
    out, err = capfd.readouterr()
    assert out == ""
    assert bool(err) == progress
    assert gaps.settings.progress.value() is True


# -- what is wrong is named ------------------------------------------------------------------------------------------


def call(values=None, axes=None, kernels=None, noise=NOISE, **options):
    """A call that would work, but for what is changed."""
    axes_of_it = lines(5, 4)
    return lambda: run(
        field(axes_of_it) if values is None else values, axes, kernels or [se(), se()], noise, **options
    )  # fmt: skip


def matrix(value=1.0, size=5):
    found = dense.se(size)
    found[0, 0] = value
    return found


def broken():
    """A kernel with invalid values, as after a failed step of training."""
    kernel = se()
    kernel.raw_lengthscale.data.fill_(NAN)
    return kernel


BAD = {
    "noise of zero": (call(noise=0.0), "noise: got 0.0, expected a variance above 0"),
    "negative noise": (call(noise=-1.0), "noise: got -1.0"),
    "NaN noise": (call(noise=NAN), "noise: got nan"),
    "infinite noise": (call(noise=math.inf), "noise: got inf"),
    "several noises": (call(noise=torch.ones(3)), r"noise: got shape \(3,\), expected one variance"),
    "an array of noises": (call(noise=np.ones(3)), "noise"),
    "no noise": (call(noise=None), "noise"),
    "tolerance of zero": (call(tolerance=0.0), "tolerance: got 0.0, expected a number above 0"),
    "negative tolerance": (call(tolerance=-1e-6), "tolerance: got -1e-06"),
    "NaN tolerance": (call(tolerance=NAN), "tolerance: got nan"),
    "infinite tolerance": (call(tolerance=math.inf), "tolerance: got inf"),
    "no tolerance": (call(tolerance=None), "tolerance"),
    "memory of zero": (call(memory=0), "memory: got 0"),
    "negative memory": (call(memory=-5), "memory: got -5"),
    "no iterations": (call(max_iterations=0), "max_iterations"),
    "negative iterations": (call(max_iterations=-3), "max_iterations"),
    "NaN iterations": (call(max_iterations=NAN), "max_iterations"),
    "NaN mean": (call(mean=NAN), "mean: got nan, expected a finite number"),
    "infinite mean": (call(mean=-math.inf), "mean: got -inf"),
    "no mean": (call(mean=None), "mean"),
    "too few kernels": (call(kernels=[se()]), "kernels: got 1, expected 2, one for each axis"),
    "too many kernels": (call(kernels=[se()] * 3), "kernels: got 3, expected 2"),
    "one kernel for a list": (call(np.ones(5), None, se()), "kernels"),
    "no kernel": (call(kernels=[se(), None]), "kernels"),
    "shape of a matrix": (call(kernels=[torch.eye(4), se()]), r"kernels: axis 0 gives shape \(4, 4\), expected \(5, 5"),
    "a vector for a matrix": (call(kernels=[torch.ones(5), se()]), r"kernels: axis 0 gives shape \(5,\)"),
    "a batch of kernels": (
        call(kernels=[se(), RBFKernel(batch_shape=torch.Size([2]))]),
        r"kernels: axis 1 gives shape \(2, 4, 4\), expected \(4, 4\)",
    ),
    "a kernel of other columns": (call(kernels=[se(), RBFKernel(ard_num_dims=3)]), "kernels"),
    "a kernel of another column": (call(kernels=[se(), RBFKernel(active_dims=[1])]), "kernels"),
    "NaN in a matrix": (call(kernels=[matrix(NAN), se()]), "kernels: axis 0 gives NaN or infinite entries"),
    "infinite matrix": (call(kernels=[matrix(math.inf), se()]), "kernels: axis 0 gives NaN or infinite"),
    "NaN lengthscale": (call(kernels=[se(), broken()]), "kernels: axis 1 gives NaN or infinite"),
    "a matrix that is not symmetric": (call(kernels=[torch.triu(torch.ones(5, 5)), se()]), "kernels"),
    "number of axes": (call(axes=lines(5)), "axes: got 1, expected 2, one for each dimension of values"),
    "length of an axis": (call(axes=lines(5, 6)), r"values: got shape \(5, 4\), expected \(5, 6\)"),
    "NaN on an axis": (call(axes=[[0, 1, NAN, 3, 4], None]), "axis 0: entry"),
    "equal coordinates": (call(axes=[[0, 1, 2, 3, 3], None]), "axis 0: rows 3 and 4 are both"),
    "strings on an axis": (call(axes=[list("abcde"), None]), "axis 0|axes"),
    "dates on an axis": (call(axes=[np.arange(5).astype("datetime64[D]"), None]), "axis 0|axes"),
    "lengths for axes": (call(axes=[5, 4]), "axis 0|axes"),
    "axes without shape": (call(iter([np.ones((5, 4))])), "axes: got none with an iterable"),
    "an axis without shape": (call([np.ones((5, 4))], [np.arange(5), None]), "axes: got None with an iterable"),
    "all gaps": (call(np.full((5, 4), NAN)), "values: got 20 entries, all of them gaps"),
    "infinite values": (call(np.full((5, 4), math.inf)), r"values: entry \(0, 0\) is infinite"),
    "complex values": (call(np.ones((5, 4)) * 1j), "values: got complex128"),
    "a number": (call(3.0), "values: got float"),
    "progress": (call(progress="no"), "progress: got 'no', expected True or False"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named(case):
    bad, message = BAD[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=message):
            bad()


def test_a_matrix_that_is_not_definite_is_told():
    """An error, or a warning that says so: no noise and no roughness would help."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call(kernels=[-torch.eye(5), se()])()
        except ValueError as error:
            told = str(error)
        else:
            told = " ".join(str(warning.message) for warning in caught)
    assert "definite" in told


# -- output and checkpoints ------------------------------------------------------------------------------------------


def clustered():
    """Needs many iterations, unless it may set up a dense block: values, axes, kernels, noise."""
    axes = lines(40, 36)
    return field(axes, "block", 0.3), axes, [se(0.15), se(0.15)], 1e-3


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def run_clustered(**options):
    values, axes, kernels, noise = clustered()
    return run(values, axes, kernels, noise, **{"memory": 1.0, "tolerance": 1e-7, **options})


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What an undisturbed call returns, and the file it writes."""
    path = tmp_path_factory.mktemp("whole") / "mean.npy"
    result = run_clustered(output=path)
    assert result.report.iterations > 150
    return result, path


def test_output_is_the_mean_and_nothing_else_is_left(uninterrupted):
    result, path = uninterrupted
    np.testing.assert_array_equal(np.load(path), whole(result).numpy())
    assert names(path.parent) == ["mean.npy"]


KILLED = """
    import os, signal, sys
    from tests.reconstruction import test_reconstruct as here

    def kill(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    path, when = sys.argv[1:]
    here.module._SLAB_NUMBERS = 40  # so that the file is written in ten slabs
    if when == "writing":
        append = here.ResumableNpy.append
        here.ResumableNpy.append = lambda file, slab: append(file, slab) if file.rows < 8 else kill()
    else:
        watch = here.states.WeightCheckpoint.watch
        here.states._SECONDS_BETWEEN_SAVES = 0.0 if when == "solving" else 1e9
        here.states.WeightCheckpoint.watch = lambda s, w, count: watch(s, w, count) if count < 150 else kill()
    here.run_clustered(output=path)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Folders that processes have left which were killed: while solving, with and without a checkpoint, or writing."""
    if not hasattr(signal, "SIGKILL"):
        pytest.skip("needs SIGKILL")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    folders = {when: tmp_path_factory.mktemp("killed") for when in ("solving", "solving early", "writing")}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(KILLED), str(folder / "mean.npy"), when], env=environment, cwd=root
        )
        for when, folder in folders.items()
    ]
    assert [process.wait(timeout=600) for process in runs] == [-signal.SIGKILL] * 3
    return folders


def test_a_kill_while_solving_leaves_a_checkpoint_to_go_on_from(killed, uninterrupted):
    folder = killed["solving"]
    assert names(folder) == ["mean.npy.checkpoint"]
    result = run_clustered(output=folder / "mean.npy")
    expected, _ = uninterrupted
    assert result.report.converged
    assert result.report.iterations < expected.report.iterations
    assert names(folder) == ["mean.npy"]
    np.testing.assert_array_equal(np.load(folder / "mean.npy"), whole(result).numpy())
    assert dense.relative(whole(result), whole(expected)) < 1e-6


def test_a_kill_before_the_first_checkpoint_leaves_nothing(killed, uninterrupted):
    folder = killed["solving early"]
    assert names(folder) == []
    run_clustered(output=folder / "mean.npy")
    assert (folder / "mean.npy").read_bytes() == uninterrupted[1].read_bytes()


def test_a_kill_while_writing_leaves_what_was_written_and_no_file(killed, uninterrupted, monkeypatch):
    folder = killed["writing"]
    assert names(folder) == ["mean.npy.checkpoint", "mean.npy.partial", "mean.npy.partial.json"]
    monkeypatch.setattr(module, "_SLAB_NUMBERS", 40)
    made, slab = [], gaps.Reconstruction.slab
    monkeypatch.setattr(
        gaps.Reconstruction, "slab", lambda self, start, stop: made.append((start, stop)) or slab(self, start, stop)
    )
    result = run_clustered(output=folder / "mean.npy")
    assert result.report.iterations == 0
    assert made[0][0] == 8, "slices that are on disk are worked out again"
    assert names(folder) == ["mean.npy"]
    assert_same_file(folder / "mean.npy", uninterrupted[1])


def assert_same_file(path, other):
    """Slabs of other sizes are summed in another order: on some machines the last bits of what is solved for differ."""
    found, expected = np.load(path), np.load(other)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-8)


def stop_after(monkeypatch, slabs, error):
    """Writes of four slices at a time, and an error where the slab after so many would be written."""
    monkeypatch.setattr(module, "_SLAB_NUMBERS", 40)
    append, done = ResumableNpy.append, []

    def stopping(file, slab):
        if len(done) == slabs:
            raise error
        done.append(1)
        append(file, slab)

    monkeypatch.setattr(ResumableNpy, "append", stopping)


@pytest.mark.parametrize("slabs", [0, 3])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no space left on device")])
@pytest.mark.parametrize("before", [False, True], ids=["new", "over another"])
def test_an_interruption_while_writing_leaves_no_finished_file(tmp_path, uninterrupted, error, slabs, before):
    path = tmp_path / "mean.npy"
    if before:
        path.write_bytes(b"what was there")
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, slabs, error)
        with pytest.raises(type(error)):
            run_clustered(output=path)
    assert (path.read_bytes() if path.exists() else None) == (b"what was there" if before else None)
    result = run_clustered(output=path)
    assert result.report.iterations == 0
    assert_same_file(path, uninterrupted[1])
    assert names(tmp_path) == ["mean.npy"]


def test_an_interruption_while_solving_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "state.pt"
    watch = states.WeightCheckpoint.watch

    def interrupt(self, weights, count):
        watch(self, weights, count)
        if count == 20:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(states, "_SECONDS_BETWEEN_SAVES", 0.0)
        patch.setattr(states.WeightCheckpoint, "watch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_clustered(checkpoint=path)
    assert torch.load(path, weights_only=True)["iterations"] == 20
    assert run_clustered(checkpoint=path).report.converged


def test_a_checkpoint_is_written_now_and_then(tmp_path, monkeypatch):
    saved, save = [], CheckpointFile.save
    monkeypatch.setattr(CheckpointFile, "save", lambda file, content: saved.append(file) or save(file, content))
    run_clustered(checkpoint=tmp_path / "state.pt")
    assert len(saved) == 1, "at the end; nothing takes ten seconds here"
    monkeypatch.setattr(states, "_SECONDS_BETWEEN_SAVES", 0.0)
    (tmp_path / "state.pt").unlink()
    saved.clear()
    result = run_clustered(checkpoint=tmp_path / "state.pt")
    assert len(saved) == result.report.iterations + 1


def small(**changes):
    axes = lines(9, 8)
    problem = {"values": field(axes), "axes": axes, "kernels": [se(0.3), matern(0.5)], "noise": NOISE, **changes}
    return run(**problem)


def test_a_checkpoint_is_a_start(tmp_path):
    """Iterations that run out are not lost; what is done is done; a checkpoint of its own is kept."""
    path = tmp_path / "deep" / "state.pt"
    with pytest.warns(NotConvergedWarning):
        small(checkpoint=path, max_iterations=4)
    cold, warm = small(), small(checkpoint=path)
    assert warm.report.converged
    assert warm.report.iterations < cold.report.iterations
    again = small(checkpoint=path)
    assert again.report.iterations == 0
    assert torch.equal(whole(again), whole(warm))
    assert names(path.parent) == ["state.pt"]


def unless_refused(make):
    """What `make()` returns, or None where it refuses the checkpoint by name."""
    try:
        return make()
    except ValueError as error:
        if not str(error).startswith("checkpoint: "):
            raise
        return None


OTHERS = {
    "noise": ({"noise": 2 * NOISE}, "noise differ"),
    "lengthscale": ({"kernels": [se(0.31), matern(0.5)]}, "kernels, axes or tolerance differ"),
    "axis": ({"axes": [np.linspace(0, 1.1, 9), lines(8)[0]]}, "kernels, axes or tolerance differ"),
    "tolerance": ({"tolerance": 100.0}, "kernels, axes or tolerance differ"),
    "values": ({"values": field(lines(9, 8), seed=5)}, "values or mean differ"),
    "mean": ({"mean": 0.1}, "values or mean differ"),
    "shape": ({"values": field(lines(9, 7)), "axes": lines(9, 7)}, "kernels, axes or tolerance differ"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_problem_is_refused(tmp_path, other):
    changes, message = OTHERS[other]
    path = tmp_path / "state.pt"
    small(checkpoint=path)
    before = path.read_bytes()
    pattern = re.escape(f"checkpoint: {path} belongs to another run: {message}") + ".*move it away"
    with pytest.raises(ValueError, match=pattern):
        small(**changes, checkpoint=path)
    assert path.read_bytes() == before


def test_a_gap_more_is_another_problem_even_where_the_value_was_the_mean(tmp_path):
    """A cell that holds the mean adds nothing to ``Phi' W' y``, but is no gap: no start may hide that."""
    values = field(lines(9, 8))
    values[4, 4] = 0.0
    fewer = values.copy()
    fewer[4, 4] = NAN
    path = tmp_path / "state.pt"
    small(values=values, checkpoint=path, tolerance=1e-7)
    expected = whole(small(values=fewer, tolerance=1e-7))
    got = unless_refused(lambda: small(values=fewer, checkpoint=path, tolerance=1e-7))
    if got is not None:
        torch.testing.assert_close(whole(got), expected, rtol=0, atol=1e-6)


def saved(content):
    return lambda path: torch.save(content, path)


DAMAGED = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not a checkpoint"),
    "a model": saved({"state": torch.ones(3)}),
    "a tensor": saved(torch.ones(3)),
    "an object": saved(Path("a")),
    "another version": saved({"format": 99, "weights": torch.ones(3)}),
    "without the problem": saved({"format": 1, "weights": torch.ones(3)}),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path, damage):
    path = tmp_path / "state.pt"
    small(checkpoint=path)
    DAMAGED[damage](path)
    with pytest.raises(ValueError, match=re.escape(f"checkpoint: {path}") + ".*move it away to start again"):
        small(checkpoint=path)


@pytest.mark.parametrize("damage", ["another shape", "NaN"])
def test_weights_that_cannot_be_right_are_not_started_from(tmp_path, damage):
    path = tmp_path / "state.pt"
    expected = whole(small(checkpoint=path))
    content = torch.load(path, weights_only=True)
    content["weights"] = torch.ones(3, dtype=torch.float64) if damage == "another shape" else NAN * content["weights"]
    torch.save(content, path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        got = unless_refused(lambda: small(checkpoint=path))
    if got is not None:
        torch.testing.assert_close(whole(got), expected, rtol=0, atol=1e-5)


def test_places_that_cannot_be_written_to_are_found_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(reconstruct_inputs, "truncated_eigh", lambda *_: pytest.fail("work was done"))
    with pytest.raises(ValueError, match=f"output: got the directory {tmp_path}"):
        small(output=tmp_path)
    with pytest.raises(ValueError, match=r"output: the directory of .* does not exist"):
        small(output=tmp_path / "nowhere" / "mean.npy")
    assert names(tmp_path) == []


def test_a_directory_for_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=f"checkpoint: got the directory {tmp_path}, expected a file"):
        small(checkpoint=tmp_path)


def test_output_and_checkpoint_in_one_place(tmp_path):
    """Refused, or both served; but the finished file is not removed as if it were the checkpoint."""
    path = tmp_path / "mean.npy"
    result = unless_refused(lambda: small(output=path, checkpoint=path))
    if result is not None:
        assert path.exists(), "the output is gone"
        np.testing.assert_array_equal(np.load(path), whole(result).numpy())


def test_a_mean_is_written_slab_by_slab(tmp_path, monkeypatch):
    result = small(tolerance=1e-7)
    result.write(tmp_path / "a.npy")
    result.write(str(tmp_path / "b.npy"))
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), whole(result).numpy())
    monkeypatch.setattr(module, "_SLAB_NUMBERS", 10)
    result.write(tmp_path / "b.npy")  # over what is there, five slices at a time
    np.testing.assert_allclose(np.load(tmp_path / "b.npy"), np.load(tmp_path / "a.npy"), rtol=0, atol=1e-13)
    assert names(tmp_path) == ["a.npy", "b.npy"]
    with pytest.raises(ValueError, match=f"path: got the directory {tmp_path}"):
        result.write(tmp_path)


def test_a_write_goes_on_only_from_its_own(tmp_path, monkeypatch):
    """Two results take turns at one file, and are interrupted."""
    first, second = small(tolerance=1e-7), small(tolerance=1e-7, mean=1.0)
    path = tmp_path / "mean.npy"
    expected = whole(first).numpy()
    monkeypatch.setattr(module, "_SLAB_NUMBERS", 10)
    for result, slabs in ((first, 1), (second, 0)):
        with pytest.MonkeyPatch.context() as patch:
            stop_after(patch, slabs, KeyboardInterrupt())
            patch.setattr(module, "_SLAB_NUMBERS", 10)
            with pytest.raises(KeyboardInterrupt):
                result.write(path)
    first.write(path)
    np.testing.assert_allclose(np.load(path), expected, rtol=0, atol=1e-12)


def test_values_from_a_generator_reach_a_file(tmp_path):
    """Nothing of the size of the grid is given or returned."""
    axes = lines(20, 6, 5)
    kernels, values = kernels_for(axes), field(axes)
    result = run((values[i : i + 3] for i in range(0, 20, 3)), axes, kernels, tolerance=1e-7, output=tmp_path / "m.npy")
    np.testing.assert_allclose(np.load(tmp_path / "m.npy"), Exact(values, axes, kernels).grid, rtol=0, atol=1e-6)
    assert result.dtype == torch.float64
    assert reduce(lambda a, b: a * b, result.shape) == 600


def test_values_on_a_device(tmp_path):
    """Results stay there, and are the same but for a few more iterations; files and checkpoints are of the host."""
    if standin.UNAVAILABLE:
        pytest.skip(standin.UNAVAILABLE)
    values, axes, kernels, noise = clustered()
    expected = run(values, axes, kernels, noise, tolerance=1e-7)
    on_device = torch.as_tensor(values).to(standin.DEVICE)
    for _ in range(2):  # the second from the checkpoint
        result = run(on_device, axes, kernels, noise, checkpoint=tmp_path / "state.pt", tolerance=1e-7)
        assert whole(result).device == result.at([[0.1, 0.2]]).device == standin.DEVICE
        assert dense.relative(whole(result).cpu(), whole(expected)) < 1e-6
        torch.testing.assert_close(result.at([[0.1, 0.2]]).cpu(), expected.at([[0.1, 0.2]]), rtol=1e-5, atol=1e-5)
    assert result.report.iterations == 0
    result.write(tmp_path / "mean.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "mean.npy"), whole(result).cpu().numpy())


@pytest.mark.parametrize("pattern", ["random", "block"])
def test_threads_do_not_change_the_mean(monkeypatch, pattern):
    axes = lines(40, 36)
    kernels, values = [se(0.15), matern(0.3)], field(axes, pattern)
    expected = whole(run(values, axes, kernels, tolerance=1e-7))
    monkeypatch.setattr("gpytorch_gaps.linalg.masked_grid._MIN_CELLS_FOR_THREADS", 0)
    monkeypatch.setattr("gpytorch_gaps.utils.threads._MIN_FLOPS_FOR_THREADS", 0)
    monkeypatch.setattr("gpytorch_gaps.linalg.masked_grid._TILE_ROWS", 8)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.testing.assert_close(whole(run(values, axes, kernels, tolerance=1e-7)), expected, rtol=0, atol=1e-6)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# -- on a device -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(standin.UNAVAILABLE), reason=standin.UNAVAILABLE)
@pytest.mark.parametrize("pattern", ["random", "block"])
def test_on_a_device_the_residual_is_read_every_ten_iterations(pattern):
    axes = lines(14, 12)
    values = torch.as_tensor(field(axes, pattern=pattern)).double()
    expected = run(values, axes, kernels_for(axes), tolerance=1e-7)
    there = [standin.to_standin(torch.as_tensor(axis)) for axis in axes]
    with standin.count_transfers() as counts:
        result = run(standin.to_standin(values), there, kernels_for(axes), tolerance=1e-7)
    waits = [event for event in counts.events if "sharding.py" in event.where or "weight_space.py" in event.where]
    # besides: a residual and its certificate for every pass, and what is decided once
    passes, decided = result.report.refinements, 14
    assert len(waits) <= result.report.iterations / 10 + 5 * passes + decided, counts.by_line
    assert dense.relative(whole(result).host, whole(expected)) < 1e-7


def test_products_are_full_float32(monkeypatch):
    seen, gram = [], MaskedGrid.gram
    monkeypatch.setattr(
        MaskedGrid,
        "gram",
        lambda *args: seen.append(torch.get_float32_matmul_precision()) or gram(*args),
    )
    torch.set_float32_matmul_precision("high")
    try:
        small()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert set(seen) == {"highest"}
