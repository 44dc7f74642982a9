"""Arrays over shared memory: they stay what they are as long as anything refers to them, and no longer keep memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transfer_queue_world import World, settled

from relax_rt.transport import TransferQueue

ROUNDS = 300


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as made:
        yield made


async def memory(queue: TransferQueue) -> dict[str, int]:
    """What is pinned, as the broker sees it."""
    stats = (await queue.statistics())["broker"]
    return {**stats["memory"], **stats["leases"]}


async def pinned_by(queue: TransferQueue, views: int) -> int:
    """Leases that are pinned, once the broker has heard of all views that are gone."""

    async def both() -> tuple[int, int]:
        stats = await queue.statistics()
        return stats["client"]["pinned_leases"], stats["broker"]["leases"]["ended_but_pinned"]

    mine, theirs = await settled(both, lambda now: 0 < now[0] <= views and now[0] == now[1])
    assert mine == theirs
    return theirs


async def until_free(queue: TransferQueue) -> None:
    await settled(lambda: memory(queue), lambda now: not now["ended_but_pinned"] and not now["extents"])


async def test_arrays_outlive_their_lease_while_producers_write_at_full_rate(world: World) -> None:
    world.broker("--task", "train=tokens", "--capacity-mib", "2")
    dice = random.Random(7)
    kept: list[tuple[int, Any]] = []
    async with TransferQueue.connect(world.folder) as queue:
        producer = world.far("flood")
        seen: set[int] = set()
        while len(seen) < ROUNDS:
            batch = await queue.lease("train", samples=dice.randint(1, 3), wait_s=30)
            assert batch, batch.waiting_on
            for sample in batch.samples:
                n = sample["n"]
                if dice.random() < 0.3:
                    array = sample["tokens"]
                    kept.append((n, dice.choice([array, array[10:], array.reshape(2, -1)[1], array.view(np.uint8)])))
            if dice.random() < 0.2:
                await queue.release(batch, "for the next")
            else:
                seen.update(batch.values("n"))
                await queue.complete(batch)
            while len(kept) > 5:
                kept.pop(dice.randrange(len(kept)))
            for n, array in kept:
                assert (array.view(np.int32) == n).all(), f"what sample {n} held was overwritten"
            n, array = 0, None
        del array, sample
        held = await pinned_by(queue, len(kept))
        # The same memory over and over.
        stats = (await queue.statistics())["broker"]
        assert stats["memory"]["slabs"] <= 4
        producer.kill()
        while batch := await queue.lease("train", samples=100, wait_s=0.2):
            await queue.complete(batch)
        del batch
        await settled(lambda: memory(queue), lambda now: now["ended_but_pinned"] == held)
        kept.clear()
        await until_free(queue)
        assert (await queue.statistics())["client"]["pinned_leases"] == 0


async def test_what_a_killed_reader_held_comes_free(world: World) -> None:
    world.broker("--task", "train=tokens")
    async with TransferQueue.connect(world.folder) as queue:
        readers = [world.far("hold") for _ in range(2)]
        await queue.put([{"tokens": np.full(5000, 3, np.int32)}])
        await queue.put([{"tokens": np.full(5000, 4, np.int32)}])
        assert {reader.told() for reader in readers} == {3, 4}
        held = await memory(queue)
        assert held["ended_but_pinned"] == held["extents"] == 2 and held["payload_bytes"] > 2 * 20_000
        assert (await queue.statistics())["client"]["arena"]["used_bytes"] > 2 * 20_000
        readers[0].kill()
        now = await settled(lambda: memory(queue), lambda now: now["ended_but_pinned"] != 2)
        assert now["ended_but_pinned"] == now["extents"] == 1
        readers[1].tell()
        assert readers[1].wait() == 0
        await until_free(queue)
        # The next answer tells the producer.
        await queue.put([{"tokens": np.zeros(2, np.int32)}])
        assert (await queue.statistics())["client"]["arena"]["used_bytes"] == 0


async def test_arrays_of_a_batch_that_was_forgotten_stay_good(world: World) -> None:
    world.broker("--task", "train=tokens")
    async with TransferQueue.connect(world.folder, capacity_bytes=1 << 16, slab_bytes=1 << 16) as queue:
        await queue.put([{"tokens": np.full(5000, 3, np.int32)}])
        kept = (await queue.lease("train", samples=1, wait_s=30)).samples[0]["tokens"]
        for n in range(20):
            await queue.put([{"tokens": np.full(5000, n, np.int32)}])
            batch = await queue.lease("train", samples=2, wait_s=30)
            await queue.complete(batch)
            assert (kept == 3).all()
        del kept
        await until_free(queue)
