"""The trainer's broadcasts: to whoever was there, in time or given up, and never in the way of a publication."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import structlog
from weight_versions import LAYOUT, fill

from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.locations import offers_folder, stage_folder
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.rollout.engines.communicator import communicator_of
from relax_rt.roles.training.publication.carriers import WeightBroadcaster
from relax_rt.roles.training.publication.settings import PublicationTable
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.weights.broadcast import group as groups
from relax_rt.transport.weights.broadcast.machine import BroadcastLimits
from relax_rt.transport.weights.broadcast.protocol import BroadcastFailed, BroadcastOutcome, LostRank
from relax_rt.transport.weights.broadcast.receivers import BroadcastReceiver
from relax_rt.transport.weights.broadcast.source import BroadcastSource, HostReceiveBuffer
from relax_rt.transport.weights.manifest import Manifest
from relax_rt.transport.weights.memory import Memory
from relax_rt.transport.weights.stage import WeightStage

TIMEOUT_S = 240.0
"""Long: the first ranks wait for torch to be imported, however busy the machine is."""
BOTH = ["rollout/0", "rollout/1"]


class Context:
    def __init__(self, folder: Path) -> None:
        table = PublicationTable(carrier="collective", communicator="gloo", broadcast_timeout_s=TIMEOUT_S)
        self.config = cast(Any, RLConfig).model_construct(publication=table)
        self.who, self.shm_dir, self.log = Incarnation("trainer/0", 1), folder, structlog.get_logger()
        self.events: list[tuple[str, dict[str, Any]]] = []

    def event(self, kind: str, /, **fields: Any) -> None:
        self.events.append((kind, fields))


class World:
    """A stage, the trainer's broadcasts and two engines."""

    def __init__(self, folder: Path) -> None:
        self.ctx = Context(folder)
        ctx = cast(RoleContext, self.ctx)
        self.stage = WeightStage(stage_folder(ctx), 1)
        self.engines = {slot: BroadcastReceiver(offers_folder(ctx), slot, 1, HostReceiveBuffer) for slot in BOTH}
        broadcaster = WeightBroadcaster.of(ctx, self.ctx.config.publication, communicator_of(self.ctx.config))
        assert broadcaster is not None
        self.broadcaster = broadcaster
        self.version = 0
        self.data = bytearray()

    def register(self) -> None:
        for engine in self.engines.values():
            engine.register(LAYOUT.nbytes)

    async def ranks_there(self) -> None:
        """Until every engine's rank can be broadcast to: they are started when a version comes."""
        await self.commit()
        group = self.broadcaster._group
        assert group is not None
        async with asyncio.timeout(TIMEOUT_S):
            while not group.present >= {"trainer", *BOTH}:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        if self.broadcaster.current is not None:
            await self.broadcaster.current

    async def commit(self) -> tuple[VersionRecord, Manifest]:
        """Stage a version and have it broadcast, as the publisher does."""
        self.version += 1
        self.data = fill(LAYOUT, self.version)
        with self.stage.writing(LAYOUT, self.version - 1) as (file, view):
            view[:] = self.data
            manifest = self.stage.seal(self.version, LAYOUT, file, view)
        await self.broadcaster.reserve(manifest)
        self.broadcaster.start()
        return VersionRecord(self.version, self.version - 1, self.version, manifest.digest), manifest

    async def who_has(self, record: VersionRecord, manifest: Manifest) -> list[str]:
        """Engines to which the version was brought, each with every byte of it."""
        found = []
        for slot, engine in self.engines.items():
            if await asyncio.to_thread(engine.wait, record):
                into = bytearray(LAYOUT.nbytes)
                BroadcastSource(record, manifest, engine).copy_into(memoryview(into))
                assert into == self.data
                found.append(slot)
        return found

    async def told(self) -> dict[str, Any]:
        """The event of the last broadcast."""
        assert self.broadcaster.current is not None
        await self.broadcaster.current
        return self.ctx.events[-1][1]


