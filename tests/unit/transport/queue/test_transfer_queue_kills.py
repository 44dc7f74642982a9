"""Brokers killed at any instant and started again by other processes, while producers put and consumers take."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transfer_queue_far_end import CHAIN, chained
from transfer_queue_world import World, settled

from relax_rt.transport import TransferQueue
from relax_rt.transport.queue.ledger.messages import SampleKey

KILLS = 7


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as made:
        yield made


async def judge(queue: TransferQueue, stop: asyncio.Event) -> None:
    while not stop.is_set():
        batch = await queue.lease("judge", samples=16, wait_s=0.2)
        rewards = {sample.key: {"reward": sample["n"] * 0.5} for sample in batch.samples}
        await queue.complete(batch, rewards)


async def train(queue: TransferQueue, stop: asyncio.Event, seen: Counter[int]) -> list[SampleKey]:
    keys: list[SampleKey] = []
    while not stop.is_set():
        batch = await queue.lease("train", samples=16, wait_s=0.2)
        for sample in batch.samples:
            n = sample["n"]
            np.testing.assert_array_equal(sample["tokens"], chained(n))
            assert sample["reward"] == n * 0.5
            seen[n] += 1
        keys += batch.keys
        await queue.complete(batch)
    return keys


async def more_than(seen: Counter[int], n: int) -> None:
    await settled(lambda: asyncio.sleep(0, sum(seen.values())), lambda now: now > n)


async def test_nothing_acknowledged_is_lost_and_nothing_comes_twice(world: World) -> None:
    dice = random.Random(3)
    broker = world.far("host")
    broker.told()
    producers = [world.far("produce", str(first)) for first in (0, 1_000_000)]
    seen: Counter[int] = Counter()
    stop = asyncio.Event()
    async with (
        TransferQueue.connect(world.folder) as judging,
        TransferQueue.connect(world.folder) as training,
    ):
        work = [asyncio.create_task(judge(judging, stop)), asyncio.create_task(train(training, stop, seen))]
        for _ in range(KILLS):
            await more_than(seen, sum(seen.values()))
            await asyncio.sleep(dice.uniform(0.0, 0.15))
            broker.kill()
            broker = world.far("host")
        await asyncio.to_thread(broker.told)
        for producer in producers:
            producer.tell()
        puts = [await asyncio.to_thread(producer.told) for producer in producers]
        assert [producer.wait() for producer in producers] == [0, 0]
        # The last broker is this process.
        broker.kill()
        async with TransferQueue.serve(world.folder, {task: list(fields) for task, fields in CHAIN.items()}) as queue:
            await more_than(seen, sum(puts) - 1)
            stop.set()
            _, keys = await asyncio.gather(*work)
            account = await queue.client.api.account()
            assert all(end.client.statistics().calls.unanswered == 0 for end in (judging, training))
    assert seen == dict.fromkeys([*range(puts[0]), *range(1_000_000, 1_000_000 + puts[1])], 1)
    assert len(keys) == len(set(keys)) == account["finished"] == sum(puts)
    assert sum(puts) > 20 * KILLS and account["ready"] == account["leased"] == 0


def nbytes(folder: Path) -> int:
    """Of all files in it that are still there."""
    found = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


async def recorded(queue: TransferQueue) -> int:
    """Records that the journal has had."""
    n: int = (await queue.statistics())["broker"]["journal"]["records"]
    return n


async def test_the_journal_stays_small_over_many_segments(world: World) -> None:
    journal = world.folder / "journal"
    broker = world.far("host", "{}", "", "8192")
    await asyncio.to_thread(broker.told)
    async with TransferQueue.connect(world.folder) as queue:

        async def turn(first: int) -> None:
            await queue.put([{"tokens": chained(n), "n": n} for n in range(first, first + 20)])
            for task in CHAIN:
                batch = await queue.lease(task, samples=20, wait_s=30)
                reward = {"reward": 1.0} if task == "judge" else {}
                await queue.complete(batch, dict.fromkeys(batch.keys, reward) if reward else None)

        snapshots = 0
        while snapshots < 12:
            await turn(0)
            snapshots = (await queue.statistics())["broker"]["journal"]["snapshots"]
        # Of the twelve and more segments that were full, no more than the last few are left.
        await settled(lambda: asyncio.to_thread(nbytes, journal), lambda now: now < 5 * 8192)
        assert len(list(journal.iterdir())) <= 6
        before, records = await queue.client.api.account(), await recorded(queue)
        broker.kill()
        broker = world.far("host", "{}", "", "8192")
        await asyncio.to_thread(broker.told)
        assert await queue.client.api.account() == before
        assert await recorded(queue) >= records
        await turn(0)
