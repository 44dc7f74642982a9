"""The conformance suite against the embedded engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from conformance import *  # noqa: F403
from harness import Driver, Traits

from relax_rt.roles.rollout.engines.embedded import EmbeddedEngine
from relax_rt.roles.rollout.generation import MAX_REQUESTS, GenerationService


@pytest_asyncio.fixture
async def driver(conformance_model: Path) -> AsyncIterator[Driver]:
    traits = Traits()
    engine = EmbeddedEngine(conformance_model, dtype="float32", max_sequences=traits.members, threads=1)
    yield await Driver(engine, conformance_model, traits).start()
    await engine.close(10.0)


async def test_a_full_engine_still_accepts_routed_requests(driver: Driver) -> None:
    members = driver.traits.members
    busy = driver.request([1, 2], members, new=300, stop_ids=frozenset())
    driver.submit(busy)
    await driver.tokens(2 * members)
    report = await GenerationService(1, driver.engine, asyncio.Event()).load()
    assert (report.running, report.room) == (members, MAX_REQUESTS)
    driver.engine.abort(busy.id)
    await driver.finished(busy)
