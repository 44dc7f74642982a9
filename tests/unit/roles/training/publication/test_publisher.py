"""The trainer's side of a publication: in the background, in order, and held up by no engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import structlog

from relax_rt.interfaces.registry import Changes, Member
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.training.backend.interface import TrainerBackend
from relax_rt.roles.training.publication import publisher as module
from relax_rt.roles.training.publication.publisher import Publisher
from relax_rt.roles.training.publication.settings import PublicationTable
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import DeadlineExceeded, Gone, OutOfSpace, Refused, StaleEpoch, Unreachable
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.weights.manifest import Layout, Manifest, layout_of
from relax_rt.transport.weights.source import DeltaSource, StageSource, stage_source
from relax_rt.transport.weights.stage import MAX_BUFFERS, WeightStage, read_manifest

LAYOUT = layout_of([("w", "bfloat16", (4000,), 8000)])
SOON_S = 120


class Registry:
    """Commits what it is given, and says what a test sets."""

    def __init__(self) -> None:
        self.committed: list[VersionRecord] = []
        self.failures: list[Exception] = []
        self.members: list[Member] = []
        self.changed = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()

    def say(self, *members: Member) -> None:
        self.members = list(members)
        self.changed.set()

    async def watch(self, since: int, wait_s: float) -> Changes:
        await self.changed.wait()
        self.changed.clear()
        return Changes(since + 1, True, self.members)

    async def commit_version(self, record: VersionRecord) -> VersionRecord:
        await self.open.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.committed.append(record)
        return record


class Progress:
    def __init__(self) -> None:
        self.waits: list[str] = []

    def waiting(self, reason: str) -> None:
        self.waits.append(reason)


class Context:
    def __init__(self) -> None:
        self.who = Incarnation("trainer/0", 1)
        self.registry, self.progress = Registry(), Progress()
        self.log = structlog.get_logger()
        self.ready_at: list[int] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.records: list[dict[str, Any]] = []

    async def ready(self, version: int) -> None:
        self.ready_at.append(version)

    def event(self, kind: str, /, **fields: Any) -> None:
        self.events.append((kind, fields))

    def metrics(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


class Backend:
    """Weights that are all of one value, and a copy that takes as long as a test likes."""

    def __init__(self) -> None:
        self.value = 1
        self.copying = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def layout(self, dtype: str) -> Layout:
        return LAYOUT

    def export(self, into: memoryview, dtype: str, copied: Callable[[], None] = lambda: None) -> None:
        self.copying.set()
        assert self.go_on.wait(SOON_S)
        into[:] = b"\x01" * LAYOUT.nbytes
        into[0] = self.value


class World:
    def __init__(self, folder: Path, backend: Backend | None = None, **table: Any) -> None:
        self.folder, self.ctx, self.backend = folder, Context(), backend or Backend()
        self.stage = WeightStage(folder, 1)
        self.publisher = Publisher(
            cast(RoleContext, self.ctx),
            self.stage,
            cast(TrainerBackend, self.backend),
            dtype="bfloat16",
            table=PublicationTable(**table),
            engines=["rollout"],
            committed=0,
        )

    async def publish(self, version: int) -> None:
        self.backend.value = version
        await self.publisher.publish(VersionRecord(version, version - 1, version))

    def source(self, version: int) -> StageSource:
        return StageSource(self.folder, self.ctx.registry.committed[version - 1])


@asynccontextmanager
async def world_of(folder: Path, backend: Backend | None = None, **table: Any) -> AsyncIterator[World]:
    world = World(folder, backend, **table)
    try:
        yield world
    finally:
        world.backend.go_on.set()
        await world.publisher.close()
        world.stage.close()


async def soon(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110 what is waited for sets no event
            await asyncio.sleep(0.01)


def engine(number: int, version: int) -> Member:
    return Member(Incarnation(f"rollout/{number}", 10 + number), policy_version=version, state="ready")


async def test_the_trainer_goes_on_while_its_weights_are_copied_and_committed(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        world.backend.go_on.clear()
        world.ctx.registry.open.clear()
        await asyncio.wait_for(world.publish(1), SOON_S)  # returned: the next step begins
        changed = asyncio.create_task(asyncio.to_thread(world.publisher.wait_copied))
        assert await asyncio.to_thread(world.backend.copying.wait, SOON_S)
        await asyncio.sleep(0.05)
        assert not changed.done(), "the optimizer may not touch weights that are being copied"
        world.backend.go_on.set()
        await asyncio.wait_for(changed, SOON_S)
        world.backend.value = 99  # it has: what is published is the version all the same
        assert world.ctx.registry.committed == []
        world.ctx.registry.open.set()
        await asyncio.wait_for(world.publisher.wait_committed(), SOON_S)
        into = bytearray(LAYOUT.nbytes)
        world.source(1).copy_into(memoryview(into))
        assert into[0] == 1
        assert world.ctx.ready_at == [1]


class Sharded(Backend):
    """A gang's: this rank's copy is made at once, the parts of the others come as late as a test likes."""

    fails = False

    def export(self, into: memoryview, dtype: str, copied: Callable[[], None] = lambda: None) -> None:
        value = self.value
        copied()
        into[:] = b"\x01" * LAYOUT.nbytes
        into[0] = value
        self.copying.set()
        assert self.go_on.wait(SOON_S)
        if self.fails:
            raise Unreachable("the weights of the gang: bucket 2 of 3 from rank 1", why="Connection closed by peer")


async def test_the_optimizer_waits_for_copies_and_not_until_they_are_gathered(tmp_path: Path) -> None:
    async with world_of(tmp_path, Sharded()) as world:
        world.backend.go_on.clear()
        await world.publish(1)
        held = await asyncio.wait_for(asyncio.to_thread(world.publisher.wait_copied), SOON_S)
        world.backend.value = 99
        assert held < SOON_S / 2 and world.ctx.registry.committed == []
        assert await asyncio.to_thread(world.backend.copying.wait, SOON_S)
        # The publication after it would wait, and it is seen what for.
        waiting = asyncio.create_task(world.publisher.wait_committed())
        await soon(lambda: any("version 1 is brought to the stage" in wait for wait in world.ctx.progress.waits))
        assert not waiting.done()
        world.backend.go_on.set()
        await asyncio.wait_for(waiting, SOON_S)
        into = bytearray(LAYOUT.nbytes)
        world.source(1).copy_into(memoryview(into))
        assert into[0] == 1
        (facts,) = [told for kind, told in world.ctx.events if kind == "published"]
        assert facts["export_s"] < facts["stage_s"]


async def test_what_was_not_gathered_whole_is_never_committed(tmp_path: Path) -> None:
    async with world_of(tmp_path, Sharded()) as world:
        await world.publish(1)
        await asyncio.wait_for(world.publisher.wait_committed(), SOON_S)
        cast(Sharded, world.backend).fails = True
        await world.publish(2)
        assert world.publisher.current is not None
        await asyncio.wait([world.publisher.current], timeout=SOON_S)
        await asyncio.to_thread(world.publisher.wait_copied)
        with pytest.raises(Unreachable, match="bucket 2 of 3 from rank 1"):
            world.publisher.check()
        assert [record.version for record in world.ctx.registry.committed] == [1]
        with pytest.raises(Gone):
            read_manifest(tmp_path, 2)


async def test_one_publication_at_a_time_and_the_wait_is_seen(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        world.ctx.registry.open.clear()
        await world.publish(1)
        second = asyncio.create_task(world.publish(2))
        await soon(lambda: any("to be committed" in wait for wait in world.ctx.progress.waits))
        assert not second.done()
        world.ctx.registry.open.set()
        await asyncio.wait_for(second, SOON_S)
        await world.publisher.wait_committed()
        assert [r.version for r in world.ctx.registry.committed] == [1, 2]
        assert world.ctx.progress.waits[-1] == ""


async def test_a_registry_that_is_away_is_waited_out(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        world.ctx.registry.failures = [Unreachable("registry/0"), Unreachable("registry/0")]
        await world.publish(1)
        await asyncio.wait_for(world.publisher.wait_committed(), SOON_S)
        assert [r.version for r in world.ctx.registry.committed] == [1]


@pytest.mark.parametrize("error", [StaleEpoch("trainer/0#1 is fenced"), Refused("commit of policy version 1")])
async def test_what_goes_wrong_in_the_background_is_raised_by_the_next_call(tmp_path: Path, error: Exception) -> None:
    async with world_of(tmp_path) as world:
        world.ctx.registry.failures = [error]
        await world.publish(1)
        assert world.publisher.current is not None
        await asyncio.wait([world.publisher.current])
        with pytest.raises(type(error)):
            world.publisher.check()
        with pytest.raises(type(error)):
            await world.publish(2)
        await asyncio.to_thread(world.publisher.wait_copied)  # nobody hangs for it


async def test_readers_that_do_not_let_go_hold_the_trainer_no_longer_than_its_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Less than the patience: what the stage may take beyond it does not begin before it ends.
    monkeypatch.setattr(module, "STAGE_WAIT_S", 0.1)
    async with world_of(tmp_path, ack_timeout_s=0.5) as world:
        world.ctx.registry.say(engine(0, 0), engine(1, 0))
        kept = []
        for version in range(1, MAX_BUFFERS + 1):
            await world.publish(version)
            await world.publisher.wait_committed()
            with world.source(version).mapped() as view:
                kept.append(np.frombuffer(view, np.uint8))
        world.ctx.registry.say(engine(0, MAX_BUFFERS), engine(1, 1))
        await asyncio.sleep(0.05)
        began = asyncio.get_running_loop().time()
        await world.publish(MAX_BUFFERS + 1)
        await asyncio.wait_for(world.publisher.wait_committed(), SOON_S)
        waited = asyncio.get_running_loop().time() - began
        assert waited > 0.2, "the engine that is behind has its time"
        (evicted,) = [told for kind, told in world.ctx.events if kind == "weights_evicted"]
        assert (evicted["version"], evicted["buffer"]) == (MAX_BUFFERS + 1, "w0.buf")
        assert [int(weights[0]) for weights in kept] == list(range(1, MAX_BUFFERS + 1))
        del view


async def test_a_stage_without_room_ends_the_trainer_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STAGE_WAIT_S", 0.2)
    async with world_of(tmp_path) as world:

        def full(*_: Any, **__: Any) -> Any:
            raise OutOfSpace("1 MiB for weights", why="No space left on device", hint="enlarge /dev/shm")

        monkeypatch.setattr(world.stage, "writing", full)
        await world.publish(1)
        with pytest.raises(OutOfSpace, match="enlarge /dev/shm"):
            await asyncio.wait_for(world.publisher.wait_committed(), SOON_S)
        assert "weights_evicted" not in world.ctx.kinds(), "nobody held anything"


async def test_a_stage_that_is_full_once_the_copy_is_made_is_never_filled_with_later_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STAGE_WAIT_S", 0.5)
    async with world_of(tmp_path) as world:
        seal, left = world.stage.seal, [2]

        def full(*args: Any) -> Any:
            world.backend.value = 99  # the optimizer goes on
            if left[0]:
                left[0] -= 1
                raise OutOfSpace("the manifest of policy version 1", why="No space left on device")
            return seal(*args)

        monkeypatch.setattr(world.stage, "seal", full)
        await world.publish(1)
        await asyncio.wait_for(world.publisher.wait_committed(), SOON_S)
        into = bytearray(LAYOUT.nbytes)
        world.source(1).copy_into(memoryview(into))
        assert into[0] == 1
        left[0] = 1000
        await world.publish(2)
        with pytest.raises(OutOfSpace, match="manifest"):
            await asyncio.wait_for(world.publisher.wait_committed(), SOON_S)


async def test_what_holds_an_optimizer_step_is_seen_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    async with world_of(tmp_path) as world:
        writing, since = world.stage.writing, time.monotonic()

        def pinned(*args: Any, **options: Any) -> Any:
            if time.monotonic() - since < 0.5:
                raise OutOfSpace("a buffer for weights", why="all 4 are pinned by readers")
            return writing(*args, **options)

        monkeypatch.setattr(world.stage, "writing", pinned)
        await world.publish(1)
        stage_wait_s = await asyncio.to_thread(world.publisher.wait_copied)
        assert 0.3 < stage_wait_s < SOON_S
        assert any("all 4 are pinned by readers" in wait for wait in world.ctx.progress.waits)
        await world.publisher.wait_committed()
        assert world.publisher.wait_copied() == 0.0
        assert world.ctx.progress.waits[-1] == ""


@pytest.mark.parametrize("asked", ["check", "wait_committed"])
async def test_no_publication_is_under_way_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    for name in ("STAGE_WAIT_S", "COPY_S", "REGISTRY_WAIT_S", "RETRY_S"):
        monkeypatch.setattr(module, name, 0.05)
    async with world_of(tmp_path, Sharded(), ack_timeout_s=0.1, directory_timeout_s=0.1) as world:
        world.backend.go_on.clear()
        await world.publish(1)
        world.publisher.check()
        await soon(lambda: time.monotonic() - world.publisher._started_at > world.publisher._limit_s)
        with pytest.raises(DeadlineExceeded, match=r"not through within .* version 1 is brought to the stage"):
            await world.publisher.wait_committed() if asked == "wait_committed" else world.publisher.check()


class HungFolder:
    """A disk that does not answer, before the commit or after it."""

    def __init__(self, at: str) -> None:
        self.at, self.asked, self.free = at, asyncio.Event(), asyncio.Event()

    async def write_before_commit(self, record: VersionRecord) -> None:
        await self._hang("before")

    async def write_after_commit(self, record: VersionRecord) -> None:
        await self._hang("after")

    async def _hang(self, at: str) -> None:
        if at == self.at:
            self.asked.set()
            await self.free.wait()

    async def close(self) -> None:
        self.free.set()


@pytest.mark.parametrize(("at", "told"), [("before", "put into the folder"), ("after", "removed from the folder")])
async def test_what_is_overdue_names_what_it_waits_for(tmp_path: Path, at: str, told: str) -> None:
    async with world_of(tmp_path) as world:
        folder = HungFolder(at)
        world.publisher._files = cast(Any, folder)
        await world.publish(1)
        await asyncio.wait_for(folder.asked.wait(), SOON_S)
        assert not world.publisher.overdue
        world.publisher._started_at -= world.publisher._limit_s
        with pytest.raises(DeadlineExceeded, match=told):
            world.publisher.check()
        assert bool(world.ctx.registry.committed) is (at == "after")


async def test_an_optimizer_step_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STAGE_WAIT_S", "COPY_S", "RETRY_S"):
        monkeypatch.setattr(module, name, 0.05)
    async with world_of(tmp_path, ack_timeout_s=0.3) as world:
        world.backend.go_on.clear()
        await world.publish(1)
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"not copied within 0\.4 s"):
            await asyncio.to_thread(world.publisher.wait_copied)
        assert time.monotonic() - began >= 0.4, "room may be waited for as long as engines have time, and then some"


async def test_late_and_lost_engines_are_told_and_the_publication_settles(tmp_path: Path) -> None:
    async with world_of(tmp_path, ack_timeout_s=0.3) as world:
        world.ctx.registry.say(engine(0, 1), engine(1, 1), engine(2, 1))
        await asyncio.sleep(0.05)
        await world.publish(2)
        await world.publisher.wait_committed()
        gone = Member(Incarnation("rollout/2", 12), policy_version=1, state="gone", detail="SIGKILL")
        world.ctx.registry.say(engine(0, 2), engine(1, 1), gone)
        await soon(lambda: "engine_lost" in world.ctx.kinds())
        await asyncio.sleep(0.4)
        world.ctx.registry.say(engine(0, 2), engine(1, 1))
        await soon(lambda: bool(world.ctx.records))
        events = dict(world.ctx.events)
        assert events["engine_late"]["engine"] == "rollout/1#11"
        assert events["engine_late"]["has"] == 1
        assert events["engine_lost"]["why"] == "gone: SIGKILL"
        record = world.ctx.records[-1]
        assert (record["version"], record["engines"], record["late"]) == (2, 1, 1)
        assert record["bytes"] == LAYOUT.nbytes


async def test_a_delta_is_made_to_the_version_before_whoever_is_behind(tmp_path: Path) -> None:
    async with world_of(tmp_path, delta=True) as world:
        world.ctx.registry.say(engine(0, 0))
        await world.publish(1)
        await world.publisher.wait_committed()
        assert dict(world.ctx.events)["published"]["delta_bytes"] == 0, "there is no base yet"
        world.ctx.registry.say(engine(0, 1), engine(1, 1), engine(2, 0))
        await asyncio.sleep(0.05)
        await world.publish(2)
        await world.publisher.wait_committed()
        # One has version 2, one is behind, and one has had none yet.
        world.ctx.registry.say(engine(0, 2), engine(1, 1), engine(2, 0))
        await asyncio.sleep(0.05)
        await world.publish(3)
        await world.publisher.wait_committed()
        one, two, three = world.ctx.registry.committed
        source = stage_source(tmp_path, three, two)
        assert isinstance(source, DeltaSource)
        into = bytearray(b"\x01" * LAYOUT.nbytes)
        into[0] = 2
        source.copy_into(memoryview(into))
        assert into[0] == 3
        published = [fields for kind, fields in world.ctx.events if kind == "published"][-1]
        assert 0 < published["delta_bytes"] * 10 < published["bytes"]
        for holds, kind, has in ((one, DeltaSource, b"\x01"), (None, StageSource, b"\0")):
            behind = stage_source(tmp_path, three, holds)
            assert isinstance(behind, kind)
            into = bytearray(has * LAYOUT.nbytes)
            behind.copy_into(memoryview(into))
            assert into[0] == 3


async def test_closing_in_the_middle_waits_for_the_copy(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend.go_on.clear()
    await world.publish(1)
    assert await asyncio.to_thread(world.backend.copying.wait, SOON_S)
    closing = asyncio.create_task(world.publisher.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    world.backend.go_on.set()
    await asyncio.wait_for(closing, SOON_S)
    world.stage.close()
    assert world.ctx.registry.committed == []


class Spread:
    """Hears of what is to be broadcast."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.current = None

    async def reserve(self, manifest: Manifest) -> None:
        self.heard.append(f"before {manifest.version}")

    def start(self) -> None:
        self.heard.append("begin")

    async def retire(self, committed: int) -> None:
        self.heard.append(f"retire {committed}")

    async def close(self) -> None:
        self.heard.append("close")


