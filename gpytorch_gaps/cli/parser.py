"""The arguments of the command line. Imports only the standard library, so that ``--help`` is quick."""

import argparse
from pathlib import Path

from gpytorch_gaps.cli.arguments import bounds, condition, integer, max_gap, period, positive, quantile

_FORMATS = ".npy, .npz, .nc, .zarr, .csv, .tif or .png"

_EXAMPLES = """examples:
  gpytorch-gaps inspect sst.nc
  gpytorch-gaps fill sst.nc -o filled.nc --std uncertainty.nc --plot before_after.png
  gpytorch-gaps report sst.nc -o report.html
  gpytorch-gaps fill photo.png -o mended.png --gap-value 0
  gpytorch-gaps demo

exit codes: 0 success, 1 the data or a file could not be handled, 2 wrong usage, 130 interrupted
"""

_FILL_EXAMPLES = """examples:
  gpytorch-gaps fill sst.nc -o filled.nc
  gpytorch-gaps fill sst.nc -o filled.nc --variable sst --std std.nc --plot sst.png
  gpytorch-gaps fill tides.csv -o filled.csv --period time=0.5175 --period time=14.765
  gpytorch-gaps fill long.csv -o filled.csv --index date --columns station --value t

Observed values and everything else in the file are written unchanged, bit for bit, except for a line of history.
Arrays of more than four million cells are filled in pieces, with standard deviations from draws.
"""

_REPORT_EXAMPLES = """example:
  gpytorch-gaps report sst.nc -o report.html
"""

