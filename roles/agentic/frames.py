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
    """Which environment a worker has; see roles.env. After blocked_s a loop that does not answer is blocked."""

    target: str
    options: dict[str, Any]
    config_dir: str
    blocked_s: float = 5.0


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


class Do(msgspec.Struct, frozen=True, array_like=True, tag="do"):
    """A call for an episode that is async; data is the encoded task or reply. Others are begun before it has ended."""

    number: int
    episode: int
    op: Literal["reset", "step", "close", "play"]
    data: bytes = b""


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """What became of it, as Answer; over: a function let EpisodeOver pass."""

    number: int
    data: bytes = b""
    error: str = ""
    over: str = ""


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A function that is called (number) asks the policy; data is an encoded Asked."""

    number: int
    ask: int
    data: bytes


class Said(msgspec.Struct, frozen=True, array_like=True, tag="said"):
    """What the policy says to that: an encoded Reply, or why there is none."""

    ask: int
    data: bytes = b""
    error: str = ""
    over: str = ""


class Gave(msgspec.Struct, frozen=True, array_like=True, tag="gave"):
    """A reward of a reply, by the function that is called."""

    number: int
    value: float
    reply: str


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """To a worker: nobody waits for a call any more; from it: for an ask. It is cancelled."""

    number: int
    ask: int = 0


class Blocked(msgspec.Struct, frozen=True, array_like=True, tag="blocked"):
    """A call (0: none that is known) blocks the worker's event loop, at this line of code; empty: it answers again."""

    number: int
    line: str = ""


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """Arguments of Chat.say."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    previous: str


ToLoop = Do | Said | Drop
FromLoop = Done | Ask | Gave | Drop | Blocked


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
    found = body(link)
    return None if found is None else msgspec.msgpack.decode(found, type=type_)


def body(link: socket.socket) -> bytes | None:
    """The next message, encoded; blocks. None: the other end is closed."""
    head = _exactly(link, LENGTH.size)
    return None if head is None else _exactly(link, LENGTH.unpack(head)[0])


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
