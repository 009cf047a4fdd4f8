"""zarr stores of version 2 and 3: directories, read in chunks if dask is installed."""

import importlib.util
import shutil
import stat
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpytorch_gaps.formats.additions import with_line, with_names
from gpytorch_gaps.formats.opened import OpenedFile
from gpytorch_gaps.formats.xarray_files import XarrayFile
from gpytorch_gaps.utils.files import atomic_write_store, require_writable

if TYPE_CHECKING:
    import xarray


class ZarrStore(XarrayFile):
    suffixes = (".zarr",)
    packages = ("xarray", "zarr")
    directory = True

    @classmethod
    def _open(cls, path: Path, **decoding: Any) -> "xarray.Dataset":
        import xarray

        chunks: dict | None = {} if importlib.util.find_spec("dask") else None
        return xarray.open_zarr(path, chunks=chunks, consolidated=False, **decoding)

    @classmethod
    def _require_place(cls, path: Path) -> None:
        marks = ("zarr.json", ".zgroup", ".zattrs", ".zmetadata")
        is_store = path.is_dir() and (not any(path.iterdir()) or any((path / mark).exists() for mark in marks))
        if path.exists() and not is_store:
            raise ValueError(f"output: {path} exists and is not a zarr store; expected a new name or a zarr store")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"output: the directory of {path} does not exist; expected one that does")
        require_writable("output", path)

    def _write_again(self, filled: Any, path: Path, lossless: bool) -> None:
        import zarr

        def write(partial: Path) -> None:
            shutil.copytree(self.path, partial, copy_function=shutil.copyfile)
            for folder in (partial, *filter(Path.is_dir, partial.rglob("*"))):
                folder.chmod(folder.stat().st_mode | stat.S_IRWXU)  # the source may be read-only
            self._overwrite(zarr.open_group(partial, mode="r+"), filled)
            self._add_to(partial, filled)

        if lossless:
            unpacked = self._unpacked(filled).copy()
            for variable in unpacked.variables.values():
                if variable.dtype.kind in "OTU":  # xarray adds the codec of texts itself
                    variable.encoding.pop("filters", None)
            version = zarr.open_group(self.path, mode="r").metadata.zarr_format  # codecs belong to one version
            _write_zarr(unpacked, path, version)
        else:
            atomic_write_store(path, write)

    def _add_to(self, path: Path, filled: Any) -> None:
        """Adds variables and a line of history to a store."""
        import zarr

        is_consolidated = zarr.open_group(path, mode="r").metadata.consolidated_metadata is not None
        group = zarr.open_group(path, mode="r+", use_consolidated=False)
        added = self._added(filled)
        for name, variables in added.items():
            for key, (dims, values, attributes) in variables.items():
                named: dict[str, Any] = {"dimension_names": dims} if group.metadata.zarr_format == 3 else {}
                stored = group.create_array(key, shape=values.shape, dtype=values.dtype, **named)
                stored[...] = values
                plain = {one: np.asarray(value).tolist() for one, value in attributes.items()}
                stored.attrs.update(plain if named else {**plain, "_ARRAY_DIMENSIONS": list(dims)})
            about = group[name].attrs
            about["ancillary_variables"] = with_names(about.get("ancillary_variables"), variables)
        if self.additions.history:
            group.attrs["history"] = with_line(group.attrs.get("history"), self.additions.history)
        if is_consolidated and (added or self.additions.history):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # version 3 does not specify this codec, but the source uses it
                zarr.consolidate_metadata(path)

    @classmethod
    def _write_new(cls, opened: OpenedFile, filled: Any, path: Path) -> None:
        _write_zarr(cls._new_dataset(opened, filled), path)


def _write_zarr(dataset: "xarray.Dataset", path: Path, version: Any = None) -> None:
    def write(partial: Path) -> None:
        dataset.to_zarr(partial, mode="w", consolidated=False, zarr_format=version)

    atomic_write_store(path, write)
