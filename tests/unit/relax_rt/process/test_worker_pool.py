"""The pool of worker processes: starting, replacing, deadlines and the end of what it started."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relax_rt.process.sandbox import Level
from relax_rt.process.worker import encode_frame
from relax_rt.process.worker_pool import (
    Worker,
    WorkerDied,
    WorkerKilled,
    WorkerNotStarted,
    WorkerPool,
    WorkerSpec,
    WorkerTimeout,
)
from relax_rt.transport.rpc.errors import RelaxError

MODULE = '''
"""Answers each number n with the numbers below n; does other things for words."""
import os, sys, time
import msgspec
from relax_rt.process.worker import WorkerLink

link = WorkerLink(int(sys.argv[1]), 1 << 20)
setup = msgspec.msgpack.decode(link.receive())
link.send(f"loaded {setup}")
while (body := link.receive()) is not None:
    asked = msgspec.msgpack.decode(body)
    if asked == "hang":
        time.sleep(600)
    elif asked == "exit":
        os._exit(7)
    elif asked == "fork":
        os.fork()
        link.send("one of two")
    elif asked == "garbage":
        os.write(int(sys.argv[1]), bytes([255]) * 8)
        time.sleep(600)
    else:
        for number in range(asked):
            link.send(number)
'''


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerSpec:
    (tmp_path / "answering_worker.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[4]}")
    return WorkerSpec(
        name="a test worker",
        module="answering_worker",
        setup=msgspec.msgpack.encode("setup"),
        processes=8,
        processes_key="test.processes",
        memory_key="test.memory_mib",
        max_reply_bytes=1 << 20,
    )


@asynccontextmanager
async def pool_of(spec: WorkerSpec, size: int = 1) -> AsyncIterator[WorkerPool[Worker]]:
    pool = WorkerPool(size, lambda level: Worker(spec, level))
    try:
        yield pool
    finally:
        await pool.close()


def living(spec_dir: Path) -> list[int]:
    """Worker processes of a test."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and str(spec_dir).encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


async def ask(worker: Worker, asked: Any, count: int, timeout_s: float = 60.0) -> list[Any]:
    replies: list[Any] = []

    def take(body: bytes) -> bool:
        replies.append(msgspec.msgpack.decode(body))
        return len(replies) == count

    await worker.request(encode_frame(asked), timeout_s, take, f"in {asked}")
    return replies


async def test_replies_come_in_order_and_one_request_follows_another(spec: WorkerSpec) -> None:
    async with pool_of(spec) as pool, pool.lease() as worker:
        assert await asyncio.gather(ask(worker, 3, 3), ask(worker, 2, 2)) == [[0, 1, 2], [0, 1]]


async def test_a_worker_that_hangs_is_killed_and_replaced(spec: WorkerSpec, tmp_path: Path) -> None:
    async with pool_of(spec) as pool:
        async with pool.lease() as worker:
            behind = asyncio.create_task(ask(worker, 1, 1))
            hanging = asyncio.create_task(ask(worker, "hang", 1, 0.5))
            assert await behind == [0]
            waiting = asyncio.create_task(ask(worker, 1, 1))
            with pytest.raises(WorkerTimeout, match=r"in hang.*within 0\.5 s: its process was killed"):
                await hanging
            with pytest.raises(WorkerKilled, match="another request of its process was stuck in hang"):
                await waiting
            assert not living(tmp_path)
        async with pool.lease() as other:
            assert other is not worker and await ask(other, 1, 1) == [0]
        assert pool.replaced == 1
    assert not living(tmp_path)


async def test_how_a_worker_died_is_reported(spec: WorkerSpec) -> None:
    async with pool_of(spec) as pool:
        async with pool.lease() as worker:
            with pytest.raises(WorkerDied, match="a test worker: its process ended: exit code 7"):
                await ask(worker, "exit", 1)
        async with pool.lease() as worker:
            with pytest.raises(WorkerDied, match="wrote to its socket: 4294967295 bytes were announced"):
                await ask(worker, "garbage", 1)


async def test_a_forked_child_that_returns_does_not_answer(spec: WorkerSpec) -> None:
    async with pool_of(spec) as pool, pool.lease() as worker:
        assert await ask(worker, "fork", 1) == ["one of two"]
        assert await ask(worker, 2, 2) == [0, 1]


async def test_a_cancelled_request_kills_its_worker(spec: WorkerSpec, tmp_path: Path) -> None:
    async with pool_of(spec) as pool, pool.lease() as worker:
        task = asyncio.create_task(ask(worker, "hang", 1))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert worker.ended and not living(tmp_path)


async def test_killed_worker_is_dead_for_every_caller_also_when_one_was_cancelled(
    spec: WorkerSpec, tmp_path: Path
) -> None:
    async with pool_of(spec) as pool:
        worker = await pool.least_loaded()
        first = asyncio.create_task(worker.kill("one"))
        await asyncio.sleep(0)
        first.cancel()
        await worker.kill("two")
        assert worker.ended == "one" and not living(tmp_path)


class FakeWorker:
    """A worker whose start is decided by the test."""

    def __init__(self, start: Any) -> None:
        self.ended, self.load, self._start = "", 0, start

    async def start(self) -> None:
        await self._start(self)

    async def kill(self, why: str) -> None:
        self.ended = why


def fake_pool(size: int, started: list[Any], start: Any) -> WorkerPool[Any]:
    def make(level: Level) -> Any:
        started.append(FakeWorker(start))
        return started[-1]

    return WorkerPool(size, make)


async def test_started_workers_belong_to_the_pool_although_the_caller_was_cancelled() -> None:
    started: list[Any] = []
    both = asyncio.Event()

    async def start(worker: Any) -> None:
        if len(started) == 2 and worker is started[1]:
            both.set()
            await asyncio.Event().wait()

    pool = fake_pool(2, started, start)
    filling = asyncio.create_task(pool.fill())
    async with asyncio.timeout(120):
        await both.wait()
    filling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await filling
    assert pool.workers == started[:1]
    started[0].load = 1
    # The missing one is started when it is needed.
    assert await pool.least_loaded() is started[2] and pool.workers == [started[0], started[2]]


async def test_limits_alone_are_used_where_namespaces_are_not_permitted() -> None:
    levels: list[Level] = []

    async def start(worker: Any) -> None:
        if levels[-1] == "namespaces":
            raise WorkerNotStarted("a worker", why="not permitted")

    def make(level: Level) -> Any:
        levels.append(level)
        return FakeWorker(start)

    pool: WorkerPool[Any] = WorkerPool(1, make)
    await pool.least_loaded()
    assert levels == ["namespaces", "limits"] and pool.level == "limits"


async def test_an_error_of_a_start_reaches_the_caller_and_the_started_ones_can_be_closed() -> None:
    started: list[Any] = []

    async def start(worker: Any) -> None:
        if worker is not started[0]:
            raise RelaxError("a worker", why="no room")

    pool = fake_pool(2, started, start)
    with pytest.raises(RelaxError, match="no room"):
        await pool.fill()
    await pool.close("closed")
    assert [one.ended for one in started] == ["closed", ""]
