"""A broker in this process that can be killed and restarted, and clients whose calls can be lost on the way."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ledger_driver import policy

from relax_rt.transport.queue.broker import Broker
from relax_rt.transport.queue.client import QueueClient
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.rpc.errors import Unreachable
from relax_rt.transport.rpc.identity import Incarnation

AGENT = Incarnation("agent/0", 1)


class Bound:
    """The broker as one caller sees it; calls can be lost on the way there or back."""

    def __init__(self, world: World, who: Incarnation) -> None:
        self._world, self._who = world, who
        self.lose_request: list[str] = []
        self.lose_answer: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any) -> Any:
            if name in self.lose_request:
                self.lose_request.remove(name)
                raise Unreachable(name, why="lost on the way")
            broker = self._world.broker
            if broker is None:
                raise Unreachable(name, why="no broker")
            self._world.caller = self._who

            async def handle() -> Any:
                self._world.caller = self._who
                return await getattr(broker, name)(*args)

            answer = await handle()
            if name in self.lose_answer:
                self.lose_answer.remove(name)
                raise Unreachable(name, why="answer lost")
            return answer

        return call


class World:
    """A broker that can be killed and restarted, and clients of it."""

    def __init__(self, tmp_path: Path, **changes: Any) -> None:
        self.folder, self.shm = tmp_path / "queue", tmp_path / "shm"
        self.shm.mkdir(exist_ok=True)
        self.fsync_every_s = changes.pop("fsync_every_s", 0.02)
        self.limits = changes.pop("limits", QueueLimits(lease_s=60.0))
        given: LedgerPolicy | None = changes.pop("given", None)
        self.policy = given or policy(**changes)
        self.broker: Broker | None = None
        self.caller = AGENT
        self.notices: list[tuple[str, dict[str, Any]]] = []

    async def start(self, run_id: str = "run-1", segment_bytes: int = 1 << 20) -> Broker:
        broker = Broker(
            self.folder,
            self.shm,
            run_id=run_id,
            policy=self.policy,
            limits=self.limits,
            identify=lambda: self.caller,
            notify=lambda kind, fields: self.notices.append((kind, fields)),
            fsync_every_s=self.fsync_every_s,
            segment_bytes=segment_bytes,
        )
        # Clients that retry must not reach it before it is open.
        await broker.open()
        self.broker = broker
        return broker

    async def kill(self) -> None:
        """End the broker without letting it do anything more."""
        broker, self.broker = self.broker, None
        assert broker is not None
        for task in broker._tasks:
            task.cancel()
        await asyncio.gather(*broker._tasks, return_exceptions=True)
        os.close(broker._journal._fd)
        broker._journal._fd = -1

    def client(self, who: Incarnation, **options: Any) -> QueueClient:
        options = {"slab_bytes": 1 << 16, "capacity_bytes": 1 << 18, "patience_s": 20.0, **options}
        return QueueClient(Bound(self, who), who, self.shm, **options)  # type: ignore[arg-type]


@asynccontextmanager
async def world(tmp_path: Path, **changes: Any) -> AsyncIterator[World]:
    made = World(tmp_path, **changes)
    await made.start()
    try:
        yield made
    finally:
        if made.broker is not None:
            await made.broker.close()


async def until(done: Callable[[], bool]) -> None:
    """Wait for what happens in the background."""
    async with asyncio.timeout(120):
        while not done():  # noqa: ASYNC110 - there is nothing to wait on
            await asyncio.sleep(0.01)
