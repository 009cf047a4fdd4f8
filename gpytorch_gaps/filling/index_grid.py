"""The rows of a pandas index as cells of a grid: one axis for each of its levels.

    place of a row = its positions in the levels, in grid order

Combinations of levels that have no row are cells of the grid too: gaps, which are not returned.
"""

import math
import sys
from typing import Any

import numpy as np

_FAR_FROM_A_GRID = 50  # so many cells a row are hardly meant


def is_a(values: Any, library: str, kind: str) -> bool:
    """Whether `values` is of an optional library's class, without importing that library."""
    module = sys.modules.get(library)
    return module is not None and isinstance(values, getattr(module, kind))


class IndexGrid:
    """`coordinates` and `names`, one for each level; `places`: the flat cell of each row.

    :param default: what to call a level without a name.
    """

    shape: tuple[int, ...]

    def __init__(self, index: Any, default: str) -> None:
        if is_a(index, "pandas", "MultiIndex"):
            self._unstack(index, default)
        else:
            self.coordinates = [None if _is_count(index) else index]
            self.names, self.shape = [str(index.name or default)], (len(index),)
            self.places = np.arange(len(index))

    def _unstack(self, index: Any, default: str) -> None:
        index = index.remove_unused_levels()
        self.names = [str(name or f"{default}, level {i}") for i, name in enumerate(index.names)]
        self.shape = tuple(map(len, index.levels))
        codes = [np.asarray(code) for code in index.codes]
        for name, code in zip(self.names, codes, strict=True):
            if (code < 0).any():
                raise ValueError(f"{name}: row {int((code < 0).argmax())} has no label, expected one in every row")
        repeated = index.duplicated()
        if repeated.any():
            row = int(repeated.argmax())
            labels = ", ".join(map(str, index[row]))
            raise ValueError(
                f"{', '.join(self.names)}: row {row}, ({labels}), occurs twice, expected each combination at most "
                "once; to average duplicates, use values.groupby(level=...).mean()"
            )
        if math.prod(self.shape) > _FAR_FROM_A_GRID * len(index):
            raise ValueError(
                f"{', '.join(self.names)}: got {len(index):,} rows for {' x '.join(map(str, self.shape))} cells, "
                "expected most of a grid; drop levels that follow from others, and round coordinates that should be "
                "equal"
            )
        self.coordinates = [None if _is_count(level) else level for level in index.levels]
        self.places = np.ravel_multi_index(codes, self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def _is_count(index: Any) -> bool:
    """The labels 0, 1, .. that a table has that was given none."""
    return is_a(index, "pandas", "RangeIndex") and (index.start, index.step) == (0, 1)
