"""``gpytorch-gaps report``: fills the gaps of a file and writes a page about the result."""

import argparse

import gpytorch_gaps as gaps
from gpytorch_gaps.cli.beside import arrays_beside
from gpytorch_gaps.cli.files import check_page, open_input, read_arrays
from gpytorch_gaps.cli.fill import fill_options
from gpytorch_gaps.cli.masks import distrust


def run_report(options: argparse.Namespace, warned: list[str]) -> int:
    """Runs the command.

    :param options: the parsed arguments.
    :param warned: messages of the warnings so far, which the page lists.
    :return: the exit code, 0.
    """
    check_page(options.output, options.force)
    from matplotlib import use

    use("Agg")
    from gpytorch_gaps import plot

    with open_input(options) as opened:
        distrust(options.untrusted, opened)
        beside = arrays_beside(options, opened)
        values, kinds = read_arrays(opened)
        filling = fill_options(options, kinds, beside)
        result = gaps.fill_gaps(values, opened.axes, **filling, std=not options.no_std)
        folds = 0 if options.no_check else options.folds
        with gaps.settings.progress(filling["progress"]):
            plot.report(result, options.output, axes=opened.axes, title=options.input.name, folds=folds, warned=warned)
    if not options.quiet:
        print(f"  written: {options.output}")
    return 0