@asynccontextmanager
async def world_of(folder: Path) -> AsyncIterator[World]:
    world = World(folder)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while world.broadcaster._opening is not None and not world.broadcaster._opening.done():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield world
    finally:
        await world.broadcaster.close()
        world.stage.close()


async def test_versions_reach_both_engines_over_gloo_and_a_rank_that_dies_costs_nobody_else(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    async with world_of(tmp_path) as world:
        assert await world.who_has(*await world.commit()) == []
        assert not world.ctx.events, "nobody was there"
        world.register()
        await world.ranks_there()
        assert not world.ctx.events, "a version waits for no rank's start"
        assert await world.who_has(*await world.commit()) == BOTH
        told = await world.told()
        assert (told["engines"], told["lost"], told["communicator"]) == (BOTH, {}, "gloo")
        assert world.broadcaster._group is not None
        os.kill(world.broadcaster._group.ranks.pids["rollout/1"], signal.SIGSTOP)
        world.broadcaster._group.machine.limits = BroadcastLimits(hello_s=120.0, join_s=60.0, stall_s=3.0, abort_s=5.0)
        assert await world.who_has(*await world.commit()) == ["rollout/0"]
        told = await world.told()
        assert (told["engines"], list(told["lost"])) == (["rollout/0"], ["rollout/1"])
        assert await world.who_has(*await world.commit()) == ["rollout/0"], "its rank is started anew"
        await world.told()
        await world.ranks_there()
        assert await world.who_has(*await world.commit()) == BOTH
        ranks = world.broadcaster._group.ranks
    assert not ranks.living


class Played:
    """A collective whose broadcasts end as a test says."""

    def __init__(self, end: Callable[[], Any]) -> None:
        self._end = end
        self.gate = asyncio.Event()
        self.entered = False
        self.present = frozenset({"trainer", *BOTH})
        self.among = BOTH
        self.given_up: dict[str, str] = {}

    def __call__(self, *_: object, **__: object) -> Played:
        return self

    async def __aenter__(self) -> Played:
        self.entered = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.entered = False

    def prestart(self, *names: str) -> None:
        pass

    def admit(self, rank: object) -> None:
        pass

    async def broadcast(self, memories: Mapping[str, Memory], digest: str, timeout_s: float) -> BroadcastOutcome:
        assert list(memories) == ["trainer", *self.among]
        await self.gate.wait()
        outcome = self._end()
        if isinstance(outcome, BaseException):
            raise outcome
        return cast(BroadcastOutcome, outcome)


def unfinished(outcome: BroadcastOutcome | None) -> BroadcastFailed:
    error = BroadcastFailed("broadcast", why="its root is lost")
    error.outcome = outcome
    return error


async def test_how_a_broadcast_ends_is_known_to_each_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = (LostRank("rollout/1", "died", "struck"),)
    ends: list[Any] = [
        BroadcastOutcome(1, ("rollout/0",), lost),
        unfinished(BroadcastOutcome(2, ("rollout/0",), lost, "late")),
        Refused("a broadcast", why="struck"),
        unfinished(None),
    ]
    played = Played(lambda: ends.pop(0))
    played.gate.set()
    monkeypatch.setattr(groups, "BroadcastGroup", played)
    async with world_of(tmp_path) as world:
        world.register()
        for whole in (["rollout/0"], ["rollout/0"], [], []):
            record, _ = await world.commit()
            told = await world.told()
            assert told["engines"] == whole
            assert [slot for slot in BOTH if world.engines[slot].wait(record)] == whole
        assert "its root is lost" in told["why"]
        await world.commit()
        assert world.ctx.events[-1][1] is told, "memory that somebody may still write into is used no more"
    assert not played.entered


async def test_a_broadcast_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(lambda: BroadcastOutcome(1, tuple(BOTH), ()))
    monkeypatch.setattr(groups, "BroadcastGroup", played)
    async with world_of(tmp_path) as world:
        world.register()
        first, _ = await world.commit()
        second, _ = await world.commit()
        assert not world.engines["rollout/0"].wait(second), "the one before is still under way"
        played.gate.set()
        await world.told()
        assert world.engines["rollout/0"].wait(first)
        played.gate.clear()
        third, _ = await world.commit()
        await world.broadcaster.retire(third.version)
        assert [path.name for path in offers_folder(cast(RoleContext, world.ctx)).glob("*.broadcast")] == [
            "b00000003.broadcast"
        ]
        await world.broadcaster.close()
        assert not world.engines["rollout/0"].wait(third), "the trainer has ended, and said so"


async def test_a_version_that_is_not_committed_is_waited_for_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "BroadcastGroup", Played(lambda: None))
    async with world_of(tmp_path) as world:
        world.register()
        with world.stage.writing(LAYOUT, 0) as (file, view):
            view[:] = fill(LAYOUT)
            manifest = world.stage.seal(1, LAYOUT, file, view)
        await world.broadcaster.reserve(manifest)
        await world.broadcaster.close()
        assert not world.engines["rollout/0"].wait(VersionRecord(1, 0, 1, manifest.digest))


