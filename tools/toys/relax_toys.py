"""Roles without a model, and a job for them, found by entry point: what benchmarks and soaks run.

`idler` does nothing but tick; `maker` puts small samples on the queue, `eater` takes them in steps of one batch, with
versions and a roll-back after each death, as rollouts and a trainer do.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from relax_rt.config.job import Job
from relax_rt.config.schema import RoleSettings
from relax_rt.interfaces.role import Role
from relax_rt.transport.base.versions import ROOT, VersionRecord
from relax_rt.transport.queue.client import NewSample, QueueClient
from relax_rt.transport.queue.ledger.messages import SampleKey, VersionSpan
from relax_rt.transport.queue.ledger.policy import LedgerPolicy
from relax_rt.transport.rpc.errors import RelaxError

GROUP, GROUPS_A_STEP, TOKENS = 4, 4, 32
SAVE_EVERY = 5
WAIT_S = 0.5


class ToySettings(RoleSettings):
    """Of all toys."""

    pause_s: float = 0.05
    """Between two pieces of work."""


class Toy(Role):
    """Base."""

    tier: ClassVar[int] = 40
    Settings: ClassVar[type[RoleSettings]] = ToySettings
    _worked = False

    @property
    def pause_s(self) -> float:
        return float(self.ctx.settings.pause_s)  # type: ignore[attr-defined]

    def worked(self, detail: str) -> None:
        if not self._worked:
            self._worked = True
            self.ctx.event("first_work", what=detail)
        self.ctx.progress.advance(1, detail)

    async def wait(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.pause_s):
                await self.ctx.stopping.wait()

    async def open_queue(self) -> QueueClient:
        client = QueueClient(
            await self.ctx.queue(),
            self.ctx.who,
            self.ctx.payload_dir,
            spill_dir=self.ctx.spill_dir,
            slab_bytes=1 << 20,
            capacity_bytes=4 << 20,
            length_field="tokens",
            on_wait=self.ctx.progress.waiting,
        )
        return await client.__aenter__()


class Idler(Toy):
    """Ready at once, works in small steps."""

    kind = "idler"

    async def run(self) -> None:
        await self.ctx.ready()
        while not self.ctx.stopping.is_set():
            self.worked("ticking")
            await self.wait()


class Maker(Toy):
    """Puts groups on the queue, as the committed version."""

    kind = "maker"

    async def run(self) -> None:
        queue = await self.open_queue()
        await self.ctx.ready()
        while not self.ctx.stopping.is_set():
            known = await self.ctx.registry.versions()
            if not known:
                await self.wait()
                continue
            version = known[-1].version
            answer = await queue.admit(version, 2, wait_s=WAIT_S)
            for ticket in answer.tickets:
                span = VersionSpan(0, TOKENS, version, version)
                column = np.full(TOKENS, ticket.prompt % 1000, np.int32)
                keys = [SampleKey(ticket.group, member) for member in ticket.wanted()]
                await queue.put_samples([NewSample(key, {"tokens": column}, [span]) for key in keys])
                self.worked(f"version {version}")
            await self.wait()
        await queue.close()


class Eater(Toy):
    """Takes a batch a step, publishes a version, and writes a mark every few steps, from which it goes on."""

    kind = "eater"

    async def run(self) -> None:
        queue = await self.open_queue()
        mark = self.ctx.run_dir / "eater.json"
        state = json.loads(mark.read_text()) if mark.exists() else {"step": 0, "version": ROOT}
        step = int(state["step"])
        known = await self.ctx.registry.versions()
        parent = int(state["version"]) or (known[0].version if known else ROOT)
        weights = VersionRecord(await self.patiently_issue(), parent, step, "toy", parent == ROOT)
        await queue.rollback(step, weights)
        weights = await self.ctx.registry.commit_version(weights)
        await self.ctx.ready(weights.version)
        while not self.ctx.stopping.is_set():
            batch = await queue.lease("train", groups=GROUPS_A_STEP, wait_s=WAIT_S)
            if not batch:
                self.ctx.progress.waiting(batch.waiting_on or "whole groups")
                continue
            self.ctx.progress.waiting("")
            keys, began = [str(s.key) for s in batch.samples], time.monotonic()
            step += 1
            weights = VersionRecord(await self.patiently_issue(), weights.version, step, "toy")
            await queue.complete_step(batch, step, weights)
            await self.ctx.registry.commit_version(weights)
            self.record(step, weights, keys, began)
            if step % SAVE_EVERY == 0:
                self.save(mark, step, weights.version)
                await queue.commit(step, f"mark-{step}")
            self.worked(f"step {step}")
            await self.wait()
        await queue.close()

    def record(self, step: int, weights: VersionRecord, keys: list[str], began: float) -> None:
        self.ctx.metrics(
            {
                "kind": "step",
                "step": step,
                "version": weights.version,
                "epoch": self.ctx.who.epoch,
                "keys": keys,
                "versions": [],
                "staleness": [],
                "trained_version": weights.parent,
                "seconds": time.monotonic() - began,
            }
        )

    async def patiently_issue(self) -> int:
        while True:
            try:
                return await self.ctx.registry.issue_version()
            except RelaxError as error:
                self.ctx.progress.waiting(str(error))
                await asyncio.sleep(0.1)

    def save(self, mark: Path, step: int, version: int) -> None:
        fresh = mark.with_suffix(".new")
        fresh.write_text(json.dumps({"step": step, "version": version}))
        fresh.replace(mark)


class ToysJob(Job):
    """The job `toys`."""

    def ledger_policy(self, config: Any) -> LedgerPolicy:
        return LedgerPolicy(
            group_size=GROUP, prompts_per_step=GROUPS_A_STEP, max_staleness=1, tasks={"train": ("tokens",)}
        )
