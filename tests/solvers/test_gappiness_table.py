"""The paper's 10,000-cell stress test: `auto` reaches a true residual of 1e-6 at every gappiness and noise."""

import pytest
import torch

from benchmarks.gappiness import rastrigin_problem, run_method


@pytest.mark.parametrize("noise", [1e-6, 1e-2])
@pytest.mark.parametrize("gappiness", [0.1, 0.3, 0.5, 0.7, 0.9, 0.2, 0.4, 0.6, 0.8])
def test_auto_converges_everywhere(noise, gappiness):
    system, rhs = rastrigin_problem(noise, gappiness, seed=0)
    solution, report = run_method("auto", system, rhs)
    residual = rhs - system.dense() @ solution
    assert (residual.norm(dim=0) <= 1e-6 * rhs.norm(dim=0)).all()
    assert report.converged
    torch.testing.assert_close(report.residual, residual.norm(dim=0) / rhs.norm(dim=0), rtol=0.2, atol=2e-9)
