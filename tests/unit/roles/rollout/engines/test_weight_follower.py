"""An engine gets to a version whole or is removed, with every failure on the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import structlog

from relax_rt.interfaces.registry import Changes
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.locations import stage_folder
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.rollout.engines.base import Engine, EngineLoad, KvPolicy, Swap
from relax_rt.roles.rollout.engines.weight_follower import EngineRemoved, WeightFollower
from relax_rt.roles.training.publication.settings import PublicationTable
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt, Refused, Unreachable
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.weights.manifest import Layout, bucket_digest, bucket_slices, layout_of, total_digest
from relax_rt.transport.weights.source import WeightSource
from relax_rt.transport.weights.stage import WeightStage

LAYOUT = layout_of([("a", "float32", (64,), 256), ("b", "bfloat16", (100, 4), 800)])
TIMEOUT_S = 3.0


class Registry:
    committed: VersionRecord | None = None

    async def watch(self, since: int, wait_s: float) -> Changes:
        return Changes(1, True, [], self.committed)


class Context:
    """What the follower needs of a role's context."""

    def __init__(self, folder: Path, timeout_s: float = TIMEOUT_S) -> None:
        table = PublicationTable(ack_timeout_s=timeout_s)
        self.config = cast(Any, RLConfig).model_construct(publication=table)
        self.who = Incarnation("rollout/0", 7)
        self.shm_dir = folder
        self.registry = Registry()
        self.log = structlog.get_logger()
        self.ready_at: list[int] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    async def ready(self, version: int) -> None:
        self.ready_at.append(version)

    def event(self, kind: str, /, **fields: Any) -> None:
        self.events.append((kind, fields))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


async def test_a_cancellation_that_comes_with_the_result_is_delivered(tmp_path: Path) -> None:
    follower = WeightFollower(cast(RoleContext, Context(tmp_path)), cast(Engine, None), source=cast(Any, None))
    follower._machine.follow(VersionRecord(1, 0, 1), time.monotonic())
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        await gate

    attempt = asyncio.create_task(follower._attempt(work()))
    await asyncio.sleep(0)
    gate.set_result(None)
    await asyncio.sleep(0)
    told = attempt.cancel()
    await asyncio.wait([attempt])
    assert attempt.cancelled() == told


class MemoryEngine:
    """Two buffers and a version. `what` it samples from is `active`; checks itself after a swap, as engines must."""

    name = "memory"

    def __init__(self) -> None:
        self.active, self.standby = bytearray(LAYOUT.nbytes), bytearray(LAYOUT.nbytes)
        self.version, self.prepared = 0, 0
        self.payloads: list[str] = []

    async def prepare(self, source: WeightSource) -> None:
        if source.manifest.layout.entries != LAYOUT.entries:
            raise Refused("published weights do not fit this engine")
        self.payloads.append(source.manifest.payload)
        if source.manifest.payload == "delta":
            self.standby[:] = self.active
        await asyncio.to_thread(source.copy_into, memoryview(self.standby))
        self.prepared = source.record.version

    async def commit(self, record: VersionRecord, kv: KvPolicy) -> Swap:
        self.active, self.standby = self.standby, self.active
        self.version = record.version
        view = memoryview(self.active)
        found = total_digest(bucket_digest(view[part]) for part in bucket_slices(LAYOUT.nbytes))
        if found != record.digest:
            raise Corrupt(f"policy version {record.version} in the engine", why=f"digest {found}")
        return Swap(record.version, 0.0, 0)

    def load(self) -> EngineLoad:
        return EngineLoad(self.version, 0, 0, 0, 0, 0, 0.0, "")


