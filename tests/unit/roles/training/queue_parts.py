"""A real queue in this process, with what rollouts and rewards would put into it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from packing_samples import make_sample

from relax_rt.roles.base.sample import TASK_FIELDS, generated_columns
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.broker import Broker
from relax_rt.transport.queue.client import NewSample, QueueClient
from relax_rt.transport.queue.ledger.messages import SampleKey, VersionSpan
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.rpc.identity import Incarnation

ENGINE, JUDGE, TRAINER = Incarnation("rollout/0", 1), Incarnation("reward/0", 2), Incarnation("trainer/0", 3)
V1, V2 = VersionRecord(1, 0, 0), VersionRecord(2, 1, 1)
MEMBERS = 2


class _Calls:
    """The broker's interface for one caller."""

    def __init__(self, world: World, who: Incarnation) -> None:
        self._world, self._who = world, who

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*arguments: Any) -> Any:
            self._world.caller = self._who
            return await getattr(self._world.broker, name)(*arguments)

        return call


class World:
    """Broker, engine, judge and trainer; groups of two samples."""

    broker: Broker
    engine: QueueClient
    judge: QueueClient
    trainer: QueueClient

    def __init__(self) -> None:
        self.caller = TRAINER
        self.notices: list[tuple[str, dict[str, Any]]] = []

    async def make(self, groups: int, *rewards: float) -> list[int]:
        """As many new groups as admission allows, up to this many, whose members get these rewards; their ids."""
        tickets = (await self.engine.admit(1, groups, wait_s=0)).tickets
        for ticket in tickets:
            samples = []
            for member in range(ticket.size):
                made = make_sample(ticket.group, member, [1, 2, ticket.prompt % 50], [5 + member, 6, 7])
                columns = generated_columns(made)
                samples.append(NewSample(SampleKey(ticket.group, member), columns, [VersionSpan(0, 6, 1, 1)]))
            await self.engine.put_samples(samples)
        while batch := await self.judge.lease("reward", samples=64, wait_s=0):
            columns = {key: {"reward": np.float32(rewards[key.member]), "rewards": {}} for key in batch.keys}
            await self.judge.complete(batch, columns)
        return [ticket.group for ticket in tickets]

    async def account(self) -> dict[str, int]:
        """Samples by what became of them."""
        self.caller = TRAINER
        account: dict[str, int] = await self.broker.account()
        return {state: count for state, count in account.items() if count}


@asynccontextmanager
async def world(
    tmp_path: Path, *, prompts_per_step: int = 3, max_staleness: float = 1, memory: str = "run"
) -> AsyncIterator[World]:
    """memory: another name than the queue had before: its host has started anew, and nobody has published yet."""
    made = World()
    policy = LedgerPolicy(
        group_size=MEMBERS, prompts_per_step=prompts_per_step, max_staleness=max_staleness, tasks=TASK_FIELDS
    )
    shm = tmp_path / "shm"
    shm.mkdir()
    made.broker = Broker(
        tmp_path / "queue",
        shm,
        run_id=memory,
        policy=policy,
        limits=QueueLimits(lease_s=60.0),
        identify=lambda: made.caller,
        notify=lambda kind, fields: made.notices.append((kind, fields)),
    )
    await made.broker.open()
    try:
        async with (
            client(made, ENGINE, shm) as made.engine,
            client(made, JUDGE, shm) as made.judge,
            client(made, TRAINER, shm) as made.trainer,
        ):
            if memory == "run":
                await made.trainer.rollback(0, V1)
            yield made
    finally:
        await made.broker.close()


def calls_of(made: World, who: Incarnation) -> Any:
    """The broker, as this incarnation reaches it."""
    return _Calls(made, who)


def client(made: World, who: Incarnation, shm: Path) -> QueueClient:
    return QueueClient(_Calls(made, who), who, shm, slab_bytes=1 << 16, capacity_bytes=1 << 18)  # type: ignore[arg-type]
