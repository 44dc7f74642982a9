"""The messages of the RPC layer, and how they are framed on a byte stream.

A connection begins with one `HelloFrame` from each side, the client's first. After that a client sends
`Request`, `Tell`, `Open`, `Grant` and `Cancel`, a server `Reply`, `Item`, `End`, `Fault` and, when it closes, `Retire`.
Messages are msgpack; on a byte stream each is preceded by its length, four bytes, little-endian. The structs are
positional: a change of any of them is a new PROTOCOL.
"""

from __future__ import annotations

import os
import struct
from typing import Annotated

import msgspec

from relax_rt.transport.rpc.errors import ProtocolError
from relax_rt.transport.rpc.identity import Hello, Incarnation

PROTOCOL = 3
"""Version of everything on the wire; both ends must have the same."""

HEADER = struct.Struct("<I")
HELLO_MAX_BYTES = 16 * 1024
"""Bound on the first message of a connection, which comes from a peer that is not yet known."""

CREDIT_MAX = 1 << 20
"""Bound on the items of a stream that may be under way."""
TRACE_MAX_CHARS = 4_000
TEXT_MAX_CHARS = 16_000


class HelloFrame(Hello, frozen=True, kw_only=True):
    """Hello with the sender's limits, so that the other end can refuse what would be refused anyway.

    Its keys are named, not positional: a side of any protocol version can read the version of the other.
    """

    max_message_bytes: int = 0
    max_inflight: int = 0


class Request(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """A call that is answered. `timeout_s` is what is left of the caller's deadline."""

    id: int
    api: str
    method: str
    timeout_s: float
    args: msgspec.Raw


class Tell(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """A call without an answer."""

    api: str
    method: str
    timeout_s: float
    args: msgspec.Raw


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The caller no longer waits for request `id`."""

    id: int


class Reply(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """The result of request `id`."""

    id: int
    result: msgspec.Raw


class Open(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    """A call that is answered by a stream of items.

    `timeout_s` is the longest the producer may take for one item; `credit` is how many it may send before a Grant.
    """

    id: int
    api: str
    method: str
    timeout_s: float
    credit: Annotated[int, msgspec.Meta(ge=1, le=CREDIT_MAX)]
    args: msgspec.Raw


class Grant(msgspec.Struct, frozen=True, array_like=True, tag=7, gc=False):
    """The consumer of stream `id` has taken items: the producer may send `credit` more."""

    id: int
    credit: Annotated[int, msgspec.Meta(ge=1, le=CREDIT_MAX)]


class Item(msgspec.Struct, frozen=True, array_like=True, tag=8, gc=False):
    """The next item of stream `id`."""

    id: int
    value: msgspec.Raw


class End(msgspec.Struct, frozen=True, array_like=True, tag=9, gc=False):
    """Stream `id` has no more items."""

    id: int


class Retire(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The server closes: it begins no request that comes after this. The client ends the connection once it has the
    answers that are still under way."""


class Fault(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Request `id` failed.

    Attributes:
        kinds: RelaxError classes of the error as ``module:qualname``, the most derived first; the receiver takes the
            first that it knows. Empty when the error was no RelaxError.
        what, why, hint: fields of a RelaxError.
        kind, message: class and text of any other exception.
        where: who raised it, in which method.
        trace: the last lines of its traceback.
    """

    id: int
    kinds: tuple[str, ...] = ()
    what: str = ""
    why: str = ""
    hint: str = ""
    kind: str = ""
    message: str = ""
    where: str = ""
    trace: str = ""


FromClient = Request | Tell | Cancel | Open | Grant
FromServer = Reply | Fault | Item | End | Retire


def make_hello(run_id: str, who: Incarnation) -> Hello:
    """The greeting of this process under the protocol that it speaks."""
    return Hello(protocol=PROTOCOL, run_id=run_id, who=who, pid=os.getpid())


def encode_frame(message: bytes) -> bytes:
    """A message with its length in front, as it goes onto a byte stream."""
    return HEADER.pack(len(message)) + message


class FrameDecoder:
    """Cuts a byte stream into messages; pure. `max_message_bytes` may be changed between calls of `feed`."""

    def __init__(self, max_message_bytes: int) -> None:
        self.max_message_bytes = max_message_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Messages completed by these bytes, in order.

        Raises:
            ProtocolError: a length is above the bound. The stream is of no further use.
        """
        messages: list[bytes] = []
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._wanted():
                return messages
            data = bytes(self._buffer)
            self._buffer.clear()
        start, end = 0, len(data)
        while end - start >= HEADER.size:
            (length,) = HEADER.unpack_from(data, start)
            self._check(length)
            stop = start + HEADER.size + length
            if stop > end:
                break
            messages.append(data[start + HEADER.size : stop])
            start = stop
        if start < end:
            self._buffer += memoryview(data)[start:]
        return messages

    @property
    def pending_bytes(self) -> int:
        """Bytes of an unfinished message held."""
        return len(self._buffer)

    def _wanted(self) -> int:
        if len(self._buffer) < HEADER.size:
            return HEADER.size
        (length,) = HEADER.unpack_from(self._buffer)
        self._check(length)
        return HEADER.size + int(length)

    def _check(self, length: int) -> None:
        if length > self.max_message_bytes:
            raise ProtocolError(
                f"a message of {length} bytes announced",
                why=f"the limit of this end is {self.max_message_bytes} bytes",
                hint="the peer speaks another protocol, or has a larger limit",
            )
