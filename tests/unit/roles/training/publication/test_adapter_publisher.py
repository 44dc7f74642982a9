"""The trainer's side of versions that are adapters: merged as receivers do, while the optimizer goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

torch = pytest.importorskip("torch")

from adapter_versions import LAYOUT, fill_base, lora, made, publish  # noqa: E402
from test_publisher import SOON_S, Backend, world_of  # noqa: E402

from relax_rt.roles.training.backend.interface import TrainerBackend  # noqa: E402
from relax_rt.roles.training.publication.adapters import AdapterVersions  # noqa: E402
from relax_rt.roles.training.publication.settings import PublicationTable  # noqa: E402
from relax_rt.transport.base.versions import ROOT  # noqa: E402
from relax_rt.transport.rpc.errors import Corrupt, Refused  # noqa: E402
from relax_rt.transport.weights.manifest import Layout  # noqa: E402
from relax_rt.transport.weights.payloads import Lora  # noqa: E402
from relax_rt.transport.weights.source import StageSource  # noqa: E402
from relax_rt.transport.weights.stage import BASE_FILE, WeightStage, adapters_file, read_manifest  # noqa: E402


class Adapted(Backend):
    """Adapters that are other ones with each value, of any rank."""

    def __init__(self, rank: int = 3) -> None:
        super().__init__()
        self.rank, self.bases = rank, 0

    def layout(self, dtype: str) -> Layout:
        return LAYOUT

    def export(self, into: memoryview, dtype: str, copied: Callable[[], None] = lambda: None) -> None:
        raise AssertionError("all weights are copied")

    def export_base(self, into: memoryview | None, dtype: str) -> None:
        assert into is not None
        self.bases += 1
        fill_base(into)

    @property
    def changes_kept(self) -> float | None:
        return None

    def adapters(self) -> Lora:
        self.copying.set()
        assert self.go_on.wait(SOON_S)
        return lora(self.value, "", self.rank)


def copied(source: StageSource) -> bytes:
    into = bytearray(LAYOUT.nbytes)
    source.copy_into(memoryview(into))
    return bytes(into)


def bases(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("base*")]


async def test_what_is_published_in_full_is_what_receivers_make(tmp_path: Path) -> None:
    async with world_of(tmp_path, Adapted(), adapters=True) as world:
        for version in (1, 2):
            await world.publish(version)
            await asyncio.wait_for(world.publisher.wait_committed(), SOON_S)
        record = world.ctx.registry.committed[-1]
        assert made(tmp_path, record) == copied(StageSource(tmp_path, record))
        assert cast(Adapted, world.backend).bases == 1
        (_, published) = [told for kind, told in world.ctx.events if kind == "published"]
        assert 0 < published["adapter_bytes"] < LAYOUT.nbytes / 50 and published["bytes"] == LAYOUT.nbytes


async def test_the_optimizer_waits_for_a_copy_of_the_adapters_and_not_for_the_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may = threading.Event()
    make = AdapterVersions.make

    def slow(*arguments: object) -> None:
        assert may.wait(SOON_S)
        make(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(AdapterVersions, "make", slow)
    async with world_of(tmp_path, Adapted(), adapters=True) as world:
        await world.publish(1)
        await asyncio.wait_for(asyncio.to_thread(world.publisher.wait_copied), SOON_S)
        world.backend.value = 99
        assert world.ctx.registry.committed == []
        may.set()
        await asyncio.wait_for(world.publisher.wait_committed(), SOON_S)
        merged = copied(world.source(1))
        await world.publish(2)
        await asyncio.wait_for(world.publisher.wait_committed(), SOON_S)
        assert copied(world.source(2)) != merged, "version 1 has the adapters of before the step"


async def test_adapters_that_would_save_little_are_not_put_there(tmp_path: Path) -> None:
    async with world_of(tmp_path, Adapted(rank=200), adapters=True) as world:
        await world.publish(1)
        await asyncio.wait_for(world.publisher.wait_committed(), SOON_S)
        (published,) = [told for kind, told in world.ctx.events if kind == "published"]
        assert published["adapter_bytes"] == 0 and not (tmp_path / adapters_file(1)).exists()


async def test_a_base_that_was_taken_away_is_put_there_again(tmp_path: Path) -> None:
    async with world_of(tmp_path, Adapted(), adapters=True) as world:
        await world.publish(1)
        await world.publisher.wait_committed()
        (tmp_path / "v00000000.json").unlink()
        await world.publish(2)
        await asyncio.wait_for(world.publisher.wait_committed(), SOON_S)
        assert cast(Adapted, world.backend).bases == 2 and read_manifest(tmp_path, ROOT).file == BASE_FILE


async def test_a_base_that_was_harmed_ends_the_trainer_before_anything_is_made_of_it(tmp_path: Path) -> None:
    async with world_of(tmp_path, Adapted(), adapters=True) as world:
        await world.publish(1)
        await world.publisher.wait_committed()
        with (tmp_path / BASE_FILE).open("r+b") as file:
            file.write(b"\xee" * 9)
        await world.publish(2)
        with pytest.raises(Corrupt, match="weights of policy version 0"):
            await asyncio.wait_for(world.publisher.wait_committed(), SOON_S)
        assert [record.version for record in world.ctx.registry.committed] == [1]
    # Its successor trusts nobody's.
    async with world_of(tmp_path, Adapted(), adapters=True) as world:
        await world.publish(1)
        await asyncio.wait_for(world.publisher.wait_committed(), SOON_S)
        assert made(tmp_path, world.ctx.registry.committed[-1])
        assert cast(Adapted, world.backend).bases == 2, "compared, and written"


async def test_a_successor_keeps_the_base_that_lies_there_if_it_is_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And needs no room for a second one."""
    async with world_of(tmp_path, Adapted(), adapters=True) as world:
        await world.publish(1)
        await asyncio.wait_for(world.publisher.wait_committed(), SOON_S)
    (tmp_path / f"{BASE_FILE}.tmp").write_bytes(b"half of it")
    before = (tmp_path / BASE_FILE).stat().st_ino
    monkeypatch.setattr(WeightStage, "seal_base", None)
    async with world_of(tmp_path, Adapted(), adapters=True) as world:
        await world.publish(2)
        await asyncio.wait_for(world.publisher.wait_committed(), SOON_S)
        assert made(tmp_path, world.ctx.registry.committed[-1])
    assert (tmp_path / BASE_FILE).stat().st_ino == before
    assert bases(tmp_path) == [BASE_FILE]


