"""``gpytorch-gaps inspect``: what a file holds, before anything is done to it."""

import argparse
import json

from gpytorch_gaps import __version__
from gpytorch_gaps.cli.inputs import kinds_of, values_of
from gpytorch_gaps.cli.inspection import inspect_gaps
from gpytorch_gaps.cli.summary import plain
from gpytorch_gaps.formats import open_file


def run_inspect(options: argparse.Namespace) -> int:
    with open_file(options.input, options.variable, options.gap_value) as opened:
        kinds = kinds_of(opened, values_of(opened))
        found = {name: inspect_gaps(kind) for name, kind in kinds.items()}
    if options.json:
        variables = {name or "values": one.as_dict() for name, one in found.items()}
        told = {"version": __version__, "input": str(options.input), "variables": variables}
        print(json.dumps(plain(told), indent=2, allow_nan=False))
        return 0
    for name, one in found.items():
        print(f"{options.input}{': ' if name else ''}{name}")
        print(one)
    return 0
