"""Values that samples are made of, and how each is named and laid out in a block of shared memory."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from relax_rt.transport.rpc.errors import Refused

PLAIN = ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16")
"""numpy's names of the dtypes that are kept as they are."""
RAW = {"bf16": "<u2", "fp8_e4m3": "|u1", "fp8_e5m2": "|u1"}
"""Dtypes that numpy does not know, and the one that their bits are kept as."""
TEXT = ("str", "bytes", "msgpack")
"""Values that are a string of bytes."""
BLOB = "blob"
"""A value that is kept elsewhere, under the digest that stands here."""
DIGEST_BYTES = 16
SHARE_FROM_BYTES = 4096
"""bytes and uint8 arrays from this size on are checked for duplicates among the rows of a put."""

STORAGE = {code: np.dtype(code) for code in PLAIN} | {code: np.dtype(bits) for code, bits in RAW.items()}
"""The numpy dtype that a dtype's elements are stored as."""
TORCH = {
    "bf16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""torch's names of the dtypes that numpy does not know."""
_BY_NAME = {name: code for code, name in TORCH.items()}
"""ml_dtypes uses the same names as torch."""

Kind = tuple[str, int]
"""dtype, and dimensions of one row's value (-1: not an array)."""
Data = NDArray[Any] | bytes | memoryview
STR, BYTES, OBJECT, SHARED, BLOB_KIND = ("str", -1), ("bytes", -1), ("msgpack", -1), ("shared", -1), (BLOB, -1)

_ORDERS: tuple[Literal["<", ">"], ...] = ("<", ">")
_codes = {np.dtype(code).newbyteorder(order): code for code in PLAIN for order in _ORDERS}
_kinds: dict[tuple[np.dtype[Any], int], Kind] = {
    (dtype, ndim): (code, ndim) for dtype, code in _codes.items() for ndim in range(6)
}


class Raw(msgspec.Struct, frozen=True):
    """Elements of a dtype that numpy does not know, as their bits.

    Attributes:
        dtype: bf16 (bits: uint16), fp8_e4m3 or fp8_e5m2 (uint8); fp8_e4m3 is the variant without infinities
            (torch's float8_e4m3fn).
        bits: of any shape.
    """

    dtype: str
    bits: NDArray[Any]


def Bf16(bits: NDArray[np.uint16]) -> Raw:
    """bfloat16 values as their bits."""
    return Raw("bf16", bits)


class Shared(msgspec.Struct, frozen=True):
    """A value that several samples of a put hold, as the image of a group's prompt: it is stored once, by content.

    As a whole column of `put_columns` it is the value of every row.
    """

    value: Any


def encoded(name: str, value: Any) -> tuple[Kind, Any]:
    """Kind and data of the value of field `name`; arrays are left where they are, so that they are copied once.

    The data of a Shared value are the kind and data of what it holds.

    Raises:
        Refused: it is not of a kind that can be put.
    """
    kind = type(value)
    if kind is np.ndarray:
        found = _kinds.get((value.dtype, value.ndim))
        return (found, value) if found is not None else _array(name, value)
    if kind is str:
        return STR, _utf8(name, value)
    if kind is bytes:
        return BYTES, value
    if kind is Shared:
        inner = encoded(name, value.value)
        if inner[0] is SHARED:
            raise Refused(f"field '{name}'", why="a Shared value in a Shared value")
        return SHARED, inner
    return _other(name, value)


def _other(name: str, value: Any) -> tuple[Kind, Any]:
    if isinstance(value, Raw):
        bits = RAW.get(value.dtype)
        if bits is None:
            raise Refused(f"field '{name}' of dtype {value.dtype!r}", why=f"Raw holds one of {', '.join(RAW)}")
        if not isinstance(value.bits, np.ndarray | np.generic) or value.bits.dtype != bits:
            given = getattr(value.bits, "dtype", type(value.bits).__name__)
            raise Refused(f"field '{name}' of dtype {value.dtype}", why=f"its bits are {given}, not {np.dtype(bits)}")
        return (value.dtype, value.bits.ndim), np.asarray(value.bits)
    # numpy's own str and bytes scalars are such too.
    if isinstance(value, str):
        return STR, _utf8(name, value)
    if isinstance(value, bytes | bytearray | memoryview):
        view = memoryview(value)
        return BYTES, view.cast("B") if view.c_contiguous and view.nbytes else view.tobytes()
    if isinstance(value, np.ndarray | np.generic):
        if isinstance(value, np.ma.MaskedArray):
            raise Refused(f"field '{name}'", why="a masked array", hint="put its data and its mask as two fields")
        return _array(name, np.asarray(value))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, getattr(torch, "Tensor", ())):
        return _tensor(name, value, torch)
    try:
        return OBJECT, msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise Refused(
            f"field '{name}' of type {type(value).__name__}",
            why=str(error),
            hint="put arrays, tensors, str, bytes, or what msgspec can encode",
        ) from error


