"""What tools/bench/actors.py calls: our actor, and the same thing bare on ZeroMQ and on uvloop's streams."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import zmq
import zmq.asyncio

import relax_rt.cluster.discovery
from relax_rt.actors import Actor, idempotent, tell
from relax_rt.actors.directory import Directory
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import CurveKeys, RpcClient, RpcServer, make_hello

RUN_ID = "bench000"
AT_ONCE = 64
"""Calls that an actor has at work at most, and that are under way where many are: ours and Ray's."""
LENGTH = struct.Struct("<I")
CALL, TELL, COUNT, STREAM = b"c", b"t", b"n", b"s"
"""First byte of a bare message: answered, not answered, how many were not answered, answered by that many."""


class Scorer(Actor):
    """What is measured: nothing is done in it."""

    max_concurrency = AT_ONCE

    async def setup(self) -> None:
        self.heard = 0

    @idempotent
    async def score(self, text: bytes) -> float:
        return float(len(text))

    @tell
    async def note(self, text: bytes) -> None:
        self.heard += 1

    @idempotent
    async def count(self) -> int:
        return self.heard

    async def tokens(self, n: int, text: bytes) -> AsyncIterator[bytes]:
        for _ in range(n):
            yield text


class Caller(Protocol):
    """One standing connection to a variant's server."""

    async def call(self, data: bytes) -> None: ...

    async def tell_many(self, n: int, data: bytes) -> None:
        """Return when all were handled."""

    async def stream(self, n: int, data: bytes) -> None: ...


class OurCaller:
    """Through a reference."""

    def __init__(self, ref: Scorer) -> None:
        self._ref = ref

    async def call(self, data: bytes) -> None:
        await self._ref.score(data)

    async def tell_many(self, n: int, data: bytes) -> None:
        wanted = await self._ref.count() + n
        for _ in range(n):
            await self._ref.note(data)
        while await self._ref.count() < wanted:  # noqa: ASYNC110 - the far end is another process
            await asyncio.sleep(0.001)

    async def stream(self, n: int, data: bytes) -> None:
        got = 0
        async for _ in self._ref.tokens(n, data):
            got += 1
        assert got == n


@contextlib.asynccontextmanager
async def in_run(run_dir: Path, name: str) -> AsyncIterator[Caller]:
    """Our actor in a real run, by slot or by role."""
    async with relax_rt.cluster.discovery.connect(run_dir) as discovery:
        yield OurCaller(discovery.actor(name, Scorer))


class _Stand:
    """What an actor needs of its context, where there is no run."""

    def __init__(self, keys: CurveKeys) -> None:
        self.who = Incarnation("scorer/0", 1)
        self.server = RpcServer(make_hello(RUN_ID, self.who), curve=keys)

    def serve(self, api: type, implementation: Any, *, max_calls: int | None = None) -> None:
        self.server.offer(api, implementation)


async def serve_curve(keys: CurveKeys, address_file: Path) -> None:
    """Our actor on an encrypted TCP port, as a role on another node listens."""
    stand = _Stand(keys)
    actor = Scorer(stand)  # type: ignore[arg-type]
    await actor.setup()
    _written(address_file, await stand.server.listen("tcp://127.0.0.1:0"))
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def over_curve(keys: CurveKeys, address: str) -> AsyncIterator[Caller]:
    """Our actor over encrypted TCP."""
    client = RpcClient(address, make_hello(RUN_ID, Incarnation("bench/0", 2)), curve=keys)
    directory = Directory(lambda slot: client, None)
    yield OurCaller(directory.actor("scorer/0", Scorer))
    await client.close()


async def serve_zmq(path: str) -> None:
    """ROUTER: one bare message, one bare answer."""
    sock = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    sock.set_hwm(0)
    sock.bind(f"ipc://{path}")
    heard = 0
    while True:
        who, data = await sock.recv_multipart()
        kind = data[:1]
        if kind == TELL:
            heard += 1
        elif kind == CALL:
            await sock.send_multipart([who, data])
        elif kind == COUNT:
            await sock.send_multipart([who, LENGTH.pack(heard)])
        else:
            (n,) = LENGTH.unpack_from(data, 1)
            for _ in range(n):
                await sock.send_multipart([who, data])


class ZmqCaller:
    """DEALER."""

    def __init__(self, sock: zmq.asyncio.Socket) -> None:
        self._sock = sock

    async def call(self, data: bytes) -> None:
        await self._sock.send(CALL + data)
        await self._sock.recv()

    async def tell_many(self, n: int, data: bytes) -> None:
        wanted = await self._count() + n
        for _ in range(n):
            await self._sock.send(TELL + data)
        while await self._count() < wanted:  # noqa: ASYNC110 - the far end is another process
            await asyncio.sleep(0.001)

    async def stream(self, n: int, data: bytes) -> None:
        await self._sock.send(STREAM + LENGTH.pack(n) + data)
        for _ in range(n):
            await self._sock.recv()

    async def _count(self) -> int:
        await self._sock.send(COUNT)
        return int(LENGTH.unpack(await self._sock.recv())[0])


@contextlib.asynccontextmanager
async def over_zmq(path: str) -> AsyncIterator[Caller]:
    """Bare zmq.asyncio."""
    sock = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    sock.set_hwm(0)
    sock.connect(f"ipc://{path}")
    yield ZmqCaller(sock)
    sock.close(linger=0)


async def serve_stream(path: str) -> None:
    """Length-prefixed messages on a unix socket."""
    await (await asyncio.start_unix_server(_answer_stream, path)).serve_forever()


async def _answer_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    heard = 0
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            data = await _read(reader)
            kind = data[:1]
            if kind == TELL:
                heard += 1
                continue
            n = LENGTH.unpack_from(data, 1)[0] if kind == STREAM else 1
            answer = LENGTH.pack(heard) if kind == COUNT else data
            for _ in range(n):
                writer.write(LENGTH.pack(len(answer)) + answer)
                await writer.drain()


async def _read(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(LENGTH.unpack(await reader.readexactly(LENGTH.size))[0])


class StreamCaller:
    """Bare uvloop streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def call(self, data: bytes) -> None:
        await self._send(CALL + data)
        await _read(self._reader)

    async def tell_many(self, n: int, data: bytes) -> None:
        wanted = await self._count() + n
        for _ in range(n):
            await self._send(TELL + data)
        while await self._count() < wanted:  # noqa: ASYNC110 - the far end is another process
            await asyncio.sleep(0.001)

    async def stream(self, n: int, data: bytes) -> None:
        await self._send(STREAM + LENGTH.pack(n) + data)
        for _ in range(n):
            await _read(self._reader)

    async def _count(self) -> int:
        await self._send(COUNT)
        return int(LENGTH.unpack(await _read(self._reader))[0])

    async def _send(self, data: bytes) -> None:
        self._writer.write(LENGTH.pack(len(data)) + data)
        await self._writer.drain()


@contextlib.asynccontextmanager
async def over_stream(path: str) -> AsyncIterator[Caller]:
    """Bare uvloop streams."""
    reader, writer = await asyncio.open_unix_connection(path)
    yield StreamCaller(reader, writer)
    writer.close()


def _written(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.rename(path)
