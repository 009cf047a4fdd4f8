"""The attribute ``gaps`` of xarray's DataArray and Dataset: ``data_array.gaps.fill()``.

Importing gpytorch_gaps must not import xarray. If xarray is loaded already, the accessor is registered at once.
Otherwise, a finder at the front of ``sys.meta_path`` registers it when xarray is imported.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import xarray

    from gpytorch_gaps.filling.fill import Filled
    from gpytorch_gaps.filling.learning.model import FillModel


class GapsAccessor:
    """The gaps of a DataArray or Dataset. ``import gpytorch_gaps`` makes it available as ``data.gaps``.

    :param data: the DataArray or Dataset, NaN at its gaps.

    >>> import numpy, xarray
    >>> import gpytorch_gaps
    >>> data = xarray.DataArray(numpy.sin(numpy.arange(20.0)), dims="x", name="wave")
    >>> data[3:5] = numpy.nan
    >>> filled = data.gaps.fill(steps=5, check=False, progress=False)
    >>> filled.mean.name, int(filled.gaps.sum()), bool(filled.mean.notnull().all())
    ('wave', 2, True)
    """

    def __init__(self, data: "xarray.DataArray | xarray.Dataset") -> None:
        self._data = data

    def fill(self, **options: Any) -> "Filled":
        """Fills the gaps.

        :param options: keyword arguments of :func:`gpytorch_gaps.fill_gaps`.
        :return: the result. Its mean, standard deviations and gaps have the labels of the data.
        """
        from gpytorch_gaps.filling.fill import fill_gaps

        return fill_gaps(self._data, **options)

    def model(self, **options: Any) -> "FillModel | dict[Any, FillModel]":
        """Trains the model that :meth:`fill` would use, without filling anything.

        :param options: keyword arguments of :func:`gpytorch_gaps.fill_gaps` that affect training.
        :return: the trained ``ExactGP``; for a Dataset, a dictionary with one model per numeric variable.
        """
        from gpytorch_gaps.filling.fill import fit_model

        return fit_model(self._data, **options)


def register_with_xarray() -> None:
    """Registers the accessor with xarray: now if xarray is loaded, otherwise when it is imported."""
    if "xarray" in sys.modules:
        _register(sys.modules["xarray"])
    elif not any(isinstance(finder, _XarrayFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _XarrayFinder())


def _register(xarray: ModuleType) -> None:
    if getattr(xarray.DataArray, "gaps", None) is not GapsAccessor:
        xarray.register_dataarray_accessor("gaps")(GapsAccessor)
        xarray.register_dataset_accessor("gaps")(GapsAccessor)


class _XarrayFinder:
    """Finds xarray by the other finders, and registers the accessor after xarray's code has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "xarray":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
