"""How blocks are laid out and written: sizes first, then one copy of the data. `block` reads them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from relax_rt.transport.memory.values import BLOB, BLOB_KIND, DIGEST_BYTES, STORAGE, TEXT, Data, Kind
from relax_rt.transport.rpc.errors import Refused

HEADER = struct.Struct("<4sHHIIQ")
MAGIC, VERSION = b"RLXB", 1
INLINE_BYTES = 1024
"""A block of at most this many bytes travels in the message."""
ALIGNMENT, INLINE_ALIGNMENT = 64, 8
MAX_ROWS = 1 << 24
MAX_META_BYTES = 1 << 20
MAX_COLUMNS = 4096
MAX_NDIM = 32
TABLE = np.dtype("<i8")
_FIXED_META_BYTES = 32
"""Bytes that a column's meta takes at most, without its name, its shape and its three offsets."""

Bytes = NDArray[np.uint8]


class ColumnMeta(msgspec.Struct, frozen=True, array_like=True):
    """How one column lies in its block.

    Attributes:
        name: of the field.
        dtype: numpy's name of a plain dtype, or one of bf16, fp8_e4m3, fp8_e5m2, str, bytes, msgpack, blob.
        ndim: dimensions of one row's value (0 for str, bytes, msgpack, blob).
        shape: of one row's value if all are alike (not ragged), else empty.
        ragged: the rows differ in shape; str, bytes and msgpack are ragged unless there is a single row.
        offset: of the data, in bytes.
        nbytes: of the data.
        table: offset of the int64 tables of a ragged column: rows + 1 offsets into the data, in elements, then, if
            ndim > 1, the shape of each row.
    """

    name: str
    dtype: str
    ndim: int
    shape: tuple[int, ...]
    ragged: bool
    offset: int
    nbytes: int
    table: int


_encode_meta = msgspec.msgpack.Encoder().encode


def _name_bytes(name: str) -> bytes:
    try:
        return name.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise Refused(f"field {name!r}", why=f"that is no name: {error}") from error


