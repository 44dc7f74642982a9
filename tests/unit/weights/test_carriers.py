"""Which carrier an engine uses, and what happens where one fails: the folder of files, or the error that says why."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import structlog
from weight_versions import LAYOUT, fill, version_of

from relax_rt.role import RoleContext
from relax_rt.roles.checks import check
from relax_rt.roles.publication import files as weight_files
from relax_rt.roles.publication import stage_folder
from relax_rt.roles.publication.carriers import FallbackSource, files_folder, source_for
from relax_rt.roles.publication.files import WeightFiles
from relax_rt.roles.sections import PublicationTable, RLConfig
from relax_rt.transport.errors import Corrupt, Gone, OutOfSpace, RelaxError
from relax_rt.transport.identity import Incarnation
from relax_rt.transport.versions import VersionRecord
from relax_rt.transport.weights.directory import DirectorySource, WeightDirectory
from relax_rt.transport.weights.source import StageSource, WeightSource
from relax_rt.transport.weights.stage import WeightStage


class Context:
    """What carriers need of a role's context."""

    def __init__(self, folder: Path, **table: Any) -> None:
        self.config = cast(Any, RLConfig).model_construct(
            publication=PublicationTable(**table), config_dir=str(folder), model=None
        )
        self.who, self.run_id, self.shm_dir = Incarnation("trainer/0", 1), "run-1", folder / "shm"
        self.shm_dir.mkdir()
        self.log = structlog.get_logger()
        self.events: list[tuple[str, dict[str, Any]]] = []

    def event(self, kind: str, /, **fields: Any) -> None:
        self.events.append((kind, fields))


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


async def test_on_the_trainers_node_it_is_shared_memory_and_the_folder_steps_in(tmp_path: Path) -> None:
    ctx = Context(tmp_path, directory="files")
    data = fill(LAYOUT)
    record = stage(ctx, data)
    files = WeightFiles.of(cast(RoleContext, ctx))
    assert files is not None
    await files.before(record)
    assert not list((tmp_path / "files" / "run-1").glob("v*")), "behind the commit, not before it"
    await files.after(record)
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
    await files.before(record)
    assert isinstance(source_for(cast(RoleContext, ctx))(record, None), DirectorySource)
    assert copied(source_for(cast(RoleContext, ctx))(record, None)) == data
    await files.after(record)
    with pytest.raises(RelaxError, match="there already"):
        await files.before(record)


async def test_a_full_disk_behind_costs_the_copy_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = Context(tmp_path, directory="files")
    record = stage(ctx, fill(LAYOUT))
    files = WeightFiles.of(cast(RoleContext, ctx))
    assert files is not None

    def full(*_: object) -> None:
        raise OutOfSpace("policy version 7", why="no space left on device")

    monkeypatch.setattr(WeightDirectory, "write", full)
    await files.after(record)
    await asyncio.wait_for(files.close(), 10)
    assert [kind for kind, _ in ctx.events] == ["weights_not_filed"]


async def test_a_trainer_that_ends_does_not_wait_for_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = Context(tmp_path, directory="files")
    record = stage(ctx, fill(LAYOUT))
    files = WeightFiles.of(cast(RoleContext, ctx))
    assert files is not None
    await files.after(record)
    await files.close()
    with suppress(IndexError):
        # Either it was done by then, or it was given up and says so.
        assert ctx.events[0][0] == "weights_not_filed" and "too slow" in ctx.events[0][1]["why"]
    assert not list((tmp_path / "files" / "run-1").glob(".writing*"))


def test_other_carriers_have_no_folder(tmp_path: Path) -> None:
    ctx = cast(RoleContext, Context(tmp_path))
    assert files_folder(ctx) is None and WeightFiles.of(ctx) is None


def test_what_neither_carrier_has_is_the_error_of_the_first(tmp_path: Path) -> None:
    record, _ = version_of(fill(LAYOUT))
    told: list[object] = []
    with pytest.raises(Gone, match="not on the stage") as caught:
        FallbackSource(
            lambda: StageSource(tmp_path, record),
            lambda: DirectorySource(tmp_path, record),
            lambda *what: told.append(what),
        )
    assert "from the folder" in caught.value.__notes__[0] and not told


def test_a_folder_that_is_damaged_too_is_told(tmp_path: Path) -> None:
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
    from relax_rt.roles.sections import RolloutSettings

    config.roles["rollout"] = RolloutSettings(node=node) if node else RolloutSettings()
    found = [problem.message for problem in check(config) if problem.path[0] == "publication"]
    assert any(says in message for message in found) if says else not found