_INSPECT_EXAMPLES = """example:
  gpytorch-gaps inspect sst.nc --json
"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of ``gpytorch-gaps`` with its commands fill, report, inspect and demo."""
    parser = argparse.ArgumentParser(
        prog="gpytorch-gaps",
        description="Fills the gaps of gridded data with exact Gaussian processes and reports the uncertainty.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_fill(commands)
    _add_report(commands)
    _add_inspect(commands)
    _add_demo(commands)
    return parser


class _Version(argparse.Action):
    """Prints the version. It is looked up only on request, because this takes some time."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from gpytorch_gaps import __version__

        print(f"gpytorch-gaps {__version__}")
        parser.exit()


def _add_fill(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "fill",
        help="fill the gaps of a file",
        description="Fills the gaps of a file: NaN, masked or transparent cells, or cells of a given value.",
        epilog=_FILL_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_input(parser)
    files = parser.add_argument_group("results")
    files.add_argument("-o", "--output", metavar="OUT", type=Path, required=True, help=f"filled file: {_FORMATS}")
    either = files.add_mutually_exclusive_group()
    either.add_argument(
        "--std",
        metavar="FILE",
        type=Path,
        help="file for standard deviations: any of these formats except .png; OUT for both in one file",
    )
    files.add_argument(
        "--quantile", metavar="P=FILE", action="append", default=[], type=quantile,
        help="a file like OUT with quantiles in the gaps; a value is below its quantile with probability P; repeatable",
    )  # fmt: skip
    either.add_argument("--no-std", action="store_true", help="no standard deviations (faster)")
    files.add_argument(
        "--flags", action="store_true",
        help="add a variable NAME_filled_flag: observed, filled, not filled (.nc and .zarr)",
    )  # fmt: skip
    files.add_argument("--plot", metavar="PICTURE", type=Path, help="picture of the result: .png, .pdf or .svg")
    files.add_argument("--force", action="store_true", help="replace existing files")
    _add_model(parser)
    messages = parser.add_argument_group("messages")
    either = messages.add_mutually_exclusive_group()
    either.add_argument("--quiet", action="store_true", help="print errors only")
    either.add_argument("--json", action="store_true", help="print one JSON object")
    _add_traceback(messages)


def _add_report(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "report",
        help="fill the gaps of a file, and write a page with pictures and scores",
        description="Fills the gaps of a file, and writes an HTML page: before and after, error bars, scores of "
        "withheld observations, the model in words, and the assumptions about each axis.",
        epilog=_REPORT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_input(parser)
    files = parser.add_argument_group("results")
    files.add_argument("-o", "--output", metavar="PAGE", type=Path, required=True, help="the page: .html")
    files.add_argument("--no-std", action="store_true", help="no standard deviations (faster)")
    files.add_argument(
        "--folds", metavar="N", type=integer(0), default=5,
        help="how many times observations are withheld and predicted (default 5); 0 for no scores",
    )  # fmt: skip
    files.add_argument("--force", action="store_true", help="replace an existing page")
    _add_model(parser)
    messages = parser.add_argument_group("messages")
    messages.add_argument("--quiet", action="store_true", help="print errors only")
    _add_traceback(messages)


def _add_model(parser: argparse.ArgumentParser) -> None:
    """The options of ``fill_gaps``, with the same defaults."""
    _add_what(parser.add_argument_group("what to fill"))
    model = parser.add_argument_group("model")
    model.add_argument(
        "--transform", choices=["log", "logit", "boxcox", "rank", "auto"],
        help="transform skewed or bounded values before they are modelled; filled values are then medians. auto: the "
        "one with the best predictions of withheld observations, or none",
    )  # fmt: skip
    model.add_argument(
        "--bounds", metavar="LOW,HIGH", type=bounds,
        help="smallest and largest possible value, as in 0, or 0,1. If the first is negative: --bounds=-5,5",
    )  # fmt: skip
    model.add_argument("--smooth", action="store_true", help="replace observed values too, by the field without noise")
    model.add_argument(
        "--joint",
        action="store_true",
        help="fill variables on one grid with a joint model, which uses their correlations",
    )
    model.add_argument(
        "--mean", metavar="NAME|FILE", action="append", default=[],
        help="a background, such as a climatology: another array of IN, a file, or FILE:NAME; for a single variable: "
        "VARIABLE=NAME. Its coefficient is learned; repeatable",
    )  # fmt: skip
    model.add_argument(
        "--noise", metavar="NAME|FILE|NUMBER", action="append", default=[],
        help="known standard deviations of the measurements: an array as in --mean, or a number; if there are several "
        "variables: VARIABLE=NAME, repeatable",
    )  # fmt: skip
    model.add_argument("--no-check", action="store_true", help="skip the check on withheld observations")
    model.add_argument(
        "--period", metavar="AXIS=P", action="append", default=[], type=period,
        help="the period of a cycle along an axis (name or number), in units of the axis, in days for times; 'none' "
        "for no cycle; repeatable. Default: yearly and daily cycles are detected",
    )  # fmt: skip
    model.add_argument("--steps", metavar="N", type=integer(1), default=40, help="limit of training steps (default 40)")
    model.add_argument("--seed", metavar="N", type=integer(0), default=0, help="random seed (default 0)")
    model.add_argument(
        "--budget", metavar="SECONDS", type=positive,
        help="approximate limit in seconds; the report lists the steps that were left out. Default: no limit",
    )  # fmt: skip
    model.add_argument(
        "--memory", metavar="GiB", type=positive, default=4.0, help="memory for filling in pieces (default 4)"
    )


def _add_what(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--mask", metavar="NAME|FILE",
        help="fill only where this is neither 0 nor missing: another array of IN, a file, FILE:NAME, or a condition on "
        "one of them, as in 'land == 0'",
    )  # fmt: skip
    group.add_argument(
        "--max-gap", metavar="AXIS=LENGTH", action="append", default=[], type=max_gap,
        help="do not fill longer runs of gaps along an axis (name or number): cells, as in time=5, or a length with "
        "its unit, as in time='5 days'; repeatable",
    )  # fmt: skip
    group.add_argument(
        "--untrusted", metavar="CONDITION", action="append", default=[], type=condition,
        help="treat observations as gaps where a condition holds: an array of IN, a comparison (== != < <= > >=, or & "
        "for bits) and a number, as in 'qc != 0'; repeatable",
    )  # fmt: skip
    group.add_argument(
        "--robust", choices=["auto", "yes", "no"], default="auto",
        help="how to find wild values, which are reported and not used: a quick search (auto); a search with a model "
        "(yes); none (no)",
    )  # fmt: skip


def _add_inspect(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "inspect",
        help="show the contents of a file, the shape of its gaps, and the method to fill them",
        description="Shows the contents of a file, the shape of its gaps, and the method to fill them.",
        epilog=_INSPECT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_input(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _add_traceback(parser)


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "demo",
        help="fill a synthetic satellite picture with clouds, and draw it",
        description="Fills a synthetic satellite picture of the sea with clouds and dead pixels, and draws it.",
    )
    parser.add_argument("--output", type=Path, default=Path("results/demo.png"), help="the picture")
    parser.add_argument(
        "--methods", action="store_true", help="solve a small field by every method of the paper instead"
    )
    _add_traceback(parser)


def _add_input(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN", type=Path, help=f"the file with gaps: {_FORMATS}")
    parser.add_argument(
        "--variable", "--value", metavar="NAME", help="one variable of an .npz, .nc, .zarr or .csv file"
    )
    parser.add_argument("--gap-value", metavar="X", type=float, help="a number that marks a gap, in addition to NaN")
    tables = parser.add_argument_group("tables (.csv)")
    tables.add_argument(
        "--index", metavar="NAME", action="append", default=[],
        help="the column that indexes the rows; repeatable. Default: the first column, if it looks like an index",
    )  # fmt: skip
    tables.add_argument(
        "--columns", metavar="NAME", action="append", default=[],
        help="for a long table, with one row per value: the column that identifies the series; repeatable",
    )  # fmt: skip
    tables.add_argument(
        "--dates", choices=["day-first", "month-first"], help="the order of day and month in dates such as 03/04/2020"
    )


def _add_traceback(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
