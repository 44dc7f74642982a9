"""Writer, reader and physical limit of tools/bench/transfer_queue.py, each a process of its own.

One JSON line on stdin asks for an operation, one on stdout answers with its seconds.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from peers.queue_cases import (
    BATCHED,
    BATCHES,
    SINGLE_FLOATS,
    TASK,
    UNDER_WAY,
    Case,
    PlainCopy,
    chunks,
    single,
    touch,
    touch_all,
)

from relax_rt.transport import TransferQueue

WAIT_S = 10.0
SLAB_BYTES = 192 << 20
REQUEST, ANSWER = 128, 64
"""Bytes of a message of the limit: about what names a sample, and what acknowledges it."""


async def seconds(work: Awaitable[Any]) -> float:
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


async def pipelined(n: int, call: Callable[[], Awaitable[int]]) -> None:
    """Until n samples have gone through `call`, UNDER_WAY calls at once."""
    left = n

    async def run() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await call()

    await asyncio.gather(*(run() for _ in range(UNDER_WAY)))


class Writer:
    """Puts, and copies the same arrays plainly for comparison."""

    def __init__(self, queue: TransferQueue) -> None:
        self._queue = queue

    async def load(self, name: str) -> None:
        self._case: Case = BATCHES[name]()
        self._plain = PlainCopy(self._case)

    async def copy(self) -> float:
        return self._plain.run()

    async def put(self) -> float:
        return await seconds(self._queue.put(self._case.columns))

    async def put_each(self, n: int) -> float:
        data = single()[0]

        async def put() -> None:
            for _ in range(n):
                await self._queue.put([{"x": data}])

        return await seconds(put())

    async def put_batched(self, n: int) -> float:
        data = single(BATCHED)

        async def put() -> None:
            for part in chunks(n, BATCHED):
                await self._queue.put({"x": data[: len(part)]})

        return await seconds(put())

    async def put_rows(self, n: int) -> float:
        rows = [{"x": row} for row in single(BATCHED)]

        async def put() -> None:
            for part in chunks(n, BATCHED):
                await self._queue.put(rows[: len(part)])

        return await seconds(put())

    async def put_pipelined(self, n: int) -> float:
        data = single()[0]

        async def put() -> int:
            await self._queue.put([{"x": data}])
            return 1

        return await seconds(pipelined(n, put))


class Reader:
    """Takes, touches, and says that it is done."""

    def __init__(self, queue: TransferQueue) -> None:
        self._queue = queue
        self._batches: deque[Any] = deque()

    async def load(self, name: str) -> None:
        case: Case = BATCHES[name]()
        self._samples, self._names = case.samples, list(case.columns)
        self._fixed = all(isinstance(values, np.ndarray) for values in case.columns.values())

    async def get(self) -> float:
        async def get() -> None:
            batch = await self._queue.lease(TASK, samples=self._samples, wait_s=WAIT_S)
            if self._fixed:
                touch_all(batch.column(name) for name in self._names)
            else:
                touch_all(value for name in self._names for value in batch.values(name))
            self._batches.append(batch)

        took = await seconds(get())
        if (got := len(self._batches[-1].samples)) != self._samples:
            raise SystemExit(f"got {got} of {self._samples} samples: {self._batches[-1].waiting_on}")
        return took

    async def done(self) -> float:
        """With the oldest batch."""
        return await seconds(self._queue.complete(self._batches.popleft()))

    async def get_each(self, n: int) -> float:
        async def get() -> None:
            for _ in range(n):
                await self._get(1)

        return await seconds(get())

    async def get_batched(self, n: int) -> float:
        async def get() -> None:
            left = n
            while left > 0:
                left -= await self._get(min(left, BATCHED))

        return await seconds(get())

    async def get_pipelined(self, n: int) -> float:
        return await seconds(pipelined(n, lambda: self._get(1)))

    async def _get(self, samples: int) -> int:
        batch = await self._queue.lease(TASK, samples=samples, wait_s=WAIT_S)
        if not batch:
            raise SystemExit(f"no samples within {WAIT_S} s: {batch.waiting_on}")
        touch_all(sample["x"] for sample in batch.samples)
        await self._queue.complete(batch)
        return len(batch.samples)


class Limit:
    """One by one without any queue: 8 KiB copied, a request to another process that writes it to a file, its answer."""

    def __init__(self, folder: Path) -> None:
        self._socket, self._awaited = answerer(folder / "limit.log"), answerer(folder / "awaited.log")
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._memory = np.frombuffer(mmap.mmap(-1, SINGLE_FLOATS * 4), dtype=np.float32)

    async def put_each(self, n: int) -> float:
        data, request = single()[0], bytes(REQUEST)
        start = time.perf_counter()
        for _ in range(n):
            self._memory[:] = data
            self._socket.sendall(request)
            self._socket.recv(ANSWER)
        return time.perf_counter() - start

    async def get_each(self, n: int) -> float:
        """Two requests: one for a sample, one to say that it is done."""
        request = bytes(REQUEST)
        start = time.perf_counter()
        for _ in range(n):
            for _ in range(2):
                self._socket.sendall(request)
                self._socket.recv(ANSWER)
            touch(self._memory)
        return time.perf_counter() - start

    async def _round_trip(self) -> None:
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(sock=self._awaited)
        reader, writer = self._streams
        writer.write(bytes(REQUEST))
        await reader.readexactly(ANSWER)

    async def put_awaited(self, n: int) -> float:
        """As put_each, but awaited on an event loop."""
        data = single()[0]

        async def put() -> None:
            for _ in range(n):
                self._memory[:] = data
                await self._round_trip()

        return await seconds(put())

    async def get_awaited(self, n: int) -> float:
        """As get_each, but awaited on an event loop."""

        async def get() -> None:
            for _ in range(n):
                await self._round_trip()
                await self._round_trip()
                touch(self._memory)

        return await seconds(get())


def answerer(path: Path) -> socket.socket:
    """A process that writes each request to a file before it answers."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        answer_requests(theirs, path)
    theirs.close()
    return ours


def answer_requests(sock: socket.socket, path: Path) -> None:
    """The other end, until the first one is closed."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    answer = bytes(ANSWER)
    while request := sock.recv(REQUEST):
        os.write(log, request)
        sock.sendall(answer)
    os._exit(0)


async def serve(target: Any) -> None:
    """Answer requests until stdin ends. Between two of them the loop is free: leases are kept."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print(json.dumps("ready"), flush=True)
    while line := await lines.readline():
        operation, *arguments = json.loads(line)
        print(json.dumps(await getattr(target, operation)(*arguments)), flush=True)


async def main(role: str, folder: Path, capacity_mib: int) -> None:
    if role == "limit":
        await serve(Limit(folder))
        return
    if role == "reader":
        async with TransferQueue.connect(folder) as queue:
            await serve(Reader(queue))
        return
    # Memory is made and pre-faulted once, in pieces that hold the largest batch, as one would for batches of this size.
    nbytes = capacity_mib << 20
    slab_bytes = min(SLAB_BYTES, nbytes)
    async with TransferQueue.connect(folder, capacity_bytes=nbytes, slab_bytes=slab_bytes, warm_bytes=nbytes) as queue:
        await serve(Writer(queue))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
