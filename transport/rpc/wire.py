"""The messages of the RPC layer: their types, their bytes, and how they are framed on a byte stream.

A connection begins with one `HelloFrame` from each side, the client's first. After that a client sends
`Request`, `Tell`, `Open`, `Grant` and `Cancel`, a server `Reply`, `Item`, `End`, `Fault` and, when it closes, `GoAway`.
Messages are msgpack; on a byte stream each is preceded by its length, four bytes, little-endian. The structs are
positional: a change of any of them is a new PROTOCOL.
"""

from __future__ import annotations

import os
import pathlib
import struct
import traceback
from typing import Annotated, Any

import msgspec

from relax_rt.transport.rpc.errors import ProtocolError, Refused, RelaxError, RemoteError
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
UNDECODABLE = (msgspec.DecodeError, ValueError, RecursionError)
"""What msgspec raises on bytes of others: text that is no UTF-8 and nesting too deep come as Python's own errors."""
DEFAULT_MAX_MESSAGE_BYTES = 64 * 1024 * 1024


class HelloFrame(Hello, frozen=True, kw_only=True):
    """Hello with the sender's limits, so that the other end can refuse what would be refused anyway.

    Its keys are named, not positional: a side of any protocol version can read the version of the other.
    """

    max_message_bytes: int = 0
    max_inflight: int = 0


