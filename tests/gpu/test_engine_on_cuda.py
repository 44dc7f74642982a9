"""The conformance suite against the embedded engine on a device, and what its memory does."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
import torch
from conformance import *  # noqa: F403
from harness import Driver, Traits

from relax_rt.roles.rollout.engines.embedded import EmbeddedEngine


@pytest_asyncio.fixture
async def driver(conformance_model: Path) -> AsyncIterator[Driver]:
    traits = Traits()
    engine = EmbeddedEngine(conformance_model, dtype="float32", max_sequences=traits.members, threads=1, device="cuda")
    yield await Driver(engine, conformance_model, traits).start()
    await engine.close(10.0)


async def test_a_trainer_on_the_device_has_the_engines_room(driver: Driver) -> None:
    await driver.complete(driver.request([7, 8, 9], n=8, new=64))

    gc.collect()
    serving = torch.cuda.memory_allocated()
    await driver.engine.release_memory()
    gc.collect()
    assert torch.cuda.memory_allocated() < serving / 2, "weights and cache are not on the device"
    await driver.engine.resume_memory()
    request = driver.request([7, 8, 9])
    (completion,) = await driver.complete(request)
    driver.check(request, completion)
