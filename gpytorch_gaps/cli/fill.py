"""``gpytorch-gaps fill``: a file with gaps in, the same without them out."""

import argparse
import json
import sys
import time
from typing import Any

import gpytorch_gaps as gaps
from gpytorch_gaps.cli import pictures
from gpytorch_gaps.cli.inputs import kinds_of, values_of
from gpytorch_gaps.cli.outputs import Outputs, checked_outputs
from gpytorch_gaps.cli.parser import periods_of
from gpytorch_gaps.cli.summary import as_json, in_words
from gpytorch_gaps.filling.adapters import ArrayAdapter
from gpytorch_gaps.filling.fill import is_streamed
from gpytorch_gaps.filling.report import FillReport
from gpytorch_gaps.formats import Opened, open_file


def run_fill(options: argparse.Namespace, warned: list[str]) -> int:
    """:param warned: what has been warned of so far, which goes into JSON."""
    started = time.perf_counter()
    with open_file(options.input, options.variable, options.gap_value) as opened:
        values = values_of(opened)
        kinds = kinds_of(opened, values)
        outputs = checked_outputs(options, opened, kinds)
        result = gaps.fill_gaps(
            values,
            opened.axes,
            periods=periods_of(options.period),
            smooth=options.smooth,
            std=_wants_std(options, kinds),
            check=not options.no_check,
            steps=options.steps,
            memory=options.memory * 2**30,
            seed=options.seed,
            progress=not options.quiet and sys.stderr.isatty(),  # a bar in a log file is a mess
        )
        reports = result.report if isinstance(result.report, dict) else {next(iter(kinds)): result.report}
        _write(result, opened, outputs, kinds)
    seconds = time.perf_counter() - started
    _tell({str(name): report for name, report in reports.items()}, outputs, seconds, options, warned)
    return 0


def _wants_std(options: argparse.Namespace, kinds: dict[str, ArrayAdapter]) -> bool:
    """Most of the time goes into standard deviations: nobody should wait for those that nobody sees."""
    if options.std is not None:
        for name, kind in kinds.items():
            if is_streamed(kind):
                size = " x ".join(map(str, kind.shape))
                raise ValueError(
                    f"--std: {name or 'the array'} has {size} cells, too many: they are filled piece by piece, without "
                    "standard deviations; leave --std out, or take a part"
                )
    return options.std is not None or (options.plot is not None and not options.no_std)


def _write(result: gaps.Filled, opened: Opened, outputs: Outputs, kinds: dict[str, ArrayAdapter]) -> None:
    """The filling last but for pictures: they are drawn before, as it may replace what it was made from; and one that
    cannot be drawn must not cost the filling."""
    figures: dict[str, Any] = {}
    failed: Exception | None = None
    try:
        figures = {name: pictures.draw(result, opened.axes, name or None) for name in kinds if outputs.pictures}
    except Exception as error:
        failed = error
    if outputs.std is not None:
        opened.write_deviations(result.std, outputs.std)
    opened.write(result.mean, outputs.filled, lossless=outputs.every)
    if failed is not None:
        raise ValueError(f"{outputs.filled} is written, but there is no picture of it: {failed}") from failed
    for name, figure in figures.items():
        pictures.save(figure, outputs.pictures[name])


def _tell(
    reports: dict[str, FillReport],
    outputs: Outputs,
    seconds: float,
    options: argparse.Namespace,
    warned: list[str],
) -> None:
    if options.json:
        print(json.dumps(as_json(reports, outputs, options.input, seconds, warned), indent=2, allow_nan=False))
    elif not options.quiet:
        print(in_words(reports, outputs, seconds))
