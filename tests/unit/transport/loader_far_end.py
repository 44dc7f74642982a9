"""Ends of a queue for the loader's tests. As a program, a rank: `folder dp_rank replica mode steps pause_s`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from relax_rt.transport.queue.api import QueueApi, SampleKey
from relax_rt.transport.queue.broker import Broker
from relax_rt.transport.queue.client import QueueClient
from relax_rt.transport.queue.ledger import LedgerPolicy, QueueLimits
from relax_rt.transport.queue.loader.plan import Packing
from relax_rt.transport.queue.loader.streaming import Step, StreamingLoader
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import Client, Server, make_hello

RUN_ID = "0badcafe"
TASK = "reference"
FREE = LedgerPolicy(tasks={TASK: ("tokens",)}, step_task="")
DP_SIZE, REPLICAS, BATCH, MAX_TOKENS = 2, 2, 12, 300


def length_of(number: int) -> int:
    return 20 + number * 37 % 180


def sample(number: int) -> dict[str, Any]:
    return {"number": number, "tokens": np.arange(number, number + length_of(number), dtype=np.int32)}


@asynccontextmanager
async def serve(folder: Path, policy: LedgerPolicy = FREE, **limits: Any) -> AsyncIterator[Broker]:
    (folder / "shm").mkdir(exist_ok=True)
    made = Broker(folder / "queue", folder / "shm", run_id=RUN_ID, policy=policy, limits=QueueLimits(**limits))
    await made.open()
    server = Server(make_hello(RUN_ID, Incarnation("queue/0", 1)))
    server.offer(QueueApi, made)
    await server.listen(f"unix://{folder}/queue.sock")
    try:
        yield made
    finally:
        await server.close()
        await made.close()


@asynccontextmanager
async def connect(folder: Path, slot: str, epoch: int = 1) -> AsyncIterator[QueueClient]:
    who = Incarnation(slot, epoch)
    rpc = Client(f"unix://{folder}/queue.sock", make_hello(RUN_ID, who))
    client = QueueClient(
        rpc.bind(QueueApi, timeout_s=120.0),
        who,
        folder / "shm",
        slab_bytes=1 << 16,
        capacity_bytes=1 << 20,
        length_field="tokens",
    )
    try:
        async with client:
            yield client
    finally:
        await rpc.close()


def columns_of(step: Step) -> dict[SampleKey, dict[str, Any]]:
    return {one.key: {"sum": int(one["tokens"].sum())} for one in step.samples}


def seen(step: Step) -> dict[str, Any]:
    """What a rank saw of a step, for a line of JSON."""
    micro = [[int(one["number"]) for one in micro.samples] for micro in step]
    digests = [int(part.packed("tokens").values.sum()) for part in step]
    return {"index": step.index, "micro": micro, "sums": digests, "tokens": step.tokens, "lease": step.batch.lease}


async def rank(folder: Path, dp_rank: int, replica: int, mode: str, steps: int, pause_s: float) -> None:
    slot = f"trainer/{dp_rank * REPLICAS + replica}"
    async with connect(folder, slot) as queue:
        loader = StreamingLoader(
            queue,
            TASK,
            dp_rank=dp_rank,
            dp_size=DP_SIZE,
            replica=replica,
            replicas=REPLICAS,
            groups=BATCH,
            packing=Packing(max_tokens=MAX_TOKENS),
            columns=["tokens", "number"],
            mode="step" if mode == "step" else "stream",
            steps=steps,
            wait_s=60.0,
        )
        async with loader:
            async for step in loader:
                os.write(1, json.dumps(seen(step)).encode() + b"\n")
                await asyncio.sleep(pause_s)
                await step.done(columns_of(step) if replica == 0 else None)


if __name__ == "__main__":
    _, where, dp, tp, kind, count, pause = sys.argv
    asyncio.run(rank(Path(where), int(dp), int(tp), kind, int(count), float(pause)))
