"""``gpytorch-gaps fill``: fills the gaps of a file, writes the results and prints a report."""

import argparse
import json
import math
import sys
import textwrap
import time
from datetime import UTC, datetime
from typing import Any

import gpytorch_gaps as gaps
from gpytorch_gaps.cli.beside import arrays_beside
from gpytorch_gaps.cli.files import Outputs, check_outputs, open_input, read_arrays, save_picture
from gpytorch_gaps.cli.masks import distrust
from gpytorch_gaps.filling.arrays.adapters import ArrayAdapter
from gpytorch_gaps.filling.process.report import FillReport
from gpytorch_gaps.formats import Additions, OpenedFile


def run_fill(options: argparse.Namespace, warned: list[str]) -> int:
    """Runs the command.

    :param options: the parsed arguments.
    :param warned: messages of the warnings so far; the JSON output lists them.
    :return: the exit code, 0.
    """
    started = time.perf_counter()
    with open_input(options) as opened:
        distrust(options.untrusted, opened)
        beside = arrays_beside(options, opened)
        values, kinds = read_arrays(opened)
        outputs = check_outputs(options, opened, kinds)
        passed = fill_options(options, kinds, beside)
        result = gaps.fill_gaps(values, opened.axes, **passed, std=_wants_std(options))
        _write(result, opened, outputs, options.flags, kinds)
    seconds = time.perf_counter() - started
    found = result.report if isinstance(result.report, dict) else {next(iter(kinds)): result.report}
    reports = {str(name): report for name, report in found.items()}
    if options.json:
        print(json_text(_as_dict(reports, outputs, options, seconds, warned)))
    elif not options.quiet:
        print(_in_words(reports, outputs, seconds))
    return 0


def fill_options(options: argparse.Namespace, kinds: dict[str, ArrayAdapter], beside: dict[str, Any]) -> dict[str, Any]:
    """The options of the command as keywords of ``fill_gaps``, except `std`.

    :param beside: the mask, the backgrounds and the known errors.
    """
    return {
        "periods": _periods(options),
        "smooth": options.smooth,
        **beside,
        "max_gap": dict(options.max_gap) or None,
        "robust": {"yes": True, "no": False}.get(options.robust, options.robust),
        "transform": options.transform,
        "bounds": options.bounds,
        "joint": _is_joint(options, kinds),
        "check": not options.no_check,
        "steps": options.steps,
        "memory": options.memory * 2**30,
        "budget": options.budget,
        "seed": options.seed,
        "progress": not options.quiet and sys.stderr.isatty(),  # no progress bars in log files
    }


def _periods(options: argparse.Namespace) -> dict[str | int, list[float]] | None:
    """The options ``--period`` in the form for ``fill_gaps``."""
    found: dict[str | int, list[float]] = {}
    for axis, period in options.period:
        found.setdefault(axis, []).extend([] if period is None else [period])
    return found or None


def _is_joint(options: argparse.Namespace, kinds: dict[str, ArrayAdapter]) -> bool:
    if options.joint and len(kinds) < 2:
        raise ValueError(f"--joint: {options.input} has one array to fill, expected several variables")
    return bool(options.joint)


def _wants_std(options: argparse.Namespace) -> bool:
    """Whether standard deviations are written or drawn. They take most of the time."""
    return options.std is not None or bool(options.quantile) or (options.plot is not None and not options.no_std)


def _write(
    result: gaps.Filled, opened: OpenedFile, outputs: Outputs, flags: bool, kinds: dict[str, ArrayAdapter]
) -> None:
    """Writes the results.

    Pictures are drawn first, because the filled file may replace the input. If drawing fails, the filled file is still
    written.
    """
    figures: dict[str, Any] = {}
    failed: Exception | None = None
    try:
        figures = {name: _draw(result, opened.axes, name) for name in kinds if outputs.pictures}
    except Exception as error:
        failed = error
    history = _history(result, kinds)
    std = _std_of_filled(result, every=outputs.every)
    if outputs.std is not None:
        opened.write_deviations(std, outputs.std, history)
    for level, path in outputs.quantiles.items():
        opened.write(result.quantile(level), path, outputs.every, Additions(history))
    additions = Additions(history, flags, std if outputs.both else None)
    opened.write(result.mean, outputs.filled, outputs.every, additions)
    if failed is not None:
        raise ValueError(f"{outputs.filled} is written, but there is no picture of it: {failed}") from failed
    for name, figure in figures.items():
        save_picture(figure, outputs.pictures[name])


def _history(result: gaps.Filled, kinds: dict[str, ArrayAdapter]) -> str:
    """A line for the history of the file, as CF recommends."""
    reports = result.report if isinstance(result.report, dict) else {next(iter(kinds)): result.report}
    words = [f"{name} ({one.num_gaps:,} gaps)".strip() for name, one in reports.items() if one.num_gaps]
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"{now}: gpytorch-gaps {gaps.__version__} filled {', '.join(words) or 'nothing'}"


def _std_of_filled(result: gaps.Filled, every: bool) -> Any:
    """Standard deviations. For a Dataset, only those of variables that were filled."""
    if result.std is None or not hasattr(result.std, "data_vars") or every:
        return result.std
    names = [name for name in result.std.data_vars if result.report[name].num_gaps]
    return result.std[names or list(result.std.data_vars)]


def _draw(result: gaps.Filled, axes: Any, variable: str) -> Any:
    """A figure of one variable: before, after and uncertainty."""
    import matplotlib

    matplotlib.use("Agg")
    from gpytorch_gaps.plot.results import draw_result

    return draw_result(result, axes, variable)


def _in_words(reports: dict[str, FillReport], outputs: Outputs, seconds: float) -> str:
    lines = []
    for name, report in reports.items():
        lines += [f"{name}:"] * bool(name and len(reports) > 1)
        lines.append(textwrap.indent(str(report), "  "))
    lines += [f"  time: {seconds:.3g} s in all", f"  written: {outputs.filled}"]
    lines += [f"    {outputs.path_of_std} (standard deviations)"] * (outputs.path_of_std is not None)
    lines += [f"    {path} ({100 * level:g} % quantiles)" for level, path in outputs.quantiles.items()]
    lines += [f"    {path} (picture)" for path in outputs.pictures.values()]
    return "\n".join(lines)


def _as_dict(
    reports: dict[str, FillReport], outputs: Outputs, options: argparse.Namespace, seconds: float, warned: list[str]
) -> dict[str, Any]:
    return {
        "version": gaps.__version__,
        "input": str(options.input),
        "path": str(outputs.filled),
        "std": None if outputs.path_of_std is None else str(outputs.path_of_std),
        "quantiles": {f"{level:g}": str(path) for level, path in outputs.quantiles.items()},
        "pictures": [str(path) for path in outputs.pictures.values()],
        "seconds": round(seconds, 3),
        "report": {name or "values": report.as_dict() for name, report in reports.items()},
        "warnings": list(warned),
    }


def json_text(content: Any) -> str:
    """JSON. NaN and infinities become null, because JSON does not have them."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): finite(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [finite(one) for one in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(content), indent=2, allow_nan=False)