async def test_an_engine_whose_rank_is_not_there_waits_for_no_broadcast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(lambda: BroadcastOutcome(1, ("rollout/0",), ()))
    played.gate.set()
    monkeypatch.setattr(groups, "BroadcastGroup", played)
    async with world_of(tmp_path) as world:
        world.register()
        played.present = frozenset({"trainer"})
        record, _ = await world.commit()
        assert not any(engine.wait(record) for engine in world.engines.values()), "nor is a file there to look at"
        played.present, played.among = frozenset({"trainer", "rollout/0"}), ["rollout/0"]
        record, _ = await world.commit()
        assert (await world.told())["engines"] == ["rollout/0"]
        assert [world.engines[slot].wait(record) for slot in BOTH] == [True, False]
        played.present = frozenset(BOTH)
        record, _ = await world.commit()
        assert not any(engine.wait(record) for engine in world.engines.values()), "without a root nobody sends"


async def test_a_library_that_cannot_be_used_is_told_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: str) -> None:
        raise Refused(f"a store for ranks at {address}", why="struck")

    monkeypatch.setattr(groups, "_serve_store", refuse)
    async with world_of(tmp_path) as world:
        world.register()
        assert await world.who_has(*await world.commit()) == []
        assert [kind for kind, _ in world.ctx.events] == ["broadcast_disabled"]


async def test_a_communicator_that_does_not_load_ends_the_broadcasts_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes of the ranks live long enough to say so, each time one is started ahead of a version."""
    monkeypatch.setattr(groups, "GLOO", "relax_rt.transport.weights.broadcast.backends:NotThere")
    async with world_of(tmp_path) as world:
        world.register()
        async with asyncio.timeout(TIMEOUT_S):
            while "broadcast_disabled" not in dict(world.ctx.events):
                assert await world.who_has(*await world.commit()) == []
        assert all("NotThere" in told["why"] for _, told in world.ctx.events), "of engines' ranks perhaps before"
        said = len(world.ctx.events)
        assert await world.who_has(*await world.commit()) == [] and len(world.ctx.events) == said


async def test_an_engine_whose_rank_never_comes_up_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(lambda: BroadcastOutcome(1, ("rollout/0",), ()))
    played.gate.set()
    played.present, played.among = frozenset({"trainer", "rollout/0"}), ["rollout/0"]
    played.given_up = {"rollout/1": "its library is another"}
    monkeypatch.setattr(groups, "BroadcastGroup", played)
    async with world_of(tmp_path) as world:
        world.register()
        for _ in range(2):
            await world.commit()
            assert (await world.told())["engines"] == ["rollout/0"]
        assert [told for kind, told in world.ctx.events if kind == "broadcast_rank_removed"] == [
            {"communicator": "gloo", "engine": "rollout/1", "why": "its library is another"}
        ]


async def test_there_are_none_unless_they_are_asked_for(tmp_path: Path) -> None:
    assert WeightBroadcaster.of(cast(RoleContext, Context(tmp_path)), PublicationTable(), "gloo") is None