class Source:
    """A column that is to be written: what lies in it, and how large it is."""

    __slots__ = (
        "data",
        "dtype",
        "kind",
        "name",
        "name_nbytes",
        "nbytes",
        "ndim",
        "ragged",
        "rows",
        "shape",
        "shapes",
        "sizes",
    )

    def __init__(self, name: str, kind: Kind, data: NDArray[Any] | Sequence[Any]) -> None:
        """data: the stacked rows, or a sequence of them: arrays of the kind's dtype and ndim, bytes, or digests."""
        self.name, self.kind, self.data = name, kind, data
        self.name_nbytes = len(_name_bytes(name))
        self.rows = len(data)
        code, ndim = kind
        self.ndim = max(ndim, 0)
        self.ragged = False
        self.shape: tuple[int, ...] = ()
        self.shapes: list[tuple[int, ...]] | None = None
        self.sizes: list[int] | None = None
        if code == BLOB:
            self.nbytes = self.rows * DIGEST_BYTES
        elif code in TEXT:
            self.sizes = [len(value) for value in data]
            self.ragged = self.rows > 1
            self.nbytes = sum(self.sizes)
        elif isinstance(data, np.ndarray):
            self.shape, self.dtype = data.shape[1:], STORAGE[code]
            self.nbytes = data.size * self.dtype.itemsize
        else:
            self._rows_of_arrays(data, STORAGE[code])

    def _rows_of_arrays(self, arrays: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        shape = arrays[0].shape
        shapes = [array.shape for array in arrays]
        if shapes.count(shape) == len(shapes):
            self.shape = shape
            self.nbytes = arrays[0].size * dtype.itemsize * self.rows
        else:
            self.ragged, self.shapes = True, shapes
            self.sizes = [array.size for array in arrays]
            self.nbytes = sum(self.sizes) * dtype.itemsize

    @property
    def table_nbytes(self) -> int:
        """Bytes of its tables."""
        if not self.ragged:
            return 0
        return TABLE.itemsize * (self.rows + 1 + (self.rows * self.ndim if self.ndim > 1 else 0))

    def lengths(self) -> list[int]:
        """Length of each row's first dimension; of str and bytes in bytes; -1 for values that have none."""
        if self.kind[0] in TEXT:
            return list(self.sizes or []) if self.kind[0] != "msgpack" else [-1] * self.rows
        if self.shapes is not None:
            return [shape[0] for shape in self.shapes]
        return [self.shape[0] if self.shape else -1] * self.rows

    def write(self, memory: Bytes, offset: int, table: int) -> None:
        """Write the data at `offset` of the memory and the tables at `table`."""
        if self.ragged and self.sizes is not None:
            self._write_tables(memory[table : table + self.table_nbytes].view(TABLE), self.sizes)
        target, data = memory[offset : offset + self.nbytes], self.data
        if not self.nbytes:
            return
        if self.kind[0] in TEXT or self.kind[0] == BLOB:
            _write_bytes(target, cast(Sequence[Data], data))
            return
        elements = target.view(self.dtype)
        if isinstance(data, np.ndarray):
            np.copyto(elements.reshape(data.shape), data)
        elif self.ndim == 0:
            elements[:] = data
        elif self.shapes is None:
            # One call for all rows costs a fraction of a copy for each.
            np.concatenate(data, out=elements.reshape(self.rows * self.shape[0], *self.shape[1:]))
        elif self.ndim == 1:
            np.concatenate(data, out=elements)
        else:
            at = 0
            for array in data:
                np.copyto(elements[at : at + array.size].reshape(array.shape), array)
                at += array.size

    def _write_tables(self, table: NDArray[np.int64], sizes: list[int]) -> None:
        table[0] = 0
        np.cumsum(sizes, out=table[1 : self.rows + 1])
        if self.shapes is not None and self.ndim > 1:
            table[self.rows + 1 :].reshape(self.rows, self.ndim)[:] = self.shapes


def _write_bytes(target: Bytes, parts: Sequence[Data]) -> None:
    view, at = target.data, 0
    for part in parts:
        end = at + len(part)
        view[at:end] = part  # type: ignore[assignment]
        at = end


class Plan:
    """A block that is to be written: its size is known, nothing is copied yet.

    Attributes:
        rows: how many.
        fields: names of the columns.
        nbytes: of the whole block.
        inline: it is small enough to travel in a message.
    """

    __slots__ = ("_head", "_places", "_sources", "fields", "inline", "nbytes", "rows")

    def __init__(self, sources: Sequence[Source]) -> None:
        """
        Args:
            sources: at least one column; all have the same number of rows.

        Raises:
            Refused: the columns do not make a block, or are over a limit.
        """
        self._sources, self.fields = sources, tuple(source.name for source in sources)
        self.rows = _checked_rows(sources)
        bound = sum([source.nbytes + source.table_nbytes for source in sources])
        self.inline = False
        # Blobs are always in an extent, and so is what names them.
        if bound < INLINE_BYTES and not any(source.kind is BLOB_KIND or source.name == BLOB for source in sources):
            self._lay_out(bound, INLINE_ALIGNMENT)
            self.inline = self.nbytes <= INLINE_BYTES
        if not self.inline:
            self._lay_out(bound, ALIGNMENT)

    def _lay_out(self, bound: int, alignment: int) -> None:
        """Offsets stand in the meta, whose size decides the offsets: so a bound of its size is set aside."""
        count = len(self._sources)
        at = HEADER.size + 5
        for source in self._sources:
            at += _FIXED_META_BYTES + source.name_nbytes + 9 * len(source.shape)
        # msgpack writes a number below 2^16 in three bytes at most.
        at += 3 * count * (3 if at + bound + count * (2 * alignment + 9) < 1 << 16 else 9)
        places, columns = [], []
        for source in self._sources:
            table = 0
            if source.ragged:
                table = at = -(-at // alignment) * alignment
                at += source.table_nbytes
            at = -(-at // alignment) * alignment
            places.append((at, table))
            columns.append(
                ColumnMeta(
                    source.name, source.kind[0], source.ndim, source.shape, source.ragged, at, source.nbytes, table
                )
            )
            at += source.nbytes
        meta = _encode_meta(columns)
        if len(meta) > MAX_META_BYTES:
            raise Refused(f"a block of {count} columns", why=f"their description takes over {MAX_META_BYTES} bytes")
        self.nbytes, self._places = at, places
        self._head = HEADER.pack(MAGIC, VERSION, 0, self.rows, len(meta), at) + meta

    @property
    def data_nbytes(self) -> int:
        """Bytes of the columns' data."""
        return sum([source.nbytes for source in self._sources])

    def lengths(self, field: str) -> list[int]:
        """Lengths of the rows in the column of this name (see Source.lengths); all -1 if there is none."""
        for source in self._sources:
            if source.name == field:
                return source.lengths()
        return [-1] * self.rows

    def digests(self) -> dict[bytes, None]:
        """The blobs that the rows name, each once, in their order."""
        return dict.fromkeys([digest for source in self._sources if source.kind is BLOB_KIND for digest in source.data])

    def write(self, memory: Bytes) -> None:
        """Write the block to memory of at least `nbytes` bytes: the one copy of a put."""
        memory[: len(self._head)] = np.frombuffer(self._head, np.uint8)
        for source, (offset, table) in zip(self._sources, self._places, strict=True):
            source.write(memory, offset, table)

    def to_bytes(self) -> bytes:
        """The block as bytes, to travel in a message."""
        memory = np.zeros(self.nbytes, np.uint8)
        self.write(memory)
        return memory.tobytes()


def _checked_rows(sources: Sequence[Source]) -> int:
    if not sources:
        raise Refused("a block", why="it has no columns")
    rows = sources[0].rows
    for source in sources:
        if source.rows != rows:
            raise Refused(
                f"field '{source.name}' of {source.rows} rows", why=f"'{sources[0].name}' of the same put has {rows}"
            )
        if source.ndim > MAX_NDIM:
            raise Refused(f"field '{source.name}' of {source.ndim} dimensions", why=f"the limit is {MAX_NDIM}")
    if not 1 <= rows <= MAX_ROWS:
        raise Refused(f"a put of {rows} rows", why=f"a block has 1 to {MAX_ROWS}")
    if len(sources) > MAX_COLUMNS:
        raise Refused(f"a put of {len(sources)} fields", why=f"the limit is {MAX_COLUMNS}")
    return rows
