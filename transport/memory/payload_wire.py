"""Messages between a payload server and its readers.

A reader asks for ranges of slabs (`Get`), each with a number of its own choice. The server answers every range once:
in an answer of two frames, of which the first says what the second holds, the bytes of one range, of several small
ones, or a fault. What a reader has asked for and not received is its window: neither side ever buffers more than that.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from relax_rt.transport.rpc.channel import AddressError, parse_address
from relax_rt.transport.rpc.errors import ProtocolError
from relax_rt.transport.rpc.identity import CurveKeys
from relax_rt.transport.rpc.wire import FaultFrame
from relax_rt.transport.rpc.zmq_channel import as_server, bind, check_exposure, configure, numeric

MAGIC = b"RLXP"
VERSION = 1
GET, BYTES, FAULT = 1, 2, 3

MAX_RANGES = 256
"""Ranges in one `Get`, and in one answer."""
MAX_GET_BYTES = 128 * 1024
MAX_CHUNK_BYTES = 16 * 1024 * 1024
"""Second frame of an answer."""
MAX_FAULT_BYTES = 128 * 1024
SLAB_NAME_MAX_CHARS = 256

_PREFIX = struct.Struct("<4sBB")
_HEAD = struct.Struct("<4sBBH")
_PART = struct.Struct("<QIQ")
MAX_HEAD_BYTES = _HEAD.size + MAX_RANGES * _PART.size

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Range(msgspec.Struct, frozen=True, array_like=True):
    """Bytes [offset, offset + nbytes) of a slab; the answer carries `id`."""

    id: _Count
    slab: Annotated[str, msgspec.Meta(max_length=SLAB_NAME_MAX_CHARS)]
    offset: _Count
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK_BYTES)]


class GetRanges(msgspec.Struct, frozen=True, array_like=True):
    """A reader's request. digest: whether every chunk shall carry the xxh3-64 of its bytes."""

    digest: bool
    ranges: Annotated[list[Range], msgspec.Meta(min_length=1, max_length=MAX_RANGES)]


class RangeHead(NamedTuple):
    """What a part of an answer's second frame is: of which range, how many bytes, their xxh3-64 (0: not computed)."""

    id: int
    nbytes: int
    digest: int


_gets = msgspec.msgpack.Decoder(GetRanges)
_faults = msgspec.msgpack.Decoder(FaultFrame)


def encode_get(get: GetRanges) -> bytes:
    return _PREFIX.pack(MAGIC, VERSION, GET) + msgspec.msgpack.encode(get)


def decode_get(frame: bytes) -> GetRanges:
    """Read a request.

    Raises:
        ProtocolError: it is none, of another version, or breaks a bound.
    """
    if len(frame) < _PREFIX.size or len(frame) > MAX_GET_BYTES:
        raise ProtocolError(
            "a request for payload", why=f"it has {len(frame)} bytes, not {_PREFIX.size} to {MAX_GET_BYTES}"
        )
    magic, version, kind = _PREFIX.unpack_from(frame)
    _check(magic, version, kind == GET, kind, "a request for payload")
    try:
        return _gets.decode(memoryview(frame)[_PREFIX.size :])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError("a request for payload", why=str(error)) from error


def encode_head(kind: int, parts: Sequence[RangeHead]) -> bytes:
    return _HEAD.pack(MAGIC, VERSION, kind, len(parts)) + b"".join([_PART.pack(*part) for part in parts])


def decode_head(frame: bytes | bytearray | memoryview) -> tuple[int, list[RangeHead]]:
    """Kind and parts of an answer, from its first frame.

    Raises:
        ProtocolError: it is none, of another version, or breaks a bound.
    """
    if len(frame) < _HEAD.size:
        raise ProtocolError("the head of an answer", why=f"it has {len(frame)} bytes")
    magic, version, kind, count = _HEAD.unpack_from(frame)
    _check(magic, version, kind in (BYTES, FAULT), kind, "the head of an answer")
    if not 1 <= count <= MAX_RANGES or len(frame) != _HEAD.size + count * _PART.size:
        raise ProtocolError("the head of an answer", why=f"{len(frame)} bytes are not those of {count} parts")
    parts = [RangeHead(*part) for part in _PART.iter_unpack(memoryview(frame)[_HEAD.size :])]
    if sum(part.nbytes for part in parts) > MAX_CHUNK_BYTES:
        raise ProtocolError("the head of an answer", why=f"its parts are over the limit of {MAX_CHUNK_BYTES} bytes")
    return kind, parts


def decode_fault(frame: bytes | memoryview) -> FaultFrame:
    """Read the second frame of a `FAULT`.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return _faults.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError("the fault in an answer", why=str(error)) from error


def _check(magic: bytes, version: int, known: bool, kind: int, what: str) -> None:
    if magic != MAGIC:
        raise ProtocolError(what, why=f"it begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise WrongVersion(what, why=f"it is of version {version}, this end speaks {VERSION}")
    if not known:
        raise ProtocolError(what, why=f"its kind is {kind}")


class WrongVersion(ProtocolError):
    """The other end is of another version; nothing else will be understood either."""


class Wakeup:
    """Wakes a thread that polls sockets, by an eventfd."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def set(self) -> None:
        """Safe in any thread, and in the middle of anything."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def __del__(self) -> None:
        # Not earlier: a late `set` must not write to a descriptor number that is in use for something else.
        os.close(self.fd)


class ListeningSocket:
    """A bound ROUTER with its own context and io threads. Only the thread that made it may use the socket.

    Raises:
        AddressError: malformed, in use, not of this machine, or open to other machines without keys.
    """

    def __init__(
        self, address: str, keys: CurveKeys | None, *, io_threads: int, max_message_bytes: int, high_water_messages: int
    ) -> None:
        parsed = parse_address(address)
        if parsed.scheme == "unix":
            raise AddressError(f"listening on {address}", why="payloads go over tcp:// or ipc://")
        check_exposure(parsed, keys, "pass keys=")
        at = numeric(parsed)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads)
        self._authenticator = ThreadAuthenticator(self._context) if keys is not None else None
        self.sock = self._context.socket(zmq.ROUTER)
        configure(self.sock, linger_ms=0, max_message_bytes=max_message_bytes, high_water_messages=high_water_messages)
        try:
            as_server(self.sock, keys, self._authenticator)
            self.address = str(bind(self.sock, parsed, at))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close; blocks until the context has ended."""
        self.sock.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
