"""The conformance suite against the embedded engine, with few rows and no prompts kept for others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from conformance import *  # noqa: F403
from harness import Driver, Traits

from relax_rt.roles.rollout.engines.embedded import EmbeddedEngine

pytestmark = pytest.mark.engines


@pytest_asyncio.fixture
async def driver(conformance_model: Path) -> AsyncIterator[Driver]:
    traits = Traits(members=8)
    engine = EmbeddedEngine(
        conformance_model, dtype="float32", max_sequences=traits.members, threads=1, prefix_positions=0
    )
    yield await Driver(engine, conformance_model, traits).start()
    await engine.close(10.0)
