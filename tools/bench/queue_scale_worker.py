"""A producer or consumer process of tools/bench/queue_scale.py; its orders are one JSON object, the only argument."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from relax_rt.transport import TransferQueue

WAIT_S = 5.0


class Orders:
    """What main asked for, and the place for the counts."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.queue, self.results = Path(given["queue"]), Path(given["results"])
        self.samples, self.sessions, self.producers = given["samples"], given["sessions"], given["producers"]
        path = self.results / "counters"
        self.counters = np.memmap(path, dtype=np.int64, mode="r+", shape=(given["places"],))


async def produce(orders: Orders, me: int) -> None:
    """Run this process's share of the sessions."""
    payload = np.arange(orders.given["bytes"], dtype=np.uint8)
    acknowledged = 0

    async def session(queue: TransferQueue, first: int) -> None:
        nonlocal acknowledged
        for sample in range(first, orders.samples, orders.sessions):
            data = payload.copy()
            data[:8] = np.array([sample], dtype=np.int64).view(np.uint8)
            await queue.put([{"id": np.int64(sample), "data": data}])
            acknowledged += 1
            orders.counters[me] = acknowledged

    async with TransferQueue.connect(orders.queue) as queue:
        async with asyncio.TaskGroup() as sessions:
            for first in range(me, orders.sessions, orders.producers):
                sessions.create_task(session(queue, first))
        # Others read the payloads from this process's memory.
        while orders.counters[orders.producers :].min() < orders.samples:  # noqa: ASYNC110 - other processes count
            await asyncio.sleep(0.1)


async def consume(orders: Orders, task: str, place: int) -> None:
    """Take, check and finish until every sample has been seen."""
    counts = np.zeros(orders.samples, dtype=np.uint8)
    missing = orders.samples
    try:
        async with TransferQueue.connect(orders.queue) as queue:
            while missing:
                batch = await queue.lease(task, samples=orders.given["batch"], wait_s=WAIT_S)
                if not batch:
                    continue
                ids = check(batch)
                await queue.complete(batch)
                missing -= int((counts[ids] == 0).sum())
                np.add.at(counts, ids, 1)
                orders.counters[place] = orders.samples - missing
    finally:
        np.save(orders.results / f"{task}.npy", counts)


def check(batch: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Ids of the samples; each is also the first eight bytes of its data."""
    ids = np.fromiter((sample["id"] for sample in batch.samples), dtype=np.int64, count=len(batch.samples))
    found = np.fromiter((sample["data"][:8].view(np.int64)[0] for sample in batch.samples), np.int64, len(ids))
    if not np.array_equal(ids, found):
        raise SystemExit(f"payloads of other samples: {ids[ids != found][:5]} hold {found[ids != found][:5]}")
    return ids


async def main(given: dict[str, Any]) -> None:
    orders = Orders(given)
    if "produce" in given:
        await produce(orders, given["produce"])
        return
    places = {task: orders.producers + i for i, task in enumerate(given["tasks"])}
    await asyncio.gather(*(consume(orders, task, places[task]) for task in given["consume"]))


if __name__ == "__main__":
    uvloop.run(main(json.loads(sys.argv[1])))