def _utf8(name: str, value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise Refused(f"field '{name}' of type str", why=str(error)) from error


def _array(name: str, array: NDArray[Any]) -> tuple[Kind, Any]:
    code = _codes.get(array.dtype)
    if code is not None:
        return (code, array.ndim), array
    code = _BY_NAME.get(array.dtype.name)
    if code is None:
        raise Refused(f"field '{name}' of dtype {array.dtype}", why="only plain numbers are kept as arrays")
    return (code, array.ndim), array.view(RAW[code])


def _tensor(name: str, tensor: Any, torch: Any) -> tuple[Kind, Any]:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise Refused(
            f"field '{name}', a tensor on {tensor.device} of layout {tensor.layout}",
            why="only dense tensors in main memory are put",
            hint="call .cpu() and .to_dense() on it first",
        )
    tensor = tensor.detach().resolve_conj().resolve_neg()
    dtype = str(tensor.dtype).removeprefix("torch.")
    code = _BY_NAME.get(dtype)
    try:
        if code is None:
            return _array(name, tensor.numpy())
        return (code, tensor.ndim), tensor.view(torch.int16 if code == "bf16" else torch.uint8).numpy().view(RAW[code])
    except TypeError as error:
        raise Refused(f"field '{name}' of dtype {tensor.dtype}", why=str(error)) from error


def data_nbytes(data: Data) -> int:
    """Size of a value's data in bytes."""
    return len(data) if type(data) is bytes else data.nbytes  # type: ignore[union-attr]


def _contiguous(kind: Kind, data: Data) -> Data:
    return np.ascontiguousarray(data, STORAGE[kind[0]]) if isinstance(data, np.ndarray) else data


def digest_of(kind: Kind, data: Data) -> bytes:
    """xxh3-128 of dtype, shape and bytes."""
    state = xxhash.xxh3_128(f"{kind[0]}{data.shape if isinstance(data, np.ndarray) else ''}:".encode())
    data = _contiguous(kind, data)
    state.update(memoryview(data.data if isinstance(data, np.ndarray) else data))
    return state.digest()


def sketch_of(kind: Kind, data: Data) -> tuple[Kind, int, bytes]:
    """About 64 bytes of the value: equal for equal values, rarely for others, and much cheaper than a digest."""
    flat = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data.reshape(-1)
    return kind, flat.nbytes, flat[:: max(1, len(flat) // 61)].tobytes()


Pairs = list[tuple[Kind, Any]]
"""Values as kind and data."""


class Hashes:
    """Values of one put that are stored once, by content.

    Attributes:
        values: kind and data by digest.
        shared: how many values were replaced by a digest, and shared_bytes their bytes.
    """

    def __init__(self) -> None:
        self.values: dict[bytes, tuple[Kind, Data]] = {}
        self.shared = self.shared_bytes = 0
        # Keeping the object alive keeps its id unique.
        self._digests: dict[int, tuple[Data, bytes]] = {}

    def digest(self, kind: Kind, data: Data) -> bytes:
        """The digest of a value; the same object is hashed once."""
        found = self._digests.get(id(data))
        if found is None:
            found = self._digests[id(data)] = (data, digest_of(kind, data))
        return found[1]

    def share(self, kind: Kind, data: Data) -> bytes:
        """Store the value by content; returns the digest that replaces it."""
        digest = self.digest(kind, data)
        self.values.setdefault(digest, (kind, data))
        self.shared += 1
        self.shared_bytes += data_nbytes(data)
        return digest


def may_repeat(kind: Kind) -> bool:
    """Whether values of this kind are checked for duplicates."""
    return kind is SHARED or kind is BYTES or kind[0] == "|u1"


def share_repeated(columns: Iterable[Pairs], hashes: Hashes) -> None:
    """Replace, in place, values marked as shared and large ones that come twice by their digests.

    Only values of which a few bytes agree are hashed, so that distinct ones cost next to nothing.
    """
    sketches: dict[tuple[Kind, int, bytes], list[tuple[Pairs, int]]] = {}
    for pairs in columns:
        for i, (kind, data) in enumerate(pairs):
            if kind is SHARED:
                pairs[i] = (BLOB_KIND, hashes.share(*data))
            elif may_repeat(kind) and data_nbytes(data) >= SHARE_FROM_BYTES:
                sketches.setdefault(sketch_of(kind, data), []).append((pairs, i))
    for places in sketches.values():
        if len(places) > 1:
            _share_equal(places, hashes)


def _share_equal(places: list[tuple[Pairs, int]], hashes: Hashes) -> None:
    by_digest: dict[bytes, list[tuple[Pairs, int]]] = {}
    for pairs, i in places:
        by_digest.setdefault(hashes.digest(*pairs[i]), []).append((pairs, i))
    for same in by_digest.values():
        if len(same) > 1:
            for pairs, i in same:
                pairs[i] = (BLOB_KIND, hashes.share(*pairs[i]))
