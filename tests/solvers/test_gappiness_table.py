"""The paper's 10,000-cell stress test: `auto` reaches a true residual of 1e-6 at every gappiness and noise."""

import pytest
import torch

from benchmarks.gappiness import SIZE, rastrigin_problem, run_method, squared_exponential, tuned_lengthscale


@pytest.mark.parametrize("noise", [1e-6, 1e-2])
@pytest.mark.parametrize("gappiness", [0.1, 0.3, 0.5, 0.7, 0.9, 0.2, 0.4, 0.6, 0.8])
def test_auto_converges_everywhere(noise, gappiness):
    system, rhs = rastrigin_problem(noise, gappiness, seed=0)
    solution, report = run_method("auto", system, rhs)
    factor, field = squared_exponential(tuned_lengthscale(noise)), torch.zeros(SIZE, SIZE, dtype=torch.float64)
    field.view(-1)[system.train_index] = solution.squeeze(-1)
    residual = rhs - (factor @ field @ factor).view(-1, 1)[system.train_index] - noise * solution
    assert (residual.norm(dim=0) <= 1e-6 * rhs.norm(dim=0)).all()
    assert report.converged
    torch.testing.assert_close(report.residual, residual.norm(dim=0) / rhs.norm(dim=0), rtol=0.2, atol=2e-9)
