"""The package before and after its redesign, in one run: seconds of CPU, and ratios.

    python -m benchmarks.redesign OLD NEW

OLD and NEW are folders that hold a checkout each. Every case runs in a process of its own, old and new in turn, and
the fastest of each counts. CPU seconds of one thread do not depend on what else the machine does.
"""

import json
import os
import subprocess
import sys
import time

REPEATS = 3


def _model(shape, share, kernels, noise, seed=0):
    import gpytorch
    import torch

    import gpytorch_gaps as gaps

    class Model(gpytorch.models.ExactGP):
        def __init__(self, x, y, likelihood, grid):
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gaps.GappyGridKernel(kernels, grid))

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    generator = torch.Generator().manual_seed(seed)
    axes = [torch.linspace(0, 1, m, dtype=torch.float64) for m in shape]
    field = torch.sin(6 * axes[0][:, None]) * torch.cos(4 * axes[1])
    values = field + 0.1 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    values[torch.rand(*shape, generator=generator) < share] = torch.nan
    grid, x, y = gaps.from_array(values, axes)
    model = Model(x, y, gaps.GappyGridLikelihood(), grid).double()
    for kernel in model.covar_module.base_kernel.kernels:
        kernel.lengthscale = 0.2
    model.likelihood.noise = noise
    return model, grid, x, y


def training_step(shape=(300, 365), share=0.5, smooth=True):
    import gpytorch
    import torch

    kind = gpytorch.kernels.RBFKernel if smooth else lambda: gpytorch.kernels.MaternKernel(1.5)
    model, _, x, y = _model(shape, share, [kind(), kind()], 0.01)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step():
        torch.manual_seed(0)
        optimizer.zero_grad()
        loss = -mll(model(x), y)
        loss.backward()
        optimizer.step()

    return step


def exact_variance():
    import gpytorch
    import torch

    import gpytorch_gaps as gaps

    model, grid, _, _ = _model((100, 100), 0.6, [gpytorch.kernels.MaternKernel(0.5), gpytorch.kernels.MaternKernel(0.5)], 0.01)
    model.eval()
    points = grid.points()[:6000]

    def run():
        model.train()
        model.eval()
        with torch.no_grad(), gaps.settings.variance_method("exact"), gaps.settings.gap_method("cholesky"):
            return model(points).variance

    return run


def solves():
    import gpytorch
    import torch

    model, _, x, y = _model((100, 100), 0.5, [gpytorch.kernels.MaternKernel(1.5), gpytorch.kernels.MaternKernel(1.5)], 0.01)
    model.eval()
    with torch.no_grad():
        covariance = model.likelihood(model.forward(x)).lazy_covariance_matrix
        columns = torch.randn(len(y), 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def run():
        with torch.no_grad():
            for column in columns.unbind(-1):
                covariance.solve(column.unsqueeze(-1))

    return run


def filling():
    import numpy as np

    import gpytorch_gaps as gaps

    rng = np.random.default_rng(0)
    t, u = np.linspace(0, 1, 96), np.linspace(0, 1, 144)
    values = np.sin(6 * t[:, None]) * np.cos(5 * u) + 0.05 * rng.standard_normal((96, 144))
    values[rng.random((96, 144)) < 0.3] = np.nan
    return lambda: gaps.fill_gaps(values, progress=False)


CASES = {
    "training step, 300 x 365, SE": (training_step, 5),
    "training step, 300 x 365, Matern-3/2": (lambda: training_step(smooth=False), 2),
    "training step, 60 x 60 (exact)": (lambda: training_step((60, 60)), 5),
    "training step, 30 x 40 (exact)": (lambda: training_step((30, 40)), 10),
    "exact variance, 6,000 cells at N = 4,000": (exact_variance, 1),
    "ten solves, 100 x 100": (solves, 3),
    "fill_gaps, 96 x 144": (filling, 1),
}


def measure(name):
    """Seconds of CPU of the fastest of a few calls, after one to warm up."""
    make, calls = CASES[name]
    work, found = make(), []
    if calls > 1:
        work()
    for _ in range(calls):
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return min(found)


def main(old, new, chosen=()):
    print(f"{'case':46s} {'old':>9s} {'new':>9s} {'new/old':>8s}")
    for name in CASES:
        if chosen and not any(word in name for word in chosen):
            continue
        best = {}
        for _ in range(REPEATS):
            for folder in (old, new):
                environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
                command = [sys.executable, "-W", "ignore", __file__, "--case", name]
                found = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
                if found.returncode:
                    print(name, folder, found.stderr[-800:])
                    return
                best[folder] = min(best.get(folder, 1e9), json.loads(found.stdout.splitlines()[-1]))
        print(f"{name:46s} {best[old]:9.3f} {best[new]:9.3f} {best[new] / best[old]:8.2f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--case":
        print(json.dumps(measure(sys.argv[2])))
    else:
        main(sys.argv[1], sys.argv[2], sys.argv[3:])
