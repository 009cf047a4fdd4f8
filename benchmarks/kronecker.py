"""Kronecker products in GFLOP/s: ours, linear_operator's, and a plain GEMM, in one run.

    python -m benchmarks.kronecker --json results/kronecker.json

The three methods run in turn, and the best of several runs counts, so that other load affects all of them equally. The
GEMM multiplies matrices of 1500 x 1500, which is large enough for the full rate of BLAS. Right-hand sides have the
layout that GPyTorch users have: (M, C), contiguous.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from linear_operator.operators import KroneckerProductLinearOperator
from torch import Tensor

from benchmarks._machine import machine_facts
from gpytorch_gaps.linalg.products import kron_matmul, kron_matmul_flops

SHAPES = ((240, 216, 121), (1000, 1000), (56, 366, 291, 2))
GEMM = 1500
MIN_SPEEDUP, MIN_FRACTION = 1.2, 0.6


def best_times(contenders: dict[str, Callable[[], Tensor]], repeats: int) -> dict[str, float]:
    best = dict.fromkeys(contenders, math.inf)
    for _ in range(repeats):
        for name, run in contenders.items():
            started = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - started)
    return best


def measure(shape: tuple[int, ...], dtype: torch.dtype, columns: int, repeats: int) -> dict[str, float]:
    """GFLOP/s of each contender."""
    factors = [torch.randn(m, m, dtype=dtype) / math.sqrt(m) for m in shape]
    x = torch.randn(math.prod(shape), columns, dtype=dtype)
    square = torch.randn(GEMM, GEMM, dtype=dtype)
    theirs = KroneckerProductLinearOperator(*factors)
    contenders: dict[str, Callable[[], Tensor]] = {
        "gemm": lambda: square @ square,
        "linear_operator": lambda: theirs._matmul(x),
        "ours": lambda: kron_matmul(factors, x),
    }
    times = best_times(contenders, repeats)
    flops = kron_matmul_flops([(m, m) for m in shape], columns)
    return {name: (2 * GEMM**3 if name == "gemm" else flops) / times[name] / 1e9 for name in contenders}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=4, help="number of runs of each method")
    parser.add_argument("--json", type=Path, help="where the results go")
    options = parser.parse_args()
    facts = machine_facts()
    print(", ".join(f"{key}: {value}" for key, value in facts.items()))
    print("| shape | dtype | rhs | GEMM | linear_operator | ours | ours / linear_operator | ours / GEMM |")
    print("|---|---|---|---|---|---|---|---|")
    rows, speedups, fractions = [], [], []
    with torch.no_grad():
        for shape in SHAPES:
            for dtype in (torch.float32, torch.float64):
                for columns in (1, 8):
                    rates = measure(shape, dtype, columns, options.repeats)
                    speedup, fraction = rates["ours"] / rates["linear_operator"], rates["ours"] / rates["gemm"]
                    speedups.append(speedup)
                    if shape in SHAPES[:2]:
                        fractions.append(fraction)
                    name = str(dtype).removeprefix("torch.")
                    print(
                        f"| {' x '.join(map(str, shape))} | {name} | {columns} | {rates['gemm']:.0f} "
                        f"| {rates['linear_operator']:.0f} | {rates['ours']:.0f} | {speedup:.2f} | {fraction:.2f} |",
                        flush=True,
                    )
                    rows.append({"shape": shape, "dtype": name, "columns": columns, **rates})
    mean = math.exp(sum(map(math.log, speedups)) / len(speedups))
    print(
        f"{'PASS' if mean >= MIN_SPEEDUP else 'MISS'}: {mean:.2f}x linear_operator, geometric mean (>= {MIN_SPEEDUP})"
    )
    worst = min(fractions)
    print(
        f"{'PASS' if worst >= MIN_FRACTION else 'miss'}: at least {worst:.2f} of GEMM on the first two shapes "
        f"(>= {MIN_FRACTION})"
    )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": facts, "rows": rows, "speedup": mean}, indent=1))


if __name__ == "__main__":
    main()
