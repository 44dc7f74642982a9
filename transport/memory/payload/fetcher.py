"""The end that reads payloads of other nodes: into memory of its own, ahead of need, with a deadline on every wait."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from relax_rt.transport.memory.payload.cache import Cache, CacheStatistics, Entry, Fetched, Job
from relax_rt.transport.memory.payload.frames import SLAB_NAME_MAX_CHARS
from relax_rt.transport.memory.payload.memory import LocalMemory
from relax_rt.transport.memory.payload.peer import Link, Peer, Settings
from relax_rt.transport.memory.payload.sockets import Wakeup
from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.rpc.errors import (
    Corrupt,
    DeadlineExceeded,
    OutOfSpace,
    ProtocolError,
    Refused,
    RelaxError,
    Unreachable,
)
from relax_rt.transport.rpc.identity import CurveKeys

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
    into the cache; the arrays that it gives are read-only and stay good as long as anything refers to them.

    Args:
        keys: to prove to servers that this process belongs to the run. None: for servers on loopback.
        capacity_bytes: of the cache. Extents that were fetched stay until their lease is released; those that were
            only prefetched give way to what someone waits for, the least recently used first.
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
        self._settings = Settings(chunk_bytes, window_bytes, connections, verify, connect_timeout_s, idle_s)
        self._wakeup = Wakeup()
        self._memory = LocalMemory(capacity_bytes, segment_bytes, self._room_came)
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
        self._add(Job(address, list(extents), lease, time.monotonic() + deadline_s, future))
        future.add_done_callback(self._ended)
        return future

    def prefetch(self, address: str, extents: Sequence[Extent], *, lease: int, deadline_s: float = 60.0) -> None:
        """Begin to fetch what a lease will need, as far as there is room. Errors show when it is fetched."""
        self._add(Job(address, list(extents), lease, time.monotonic() + deadline_s))

    def release(self, lease: int) -> None:
        """Drop what is held for a lease, whatever became of it. To be said before the ledger is told to unpin it:
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
        """Numbers for people and metrics."""
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
        """End the thread and all connections; what still waits is refused. Arrays stay good."""
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

    def _add(self, job: Job) -> None:
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
        """Have something done, if there is anything that it could change."""
        with self._lock:
            if self._thread is None or self._closed:
                return
            self._commands.append(command)
        self._wakeup.set()

    def _ended(self, future: concurrent.futures.Future[Fetched]) -> None:
        if future.cancelled():
            self._tell(self._cache.line_changed)

    def _room_came(self) -> None:
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
            self._begin(entry)
        for peer in list(self._peers.values()):
            self._step(peer, context, poller, now)

    def _begin(self, entry: Entry) -> None:
        if entry.missing_bytes == 0 and entry.region is not None:
            self._cache.received(entry)
            return
        peer = self._peers.get(entry.address)
        if peer is None:
            peer = self._peers[entry.address] = Peer(entry.address, self._settings, self._numbers, self._rng)
        peer.want(entry)

    def _step(self, peer: Peer, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller, now: float) -> None:
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
            self._hang_up(link, poller)
        if not peer.links and not peer.busy:
            self._reconnects += peer.reconnects
            del self._peers[peer.address]

    @staticmethod
    def _hang_up(link: Link, poller: zmq.Poller) -> None:
        poller.unregister(link.sock)
        poller.unregister(link.monitor)
        link.close()

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

    def arrived(self, entry: Entry, nbytes: int) -> None:
        """For `Sink`."""
        self._bytes_in += nbytes
        entry.missing_bytes -= nbytes
        if entry.missing_bytes == 0:
            self._cache.received(entry)

    def failed(self, entry: Entry, error: RelaxError) -> None:
        """For `Sink`."""
        self._cache.drop(entry, error)

    def misspoken(self, peer: str, error: ProtocolError) -> None:
        """For `Sink`."""
        self._protocol_errors += 1
        if self._protocol_errors <= _LOG_PROTOCOL_ERRORS:
            log.warning("payload server %s: %s", peer, error)

    def _late(self, job: Job) -> RelaxError:
        why = self._reason(job)
        if not job.admitted:
            return OutOfSpace(job.what, why=why, hint="release leases, or raise capacity_bytes")
        entries = [entry for entry in job.entries if not entry.ready]
        what = f"{entries[0].name}, asked of {job.address} for lease {job.lease}" if entries else job.what
        peer = self._peers.get(job.address)
        if peer is not None and peer.last_bytes_at > time.monotonic() - 2 * _TICK_S and not peer.trouble:
            return DeadlineExceeded(what, why=why, hint="give it more time, or lease fewer samples at once")
        return Unreachable(what, why=why)

    def _reason(self, job: Job) -> str:
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
