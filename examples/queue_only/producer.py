"""Serves the queue of the folder ./queue, puts "generated" samples on it, and scores them as a second task would."""

import asyncio

import numpy as np

from relax_rt.transport import TransferQueue

TASKS = {"score": ["tokens"], "train": ["tokens", "reward"]}


async def main() -> None:
    rng = np.random.default_rng(0)
    async with TransferQueue.serve("queue", tasks=TASKS, fields={"tokens": "int32[*]", "reward": "float32"}) as queue:
        for step in range(40):
            lengths = rng.integers(5, 50, size=8)
            await queue.put([{"tokens": rng.integers(0, 1000, size=n, dtype=np.int32)} for n in lengths])
            batch = await queue.lease("score", samples=8, wait_s=5)
            await queue.complete(batch, {s.key: {"reward": float(s["tokens"].mean())} for s in batch.samples})
            print(f"step {step}: put and scored {len(batch)} samples", flush=True)
            await asyncio.sleep(0.25)
        await asyncio.sleep(6)  # for the consumer


asyncio.run(main())
