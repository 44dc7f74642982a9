"""A version as adapters and what they are added to: the same bits as in full, or a named error."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

torch = pytest.importorskip("torch")

from adapter_versions import LAYOUT, fill_base, lora, made, publish, whole  # noqa: E402
from test_weight_follower import Context  # noqa: E402

from relax_rt.interfaces.role import RoleContext  # noqa: E402
from relax_rt.roles.base.locations import stage_folder  # noqa: E402
from relax_rt.roles.rollout.engines.base import Engine, EngineLoad, KvPolicy, Swap  # noqa: E402
from relax_rt.roles.rollout.engines.weight_follower import WeightFollower  # noqa: E402
from relax_rt.transport.base.versions import ROOT, VersionRecord  # noqa: E402
from relax_rt.transport.rpc.errors import Corrupt, Gone, OutOfSpace, Refused, RelaxError  # noqa: E402
from relax_rt.transport.weights.manifest import Manifest  # noqa: E402
from relax_rt.transport.weights.payloads import encode_lora  # noqa: E402
from relax_rt.transport.weights.source import StageSource, WeightSource, stage_source  # noqa: E402
from relax_rt.transport.weights.stage import BASE_FILE, WeightStage, adapters_file, read_manifest  # noqa: E402


def copied(source: WeightSource) -> bytes:
    into = bytearray(b"\x55" * LAYOUT.nbytes)
    source.copy_into(memoryview(into))
    return bytes(into)


def damage(path: Path, at: int = -1) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)


def test_adapters_and_base_make_the_version_that_lies_there_in_full(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    record = publish(tmp_path, 2)
    assert 0 < (tmp_path / adapters_file(2)).stat().st_size < LAYOUT.nbytes / 50
    found = made(tmp_path, record)
    assert found == copied(StageSource(tmp_path, record))
    exact = torch.frombuffer(bytearray(whole(2)), dtype=torch.float32)
    torch.testing.assert_close(torch.frombuffer(bytearray(found), dtype=torch.float32), exact, atol=2e-5, rtol=1e-5)


def test_the_stage_keeps_the_base_and_the_newest_adapters(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        publish(tmp_path, version)
    names = {path.name for path in tmp_path.iterdir() if path.suffix != ".buf"}
    assert names == {"epoch", "v00000000.json", "v00000003.json", adapters_file(3)}
    assert {path.name for path in tmp_path.glob("*.buf*")} == {BASE_FILE, "w0.buf", "w1.buf"}
    assert read_manifest(tmp_path, ROOT).file == BASE_FILE


def put(folder: Path, content: bytes) -> None:
    """Other adapters of the same size in the file than were announced."""
    path = folder / adapters_file(2)
    path.write_bytes(content[: path.stat().st_size].ljust(path.stat().st_size, b"\0"))


def other_base(folder: Path) -> None:
    stage = WeightStage(folder, 1)
    stage.seal_base(LAYOUT, lambda view: fill_base(view, seed=9))


DAMAGES: list[tuple[str, Any, type[RelaxError], str]] = [
    ("adapters are gone", lambda f: (f / adapters_file(2)).unlink(), Gone, "adapters of policy version 2"),
    ("adapters are cut", lambda f: os.truncate(f / adapters_file(2), 100), Gone, "adapters of policy version 2"),
    ("a bit of A", lambda f: damage(f / adapters_file(2)), Corrupt, "weights of policy version 2, bytes 0-"),
    ("a length", lambda f: damage(f / adapters_file(2), 3), Corrupt, "adapters"),
    ("no adapters", lambda f: put(f, b"\xff" * 99), Corrupt, "adapters"),
    ("another rank", lambda f: put(f, encode_lora(lora(2, base(f), rank=2))), RelaxError, "adapters"),
    ("another shape", lambda f: put(f, encode_lora(lora(2, base(f), rows=8))), RelaxError, "adapter"),
    ("no base", lambda f: (f / "v00000000.json").unlink(), Gone, "policy version 0"),
    ("no bytes of it", lambda f: (f / BASE_FILE).unlink(), Gone, "policy version 0"),
    ("another base", other_base, Refused, "they are for weights with digest"),
    ("a bit of the base", lambda f: damage(f / BASE_FILE, 70), Corrupt, "weights of policy version 0"),
    ("a false base", lambda f: (f / "v00000000.json").write_bytes(b"{"), Corrupt, "policy version 0"),
]


def base(folder: Path) -> str:
    return read_manifest(folder, ROOT).digest


class MemoryEngine:
    """Samples from `active`."""

    name = "memory"

    def __init__(self) -> None:
        self.active, self.standby, self.version = bytearray(LAYOUT.nbytes), bytearray(LAYOUT.nbytes), 0

    async def prepare(self, source: WeightSource) -> None:
        await asyncio.to_thread(source.copy_into, memoryview(self.standby))

    async def commit(self, record: VersionRecord, kv: KvPolicy) -> Swap:
        self.active, self.standby, self.version = self.standby, self.active, record.version
        return Swap(record.version, 0.0, 0)

    def load(self) -> EngineLoad:
        return EngineLoad(self.version, 0, 0, 0, 0, 0, 0.0, "")


@pytest.mark.parametrize(("what", "harm", "error", "says"), DAMAGES, ids=[case[0] for case in DAMAGES])
def test_what_is_wrong_is_named(what: str, harm: Any, error: type[RelaxError], says: str, tmp_path: Path) -> None:
    publish(tmp_path, 1)
    record = publish(tmp_path, 2)
    harm(tmp_path)
    with pytest.raises(error, match=says):
        made(tmp_path, record)
    third = publish(tmp_path, 3)  # whoever publishes mends what it finds
    assert made(tmp_path, third) == copied(StageSource(tmp_path, third))


async def test_engines_beside_the_trainer_copy_the_version_which_is_faster_than_to_make_it(tmp_path: Path) -> None:
    ctx, engine = Context(tmp_path, timeout_s=20.0), MemoryEngine()
    folder = stage_folder(cast(RoleContext, ctx))
    follower = WeightFollower(cast(RoleContext, ctx), cast(Engine, engine))
    for version, again in ((1, False), (2, False), (3, True)):
        record = publish(folder, version)
        assert await (follower.follow_again(record) if again else follower.follow(record))
        assert bytes(engine.active) == made(folder, record)
    told = [(e["payload"], e["bytes"]) for kind, e in ctx.events if kind == "weights_swapped"]
    assert told == [("full", LAYOUT.nbytes)] * 3


def test_adapters_larger_than_the_version_are_no_true_manifest(tmp_path: Path) -> None:
    record = publish(tmp_path, 1)
    path = tmp_path / "v00000001.json"
    manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, adapter_bytes=1 << 40)))
    with pytest.raises(Corrupt, match="its adapters have 1099511627776 bytes"):
        stage_source(tmp_path, record, VersionRecord(9, 8, 9))


def test_a_base_that_is_not_whole_is_not_announced_and_gone_on_with(tmp_path: Path) -> None:
    stage = WeightStage(tmp_path, 1)

    def broken(view: memoryview) -> None:
        view[:4] = b"half"
        raise OSError("the far end is gone")

    with pytest.raises(OSError, match="far end"):
        stage.seal_base(LAYOUT, broken)
    with pytest.raises(Gone):
        read_manifest(tmp_path, ROOT)
    found: list[bytes] = []

    def rest(view: memoryview) -> None:
        found.append(bytes(view[:4]))
        fill_base(view)

    manifest = stage.seal_base(LAYOUT, rest)
    assert found == [b"half"] and read_manifest(tmp_path, ROOT) == manifest
    assert [path.name for path in tmp_path.glob("base*")] == [BASE_FILE]
    # Who reads the old one while another takes its place has the old one.
    with StageSource(tmp_path, VersionRecord(ROOT, ROOT, 0, manifest.digest)).mapped() as view:
        before = bytes(view)
        other_base(tmp_path)
        assert bytes(view) == before
    del view
    assert read_manifest(tmp_path, ROOT).digest != manifest.digest


def test_no_room_for_the_base_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    stage = WeightStage(tmp_path, 1)
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OutOfSpace, match=r"for the model's own weights: .*No space left.*enlarge /dev/shm"):
        stage.seal_base(LAYOUT, fill_base)
    assert not list(tmp_path.glob("base*"))
