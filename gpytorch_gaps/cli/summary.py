"""What was done, in a few lines or as JSON."""

import math
from pathlib import Path
from typing import Any

from gpytorch_gaps import __version__
from gpytorch_gaps.cli.outputs import Outputs
from gpytorch_gaps.filling.report import FillReport


def in_words(reports: dict[str, FillReport], outputs: Outputs, seconds: float) -> str:
    lines = []
    for name, report in reports.items():
        lines += [f"{name}:"] * bool(name and len(reports) > 1)
        lines += _of_one(report)
    lines.append(_line("time", f"{seconds:.3g} s in all"))
    lines.append(_line("written", str(outputs.filled)))
    if outputs.std is not None:
        lines.append(_line("", f"{outputs.std} (standard deviations)"))
    lines += [_line("", f"{path} (picture)") for path in outputs.pictures.values()]
    return "\n".join(lines)


def _of_one(report: FillReport) -> list[str]:
    size = " x ".join(map(str, report.shape))
    lines = [_line("cells", f"{size}, {report.num_gaps:,} gaps ({100 * report.num_gaps / report.num_cells:.3g} %)")]
    if report.seconds:
        parts = ", ".join(f"{what} {seconds:.3g} s" for what, seconds in report.seconds.items())
        lines.append(_line("took", parts))
    if report.kernel:
        noise = "" if report.noise_std is None else f"; noise {report.noise_std:.3g}"
        lines.append(_line("kernel", f"{report.kernel}{noise}"))
    if report.solve is not None:
        solve = report.solve
        state = "" if solve.converged else ", NOT CONVERGED"
        done = f"{solve.iterations} iterations, relative residual {solve.worst_residual:.1e}{state}"
        lines.append(_line("method", f"{solve.method}, {done}"))
    if report.held_out is not None:
        lines.append(_line("check", f"{report.expected_error}; {report.held_out.count:,} cells were withheld"))
    elif report.expected_rmse is not None:
        lines.append(_line("expected", f"{report.expected_error} (estimated by the model)"))
    if report.std_method:
        lines.append(_line("std", report.std_method))
    return lines + [_line("note", note) for note in report.notes]


def _line(what: str, words: str) -> str:
    return f"  {what:<9}{words}"


def as_json(
    reports: dict[str, FillReport], outputs: Outputs, source: Path, seconds: float, warned: list[str]
) -> dict[str, Any]:
    """:param warned: what was warned of."""
    return plain(
        {
            "version": __version__,
            "input": str(source),
            "path": str(outputs.filled),
            "std": None if outputs.std is None else str(outputs.std),
            "pictures": [str(path) for path in outputs.pictures.values()],
            "seconds": round(seconds, 3),
            "report": {name or "values": report.as_dict() for name, report in reports.items()},
            "warnings": list(warned),
        }
    )


def plain(value: Any) -> Any:
    """What JSON takes: it has neither NaN nor infinities."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
