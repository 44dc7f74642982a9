"""Routing rows of the embedded engine; the suite is that of all engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from harness import Driver, Traits, build_moe_model
from moe_conformance import *  # noqa: F403
from moe_conformance import check, rows_of

from relax_rt.roles.rollout.engines.embedded import EmbeddedEngine
from relax_rt.transport.rpc.errors import Refused


@pytest_asyncio.fixture
async def driver(moe_model: Path) -> AsyncIterator[Driver]:
    engine = EmbeddedEngine(moe_model, dtype="float32", max_sequences=12, threads=1, routing=True)
    yield await Driver(engine, moe_model, Traits()).start()
    await engine.close(10.0)


async def test_layers_without_experts_have_none(tmp_path: Path) -> None:
    model = build_moe_model(tmp_path, dense=[1])
    engine = EmbeddedEngine(model, dtype="float32", max_sequences=12, threads=1, routing=True)
    driver = await Driver(engine, model, Traits()).start()
    try:
        asked = driver.request(range(10, 30), 3, routing=True)
        for completion in await driver.complete(asked):
            check(driver, asked, completion)
            rows = rows_of(driver, completion)
            assert (rows[:, 1] == -1).all() and (rows[:, [0, 2]] >= 0).all()
    finally:
        await engine.close(10.0)


def test_a_dense_model_has_none(conformance_model: Path) -> None:
    with pytest.raises(Refused, match="it is dense"):
        EmbeddedEngine(conformance_model, dtype="float32", max_sequences=2, threads=1, routing=True)
