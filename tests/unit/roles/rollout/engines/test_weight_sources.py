"""Which carrier an engine uses, and the fallback when one fails: the folder of files, or the error with the reason."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from structlog.testing import capture_logs
from weight_context import Context
from weight_versions import LAYOUT, fill, version_of

from relax_rt.cluster.nodes.links import Links
from relax_rt.config.problems import BadInput
from relax_rt.config.schema import SupervisionTable
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.locations import files_folder, offers_folder, stage_folder
from relax_rt.roles.config.checks import check
from relax_rt.roles.config.publication_checks import check_publication, preflight_publication
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.rollout.engines.settings import RolloutSettings
from relax_rt.roles.rollout.engines.weight_sources import FallbackSource, source_for
from relax_rt.roles.training.backend.settings import TrainerSettings
from relax_rt.roles.training.publication import carriers as weight_files
from relax_rt.roles.training.publication.carriers import DeviceWeights, WeightFiles
from relax_rt.roles.training.publication.settings import PublicationTable
from relax_rt.transport.base.process_stat import start_time
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt, Gone, OutOfSpace, Refused, RelaxError, Unreachable
from relax_rt.transport.rpc.identity import CurveKeys, Incarnation
from relax_rt.transport.weights.broadcast.receivers import BroadcastReceivers
from relax_rt.transport.weights.cuda_ipc import Export
from relax_rt.transport.weights.directory import DirectorySource, WeightDirectory
from relax_rt.transport.weights.memory import DeviceMemory, HostMemory
from relax_rt.transport.weights.source import StageSource, WeightSource
from relax_rt.transport.weights.stage import WeightStage


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(weight_files, "model_folder", lambda _: tmp_path / "none")


def stage(ctx: Context, data: bytearray, version: int = 7) -> VersionRecord:
    writer = WeightStage(stage_folder(cast(RoleContext, ctx)), 1)
    with writer.writing(LAYOUT, 0) as (file, view):
        view[:] = data
        manifest = writer.seal(version, LAYOUT, file, view)
    return VersionRecord(version, version - 1, version, manifest.digest)


def copied(source: WeightSource) -> bytearray:
    into = bytearray(LAYOUT.nbytes)
    source.copy_into(memoryview(into))
    return into


async def test_the_trainers_node_uses_shared_memory_with_the_folder_as_fallback(tmp_path: Path) -> None:
    ctx = Context(tmp_path, directory="files")
    data = fill(LAYOUT)
    record = stage(ctx, data)
    files = WeightFiles.of(cast(RoleContext, ctx))
    assert files is not None
    await files.write_before_commit(record)
    assert not list((tmp_path / "files" / "run-1").glob("v*")), "behind the commit, not before it"
    await files.write_after_commit(record)
    await files.wait()
    await files.close()
    source = source_for(cast(RoleContext, ctx))
    assert copied(source(record, None)) == data and not ctx.events
    buffer = stage_folder(cast(RoleContext, ctx)) / "w0.buf"
    raw = bytearray(buffer.read_bytes())
    raw[3] ^= 1
    buffer.write_bytes(raw)
    assert copied(source(record, None)) == data
    assert [kind for kind, _ in ctx.events] == ["weights_from_files"] and "bytes 0-" in ctx.events[0][1]["why"]
    (buffer.parent / "v00000007.json").unlink()
    assert copied(source(record, None)) == data
    with pytest.raises(Gone, match="not on the stage"):
        source(VersionRecord(8, 7, 8, "00"), None)


async def test_the_folder_alone_is_written_before_the_commit_and_its_failure_is_the_trainers(tmp_path: Path) -> None:
    ctx = Context(tmp_path, directory="files", carrier="directory")
    data = fill(LAYOUT)
    record = stage(ctx, data)
    files = WeightFiles.of(cast(RoleContext, ctx))
    assert files is not None
    await files.write_before_commit(record)
    assert isinstance(source_for(cast(RoleContext, ctx))(record, None), DirectorySource)
    assert copied(source_for(cast(RoleContext, ctx))(record, None)) == data
    await files.write_after_commit(record)
    with pytest.raises(RelaxError, match="there already"):
        await files.write_before_commit(record)


async def test_a_full_disk_behind_costs_the_copy_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = Context(tmp_path, directory="files")
    record = stage(ctx, fill(LAYOUT))
    files = WeightFiles.of(cast(RoleContext, ctx))
    assert files is not None

    def full(*_: object) -> None:
        raise OutOfSpace("policy version 7", why="no space left on device")

    monkeypatch.setattr(WeightDirectory, "write", full)
    await files.write_after_commit(record)
    await files.wait()  # close() alone would not begin the copy, where its task has not run yet
    await asyncio.wait_for(files.close(), 120)
    assert [kind for kind, _ in ctx.events] == ["weights_save_failed"]


class Disk:
    """Versions are written one at a time, each when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[int] = []
        self.may = threading.Semaphore(0)
        write = WeightDirectory.write

        def slow(directory: WeightDirectory, record: VersionRecord, *rest: Any) -> Path:
            self.begun.append(record.version)
            assert self.may.acquire(timeout=120)
            return write(directory, record, *rest)

        monkeypatch.setattr(WeightDirectory, "write", slow)

    async def at(self, *versions: int) -> None:
        async with asyncio.timeout(120):
            while tuple(self.begun) != versions:  # noqa: ASYNC110 what is waited for sets no event
                await asyncio.sleep(0.005)


