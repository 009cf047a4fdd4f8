"""Single faults that were found once, each by the smallest example that showed it."""

import linear_operator
import pytest
import torch
from gpytorch.kernels import PolynomialKernel, RBFKernel, ScaleKernel
from linear_operator.operators import ConstantDiagLinearOperator

import gpytorch_gaps as gaps
from gpytorch_gaps.operators import SelectedKroneckerOperator
from tests import _dense as dense
from tests.workflow._pairs import Model


def test_rows_and_columns_with_other_strides_are_other_cells():
    """Slices may share their first cell and their length, and differ in all others."""
    operator = SelectedKroneckerOperator(dense.random_psd(3), dense.random_psd(3, seed=1))
    part = operator[0:9:2, 0:5]
    assert not part.is_symmetric
    noisy = part.add_diagonal(torch.tensor(0.1, dtype=torch.float64))
    expected = part.to_dense() + 0.1 * torch.eye(5, dtype=torch.float64)
    assert torch.allclose(noisy.to_dense(), expected)
    assert not isinstance(noisy, gaps.operators.SelectedKroneckerAddedDiagOperator)


@pytest.mark.parametrize("kernel", [RBFKernel, lambda: PolynomialKernel(2)])
def test_a_smooth_kernel_of_several_axes_beside_a_grid_kernel(kernel):
    """Its pivoted Cholesky decomposition ends long before the rank that was asked for."""
    t = torch.linspace(0, 1, 12, dtype=torch.float64)
    values = torch.sin(6 * t[:, None]) * torch.cos(4 * t)
    values[3:6, 3:6] = torch.nan
    grid, x, y = gaps.from_array(values, [t, t])
    model = Model(x, y, gaps.GappyGridLikelihood(), gaps.GappyGridKernel([RBFKernel(), RBFKernel()], grid) + kernel())
    with linear_operator.settings.max_cholesky_size(0):
        history = gaps.fit(model.double(), steps=2, progress=False)
        assert all(residual < 1e-5 for residual in history.worst_residual)
        mean = model(grid.points()).mean
    covariance = model.covar_module(x).to_dense() + model.likelihood.noise * torch.eye(len(y), dtype=torch.float64)
    offset = y - model.mean_module.constant
    cross = model.covar_module(grid.points(), x).to_dense()
    expected = model.mean_module.constant + cross @ torch.linalg.solve(covariance, offset)
    assert torch.allclose(mean, expected, atol=1e-5)


def test_an_indefinite_kernel_is_not_rounded_away():
    """Eigenvalues below zero but above minus the noise leave the system positive definite, and it is the one solved."""
    values = torch.zeros(40, dtype=torch.float64)
    values[:5] = torch.tensor([100.0, 50.0, 20.0, 5.0, 1.0], dtype=torch.float64)
    values[-1] = -8e-4
    basis = torch.linalg.qr(dense.randn(40, 40)).Q
    factor = basis @ torch.diag(values) @ basis.mT
    factor = 0.5 * (factor + factor.mT)
    index = torch.arange(0, 1600, 2)
    smooth = dense.se(40, theta=2.0)
    noise = 1e-3 * float(torch.linalg.eigvalsh(smooth)[-1])
    operator = SelectedKroneckerOperator(factor, smooth, row_index=index).add_diagonal(
        torch.tensor(noise, dtype=torch.float64)
    )
    rhs = dense.randn(len(index), 1)
    with linear_operator.settings.max_cholesky_size(0), gaps.record_solves() as solves:
        solution = operator.solve(rhs)
    matrix = dense.select(dense.kron([factor, smooth]), index) + noise * torch.eye(len(index), dtype=torch.float64)
    assert torch.linalg.eigvalsh(matrix)[0] > 0
    residual = float((matrix @ solution - rhs).norm() / rhs.norm())
    assert residual < 2 * solves[-1].worst_residual + 1e-9


