"""netCDF 3 through scipy, netCDF 4 through h5netcdf."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from gpytorch_gaps.formats.additions import with_line, with_names
from gpytorch_gaps.formats.netcdf3 import extend
from gpytorch_gaps.formats.opened import OpenedFile, require
from gpytorch_gaps.formats.xarray_files import XarrayFile
from gpytorch_gaps.utils.files import atomic_write

if TYPE_CHECKING:
    import xarray

_STORAGE = {"zlib", "compression", "contiguous", "chunksizes"}  # encodings that describe the storage of a variable
_COMPRESSED: dict[str, Any] = {"compression": "gzip", "compression_opts": 4, "shuffle": True}
HDF5: tuple[str, ...] = ("h5netcdf", "h5py")  # h5netcdf does not depend on h5py


class NetcdfFile(XarrayFile):
    suffixes = (".nc",)
    packages = ("xarray",)

    @classmethod
    def _open(cls, path: Path, **decoding: Any) -> "xarray.Dataset":
        import xarray

        return xarray.open_dataset(path, engine=_engine(path), **decoding)

    def _write_again(self, filled: Any, path: Path, lossless: bool) -> None:
        engine = _engine(self.path)
        if lossless:
            return _write_netcdf(self._unpacked(filled), path, engine)

        def write(stream: IO[bytes]) -> None:
            if engine == "scipy" and not self.additions.are_none:
                extend(self.path, stream, self._added(filled), self.additions.history)
            else:
                with self.path.open("rb") as source:
                    shutil.copyfileobj(source, stream)
            stream.flush()
            with _netcdf_variables(stream.name, engine) as variables:
                self._overwrite(variables, filled)
            if engine == "h5netcdf":
                self._add_to(stream.name, filled)

        return atomic_write(path, write)

    def _add_to(self, path: str, filled: Any) -> None:
        """Adds variables and a line of history to a netCDF 4 file."""
        import h5netcdf

        with h5netcdf.File(path, "r+") as file:
            for name, variables in self._added(filled).items():
                for key, (dims, values, attributes) in variables.items():
                    stored = file.create_variable(key, dims, values.dtype, **_COMPRESSED)
                    stored[...] = values
                    stored.attrs.update(attributes)
                about = file.variables[name].attrs
                about["ancillary_variables"] = with_names(about.get("ancillary_variables"), variables)
            if self.additions.history:
                file.attrs["history"] = with_line(file.attrs.get("history"), self.additions.history)

    @classmethod
    def _write_new(cls, opened: OpenedFile, filled: Any, path: Path) -> None:
        _write_netcdf(cls._new_dataset(opened, filled), path, "h5netcdf")

    @classmethod
    def _refuse(cls, opened: OpenedFile, path: Path, lossless: bool) -> None:
        if not isinstance(opened, NetcdfFile):
            require(path, *HDF5)


def _engine(path: Path) -> str:
    """xarray's engine for a file, by its first bytes; xarray's own guess depends on what is installed."""
    with path.open("rb") as stream:
        start = stream.read(8)
    if start[:4] in (b"CDF\x01", b"CDF\x02"):
        require(path, "scipy")
        return "scipy"
    if start == b"\x89HDF\r\n\x1a\n":
        require(path, *HDF5)
        return "h5netcdf"
    raise ValueError("its first bytes are not those of netCDF 3, classic or with 64-bit offsets, nor of netCDF 4")


@contextmanager
def _netcdf_variables(path: str, engine: str) -> Iterator[Any]:
    """The stored variables of a file, open for writing.

    Variables of netCDF 3 are memory-mapped. scipy can only write the whole file again, and if there are records, it
    writes scalars at wrong places.
    """
    if engine == "h5netcdf":
        import h5netcdf

        with h5netcdf.File(path, "r+") as file:
            yield file.variables
    else:
        content = np.memmap(path, np.uint8, "r+")
        yield {name: np.ndarray(buffer=content, **place) for name, place in _places(path).items()}
        content.flush()


def _places(path: str) -> dict[str, dict[str, Any]]:
    """The places of the variables in a netCDF 3 file, as arguments of ``np.ndarray``."""
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
    if engine == "scipy":  # without records: see `_netcdf_variables`
        options |= {"format": "NETCDF3_64BIT", "unlimited_dims": ()}
    else:
        dataset = dataset.copy()
        for variable in dataset.data_vars.values():
            if variable.dims and variable.dtype.kind == "f" and not _STORAGE & variable.encoding.keys():
                variable.encoding |= {"zlib": True, "complevel": 4, "shuffle": True}
    atomic_write(path, lambda stream: dataset.to_netcdf(stream.name, **options))
