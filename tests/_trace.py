"""Which of our modules a call enters, and how often it leaves for linear_operator.

An *excursion* is a call from our code into linear_operator during which our code is called back: control goes through
a library and returns. It lasts until that call returns; what happens inside belongs to it. Asking an operator for its
shape, or making one, is no excursion (:data:`ACCESSORS`).

>>> from gpytorch_gaps.linalg.products import kron_matmul_flops
>>> trace(lambda: kron_matmul_flops([(2, 2)]))
Trace(result=8, modules=frozenset({'linalg/products.py'}), excursions=())
"""

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import linear_operator

import gpytorch_gaps

OURS = os.path.dirname(gpytorch_gaps.__file__) + os.sep
THEIRS = os.path.dirname(linear_operator.__file__) + os.sep
ACCESSORS = frozenset(
    [
        "__init__",
        "__new__",
        "__call__",
        "shape",
        "size",
        "dim",
        "ndimension",
        "numel",
        "batch_shape",
        "matrix_shape",
        "batch_dim",
        "dtype",
        "device",
        "is_square",
        "requires_grad",
        "requires_grad_",
        "representation",
        "representation_tree",
        "mT",
    ]
)


class Excursion(NamedTuple):
    """From a line of ours into a function of linear_operator."""

    line: str  # "posterior/variance.py:51"
    entered: str  # "linear_operator/operators/_linear_operator.py:solve"


class Trace(NamedTuple):
    """What :func:`trace` has seen. `modules` are files, relative to the package: "solvers/krylov.py"."""

    result: Any
    modules: frozenset[str]
    excursions: tuple[Excursion, ...]


def trace(function: Callable[[], Any], ignoring: frozenset[str] = ACCESSORS) -> Trace:
    """Runs a function, which is called without arguments, and follows every Python call made in this thread.

    A backward pass of CPU tensors runs in the same thread. Functions that run when a module is imported do not count:
    import what the function needs, or run it once, before.

    :param ignoring: names of functions of linear_operator that begin no excursion.
    """
    modules: set[str] = set()
    excursions: list[Excursion] = []
    open_call: list[Any] = []  # the frame of the call that may become an excursion, where it began, whether we are back
    owners: list[bool] = []  # of the frames of either side on the stack: whether they are ours

    def follow(frame: Any, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        file = frame.f_code.co_filename
        own = file.startswith(OURS)
        name = frame.f_code.co_name
        if not own and (not file.startswith(THEIRS) or name == "g"):  # "g" wraps what linear_operator caches
            return
        if event == "return":
            if owners:
                owners.pop()
            if open_call and open_call[0] is frame:
                if open_call[2]:
                    excursions.append(open_call[1])
                open_call.clear()
            return
        if own and name != "<module>":
            modules.add(os.path.relpath(file, OURS))
            if open_call:
                open_call[2] = True
        elif not own and not open_call and owners and owners[-1] and name not in ignoring:
            open_call.extend([frame, Excursion(_line(frame), f"{os.path.relpath(file, THEIRS)}:{name}"), False])
        owners.append(own)

    before = sys.getprofile()
    sys.setprofile(follow)
    try:
        result = function()
    finally:
        sys.setprofile(before)
    return Trace(result, frozenset(modules), tuple(excursions))


def _line(frame: Any) -> str:
    """The line of ours that a frame was called from, directly or through torch and Python."""
    while not frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return f"{os.path.relpath(frame.f_code.co_filename, OURS)}:{frame.f_lineno}"
