"""The conformance suite against the embedded engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from conformance import *  # noqa: F403
from harness import Driver, Traits

from relax_rt.roles.engines.embedded import EmbeddedEngine


@pytest_asyncio.fixture
async def driver(conformance_model: Path) -> AsyncIterator[Driver]:
    traits = Traits()
    engine = EmbeddedEngine(conformance_model, dtype="float32", max_sequences=traits.members, threads=1)
    yield await Driver(engine, conformance_model, traits).start()
    await engine.close(10.0)
