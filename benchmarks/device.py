"""Products, an iteration, a training step and a prediction, on the available device: CUDA, MPS or the CPU.

    python -m benchmarks.device
    python -m benchmarks.device --device cuda --cells 1000000 --json results/device.json

The same code runs on every device. One run measures: GFLOP/s of Kronecker products, compared with a square matrix
product in the same precision; an iteration of conjugate gradients, compared with the product that it contains; a step
of Adam on the marginal likelihood; and the mean of every cell and the variance of a few cells. The number of iterations
is printed too. The host waits for the device before a clock is read. float32 products have full float32 precision: see
`gpytorch_gaps.utils.precision`.
"""

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gpytorch
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

import gpytorch_gaps as gaps
from benchmarks._machine import machine_facts
from gpytorch_gaps.linalg.products import kron_matmul, kron_matmul_flops
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.krylov import conjugate_gradients
from gpytorch_gaps.utils.precision import full_float32

GAPPINESS, NOISE, LENGTH = 0.3, 1e-2, 0.1
ITERATIONS = 20  # timed at once
VARIANCES = 32  # cells, or a few more
HEAD = "| | precision | ms | GFLOP/s | ratio | iterations | peak MiB |\n|---|---|---|---|---|---|---|"
NO_FLOAT64 = "{} has no float64, which solves need: float32 products only."


@dataclass
class Row:
    """One measurement; what does not apply is None."""

    what: str
    dtype: str
    milliseconds: float
    gflops: float | None = None  # a second
    ratio: float | None = None
    relative_to: str = ""
    iterations: int | None = None
    peak_mib: float | None = None


# -- the device --------------------------------------------------------------------------------------------------------


def default_device() -> torch.device:
    """The accelerator that is present, or the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else found


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return machine_facts()["cpu"]
    tell = getattr(_module(device), "get_device_name", None)
    return str(device) if tell is None else f"{tell(device)} ({device})"


def has_float64(device: torch.device) -> bool:
    try:
        torch.ones(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def _module(device: torch.device) -> Any:
    return getattr(torch, device.type)


def wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(_module(device), "synchronize", lambda: None)()


def timed(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Seconds of the best of some calls, after one that sets things up."""
    run()
    best = math.inf
    for _ in range(repeats):
        wait_for(device)
        started = time.perf_counter()
        run()
        wait_for(device)
        best = min(best, time.perf_counter() - started)
    return best


def start_memory(device: torch.device) -> None:
    reset = getattr(_module(device), "reset_peak_memory_stats", None)
    if reset is not None:
        reset(device)


def peak_mib(device: torch.device) -> float | None:
    """Peak memory since :func:`start_memory`; None if the device does not report it."""
    tell = getattr(_module(device), "max_memory_allocated", None)
    return None if tell is None else tell(device) / 2**20


# -- what is measured --------------------------------------------------------------------------------------------------


def sides(cells: int, axes: int) -> tuple[int, ...]:
    """The sides of a grid of about so many cells."""
    return (max(2, round(cells ** (1.0 / axes))),) * axes


def products(device: torch.device, dtype: torch.dtype, cells: int, gemm: int, repeats: int) -> list[Row]:
    """Kronecker products with one column, beside a matrix product of gemm x gemm."""
    name, rows = str(dtype).removeprefix("torch."), []
    square = torch.randn(gemm, gemm, dtype=dtype, device=device)
    with full_float32(), torch.no_grad():
        seconds = timed(lambda: square @ square, device, repeats)
        rate = 2.0 * gemm**3 / seconds / 1e9
        rows.append(Row(f"{gemm} x {gemm} matrix product", name, 1e3 * seconds, rate))
        for shape in (sides(cells, 2), sides(cells, 3)):
            factors = [torch.randn(m, m, dtype=dtype, device=device) / math.sqrt(m) for m in shape]
            x = torch.randn(math.prod(shape), 1, dtype=dtype, device=device)
            seconds = timed(lambda factors=factors, x=x: kron_matmul(factors, x), device, repeats)  # type: ignore[misc]
            own = kron_matmul_flops([(m, m) for m in shape]) / seconds / 1e9
            what = f"Kronecker product, {' x '.join(map(str, shape))}"
            rows.append(Row(what, name, 1e3 * seconds, own, own / rate, "the matrix product's rate"))
    return rows


def iteration(device: torch.device, dtype: torch.dtype, cells: int, repeats: int) -> Row:
    """One of conjugate gradients on ``W K W' + s2 I``, with a look at the residual where one is made."""
    shape = sides(cells, 2)
    axes = [torch.linspace(0, 1, size, dtype=torch.float64, device=device) for size in shape]
    factors = [torch.exp(-(axis.unsqueeze(-1) - axis).abs() / LENGTH) for axis in axes]
    observed = torch.rand(math.prod(shape), device=device) >= GAPPINESS
    noise = torch.full((1,), NOISE, dtype=torch.float64, device=device)
    system = GapSystem(factors, observed.nonzero().squeeze(-1), noise)
    rhs = torch.randn(system.num_train, 1, dtype=dtype, device=device)

    def iterate() -> None:
        conjugate_gradients(
            system.matmul, rhs, stop=lambda residual: (residual.norm(dim=-2) < 0).all(), max_iterations=ITERATIONS
        )

    with full_float32(), torch.no_grad():
        product = timed(lambda: system.matmul(rhs), device, repeats)
        seconds = timed(iterate, device, repeats) / ITERATIONS
    rate = system.product_flops / seconds / 1e9
    name = str(dtype).removeprefix("torch.")
    return Row("iteration of conjugate gradients", name, 1e3 * seconds, rate, seconds / product, "its product's time")


