"""The end that gives payloads out: byte ranges of the slabs of its node, to readers on other nodes."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import logging
import threading
import time
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Protocol

import msgspec
import xxhash
import zmq

from relax_rt.transport.memory import payload_wire
from relax_rt.transport.memory.payload_wire import ListeningSocket, Range, RangeHead, Wakeup
from relax_rt.transport.memory.slabs import map_read_only, path_of
from relax_rt.transport.rpc.errors import Corrupt, Gone, ProtocolError, Refused, RelaxError
from relax_rt.transport.rpc.identity import CurveKeys
from relax_rt.transport.rpc.wire import fault_of

log = logging.getLogger(__name__)

_RETRY_SEND_MS = 2
_SWEEP_INTERVAL_S = 2.0
_REQUESTS_AT_A_TIME = 32
"""Requests read before held answers are tried again."""
_LOG_PROTOCOL_ERRORS = 20
_GATHER_BYTES = 256 * 1024
"""Ranges that are small together go into one answer, which costs a copy and saves a message each."""


class PayloadServerStatistics(msgspec.Struct, frozen=True):
    """Numbers of a payload server since it was made; `held_ranges`, `held_bytes` and `slabs` are of this moment.

    held: requested by readers that do not read their answers.
    """

    requests: int
    chunks: int
    bytes_out: int
    faults: int
    dropped: int
    protocol_errors: int
    held_ranges: int
    held_bytes: int
    slabs: int


class PayloadServer:
    """Serves the slabs of this node over ZeroMQ, encrypted, from a thread and io threads of its own.

    It keeps no state of readers: each requested range is answered once, its bytes sent from the mapping without a copy.
    Ranges that a reader requests beyond max_reader_ranges unread ones are held, up to as many again and max_held_bytes
    for all readers together; the rest is dropped.

    Args:
        shm_dir: where the node's slabs lie.
        spill_dir: where spilled extents lie, if they do on this node.
        served: serve this instead of the slabs in these folders.
        keys: only readers with an admitted key are served. None: loopback only.
        io_threads: of ZeroMQ; each encrypts for some of the connections.
    """

    def __init__(
        self,
        shm_dir: Path,
        spill_dir: Path | None = None,
        *,
        keys: CurveKeys | None,
        served: PayloadSource | None = None,
        io_threads: int = 2,
        max_reader_ranges: int = 1024,
        max_held_bytes: int = 256 * 1024 * 1024,
    ) -> None:
        self._slabs = served if served is not None else SlabFiles(shm_dir, spill_dir)
        self._keys = keys
        self._io_threads = io_threads
        self._max_reader_ranges, self._max_held_bytes = max_reader_ranges, max_held_bytes
        self._listening: ListeningSocket | None = None
        self._wakeup = Wakeup()
        self._stop = False
        self._thread: threading.Thread | None = None
        self._counts: Counter[str] = Counter()
        self._held: dict[bytes, collections.deque[tuple[Range, bool]]] = {}
        self._held_bytes = 0
        self.address = ""

    async def listen(self, address: str) -> str:
        """Begin to serve at tcp://host:port (port 0: any); returns the address with the real port.

        Raises:
            AddressError: malformed, in use, not of this machine, or open to other machines without keys.
            Refused: it listens already.
        """
        if self._thread is not None:
            raise Refused(f"listening on {address}", why=f"this payload server serves {self.address} already")
        return await asyncio.to_thread(self.start, address)

    def start(self, address: str) -> str:
        """`listen` for callers without an event loop. Blocks while the host's name is looked up."""
        self._listening = ListeningSocket(
            address,
            self._keys,
            io_threads=self._io_threads,
            max_message_bytes=payload_wire.MAX_GET_BYTES,
            high_water_messages=self._max_reader_ranges,
        )
        self.address = self._listening.address
        self._thread = threading.Thread(target=self._run, name="payload-server", daemon=True)
        self._thread.start()
        return self.address

    async def close(self) -> None:
        """Stop serving; unfinished answers are dropped."""
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """`close` for callers without an event loop."""
        self._stop = True
        self._wakeup.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def statistics(self) -> PayloadServerStatistics:
        counts = {name: self._counts[name] for name in PayloadServerStatistics.__struct_fields__[:6]}
        held = sum(len(queue) for queue in list(self._held.values()))
        return PayloadServerStatistics(**counts, held_ranges=held, held_bytes=self._held_bytes, slabs=len(self._slabs))

    def _run(self) -> None:
        assert self._listening is not None
        poller = zmq.Poller()
        poller.register(self._listening.sock, zmq.POLLIN)
        poller.register(self._wakeup.fd, zmq.POLLIN)
        sweep_at = time.monotonic() + _SWEEP_INTERVAL_S
        try:
            while not self._stop:
                poller.poll(_RETRY_SEND_MS if self._held else int(_SWEEP_INTERVAL_S * 1000))
                self._receive(self._listening.sock)
                for reader, queue in list(self._held.items()):
                    before = sum(wanted.nbytes for wanted, _ in queue)
                    if self._answer(reader, queue):
                        del self._held[reader]
                    self._held_bytes -= before - sum(wanted.nbytes for wanted, _ in queue)
                if time.monotonic() >= sweep_at:
                    self._slabs.sweep()
                    sweep_at = time.monotonic() + _SWEEP_INTERVAL_S
        finally:
            self._listening.close()
            self._slabs.clear()

    def _receive(self, sock: zmq.Socket[bytes]) -> None:
        for _ in range(_REQUESTS_AT_A_TIME):
            try:
                parts = sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            reader = parts[0]
            try:
                if len(parts) != 2:
                    raise ProtocolError("a request for payload", why=f"it has {len(parts) - 1} frames, not 1")
                get = payload_wire.decode_get(parts[1])
            except ProtocolError as error:
                self._counts["protocol_errors"] += 1
                if self._counts["protocol_errors"] <= _LOG_PROTOCOL_ERRORS:
                    log.warning("%s: reader %s: %s", self.address, reader.hex(), error)
                if isinstance(error, payload_wire.WrongVersion):
                    # Number 0 is no range of any reader: the answer tells this end's version.
                    with contextlib.suppress(zmq.ZMQError):
                        self._push(reader, *self._fault(0, error))
                continue
            self._counts["requests"] += 1
            queue = collections.deque((wanted, get.digest) for wanted in get.ranges)
            if reader not in self._held and self._answer(reader, queue):
                continue
            held = self._held.setdefault(reader, collections.deque())
            for wanted, digest in queue:
                if len(held) >= self._max_reader_ranges or self._held_bytes + wanted.nbytes > self._max_held_bytes:
                    # It does not read, and would not read a refusal either.
                    self._counts["dropped"] += 1
                else:
                    held.append((wanted, digest))
                    self._held_bytes += wanted.nbytes

    def _answer(self, reader: bytes, queue: collections.deque[tuple[Range, bool]]) -> bool:
        """Send answers to queued ranges; False when the reader's send queue is full."""
        while queue:
            count, head, body = self._next_answer(queue)
            try:
                self._push(reader, head, body)
            except zmq.Again:
                return False
            except zmq.ZMQError:
                # The reader is not connected any more.
                self._counts["dropped"] += len(queue)
                queue.clear()
                return True
            for _ in range(count):
                queue.popleft()
        return True

    def _next_answer(self, queue: collections.deque[tuple[Range, bool]]) -> tuple[int, bytes, bytes | memoryview]:
        """How many ranges the next answer is for, and its frames: those of one range, or of as many small ones as
        lie next to each other in the queue."""
        parts: list[RangeHead] = []
        memories: list[memoryview] = []
        total = 0
        for wanted, digest in itertools.islice(queue, payload_wire.MAX_RANGES):
            if parts and total + wanted.nbytes > _GATHER_BYTES:
                break
            try:
                memory = self._slabs.range(wanted.slab, wanted.offset, wanted.nbytes)
            except RelaxError as error:
                if parts:
                    break
                self._counts["faults"] += 1
                return 1, *self._fault(wanted.id, error)
            memories.append(memory)
            parts.append(RangeHead(wanted.id, len(memory), xxhash.xxh3_64_intdigest(memory) if digest else 0))
            total += wanted.nbytes
        self._counts["chunks"] += len(parts)
        self._counts["bytes_out"] += total
        body = memories[0] if len(memories) == 1 else b"".join(memories)
        return len(parts), payload_wire.encode_head(payload_wire.BYTES, parts), body

    def _fault(self, number: int, error: RelaxError) -> tuple[bytes, bytes]:
        body = msgspec.msgpack.encode(fault_of(error, 0, f"the payload server at {self.address}"))
        return payload_wire.encode_head(payload_wire.FAULT, [RangeHead(number, len(body), 0)]), body

    def _push(self, reader: bytes, head: bytes, body: bytes | memoryview) -> None:
        assert self._listening is not None
        sock = self._listening.sock
        sock.send(reader, zmq.NOBLOCK | zmq.SNDMORE)
        # After its first frame a message is taken whole.
        sock.send(head, zmq.NOBLOCK | zmq.SNDMORE)
        sock.send(body, zmq.NOBLOCK, copy=False)


