"""Both sides of time slicing over a real registry core: deaths at each step, failing calls, hanging engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from relax_rt.cluster.registry.core import RegistryCore, RegistryState
from relax_rt.interfaces.registry import Changes
from relax_rt.roles.rollout.engines import time_slicing as module
from relax_rt.roles.rollout.engines.time_slicing import (
    TRAINER_SLOT,
    DeviceGrant,
    EngineTimeSlicing,
    HolderReport,
    MemoryGate,
    ReleaseTimedOut,
    TrainerTimeSlicing,
)
from relax_rt.transport.rpc.errors import Unreachable
from relax_rt.transport.rpc.identity import Incarnation

PATIENCE_S = 120


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls that come soon, and trainers that do not wait long for engines that hang."""
    monkeypatch.setattr(module, "WAIT_S", 0.05)
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(module, "GRACE_S", 0.0)


class Nothing:
    """Takes whatever a role says of itself."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class Registry:
    """RegistryApi over the real account, as far as turns ask it."""

    def __init__(self) -> None:
        self.core = RegistryCore(RegistryState(), 0.0)
        self.away = False

    async def watch(self, since: int, wait_s: float) -> Changes:
        for _ in range(max(1, int(wait_s / 0.01))):
            if self.away:
                raise Unreachable("registry", why="it is away")
            if (found := self.core.changes(since)) is not None or not wait_s:
                break
            await asyncio.sleep(0.01)
        return found or Changes(self.core.revision, False, [])


class Ctx:
    """What a role in one slot is given."""

    def __init__(self, run: Run, slot: str) -> None:
        self.run, self.registry = run, run.registry
        self.who = Incarnation(slot, run.registry.core.issue_epoch(slot))
        self.progress = self.log = Nothing()
        self.events: list[str] = []

    def event(self, kind: str, /, **_: Any) -> None:
        self.events.append(kind)

    async def peer(self, slot: str, api: type, *, timeout_s: float) -> Any:
        assert slot == TRAINER_SLOT
        return self.run

    def announce(self) -> None:
        self.registry.core.announce(self.who, 1, f"unix://{self.who.slot}", 10.0, 0.0)

    def gone(self) -> None:
        self.registry.core.process_exited(self.who, "killed")


class Engine:
    """A rollout's part; it counts as having memory from the moment it may have any."""

    def __init__(self, run: Run, slot: str, leave_s: float = 0.0, limit_s: float = 5.0) -> None:
        self.ctx, self.run, self.leave_s = Ctx(run, slot), run, leave_s
        self.holds = False
        self.leaving = asyncio.Event()
        self.turns = EngineTimeSlicing(
            self.ctx,  # type: ignore[arg-type]
            self._leave,
            self._back,
            release_timeout_s=limit_s,
            resume_timeout_s=limit_s,
        )
        self.task = asyncio.create_task(self._live())

    async def _live(self) -> None:
        await self.turns.enter()
        self.run.takes(self)
        self.ctx.announce()
        await self.turns.follow()

    async def _leave(self) -> None:
        self.leaving.set()
        await asyncio.sleep(self.leave_s)
        self.holds = False

    async def _back(self) -> None:
        self.run.takes(self)

    def kill(self) -> None:
        self.task.cancel()
        self.holds = False
        self.ctx.gone()


