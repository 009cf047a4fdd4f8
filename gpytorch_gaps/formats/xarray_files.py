"""netCDF and zarr through xarray, read lazily.

A result in the same format is a copy of the file in which the entries that were gaps are overwritten, as stored there:

    stored = round((filled - add_offset) / scale_factor)

so that groups, chunks, compression, attributes, time units and everything observed stay as they were, to the bit.
"""

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from gpytorch_gaps.files import write_whole
from gpytorch_gaps.formats.labels import labelled, meaning, packed, without
from gpytorch_gaps.formats.opened import Opened, choose, reading, require, require_numbers, write_store_whole
from gpytorch_gaps.formats.values import slabs

if TYPE_CHECKING:
    import xarray

# Data that are durations stay numbers; bounds and the like, which CF attributes name, are coordinates, not data.
DECODING: dict[str, Any] = {"decode_timedelta": False, "decode_coords": "all"}


class XarrayFile(Opened):
    """`dataset` is the whole file, `data` the numeric variables of it, or the only one."""

    has_variables = True
    dataset: "xarray.Dataset"

    @classmethod
    def _open(cls, path: Path, **decoding: Any) -> "xarray.Dataset":
        raise NotImplementedError

    @classmethod
    def read(cls, path: Path, variable: str | None, gap_value: float | None) -> Opened:
        with reading(path, f"a {path.suffix} file"):
            try:
                dataset = cls._open(path, **DECODING)
            except ValueError:  # times of a calendar that needs a package more: as numbers they serve as well
                dataset = cls._open(path, **DECODING, decode_times=False)
        try:
            data = _numeric_data(path, dataset, variable)
        except BaseException:
            dataset.close()
            raise
        opened = cls(path, data if gap_value is None else without(data, gap_value))
        opened.dataset = dataset
        return opened

    def close(self) -> None:
        self.dataset.close()

    def _overwrite(self, variables: Any, filled: Any) -> None:
        """Puts `filled` into the gaps of `variables`, as the file stores them."""
        for name, result in _by_name(filled).items():
            before, stored = _by_name(self.data)[name], variables[name]
            result = result.transpose(*before.dims)
            chunks = getattr(stored, "chunks", None)
            for rows in slabs(before.shape, before.dtype.itemsize, chunks[0] if chunks else 1):
                gap = np.isnan(before[rows].values)
                values = result[rows].values
                new = gap & ~np.isnan(values)
                if new.any():
                    raw = np.array(stored[rows])
                    raw[new] = packed(values[new], self.dataset[name].encoding, raw.dtype)
                    stored[rows] = raw

    def _unpacked(self, filled: Any) -> "xarray.Dataset":
        """The file with `filled` as it is, in floating numbers."""
        names = _by_name(filled)
        result = self.dataset.assign(
            {name: (values.dims, values.data, self.dataset[name].attrs) for name, values in names.items()}
        )
        for name in names:
            result[name].encoding = meaning(self.dataset[name])
        return result

    @classmethod
    def _new_dataset(cls, opened: Opened, filled: Any) -> "xarray.Dataset":
        if isinstance(opened, XarrayFile):
            result = opened._unpacked(filled)
            kept = {name: meaning(result[name]) for name in result.variables}
            result = result.drop_encoding()
            for name, encoding in kept.items():
                result[name].encoding = encoding
            return result
        return labelled(opened, filled).to_dataset()

    @classmethod
    def _refuse(cls, opened: Opened, path: Path, lossless: bool) -> None:
        """Takes everything."""