class Other(Adapted):
    """Another model under the same names."""

    def export_base(self, into: memoryview | None, dtype: str) -> None:
        super().export_base(into, dtype)
        assert into is not None
        fill_base(into, seed=9)


async def test_the_base_of_another_model_takes_its_place(tmp_path: Path) -> None:
    digests = set()
    for backend in (Adapted(), Other(), Other()):
        async with world_of(tmp_path, backend, adapters=True) as world:
            await world.publish(1)
            await asyncio.wait_for(world.publisher.wait_committed(), SOON_S)
            assert made(tmp_path, world.ctx.registry.committed[-1])
        digests.add(read_manifest(tmp_path, ROOT).digest)
    assert len(digests) == 2


def test_the_committed_version_is_left_alone_while_the_base_is_compared(tmp_path: Path) -> None:
    record = publish(tmp_path, 1)
    stage, before = WeightStage(tmp_path, 2), copied(StageSource(tmp_path, record))
    assert stage.same_base(LAYOUT, fill_base, record.version) == read_manifest(tmp_path, ROOT)
    assert copied(StageSource(tmp_path, record)) == before
    assert stage.same_base(LAYOUT, lambda view: fill_base(view, seed=9), record.version) is None
    path = tmp_path / "v00000000.json"
    for false in (b"{", path.read_bytes().replace(b'"buckets":["', b'"buckets":["00","')):
        path.write_bytes(false)
        assert stage.same_base(LAYOUT, fill_base, record.version) is None
    stage.close()


def test_a_backend_without_adapters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"publication\.adapters: Backend has no adapters"):
        AdapterVersions.of(
            PublicationTable(adapters=True), cast(TrainerBackend, Backend()), WeightStage(tmp_path, 1), "float32"
        )
