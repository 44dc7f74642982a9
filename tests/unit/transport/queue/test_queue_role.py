from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ledger_driver import policy

from relax_rt.config.schema import QueueTable
from relax_rt.hosting import queue_role
from relax_rt.hosting.queue_role import QueueRole
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.queue.ledger.events import OpenRun
from relax_rt.transport.queue.ledger.messages import Loss
from relax_rt.transport.queue.ledger.state import LossCause
from relax_rt.transport.rpc.errors import OutOfSpace, Unreachable


class Context:
    """As much of a role's context as the queue role uses."""

    def __init__(self, folder: Path) -> None:
        self.config = SimpleNamespace(queue=QueueTable(fsync_every_s=0.02), run=SimpleNamespace(job="rl"))
        self.run_dir, self.shm_dir, self.run_id = folder, folder, "run-1"
        self.payload_dir, self.spill_dir = folder, folder / "spill"
        self.stopping = asyncio.Event()
        self.events: list[str] = []
        self.served: dict[type, Any] = {}
        self.is_ready = asyncio.Event()
        self.done = 0
        self.progress = SimpleNamespace(advance=self._advance)
        self.records: list[dict[str, Any]] = []
        self.logged: list[str] = []
        self.log = SimpleNamespace(exception=self.logged.append)

    def metrics(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def _advance(self, n: int, detail: str) -> None:
        assert "step 0" in detail
        self.done += n

    def serve(self, api: type, implementation: Any) -> None:
        self.served[api] = implementation

    async def ready(self) -> None:
        self.is_ready.set()

    def event(self, kind: str, /, **fields: Any) -> None:
        self.events.append(kind)


@pytest.fixture
def ctx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setattr(
        queue_role, "load_job", lambda name: SimpleNamespace(ledger_policy=lambda config: policy(), name=name)
    )
    monkeypatch.setattr(queue_role, "advice", lambda config, loss: "mend it")
    return Context(tmp_path)


async def test_serves_until_it_is_asked_to_stop(ctx: Context) -> None:
    role = QueueRole(ctx)  # type: ignore[arg-type]
    await role.setup()
    running = asyncio.create_task(role.run())
    await ctx.is_ready.wait()
    stats = await ctx.served[QueueApi].stats()
    assert stats.step == 0 and ctx.events == ["queue_recovered"]
    async with asyncio.timeout(120):
        while not ctx.done:  # noqa: ASYNC110 - progress is told, not awaited
            await asyncio.sleep(0.05)
        ctx.stopping.set()
        await running
    await role.teardown()
    assert list((ctx.run_dir / "queue").glob("segment-*.log"))


async def test_the_last_counts_of_losses_are_reported_before_it_ends(ctx: Context) -> None:
    role = QueueRole(ctx)  # type: ignore[arg-type]
    await role.setup()
    progress = role.broker._ledger.core.state.progress
    progress.causes.append(LossCause("mine.py:3", Loss(members=9), reported=8))
    running = asyncio.create_task(role.run())
    await ctx.is_ready.wait()
    ctx.stopping.set()
    await running
    await role.teardown()
    assert ctx.events == ["queue_recovered", "members_lost", "queue_account"]


async def test_a_report_that_fails_is_logged_and_the_next_ones_are_made(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_role, "METRICS_EVERY_S", 0.01)
    monkeypatch.setattr(queue_role, "advice", lambda config, loss: {}[loss["where"]])
    role = QueueRole(ctx)  # type: ignore[arg-type]
    await role.setup()
    progress = role.broker._ledger.core.state.progress
    progress.causes.append(LossCause("mine.py:3", Loss(members=9, where="mine.py:3"), reported=8))
    full = ctx.metrics
    failures = [OSError("disk is full"), None]
    again = asyncio.Event()

    def metrics(record: dict[str, Any]) -> None:
        if (error := failures.pop(0)) is not None:
            raise error
        full(record)
        failures.append(None)
        again.set()

    ctx.metrics = metrics  # type: ignore[method-assign]
    running = asyncio.create_task(role.run())
    async with asyncio.timeout(120):
        await again.wait()
    progress.causes.append(LossCause("mine.py:5", Loss(members=9, where="mine.py:5"), reported=8))
    ctx.stopping.set()
    await running
    await role.teardown()
    assert ctx.records and ctx.events[-1] == "queue_account"
    assert set(ctx.logged) == {"losses were not reported", "the queue's metrics were not written"}


async def test_the_number_that_ends_a_run_is_shown_at_once(ctx: Context) -> None:
    role = QueueRole(ctx)  # type: ignore[arg-type]
    await role.setup()
    details: list[str] = []
    ctx.progress.advance = lambda n, detail: details.append(detail)
    role.broker._ledger.core.state.progress.failed_groups = 64
    role._notify("no_progress", {"failed_groups": 64})
    await role.teardown()
    assert len(details) == 1 and "64 groups in a row failed" in details[0]


async def test_ends_with_the_error_when_the_journal_cannot_be_written(ctx: Context) -> None:
    ctx.config.queue = QueueTable(fsync_every_s=600.0)
    role = QueueRole(ctx)  # type: ignore[arg-type]
    await role.setup()
    running = asyncio.create_task(role.run())
    await ctx.is_ready.wait()
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, role.broker._journal._fd)
    os.close(full)
    with pytest.raises(Unreachable):
        role.broker._apply(OpenRun("run-2"))
    async with asyncio.timeout(120):
        with pytest.raises(OutOfSpace, match="No space left"):
            await running
    await role.teardown()
