"""A reader's connections to one payload server, and the extents that are asked of it."""

from __future__ import annotations

import collections
import dataclasses
import errno
import random
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import xxhash
import zmq
from zmq.utils.monitor import parse_monitor_message

from relax_rt.transport.memory.payload import frames
from relax_rt.transport.memory.payload.cache import Entry
from relax_rt.transport.memory.payload.frames import Get, Part, Range
from relax_rt.transport.rpc.address import AddressError, parse_address
from relax_rt.transport.rpc.backoff import Backoff, BackoffPolicy
from relax_rt.transport.rpc.errors import Corrupt, ProtocolError, RelaxError, RemoteError
from relax_rt.transport.rpc.identity import CurveKeys
from relax_rt.transport.rpc.wire import error_of
from relax_rt.transport.rpc.zmq_channel import as_client, configure

MAX_LINK_RANGES = 256
"""Ranges asked for and not yet received on one connection, however small they are."""
_MIN_CHUNK_BYTES = 256 * 1024
_RECEIVE_AT_A_TIME = 64
_MONITORED = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "",
    zmq.EVENT_DISCONNECTED: "the connection was lost",
    zmq.EVENT_CLOSED: "nothing answers there",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the server does not admit this process's key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "only one end uses CURVE keys, or the peer does not speak ZeroMQ",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the secure handshake failed: the keys do not match",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a reader asks.

    Attributes:
        chunk_bytes: of one answer.
        window_bytes: asked of one server and not yet received.
        connections: to one server; each is encrypted by one thread, so more of them use more cores.
        verify: compare the digest of every chunk.
        connect_timeout_s: of one attempt.
        idle_s: a connection that has nothing to do for so long is closed.
    """

    chunk_bytes: int
    window_bytes: int
    connections: int
    verify: bool
    connect_timeout_s: float
    idle_s: float


class Sink(Protocol):
    """Who is told of what arrives."""

    def arrived(self, entry: Entry, nbytes: int) -> None:
        """These bytes of an entry are in its region now."""

    def failed(self, entry: Entry, error: RelaxError) -> None:
        """An entry cannot be had."""

    def misspoken(self, peer: str, error: ProtocolError) -> None:
        """A server sent what it should not have; it was thrown away."""


class Piece(NamedTuple):
    """A range of an entry that was asked for."""

    entry: Entry
    offset: int
    nbytes: int


class Link:
    """One connection. `lost` says why it is of no use any more."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: CurveKeys | None) -> None:
        self.address = address
        self.up = self.was_up = False
        self.lost = ""
        self.asked: dict[int, Piece] = {}
        self.asked_bytes = 0
        self._head = bytearray(frames.MAX_HEAD_BYTES)
        self._closed = False
        self.sock = context.socket(zmq.DEALER)
        configure(
            self.sock,
            linger_ms=0,
            max_message_bytes=frames.MAX_CHUNK_BYTES + frames.MAX_FAULT_BYTES,
            high_water_messages=2 * MAX_LINK_RANGES,
        )
        as_client(self.sock, keys)
        self.monitor = self.sock.get_monitor_socket(sum(_MONITORED))
        try:
            self.sock.connect(address)
        except zmq.ZMQError:
            self.close()
            raise

    def watch(self) -> None:
        """Read what ZeroMQ says of the connection."""
        while not self.lost:
            try:
                event = zmq.Event(parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["event"])
            except zmq.Again:
                return
            self.lost = _MONITORED.get(event, "the connection was lost")
            self.up = not self.lost
            self.was_up |= self.up

    def ask(self, pieces: list[tuple[int, Piece]], digest: bool) -> None:
        """Ask for ranges, under numbers of the caller's choice."""
        for start in range(0, len(pieces), frames.MAX_RANGES):
            some = pieces[start : start + frames.MAX_RANGES]
            ranges = [
                Range(number, piece.entry.extent.slab, piece.entry.extent.offset + piece.offset, piece.nbytes)
                for number, piece in some
            ]
            for number, piece in some:
                self.asked[number] = piece
                self.asked_bytes += piece.nbytes
            try:
                self.sock.send(frames.encode_get(Get(digest, ranges)), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                self.lost = str(error)

    def receive(self, sink: Sink, digest: bool) -> int:
        """Take in some answers; returns their bytes."""
        taken = 0
        for _ in range(_RECEIVE_AT_A_TIME):
            try:
                size = self.sock.recv_into(self._head, flags=zmq.NOBLOCK)
            except zmq.Again:
                break
            except zmq.ZMQError as error:
                self.lost = str(error)
                break
            try:
                if size > len(self._head) or not self.sock.getsockopt(zmq.RCVMORE):
                    raise ProtocolError("an answer with payload", why=f"its first frame, of {size} bytes, is no head")
                kind, parts = frames.decode_head(memoryview(self._head)[:size])
                taken += self._answer(kind, parts, sink, digest)
            except ProtocolError as error:
                if isinstance(error, frames.WrongVersion):
                    for piece in self.asked.values():
                        sink.failed(piece.entry, error)
                sink.misspoken(self.address, error)
            while self.sock.getsockopt(zmq.RCVMORE):
                self.sock.recv(copy=False)
        return taken

    def _answer(self, kind: int, parts: list[Part], sink: Sink, digest: bool) -> int:
        """Take the second frame of an answer to where it belongs."""
        pieces = [self._asked(part) for part in parts]
        first = pieces[0]
        if kind == frames.FAULT:
            fault = frames.decode_fault(self.sock.recv())
            if first is not None:
                sink.failed(first.entry, _told(error_of(fault), self.address))
            return parts[0].nbytes
        if len(pieces) == 1 and first is not None and first.entry.region is not None:
            # Straight to its place: the one copy that there is.
            target = _target(first)
            size = self.sock.recv_into(target)
            self._taken(first, parts[0], size == first.nbytes, sink, digest)
            return size
        body = self.sock.recv(copy=False).buffer
        whole = len(body) == sum(part.nbytes for part in parts)
        at = 0
        for part, piece in zip(parts, pieces, strict=True):
            if piece is not None and piece.entry.region is not None:
                fits = whole and part.nbytes == piece.nbytes
                if fits:
                    _target(piece)[:] = body[at : at + part.nbytes]
                self._taken(piece, part, fits, sink, digest)
            at += part.nbytes
        if None in pieces:
            raise ProtocolError(
                "an answer with payload", why="it has ranges that were not asked for, or answered before"
            )
        return len(body)

    def _asked(self, part: Part) -> Piece | None:
        piece = self.asked.pop(part.id, None)
        if piece is not None:
            self.asked_bytes -= piece.nbytes
        return piece

    def _taken(self, piece: Piece, part: Part, fits: bool, sink: Sink, digest: bool) -> None:
        entry = piece.entry
        if not fits or part.nbytes != piece.nbytes:
            why = f"the answer to a request for {piece.nbytes} bytes announced {part.nbytes} and is of another size"
            sink.failed(entry, ProtocolError(f"{entry.name} from {self.address}", why=why))
        elif digest and xxhash.xxh3_64_intdigest(_target(piece)) != part.digest:
            why = f"the bytes at {entry.extent.offset + piece.offset} do not match their digest: they were overwritten"
            sink.failed(entry, Corrupt(f"{entry.name} from {self.address}", why=why))
        else:
            sink.arrived(entry, piece.nbytes)

    def close(self) -> None:
        """End the connection at once."""
        if not self._closed:
            self._closed = True
            self.sock.disable_monitor()
            self.monitor.close(linger=0)
            self.sock.close(linger=0)


class Peer:
    """A payload server as seen by a reader: its connections, made on demand, and what is to be asked of it.

    Attributes:
        trouble: why there is no connection; empty while there is one or none was needed.
        attempts: to connect, since the last connection stood.
        last_bytes_at: when something came from it.
    """

    def __init__(self, address: str, settings: Settings, numbers: Iterator[int], rng: random.Random) -> None:
        self.address = address
        self.links: list[Link] = []
        self.trouble = ""
        self.attempts = 0
        self.reconnects = 0
        self.last_bytes_at = 0.0
        self._settings = settings
        self._numbers = numbers
        self._urgent: collections.deque[Entry] = collections.deque()
        self._others: collections.deque[Entry] = collections.deque()
        self._backoff = Backoff(BackoffPolicy(), rng)
        self._dial_at = 0.0
        self._dialed_at: dict[Link, float] = {}
        self._used_at = 0.0

    def want(self, entry: Entry, first: bool = False) -> None:
        """Ask for what is left to do of an entry."""
        queue = self._urgent if entry.urgent else self._others
        if first:
            queue.appendleft(entry)
        else:
            queue.append(entry)

    @property
    def busy(self) -> bool:
        """Something is to be asked for, or was."""
        self._skip_done()
        return bool(self._urgent or self._others) or any(link.asked for link in self.links)

    def next_event_at(self) -> float:
        """When `step` has to be called again at the latest."""
        if not self.busy:
            return self._used_at + self._settings.idle_s if self.links else float("inf")
        waiting = [at + self._settings.connect_timeout_s for link, at in self._dialed_at.items() if not link.up]
        if len(self.links) < self._settings.connections:
            waiting.append(self._dial_at)
        return min(waiting, default=float("inf"))

    def receive(self, sink: Sink, now: float) -> None:
        """Take in what has come, and notice connections that ended."""
        for link in self.links:
            link.watch()
            taken = link.receive(sink, self._settings.verify)
            if taken:
                self.last_bytes_at = now
            if link.up and self.attempts:
                self.trouble, self.attempts = "", 0
                self._backoff.reset()

    def step(self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys | None, now: float) -> list[Link]:
        """Dial, ask and hang up as needed; returns the connections that were closed.

        Raises:
            AddressError: it is no address to connect to.
        """
        closed = self._hang_up(now)
        if not self.busy:
            return closed
        self._used_at = now
        if now >= self._dial_at and len(self.links) < self._settings.connections:
            self._dial(context, keys, now)
        self._ask()
        return closed

    def _hang_up(self, now: float) -> list[Link]:
        idle = bool(self.links) and now >= self._used_at + self._settings.idle_s and not self.busy
        ended = []
        for link in self.links:
            if not link.up and not link.lost and now >= self._dialed_at[link] + self._settings.connect_timeout_s:
                link.lost = f"no connection within {self._settings.connect_timeout_s} s"
            if link.lost or idle:
                ended.append(link)
        for link in ended:
            self.links.remove(link)
            self._dialed_at.pop(link)
            if link.lost:
                self._lost(link, now)
        return ended

    def _lost(self, link: Link, now: float) -> None:
        self.trouble = link.lost
        self.reconnects += link.was_up
        # What was asked for is asked for again on the next connection.
        for piece in reversed(link.asked.values()):
            if piece.entry.region is not None:
                piece.entry.todo.append((piece.offset, piece.nbytes))
                self.want(piece.entry, first=True)
        link.asked.clear()
        self._dial_at = max(self._dial_at, now + (self._backoff.next_delay_s() or 0.0))

    def _dial(self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys | None, now: float) -> None:
        address = parse_address(self.address)
        if address.scheme == "unix" or (address.scheme == "tcp" and address.port == 0):
            raise AddressError(f"connecting to {self.address}", why="payload servers are at tcp://host:port")
        self.attempts += 1
        try:
            while len(self.links) < self._settings.connections:
                link = Link(context, self.address, keys)
                self.links.append(link)
                self._dialed_at[link] = now
        except zmq.ZMQError as error:
            self.trouble = str(error)
            if error.errno == errno.EMFILE:
                self.trouble += " (raise the limit of open files)"
            self._dial_at = now + (self._backoff.next_delay_s() or 0.0)

    def _ask(self) -> None:
        window = self._settings.window_bytes // self._settings.connections
        # Asking when half the window is free again makes few, larger requests.
        links = [
            link
            for link in self.links
            if link.up and not link.lost and 2 * link.asked_bytes <= window and 2 * len(link.asked) <= MAX_LINK_RANGES
        ]
        asks: dict[Link, list[tuple[int, Piece]]] = {link: [] for link in links}
        room = {link: window - link.asked_bytes for link in links}
        while room:
            link = max(room, key=room.__getitem__)
            piece = self._next_piece()
            if piece is None:
                break
            asks[link].append((next(self._numbers), piece))
            room[link] -= piece.nbytes
            if room[link] <= 0 or len(asks[link]) + len(link.asked) >= MAX_LINK_RANGES:
                del room[link]
        for link, pieces in asks.items():
            link.ask(pieces, self._settings.verify)

    def _next_piece(self) -> Piece | None:
        self._skip_done()
        queue = self._urgent or self._others
        if not queue:
            return None
        entry = queue[0]
        offset, nbytes = entry.todo.pop()
        # A small extent goes in several pieces too: both ends then encrypt at the same time.
        size = min(nbytes, self._settings.chunk_bytes, max(entry.extent.nbytes // 4, _MIN_CHUNK_BYTES))
        if size < nbytes:
            entry.todo.append((offset + size, nbytes - size))
        return Piece(entry, offset, size)

    def _skip_done(self) -> None:
        for queue in (self._urgent, self._others):
            while queue and not queue[0].todo:
                queue.popleft()


def _target(piece: Piece) -> memoryview:
    assert piece.entry.region is not None
    return piece.entry.region.memory[piece.offset : piece.offset + piece.nbytes]


def _told(error: RelaxError, address: str) -> RelaxError:
    """The server's error, saying also which server."""
    if isinstance(error, RemoteError):
        return error
    told = type(error).__new__(type(error))
    RelaxError.__init__(told, f"{error.what}, asked of {address}", why=error.why, hint=error.hint)
    return told
