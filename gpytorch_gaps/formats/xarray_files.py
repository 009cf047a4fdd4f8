"""The common base of netCDF and zarr: both are read lazily through xarray, and contain any number of labelled arrays.

A result in the same format is a copy of the file in which only the gaps are overwritten, in the form of stored values:

    stored = round((filled - add_offset) / scale_factor)

Groups, chunks, compression, attributes, time units and observations are unchanged, bit for bit. (xarray would decode
and encode all of them again.)
"""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpytorch_gaps.formats.additions import (
    FLAG_SUFFIX,
    STD_SUFFIX,
    AddedVariable,
    added_variables,
    with_line,
    with_names,
)
from gpytorch_gaps.formats.arrays import slabs
from gpytorch_gaps.formats.opened import OpenedFile, choose, reading, require_numbers
from gpytorch_gaps.utils.conventions import LIMIT_ATTRIBUTES, holds_numbers, where_valid
from gpytorch_gaps.utils.dtypes import is_gap, to_dtype

if TYPE_CHECKING:
    import xarray

# Durations in the data stay numbers; variables that CF attributes name, such as bounds, are coordinates.
DECODING: dict[str, Any] = {"decode_timedelta": False, "decode_coords": "all"}
# The part of an encoding that describes the meaning of a variable, not its storage.
MEANING = ("units", "calendar", "coordinates", "grid_mapping", "bounds", "cell_measures", "ancillary_variables")


class XarrayFile(OpenedFile):
    """A file that xarray opens.

    `dataset` is the whole file. `data` is a Dataset of its numeric variables, or a DataArray if there is only one.
    """

    has_variables = True
    holds_one_array = False

    dataset: "xarray.Dataset"
    gap_value: float | None

    @classmethod
    def _open(cls, path: Path, **decoding: Any) -> "xarray.Dataset":
        raise NotImplementedError

    @classmethod
    def read(cls, path: Path, variable: str | None, gap_value: float | None) -> OpenedFile:
        with reading(path, f"a {path.suffix} file"):
            try:
                dataset = cls._open(path, **DECODING)
            except ValueError:  # xarray cannot decode the calendar: times remain numbers
                dataset = cls._open(path, **DECODING, decode_times=False)
        try:
            data = _numeric_data(path, dataset, variable)
        except BaseException:
            dataset.close()
            raise
        opened = cls(path, data if gap_value is None else _mask_value(data, gap_value))
        opened.dataset, opened.gap_value = dataset, gap_value
        opened.name = str(getattr(data, "name", opened.name))
        return opened

    def names(self) -> list[str]:
        return [str(name) for name, held in self.dataset.variables.items() if held.dtype.kind in "biuf"]

    def take_out(self, name: str) -> Any:
        taken = self.dataset[choose(self.path, self.names(), name)]
        if hasattr(self.data, "data_vars"):
            left = [one for one in self.data.data_vars if one != name]
            self.data = self.data[left[0]] if len(left) == 1 else self.data[left]
            self.name = str(self.data.name) if len(left) == 1 else self.name
        elif self.data.name == name:
            self._refuse_to_take(name)
        return taken

    def close(self) -> None:
        self.dataset.close()

    def _overwrite(self, variables: Any, filled: Any) -> None:
        """Writes `filled` into the gaps of the stored `variables`."""
        for name, result in self._by_name(filled).items():
            before, stored = self._by_name(self.data)[name], variables[name]
            result = result.transpose(*before.dims)
            chunks = getattr(stored, "chunks", None)
            for rows in slabs(before.shape, before.dtype.itemsize, chunks[0] if chunks else 1):
                values = result[rows].values
                new = np.isnan(where_valid(before[rows]).values) & ~np.isnan(values)
                if new.any():
                    raw = np.array(stored[rows])
                    raw[new] = packed(values[new], self.dataset[name].encoding, raw.dtype, self.gap_value)
                    stored[rows] = raw

    def _of_deviations(self, deviations: Any) -> "XarrayFile":
        """The file of standard deviations, without the variables that were not filled."""
        result, names = copy.copy(self), list(self._by_name(deviations))
        result.dataset = self.dataset[names]
        result.data = self.data[names] if hasattr(self.data, "data_vars") else self.data
        return result

    @classmethod
    def _refuse_variables(cls, opened: OpenedFile, path: Path, lossless: bool) -> None:
        if not isinstance(opened, XarrayFile):
            return
        for name in opened._by_name(opened.data):
            for taken in (f"{name}{STD_SUFFIX}", f"{name}{FLAG_SUFFIX}"):
                if taken in opened.dataset:
                    raise ValueError(f"output: {opened.path} has a variable {taken!r} already; expected none")

    def _added(self, filled: Any) -> dict[Any, dict[str, AddedVariable]]:
        """The variables to add, as a mapping from the variable that they belong to."""
        deviations = {} if self.additions.deviations is None else self._by_name(self.additions.deviations)
        data = {name: where_valid(one) for name, one in self._by_name(self.data).items()}
        added = added_variables(self.additions.flags, data, self._by_name(filled), deviations)
        for name, variables in added.items():
            for variable in variables.values():
                variable.attributes.update(_about_places(self.dataset[name].encoding))
        return added

    def _unpacked(self, filled: Any) -> "xarray.Dataset":
        """The dataset with `filled` as floating-point numbers, without packing."""
        result = self.dataset
        for name, one in self._by_name(filled).items():
            encoding = self.dataset[name].encoding
            is_packed = "scale_factor" in encoding or "add_offset" in encoding
            stale = LIMIT_ATTRIBUTES if is_packed else ()  # limits of the packed numbers
            attributes = {key: held for key, held in one.attrs.items() if key not in stale}
            dims = self.dataset[name].dims
            result = result.assign({name: (dims, one.transpose(*dims).data, attributes)})
            result[name].encoding = _meaning(encoding)
        return _with_additions(result, self.additions.history, self._added(filled))

    def _by_name(self, data: Any) -> dict[Any, "xarray.DataArray"]:
        return dict(data.data_vars) if hasattr(data, "data_vars") else {self.data.name: data}

    @classmethod
    def _new_dataset(cls, opened: OpenedFile, filled: Any) -> "xarray.Dataset":
        """The contents of a file of another format, as a Dataset."""
        import xarray

        if not isinstance(opened, XarrayFile):
            name, values, coordinates = opened._labelled(filled)
            dims = [found[0] if found else f"dim_{i}" for i, found in enumerate(coordinates)]
            result = xarray.DataArray(values, dict(filter(None, coordinates)), dims, name).to_dataset()
            return _with_additions(result, opened.additions.history, _added_to(opened, result[name]))
        unpacked = opened._unpacked(filled)
        result = unpacked.drop_encoding()
        for key, variable in result.variables.items():
            result[key].encoding = _meaning(unpacked[key].encoding)
            if variable.dtype.kind in "mMO":  # xarray does not write chunked times in given units
                variable.load()
        return result