class World:
    """A stage with versions on it, an engine and its follower."""

    def __init__(self, folder: Path, engine: MemoryEngine | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.ctx = Context(folder, timeout_s)
        self.engine = engine or MemoryEngine()
        self.folder = stage_folder(cast(RoleContext, self.ctx))
        self.stage = WeightStage(self.folder, 1)
        self.follower = WeightFollower(cast(RoleContext, self.ctx), cast(Engine, self.engine))
        self.newest = VersionRecord(0, 0, 0)

    def commit(self, layout: Layout = LAYOUT, *, delta: bool = False) -> VersionRecord:
        version = self.newest.version + 1
        with self.stage.writing(layout, version - 1) as (file, view):
            view[:] = b"\x07" * layout.nbytes
            view[:4] = version.to_bytes(4, "little")
            manifest = self.stage.seal(version, layout, file, view)
            if delta:
                assert self.stage.seal_delta(manifest, view, version - 1).deltas
        self.newest = VersionRecord(version, version - 1, version, manifest.digest)
        self.ctx.registry.committed = self.newest
        return self.newest

    def has(self) -> int:
        return int.from_bytes(self.engine.active[:4], "little")

    async def out(self, record: VersionRecord, match: str) -> None:
        """Following this ends the engine, says why, and nothing is acknowledged."""
        told = list(self.ctx.ready_at)
        with pytest.raises(EngineRemoved, match=match):
            await asyncio.wait_for(self.follower.follow(record), 5 * TIMEOUT_S)
        assert self.ctx.ready_at == told
        assert self.ctx.kinds()[-1] == "engine_removed"
        with pytest.raises(EngineRemoved, match="out already"):
            await self.follower.follow(record)


async def test_one_version_after_the_other_is_acknowledged(tmp_path: Path) -> None:
    world = World(tmp_path)
    for version in (1, 2, 3):
        assert await world.follower.follow(world.commit())
        assert world.has() == version
        assert world.follower.record == world.newest
    assert world.ctx.ready_at == [1, 2, 3]
    assert world.ctx.kinds() == ["weights_swapped"] * 3


async def test_a_delta_is_used_if_its_base_is_here(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.follower.follow(world.commit())
    await world.follower.follow(world.commit(delta=True))
    world.commit(delta=True)
    await world.follower.follow(world.commit(delta=True))  # of version 3, which this engine never had, and of 2
    world.commit()
    await world.follower.follow(world.commit(delta=True))  # of version 5 alone
    assert world.engine.payloads == ["full", "delta", "delta", "full"]
    assert world.has() == 6


async def test_a_damaged_delta_is_replaced_by_the_full_version(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.follower.follow(world.commit())
    record = world.commit(delta=True)
    (path,) = world.folder.glob("d00000002-*.bin")
    path.write_bytes(path.read_bytes()[:-1] + b"\xaa")
    assert await world.follower.follow(record)
    assert world.engine.payloads == ["full", "delta", "full"]
    assert world.has() == 2


async def test_an_engine_that_refuses_the_base_gets_the_full_version(tmp_path: Path) -> None:
    class Elsewhere(MemoryEngine):
        async def prepare(self, source: WeightSource) -> None:
            if source.manifest.payload == "delta":
                raise Refused("it applies to version 1, here is 9")
            await super().prepare(source)

    world = World(tmp_path, Elsewhere())
    await world.follower.follow(world.commit())
    assert await world.follower.follow(world.commit(delta=True))
    assert world.engine.payloads == ["full", "full"]


async def test_an_engine_that_falsely_reports_a_load_is_removed(tmp_path: Path) -> None:
    class Liar(MemoryEngine):
        async def commit(self, record: VersionRecord, kv: KvPolicy) -> Swap:
            return Swap(record.version, 0.0, 0) if record.version > 1 else await super().commit(record, kv)

    world = World(tmp_path, Liar())
    await world.follower.follow(world.commit())
    await world.out(world.commit(), "samples from version 1")
    assert world.ctx.ready_at == [1]


async def test_an_engine_with_other_weights_after_the_swap_is_removed(tmp_path: Path) -> None:
    class Forgetful(MemoryEngine):
        async def prepare(self, source: WeightSource) -> None:
            await super().prepare(source)
            self.standby[17] ^= 1

    world = World(tmp_path, Forgetful())
    await world.out(world.commit(), "the swap failed: policy version 1 in the engine")
    assert world.ctx.ready_at == []


async def test_corrupt_bytes_are_fetched_again_until_the_deadline(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.follower.follow(world.commit())
    record = world.commit()
    path = world.folder / "w1.buf"
    good = path.read_bytes()
    path.write_bytes(b"\xee" + good[1:])
    following = asyncio.create_task(world.follower.follow(record))
    await asyncio.sleep(0.3)
    assert world.has() == 1, "generation goes on with the version before"
    path.write_bytes(good)
    assert await following
    assert world.has() == 2
    record = world.commit()
    (world.folder / "w0.buf").write_bytes(b"\xee" * LAYOUT.nbytes)
    await world.out(record, "does not match the digest taken at stage")
    assert world.has() == 2


async def test_other_content_than_committed_is_never_loaded(tmp_path: Path) -> None:
    world = World(tmp_path)
    record = msgspec.structs.replace(world.commit(), digest="0" * 32)
    await world.out(record, "committed with digest 0000")
    assert world.engine.payloads == []


@pytest.mark.parametrize(
    "tensors",
    [
        [("a", "float32", (64,), 256)],
        [("a", "float32", (64,), 256), ("c", "bfloat16", (100, 4), 800)],
        [("a", "float32", (64,), 256), ("b", "bfloat16", (4, 100), 800)],
        [("a", "float32", (64,), 256), ("b", "float16", (100, 4), 800)],
    ],
    ids=["missing", "renamed", "shape", "dtype"],
)
async def test_weights_of_another_model_end_the_engine_at_once(tmp_path: Path, tensors: list[Any]) -> None:
    world = World(tmp_path, timeout_s=60.0)
    await world.out(world.commit(layout_of(tensors)), "do not fit this engine")
    assert world.has() == 0


async def test_a_retired_version_is_skipped_for_the_newer_one(tmp_path: Path) -> None:
    world = World(tmp_path)
    first = world.commit()
    second = world.commit()
    world.stage.retire(2)
    assert not await world.follower.follow(first)
    assert world.ctx.ready_at == []
    assert await world.follower.follow(second)


async def test_a_missing_version_is_awaited_until_the_deadline(tmp_path: Path) -> None:
    world = World(tmp_path)
    record = world.commit()
    world.stage.retire(5)
    await world.out(record, "not on the stage")


async def test_the_version_store_may_be_away_for_a_while(tmp_path: Path) -> None:
    class Far(MemoryEngine):
        away = 2

        async def prepare(self, source: WeightSource) -> None:
            self.away -= 1
            if self.away >= 0:
                raise Unreachable("the stage of the head")
            await super().prepare(source)

    world = World(tmp_path, Far(), timeout_s=60.0)
    assert await world.follower.follow(world.commit())
    assert world.ctx.kinds() == ["weights_prepare_failed"] * 2 + ["weights_swapped"]


@pytest.mark.parametrize("step", ["prepare", "commit"])
async def test_a_stuck_engine_ends_itself_at_its_deadline(tmp_path: Path, step: str) -> None:
    async def never(*_: Any) -> Any:
        await asyncio.sleep(3600)

    world = World(tmp_path, timeout_s=1.0)
    setattr(world.engine, step, never)
    await world.out(world.commit(), "1 s")


@pytest.mark.parametrize("error", [OSError("broken pipe"), Refused("the server is gone")])
@pytest.mark.parametrize("step", ["prepare", "commit"])
async def test_an_engine_that_fails_at_any_step_is_removed(tmp_path: Path, step: str, error: Exception) -> None:
    async def breaks(*_: Any) -> Any:
        raise error

    world = World(tmp_path)
    setattr(world.engine, step, breaks)
    await world.out(world.commit(), str(error))


def _not_an_error_of_ours(world: World) -> Callable[..., Any]:
    async def bug(*_: Any) -> Any:
        raise KeyError("a bug")

    return bug


async def test_any_error_of_a_swap_removes_the_engine(tmp_path: Path) -> None:
    class Broken(MemoryEngine):
        async def commit(self, record: VersionRecord, kv: KvPolicy) -> Swap:
            raise MemoryError

    world = World(tmp_path, Broken())
    await world.out(world.commit(), r"the swap failed: MemoryError\(\)")


async def test_a_bug_is_not_taken_for_a_failure_of_the_transaction(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.engine.prepare = _not_an_error_of_ours(world)  # type: ignore[method-assign]
    with pytest.raises(KeyError, match="a bug"):
        await world.follower.follow(world.commit())
    assert world.ctx.ready_at == []
