"""The rows of a pandas index as cells of a grid, with one axis per level of the index."""

import math
import sys
from typing import Any

import numpy as np

_MAX_CELLS_PER_ROW = 50  # an index with more cells per row is probably not a grid


def is_a(values: Any, library: str, name: str) -> bool:
    """Whether `values` is an instance of a class of an optional library. The library is not imported."""
    module = sys.modules.get(library)
    return module is not None and isinstance(values, getattr(module, name))


class IndexGrid:
    """The rows of a pandas index as cells of a grid, with one axis per level of the index.

    `coordinates` and `names` have one entry per level. `cells` are the flat cells of the rows. Combinations of levels
    without a row are gaps of the grid, which are not returned.

    :param index: a pandas Index or MultiIndex.
    :param default: the name of a level that has none.
    """

    shape: tuple[int, ...]

    def __init__(self, index: Any, default: str) -> None:
        if is_a(index, "pandas", "MultiIndex"):
            self._unstack(index, default)
        else:
            self.coordinates = [None if _is_count(index) else index]
            self.names, self.shape = [str(index.name or default)], (len(index),)
            self.cells = np.arange(len(index))

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
        if self.size > _MAX_CELLS_PER_ROW * len(index):
            raise ValueError(
                f"{', '.join(self.names)}: got {len(index):,} rows for {' x '.join(map(str, self.shape))} cells, "
                "expected most cells of a grid. Try: drop levels that are functions of others, and round coordinates "
                "that should be equal"
            )
        self.coordinates = [None if _is_count(level) else level for level in index.levels]
        self.cells = np.ravel_multi_index(codes, self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def unstacked(values: Any) -> tuple[np.ndarray, list[IndexGrid]]:
    """The numbers of a Series or DataFrame, with one dimension per level of its indexes, and the grids of its indexes.

    Values without a row or column are NaN.
    """
    grids = [IndexGrid(index, default) for index, default in zip(values.axes, ("rows", "columns"), strict=False)]
    array = np.full([grid.size for grid in grids], np.nan)
    array[np.ix_(*(grid.cells for grid in grids))] = values.to_numpy(dtype=np.float64, na_value=np.nan)
    return array.reshape([size for grid in grids for size in grid.shape]), grids


def _is_count(index: Any) -> bool:
    """Whether the labels are 0, 1, .., the default of pandas."""
    return is_a(index, "pandas", "RangeIndex") and (index.start, index.step) == (0, 1)
