"""Who leaves a queue leaves nothing behind; who is not heard of on another node is taken for dead."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from relax_rt.transport import TransferQueue
from relax_rt.transport.queue import broker


async def slabs(queue: TransferQueue) -> int:
    assert queue.membership is not None
    return len(list(Path(queue.membership.shm_dir).glob("*.slab")))  # noqa: ASYNC240


async def test_clients_that_come_and_go_leave_no_memory(tmp_path: Path) -> None:
    async with TransferQueue.serve(tmp_path / "q", tasks={"t": ["x"]}) as host:
        for _ in range(4):
            async with TransferQueue.connect(tmp_path / "q") as queue:
                await queue.put({"x": np.zeros((4, 4096))})
                await queue.complete(await queue.lease("t", samples=4, wait_s=5))
        for _ in range(1200):
            if not await slabs(host):
                break
            await asyncio.sleep(0.1)
        assert not await slabs(host)
        assert host.host is not None and host.host.broker is not None
        assert len(host.host.broker._watch._fds) == 1, "its own"


async def test_what_was_put_outlives_its_producer(tmp_path: Path) -> None:
    async with TransferQueue.serve(tmp_path / "q", tasks={"t": ["x"]}) as host:
        async with TransferQueue.connect(tmp_path / "q") as queue:
            await queue.put({"x": np.full((4, 4096), 7)})
        await asyncio.sleep(1.5)
        batch = await host.lease("t", samples=4, wait_s=5)
        assert (batch.column("x") == 7).all()
        await host.complete(batch)


async def test_a_far_process_that_falls_silent_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "FAR_SILENT_S", 0.3)
    async with TransferQueue.serve(tmp_path / "q", tasks={"t": ["x"]}, lease_s=0.4) as host:
        await host.put([{"x": np.zeros(4096)}])
        api = host.client.api
        far = await api.join("far/0", "another-node", 1, "tcp://192.0.2.1:1")
        assert host.host is not None and host.host.broker is not None
        ledger = host.host.broker._ledger
        assert ledger.concerned(far.who)
        for _ in range(2400):
            if not ledger.state.callers.knows(far.who):
                break
            await asyncio.sleep(0.05)
        assert not ledger.state.callers.knows(far.who)
