"""``data_array.gaps.fill()``, registered with xarray when the package is imported, if xarray is there."""

from typing import TYPE_CHECKING, Any

from gpytorch_gaps.filling.fill import Filled, fill_gaps, fit_model
from gpytorch_gaps.filling.model import FillModel

if TYPE_CHECKING:
    import xarray


class GapsAccessor:
    """Gaps of a DataArray or Dataset."""

    def __init__(self, data: "xarray.DataArray | xarray.Dataset") -> None:
        self._data = data

    def fill(self, **options: Any) -> Filled:
        """Fills them; options as of :func:`gpytorch_gaps.fill_gaps`."""
        return fill_gaps(self._data, **options)

    def model(self, **options: Any) -> FillModel | dict[Any, FillModel]:
        """The trained ``ExactGP`` by which they would be filled; of a Dataset one for each variable."""
        if not hasattr(self._data, "data_vars"):
            return fit_model(self._data, **options)
        numeric = [name for name, held in self._data.data_vars.items() if held.dtype.kind in "iuf" and held.dims]
        return {name: fit_model(self._data[name], **options) for name in numeric}


def register() -> None:
    """Teaches xarray the attribute ``gaps``, where xarray is installed."""
    try:
        import xarray
    except ImportError:
        return
    xarray.register_dataarray_accessor("gaps")(GapsAccessor)
    xarray.register_dataset_accessor("gaps")(GapsAccessor)
