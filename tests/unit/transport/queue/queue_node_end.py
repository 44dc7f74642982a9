"""Ends of a queue on two nodes that share no memory: the host puts tokens, the worker on the other node rewards."""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from relax_rt.transport import TransferQueue

SAMPLES, TOKENS, REWARDS = 24, 30_000, 20_000
TASKS = {"judge": ["tokens", "image"], "train": ["tokens", "reward"]}
IMAGE = bytes(range(256)) * 64


def tell(line: str) -> None:
    """To the test."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def host(folder: str, listen: str) -> None:
    async with TransferQueue.serve(folder, TASKS, listen=listen) as queue:
        assert queue.host is not None and queue.host.location is not None
        tell(queue.host.location.addresses[-1])
        samples = [{"tokens": np.full(TOKENS + n, n, np.int32), "image": IMAGE} for n in range(SAMPLES)]
        await queue.put(samples)
        total, seen = 0.0, 0
        while seen < SAMPLES:
            batch = await queue.lease("train", samples=8, wait_s=30.0)
            assert batch, batch.waiting_on
            seen += len(batch)
            for sample in batch.samples:
                # The reward lies on the other node, the tokens on this one.
                assert sample["reward"].shape == (REWARDS,) and (sample["reward"] == sample["tokens"][0] * 0.5).all()
                total += float(sample["reward"][-1])
            await queue.complete(batch)
        tell(f"{total} {await fetched(queue)}")


async def worker(address: str, keys: str) -> None:
    async with TransferQueue.connect(address, keys=keys) as queue:
        seen = 0
        while seen < SAMPLES:
            batch = await queue.lease("judge", samples=5, wait_s=30.0)
            assert batch, batch.waiting_on
            kept = [sample["tokens"] for sample in batch.samples]
            assert all(sample["image"] == IMAGE for sample in batch.samples)
            rewards = {sample.key: {"reward": np.full(REWARDS, sample["tokens"][0] * 0.5)} for sample in batch.samples}
            await queue.complete(batch, rewards)
            # What was fetched stays good, whatever became of the lease.
            assert all((tokens == tokens[0]).all() and len(tokens) == TOKENS + tokens[0] for tokens in kept)
            seen += len(batch)
        tell(f"{seen} {await fetched(queue)}")
        # Its payloads are here until the host has read them.
        await asyncio.to_thread(sys.stdin.readline)


async def fetched(queue: TransferQueue) -> int:
    """Bytes that came from other nodes."""
    fetcher = queue.client._fetcher
    return 0 if fetcher is None else fetcher.statistics().bytes_in


if __name__ == "__main__":
    asyncio.run({"host": host, "worker": worker}[sys.argv[1]](*sys.argv[2:]))
