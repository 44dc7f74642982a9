"""Memory and disk of the standalone queue: full, spilled, durable, lost, and what becomes of those who wait."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from broker_world import until
from transfer_queue_world import World, settled

from relax_rt.transport import TransferQueue
from relax_rt.transport.queue import broker as queue_broker
from relax_rt.transport.rpc.errors import OutOfSpace, Refused

KIB = 1 << 10
TOKENS = 25 * KIB  # 100 KiB


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as made:
        yield made


def sample(n: int) -> dict[str, Any]:
    return {"tokens": np.full(TOKENS, n, np.int32), "n": n}


async def drain(queue: TransferQueue, samples: int, task: str = "train") -> list[int]:
    """Take and finish so many, and look at what is in them."""
    seen: list[int] = []
    while len(seen) < samples:
        batch = await queue.lease(task, samples=min(3, samples - len(seen)), wait_s=30)
        assert batch, batch.waiting_on
        for one in batch.samples:
            assert len(one["tokens"]) == TOKENS and (one["tokens"] == one["n"]).all()
        seen += batch.values("n")
        await queue.complete(batch)
    return seen


async def memory(queue: TransferQueue) -> dict[str, Any]:
    found: dict[str, Any] = (await queue.statistics())["broker"]["memory"]
    return found


async def test_what_does_not_fit_goes_to_disk_and_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "queue"
    async with (
        TransferQueue.serve(folder, {"train": ["tokens"]}, capacity_bytes=1 << 20, spill_bytes=64 << 20) as queue,
        TransferQueue.connect(folder, capacity_bytes=1 << 20, slab_bytes=256 * KIB) as producer,
    ):
        async with asyncio.timeout(120):
            for n in range(60):
                await producer.put([sample(n)])
        full = await settled(lambda: memory(queue), lambda now: now["occupancy"] <= 0.8)
        assert full["spilled_bytes"] > 5 << 20 and full["spilled_bytes"] + full["payload_bytes"] >= 60 * 100 * KIB
        files = list((folder / "spill").iterdir())
        assert sum(path.stat().st_size for path in files) >= full["spilled_bytes"]
        assert (await queue.statistics())["broker"]["tallies"]["blocks_spilled"] > 50
        # What was read keeps its file; the rest of them vanish.
        kept = await queue.lease("train", samples=1, wait_s=5)
        view = kept.samples[0]["tokens"]
        await queue.complete(kept)
        assert [0, *await drain(producer, 59)] == list(range(60))
        left = await settled(lambda: asyncio.to_thread(os.listdir, folder / "spill"), lambda names: len(names) == 1)
        assert left and (view == 0).all()
        del view
        await settled(lambda: asyncio.to_thread(os.listdir, folder / "spill"), lambda names: not names)
        assert (await memory(queue))["extents"] == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 300 KiB."""
    path = tmp_path / "queue" / "spill"
    path.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


async def test_a_full_disk_makes_producers_wait_and_loses_nothing(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_broker, "_SPILL_RETRY_S", 0.05)
    folder = tmp_path / "queue"
    async with (
        TransferQueue.serve(folder, {"train": ["tokens"]}, capacity_bytes=1 << 20, spill_bytes=64 << 20),
        TransferQueue.connect(folder) as queue,
    ):
        put = 0
        with pytest.raises(OutOfSpace, match=r"payloads fill the capacity: .* the disk for spilled payloads is full"):
            while put < 40:
                await queue.put([sample(put)], wait_s=0.3)
                put += 1
        assert 10 <= put < 20
        waiting = asyncio.create_task(queue.put([sample(put)]))
        await until(lambda: queue.waiting_on.startswith("payloads fill the capacity"))
        assert await drain(queue, 5) == list(range(5))
        async with asyncio.timeout(120):
            await waiting
        # With more room on the disk it goes on without anybody reading.
        await asyncio.to_thread(subprocess.run, ["mount", "-o", "remount,size=32m", str(small_disk)], check=True)
        async with asyncio.timeout(120):
            for n in range(put + 1, put + 30):
                await queue.put([sample(n)])
        assert await drain(queue, put + 25) == list(range(5, put + 30))
        assert queue.waiting_on == ""


