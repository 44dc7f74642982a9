"""Processes for test_queue_processes: `broker <dir>` and `producer <dir> <epoch>`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import numpy as np

from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.queue.broker import Broker
from relax_rt.transport.queue.client import NewSample, QueueClient
from relax_rt.transport.queue.ledger.messages import SampleKey, VersionSpan
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import RpcClient, RpcServer, make_hello

RUN_ID = "0badcafe"
POLICY = LedgerPolicy(
    group_size=2,
    prompts_per_step=2,
    max_staleness=float("inf"),
    tasks={"reward": ("tokens",), "train": ("tokens", "reward")},
)
LIMITS = QueueLimits(lease_s=60.0, capacity_bytes=256 << 10)


def tokens(key: SampleKey) -> np.ndarray:
    """What a sample holds, derived from its key."""
    return np.random.default_rng([key.group, key.member]).integers(0, 1000, 300 + key.group % 50).astype(np.int32)


def connect(folder: Path, who: Incarnation) -> tuple[RpcClient, QueueClient]:
    rpc = RpcClient(f"unix://{folder}/queue.sock", make_hello(RUN_ID, who))
    queue = QueueClient(
        rpc.bind(QueueApi, timeout_s=120.0), who, folder / "shm", slab_bytes=1 << 16, capacity_bytes=1 << 20
    )
    return rpc, queue


async def broker(folder: Path) -> None:
    made = Broker(
        folder / "queue",
        folder / "shm",
        run_id=RUN_ID,
        policy=POLICY,
        limits=LIMITS,
        segment_bytes=32 << 10,
        fsync_every_s=0.05,
    )
    await made.open()
    server = RpcServer(make_hello(RUN_ID, Incarnation("queue/0", 1)))
    server.offer(QueueApi, made)
    await server.listen(f"unix://{folder}/queue.sock")
    await made.run()


async def producer(folder: Path, epoch: int) -> None:
    _, queue = connect(folder, Incarnation("rollout/0", epoch))
    async with queue:
        while True:
            for ticket in (await queue.admit(1, 2, wait_s=10)).tickets:
                for member in ticket.wanted():
                    key = SampleKey(ticket.group, member)
                    await queue.put_samples([NewSample(key, {"tokens": tokens(key)}, [VersionSpan(0, 300, 1, 1)])])
                    os.write(1, f"{key.group} {key.member}\n".encode())
                    await asyncio.sleep(0.002)


if __name__ == "__main__":
    if sys.argv[1] == "broker":
        asyncio.run(broker(Path(sys.argv[2])))
    else:
        asyncio.run(producer(Path(sys.argv[2]), int(sys.argv[3])))