async def test_the_newest_is_copied_when_the_copy_under_way_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No later version comes to set it off, and an orderly end waits for it."""
    ctx, disk = Context(tmp_path, directory="files"), Disk(monkeypatch)
    files = WeightFiles.of(cast(RoleContext, ctx))
    assert files is not None
    for version in (7, 8, 9):
        await files.write_after_commit(stage(ctx, fill(LAYOUT, version), version))
        await disk.at(7)
    ending = asyncio.create_task(files.wait())
    disk.may.release()
    await disk.at(7, 9)
    assert not ending.done() and "put into" in ctx.progress.waits[-1]
    disk.may.release()
    await asyncio.wait_for(ending, 120)
    await files.close()
    assert [path.name for path in (tmp_path / "files" / "run-1").glob("v*")] == ["v00000009"]
    assert not ctx.events and ctx.progress.waits[-1] == ""


async def test_a_trainer_that_failed_or_is_stopped_does_not_wait_for_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx, disk = Context(tmp_path, directory="files"), Disk(monkeypatch)
    files = WeightFiles.of(cast(RoleContext, ctx))
    assert files is not None
    for version in (7, 8):
        await files.write_after_commit(stage(ctx, fill(LAYOUT, version), version))
        await disk.at(7)
    ctx.stopping.set()
    await asyncio.wait_for(files.wait(), 120)
    closing = asyncio.create_task(files.close())
    await asyncio.sleep(0)
    disk.may.release()
    await asyncio.wait_for(closing, 120)
    ((kind, told),) = ctx.events
    assert (kind, told["version"]) == ("weights_save_failed", 7) and "too slow" in told["why"]
    assert disk.begun == [7] and not [*(tmp_path / "files" / "run-1").glob("[v.]*")]


async def test_a_file_system_that_never_answers_keeps_no_run_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx, disk = Context(tmp_path, directory="files"), Disk(monkeypatch)
    for name in ("HUNG_S", "CLOSE_S"):
        monkeypatch.setattr(weight_files, name, 0.05)
    files = WeightFiles.of(cast(RoleContext, ctx))
    assert files is not None
    files._timeout_s = 0.1
    await files.write_after_commit(stage(ctx, fill(LAYOUT), 7))
    await disk.at(7)
    await asyncio.wait_for(files.wait(), 120)
    await asyncio.wait_for(files.close(), 120)
    ((kind, told),) = ctx.events
    assert (kind, told["version"]) == ("weights_save_failed", 7) and "not answered for 0.25 s" in told["why"]
    # The host of a role that has done its work waits for the default executor.
    await asyncio.wait_for(asyncio.get_running_loop().shutdown_default_executor(), 120)
    disk.may.release()
    assert files._writer is not None
    await asyncio.wait_for(files._writer, 120)


async def test_a_folder_that_cannot_be_opened_is_told_and_tried_again_with_the_next_version(tmp_path: Path) -> None:
    (tmp_path / "files").write_text("in the way")
    ctx = Context(tmp_path, directory="files")
    files = WeightFiles.of(cast(RoleContext, ctx))
    assert files is not None
    await files.write_after_commit(stage(ctx, fill(LAYOUT), 7))
    await files.wait()
    assert [(kind, told["version"]) for kind, told in ctx.events] == [
        ("weights_save_failed", 0),
        ("weights_save_failed", 7),
    ]
    assert "may write in" in ctx.events[0][1]["why"]
    (tmp_path / "files").unlink()
    await files.write_after_commit(stage(ctx, fill(LAYOUT), 8))
    await files.wait()
    await files.close()
    assert len(ctx.events) == 2 and (tmp_path / "files" / "run-1" / "v00000008").is_dir()


def test_a_folder_that_cannot_be_opened_and_is_the_only_way_ends_the_run(tmp_path: Path) -> None:
    """BadInput: the next trainer would be told the same."""
    (tmp_path / "files").write_text("in the way")
    ctx = Context(tmp_path, directory="files", carrier="directory")
    with pytest.raises(BadInput, match="weight directory"):
        WeightFiles.of(cast(RoleContext, ctx))


async def test_a_version_that_the_only_way_will_never_take_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = Context(tmp_path, directory="files", carrier="directory")
    files = WeightFiles.of(cast(RoleContext, ctx))
    assert files is not None
    record, real = stage(ctx, fill(LAYOUT), 7), Path.rename

    def struck(number: int) -> Callable[[Path, Path], Path]:
        def rename(path: Path, target: Path) -> Path:
            if path.name.startswith(".writing"):
                raise OSError(number, os.strerror(number))
            return real(path, target)

        return rename

    for number, kind in ((errno.EROFS, BadInput), (errno.ENOSPC, OutOfSpace), (errno.EIO, Refused)):
        monkeypatch.setattr(Path, "rename", struck(number))
        with pytest.raises(kind, match=os.strerror(number)):
            await files.write_before_commit(record)
    monkeypatch.setattr(Path, "rename", real)
    await files.write_before_commit(record)
    with pytest.raises(Refused, match="used once"):
        await files.write_before_commit(record)  # the next trainer has another number
    await files.close()


async def test_waiting_for_another_node_is_reported_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = Context(tmp_path, ack_timeout_s=0.3)
    monkeypatch.setattr(Links, "from_environment", lambda: Links("b", "127.0.0.1", CurveKeys.make()))

    async def nowhere(*_: object, **__: object) -> None:
        raise Unreachable("queue/0", why="it does not run")

    ctx.peer = nowhere  # type: ignore[attr-defined]
    source = source_for(cast(RoleContext, ctx))
    with capture_logs() as logged, pytest.raises(Unreachable):
        await asyncio.to_thread(source, VersionRecord(1, 0, 0, "00"), None)
    (line,) = (line for line in logged if line["event"] == "waiting for weights of another node")
    assert "it does not run" in line["why"]
    assert ctx.progress.waits == [line["why"], ""]


def test_other_carriers_have_no_folder(tmp_path: Path) -> None:
    ctx = cast(RoleContext, Context(tmp_path))
    assert files_folder(ctx, None) is None and WeightFiles.of(ctx) is None


def test_if_both_carriers_fail_the_first_error_is_raised(tmp_path: Path) -> None:
    record, _ = version_of(fill(LAYOUT))
    told: list[object] = []
    with pytest.raises(Gone, match="not on the stage") as caught:
        FallbackSource(
            lambda: StageSource(tmp_path, record),
            lambda: DirectorySource(tmp_path, record),
            lambda *what: told.append(what),
        )
    assert "and the other way" in caught.value.__notes__[0] and not told


def test_the_folder_replaces_a_version_of_adapters(tmp_path: Path) -> None:
    """What crossed were adapters; what lies on the node's stage, and is damaged, is the whole."""
    data = fill(LAYOUT)
    ctx = Context(tmp_path)
    record = stage(ctx, data)
    manifest, folder = version_of(data)[1], stage_folder(cast(RoleContext, ctx))
    WeightDirectory(tmp_path / "files", 1).write(record, manifest, memoryview(data), 10.0)
    (folder / "w0.buf").write_bytes(bytes(LAYOUT.nbytes))

    def first() -> StageSource:
        found = StageSource(folder, record)
        found.payload = "adapters"
        return found

    source = FallbackSource(first, lambda: DirectorySource(tmp_path / "files", record), lambda *_: None)
    assert source.payload == "adapters" and copied(source) == data and source.carrier == "directory"


