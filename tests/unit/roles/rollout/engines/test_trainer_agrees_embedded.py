"""The embedded engine beside the trainer: the test of both engines lies in tests/engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from harness import Driver, Traits
from trainer_conformance import *  # noqa: F403

from relax_rt.roles.rollout.engines.embedded import EmbeddedEngine


@pytest_asyncio.fixture
async def driver(conformance_model: Path) -> AsyncIterator[Driver]:
    traits = Traits()
    engine = EmbeddedEngine(conformance_model, dtype="float32", max_sequences=traits.members, threads=1)
    yield await Driver(engine, conformance_model, traits).start()
    await engine.close(10.0)
