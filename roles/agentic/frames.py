"""What a slot and its workers say to each other: messages with a length before them, over a pair of sockets."""

from __future__ import annotations

import socket
import struct
from typing import Any, Literal, TypeVar

import msgspec

T = TypeVar("T")
Op = Literal["reset", "step", "close"]

LENGTH = struct.Struct("<I")
MOST_BYTES = 64 << 20


class Spec(msgspec.Struct, frozen=True):
    """Which environment a worker has; see roles.env."""

    target: str
    options: dict[str, Any]
    config_dir: str


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A call for an episode's environment; data is the encoded task or reply."""

    number: int
    episode: int
    op: Op
    data: bytes = b""


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What became of a call: the encoded Observation, text or Step, or why there is none. Number 0: the start."""

    number: int
    data: bytes = b""
    error: str = ""


def frame(message: msgspec.Struct) -> bytes:
    """A message with its length."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MOST_BYTES:
        raise ValueError(f"a message of {len(body)} bytes, {MOST_BYTES} at most")
    return LENGTH.pack(len(body)) + body


def send(link: socket.socket, message: msgspec.Struct) -> None:
    """Send a message; blocks."""
    link.sendall(frame(message))


def receive(link: socket.socket, type_: type[T]) -> T | None:
    """The next message; blocks. None: the other end is closed."""
    head = _exactly(link, LENGTH.size)
    if head is None:
        return None
    body = _exactly(link, LENGTH.unpack(head)[0])
    return None if body is None else msgspec.msgpack.decode(body, type=type_)


def _exactly(link: socket.socket, count: int) -> bytes | None:
    found = bytearray()
    while len(found) < count:
        try:
            part = link.recv(count - len(found))
        except ConnectionError:
            return None
        if not part:
            return None
        found += part
    return bytes(found)
