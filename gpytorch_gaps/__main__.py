"""``python -m gpytorch_gaps demo``: a gappy field, solved by every method, and its picture."""

import argparse
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpytorch_gaps", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="solve a gappy 2-D field by every method and write a picture")
    demo.add_argument("--output", type=Path, default=Path("results/demo.png"), help="where the picture goes")
    options = parser.parse_args(arguments)
    from gpytorch_gaps.demo import run_demo

    return run_demo(options.output)


if __name__ == "__main__":
    sys.exit(main())
