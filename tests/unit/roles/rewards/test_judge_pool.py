"""Judges as a pool: the service, the router of frozen engines and the asking, with an engine of a few lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("tokenizers")

from relax_rt.cluster.registry.core import RegistryCore, RegistryState
from relax_rt.interfaces.registry import Changes
from relax_rt.roles.rewards.judge import Judge, JudgeVerdict, Judging, LateVerdict
from relax_rt.roles.rewards.scoring import RewardRequest
from relax_rt.roles.rewards.settings import JudgeTable
from relax_rt.roles.rollout.engines.base import Chunk, EngineLoad, GroupRequest
from relax_rt.roles.rollout.generation import GenerationService
from relax_rt.roles.rollout.router import Router
from relax_rt.roles.rollout.router.interface import Generation
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import Unreachable
from relax_rt.transport.rpc.identity import Incarnation

STOP = 3
TOKEN_S = 0.005


class Letters:
    """A tokenizer of a token a character, which ends with STOP."""

    stop_ids = frozenset([STOP])

    def render(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [ord(letter) for message in messages for letter in message["content"]]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens if token != STOP)


class Echo:
    """An engine whose words are how many letters its prompt has, a token at a time. It has no policy version."""

    name = "echo"

    def __init__(self, sink: Callable[[list[Chunk]], None]) -> None:
        self._sink, self._tasks = sink, {}  # type: ignore[var-annotated]
        self.generated = 0
        self.most: int | None = None
        """Tokens after which it stands still."""

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        for request in requests:
            self._tasks[request.id] = asyncio.create_task(self._make(request))

    def abort(self, request: int) -> None:
        if (task := self._tasks.pop(request, None)) is not None:
            task.cancel()

    async def _make(self, request: GroupRequest) -> None:
        had = len(request.partials[0].tokens) if request.partials and request.partials[0] else 0
        words = [*(ord(letter) for letter in f"that is {len(request.prompt)}"), STOP]
        for at in range(had, len(words)):
            await asyncio.sleep(TOKEN_S)
            if self.generated == self.most:
                await asyncio.Event().wait()
            self.generated += 1
            end = "stop" if words[at] == STOP else ""
            self._sink([Chunk(request.id, 0, at, [words[at]], [-0.1], [VersionSpan(at, at + 1, 0, 0)], end)])
        self._tasks.pop(request.id, None)

    def load(self) -> EngineLoad:
        running = len(self._tasks)
        return EngineLoad(0, running, 0, self.generated, 0, running * 8, 0.0, "")

    def kill(self) -> None:
        for request in list(self._tasks):
            self.abort(request)


class Slot:
    """A judge's slot as a router calls it: an incarnation that can die under its streams."""

    def __init__(self, run: Run, name: str) -> None:
        self._run, self.name = run, name
        self.dead = True
        self.start()

    def start(self) -> None:
        registry = self._run.registry.core
        self.who = Incarnation(self.name, registry.issue_epoch(self.name))
        registry.announce(self.who, 1, f"unix://{self.name}", 10.0, 0.0)
        self.engine = Echo(lambda chunks: self.service.take_chunks(chunks) and None)
        self.service = GenerationService(self.who.epoch, self.engine, asyncio.Event())  # type: ignore[arg-type]
        registry.renew(self.who, "ready", 0, "", 0, 0.0)
        self.dead = False

    def kill(self) -> None:
        self.dead = True
        self.engine.kill()
        self._run.registry.core.process_exited(self.who, "killed")

    async def load(self) -> Any:
        if self.dead:
            raise Unreachable(self.name, why="it is dead")
        return await self.service.load()

    async def generate(self, order: Any) -> AsyncIterator[Any]:
        service, who = self.service, self.who
        if self.dead:
            raise Unreachable(self.name, why="it is dead")
        async for piece in service.generate(order):
            if self.dead or who != self.who:
                raise Unreachable(self.name, why="it died")
            yield piece


class Registry:
    """RegistryApi over the real account, as far as routers ask it."""

    def __init__(self) -> None:
        self.core = RegistryCore(RegistryState(), 0.0)

    async def watch(self, since: int, wait_s: float) -> Changes:
        for _ in range(100):
            if (found := self.core.changes(since)) is not None:
                return found
            await asyncio.sleep(0.01)
        return Changes(self.core.revision, False, [])


class Run:
    """What a router needs of a run."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.slots = {name: Slot(self, name) for name in ("genrm/0", "genrm/1")}

    def actor(self, name: str, api: type, *, timeout_s: float) -> Any:
        assert api is Generation
        return self.slots[name]


@asynccontextmanager
async def judging(run: Run, **keys: Any) -> AsyncIterator[tuple[Router, Judge]]:
    table = JudgeTable(prompt="{completion}", highest=100.0, **keys)
    async with Router(run, "genrm", frozen=True) as router:  # type: ignore[arg-type]
        yield router, Judge(Judging(table, Letters()), router.generate)  # type: ignore[arg-type]


def requests(count: int) -> list[RewardRequest]:
    return [RewardRequest("x" * (number + 1), "", {}) for number in range(count)]


async def test_verdicts_come_from_judges_without_a_version_and_depend_on_the_completion() -> None:
    run = Run()
    async with judging(run) as (router, judge):
        found = await judge.verdicts(requests(20))
        assert [v.value for v in found if isinstance(v, JudgeVerdict)] == [
            pytest.approx((n + 1) / 100) for n in range(20)
        ]
        assert set(router.statistics().sent) == {"genrm/0", "genrm/1"}, "both work"


async def test_a_judge_that_dies_costs_no_verdict_and_its_tokens_are_kept() -> None:
    run = Run()
    run.slots["genrm/0"].engine.most = 20
    async with judging(run) as (router, judge):
        asking = asyncio.create_task(judge.verdicts(requests(30)))
        open_ = router.core.requests
        async with asyncio.timeout(120):
            while not any(  # noqa: ASYNC110 - nobody says so
                one.tokens and one.assignment is not None and one.assignment.slot == "genrm/0" for one in open_.values()
            ):
                await asyncio.sleep(0.005)
        run.slots["genrm/0"].kill()
        found = await asking
        assert all(isinstance(verdict, JudgeVerdict) for verdict in found)
        assert router.core.counts["resumed"] > 0, "what it had made was thrown away"


async def test_without_any_judge_verdicts_wait_for_one_and_are_late_after_their_time() -> None:
    run = Run()
    for slot in run.slots.values():
        slot.kill()
    async with judging(run, timeout_s=0.5) as (router, judge):
        (late,) = await judge.verdicts(requests(1))
        assert isinstance(late, LateVerdict) and "an engine" in late.reason
    async with judging(run, timeout_s=60.0) as (router, judge):
        asking = asyncio.create_task(judge.verdicts(requests(3)))
        await asyncio.sleep(0.2)
        assert not asking.done() and router.waiting_on()
        run.slots["genrm/1"].start()
        assert all(isinstance(verdict, JudgeVerdict) for verdict in await asking)
