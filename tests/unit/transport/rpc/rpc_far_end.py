"""The far end of the RPC tests: an interface, its implementation, and a server process to kill."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from relax_rt.transport.rpc.errors import OutOfSpace, RelaxError, StaleEpoch
from relax_rt.transport.rpc.identity import Hello, Incarnation
from relax_rt.transport.rpc.rpc import CurveKeys, RpcClient, RpcServer, caller, idempotent, make_hello, tell


class Point(msgspec.Struct, frozen=True):
    x: int
    y: float = 0.5
    tags: tuple[str, ...] = ()


class TooHot(OutOfSpace):
    """A subclass with a constructor of its own, as users write them."""

    def __init__(self, degrees: float) -> None:
        self.degrees = degrees
        super().__init__(f"{degrees} degrees", why="too hot", hint="wait")


class FarEnd(Protocol):
    @idempotent
    async def echo(self, data: bytes) -> bytes: ...

    @idempotent
    async def move(self, point: Point, by: int = 1, *, label: str = "none") -> Point: ...

    @idempotent
    async def nothing(self) -> None: ...

    @idempotent
    async def who(self) -> Incarnation: ...

    async def fail(self, how: str) -> None: ...

    @idempotent
    async def hold(self, key: str) -> int: ...

    async def hold_once(self, key: str) -> int: ...

    @idempotent
    async def poll(self, wait_s: float) -> str: ...

    @tell
    async def note(self, text: str) -> None: ...

    async def wrong(self) -> int: ...


class FarEndImpl:
    """Holds calls of `hold` until `release` is set, and counts what happens to them."""

    def __init__(self, pid_only: bool = False) -> None:
        self.release = asyncio.Event()
        self.entered = asyncio.Condition()
        self.working = 0
        self.peak = 0
        self.cancelled: list[str] = []
        self.notes: list[str] = []
        self.noted = asyncio.Event()
        if pid_only:
            self.release.set()

    async def echo(self, data: bytes) -> bytes:
        return data

    async def move(self, point: Point, by: int = 1, *, label: str = "none") -> Point:
        return Point(point.x + by, point.y, (*point.tags, label))

    async def nothing(self) -> None:
        return None

    async def who(self) -> Incarnation:
        await asyncio.sleep(0)
        return caller().who

    async def fail(self, how: str) -> None:
        if how == "plain":
            raise KeyError("spelling")
        if how == "stale":
            raise StaleEpoch("rollout/0#1", why="rollout/0#2 holds the slot", hint="exit")
        if how == "own":
            raise TooHot(451)
        if how == "cancel":
            raise asyncio.CancelledError
        raise RelaxError("unknown way", why=how)

    async def hold(self, key: str) -> int:
        self.working += 1
        self.peak = max(self.peak, self.working)
        try:
            async with self.entered:
                self.entered.notify_all()
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.append(key)
            raise
        finally:
            self.working -= 1
        return os.getpid()

    async def hold_once(self, key: str) -> int:
        return await self.hold(key)

    async def poll(self, wait_s: float) -> str:
        await asyncio.sleep(wait_s)
        return "waited"

    async def note(self, text: str) -> None:
        self.notes.append(text)
        if text == "bad":
            raise ValueError("no one hears this")
        self.noted.set()

    async def wrong(self) -> int:
        return "not a number"  # type: ignore[return-value]

    async def until_working(self, n: int) -> None:
        async with asyncio.timeout(120):
            async with self.entered:
                await self.entered.wait_for(lambda: self.working >= n)


def hello(slot: str = "rollout/0", epoch: int = 7, *, run_id: str = "cafe0001", protocol: int | None = None) -> Hello:
    made = make_hello(run_id, Incarnation(slot, epoch))
    return made if protocol is None else msgspec.structs.replace(made, protocol=protocol)


@contextlib.asynccontextmanager
async def serving(
    address: str, *, answers: bool = False, **options: object
) -> AsyncIterator[tuple[RpcServer, str, FarEndImpl]]:
    server = RpcServer(hello("queue/0", 3), **options)  # type: ignore[arg-type]
    implementation = FarEndImpl(pid_only=answers)
    server.offer(FarEnd, implementation)
    real = await server.listen(address)
    try:
        yield server, real, implementation
    finally:
        await server.close(grace_s=5.0 if answers else 0.0)


@contextlib.asynccontextmanager
async def calling(address: str, timeout_s: float = 10.0, **options: object) -> AsyncIterator[tuple[RpcClient, FarEnd]]:
    client = RpcClient(address, hello(), **options)  # type: ignore[arg-type]
    try:
        yield client, client.bind(FarEnd, timeout_s=timeout_s)
    finally:
        await client.close()


async def _serve_forever(address: str, mode: str, public: str, secret: str) -> None:
    curve = CurveKeys(public.encode(), secret.encode()) if public else None
    server = RpcServer(hello("queue/0", 3), curve=curve)
    server.offer(FarEnd, FarEndImpl(pid_only=mode == "answer"))
    sys.stdout.write(await server.listen(address) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


async def spawn(address: str, mode: str, keys: CurveKeys | None = None) -> tuple[asyncio.subprocess.Process, str]:
    """A server process; mode `hold` never answers `hold`, mode `answer` answers with its pid."""
    parts = (keys.public.decode(), keys.secret.decode()) if keys else ("", "")
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, address, mode, *parts, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 120)
    return process, line.decode().strip()


if __name__ == "__main__":
    asyncio.run(_serve_forever(*sys.argv[1:5]))
