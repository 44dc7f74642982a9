"""Actors for the tests, a host for them without a run, and a process of it to kill."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import msgspec

from relax_rt.actors import Actor, caller, idempotent, tell
from relax_rt.actors.directory import Directory
from relax_rt.cluster.registry.core import RegistryCore, RegistryState
from relax_rt.interfaces.registry import Changes
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import CurveKeys, RpcClient, RpcServer, make_hello

RUN = "cafe0001"


class Text(msgspec.Struct, frozen=True):
    words: list[str]
    weight: float = 1.0


class Judge(Actor):
    """Scores, holds, counts and streams."""

    max_concurrency = 8
    mailbox = 8

    async def setup(self) -> None:
        self.notes: list[str] = []
        self.made: list[int] = []
        self.ended: list[str] = []
        self.working = 0
        self.peak = 0
        self.release = asyncio.Event()

    async def score(self, text: Text, factor: float = 1.0) -> float:
        return len(text.words) * text.weight * factor

    @idempotent
    async def pid(self) -> int:
        return os.getpid()

    @idempotent
    async def hold(self) -> int:
        self.working += 1
        self.peak = max(self.peak, self.working)
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.ended.append("hold cancelled")
            raise
        finally:
            self.working -= 1
        return os.getpid()

    async def hold_once(self) -> int:
        return await self.hold()

    @tell
    async def note(self, text: str) -> None:
        self.notes.append(text)

    async def who_asks(self) -> str:
        return caller().who.slot

    async def fail(self) -> None:
        raise KeyError("spelling")

    async def refuse(self) -> None:
        raise Refused("a text", why="it is empty")

    async def big(self, n: int) -> bytes:
        return bytes(n)

    async def count(self, n: int, *, fail_at: int = -1, wait_at: int = -1) -> AsyncIterator[int]:
        try:
            for i in range(n):
                if i == fail_at:
                    raise ValueError(f"no item {i}")
                if i == wait_at:
                    await asyncio.sleep(60)
                self.made.append(i)
                yield i
            self.ended.append("whole")
        except (asyncio.CancelledError, GeneratorExit):
            self.ended.append("cancelled")
            raise

    @idempotent
    async def pids(self) -> AsyncIterator[int]:
        yield os.getpid()
        await self.release.wait()

    @idempotent
    async def held(self) -> AsyncIterator[int]:
        yield await self.hold()

    def helper(self) -> str:
        """Not of the interface."""
        return "local"


class Ctx:
    """What an actor needs of its context, without a run."""

    def __init__(self, slot: str, epoch: int, **options: Any) -> None:
        self.who = Incarnation(slot, epoch)
        self.server = RpcServer(make_hello(RUN, self.who), **options)
        self.stopping = asyncio.Event()
        self.progress = self
        self.is_ready = asyncio.Event()
        self.advanced = 0
        self.waits: list[str] = []

    def serve(self, api: type, implementation: Any, *, max_calls: int | None = None) -> None:
        self.server.offer(api, implementation)
        self.server.max_calls = max_calls or self.server.max_calls

    async def ready(self, policy_version: int = 0) -> None:
        self.is_ready.set()

    def advance(self, n: int = 1, detail: str = "") -> None:
        self.advanced += n

    def waiting(self, reason: str) -> None:
        self.waits.append(reason)


@contextlib.asynccontextmanager
async def living(address: str, cls: type[Actor] = Judge, slot: str = "judge/0", epoch: int = 1, **options: Any) -> Any:
    """An actor in this process: (actor, address)."""
    ctx = Ctx(slot, epoch, **options)
    actor = cls(ctx)  # type: ignore[arg-type]
    await actor.setup()
    real = await ctx.server.listen(address)
    life = asyncio.create_task(actor.run())
    try:
        yield actor, real
    finally:
        ctx.stopping.set()
        if not life.done():
            life.cancel()
        await asyncio.wait({life})
        await ctx.server.close(grace_s=0.0)


class Registry:
    """A registry in this process: the real state machine, and watches."""

    def __init__(self) -> None:
        self.core = RegistryCore(RegistryState(), 0.0)

    def enter(self, slot: str, address: str, state: str = "ready") -> Incarnation:
        who = Incarnation(slot, self.core.issue_epoch(slot))
        self.core.enter(who, 1, address, state)
        return who

    async def watch(self, since: int, wait_s: float) -> Changes:
        while (found := self.core.changes(since)) is None:  # noqa: ASYNC110 - the state machine has no event
            await asyncio.sleep(0.005)
        return found


@contextlib.asynccontextmanager
async def directory(
    addresses: dict[str, str], registry: Registry | None = None, curve: CurveKeys | None = None, **options: Any
) -> AsyncIterator[Directory]:
    """References to actors at these addresses, by slot."""
    clients: list[RpcClient] = []

    def client(slot: str) -> RpcClient:
        async def find() -> str:
            return addresses[slot]

        clients.append(RpcClient(find, make_hello(RUN, Incarnation("tester/0", 9)), curve=curve, **options))
        return clients[-1]

    made = Directory(client, registry)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        await made.close()
        for one in clients:
            await one.close()


async def fails(awaitable: Awaitable[Any], kind: type[BaseException]) -> Any:
    """The error that awaiting raises."""
    try:
        await awaitable
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


async def _serve(address: str, epoch: str, released: str, public: str, secret: str) -> None:
    curve = CurveKeys(public.encode(), secret.encode()) if public else None
    async with living(address, epoch=int(epoch), curve=curve) as (actor, real):
        if released == "released":
            actor.release.set()
        sys.stdout.write(real + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


async def spawn(
    address: str, epoch: int, *, released: bool = False, keys: CurveKeys | None = None
) -> tuple[asyncio.subprocess.Process, str]:
    """An actor in a process of its own."""
    parts = (keys.public.decode(), keys.secret.decode()) if keys else ("", "")
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, address, str(epoch), "released" if released else "held", *parts,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 120)
    return process, line.decode().strip()


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:6]))