def test_a_damaged_folder_is_reported_as_well(tmp_path: Path) -> None:
    data = fill(LAYOUT)
    record, manifest = version_of(data)
    folder = WeightDirectory(tmp_path, 1).write(record, manifest, memoryview(data), 10.0)
    (shard,) = folder.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    source = FallbackSource(
        lambda: StageSource(tmp_path, record), lambda: DirectorySource(tmp_path, record), lambda *_: None
    )
    with pytest.raises(Corrupt, match="tensor scalar"):
        copied(source)


CHECKED: list[tuple[dict[str, Any], str, str | None, str]] = [
    ({"carrier": "directory"}, "", None, "publication.directory is not set"),
    ({"carrier": "stream"}, "", None, "this run has one"),
    ({"carrier": "shared_memory"}, "10.0.0.1:7", None, "rollouts may be started on others"),
    ({"carrier": "shared_memory", "directory": "x"}, "", None, "has no effect"),
    ({"carrier": "stream"}, "10.0.0.1:7", None, ""),
    ({"carrier": "shared_memory"}, "10.0.0.1:7", "head", ""),
    ({"carrier": "auto", "directory": "x"}, "10.0.0.1:7", "b", ""),
    ({"carrier": "collective"}, "", None, ""),
    ({"carrier": "collective", "directory": "x"}, "", None, "has no effect"),
    ({"carrier": "collective"}, "10.0.0.1:7", "b", "reaches engines on the trainer's node"),
    ({"carrier": "collective", "broadcast_timeout_s": 60}, "", None, "no time to take the version from the stage"),
    ({"carrier": "collective", "communicator": "nccl"}, "", None, "roles.rollout has none (gpus = 0)"),
    ({"communicator": "gloo"}, "", None, 'no effect with carrier = "auto"'),
    ({"wire_dtype": "float8"}, "", None, ""),
    ({"wire_dtype": "float32"}, "", None, "wider than what is published"),
]


