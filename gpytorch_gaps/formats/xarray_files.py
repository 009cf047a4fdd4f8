"""netCDF and zarr through xarray, read lazily.

A result in the same format is a copy of the file in which the entries that were gaps are overwritten, as stored there:

    stored = round((filled - add_offset) / scale_factor)

so that groups, chunks, compression, attributes, time units and everything observed stay as they were, to the bit.
"""

import importlib.util
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from gpytorch_gaps.formats.labels import labelled, meaning, packed, unpacked_attributes, without
from gpytorch_gaps.formats.opened import Opened, choose, reading, require, require_numbers, write_store_whole
from gpytorch_gaps.formats.values import slabs
from gpytorch_gaps.utils.files import atomic_write

if TYPE_CHECKING:
    import xarray

HDF5: tuple[str, ...] = ("h5netcdf", "h5py")  # the first comes without the second
# Data that are durations stay numbers; bounds and the like, which CF attributes name, are coordinates, not data.
DECODING: dict[str, Any] = {"decode_timedelta": False, "decode_coords": "all"}


class XarrayFile(Opened):
    """`dataset` is the whole file, `data` the numeric variables of it, or the only one."""

    has_variables = True
    dataset: "xarray.Dataset"
    gap_value: float | None

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
        opened.dataset, opened.gap_value = dataset, gap_value
        opened.name = str(getattr(data, "name", opened.name))
        return opened

    def close(self) -> None:
        self.dataset.close()

    def _overwrite(self, variables: Any, filled: Any) -> None:
        """Puts `filled` into the gaps of `variables`, as the file stores them."""
        for name, result in self._by_name(filled).items():
            before, stored = self._by_name(self.data)[name], variables[name]
            result = result.transpose(*before.dims)
            chunks = getattr(stored, "chunks", None)
            for rows in slabs(before.shape, before.dtype.itemsize, chunks[0] if chunks else 1):
                gap = np.isnan(before[rows].values)
                values = result[rows].values
                new = gap & ~np.isnan(values)
                if new.any():
                    raw = np.array(stored[rows])
                    raw[new] = packed(values[new], self.dataset[name].encoding, raw.dtype, self.gap_value)
                    stored[rows] = raw

    def _unpacked(self, filled: Any) -> "xarray.Dataset":
        """The file with `filled` as it is, in floating numbers."""
        former = self.dataset
        laid = {name: values.transpose(*former[name].dims) for name, values in self._by_name(filled).items()}
        result = former.assign(
            {name: (one.dims, one.data, unpacked_attributes(one, former[name].encoding)) for name, one in laid.items()}
        )
        for name in laid:
            result[name].encoding = meaning(former[name])
        return result

    def _by_name(self, data: Any) -> dict[Any, "xarray.DataArray"]:
        return dict(data.data_vars) if hasattr(data, "data_vars") else {self.data.name: data}

    @classmethod
    def _new_dataset(cls, opened: Opened, filled: Any) -> "xarray.Dataset":
        if isinstance(opened, XarrayFile):
            result = opened._unpacked(filled)
            kept = {name: meaning(result[name]) for name in result.variables}
            result = result.drop_encoding()
            for name, encoding in kept.items():
                result[name].encoding = encoding
                if result[name].dtype.kind in "mMO":  # in chunks, times are not written in given units
                    result.variables[name].load()
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
            atomic_write(path, write)

    @classmethod
    def _write_new(cls, opened: Opened, filled: Any, path: Path) -> None:
        _write_netcdf(cls._new_dataset(opened, filled), path, "h5netcdf")

    @classmethod
    def _refuse(cls, opened: Opened, path: Path, lossless: bool) -> None:
        if not isinstance(opened, NetcdfFile):
            require(path, *HDF5)


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
            shutil.copytree(self.path, partial, copy_function=shutil.copyfile)
            for folder in (partial, *filter(Path.is_dir, partial.rglob("*"))):
                folder.chmod(folder.stat().st_mode | stat.S_IRWXU)  # of a store that one may only read, too
            self._overwrite(zarr.open_group(partial, mode="r+"), filled)

        if lossless:
            unpacked = self._unpacked(filled).copy()
            for variable in unpacked.variables.values():
                if variable.dtype.kind in "OTU":  # the codec of texts comes by itself, and not twice
                    variable.encoding.pop("filters", None)
            version = zarr.open_group(self.path, mode="r").metadata.zarr_format  # codecs are of one version each
            _write_zarr(unpacked, path, version)
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
        require(path, "scipy")
        return "scipy"
    if start == b"\x89HDF\r\n\x1a\n":
        require(path, *HDF5)
        return "h5netcdf"
    raise ValueError("it begins neither as netCDF 3, classic or with 64-bit offsets, nor as netCDF 4")


@contextmanager
def _netcdf_variables(path: str, engine: str) -> Iterator[Any]:
    """The variables as they are stored, to be written to."""
    if engine == "h5netcdf":
        import h5netcdf

        with h5netcdf.File(path, "r+") as file:
            yield file.variables
    else:
        content = np.memmap(path, np.uint8, "r+")
        yield {name: np.ndarray(buffer=content, **place) for name, place in _places(path).items()}
        content.flush()


def _places(path: str) -> dict[str, dict[str, Any]]:
    """Where in a netCDF 3 file its variables lie. scipy's own way of writing, all anew, puts scalars amid records."""
    from scipy.io import netcdf_file

    def place(data: np.ndarray) -> dict[str, Any]:
        whole = data
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        offset = data.ctypes.data - whole.ctypes.data
        return {"shape": data.shape, "dtype": data.dtype, "offset": offset, "strides": data.strides}

    with netcdf_file(path, "r", mmap=True) as file:
        return {name: place(variable.data) for name, variable in file.variables.items()}


def _write_netcdf(dataset: "xarray.Dataset", path: Path, engine: Any) -> None:
    options: dict[str, Any] = {"engine": engine, "format": "NETCDF4"}
    if engine == "scipy":
        options |= {
            "format": "NETCDF3_64BIT",
            "unlimited_dims": (),
        }  # records and scalars do not go together, see above
    atomic_write(path, lambda stream: dataset.to_netcdf(stream.name, **options))


def _write_zarr(dataset: "xarray.Dataset", path: Path, version: Any = None) -> None:
    def write(partial: Path) -> None:
        dataset.to_zarr(partial, mode="w", consolidated=False, zarr_format=version)

    write_store_whole(path, write)


def _numeric_data(path: Path, dataset: "xarray.Dataset", variable: str | None) -> Any:
    numeric = [name for name, held in dataset.data_vars.items() if held.dtype.kind in "iuf" and held.dims and held.size]
    if variable is not None:
        numeric = [choose(path, map(str, dataset.data_vars), variable)]
    if not numeric:
        held = ", ".join(f"{name} {held.dtype}{held.dims}" for name, held in dataset.data_vars.items()) or "nothing"
        raise ValueError(f"{path}: holds no variable of numbers with dimensions, only {held}")
    for name in numeric:
        require_numbers(path, f"the variable {name!r}", dataset[name].shape, dataset[name].dtype)
    return dataset[numeric[0]] if len(numeric) == 1 else dataset[sorted(numeric, key=str)]  # a store has no order