class Run:
    """A trainer that can be killed and stopped, as a peer; engines; who has the device."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.trainer: TrainerTimeSlicing | None = None
        self.ctx: Ctx
        self.training = self.stopped = False
        self.without: tuple[str, ...] = ()
        self.engines: list[Engine] = []

    def start(self) -> TrainerTimeSlicing:
        self.ctx = Ctx(self, TRAINER_SLOT)
        self.trainer = TrainerTimeSlicing(self.ctx, 3.0)  # type: ignore[arg-type]
        self.ctx.announce()
        return self.trainer

    async def may_hold(self, report: HolderReport, wait_s: float) -> DeviceGrant:
        asked = self.trainer
        if asked is not None and not self.stopped:
            told = await asked.may_hold(report, wait_s)
            if asked is self.trainer and not self.stopped:
                return told
        await asyncio.sleep(0.02)
        raise Unreachable("trainer/0", why="no answer")

    def takes(self, engine: Engine) -> None:
        assert not self.training, f"{engine.ctx.who} takes memory in the trainer's turn"
        engine.holds = True

    def engine(self, slot: str, **options: float) -> Engine:
        self.engines.append(Engine(self, slot, **options))
        return self.engines[-1]

    @asynccontextmanager
    async def turn_of(self, trainer: TrainerTimeSlicing) -> AsyncIterator[tuple[str, ...]]:
        async with trainer.training() as without:
            held = [engine.ctx.who.slot for engine in self.engines if engine.holds]
            assert set(held) <= set(without), f"{held} have memory in the trainer's turn"
            self.training = True
            yield without
            self.training = False

    def kill_trainer(self, task: asyncio.Task[Any] | None = None) -> None:
        self.trainer, self.training = None, False
        self.ctx.gone()
        if task is not None:
            task.cancel()


@pytest.fixture
async def run() -> AsyncIterator[Run]:
    made = Run()
    yield made
    for engine in made.engines:
        engine.task.cancel()
    await asyncio.gather(*(engine.task for engine in made.engines), return_exceptions=True)


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not what():  # noqa: ASYNC110 - several parties change what is waited for
            await asyncio.sleep(0.005)


async def test_the_device_alternates(run: Run) -> None:
    trainer, a, b = run.start(), run.engine("rollout/0"), run.engine("rollout/1")
    await until(lambda: a.holds and b.holds)
    for _ in range(3):
        async with run.turn_of(trainer) as without:
            assert without == () and not a.holds and not b.holds
            await asyncio.sleep(0.1)
            assert not a.holds and not b.holds, "they wait for its turn to end"
        await until(lambda: a.holds and b.holds)
    assert a.ctx.events.count("engine_released") == a.ctx.events.count("engine_resumed") == 3


async def test_an_engine_that_starts_during_training_waits(run: Run) -> None:
    trainer = run.start()
    async with run.turn_of(trainer):
        late = run.engine("rollout/0")
        await asyncio.sleep(0.2)
        assert not late.holds
    await until(lambda: late.holds)


async def test_engines_need_no_trainer_that_is_not_there_yet(run: Run) -> None:
    first = run.engine("rollout/0")
    await until(lambda: first.holds)
    Ctx(run, TRAINER_SLOT)  # it is being set up: entered, without an address
    second = run.engine("rollout/1")
    await until(lambda: second.holds)
    async with run.turn_of(run.start()):
        assert not first.holds and not second.holds


async def test_a_trainers_death_frees_the_device_for_engines_and_successor(run: Run) -> None:
    trainer, engine = run.start(), run.engine("rollout/0")
    await until(lambda: engine.holds)

    async def train() -> None:
        async with run.turn_of(trainer):
            await asyncio.sleep(3600)

    task = asyncio.create_task(train())
    await until(lambda: run.training)
    run.kill_trainer(task)
    await until(lambda: engine.holds)
    async with run.turn_of(run.start()):
        assert not engine.holds
    await until(lambda: engine.holds)


async def test_a_trainers_death_during_the_release_leaves_engines_serving(run: Run) -> None:
    trainer, engine = run.start(), run.engine("rollout/0", leave_s=0.2)
    await until(lambda: engine.holds)
    task = asyncio.create_task(run.turn_of(trainer).__aenter__())
    await until(engine.leaving.is_set)
    run.kill_trainer(task)
    await until(lambda: "engine_resumed" in engine.ctx.events)
    assert engine.holds


async def test_a_suspended_trainer_keeps_the_device_until_it_is_dead(run: Run) -> None:
    trainer, engine = run.start(), run.engine("rollout/0")
    await until(lambda: engine.holds)
    async with run.turn_of(trainer):
        run.stopped = True
        await asyncio.sleep(0.3)
        assert not engine.holds, "it may still have the memory"
        run.registry.away = True
        run.kill_trainer()
        await asyncio.sleep(0.1)
        assert not engine.holds, "nobody has said that it is dead"
        run.registry.away = False
        await until(lambda: engine.holds)


@pytest.mark.parametrize("when", ["before", "leaving", "released"])
def test_an_engine_may_die_at_every_step(when: str) -> None:
    asyncio.run(_engine_dies(when))


async def _engine_dies(when: str) -> None:
    run = Run()
    trainer, a, b = run.start(), run.engine("rollout/0"), run.engine("rollout/1", leave_s=0.3)
    await until(lambda: a.holds and b.holds)
    if when == "before":
        b.kill()
    turn = run.turn_of(trainer)
    entering = asyncio.create_task(turn.__aenter__())
    if when == "leaving":
        await until(b.leaving.is_set)
        b.kill()
    assert await asyncio.wait_for(entering, PATIENCE_S) == ()
    if when == "released":
        b.kill()
    successor = run.engine("rollout/1")
    await asyncio.sleep(0.15)
    assert not successor.holds and not a.holds
    await turn.__aexit__(None, None, None)
    await until(lambda: a.holds and successor.holds)
    for engine in run.engines:
        engine.task.cancel()


async def test_an_engine_that_does_not_release_ends(run: Run) -> None:
    trainer, stuck = run.start(), run.engine("rollout/0", leave_s=3600.0, limit_s=0.2)
    await until(lambda: stuck.holds)
    async with run.turn_of(trainer) as without:
        assert without == ("rollout/0",), "its process has not ended yet, and may hold memory"
    assert "engine_not_released" in run.ctx.events
    with pytest.raises(ReleaseTimedOut, match="did not release its memory"):
        await stuck.task


async def test_a_cancelled_request_leaves_the_engines_serving(run: Run) -> None:
    trainer, engine = run.start(), run.engine("rollout/0", leave_s=0.2)
    await until(lambda: engine.holds)
    task = asyncio.create_task(run.turn_of(trainer).__aenter__())
    await until(engine.leaving.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: "engine_resumed" in engine.ctx.events)
    assert engine.holds
    async with run.turn_of(trainer):
        assert not engine.holds


async def test_a_closed_gate_lets_running_work_end_and_none_begin() -> None:
    gate, order = MemoryGate(), []

    async def work(name: str, seconds: float) -> None:
        async with gate.inside():
            order.append(f"{name} begins")
            await asyncio.sleep(seconds)
            order.append(f"{name} ends")

    first = asyncio.create_task(work("first", 0.1))
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(gate.close())
    second = asyncio.create_task(work("second", 0.0))
    await closing
    order.append("closed")
    await asyncio.sleep(0.05)
    gate.open()
    await asyncio.gather(first, second)
    assert order == ["first begins", "first ends", "closed", "second begins", "second ends"]