@pytest.mark.parametrize(("table", "listen", "node", "says"), CHECKED)
def test_a_forced_carrier_is_checked(table: dict[str, Any], listen: str, node: str | None, says: str) -> None:
    config = RLConfig.model_validate(
        {
            "run": {"name": "x", "job": "rl"},
            "model": {"path": "m"},
            "data": {"task": "chain_sum"},
            "reward": {"function": "a:b"},
            "publication": table,
            "supervision": {"nodes": {"listen": listen} if listen else {}},
            "roles": {},
        }
    )
    config.roles["rollout"] = RolloutSettings(node=node) if node else RolloutSettings()
    found = [problem.message for problem in check(config) if problem.path[0] == "publication"]
    assert any(says in message for message in found) if says else not found


def test_both_that_lack_a_gpu_are_named_in_one_sentence() -> None:
    table = PublicationTable(carrier="collective", communicator="nccl")
    roles = {"rollout": RolloutSettings(), "trainer": TrainerSettings()}
    config = RLConfig.model_construct(publication=table, roles=roles, supervision=SupervisionTable())
    assert any("roles.rollout and roles.trainer have none (gpus = 0)" in p.message for p in check_publication(config))


class Engine(Context):
    """A rollout of a run whose versions are broadcast."""

    def __init__(self, folder: Path, carrier: str = "collective") -> None:
        super().__init__(folder, carrier=carrier)
        self.config.roles.update(rollout=RolloutSettings(), trainer=TrainerSettings())
        self.settings, self.who = RolloutSettings(), Incarnation("rollout/0", 3)


def broadcast(ctx: Engine, record: VersionRecord, data: bytes | bytearray) -> list[str]:
    """As the trainer does, with nothing between; whom it served."""
    taken = BroadcastReceivers(offers_folder(cast(RoleContext, ctx))).reserve(
        record.version, record.digest, LAYOUT.nbytes, 5.0
    )
    if taken is None:
        return []
    for offer in taken.receivers.values():
        assert isinstance(offer.memory, HostMemory)
        Path(offer.memory.path).write_bytes(data)
    taken.finish({})
    return list(taken.receivers)


async def test_the_first_version_comes_from_the_stage_and_later_ones_by_broadcast(tmp_path: Path) -> None:
    ctx = Engine(tmp_path)
    make = source_for(cast(RoleContext, ctx))
    data = fill(LAYOUT, 7)
    first = stage(ctx, data)
    assert broadcast(ctx, first, data) == [], "nobody knows how large it is"
    source = make(first, None)
    assert (copied(source), source.carrier) == (data, "shared_memory")
    data = fill(LAYOUT, 8)
    second = stage(ctx, data, 8)
    assert broadcast(ctx, second, data) == ["rollout/0"]
    source = make(second, first)
    assert (copied(source), source.carrier) == (data, "collective")
    assert not ctx.events


async def test_a_corrupt_broadcast_falls_back_to_the_stage(tmp_path: Path) -> None:
    ctx = Engine(tmp_path)
    make = source_for(cast(RoleContext, ctx))
    data = fill(LAYOUT, 7)
    copied(make(stage(ctx, data), None))
    second = stage(ctx, data, 8)
    assert broadcast(ctx, second, bytes(LAYOUT.nbytes)) == ["rollout/0"]
    source = make(second, None)
    assert (copied(source), source.carrier) == (data, "shared_memory")
    assert [kind for kind, _ in ctx.events] == ["broadcast_fallback"] and "bytes 0-" in ctx.events[0][1]["why"]


