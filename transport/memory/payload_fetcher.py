"""Fetches payloads of other nodes into this process's memory, ahead of need, with a deadline on every wait."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import errno
import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, Self

import msgspec
import numpy as np
import xxhash
import zmq
from numpy.typing import NDArray
from zmq.utils.monitor import parse_monitor_message

from relax_rt.transport.memory import payload_wire
from relax_rt.transport.memory.payload_cache import Cache, CacheEntry, CacheStatistics, Fetched, FetchJob, LocalMemory
from relax_rt.transport.memory.payload_wire import SLAB_NAME_MAX_CHARS, GetRanges, Range, RangeHead, Wakeup
from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.rpc.backoff import Backoff, BackoffPolicy
from relax_rt.transport.rpc.channel import AddressError, parse_address
from relax_rt.transport.rpc.errors import (
    Corrupt,
    DeadlineExceeded,
    OutOfSpace,
    ProtocolError,
    Refused,
    RelaxError,
    RemoteError,
    Unreachable,
)
from relax_rt.transport.rpc.identity import CurveKeys
from relax_rt.transport.rpc.wire import error_of
from relax_rt.transport.rpc.zmq_channel import as_client, configure

log = logging.getLogger(__name__)

_TICK_S = 0.25
_LOG_PROTOCOL_ERRORS = 20


class FetcherStatistics(msgspec.Struct, frozen=True):
    """Numbers of a fetcher. waiting_on: why each fetch that waits does so."""

    cache: CacheStatistics
    bytes_in: int
    reconnects: int
    protocol_errors: int
    peers: int
    waiting_on: list[str]


class Fetcher:
    """Fetches extents from payload servers into a cache of this process. Its methods may be called from any thread.

    The work is done by a thread, which starts with the first fetch. Nothing is copied but once, from ZeroMQ's buffer
    into the cache; the arrays that it gives are read-only and stay valid as long as anything refers to them.

    Args:
        keys: to prove to servers that this process belongs to the run. None: for servers on loopback.
        capacity_bytes: of the cache. Extents that were fetched stay until their lease is released; those that were
            only prefetched are evicted for what a caller waits for, the least recently used first.
        connections: to each server; each is encrypted by one thread, so more of them use more cores (0: one for
            every four cores, four at most).
        chunk_bytes, window_bytes: of one answer, and asked of one server at a time.
        segment_bytes: what the cache takes from the system at a time.
        verify: compare an xxh3 digest of each chunk, computed by the server. CURVE authenticates what crosses the
            wire; this sees also an owner that overwrites an extent while it is sent. It costs less than a tenth of
            the speed.
        connect_timeout_s: of one attempt to connect; attempts are made until the deadline of what is fetched.
        idle_s: connections without work are closed after it.
    """

    def __init__(
        self,
        keys: CurveKeys | None,
        *,
        capacity_bytes: int = 1024 * 1024 * 1024,
        connections: int = 0,
        chunk_bytes: int = 1024 * 1024,
        window_bytes: int = 16 * 1024 * 1024,
        segment_bytes: int = 64 * 1024 * 1024,
        verify: bool = True,
        connect_timeout_s: float = 3.0,
        idle_s: float = 60.0,
    ) -> None:
        self._keys = keys
        connections = connections or min(4, max(1, len(os.sched_getaffinity(0)) // 4))
        self._settings = FetchSettings(chunk_bytes, window_bytes, connections, verify, connect_timeout_s, idle_s)
        self._wakeup = Wakeup()
        self._memory = LocalMemory(capacity_bytes, segment_bytes, self._space_freed)
        self._cache = Cache(self._memory)
        self._peers: dict[str, Peer] = {}
        self._numbers = itertools.count(1)
        self._rng = random.Random()
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._sweep_at = 0.0
        self._protocol_errors = self._reconnects = self._bytes_in = 0

    async def fetch(self, address: str, extents: Sequence[Extent], *, lease: int, deadline_s: float) -> Fetched:
        """The bytes of extents that lie on the node of a payload server, read-only, until the lease is released.

        Those that are held for a lease already are not asked for again.

        Raises:
            Gone: the server has no such slab any more.
            Corrupt: the extent is not inside a slab, or was overwritten while it was sent.
            Refused: the lease was released, or this fetcher closed.
            Unreachable: the server did not answer until the deadline, or was lost and did not come back.
            DeadlineExceeded: the bytes still came in when the deadline passed.
            OutOfSpace: the cache is full of extents of leases that are not released.
        """
        return await asyncio.wrap_future(self.submit(address, extents, lease=lease, deadline_s=deadline_s))

    def submit(
        self, address: str, extents: Sequence[Extent], *, lease: int, deadline_s: float
    ) -> concurrent.futures.Future[Fetched]:
        """`fetch` for callers without an event loop."""
        future: concurrent.futures.Future[Fetched] = concurrent.futures.Future()
        self._add(FetchJob(address, list(extents), lease, time.monotonic() + deadline_s, future))
        future.add_done_callback(lambda ended: self._tell(self._cache.queue_changed) if ended.cancelled() else None)
        return future

    def prefetch(self, address: str, extents: Sequence[Extent], *, lease: int, deadline_s: float = 60.0) -> None:
        """Begin to fetch what a lease will need, as far as there is room. Errors show when it is fetched."""
        self._add(FetchJob(address, list(extents), lease, time.monotonic() + deadline_s))

    def release(self, lease: int) -> None:
        """Drop what is held for a lease. Call it before the ledger unpins the lease:
        after that the owner writes other bytes to the same extents."""
        self._tell(lambda: self._cache.release(lease))

    def memory(self, extent: Extent) -> NDArray[np.uint8] | None:
        """The bytes of an extent that is held, read-only; None if it is not."""
        entry = self._cache.entries.get(extent)
        return None if entry is None else entry.array()

    def warm(self) -> None:
        """Begin to pre-fault the cache, so that the first fetch does not have to."""
        self._do(self._memory.warm)

    def statistics(self) -> FetcherStatistics:
        peers = list(self._peers.values())
        return FetcherStatistics(
            cache=self._cache.statistics(),
            bytes_in=self._bytes_in,
            reconnects=self._reconnects + sum(peer.reconnects for peer in peers),
            protocol_errors=self._protocol_errors,
            peers=len(peers),
            waiting_on=self.waiting_on(),
        )

    def waiting_on(self) -> list[str]:
        """For each fetch that waits: what it is, how far it is, and on what it waits."""
        return [f"{job.what}: {self._reason(job)}" for job in list(self._cache.jobs) if job.future is not None]

    async def close(self) -> None:
        """End the thread and all connections; what still waits is refused. Arrays stay valid."""
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """`close` for callers without an event loop."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        self._wakeup.set()
        if thread is not None:
            thread.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _add(self, job: FetchJob) -> None:
        for extent in job.extents:
            in_bounds = 0 <= extent.offset < 2**63 and 0 <= extent.nbytes < 2**63
            if len(extent.slab) > SLAB_NAME_MAX_CHARS or not in_bounds:
                raise Corrupt(
                    f"extent {extent.slab[:SLAB_NAME_MAX_CHARS]}+{extent.offset} of {extent.nbytes} bytes",
                    why=f"no slab has such bytes, or a name of more than {SLAB_NAME_MAX_CHARS} characters",
                )
        self._do(lambda: self._cache.add(job))

    def _do(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise Refused("fetching payloads", why="the fetcher is closed")
            self._commands.append(command)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="payload-fetcher", daemon=True)
                self._thread.start()
        self._wakeup.set()

    def _tell(self, command: Callable[[], None]) -> None:
        """Pass work to the thread, unless nothing depends on it."""
        with self._lock:
            if self._thread is None or self._closed:
                return
            self._commands.append(command)
        self._wakeup.set()

    def _space_freed(self) -> None:
        if self._cache.waiting_for_space:
            self._wakeup.set()

    # From here on: the thread.

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(self._settings.connections)
        poller = zmq.Poller()
        poller.register(self._wakeup.fd, zmq.POLLIN)
        error = Refused("fetching payloads", why="the fetcher is closed")
        try:
            while not self._closed:
                poller.poll(self._patience_ms())
                self._wakeup.clear()
                self._turn(context, poller)
        except BaseException as broken:
            error = Refused("fetching payloads", why=f"its thread has failed: {broken!r}")
            raise
        finally:
            with self._lock:
                self._closed = True
            while self._commands:
                self._commands.popleft()()
            self._cache.fail_all(error)
            for peer in self._peers.values():
                for link in peer.links:
                    link.close()
            context.term()

    def _turn(self, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller) -> None:
        for peer in self._peers.values():
            peer.receive(self, time.monotonic())
        while self._commands:
            self._commands.popleft()()
        now = time.monotonic()
        self._cache.expire(now, self._late)
        if now >= self._sweep_at:
            self._cache.expire_entries(now)
            self._sweep_at = now + _TICK_S
        for entry in self._cache.admit():
            if entry.missing_bytes == 0 and entry.region is not None:
                self._cache.received(entry)
                continue
            if entry.address not in self._peers:
                self._peers[entry.address] = Peer(entry.address, self._settings, self._numbers, self._rng)
            self._peers[entry.address].want(entry)
        for peer in list(self._peers.values()):
            before = set(peer.links)
            try:
                closed = peer.step(context, self._keys, now)
            except RelaxError as error:
                for entry in [entry for entry in self._cache.entries.values() if entry.address == peer.address]:
                    if not entry.ready:
                        self._cache.drop(entry, error)
                closed = []
            for link in peer.links:
                if link not in before:
                    poller.register(link.sock, zmq.POLLIN)
                    poller.register(link.monitor, zmq.POLLIN)
            for link in closed:
                poller.unregister(link.sock)
                poller.unregister(link.monitor)
                link.close()
            if not peer.links and not peer.busy:
                self._reconnects += peer.reconnects
                del self._peers[peer.address]

    def _patience_ms(self) -> int:
        if self._cache.unfinished:
            return 0
        now = time.monotonic()
        until = [peer.next_event_at() for peer in self._peers.values()]
        until += [job.deadline for job in self._cache.jobs]
        if any(peer.busy for peer in self._peers.values()):
            until.append(now + _TICK_S)
        wait = min(until, default=now + 60.0) - now
        return min(max(int(wait * 1000) + 1, 0), 60_000)

    def arrived(self, entry: CacheEntry, nbytes: int) -> None:
        self._bytes_in += nbytes
        entry.missing_bytes -= nbytes
        if entry.missing_bytes == 0:
            self._cache.received(entry)

    def failed(self, entry: CacheEntry, error: RelaxError) -> None:
        self._cache.drop(entry, error)

    def protocol_error(self, peer: str, error: ProtocolError) -> None:
        """Called by a Peer, as FetchSink."""
        self._protocol_errors += 1
        if self._protocol_errors <= _LOG_PROTOCOL_ERRORS:
            log.warning("payload server %s: %s", peer, error)

    def _late(self, job: FetchJob) -> RelaxError:
        why = self._reason(job)
        if not job.admitted:
            return OutOfSpace(job.what, why=why, hint="release leases, or raise capacity_bytes")
        entries = [entry for entry in job.entries if not entry.ready]
        what = f"{entries[0].name}, asked of {job.address} for lease {job.lease}" if entries else job.what
        peer = self._peers.get(job.address)
        if peer is not None and peer.last_bytes_at > time.monotonic() - 2 * _TICK_S and not peer.trouble:
            return DeadlineExceeded(what, why=why, hint="give it more time, or lease fewer samples at once")
        return Unreachable(what, why=why)

    def _reason(self, job: FetchJob) -> str:
        entries = list(job.entries)
        if not entries:
            return f"waits for room: {self._cache.space()}"
        total = sum(entry.extent.nbytes for entry in entries)
        here = total - sum(entry.missing_bytes for entry in entries)
        text = f"{here} of {total} bytes are here"
        peer = self._peers.get(job.address)
        if peer is None:
            return text
        if peer.trouble:
            return f"{text}; {peer.trouble} (attempt {peer.attempts} to connect)"
        if not any(link.up for link in list(peer.links)):
            return f"{text}; connecting"
        if peer.last_bytes_at:
            return f"{text}; the last came {time.monotonic() - peer.last_bytes_at:.1f} s ago"
        return f"{text}; connected, nothing came yet"


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
class FetchSettings:
    """Settings of a reader.

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


class FetchSink(Protocol):
    """Gets what a Peer receives."""

    def arrived(self, entry: CacheEntry, nbytes: int) -> None:
        """These bytes of an entry are in its region now."""

    def failed(self, entry: CacheEntry, error: RelaxError) -> None:
        """An entry cannot be fetched."""

    def protocol_error(self, peer: str, error: ProtocolError) -> None:
        """A server sent an invalid message, which was dropped."""


class PendingRange(NamedTuple):
    """A range of an entry that was requested."""

    entry: CacheEntry
    offset: int
    nbytes: int


class PeerConnection:
    """One connection to a payload server; `lost` says why it is broken."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: CurveKeys | None) -> None:
        self.address = address
        self.up = self.was_up = False
        self.lost = ""
        self.asked: dict[int, PendingRange] = {}
        self.asked_bytes = 0
        self._head = bytearray(payload_wire.MAX_HEAD_BYTES)
        self._closed = False
        self.sock = context.socket(zmq.DEALER)
        configure(
            self.sock,
            linger_ms=0,
            max_message_bytes=payload_wire.MAX_CHUNK_BYTES + payload_wire.MAX_FAULT_BYTES,
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
        """Read ZeroMQ's monitor events of the connection."""
        while not self.lost:
            try:
                event = zmq.Event(parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["event"])
            except zmq.Again:
                return
            self.lost = _MONITORED.get(event, "the connection was lost")
            self.up = not self.lost
            self.was_up |= self.up

    def ask(self, pieces: list[tuple[int, PendingRange]], digest: bool) -> None:
        """Request ranges, under numbers chosen by the caller."""
        for start in range(0, len(pieces), payload_wire.MAX_RANGES):
            some = pieces[start : start + payload_wire.MAX_RANGES]
            ranges = [
                Range(number, piece.entry.extent.slab, piece.entry.extent.offset + piece.offset, piece.nbytes)
                for number, piece in some
            ]
            for number, piece in some:
                self.asked[number] = piece
                self.asked_bytes += piece.nbytes
            try:
                self.sock.send(payload_wire.encode_get(GetRanges(digest, ranges)), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                self.lost = str(error)

    def receive(self, sink: FetchSink, digest: bool) -> int:
        """Receive some answers; returns their bytes."""
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
                kind, parts = payload_wire.decode_head(memoryview(self._head)[:size])
                taken += self._answer(kind, parts, sink, digest)
            except ProtocolError as error:
                if isinstance(error, payload_wire.WrongVersion):
                    for piece in self.asked.values():
                        sink.failed(piece.entry, error)
                sink.protocol_error(self.address, error)
            while self.sock.getsockopt(zmq.RCVMORE):
                self.sock.recv(copy=False)
        return taken

    def _answer(self, kind: int, parts: list[RangeHead], sink: FetchSink, digest: bool) -> int:
        """Receive the second frame of an answer into its regions."""
        pieces = [self.asked.pop(part.id, None) for part in parts]
        self.asked_bytes -= sum(piece.nbytes for piece in pieces if piece is not None)
        first = pieces[0]
        if kind == payload_wire.FAULT:
            fault = payload_wire.decode_fault(self.sock.recv())
            if first is not None:
                error = error_of(fault)
                if not isinstance(error, RemoteError):
                    # The server's error, with the server's address in it.
                    named = type(error).__new__(type(error))
                    RelaxError.__init__(named, f"{error.what}, asked of {self.address}", why=error.why, hint=error.hint)
                    error = named
                sink.failed(first.entry, error)
            return parts[0].nbytes
        if len(pieces) == 1 and first is not None and first.entry.region is not None:
            # Straight to its place: the one copy that there is.
            target = _target(first)
            size = self.sock.recv_into(target)
            self._accept(first, parts[0], size == first.nbytes, sink, digest)
            return size
        body = self.sock.recv(copy=False).buffer
        whole = len(body) == sum(part.nbytes for part in parts)
        at = 0
        for part, piece in zip(parts, pieces, strict=True):
            if piece is not None and piece.entry.region is not None:
                fits = whole and part.nbytes == piece.nbytes
                if fits:
                    _target(piece)[:] = body[at : at + part.nbytes]
                self._accept(piece, part, fits, sink, digest)
            at += part.nbytes
        if None in pieces:
            raise ProtocolError(
                "an answer with payload", why="it has ranges that were not asked for, or answered before"
            )
        return len(body)

    def _accept(self, piece: PendingRange, part: RangeHead, fits: bool, sink: FetchSink, digest: bool) -> None:
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
    """A payload server as seen by a reader: its connections, dialed on demand, and the ranges to request from it.

    Attributes:
        trouble: why there is no connection; empty while there is one or none was needed.
        attempts: to connect, since the last connection stood.
        last_bytes_at: when something came from it.
    """

    def __init__(self, address: str, settings: FetchSettings, numbers: Iterator[int], rng: random.Random) -> None:
        self.address = address
        self.links: list[PeerConnection] = []
        self.trouble = ""
        self.attempts = 0
        self.reconnects = 0
        self.last_bytes_at = 0.0
        self._settings = settings
        self._numbers = numbers
        self._urgent: collections.deque[CacheEntry] = collections.deque()
        self._others: collections.deque[CacheEntry] = collections.deque()
        self._backoff = Backoff(BackoffPolicy(), rng)
        self._dial_at = 0.0
        self._dialed_at: dict[PeerConnection, float] = {}
        self._used_at = 0.0

    def want(self, entry: CacheEntry, first: bool = False) -> None:
        """Request what is missing of an entry."""
        queue = self._urgent if entry.urgent else self._others
        if first:
            queue.appendleft(entry)
        else:
            queue.append(entry)

    @property
    def busy(self) -> bool:
        """Whether ranges are to be requested, or are in flight."""
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

    def receive(self, sink: FetchSink, now: float) -> None:
        """Receive what has arrived, and notice connections that ended."""
        for link in self.links:
            link.watch()
            taken = link.receive(sink, self._settings.verify)
            if taken:
                self.last_bytes_at = now
            if link.up and self.attempts:
                self.trouble, self.attempts = "", 0
                self._backoff.reset()

    def step(self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys | None, now: float) -> list[PeerConnection]:
        """Dial, request and close as needed; returns the connections that were closed.

        Raises:
            AddressError: it is no address to connect to.
        """
        closed = self._close_ended(now)
        if not self.busy:
            return closed
        self._used_at = now
        if now >= self._dial_at and len(self.links) < self._settings.connections:
            self._dial(context, keys, now)
        self._ask()
        return closed

    def _close_ended(self, now: float) -> list[PeerConnection]:
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
                self.trouble = link.lost
                self.reconnects += link.was_up
                # Ranges in flight are requested again on the next connection.
                for piece in reversed(link.asked.values()):
                    if piece.entry.region is not None:
                        piece.entry.todo.append((piece.offset, piece.nbytes))
                        self.want(piece.entry, first=True)
                link.asked.clear()
                self._dial_at = max(self._dial_at, now + (self._backoff.next_delay_s() or 0.0))
        return ended

    def _dial(self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys | None, now: float) -> None:
        address = parse_address(self.address)
        if address.scheme == "unix" or (address.scheme == "tcp" and address.port == 0):
            raise AddressError(f"connecting to {self.address}", why="payload servers are at tcp://host:port")
        self.attempts += 1
        try:
            while len(self.links) < self._settings.connections:
                link = PeerConnection(context, self.address, keys)
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
        asks: dict[PeerConnection, list[tuple[int, PendingRange]]] = {link: [] for link in links}
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

    def _next_piece(self) -> PendingRange | None:
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
        return PendingRange(entry, offset, size)

    def _skip_done(self) -> None:
        for queue in (self._urgent, self._others):
            while queue and not queue[0].todo:
                queue.popleft()


def _target(piece: PendingRange) -> memoryview:
    assert piece.entry.region is not None
    return piece.entry.region.memory[piece.offset : piece.offset + piece.nbytes]
