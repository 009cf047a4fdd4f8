"""``python -m gpytorch_gaps``, and the script ``gpytorch-gaps``."""

import sys

from gpytorch_gaps.cli.main import main

__all__ = ["entry", "main"]


def entry() -> None:
    sys.exit(main())


if __name__ == "__main__":
    entry()