async def test_a_broadcast_is_prepared_before_the_commit_and_begins_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread = Spread()
    monkeypatch.setattr(module.WeightBroadcaster, "of", lambda *_: spread)
    async with world_of(tmp_path) as world:
        world.ctx.registry.open.clear()
        await world.publish(1)
        await soon(lambda: spread.heard == ["before 1"])
        world.ctx.registry.open.set()
        await asyncio.wait_for(world.publisher.wait_committed(), SOON_S)
        assert spread.heard == ["before 1", "begin", "retire 1"]
        world.ctx.registry.failures = [Refused("commit of policy version 2")]
        await world.publish(2)
        with pytest.raises(Refused):
            await world.publisher.wait_committed()
        assert spread.heard[3:] == ["before 2"], "nobody is sent what was not committed"
    assert spread.heard[-1] == "close"


def staged_narrow(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("x*"))


async def test_a_version_is_what_arrives_where_fewer_bits_are_sent(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from relax_rt.transport.weights.payloads import decode_wire
    from relax_rt.transport.weights.stage import wire_file, wire_view

    layout = layout_of([("w", "bfloat16", (40, 100), 8000)])
    values = torch.linspace(-2, 3, 4000).to(torch.bfloat16)
    async with world_of(tmp_path, wire_dtype="float8") as world:
        world.backend.export = lambda into, *_: torch.frombuffer(into, dtype=torch.bfloat16).copy_(values)  # type: ignore[method-assign]
        world.backend.layout = lambda dtype: layout  # type: ignore[method-assign]
        for version in (1, 2):
            await world.publish(version)
            await asyncio.wait_for(world.publisher.wait_committed(), SOON_S)
        source = world.source(2)
        into = bytearray(layout.nbytes)
        source.copy_into(memoryview(into))
        arrived = torch.frombuffer(into, dtype=torch.bfloat16).float()
        assert 0 < float((arrived - values.float()).abs().max()) < 3 / 16
        with wire_view(tmp_path, source.manifest) as sent:
            assert len(sent) == source.manifest.wire_bytes < layout.nbytes * 0.6
            again = bytearray(layout.nbytes)
            decode_wire(memoryview(bytearray(sent)), layout, memoryview(again))
        assert again == into
        assert staged_narrow(tmp_path) == [wire_file(2)]
        published = [fields for kind, fields in world.ctx.events if kind == "published"]
        assert [fields["wire_bytes"] for fields in published] == [source.manifest.wire_bytes] * 2
