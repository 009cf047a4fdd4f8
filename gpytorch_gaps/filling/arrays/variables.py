"""Several variables on one grid as one array with an axis of variables."""

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from gpytorch_gaps.filling.arrays.adapters import ArrayAdapter, DataArrayAdapter
from gpytorch_gaps.filling.axes.axis import Axis
from gpytorch_gaps.filling.axes.encodings import Labels


class VariablesAdapter(ArrayAdapter):
    """Several DataArrays on one grid as one array. Its first axis has one label per DataArray.

    Results are dictionaries of DataArrays.

    :param given: the DataArrays by name, with the same dimensions in any order.
    :param dataset: the Dataset that they come from.
    """

    units_differ = True

    def __init__(self, given: Mapping[Hashable, Any], dataset: Any = None) -> None:
        dims = next(iter(given.values())).dims
        self.by_name = {name: DataArrayAdapter(one.transpose(*dims), None, dataset) for name, one in given.items()}
        self.chunked = any(one.chunked for one in self.by_name.values())
        names = tuple(map(str, given))
        codes = np.arange(float(len(names)))[:, None]
        labels = Axis("variable", "label", codes, encoding=Labels(names), coordinates=np.array(names))
        axes = [labels, *next(iter(self.by_name.values())).axes]
        super().__init__(given, self._stacked(), axes)

    def _stacked(self) -> Any:
        return np.stack([one.array for one in self.by_name.values()])

    def load(self) -> None:
        for one in self.by_name.values():
            one.load()
        self.array, self.chunked = self._stacked(), False

    def wrap_filled(self, values: np.ndarray, gaps: np.ndarray, smooth: bool) -> dict[Hashable, Any]:
        columns = zip(self.by_name.items(), values, gaps, strict=True)
        return self._in_order({name: one.wrap_filled(own, gap, smooth) for (name, one), own, gap in columns})

    def wrap_like_input(self, values: np.ndarray) -> dict[Hashable, Any]:
        columns = zip(self.by_name.items(), values, strict=True)
        return self._in_order({name: one.wrap_like_input(own) for (name, one), own in columns})

    def _in_order(self, results: dict[Hashable, Any]) -> dict[Hashable, Any]:
        return {name: one.transpose(*self.given[name].dims) for name, one in results.items()}
