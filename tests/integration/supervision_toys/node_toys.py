"""Toys that talk to each other, wherever they run; named in a config by file."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, ClassVar, Protocol

import numpy as np
from supervision_toys import Toy, ToyJob

from relax_rt.cluster import discovery
from relax_rt.transport.queue.client import QueueClient
from relax_rt.transport.queue.ledger.policy import LedgerPolicy
from relax_rt.transport.rpc.errors import RelaxError
from relax_rt.transport.rpc.rpc import idempotent


class EchoApi(Protocol):
    @idempotent
    async def echo(self, text: str) -> str: ...


class Echo(Toy):
    """Answers, and says from where."""

    async def setup(self) -> None:
        self.ctx.serve(EchoApi, self)

    async def echo(self, text: str) -> str:
        return f"{self.ctx.who} on {self.ctx.node}: {text}"  # type: ignore[attr-defined]


def ask(run_dir: str) -> None:
    """Call echo/0 from a program that is no role; the run is found by a directory."""

    async def call() -> None:
        async with discovery.connect(run_dir) as run:
            sys.stdout.write(f"{run.run_id} {await run.actor('echo/0', EchoApi).echo('hello')}\n")

    asyncio.run(call())


class Caller(Toy):
    """Calls echo/0 again and again; tells each answer that differs from the one before."""

    async def run(self) -> None:
        echo = await self.ctx.peer("echo/0", EchoApi, timeout_s=1.0)
        await self.ctx.ready()
        before = ""
        while not self.ctx.stopping.is_set():
            try:
                answer = await echo.echo("hello")
            except RelaxError as error:
                answer = ""
                self.ctx.progress.advance(1, str(error))
            else:
                self.ctx.progress.advance(1, "called")
            if answer and answer != before:
                before = answer
                self.ctx.event("echoed", answer=answer)
            await asyncio.sleep(0.05)


class JudgedJob(ToyJob):
    """A queue without prompts: tokens are judged, then read with their reward."""

    def ledger_policy(self, config: Any) -> LedgerPolicy:
        return LedgerPolicy(tasks={"judge": ("tokens",), "read": ("tokens", "reward")}, step_task="")


class AtQueue(Toy):
    """Has an end of the queue."""

    MIB: ClassVar[int] = 1 << 20

    async def run(self) -> None:
        ctx = self.ctx
        client = QueueClient(
            await ctx.queue(),
            ctx.who,
            ctx.payload_dir,
            spill_dir=ctx.spill_dir,
            slab_bytes=self.MIB,
            capacity_bytes=16 * self.MIB,
            fetcher=ctx.fetcher,
            fetch_s=10.0,
        )
        async with client:
            await ctx.ready()
            while not ctx.stopping.is_set():
                self.ctx.progress.advance(await self.work(client), "working")

    async def work(self, client: QueueClient) -> int:
        raise NotImplementedError


class Producer(AtQueue):
    """Puts 20,000 tokens at a time."""

    made = 0

    async def work(self, client: QueueClient) -> int:
        await client.put([{"tokens": np.full(20_000, self.made, np.int32)}])
        self.made += 1
        await asyncio.sleep(0.02)
        return 1


class Judge(AtQueue):
    """Puts a reward of 10,000 numbers to each sample, half its first token."""

    async def work(self, client: QueueClient) -> int:
        batch = await client.lease("judge", samples=4, wait_s=0.5)
        if not batch:
            return 1
        for sample in batch.samples:
            tokens = sample["tokens"]
            assert len(tokens) == 20_000 and (tokens == tokens[0]).all()
        rewards = {s.key: {"reward": np.full(10_000, s["tokens"][0] * 0.5)} for s in batch.samples}
        await client.complete(batch, rewards)
        return len(batch)


class ReadBack(AtQueue):
    """Reads tokens and rewards, and tells once it has read fifty that were right."""

    read = 0

    async def work(self, client: QueueClient) -> int:
        batch = await client.lease("read", samples=4, wait_s=0.5)
        for sample in batch.samples:
            assert (sample["reward"] == sample["tokens"][0] * 0.5).all() and len(sample["reward"]) == 10_000
            self.read += 1
            if self.read % 50 == 0:
                assert self.ctx.fetcher is not None
                self.ctx.event("read", samples=self.read, bytes_in=self.ctx.fetcher.statistics().bytes_in)
        if batch:
            await client.complete(batch)
        return 1