class Model(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, likelihood: Any, grid: gaps.CartesianGrid) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        kernels = [RBFKernel(), MaternKernel(nu=1.5)]
        for kernel in kernels:
            kernel.lengthscale = LENGTH
        self.covar_module = ScaleKernel(gaps.GappyGridKernel(kernels, grid))

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def model_on(device: torch.device, cells: int) -> tuple[Model, gaps.CartesianGrid]:
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.linspace(0, 1, size, dtype=torch.float64) for size in sides(cells, 2))
    values = torch.sin(9 * first.unsqueeze(-1)) * torch.cos(7 * second)
    values = values + math.sqrt(NOISE) * torch.randn(values.shape, generator=generator, dtype=torch.float64)
    values[torch.rand(values.shape, generator=generator) < GAPPINESS] = math.nan
    grid, x, y = gaps.from_array(values, [first, second])
    model = Model(x, y, gaps.GappyGridLikelihood(), grid).double()
    model.likelihood.noise = NOISE
    return model.to(device), grid


def training_step(device: torch.device, cells: int, repeats: int, mixed: bool) -> Row:
    """Forward, backward and Adam."""
    model, _ = model_on(device, cells)
    model.train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        (-mll(model(*model.train_inputs), model.train_targets)).backward()
        optimizer.step()

    return _of_model("training step", step, device, repeats, mixed)


def prediction(device: torch.device, cells: int, repeats: int, mixed: bool) -> Row:
    """The mean of every cell and the variance of a few, from nothing."""
    model, grid = model_on(device, cells)
    points = grid.points()
    some = points[:: max(1, len(points) // VARIANCES)]

    def predict() -> None:
        model.train()  # forgets what the last prediction worked out
        model.eval()
        with torch.no_grad():
            _ = model(points).mean, model(some).variance

    return _of_model(f"mean of every cell, variance of {len(some)}", predict, device, repeats, mixed)


def _of_model(what: str, run: Callable[[], None], device: torch.device, repeats: int, mixed: bool) -> Row:
    start_memory(device)
    with gaps.settings.mixed_precision(mixed), gaps.settings.progress(False), gaps.record_solves() as solves:
        seconds = timed(run, device, repeats)
    calls = repeats + 1
    name = "float32, refined" if mixed else "float64"
    flops = sum(report.flops for report in solves) / calls
    iterations = round(sum(report.iterations for report in solves) / calls)
    return Row(what, name, 1e3 * seconds, flops / seconds / 1e9, iterations=iterations, peak_mib=peak_mib(device))


def measure(device: torch.device, cells: int, gemm: int, repeats: int) -> Iterator[Row]:
    """All that the device can do."""
    yield from products(device, torch.float32, cells, gemm, repeats)
    if not has_float64(device):
        return
    yield from products(device, torch.float64, cells, gemm, repeats)
    for dtype in (torch.float32, torch.float64):
        yield iteration(device, dtype, cells, repeats)
    for mixed in (False, True):
        yield training_step(device, cells, repeats, mixed)
        yield prediction(device, cells, repeats, mixed)


def line(row: Row) -> str:
    ratio = "" if row.ratio is None else f"{row.ratio:.2f} of {row.relative_to}"
    cells = [f"{row.milliseconds:.3g}", _told(row.gflops), ratio, _told(row.iterations), _told(row.peak_mib)]
    return f"| {row.what} | {row.dtype} | {' | '.join(cells)} |"


def _told(number: float | None) -> str:
    return "" if number is None else f"{number:.3g}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, help="cuda, mps or cpu; default: the available accelerator")
    parser.add_argument("--cells", type=int, default=100_000, help="number of cells of the grid")
    parser.add_argument("--gemm", type=int, default=1500, help="size of the matrix product that serves as reference")
    parser.add_argument("--repeats", type=int, default=3, help="number of repeats; the best one counts")
    parser.add_argument("--json", type=Path, help="where the results go")
    options = parser.parse_args(arguments)
    device = options.device or default_device()
    warnings.filterwarnings("ignore", category=UserWarning)
    facts = {"device": device_name(device), **machine_facts()}
    print(", ".join(f"{key}: {value}" for key, value in facts.items()))
    if not has_float64(device):
        print(NO_FLOAT64.format(facts["device"]))
    torch.manual_seed(0)
    print(HEAD)
    rows = []
    for row in measure(device, options.cells, options.gemm, options.repeats):
        print(line(row), flush=True)
        rows.append(row)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": facts, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