def _added_to(opened: OpenedFile, filled: "xarray.DataArray") -> dict[Any, dict[str, AddedVariable]]:
    """The variables to add to the contents of a file without labels."""
    data = opened.data
    gaps = np.isnan(opened._labelled(data)[1]) if hasattr(data, "index") else is_gap(data)
    before = filled.copy(data=np.where(gaps, np.nan, 0.0))
    deviations = opened.additions.deviations
    if deviations is not None:
        deviations = filled.copy(data=np.ma.filled(opened._labelled(deviations)[1], np.nan))
    stds = {} if deviations is None else {filled.name: deviations}
    return added_variables(opened.additions.flags, {filled.name: before}, {filled.name: filled}, stds)


def _with_additions(
    dataset: "xarray.Dataset", history: str, added: dict[Any, dict[str, AddedVariable]]
) -> "xarray.Dataset":
    """A Dataset with further variables and one more line of history."""
    for name, variables in added.items():
        dataset = dataset.assign({key: tuple(one) for key, one in variables.items()})
        named = dataset[name].encoding.pop("ancillary_variables", dataset[name].attrs.get("ancillary_variables"))
        dataset[name].attrs["ancillary_variables"] = with_names(named, variables)
    if history:
        dataset = dataset.assign_attrs(history=with_line(dataset.attrs.get("history"), history))
    return dataset


def _about_places(encoding: dict) -> dict[str, Any]:
    """The attributes of a variable that describe the location of its cells."""
    return {key: encoding[key] for key in ("coordinates", "grid_mapping") if key in encoding}


def _numeric_data(path: Path, dataset: "xarray.Dataset", variable: str | None) -> Any:
    numeric = [name for name, held in dataset.data_vars.items() if holds_numbers(held) and held.size]
    if variable is not None:
        numeric = [choose(path, map(str, dataset.data_vars), variable)]
    if not numeric:
        held = ", ".join(f"{name} {held.dtype}{held.dims}" for name, held in dataset.data_vars.items()) or "nothing"
        raise ValueError(f"{path}: holds no variable of numbers with dimensions, only {held}")
    for name in numeric:
        require_numbers(path, f"the variable {name!r}", dataset[name].shape, dataset[name].dtype)
    return dataset[numeric[0]] if len(numeric) == 1 else dataset[sorted(numeric, key=str)]  # a store has no order


def _mask_value(data: Any, gap_value: float) -> Any:
    """NaN at `gap_value`. For packed numbers, also at values that differ from it by less than half a step."""

    def masked(values: "xarray.DataArray") -> "xarray.DataArray":
        scale = values.encoding.get("scale_factor")
        if scale is not None:
            return values.where(abs(values - gap_value) > abs(float(scale)) / 2)
        value = values.dtype.type(gap_value) if values.dtype.kind == "f" else gap_value
        return values.where(values != value)

    return data.map(masked, keep_attrs=True) if hasattr(data, "data_vars") else masked(data)


def _meaning(encoding: dict) -> dict[str, Any]:
    return {key: encoding[key] for key in MEANING if key in encoding}


def packed(values: np.ndarray, encoding: dict, dtype: np.dtype, gap_value: float | None) -> np.ndarray:
    """`values` in stored form: scaled and rounded, and never equal to a fill value or `gap_value`.

    :param dtype: the stored type. The attribute `_Unsigned` may change it to the signed or unsigned type of this size.
    """

    def scaled(numbers: Any) -> Any:
        if "scale_factor" in encoding or "add_offset" in encoding:
            return (numbers - encoding.get("add_offset", 0.0)) / encoding.get("scale_factor", 1.0)
        return numbers

    values = scaled(values.astype(np.float64, copy=False))
    sign = {"true": "u", "false": "i"}.get(str(encoding.get("_Unsigned")), dtype.kind)
    meant = np.dtype(f"{sign}{dtype.itemsize}") if dtype.kind in "iu" else dtype
    marks = [np.asarray(encoding[key]).ravel() for key in ("_FillValue", "missing_value") if key in encoding]
    reserved = [mark for some in marks for mark in some.astype(meant, casting="unsafe").tolist()]
    if gap_value is not None:
        reserved.append(scaled(gap_value) if meant.kind == "f" else np.rint(scaled(gap_value)))
    stored = to_dtype(values, meant, reserved)
    return stored.view(dtype.newbyteorder("=")) if meant.kind != dtype.kind else stored