class RequestFrame(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """A call that is answered. `timeout_s` is what is left of the caller's deadline."""

    id: int
    api: str
    method: str
    timeout_s: float
    args: msgspec.Raw


class TellFrame(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """A call without an answer."""

    api: str
    method: str
    timeout_s: float
    args: msgspec.Raw


class CancelFrame(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The caller no longer waits for request `id`."""

    id: int


class ReplyFrame(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """The result of request `id`."""

    id: int
    result: msgspec.Raw


class OpenStreamFrame(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    """A call that is answered by a stream of items.

    `timeout_s` is the longest the producer may take for one item; `credit` is how many it may send before a Grant.
    """

    id: int
    api: str
    method: str
    timeout_s: float
    credit: Annotated[int, msgspec.Meta(ge=1, le=CREDIT_MAX)]
    args: msgspec.Raw


class GrantFrame(msgspec.Struct, frozen=True, array_like=True, tag=7, gc=False):
    """The consumer of stream `id` has taken items: the producer may send `credit` more."""

    id: int
    credit: Annotated[int, msgspec.Meta(ge=1, le=CREDIT_MAX)]


class ItemFrame(msgspec.Struct, frozen=True, array_like=True, tag=8, gc=False):
    """The next item of stream `id`."""

    id: int
    value: msgspec.Raw


class EndFrame(msgspec.Struct, frozen=True, array_like=True, tag=9, gc=False):
    """Stream `id` has no more items."""

    id: int


class GoAwayFrame(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The server closes: it begins no request that comes after this. The client ends the connection once it has the
    answers that are still under way."""


class FaultFrame(msgspec.Struct, frozen=True, array_like=True, tag=5):
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


FromClient = RequestFrame | TellFrame | CancelFrame | OpenStreamFrame | GrantFrame
FromServer = ReplyFrame | FaultFrame | ItemFrame | EndFrame | GoAwayFrame


def make_hello(run_id: str, who: Incarnation) -> Hello:
    """The greeting of this process under the protocol that it speaks."""
    return Hello(protocol=PROTOCOL, run_id=run_id, who=who, pid=os.getpid())


# --- bytes


def _encode_foreign(value: Any) -> Any:
    if isinstance(value, pathlib.PurePath):
        return str(value)
    # numpy scalars leak out of arithmetic everywhere; numpy itself is not imported for them.
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    raise NotImplementedError(f"{type(value).__module__}.{type(value).__qualname__} has no place in a message")


def _decode_foreign(kind: type, value: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, pathlib.PurePath):
        return kind(value)
    raise NotImplementedError(f"{kind!r} has no place in a message")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_foreign)
_from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


class _Version(msgspec.Struct):
    protocol: int


def encode(value: Any, what: str) -> bytes:
    """Encode a value; `what` names it in errors.

    Raises:
        Refused: a part of the value has no place in a message.
    """
    try:
        return _encoder.encode(value)
    except (NotImplementedError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Refused(
            what, why=f"cannot be sent: {error}", hint="send structs, numbers, strings, bytes, lists, dicts"
        ) from error


def decoder_for(kind: Any, what: str) -> msgspec.msgpack.Decoder[Any]:
    """A decoder for a type annotation; build it once and keep it.

    Raises:
        Refused: the annotation is no type that can cross the wire.
    """
    try:
        return msgspec.msgpack.Decoder(kind, dec_hook=_decode_foreign)
    except TypeError as error:
        raise Refused(what, why=f"its type cannot cross the wire: {error}") from error


def decode_from_client(message: bytes) -> FromClient:
    """Decode what a client sent.

    Raises:
        ProtocolError: it is no message of this protocol.
    """
    try:
        return _from_client.decode(message)
    except UNDECODABLE as error:
        raise ProtocolError(f"a message of {len(message)} bytes from a client", why=str(error)) from error


def decode_from_server(message: bytes) -> FromServer:
    """Decode what a server sent.

    Raises:
        ProtocolError: it is no message of this protocol.
    """
    try:
        return _from_server.decode(message)
    except UNDECODABLE as error:
        raise ProtocolError(f"a message of {len(message)} bytes from a server", why=str(error)) from error


def decode_hello(message: bytes) -> HelloFrame | int:
    """Decode the first message of a connection: the greeting, or only its protocol when the rest is unreadable.

    Raises:
        ProtocolError: it is no greeting at all.
    """
    if len(message) > HELLO_MAX_BYTES:
        raise ProtocolError(f"a greeting of {len(message)} bytes", why=f"the limit is {HELLO_MAX_BYTES} bytes")
    try:
        return msgspec.msgpack.decode(message, type=HelloFrame)
    except UNDECODABLE as error:
        try:
            return msgspec.msgpack.decode(message, type=_Version).protocol
        except UNDECODABLE:
            raise ProtocolError("the first message of a connection", why=f"it is no greeting: {error}") from error


def encode_message(message: HelloFrame | FromClient | FromServer) -> bytes:
    """Encode an envelope, whose parts are encoded already."""
    return _encoder.encode(message)


# --- errors across the wire


def _name(kind: type[BaseException]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def fault_of(error: BaseException, request: int, where: str) -> FaultFrame:
    """Describe an exception for the remote caller; texts are truncated."""
    if isinstance(error, RemoteError):
        # The handler itself made a remote call: the caller learns where the error was raised first.
        return FaultFrame(request, kind=error.kind, message=error.message, where=error.where, trace=error.trace)
    trace = "".join(traceback.format_exception(error))[-TRACE_MAX_CHARS:]
    if not isinstance(error, RelaxError):
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        return FaultFrame(request, kind=name, message=str(error)[:TEXT_MAX_CHARS], where=where, trace=trace)
    return FaultFrame(
        request,
        kinds=tuple(_name(kind) for kind in type(error).__mro__ if issubclass(kind, RelaxError)),
        # A subclass may have passed anything for them, or nothing.
        what=str(getattr(error, "what", error))[:TEXT_MAX_CHARS],
        why=str(getattr(error, "why", ""))[:TEXT_MAX_CHARS],
        hint=str(getattr(error, "hint", ""))[:TEXT_MAX_CHARS],
        where=where,
        # A refusal is explained by its own text; its traceback in the server would not help.
        trace="" if isinstance(error, Refused) else trace,
    )


def error_of(fault: FaultFrame) -> RelaxError:
    """The exception to raise for a fault: the same RelaxError class, or its nearest known base, or RemoteError.

    A subclass keeps `what`, `why` and `hint`; fields of its own do not cross. Where it was raised is a note on it.
    """
    if not fault.kinds:
        remote = RemoteError(fault.kind, fault.message, where=fault.where, trace=fault.trace)
        if fault.trace:
            remote.add_note(f"traceback at {fault.where}:\n{fault.trace.rstrip()}")
        return remote
    kind = next((known for name in fault.kinds if (known := _known_kind(name)) is not None), RelaxError)
    error = kind.__new__(kind)
    RelaxError.__init__(error, fault.what, why=fault.why, hint=fault.hint)
    error.add_note(f"raised by {fault.where}" + (f"\n{fault.trace}" if fault.trace else ""))
    return error


_kinds: dict[str, type[RelaxError]] = {}


def _known_kind(name: str) -> type[RelaxError] | None:
    if name not in _kinds:
        # Classes may have been defined since the last look.
        todo: list[type[RelaxError]] = [RelaxError]
        while todo:
            kind = todo.pop()
            _kinds[_name(kind)] = kind
            todo.extend(kind.__subclasses__())
    return _kinds.get(name)


# --- frames


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