async def test_producers_on_other_processes_wait_for_capacity_and_go_on(world: World) -> None:
    world.broker("--task", "train=tokens", "--capacity-mib", "1")
    async with TransferQueue.connect(world.folder) as queue:
        producers = [world.far("fill", str(first), "20") for first in (0, 100)]
        reasons = [await asyncio.to_thread(producer.told) for producer in producers]
        assert all("payloads fill the capacity" in reason for reason in reasons)
        assert (await memory(queue))["payload_bytes"] <= (1 << 20) + 2 * 101 * KIB
        waits = (await queue.statistics())["broker"]["waits"]
        assert sorted(await drain(queue, 40)) == [*range(20), *range(100, 120)]
        waits = (await queue.statistics())["broker"]["waits"]
        assert waits["over"]["room"]["waits"] >= 2 and waits["over"]["room"]["total_s"] > 0
        assert [await asyncio.to_thread(producer.told) for producer in producers] == ["done", "done"]


async def test_durable_payloads_outlive_the_host_and_its_shared_memory(world: World) -> None:
    broker = world.far("host", '{"durable": true}')
    await asyncio.to_thread(broker.told)
    async with TransferQueue.connect(world.folder) as queue:
        await queue.put([sample(n) for n in range(5)])
        broker.kill()
        assert world.shm() is None
        broker = world.far("host", '{"durable": true}')
        await asyncio.to_thread(broker.told)
        assert await drain(queue, 2, "judge") == [0, 1]
    # All processes of before have ended.
    broker.kill()
    broker = world.far("host", '{"durable": true}')
    await asyncio.to_thread(broker.told)
    async with TransferQueue.connect(world.folder) as queue:
        assert await drain(queue, 3, "judge") == [2, 3, 4]


async def test_payloads_in_memory_that_is_gone_are_lost_and_the_queue_goes_on(world: World) -> None:
    broker = world.far("host")
    await asyncio.to_thread(broker.told)
    async with TransferQueue.connect(world.folder) as queue:
        await queue.put([sample(n) for n in range(5)])
    broker.kill()
    shm = world.shm()
    assert shm is not None and any(shm.iterdir())
    shutil.rmtree(shm)
    broker = world.far("host")
    await asyncio.to_thread(broker.told)
    assert world.shm() != shm
    async with TransferQueue.connect(world.folder) as queue:
        samples = await queue.client.api.account()
        assert samples["lost"] == 5 and samples["ready"] == 0
        await queue.put([sample(9)])
        assert await drain(queue, 1, "judge") == [9]


async def test_a_host_whose_journal_could_not_be_written_begins_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with TransferQueue.serve(tmp_path / "queue", {"train": ["tokens"]}) as queue:
        await queue.put([sample(0)])
        assert queue.host is not None and queue.host.broker is not None
        failed = queue.host.broker
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, failed._journal._fd)
        os.close(full)
        async with asyncio.timeout(120):
            await queue.put([sample(1)])
            assert await drain(queue, 2) == [0, 1]
        assert queue.host.broker is not failed
        assert "its broker failed and begins again" in caplog.text and "No space left" in caplog.text


async def test_memory_of_queues_that_are_no_more_is_removed_and_that_of_living_ones_is_not(world: World) -> None:
    other = world.folder.parent / "other"
    broker = world.broker("--task", "train=tokens")
    shm = world.shm()
    assert shm is not None and shm.is_dir()
    # Its folder cannot be seen any more, but it lives.
    hidden = world.folder.rename(world.folder.parent / "hidden")
    async with TransferQueue.serve(other, {"train": ["tokens"]}):
        assert shm.is_dir()
    broker.kill()
    hidden.rename(world.folder)
    async with TransferQueue.serve(other, {"train": ["tokens"]}):
        assert shm.is_dir()
    world.folder.rename(hidden)
    async with TransferQueue.serve(other, {"train": ["tokens"]}):
        assert not shm.exists()


@pytest.mark.parametrize("how", ["rows", "columns"])
async def test_who_waits_for_room_when_the_queue_is_left_is_told(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "queue"
    async with TransferQueue.serve(folder, {"train": ["tokens"]}, capacity_bytes=1 << 20):
        async with TransferQueue.connect(folder, capacity_bytes=1 << 20, slab_bytes=256 * KIB) as producer:
            await producer.put([sample(n) for n in range(8)], wait_s=20)
            more = [sample(n) for n in range(8)]
            columns = {"tokens": np.stack([one["tokens"] for one in more]), "n": np.arange(8)}
            putting = asyncio.create_task(producer.put(more if how == "rows" else columns, wait_s=60))
            await until(lambda: bool(producer.waiting_on))
        async with asyncio.timeout(120):
            with pytest.raises(Refused, match=r"may have been (put|carried out, or not)"):
                await putting
