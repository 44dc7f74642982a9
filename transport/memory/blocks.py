"""Blocks: columns of n rows in one piece of memory that describes itself, written once and read in place.

Layout, little-endian, offsets relative to the block's beginning: the header (magic ``RLXB``, u16 version, u16 flags,
u32 rows, u32 bytes of meta, u64 bytes of the block), the meta (msgpack: a list of ColumnMeta), then the columns, each
at a multiple of 64 (8 in a block that travels inline). What is read comes from another process and is trusted in
nothing: every length and offset is compared with the memory that there is before it is used.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from relax_rt.transport.memory.values import BLOB, BLOB_KIND, DIGEST_BYTES, PLAIN, RAW, STORAGE, TEXT, TORCH, Data, Kind
from relax_rt.transport.rpc.errors import Corrupt, Refused

if TYPE_CHECKING:
    import torch

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
    """Where and how one column is stored in its block.

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


class ColumnSource:
    """A column to be written: its data and its size."""

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


class BlockPlan:
    """A block to be written: its size is known, nothing is copied yet.

    Attributes:
        rows: how many.
        fields: names of the columns.
        nbytes: of the whole block.
        inline: it is small enough to travel in a message.
    """

    __slots__ = ("_head", "_places", "_sources", "fields", "inline", "nbytes", "rows")

    def __init__(self, sources: Sequence[ColumnSource]) -> None:
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

    def layout(self) -> RowLayout | None:
        """The layout of a single row of arrays of plain dtypes; None for any other block.

        Values of bf16 and fp8 are viewed as their bits before they are planned; a layout takes values as they are.
        """
        sources = self._sources
        if self.rows != 1 or self.inline or any(source.kind[0] not in PLAIN for source in sources):
            return None
        return RowLayout(
            np.frombuffer(self._head, np.uint8),
            [
                (at, at + source.nbytes, source.dtype, source.shape)
                for source, (at, _) in zip(sources, self._places, strict=True)
            ],
            self.nbytes,
            self.fields,
        )

    @property
    def data_nbytes(self) -> int:
        """Bytes of the columns' data."""
        return sum([source.nbytes for source in self._sources])

    def lengths(self, field: str) -> list[int]:
        """Lengths of the rows in the column of this name (see ColumnSource.lengths); all -1 if there is none."""
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


class RowLayout:
    """How a block of one row of arrays lies in memory, for further rows of the same dtypes and shapes.

    Planning such a block takes several times as long as copying a few KiB.
    """

    __slots__ = ("_columns", "_head", "fields", "nbytes")

    def __init__(
        self,
        head: Bytes,
        columns: list[tuple[int, int, np.dtype[Any], tuple[int, ...]]],
        nbytes: int,
        fields: tuple[str, ...],
    ) -> None:
        self._head, self._columns, self.nbytes, self.fields = head, columns, nbytes, fields

    def write(self, memory: Bytes, values: Iterable[NDArray[Any]]) -> None:
        """Write the block of a row with these values, in the order of the fields."""
        memory[: len(self._head)] = self._head
        for (begin, end, dtype, shape), value in zip(self._columns, values, strict=True):
            np.copyto(memory[begin:end].view(dtype).reshape(shape), value)


def _checked_rows(sources: Sequence[ColumnSource]) -> int:
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


Resolve = Callable[[bytes], "Block"]
_META = msgspec.msgpack.Decoder(list[ColumnMeta])


class _Writable:
    """Describes read-only bytes to numpy as writable.

    torch has no read-only tensors and warns of read-only arrays; the kernel protects a read-only mapping anyway.
    """

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory
        self.__array_interface__ = {
            "version": 3,
            "shape": memory.shape,
            "typestr": "|u1",
            "data": (memory.__array_interface__["data"][0], False),
        }


