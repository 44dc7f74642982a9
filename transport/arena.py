"""Slabs of shared memory: written by the one process that made them, read by all the others without a copy."""

from __future__ import annotations

import mmap
import os
import re
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from relax_rt.transport.errors import Corrupt, OutOfSpace, Refused
from relax_rt.transport.identity import Incarnation
from relax_rt.transport.queue.api import Column, Freed

ALIGNMENT = 64
"""Bytes; every column in a slab begins at a multiple of it."""
INLINE_BYTES = 128
"""A value of at most this many bytes travels in the message."""
_SLAB_NAME = re.compile(r"[A-Za-z0-9_.-]+-\d+-\d+\.slab")


class Bf16(msgspec.Struct, frozen=True):
    """bfloat16 values as their bits (numpy has no such dtype): uint16 of any shape."""

    bits: NDArray[np.uint16]


def slab_name(who: Incarnation, n: int) -> str:
    """``rollout-0-7-1.slab``: slot, epoch, running number."""
    return f"{who.slot.replace('/', '-')}-{who.epoch}-{n}.slab"


def _aligned(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _encode(value: Any) -> tuple[str, tuple[int, ...], NDArray[Any] | bytes]:
    """dtype, shape and bytes of a value; arrays are left where they are, so that they are copied once."""
    if isinstance(value, Bf16):
        if value.bits.dtype != np.uint16:
            raise Refused("bfloat16 column", why=f"its bits are {value.bits.dtype}, not uint16")
        return "bf16", value.bits.shape, value.bits
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.kind not in "biufc":
            raise Refused(f"column of dtype {array.dtype}", why="only plain numbers are kept as arrays")
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        return array.dtype.str, array.shape, array
    if isinstance(value, str):
        data = value.encode()
        return "str", (len(data),), data
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        return "bytes", (len(data),), data
    data = msgspec.msgpack.encode(value)
    return "msgpack", (len(data),), data


class _FreeList:
    """Free extents of one slab, sorted by offset; neighbours are merged."""

    def __init__(self, nbytes: int) -> None:
        self.offsets = [0]
        self.sizes = {0: nbytes}
        self.largest = nbytes

    def allocate(self, nbytes: int) -> int | None:
        """Offset of the first extent that is large enough; None if there is none."""
        if nbytes > self.largest:
            return None
        for i, offset in enumerate(self.offsets):
            size = self.sizes[offset]
            if size >= nbytes:
                del self.sizes[offset]
                if size == nbytes:
                    del self.offsets[i]
                else:
                    self.offsets[i] = offset + nbytes
                    self.sizes[offset + nbytes] = size - nbytes
                return offset
        self.largest = max(self.sizes.values(), default=0)
        return None

    def free(self, offset: int, nbytes: int) -> None:
        i = bisect_left(self.offsets, offset)
        if i < len(self.offsets) and offset + nbytes == self.offsets[i]:
            nbytes += self.sizes.pop(self.offsets.pop(i))
        if i > 0 and self.offsets[i - 1] + self.sizes[self.offsets[i - 1]] == offset:
            offset = self.offsets[i - 1]
            self.sizes[offset] += nbytes
        else:
            self.offsets.insert(i, offset)
            self.sizes[offset] = nbytes
        self.largest = max(self.largest, self.sizes[offset])

    @property
    def free_bytes(self) -> int:
        return sum(self.sizes.values())


class _Slab:
    """One file of shared memory, mapped writable, its pages there from the start."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.name, self.nbytes = path.name, nbytes
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Reserving the pages now turns a full /dev/shm into an error here instead of a SIGBUS later.
            os.posix_fallocate(fd, 0, nbytes)
            self.memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            path.unlink()
            raise OutOfSpace(
                f"slab {path} of {nbytes} bytes", why=str(error), hint="lower [queue] capacity_mib or enlarge /dev/shm"
            ) from error
        finally:
            os.close(fd)
        self.bytes = np.frombuffer(self.memory, dtype=np.uint8)
        self.free_list = _FreeList(nbytes)
        self.used: dict[int, int] = {}


class Writer:
    """Puts values into slabs that only this incarnation writes. Thread-safe.

    Args:
        shm_dir: the run's private directory in shared memory.
        who: the incarnation that owns the slabs; its name is part of theirs.
        slab_bytes: size of one slab; a larger put gets a slab of its own.
        capacity_bytes: upper limit of all its slabs together.
    """

    def __init__(self, shm_dir: Path, who: Incarnation, *, slab_bytes: int, capacity_bytes: int) -> None:
        self._dir, self._who = shm_dir, who
        self._slab_bytes = _aligned(slab_bytes)
        self._capacity_bytes = max(capacity_bytes, self._slab_bytes)
        self._slabs: dict[str, _Slab] = {}
        self._made = 0
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Make and pre-fault the first slab, so that the first put does not. Blocks for some milliseconds."""
        with self._lock:
            if not self._slabs:
                self._make(self._slab_bytes)

    def put(self, values: Mapping[str, Any]) -> list[Column]:
        """Copy values into shared memory, all into one extent; tiny ones stay in their Column.

        A value is a numpy array or scalar, Bf16, str, bytes, or anything that msgspec can encode.

        Raises:
            OutOfSpace: no extent is free; free some, or wait for it.
            Refused: a value is not of a kind that can be put.
        """
        encoded = {name: _encode(value) for name, value in values.items()}
        placed = {name: data for name, (_, _, data) in encoded.items() if _nbytes(data) > INLINE_BYTES}
        slab, at = self._allocate(sum(_aligned(_nbytes(data)) for data in placed.values())) if placed else (None, 0)
        columns: list[Column] = []
        for name, (dtype, shape, data) in encoded.items():
            if slab is None or name not in placed:
                raw = data.tobytes() if isinstance(data, np.ndarray) else data
                columns.append(Column(name, dtype, shape, inline=raw))
                continue
            nbytes = _nbytes(data)
            target = slab.bytes[at : at + nbytes]
            if isinstance(data, np.ndarray):
                np.copyto(target.view(data.dtype).reshape(data.shape), data)
            else:
                target[:] = np.frombuffer(data, dtype=np.uint8)
            columns.append(Column(name, dtype, shape, slab.name, at, nbytes))
            at += _aligned(nbytes)
        return columns

    def _allocate(self, nbytes: int) -> tuple[_Slab, int]:
        with self._lock:
            for slab in self._slabs.values():
                offset = slab.free_list.allocate(nbytes)
                if offset is not None:
                    slab.used[offset] = nbytes
                    return slab, offset
            size = max(nbytes, self._slab_bytes)
            if self.total_bytes + size > self._capacity_bytes:
                raise OutOfSpace(
                    f"{nbytes} bytes in the shared memory of {self._who}",
                    why=f"{self.used_bytes} of {self._capacity_bytes} bytes are in use",
                )
            slab = self._make(size)
            slab.free_list.allocate(nbytes)
            slab.used[0] = nbytes
            return slab, 0

    def _make(self, nbytes: int) -> _Slab:
        self._made += 1
        slab = _Slab(self._dir / slab_name(self._who, self._made), nbytes)
        self._slabs[slab.name] = slab
        return slab

    def free(self, extent: Freed) -> None:
        """The extent is read by no one any more.

        Raises:
            Corrupt: it is not an extent in use: the ledger and the arena disagree.
        """
        with self._lock:
            slab = self._slabs.get(extent.slab)
            size = slab.used.pop(extent.offset, None) if slab is not None else None
            if slab is None or size is None:
                raise Corrupt(f"freeing {extent.slab}+{extent.offset} by {self._who}", why="no such extent is in use")
            slab.free_list.free(extent.offset, size)

    @property
    def used_bytes(self) -> int:
        """Bytes in use."""
        return sum(sum(slab.used.values()) for slab in self._slabs.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slab in self._slabs.values())

    def close(self) -> None:
        """Drop the mappings. The files stay for their readers; the broker unlinks them when none is left."""
        with self._lock:
            self._slabs.clear()


def _nbytes(data: NDArray[Any] | bytes) -> int:
    return data.nbytes if isinstance(data, np.ndarray) else len(data)


def _checked(column: Column, decode: Callable[[], Any]) -> Any:
    try:
        return decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"column '{column.name}'", why=str(error)) from error