def test_a_batch_of_scales_of_a_noisy_sum():
    index = torch.arange(0, 9, 2)
    terms = [
        SelectedKroneckerOperator(dense.random_psd(3, s), dense.random_psd(3, s + 2), row_index=index) for s in (0, 1)
    ]
    noisy = terms[0] + terms[1] + ConstantDiagLinearOperator(torch.tensor([0.3], dtype=torch.float64), 5)
    scales = torch.tensor([1.0, 2.0], dtype=torch.float64).view(2, 1, 1)
    assert torch.allclose(noisy.mul(scales).to_dense(), noisy.to_dense() * scales)


def test_another_known_noise_is_another_problem(tmp_path):
    """A checkpoint holds the known noise: resuming from it would replace the user's."""
    t = torch.linspace(0, 1, 6, dtype=torch.float64)
    grid, x, y = gaps.from_array(torch.sin(t[:, None] + t), [t, t])

    def model(noise):
        kernel = ScaleKernel(gaps.GappyGridKernel([RBFKernel(), RBFKernel()], grid))
        return Model(x, y, gaps.GappyGridLikelihood(torch.full((36,), noise, dtype=torch.float64)), kernel).double()

    gaps.fit(model(0.1), steps=1, progress=False, checkpoint=tmp_path / "run.pt")
    with pytest.raises(ValueError, match="known noise"):
        gaps.fit(model(0.5), steps=2, progress=False, checkpoint=tmp_path / "run.pt")


def test_messages_name_the_argument():
    t = torch.linspace(0, 1, 6, dtype=torch.float64)
    grid, x, y = gaps.from_array(torch.sin(t[:, None] + t), [t, t])
    with pytest.raises(ValueError, match="kernels: got one RBFKernel, expected a list"):
        gaps.GappyGridKernel(RBFKernel(), grid)
    with pytest.raises(ValueError, match=r"kernels: axis 1: got active_dims=\[1\], expected columns of that axis only"):
        gaps.GappyGridKernel([RBFKernel(active_dims=[0]), RBFKernel(active_dims=[1])], grid)
    kernel = gaps.GappyGridKernel([RBFKernel(), RBFKernel()], grid)
    model = Model(x, y.unsqueeze(-1), gaps.GappyGridLikelihood(), kernel).double()
    with pytest.raises(ValueError, match=r"fit: model: got train_targets of shape \(36, 1\), expected"):
        gaps.fit(model, steps=1, progress=False)
    y = y.clone()
    y[3] = torch.nan
    with pytest.raises(ValueError, match="NaN among the training targets are gaps"):
        gaps.fit(Model(x, y, gaps.GappyGridLikelihood(), kernel).double(), steps=1, progress=False)
    with pytest.warns(UserWarning, match="points make a grid of 120 x 120 cells, nearly all of them gaps"):
        gaps.from_points(torch.rand(120, 2), torch.rand(120))


def test_fit_does_not_go_dense_because_of_a_setting_of_the_process():
    """Importing BoTorch turns fast log-likelihoods off for everyone."""
    t = torch.linspace(0, 1, 8, dtype=torch.float64)
    grid, x, y = gaps.from_array(torch.sin(t[:, None] + t), [t, t])
    model = Model(x, y, gaps.GappyGridLikelihood(), gaps.GappyGridKernel([RBFKernel(), RBFKernel()], grid)).double()
    with linear_operator.settings.fast_computations(log_prob=False), gaps.record_solves() as solves:
        gaps.fit(model, steps=2, progress=False)
    assert len(solves) == 2
    assert len(solves.logdets) == 2


def test_linear_operators_own_estimate_with_noise_per_axis():
    """It knows nothing of whitening: what it solves must be the matrix itself."""
    shape, index = (9, 8), dense.observed("random", (9, 8))
    noise = (0.1 + torch.rand(9, dtype=torch.float64), 0.5 + torch.rand(8, dtype=torch.float64))
    factors = [dense.matern32(9), dense.se(8, 0.2)]
    operator, matrix = dense.build(factors, index, noise), dense.system(factors, index, noise)
    assert matrix.shape[-1] == len(index) < shape[0] * shape[1]
    y = dense.randn(len(index), 1)
    solution, lanczos = operator._solve(y, None, 1)
    assert lanczos.shape[0] == 1
    torch.testing.assert_close(matrix @ solution, y, rtol=0, atol=1e-5)
