"""The gateway and its engine, for tools/bench/agentic.py: a process each, as in a run.

    python agentic_servers.py engine SOCKET SLOTS MEDIAN_S
    python agentic_servers.py gateway SOCKET EPISODES

The engine is a script behind a rollout's own service at a unix socket. The gateway has all that its role has: ledgers,
admission control with the role's marks, and the router, which follows the engine through a registry (in this process,
since nothing happens there while calls are made).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import uvloop
from peers.slots import ANSWER, TOKEN, Slots, name_of

from relax_rt.actors.directory import Directory
from relax_rt.cluster.registry.core import RegistryCore, RegistryState
from relax_rt.interfaces.registry import Changes, RegistryApi
from relax_rt.roles.agentic.tokens.ledger import TokenLedger
from relax_rt.roles.agentic.tokens.template import ChatTemplate
from relax_rt.roles.gateway.access import Keys
from relax_rt.roles.gateway.api import SessionLimits
from relax_rt.roles.gateway.app import Gateway, HttpLimits
from relax_rt.roles.gateway.server import listen, make_server, url_of
from relax_rt.roles.gateway.service import AnswerPolicy, Service
from relax_rt.roles.gateway.sessions import Sessions
from relax_rt.roles.gateway.settings import GatewaySettings
from relax_rt.roles.models.tiny import character_tokenizer
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.roles.rollout.engines.base import Chunk, EngineLoad, GroupRequest
from relax_rt.roles.rollout.generation import GenerationService
from relax_rt.roles.rollout.router.admission import AdmissionLimits, AdmissionQueue, CapLimits, EngineCap
from relax_rt.roles.rollout.router.interface import Generation
from relax_rt.roles.rollout.router.router import Router
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import RpcClient, RpcServer, make_hello

RUN = "be9c0001"
ENGINE, TRAINER, CALLER = Incarnation("rollout/0", 1), Incarnation("trainer/0", 2), Incarnation("gateway/0", 3)
VERSION = 1
LEASE_S = 3600.0
NAME_TOKENS = 64
"""At a prompt's end, in which the call's name stands."""


def tokenizer() -> ChatTokenizer:
    """One token a character."""
    return ChatTokenizer(character_tokenizer(), Path())


# --- the engine


class ScriptedEngine:
    """What GenerationService needs of an Engine: each answer is the same, and comes when its slot is done."""

    name = "scripted"

    def __init__(self, slots: Slots) -> None:
        words = tokenizer()
        self._slots = slots
        self._spelled = {index: text for text, index in words.raw.get_vocab().items()}
        self._answer = [*words.encode(ANSWER), min(words.stop_ids)]
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.service: GenerationService

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """See Engine."""
        for request in requests:
            self._tasks[request.id] = asyncio.create_task(self._work(request))

    def abort(self, request: int) -> None:
        """See Engine."""
        if (task := self._tasks.pop(request, None)) is not None:
            task.cancel()

    def load(self) -> EngineLoad:
        """See Engine. Its tokens grow with the time: one that makes none is stuck to the router."""
        busy = self._slots.busy
        return EngineLoad(VERSION, busy, len(self._tasks) - busy, int(1000 * time.monotonic()), 0, 0, 0.0, "")

    async def _work(self, request: GroupRequest) -> None:
        await self._slots.work(name_of("".join(self._spelled[token] for token in request.prompt[-NAME_TOKENS:])))
        self._tasks.pop(request.id, None)
        count = len(self._answer)
        spans = [VersionSpan(0, count, VERSION, VERSION)]
        self.service.take_chunks([Chunk(request.id, 0, 0, list(self._answer), [-1.0] * count, spans, "stop")])


async def engine(path: str, slots: int, median_s: float, stack: AsyncExitStack) -> Slots:
    """Serve Generation at a unix socket, with room for as many sequences as there are slots."""
    made = Slots(slots, median_s)
    script = ScriptedEngine(made)
    cap = EngineCap(CapLimits(most=slots))
    script.service = GenerationService(ENGINE.epoch, cast(Any, script), asyncio.Event(), cap)
    server = RpcServer(make_hello(RUN, ENGINE))
    server.offer(Generation, script.service)
    await server.listen(f"unix://{path}")
    stack.push_async_callback(server.close, grace_s=0.0)
    return made


# --- the gateway


class Fleet:
    """The run as a router sees it: one engine, at the one version that there is."""

    def __init__(self, path: str) -> None:
        self._address = f"unix://{path}"
        self._core = RegistryCore(RegistryState(), 0.0)
        for who in (ENGINE, TRAINER):
            assert self._core.issue_epoch(who.slot) == who.epoch
        self._core.announce(TRAINER, 1, "", LEASE_S, 0.0)
        assert self._core.issue_version(TRAINER) == VERSION
        self._core.commit_version(TRAINER, VersionRecord(VERSION, 0, 1, "digest"))
        self._core.announce(ENGINE, 1, self._address, LEASE_S, 0.0)
        self._core.renew(ENGINE, "ready", 0, "", VERSION, 0.0)
        self.registry = cast(RegistryApi, self)
        self.clients: list[RpcClient] = []
        self._directory = Directory(self._client, self.registry)

    def actor(self, name: str, api: type, *, timeout_s: float) -> Any:
        """See router.Run."""
        return self._directory.actor(name, api, timeout_s=timeout_s)

    async def versions(self) -> list[VersionRecord]:
        """See RegistryApi."""
        return self._core.versions()

    async def watch(self, since: int, wait_s: float) -> Changes:
        """See RegistryApi: nothing changes after the beginning."""
        while (found := self._core.changes(since)) is None:  # noqa: ASYNC110 - the state machine has no event
            await asyncio.sleep(1.0)
        return found

    async def close(self) -> None:
        """Connections end."""
        await self._directory.close()
        for client in self.clients:
            await client.close()

    def _client(self, slot: str) -> RpcClient:
        async def find() -> str:
            return self._address

        self.clients.append(RpcClient(find, make_hello(RUN, CALLER)))
        return self.clients[-1]


async def gateway(path: str, episodes: int, stack: AsyncExitStack) -> tuple[Any, Callable[[], dict[str, int]]]:
    """The application, with a session for each episode; and what admission control and router have counted."""
    table = GatewaySettings()
    words = tokenizer()
    template = ChatTemplate(words)
    fleet = Fleet(path)
    stack.push_async_callback(fleet.close)
    router = await stack.enter_async_context(Router(cast(Any, fleet)))
    limits = AdmissionLimits(
        first=min(16, table.at_work), most=table.at_work, waiting=table.waiting, wait_s=table.wait_s
    )
    admission = await stack.enter_async_context(AdmissionQueue(limits, router.load))
    terms = AnswerPolicy(models=("policy",), new_tokens=64, context=1 << 16, timeout_s=table.call_timeout_s)
    service = Service(router, words, admission, terms)
    sessions = Sessions(
        lambda name, tokens: TokenLedger(template, max_tokens=tokens, session=name),
        tokens=table.session_tokens,
        most=max(table.sessions, episodes),
        idle_s=LEASE_S,
        now=time.monotonic,
    )
    for number in range(episodes):
        sessions.open(f"e{number}", SessionLimits())

    def counted() -> dict[str, int]:
        sent = {f"router {name}": count for name, count in router.statistics().counts.items()}
        return {"cap": admission.core.cap, **admission.core.counts, **sent}

    return Gateway(service, sessions, Keys(TOKEN), HttpLimits()).application(), counted


# --- a process


async def main() -> None:
    """Serve until a line comes on standard input; then tell what the engine logged."""
    kind, path, *rest = sys.argv[1:]
    async with AsyncExitStack() as stack:
        if kind == "engine":
            slots = await engine(path, int(rest[0]), float(rest[1]), stack)
            print(json.dumps({"url": path}), flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            print(json.dumps({"log": slots.log}), flush=True)
            return
        app, counted = await gateway(path, int(rest[0]), stack)
        listening = listen("127.0.0.1", 0)
        server = make_server(app, connections=max(GatewaySettings().connections, int(rest[0])), head_s=60.0)
        serving = asyncio.create_task(server.serve([listening]))
        print(json.dumps({"url": url_of(listening)}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print(json.dumps({"log": [], "counted": counted()}), flush=True)
        server.should_exit = True
        await serving


if __name__ == "__main__":
    uvloop.run(main())