class NetcdfFile(XarrayFile):
    suffixes = (".nc",)
    packages = ("xarray",)

    @classmethod
    def _open(cls, path: Path, **decoding: Any) -> "xarray.Dataset":
        import xarray

        return xarray.open_dataset(path, engine=_engine(path), **decoding)

    def _write_again(self, filled: Any, path: Path, lossless: bool) -> None:
        engine = _engine(self.path)

        def write(stream: IO[bytes]) -> None:
            with self.path.open("rb") as source:
                shutil.copyfileobj(source, stream)
            stream.flush()
            with _netcdf_variables(stream.name, engine) as variables:
                self._overwrite(variables, filled)

        if lossless:
            _write_netcdf(self._unpacked(filled), path, engine)
        else:
            write_whole(path, write)

    @classmethod
    def _write_new(cls, opened: Opened, filled: Any, path: Path) -> None:
        _write_netcdf(cls._new_dataset(opened, filled), path, "h5netcdf")

    @classmethod
    def _refuse(cls, opened: Opened, path: Path, lossless: bool) -> None:
        if not isinstance(opened, NetcdfFile):
            require(path, "h5netcdf")


class ZarrStore(XarrayFile):
    suffixes = (".zarr",)
    packages = ("xarray", "zarr")
    directory = True

    @classmethod
    def _open(cls, path: Path, **decoding: Any) -> "xarray.Dataset":
        import xarray

        chunks: dict | None = {} if importlib.util.find_spec("dask") else None
        return xarray.open_zarr(path, chunks=chunks, consolidated=False, **decoding)

    def _write_again(self, filled: Any, path: Path, lossless: bool) -> None:
        import zarr

        def write(partial: Path) -> None:
            shutil.copytree(self.path, partial)
            self._overwrite(zarr.open_group(partial, mode="r+"), filled)

        if lossless:
            _write_zarr(self._unpacked(filled), path)
        else:
            write_store_whole(path, write)

    @classmethod
    def _write_new(cls, opened: Opened, filled: Any, path: Path) -> None:
        _write_zarr(cls._new_dataset(opened, filled), path)


def _engine(path: Path) -> str:
    """By the first bytes, as xarray's guess goes by what is installed."""
    with path.open("rb") as stream:
        start = stream.read(8)
    if start[:4] in (b"CDF\x01", b"CDF\x02"):
        engine, package = "scipy", "scipy"
    elif start == b"\x89HDF\r\n\x1a\n":
        engine, package = "h5netcdf", "h5netcdf"
    else:
        raise ValueError("it begins neither as netCDF 3, classic or with 64-bit offsets, nor as netCDF 4")
    require(path, package)
    return engine


@contextmanager
def _netcdf_variables(path: str, engine: str) -> Iterator[Any]:
    """The variables as they are stored, to be written to."""
    if engine == "scipy":
        from scipy.io import netcdf_file

        file: Any = netcdf_file(path, "a", mmap=False)
    else:
        import h5netcdf

        file = h5netcdf.File(path, "r+")
    with file:
        yield file.variables


def _write_netcdf(dataset: "xarray.Dataset", path: Path, engine: Any) -> None:
    kind: Any = "NETCDF3_64BIT" if engine == "scipy" else "NETCDF4"
    write_whole(path, lambda stream: dataset.to_netcdf(stream.name, engine=engine, format=kind))


def _write_zarr(dataset: "xarray.Dataset", path: Path) -> None:
    write_store_whole(path, lambda partial: dataset.to_zarr(partial, mode="w", consolidated=False))


def _numeric_data(path: Path, dataset: "xarray.Dataset", variable: str | None) -> Any:
    numeric = [name for name, held in dataset.data_vars.items() if held.dtype.kind in "iuf" and held.dims]
    if variable is not None:
        numeric = [choose(path, map(str, dataset.data_vars), variable)]
    if not numeric:
        held = ", ".join(f"{name} {held.dtype}{held.dims}" for name, held in dataset.data_vars.items()) or "nothing"
        raise ValueError(f"{path}: holds no variable of numbers with dimensions, only {held}")
    for name in numeric:
        require_numbers(path, f"the variable {name!r}", dataset[name].shape, dataset[name].dtype)
    return dataset[numeric[0]] if len(numeric) == 1 else dataset[numeric]


def _by_name(data: Any) -> dict[Any, "xarray.DataArray"]:
    return dict(data.data_vars) if hasattr(data, "data_vars") else {data.name: data}