class _BlockMemory:
    """The memory of a block, which its columns refer to.

    Columns do not refer to the block itself: a reference cycle would keep the memory mapped, and pinned, until the next
    garbage collection.
    """

    __slots__ = ("in_place", "memory", "resolver", "rows", "where")

    def __init__(self, memory: Bytes, rows: int, where: str, in_place: bool) -> None:
        self.memory, self.rows, self.where, self.in_place = memory, rows, where, in_place
        self.resolver: Resolve | None = None

    def corrupt(self, meta: ColumnMeta, why: str) -> Corrupt:
        """The error for a bad column."""
        return Corrupt(f"column '{meta.name}' of {self.where}", why=why)

    def part(self, meta: ColumnMeta, offset: int, nbytes: int) -> Bytes:
        """Bytes of the block; the limits are checked in Python's integers, which do not overflow."""
        if offset < HEADER.size or nbytes < 0 or offset + nbytes > len(self.memory):
            raise self.corrupt(meta, f"{offset}+{nbytes} lies outside its {len(self.memory)} bytes")
        if offset % INLINE_ALIGNMENT:
            raise self.corrupt(meta, f"{offset} is not a multiple of {INLINE_ALIGNMENT}")
        return self.memory[offset : offset + nbytes]

    def reshaped(self, meta: ColumnMeta, flat: NDArray[Any], shape: Sequence[int]) -> NDArray[Any]:
        """`flat` in another shape, without a copy."""
        try:
            return flat.reshape(shape)
        except (ValueError, OverflowError) as error:
            raise self.corrupt(meta, f"{len(flat)} elements are not of shape {tuple(shape)}") from error

    def decoded(self, meta: ColumnMeta, data: memoryview, type_: Any) -> Any:
        """The str or the object in these bytes."""
        try:
            return str(data, "utf-8") if type_ is str and meta.dtype == "str" else _decode(data, type_)
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise self.corrupt(meta, f"{len(data)} bytes of {meta.dtype} do not decode: {error}") from error

    def resolve(self, meta: ColumnMeta, digest: bytes) -> Block:
        """The block of the value with this digest."""
        if self.resolver is None:
            raise self.corrupt(meta, "a blob in a blob")
        block = self.resolver(digest)
        if block.rows != 1 or block.names != (BLOB,):
            raise self.corrupt(meta, f"blob {digest.hex()} has {block.rows} rows of {', '.join(block.names)}")
        return block

    def as_tensor(self, meta: ColumnMeta) -> torch.Tensor:
        """The data of a column as a flat tensor."""
        import torch

        part = self.part(meta, meta.offset, meta.nbytes)
        memory = np.asarray(_Writable(part)) if self.in_place else part.copy()
        tensor = torch.from_numpy(memory.view(STORAGE[meta.dtype]))
        return tensor.view(getattr(torch, TORCH[meta.dtype])) if meta.dtype in RAW else tensor


class _Column:
    """A column whose offsets were checked."""

    __slots__ = ("ground", "meta", "name")

    def __init__(self, ground: _BlockMemory, meta: ColumnMeta) -> None:
        self.ground, self.meta, self.name = ground, meta, meta.name

    def value(self, row: int) -> Any:
        raise NotImplementedError

    def tensor(self, row: int | None) -> torch.Tensor:
        raise Refused(f"column '{self.name}' of {self.meta.dtype} as a tensor", why="it does not hold numbers")


class _Fixed(_Column):
    """Rows of one shape."""

    __slots__ = ("_tensor", "array")

    def __init__(self, ground: _BlockMemory, meta: ColumnMeta) -> None:
        super().__init__(ground, meta)
        dtype, shape = STORAGE[meta.dtype], (ground.rows, *meta.shape)
        if len(meta.shape) != meta.ndim or meta.ndim > MAX_NDIM or min(shape) < 0:
            raise ground.corrupt(meta, f"shape {meta.shape} is not one of {meta.ndim} dimensions (limit {MAX_NDIM})")
        if math.prod(shape) * dtype.itemsize != meta.nbytes:
            raise ground.corrupt(meta, f"{meta.nbytes} bytes are not {meta.dtype} of shape {shape}")
        self.array: NDArray[Any] = ground.reshaped(meta, ground.part(meta, meta.offset, meta.nbytes).view(dtype), shape)
        self._tensor: torch.Tensor | None = None

    def value(self, row: int) -> Any:
        return self.array[row]

    def tensor(self, row: int | None) -> torch.Tensor:
        if self._tensor is None:
            self._tensor = self.ground.as_tensor(self.meta).view(self.array.shape)
        return self._tensor if row is None else self._tensor[row]


