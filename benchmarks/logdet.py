"""Log-determinants on a 45 x 40 grid with 50 % random gaps: bias and standard deviation of a probe, in nats.

    python -m benchmarks.logdet --json results/logdet.json

The dense value is compared with ours, on the chosen side and on both sides by request, with the paper's Nystrom sum,
and with linear_operator's Lanczos quadrature at its own settings. The kernel is Matern-3/2 x squared-exponential, with
three levels of noise.
"""

import argparse
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path

import linear_operator
import torch
from linear_operator.operators import AddedDiagLinearOperator, ConstantDiagLinearOperator, MaskedLinearOperator
from linear_operator.operators import KroneckerProductLinearOperator as TheirKronecker
from torch import Tensor

from benchmarks._machine import machine_facts
from gpytorch_gaps import record_solves, settings
from gpytorch_gaps.linalg.selection import kron_block
from gpytorch_gaps.operators import SelectedKroneckerOperator

SHAPE = (45, 40)


def factors() -> list[Tensor]:
    first, second = (torch.linspace(0, 1, m, dtype=torch.float64) for m in SHAPE)
    rough = math.sqrt(3.0) * (first.unsqueeze(-1) - first).abs() / 0.3
    return [(1 + rough) * torch.exp(-rough), torch.exp(-(((second.unsqueeze(-1) - second) / 0.2) ** 2))]


def repeat(draw: Callable[[], float], repeats: int) -> tuple[float, float]:
    """Mean, and standard deviation of a draw."""
    values = torch.tensor([draw() for _ in range(repeats)], dtype=torch.float64)
    return float(values.mean()), float(values.std())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", nargs="+", type=float, default=[1e-1, 1e-2, 1e-3])
    parser.add_argument("--probes", type=int, default=10, help="probes of one estimate")
    parser.add_argument("--repeats", type=int, default=20, help="number of estimates")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    facts = machine_facts()
    print(", ".join(f"{key}: {value}" for key, value in facts.items()))
    print(f"{options.repeats} estimates of {options.probes} probes each")
    print("| noise | method | truth | bias | deviation of a probe | stated, of a probe |")
    print("|---|---|---|---|---|---|")
    torch.manual_seed(0)
    cells = math.prod(SHAPE)
    index = torch.randperm(cells)[: cells // 2].sort().values
    mask = torch.zeros(cells, dtype=torch.bool).index_fill(0, index, True)
    rows = []
    for noise in options.noise:
        level = torch.tensor([noise], dtype=torch.float64)
        ours = SelectedKroneckerOperator(*factors(), row_index=index).add_diagonal(level)
        dense = kron_block(factors(), index, index) + noise * torch.eye(len(index), dtype=torch.float64)
        truth = float(torch.linalg.slogdet(dense).logabsdet)
        stated: list[float] = []

        def estimate(operator: linear_operator.LinearOperator = ours, stated: list[float] = stated) -> float:
            with record_solves() as solves, torch.no_grad():
                value = float(operator.logdet())
            error = solves.logdets[-1].standard_error
            stated.append(math.nan if error is None else float(error) * math.sqrt(options.probes))
            return value

        def upstream(level: Tensor = level) -> float:
            base = MaskedLinearOperator(TheirKronecker(*factors()), mask, mask)
            with torch.no_grad(), warnings.catch_warnings(), linear_operator.settings.max_cholesky_size(0):
                warnings.simplefilter("ignore")
                return float(AddedDiagLinearOperator(base, ConstantDiagLinearOperator(level, len(index))).logdet())

        contenders: dict[str, tuple[str, int | None, Callable[[], float]]] = {
            "exact": ("exact", None, estimate),
            "stochastic, chosen side": ("stochastic", None, estimate),
            "stochastic, data side, rank 200": ("stochastic", 200, estimate),
            "stochastic, data side, rank 0": ("stochastic", 0, estimate),
            "nystrom": ("nystrom", None, estimate),
            "linear_operator": ("stochastic", None, upstream),
        }
        for name, (method, rank, draw) in contenders.items():
            stated.clear()
            with (
                settings.logdet_method(method),
                settings.preconditioner_rank(rank),
                linear_operator.settings.num_trace_samples(options.probes),
            ):
                mean, deviation = repeat(draw, options.repeats)
            probe = deviation * math.sqrt(options.probes)
            claim = sum(stated) / len(stated) if stated else math.nan
            print(f"| {noise:g} | {name} | {truth:.1f} | {mean - truth:.2f} | {probe:.2f} | {claim:.2f} |", flush=True)
            rows.append({"noise": noise, "method": name, "truth": truth, "bias": mean - truth, "deviation": probe})
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