async def test_an_engine_without_a_receive_buffer_uses_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OutOfSpace("memory", why="no space left on device")

    monkeypatch.setattr("relax_rt.transport.weights.broadcast.source.allocate_host_memory", full)
    ctx = Engine(tmp_path)
    make = source_for(cast(RoleContext, ctx))
    data = fill(LAYOUT)
    record = stage(ctx, data)
    assert copied(make(record, None)) == data == copied(make(record, None))
    assert broadcast(ctx, record, data) == []
    assert [kind for kind, _ in ctx.events] == ["broadcast_disabled"], "said once"


def without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise Refused("CUDA through CuPy", why="no device is visible")

    monkeypatch.setattr("relax_rt.transport.weights.device.cupy", none)


async def test_a_failing_device_copy_falls_back_to_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_device(monkeypatch)
    ctx = Engine(tmp_path, carrier="cuda_ipc")
    make = source_for(cast(RoleContext, ctx))
    data = fill(LAYOUT)
    record = stage(ctx, data)
    source = make(record, None)
    assert (copied(source), source.carrier) == (data, "shared_memory")
    folder = stage_folder(cast(RoleContext, ctx))
    memory = DeviceMemory(b"h" * 64, "GPU-1", 0, LAYOUT.nbytes)
    mine = os.getpid()
    export = Export(record.version, record.digest, memory, ("x",), "cuda0.pin", mine, start_time(mine))
    (folder / f"v{record.version:08d}.cuda").write_bytes(msgspec.msgpack.encode(export))
    (folder / "cuda0.pin").touch()
    source = make(record, None)
    assert source.carrier == "cuda_ipc"
    assert (copied(source), source.carrier) == (data, "shared_memory")
    assert [kind for kind, _ in ctx.events] == ["device_fallback"] * 2
    assert "not exported" in ctx.events[0][1]["why"] and "no device is visible" in ctx.events[1][1]["why"]


def test_a_trainer_without_a_device_says_so_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_device(monkeypatch)
    ctx = Context(tmp_path)
    assert DeviceWeights.of(cast(RoleContext, ctx), PublicationTable()) is None
    device = DeviceWeights.of(cast(RoleContext, ctx), PublicationTable(carrier="cuda_ipc"))
    assert device is not None
    data = fill(LAYOUT)
    device.show(version_of(data)[1], memoryview(data))
    device.retire(8)
    device.close()
    assert [kind for kind, _ in ctx.events] == ["weights_export_failed"]
    assert not list(stage_folder(cast(RoleContext, ctx)).glob("*.cuda"))


@pytest.mark.parametrize(
    ("table", "missing"),
    [({"carrier": "cuda_ipc"}, True), ({"carrier": "collective", "communicator": "nccl"}, True), ({}, False)],
)
def test_a_machine_without_a_gpu_is_refused_in_words(
    table: dict[str, Any], missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_rt.roles.config.publication_checks.count_gpus", lambda: 0)
    monkeypatch.setattr("relax_rt.roles.config.publication_checks.find_spec", lambda _: None)
    config = cast(Any, RLConfig).model_construct(publication=PublicationTable(**table), roles={})
    messages = [problem.message for problem in preflight_publication(config, tmp_path)]
    assert len(messages) == 2 * missing
    assert not missing or ("CuPy, which is not installed" in messages[0] and "has no GPU" in messages[1])


def test_a_folder_that_cannot_be_written_is_refused_and_nothing_is_left_in_one_that_can(tmp_path: Path) -> None:
    def found(folder: str) -> list[str]:
        table = PublicationTable(directory=folder)
        config = cast(Any, RLConfig).model_construct(publication=table, roles={})
        return [problem.message for problem in preflight_publication(config, tmp_path)]

    assert "cannot be written: /proc" in found("/proc/weights/here")[0]
    assert found("weights/here") == [] and list(tmp_path.iterdir()) == []


def test_one_gpu_must_have_room_for_all_who_share_it() -> None:
    def found(trainer: float, rollout: float, count: int) -> list[str]:
        roles = {"trainer": TrainerSettings(gpus=trainer), "rollout": RolloutSettings(gpus=rollout, count=count)}
        table = PublicationTable(carrier="cuda_ipc")
        config = cast(Any, RLConfig).model_construct(publication=table, roles=roles, supervision=SupervisionTable())
        return [problem.message for problem in check_publication(config)]

    assert found(0.5, 0.25, 2) == []
    for shares in ((0, 0.5, 1), (1, 1, 1), (0.5, 0.5, 2)):
        assert "do not share one" in found(*shares)[0]