class _Parts(_Column):
    """Rows of different lengths, back to back. The offsets are a private copy: those in the memory might change."""

    __slots__ = ("data", "offsets")

    def __init__(self, ground: _BlockMemory, meta: ColumnMeta, dtype: np.dtype[Any]) -> None:
        super().__init__(ground, meta)
        elements, rest = divmod(meta.nbytes, dtype.itemsize)
        if rest:
            raise ground.corrupt(meta, f"{meta.nbytes} bytes are no whole number of {meta.dtype}")
        self.data = ground.part(meta, meta.offset, meta.nbytes).view(dtype)
        table = ground.part(meta, meta.table, (ground.rows + 1) * TABLE.itemsize).view(TABLE).copy()
        if table[0] != 0 or table[-1] != elements or (table[1:] < table[:-1]).any():
            raise ground.corrupt(meta, f"its offsets do not rise from 0 to {elements}")
        self.offsets: list[int] = table.tolist()


class _Ragged(_Parts):
    """Arrays of different shapes."""

    __slots__ = ("_flat", "_shapes")

    def __init__(self, ground: _BlockMemory, meta: ColumnMeta) -> None:
        if not 1 <= meta.ndim <= MAX_NDIM:
            raise ground.corrupt(meta, f"ragged, of {meta.ndim} dimensions (limit {MAX_NDIM})")
        super().__init__(ground, meta, STORAGE[meta.dtype])
        self._flat: torch.Tensor | None = None
        self._shapes: list[list[int]] | None = None
        if meta.ndim > 1:
            at = meta.table + (ground.rows + 1) * TABLE.itemsize
            shapes = ground.part(meta, at, ground.rows * meta.ndim * TABLE.itemsize).view(TABLE).copy()
            if shapes.min() < 0:
                raise ground.corrupt(meta, "a row has a negative dimension")
            self._shapes = shapes.reshape(ground.rows, meta.ndim).tolist()

    def value(self, row: int) -> NDArray[Any]:
        flat = self.data[self.offsets[row] : self.offsets[row + 1]]
        return flat if self._shapes is None else self.ground.reshaped(self.meta, flat, self._shapes[row])

    def tensor(self, row: int | None) -> torch.Tensor:
        if row is None:
            raise Refused(f"column '{self.name}' as one tensor", why="its rows differ in shape", hint="name a row")
        if self._flat is None:
            self._flat = self.ground.as_tensor(self.meta)
        flat = self._flat[self.offsets[row] : self.offsets[row + 1]]
        return flat if self._shapes is None else flat.view(self.value(row).shape)


class _Text(_Parts):
    """str, bytes or msgpack."""

    def __init__(self, ground: _BlockMemory, meta: ColumnMeta) -> None:
        if meta.ragged:
            super().__init__(ground, meta, np.dtype(np.uint8))
            return
        _Column.__init__(self, ground, meta)
        if ground.rows != 1:
            raise ground.corrupt(meta, f"one value for {ground.rows} rows")
        self.data, self.offsets = ground.part(meta, meta.offset, meta.nbytes), [0, meta.nbytes]

    def value(self, row: int) -> Any:
        data = self.data[self.offsets[row] : self.offsets[row + 1]].data
        if self.meta.dtype == "bytes":
            return bytes(data)
        return self.ground.decoded(self.meta, data, str if self.meta.dtype == "str" else Any)

    def decode(self, row: int, type_: Any) -> Any:
        return self.ground.decoded(self.meta, self.data[self.offsets[row] : self.offsets[row + 1]].data, type_)


class _Blobs(_Column):
    """Values that are stored elsewhere, by digest."""

    __slots__ = ("digests", "found")

    def __init__(self, ground: _BlockMemory, meta: ColumnMeta) -> None:
        super().__init__(ground, meta)
        if meta.ragged or meta.nbytes != ground.rows * DIGEST_BYTES:
            raise ground.corrupt(meta, f"{meta.nbytes} bytes are not {ground.rows} digests of {DIGEST_BYTES}")
        self.digests = ground.part(meta, meta.offset, meta.nbytes).tobytes()
        self.found: dict[bytes, Block] = {}

    def blob(self, row: int) -> Block:
        digest = self.digests[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]
        found = self.found.get(digest)
        if found is None:
            found = self.found[digest] = self.ground.resolve(self.meta, digest)
        return found

    def value(self, row: int) -> Any:
        return self.blob(row).value(BLOB, 0)

    def tensor(self, row: int | None) -> torch.Tensor:
        if row is None:
            raise Refused(f"column '{self.name}' as one tensor", why="its values are shared", hint="name a row")
        return self.blob(row).tensor(BLOB, 0)


