"""The embedded engine when its thread or its owner fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from harness import Driver, MemorySource, Traits

from relax_rt.roles.rollout.engines import embedded
from relax_rt.roles.rollout.engines.base import Chunk, EngineEnded, generate
from relax_rt.roles.rollout.engines.embedded import EmbeddedEngine
from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused


def make(folder: Path) -> EmbeddedEngine:
    return EmbeddedEngine(folder, dtype="float32", max_sequences=4, threads=1)


@pytest_asyncio.fixture
async def driver(conformance_model: Path) -> AsyncIterator[Driver]:
    engine = make(conformance_model)
    yield await Driver(engine, conformance_model, Traits(members=4)).start()
    await engine.close(10.0)


async def test_a_thread_failure_reaches_the_owner_and_every_call(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(driver.engine._decoder, "_head", broken)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="no such kernel"):
        await driver.complete(driver.request([1, 2], 2))
    with pytest.raises(Refused, match="no such kernel"):
        await driver.engine.pause("too late")


async def test_a_failing_sink_ends_the_engine(conformance_model: Path) -> None:
    engine, told = make(conformance_model), asyncio.get_running_loop().create_future()

    def sink(_: list[Chunk]) -> None:
        raise ValueError("not expected")

    await engine.start(sink, lambda error: told.done() or told.set_exception(error))
    engine.submit([Driver(engine, conformance_model, Traits()).request([1], 1)])
    with pytest.raises(ValueError, match="not expected"):
        await asyncio.wait_for(told, 120)
    await engine.close(10.0)


async def test_a_missing_token_boundary_times_out(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    held = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(embedded, "BOUNDARY_TIMEOUT_S", 0.05)
    release = held.set

    def stuck() -> None:
        asyncio.run_coroutine_threadsafe(held.wait(), loop).result(30)

    driver.engine._inbox.put(stuck)  # type: ignore[attr-defined]
    with pytest.raises(DeadlineExceeded, match="no token boundary"):
        await driver.engine.pause("never")
    release()
    monkeypatch.undo()
    await driver.engine.resume()
    assert driver.engine.load().paused == "", "a call that was given up is not carried out later"


async def test_a_closed_engine_refuses_calls(driver: Driver) -> None:
    driver.submit(driver.request([1, 2], 2, new=400, stop_ids=frozenset()))
    await driver.tokens(3)
    await driver.engine.close(10.0)
    with pytest.raises(Refused, match="does not run"):
        await driver.engine.pause("too late")
    count = len(driver.chunks)
    await asyncio.sleep(0.05)
    assert len(driver.chunks) == count


async def test_a_swap_that_fails_ends_the_engine_before_another_token(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.submit(driver.request([1, 2], 2, new=400, stop_ids=frozenset(), chunk_tokens=1))
    await driver.tokens(3)
    source = driver.source()
    await driver.engine.prepare(source)
    held: list[int] = []

    def half(_: Any) -> None:
        held.append(driver.engine.load().tokens_generated)
        raise MemoryError("of the cache")

    monkeypatch.setattr(driver.engine._decoder, "_fill", half)  # type: ignore[attr-defined]
    with pytest.raises(MemoryError, match="of the cache"):
        await driver.engine.commit(source.record, "recompute")
    with pytest.raises(MemoryError, match="of the cache"):
        await driver.until(lambda: False)
    assert driver.engine.load().tokens_generated == held[0]


async def test_an_ended_engine_accepts_no_requests(driver: Driver, conformance_model: Path) -> None:
    new = make(conformance_model)
    with pytest.raises(EngineEnded, match="not started"):
        new.submit([driver.request([1], 1)])
    await driver.engine.close(10.0)
    with pytest.raises(EngineEnded, match="closed"):
        driver.submit(driver.request([1], 1))


async def test_a_cancelled_fetch_holds_the_lock_until_it_ends(driver: Driver) -> None:
    begun, go_on, writes = threading.Event(), threading.Event(), []

    def slow() -> None:
        begun.set()
        assert go_on.wait(120)
        writes.append("first")

    first = driver.source(lambda folder, version: MemorySource(folder, version, slow))
    second = driver.source(lambda folder, version: MemorySource(folder, version, lambda: writes.append("second")))
    fetch = asyncio.create_task(driver.engine.prepare(first))
    await asyncio.to_thread(begun.wait, 120)
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    other = asyncio.create_task(driver.engine.prepare(second))
    await asyncio.sleep(0.05)
    assert not other.done()
    go_on.set()
    await other
    assert writes == ["first", "second"]
    await driver.engine.commit(second.record, "keep")
    asked = driver.request([1, 2], 1)
    driver.check(asked, (await driver.complete(asked))[0])


async def test_completions_that_do_not_come_in_time_are_an_error(conformance_model: Path) -> None:
    engine = make(conformance_model)
    asked = Driver(engine, conformance_model, Traits()).request([1], 1, new=500, stop_ids=frozenset())
    with pytest.raises(DeadlineExceeded, match="0 of 1 came"):
        await generate(engine, [asked], timeout_s=0.01)