class Reader:
    """Looks at columns, in place. Keeps at most max_slabs slabs mapped that no view refers to.

    A view is good until the lease that named its column is completed or abandoned: then its memory may be used
    again, so copy what must outlive that.
    """

    def __init__(self, shm_dir: Path, *, max_slabs: int = 256) -> None:
        self._dir, self._max = shm_dir, max_slabs
        self._maps: OrderedDict[str, NDArray[np.uint8]] = OrderedDict()
        self._lock = threading.Lock()

    def view(self, column: Column) -> Any:
        """The column's value: a read-only array without a copy (bf16 as uint16 bits), str, bytes or object.

        Raises:
            Corrupt: the column does not fit its slab, or its bytes do not fit its dtype and shape.
        """
        data = self._data(column)
        match column.dtype:
            case "str":
                return _checked(column, lambda: str(data.data, "utf-8"))
            case "bytes":
                return bytes(data.data)
            case "msgpack":
                return _checked(column, lambda: msgspec.msgpack.decode(data.data))
        return self._array(column, data)

    def decode(self, column: Column, type_: Any) -> Any:
        """The value of a `msgpack` column as an object of the given type.

        Raises:
            Corrupt: the bytes are not such an object.
        """
        data = self._data(column)
        return _checked(column, lambda: msgspec.msgpack.decode(data.data, type=type_))

    def _array(self, column: Column, data: NDArray[np.uint8]) -> NDArray[Any]:
        try:
            dtype = np.dtype("<u2" if column.dtype == "bf16" else column.dtype)
            if dtype.kind not in "biufc":
                raise TypeError(f"{dtype} is not a dtype of plain numbers")
            return data.view(dtype).reshape(column.shape)
        except (TypeError, ValueError) as error:
            raise Corrupt(
                f"column '{column.name}'",
                why=f"{len(data)} bytes are not {column.dtype} of shape {column.shape}: {error}",
            ) from error

    def _data(self, column: Column) -> NDArray[np.uint8]:
        if not column.slab:
            return np.frombuffer(column.inline, dtype=np.uint8)
        slab = self._slab(column.slab)
        if column.offset < 0 or column.nbytes < 0 or column.offset + column.nbytes > len(slab):
            raise Corrupt(
                f"column '{column.name}'",
                why=f"{column.offset}+{column.nbytes} lies outside slab {column.slab} of {len(slab)} bytes",
            )
        return slab[column.offset : column.offset + column.nbytes]

    def _slab(self, name: str) -> NDArray[np.uint8]:
        with self._lock:
            found = self._maps.get(name)
            if found is None:
                found = self._maps[name] = self._map(name)
                while len(self._maps) > self._max:
                    # Views keep their slab mapped; without any, it is unmapped here.
                    self._maps.popitem(last=False)
            else:
                self._maps.move_to_end(name)
            return found

    def _map(self, name: str) -> NDArray[np.uint8]:
        if not _SLAB_NAME.fullmatch(name):
            raise Corrupt(f"slab '{name}'", why="that is not a slab's name")
        try:
            fd = os.open(self._dir / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise Corrupt(f"slab {self._dir / name}", why=str(error)) from error
        try:
            return np.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), dtype=np.uint8)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Drop the mappings that no view refers to."""
        with self._lock:
            self._maps.clear()
