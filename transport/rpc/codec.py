"""msgpack by msgspec: how arguments and results of typed methods become bytes and come back as their types."""

from __future__ import annotations

import pathlib
from typing import Any, TypeVar

import msgspec

from relax_rt.transport.rpc.errors import ProtocolError, Refused
from relax_rt.transport.rpc.wire import HELLO_MAX_BYTES, FromClient, FromServer, HelloFrame

T = TypeVar("T")

UNDECODABLE = (msgspec.DecodeError, ValueError, RecursionError)
"""What msgspec raises on bytes of others: text that is no UTF-8 and nesting too deep come as Python's own errors."""
DEFAULT_MAX_MESSAGE_BYTES = 64 * 1024 * 1024


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