class PayloadSource(Protocol):
    """What a payload server serves, by name. Used by its thread only; an error that is no RelaxError would end it."""

    def __len__(self) -> int:
        """How many are mapped."""

    def range(self, name: str, offset: int, nbytes: int) -> memoryview:
        """Bytes where they lie; they must not change while a view of them is left.

        Raises:
            RelaxError: they are not available; the reader gets the error.
        """

    def sweep(self) -> None:
        """Called every few seconds: release what is no longer needed."""

    def clear(self) -> None:
        """Release all."""


class SlabFiles:
    """Mappings of the files in a node's shared memory and of those spilled to its disk.

    Args:
        shm_dir: where the slabs lie.
        spill_dir: where ``spill-…`` files lie; None: there are none.
        max_slabs: mappings kept.
    """

    def __init__(self, shm_dir: Path, spill_dir: Path | None = None, *, max_slabs: int = 256) -> None:
        self._shm_dir, self._spill_dir, self._max = shm_dir, spill_dir, max_slabs
        self._maps: OrderedDict[str, memoryview] = OrderedDict()

    def __len__(self) -> int:
        return len(self._maps)

    def range(self, name: str, offset: int, nbytes: int) -> memoryview:
        """Bytes of a slab, where they lie.

        Raises:
            Gone: there is no such slab (any more).
            Corrupt: that is no slab's name, or the range is not inside it.
        """
        memory = self._maps.get(name)
        if memory is None:
            memory = self._maps[name] = self._map(name)
            while len(self._maps) > self._max:
                self._maps.popitem(last=False)
        else:
            self._maps.move_to_end(name)
        if offset < 0 or nbytes < 0 or offset + nbytes > len(memory):
            raise Corrupt(
                f"slab '{name}'", why=f"bytes {offset} to {offset + nbytes} are outside its {len(memory)} bytes"
            )
        return memory[offset : offset + nbytes]

    def sweep(self) -> None:
        """Unmap slabs whose files were removed, so that their memory is freed."""
        for name in list(self._maps):
            if not self._path(name).exists():
                del self._maps[name]

    def clear(self) -> None:
        self._maps.clear()

    def _map(self, name: str) -> memoryview:
        try:
            return map_read_only(self._path(name)).data
        except Corrupt as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise Gone(f"slab '{name}'", why="it is not there (any more): its owner has ended") from error
            raise

    def _path(self, name: str) -> Path:
        return path_of(name, self._shm_dir, self._spill_dir)
