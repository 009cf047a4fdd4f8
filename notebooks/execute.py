"""Executes notebooks in place, each with a kernel of its own: ``python notebooks/execute.py notebooks/climate.ipynb``

Outputs are kept; when and for how long cells ran is not.
"""

import argparse
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode


def executed(path: Path, timeout: int | None = None) -> NotebookNode:
    """The notebook with its outputs, run in its folder. An error in a cell is raised.

    :param timeout: seconds that a cell may take.
    """
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=timeout, resources={"metadata": {"path": str(path.parent)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    notebook.metadata.language_info = {"name": "python"}  # without the version of this machine
    return notebook


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path, nargs="+")
    for path in parser.parse_args(arguments).notebook:
        try:
            nbformat.write(executed(path), path)
        except CellExecutionError as error:
            sys.exit(f"{path}: {error}")  # which is left as it was


if __name__ == "__main__":
    main()