class Block:
    """Reads a block in place. Columns are checked and decoded on first use.

    Arrays are read-only views of the memory and keep it mapped. bf16 and fp8 come as their bits (uint16, uint8), see
    `dtype`. Thread-safe: at worst a column is decoded twice.

    Raises:
        Corrupt: (also from the methods) the memory does not hold what a block must; names the column and the limit.
        Refused: (from the methods) there is no such column or row, or it cannot be had in this form.
    """

    __slots__ = ("_ground", "_metas", "_open_columns", "names", "rows", "where")

    def __init__(self, memory: Bytes, *, where: str = "a block", read_only_mapping: bool = False) -> None:
        """
        Args:
            memory: the block's bytes, and maybe more after them.
            where: names it in errors.
            read_only_mapping: nobody can write through a tensor over this memory, so tensors are made in place;
                else they are copies.
        """
        self.where = where
        if len(memory) < HEADER.size:
            raise Corrupt(where, why=f"{len(memory)} bytes, a block's header alone has {HEADER.size}")
        magic, version, flags, rows, meta_nbytes, nbytes = HEADER.unpack_from(memory.data)
        if magic != MAGIC or version != VERSION or flags:
            raise Corrupt(where, why=f"it begins with {magic!r}, version {version}, flags {flags}: not a block of ours")
        if not HEADER.size <= nbytes <= len(memory):
            raise Corrupt(where, why=f"it says it has {nbytes} bytes, of {len(memory)} that are there")
        if not 1 <= rows <= MAX_ROWS:
            raise Corrupt(where, why=f"it says it has {rows} rows, the limit is {MAX_ROWS}")
        if meta_nbytes > min(MAX_META_BYTES, nbytes - HEADER.size):
            raise Corrupt(where, why=f"a description of {meta_nbytes} bytes in {nbytes} (limit {MAX_META_BYTES})")
        try:
            columns = _META.decode(memory[HEADER.size : HEADER.size + meta_nbytes].tobytes())
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Corrupt(f"{where}: its description", why=str(error)) from error
        self.rows = rows
        self._ground = _BlockMemory(memory[:nbytes], rows, where, read_only_mapping)
        self._metas = {column.name: column for column in columns}
        self._open_columns: dict[str, _Column] = {}
        self.names = tuple(self._metas)
        if len(self._metas) != len(columns) or not 1 <= len(columns) <= MAX_COLUMNS:
            raise Corrupt(where, why=f"{len(columns)} columns with {len(self._metas)} names (limit {MAX_COLUMNS})")

    def blobs_from(self, resolve: Resolve) -> None:
        """Set the function that finds the blocks of shared values by digest."""
        self._ground.resolver = resolve

    def roots(self) -> list[NDArray[np.uint8]]:
        """The arrays that every view of this block, and of the shared values read, has as its base."""
        found = [self._ground.memory.base] if isinstance(self._ground.memory.base, np.ndarray) else []
        for column in self._open_columns.values():
            if isinstance(column, _Blobs):
                found += [root for block in column.found.values() for root in block.roots()]
        return found

    def drop_columns(self) -> None:
        """Drop the decoded columns, so that only views handed out keep the memory."""
        self._open_columns.clear()

    @property
    def nbytes(self) -> int:
        """Size of the block in bytes."""
        return len(self._ground.memory)

    def value(self, name: str, row: int) -> Any:
        """One row's value: a read-only array (a numpy scalar if it has no dimensions), str, bytes or object."""
        column = self._open_columns.get(name) or self._open(name)
        if not 0 <= row < self.rows:
            raise Refused(f"row {row} of {self.where}", why=f"it has {self.rows}")
        return column.value(row)

    def values(self, name: str) -> list[Any]:
        """The values of all rows."""
        column = self._open(name)
        return [column.value(row) for row in range(self.rows)]

    def column(self, name: str) -> NDArray[Any]:
        """All rows as one array [rows, …]: a view of a column of one shape; Python numbers are copied to one."""
        column = self._open(name)
        if isinstance(column, _Fixed):
            return column.array
        if column.meta.dtype == "msgpack":
            values = self.values(name)
            if all(isinstance(value, bool | int | float) for value in values):
                return np.array(values)
        raise Refused(
            f"column '{name}' of {self.where} as one array",
            why=f"its rows are {column.meta.dtype}" + (" of different shapes" if column.meta.ragged else ""),
            hint="take its values row by row",
        )

    def packed(self, name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """All rows of a column of arrays back to back, without padding: a flat view, and rows + 1 offsets into it."""
        column = self._open(name)
        if isinstance(column, _Fixed):
            size = column.array.size // self.rows
            return column.array.reshape(-1), np.arange(self.rows + 1, dtype=np.int64) * size
        if isinstance(column, _Ragged):
            return column.data, np.array(column.offsets, np.int64)
        raise Refused(f"column '{name}' of {self.where}, packed", why=f"its rows are {column.meta.dtype}")

    def tensor(self, name: str, row: int | None = None) -> torch.Tensor:
        """One row's value, or a whole column of one shape, as a torch tensor over the same memory.

        Do not write to it: the memory is mapped read-only and the kernel ends the process with SIGSEGV. Clone it
        before work in place.
        """
        column = self._open(name)
        if row is not None and not 0 <= row < self.rows:
            raise Refused(f"row {row} of {self.where}", why=f"it has {self.rows}")
        return column.tensor(row)

    def flat(self, name: str) -> tuple[torch.Tensor, list[int]]:
        """All rows of a column of numbers back to back, as `tensor` has them, and where each begins, in elements."""
        column = self._open(name)
        if isinstance(column, _Ragged):
            return self._ground.as_tensor(column.meta), column.offsets
        tensor = column.tensor(None).view(-1)
        size = len(tensor) // self.rows
        return tensor, [row * size for row in range(self.rows + 1)]

    def decode(self, name: str, row: int, type_: Any) -> Any:
        """A `msgpack` value as an object of the given type."""
        column = self._open(name)
        if isinstance(column, _Blobs) and 0 <= row < self.rows:
            return column.blob(row).decode(BLOB, 0, type_)
        if not isinstance(column, _Text) or column.meta.dtype != "msgpack" or not 0 <= row < self.rows:
            raise Refused(
                f"column '{name}' of {self.where} as {type_}", why=f"it is {column.meta.dtype}, {self.rows} rows"
            )
        return column.decode(row, type_)

    def dtype(self, name: str) -> str:
        """The column's dtype, as in ColumnMeta."""
        return self._meta(name).dtype

    def ragged(self, name: str) -> bool:
        """Whether the column's rows differ in shape."""
        return self._meta(name).ragged

    def _meta(self, name: str) -> ColumnMeta:
        meta = self._metas.get(name)
        if meta is None:
            raise Refused(f"column '{name}' of {self.where}", why=f"it has {', '.join(self.names)}")
        return meta

    def _open(self, name: str) -> _Column:
        column = self._open_columns.get(name)
        if column is None:
            meta = self._meta(name)
            if meta.dtype in STORAGE:
                column = _Ragged(self._ground, meta) if meta.ragged else _Fixed(self._ground, meta)
            elif meta.dtype in TEXT:
                column = _Text(self._ground, meta)
            elif meta.dtype == BLOB:
                column = _Blobs(self._ground, meta)
            else:
                raise self._ground.corrupt(meta, f"unknown dtype {meta.dtype!r}")
            self._open_columns[name] = column
        return column


def _decode(data: memoryview, type_: Any) -> Any:
    return msgspec.msgpack.decode(data, type=type_)


def resolver(blobs: Mapping[bytes, Any], fetch: Callable[[Any], Block], where: str) -> Resolve:
    """A function that finds blobs by digest among those of a batch."""

    def resolve(digest: bytes) -> Block:
        found = blobs.get(digest)
        if found is None:
            raise Corrupt(f"blob {digest.hex()} of {where}", why=f"it is not among the {len(blobs)} that came with it")
        return fetch(found)

    return resolve
