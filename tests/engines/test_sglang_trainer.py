"""SGLang, a real server on the CPU, beside the trainer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from harness import Driver, Traits
from sglang_parts import make_engine, needs_server
from trainer_conformance import *  # noqa: F403

pytestmark = [pytest.mark.engines, needs_server]


@pytest_asyncio.fixture
async def driver(conformance_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Driver]:
    engine = make_engine(conformance_model, tmp_path_factory.mktemp("t"))
    try:
        yield await Driver(engine, conformance_model, Traits()).start()
    finally:
        await engine.close(10.0)
