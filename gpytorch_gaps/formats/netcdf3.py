"""Adds variables and attributes to a copy of a netCDF 3 file. All other contents stay the same, bit for bit.

A file consists of a header, the variables without the record dimension, and the records. A record has a slab of each
variable with the record dimension (NetCDF Classic Format Specification). scipy could write such a file again, but it
sorts the variables, and if there are records, it writes scalars at wrong places.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from gpytorch_gaps.formats.additions import AddedVariable, with_line, with_names

_DIMENSION, _VARIABLE, _ATTRIBUTE = 10, 11, 12  # tags of lists in the header
_CHAR = 2
_TYPES = {1: ">i1", _CHAR: "S1", 3: ">i2", 4: ">i4", 5: ">f4", 6: ">f8"}
_SIZES = {kind: np.dtype(name).itemsize for kind, name in _TYPES.items()}
_LARGEST_SIZE = 2**32 - 1  # replaces any larger size: sizes of variables follow from their dimensions
_COPIED_BYTES = 2**24


@dataclass
class _Attribute:
    kind: int
    content: bytes  # without padding

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace") if self.kind == _CHAR else ""


@dataclass
class _Variable:
    dims: list[int]
    attributes: dict[bytes, _Attribute]
    kind: int
    begin: int = 0
    values: np.ndarray | None = None  # for a variable that is added


@dataclass
class _Header:
    version: int
    num_records: int
    dims: list[tuple[bytes, int]] = field(default_factory=list)
    attributes: dict[bytes, _Attribute] = field(default_factory=dict)
    variables: dict[bytes, _Variable] = field(default_factory=dict)

    def has_records(self, variable: _Variable) -> bool:
        return bool(variable.dims) and self.dims[variable.dims[0]][1] == 0

    def slab_bytes(self, variable: _Variable) -> int:
        """Bytes of a variable, or of one of its records, without padding."""
        lengths = [self.dims[dim][1] for dim in variable.dims[self.has_records(variable) :]]
        return math.prod(lengths) * _SIZES[variable.kind]

    def stored_bytes(self, variable: _Variable) -> int:
        """Bytes with padding. If only one variable has records, its records are not padded."""
        size = self.slab_bytes(variable)
        alone = self.has_records(variable) and sum(map(self.has_records, self.variables.values())) == 1
        return size if alone else _padded(size)

    def record_bytes(self) -> int:
        return sum(self.stored_bytes(one) for one in self.variables.values() if self.has_records(one))


def extend(path: Path, target: IO[bytes], added: Mapping[Any, Mapping[str, AddedVariable]], history: str = "") -> None:
    """Writes a copy of a netCDF 3 file with further variables and one more line of history.

    :param path: the file.
    :param target: where the copy is written.
    :param added: the variables to add, by the variable that names them in ``ancillary_variables``.
    :param history: the line, if any.
    :raises ValueError: if the copy would be too large for its version of netCDF 3.
    """
    with path.open("rb") as source:
        old, new = _read(source), _read(source)
        ids = {name: number for number, (name, _) in enumerate(new.dims)}
        for name, variables in added.items():
            for key, (dims, values, attributes) in variables.items():
                kind = next(kind for kind, dtype in _TYPES.items() if np.dtype(dtype) == values.dtype.newbyteorder(">"))
                about = {one.encode(): _attribute(value) for one, value in attributes.items()}
                places = [ids[str(dim).encode()] for dim in dims]
                new.variables[key.encode()] = _Variable(places, about, kind, values=values)
            about = new.variables[str(name).encode()].attributes
            named = about[b"ancillary_variables"].text if b"ancillary_variables" in about else ""
            about[b"ancillary_variables"] = _attribute(with_names(named, variables))
        if history:
            before = new.attributes[b"history"].text if b"history" in new.attributes else ""
            new.attributes[b"history"] = _attribute(with_line(before, history))
        _place(new)
        target.write(_header_bytes(new))
        _copy(source, target, old, new)


def _place(header: _Header) -> None:
    """Sets the offset of every variable, in the order of the header."""
    at = len(_header_bytes(header))
    in_order = sorted(header.variables.values(), key=header.has_records)  # sorting is stable
    for variable in in_order:
        variable.begin = at
        at += header.stored_bytes(variable)
    if header.version == 1 and any(variable.begin >= 2**31 for variable in in_order):
        raise ValueError("the file would be larger than 2 GiB, too large for netCDF 3 with 32-bit offsets")


def _copy(source: IO[bytes], target: IO[bytes], old: _Header, new: _Header) -> None:
    """Copies the values of all variables, those without records first."""
    for name, variable in new.variables.items():
        if not new.has_records(variable):
            _copy_slab(source, target, old, new, name)
    for record in range(new.num_records):
        for name, variable in new.variables.items():
            if new.has_records(variable):
                _copy_slab(source, target, old, new, name, record)


def _copy_slab(
    source: IO[bytes], target: IO[bytes], old: _Header, new: _Header, name: bytes, record: int | None = None
) -> None:
    """Copies the values of a variable, or of one of its records, with padding."""
    variable, size = new.variables[name], new.slab_bytes(new.variables[name])
    if variable.values is not None:
        values = variable.values if record is None else variable.values[record]
        target.write(np.asarray(values).astype(_TYPES[variable.kind]).tobytes())
    else:
        source.seek(old.variables[name].begin + (record or 0) * old.record_bytes())
        for start in range(0, size, _COPIED_BYTES):
            target.write(source.read(min(_COPIED_BYTES, size - start)))
    target.write(bytes(new.stored_bytes(variable) - size))


# -- the header --------------------------------------------------------------------------------------------------------


def _read(stream: IO[bytes]) -> _Header:
    stream.seek(0)
    magic, count = stream.read(4), _integer(stream)
    header = _Header(magic[3], count)
    if count == 2**32 - 1:
        raise ValueError("its number of records is not known, because it is still being written")
    header.dims = [(_name(stream), _integer(stream)) for _ in range(_list_length(stream))]
    header.attributes = _attributes(stream)
    for _ in range(_list_length(stream)):
        name = _name(stream)
        dims = [_integer(stream) for _ in range(_integer(stream))]
        variable = _Variable(dims, _attributes(stream), _integer(stream))
        _integer(stream)  # the size, which follows from the dimensions
        variable.begin = _integer(stream) if header.version == 1 else struct.unpack(">Q", stream.read(8))[0]
        header.variables[name] = variable
    return header


def _integer(stream: IO[bytes]) -> int:
    return int(struct.unpack(">I", stream.read(4))[0])


def _list_length(stream: IO[bytes]) -> int:
    _integer(stream)  # the tag, 0 for an empty list
    return _integer(stream)


def _name(stream: IO[bytes]) -> bytes:
    length = _integer(stream)
    return stream.read(_padded(length))[:length]


def _attributes(stream: IO[bytes]) -> dict[bytes, _Attribute]:
    found = {}
    for _ in range(_list_length(stream)):
        name, kind = _name(stream), _integer(stream)
        size = _integer(stream) * _SIZES[kind]
        found[name] = _Attribute(kind, stream.read(_padded(size))[:size])
    return found


def _attribute(value: Any) -> _Attribute:
    if isinstance(value, str):
        return _Attribute(_CHAR, value.encode())
    array = np.atleast_1d(value)
    kind = next(kind for kind, dtype in _TYPES.items() if np.dtype(dtype) == array.dtype.newbyteorder(">"))
    return _Attribute(kind, array.astype(_TYPES[kind]).tobytes())


def _header_bytes(header: _Header) -> bytes:
    parts = [b"CDF", bytes([header.version]), _packed(header.num_records)]
    parts += [_head(_DIMENSION, header.dims), *(_text(name) + _packed(size) for name, size in header.dims)]
    parts += [_attribute_bytes(header.attributes), _head(_VARIABLE, header.variables)]
    for name, one in header.variables.items():
        size = min(_padded(header.slab_bytes(one)), _LARGEST_SIZE)
        parts += [_text(name), _packed(len(one.dims), *one.dims), _attribute_bytes(one.attributes)]
        parts += [_packed(one.kind, size), struct.pack(">I" if header.version == 1 else ">Q", one.begin)]
    return b"".join(parts)


def _attribute_bytes(attributes: Mapping[bytes, _Attribute]) -> bytes:
    parts = [_head(_ATTRIBUTE, attributes)]
    for name, one in attributes.items():
        parts += [_text(name), _packed(one.kind, len(one.content) // _SIZES[one.kind])]
        parts.append(one.content + bytes(_padded(len(one.content)) - len(one.content)))
    return b"".join(parts)


def _head(tag: int, entries: Any) -> bytes:
    return _packed(tag if len(entries) else 0, len(entries))


def _text(name: bytes) -> bytes:
    return _packed(len(name)) + name + bytes(_padded(len(name)) - len(name))


def _packed(*numbers: int) -> bytes:
    return struct.pack(f">{len(numbers)}I", *numbers)


def _padded(size: int) -> int:
    return -(-size // 4) * 4
