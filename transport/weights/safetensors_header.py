"""The header of a safetensors file: written as the library writes it, and read as something that anybody may have made.

A file is eight bytes with the header's length, the header (JSON), and the tensors' bytes without a hole.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple

import msgspec

from relax_rt.transport.rpc.errors import Corrupt, Refused

MAX_HEADER_BYTES = 64 << 20
"""About half a million tensors."""
MAX_NAME_CHARS = 1024
MAX_DIMENSIONS = 16
LENGTH = struct.Struct("<Q")
METADATA = "__metadata__"

_CODES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
_DTYPES = {code: (dtype, size) for dtype, (code, size) in _CODES.items()}


class FileTensor(NamedTuple):
    """A tensor of a file: dtype as torch names it; [start, stop) in the bytes behind the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """What a file holds: tensors in the order of their bytes, and texts by name."""

    tensors: tuple[FileTensor, ...]
    metadata: dict[str, str]


_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


_headers = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entries = msgspec.json.Decoder(_Entry)
_texts = msgspec.json.Decoder(dict[str, str])


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a file with these (name, dtype, shape, nbytes), one after the other.

    Raises:
        Refused: the format has no such dtype.
    """
    entries: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for name, dtype, shape, nbytes in tensors:
        if dtype not in _CODES:
            raise Refused(f"tensor {name}", why=f"safetensors has no {dtype}")
        entries[name] = {"dtype": _CODES[dtype][0], "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    return LENGTH.pack(len(text)) + text


def header_bytes(prefix: bytes, file_bytes: int, what: str) -> int:
    """Length of the header behind a file's first eight bytes.

    Raises:
        Corrupt: it is no length that a header of this file can have.
    """
    if len(prefix) < LENGTH.size:
        raise Corrupt(what, why=f"{len(prefix)} bytes are no safetensors file")
    length = int(LENGTH.unpack_from(prefix)[0])
    if length > min(MAX_HEADER_BYTES, file_bytes - LENGTH.size):
        raise Corrupt(what, why=f"a header of {length} bytes is announced in a file of {file_bytes}")
    return length


def decode_header(text: bytes | memoryview, data_bytes: int, what: str) -> Header:
    """Read a header.

    Args:
        data_bytes: how many bytes the file has behind it.
        what: names the file in errors.

    Raises:
        Corrupt: it is none, or says what cannot be: of a tensor that is not whole inside the file, overlaps another,
            has another size than its dtype and shape.
    """
    try:
        values = _headers.decode(text)
        metadata = _texts.decode(values.pop(METADATA)) if METADATA in values else {}
        entries = [(name, _entries.decode(raw)) for name, raw in values.items()]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"header of {what}", why=str(error)) from error
    tensors = sorted((_tensor(name, entry, what) for name, entry in entries), key=lambda t: (t.start, t.stop))
    at = 0
    for tensor in tensors:
        if tensor.start != at:
            raise Corrupt(f"tensor {tensor.name} in {what}", why=f"it begins at byte {tensor.start}, not at {at}")
        at = tensor.stop
    if at != data_bytes:
        raise Corrupt(f"header of {what}", why=f"its tensors have {at} bytes, the file {data_bytes}")
    return Header(tuple(tensors), metadata)


def _tensor(name: str, entry: _Entry, what: str) -> FileTensor:
    if len(name) > MAX_NAME_CHARS:
        raise Corrupt(f"header of {what}", why=f"a tensor's name has {len(name)} characters")
    if entry.dtype not in _DTYPES:
        raise Corrupt(f"tensor {name} in {what}", why=f"dtype {entry.dtype[:32]!r} is not known")
    dtype, size = _DTYPES[entry.dtype]
    start, stop = entry.data_offsets
    if stop - start != math.prod(entry.shape) * size:
        raise Corrupt(f"tensor {name} in {what}", why=f"bytes {start} to {stop} are not those of {dtype} {entry.shape}")
    return FileTensor(name, dtype, tuple(entry.shape), start, stop)
