"""A rank of a gang of two, each of which stands for a node: memory, payload cache and process of its own.

``python share_far_end.py RANK FOLDER``. Rank 0 has the queue and the engine, whose payload lies on a third "node", and
writes to answer.json what each node received and computed; rank 1 follows it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch.distributed as dist
from packing_samples import make_sample
from queue_parts import ENGINE, JUDGE, TRAINER, World, calls_of, world

from relax_rt.roles.base.sample import Sample, content_digest, generated_columns, read_sample
from relax_rt.roles.training.backend.channel import all_gather_values
from relax_rt.roles.training.backend.gang import Follower, Leader
from relax_rt.roles.training.backend.shares import LeaseReader
from relax_rt.roles.training.step import StepBatch, sampled_entropy
from relax_rt.transport.memory.payload_fetcher import Fetcher
from relax_rt.transport.memory.payload_server import PayloadServer
from relax_rt.transport.queue.batch import LeasedBatch
from relax_rt.transport.queue.client import NewSample
from relax_rt.transport.queue.ledger.messages import SampleKey, VersionSpan

GROUPS, TOKENS = 4, 2000


class Rank:
    """A rank that takes each sample's tokens for its log-probabilities, and notes what it computes gradients of."""

    takes_branches = False

    def __init__(self, rank: int, group: Any) -> None:
        self.ranks = SimpleNamespace(
            rank=rank,
            replica=rank,
            replicas=2,
            reports_loss=True,
            control=group,
            gather=lambda value: all_gather_values(value, group),
        )
        self.objective: Any = SimpleNamespace(
            needs=frozenset(), updates_per_step=1, state=dict, restore=lambda _: None, count=len
        )
        self.computed: list[list[float]] = []

    def log_probabilities(self, samples: Sequence[Sample]) -> list[Any]:
        return [sample.tokens.astype(np.float32) for sample in samples]

    def accumulate(self, samples: Sequence[Sample]) -> None:
        for one in samples:
            assert one.advantages is not None
            self.computed.append([one.meta.group, one.meta.member, int(one.tokens.sum()), float(one.advantages[-1])])

    def snapshot(self) -> None:
        """Tell rank 0 what was computed."""
        self.told = self.ranks.gather(json.dumps(self.computed))


def reader(rank: int, folder: Path, locate: Callable[[list[str]], dict[str, str]]) -> LeaseReader:
    memory = folder / f"node-{rank}"
    memory.mkdir()
    return LeaseReader(f"node-{rank}", locate, memory, None, Fetcher(None))


async def filled(made: World) -> LeasedBatch:
    """A lease of whole groups of long samples, whose payload rank 0 does not fetch."""
    for ticket in (await made.engine.admit(1, GROUPS, wait_s=0)).tickets:
        for member in range(ticket.size):
            completion = [(ticket.group * 7 + member + place) % 50 for place in range(TOKENS)]
            sample = make_sample(ticket.group, member, [1, 2, 3], completion)
            key, span = SampleKey(ticket.group, member), VersionSpan(0, TOKENS + 3, 1, 1)
            await made.engine.put_samples([NewSample(key, generated_columns(sample), [span])])
    while judged := await made.judge.lease("reward", samples=64, wait_s=0):
        columns = {key: {"reward": np.float32(key.member), "rewards": {}} for key in judged.keys}
        await made.judge.complete(judged, columns)
    return await made.trainer.lease("train", groups=GROUPS, wait_s=0, fetch=False)


async def lead(folder: Path, group: Any) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    async with world(folder, prompts_per_step=GROUPS) as made, AsyncExitStack() as stack:
        server = PayloadServer(folder / "shm", keys=None)
        stack.push_async_callback(server.close)
        await server.listen("tcp://127.0.0.1:0")
        for who in (ENGINE, JUDGE):
            await calls_of(made, who).register("producers", server.address)
        (folder / "address.partial").write_text(server.address)
        (folder / "address.partial").rename(folder / "address")

        def locate(owners: list[str]) -> dict[str, str]:
            asked = calls_of(made, TRAINER).payload_servers(owners)
            return asyncio.run_coroutine_threadsafe(asked, loop).result()

        backend: Any = Rank(0, group)
        leader = Leader(backend, reader(0, folder, locate))
        lease = await filled(made)
        # The payload is in this process's reach all the same: this is what a rank that has all of it would see.
        whole = [read_sample(one) for one in lease.samples]
        samples, received = await asyncio.to_thread(leader.read, lease, True)
        batch = StepBatch()
        batch.add(lease, samples)
        held = sum(bool(sample.tokens.any()) for sample in samples)
        for sample in samples:
            sample.advantages = np.full(len(sample.tokens), sample.reward, np.float32)
        values = await asyncio.to_thread(leader.log_probabilities, samples)
        await asyncio.to_thread(leader.accumulate, samples)
        await asyncio.to_thread(leader.snapshot)
        await asyncio.to_thread(leader.close)
        return {
            "received": received,
            "payload": sum(ref.extent.nbytes for ref in lease.refs if ref.extent is not None),
            "held": held,
            "computed": [json.loads(one) for one in backend.told],
            "wanted": [[s.meta.group, s.meta.member, int(s.tokens.sum()), s.reward] for s in whole],
            "values_are_tokens": all((v == s.tokens).all() for v, s in zip(values, whole, strict=True)),
            "digests_agree": batch.digests == [content_digest(sample) for sample in whole],
            "masks_agree": all((a.loss_mask == b.loss_mask).all() for a, b in zip(samples, whole, strict=True)),
            "behaviour_agrees": all(
                (a.behaviour_logprobs == b.behaviour_logprobs).all() for a, b in zip(samples, whole, strict=True)
            ),
            "entropies": [sampled_entropy(samples), sampled_entropy(whole)],
        }


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    group = dist.group.WORLD
    if rank == 0:
        (folder / "answer.json").write_text(json.dumps(asyncio.run(lead(folder, group))))
    else:

        def locate(owners: list[str]) -> dict[str, str]:
            return dict.fromkeys(owners, (folder / "address").read_text())

        backend: Any = Rank(1, group)
        Follower(backend, lease_reader=reader(1, folder, locate)).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
