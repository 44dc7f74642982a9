"""Engines for the router's tests: scripted ones behind the real service, real sockets and a real registry core."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

from relax_rt.actors.directory import Directory
from relax_rt.cluster.registry.core import RegistryCore, RegistryState
from relax_rt.interfaces.registry import Changes, RegistryApi
from relax_rt.roles.rollout.engines.base import Chunk, EngineLoad, GroupRequest
from relax_rt.roles.rollout.generation import GenerationService
from relax_rt.roles.rollout.router.admission import CapLimits, EngineCap
from relax_rt.roles.rollout.router.interface import Generation
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import RpcClient, RpcServer, make_hello

RUN = "cafe0002"
STEP_S = 0.005


def token(seed: int, position: int) -> int:
    """What every engine says there: the weights do not change here."""
    return 1 + hashlib.blake2b(b"%d %d" % (seed, position), digest_size=1).digest()[0]


class ScriptedEngine:
    """Makes one token of each sequence every few milliseconds, unless it is held."""

    name = "scripted"

    def __init__(self, version: int = 1) -> None:
        self.version, self.paused, self.held = version, "", False
        self.tokens = 0
        self.running: dict[int, tuple[GroupRequest, list[int]]] = {}
        self.aborted: list[int] = []
        self.seen: list[GroupRequest] = []
        self.sink: Callable[[list[Chunk]], Any] = lambda chunks: None

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        for request in requests:
            partial = request.partial(0)
            self.seen.append(request)
            self.running[request.id] = request, list(partial.tokens) if partial else []

    def abort(self, request: int) -> None:
        self.aborted.append(request)
        self.running.pop(request, None)

    def load(self) -> EngineLoad:
        left = sum(r.max_new_tokens - len(had) for r, had in self.running.values())
        return EngineLoad(self.version, len(self.running), 0, self.tokens, 0, left, 0.0, self.paused)

    async def work(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            if self.held:
                continue
            chunks = []
            for number, (request, had) in list(self.running.items()):
                at = len(had)
                had.append(token(request.seeds[0], at))
                self.tokens += 1
                ends = at + 1 == request.max_new_tokens
                span = VersionSpan(at, at + 1, self.version, self.version)
                chunks.append(Chunk(number, 0, at, had[-1:], [-1.0], [span], "length" if ends else ""))
                if ends:
                    del self.running[number]
            self.sink(chunks)


class Rollout:
    """What a rollout is to a router: an engine, the service, a socket, an entry in the registry."""

    def __init__(self, fleet: FleetOfTests, slot: str, *, version: int = 1, room: int = 64) -> None:
        self.fleet, self.slot = fleet, slot
        self.who = Incarnation(slot, fleet.core.issue_epoch(slot))
        self.engine = ScriptedEngine(version)
        self.stopping = asyncio.Event()
        engine: Any = self.engine
        self.service = GenerationService(
            self.who.epoch, engine, self.stopping, EngineCap(CapLimits(most=room)), beat_s=0.05
        )
        self.engine.sink = self.service.take_chunks
        self.server = RpcServer(make_hello(RUN, self.who))
        self.server.offer(Generation, self.service)
        self.task: asyncio.Task[None] | None = None

    async def begin(self) -> Rollout:
        path = self.fleet.folder / f"{self.slot.replace('/', '-')}.sock"
        path.unlink(missing_ok=True)
        address = await self.server.listen(f"unix://{path}")
        self.fleet.addresses[self.slot] = address
        self.task = asyncio.create_task(self.engine.work())
        self.fleet.core.announce(self.who, 1, address, 600.0, 0.0)
        self.swap(self.engine.version)
        self.fleet.rollouts.append(self)
        return self

    def swap(self, version: int) -> None:
        self.engine.version = version
        self.fleet.core.renew(self.who, "ready", self.engine.tokens, "", version, 0.0)

    async def die(self, *, told: bool = True) -> None:
        """Without a word on its connections."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task})
            self.task = None
        for connection in list(self.server.connections):
            connection.channel.abort()
        await self.server.close(grace_s=0.0)
        if told:
            self.fleet.core.process_exited(self.who, "killed")


class FleetOfTests:
    """A run for the router, in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.core = RegistryCore(RegistryState(), 0.0)
        self.addresses: dict[str, str] = {}
        self.silent = False
        self.rollouts: list[Rollout] = []
        self.clients: list[RpcClient] = []
        self.trainer = Incarnation("trainer/0", self.core.issue_epoch("trainer/0"))
        self.core.announce(self.trainer, 1, "", 600.0, 0.0)
        self.registry: Any = self  # as much of it as a router calls
        self.directory = Directory(self._client, cast(RegistryApi, self))

    def actor(self, name: str, api: type, *, timeout_s: float) -> Any:
        return self.directory.actor(name, api, timeout_s=timeout_s)

    def commit(self) -> int:
        """A new version, made from the last."""
        number = self.core.issue_version(self.trainer)
        parent = self.core.committed.version if self.core.committed else 0
        self.core.commit_version(self.trainer, VersionRecord(number, parent, number, "digest"))
        return number

    async def versions(self) -> list[VersionRecord]:
        return self.core.versions()

    async def watch(self, since: int, wait_s: float) -> Changes:
        while self.silent or (found := self.core.changes(since)) is None:  # noqa: ASYNC110 - the state machine has no event
            await asyncio.sleep(0.005)
        return found

    def _client(self, slot: str) -> RpcClient:
        async def find() -> str:
            return self.addresses[slot]

        self.clients.append(RpcClient(find, make_hello(RUN, Incarnation("tester/0", 9))))
        return self.clients[-1]

    async def close(self) -> None:
        await self.directory.close()
        for client in self.clients:
            await client.close()
        for rollout in self.rollouts:
            await rollout.die(told=False)


@contextlib.asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[FleetOfTests]:
    made = FleetOfTests(folder)
    try:
        yield made
    finally:
        await made.close()
