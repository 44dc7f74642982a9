"""The conformance suite against a real SGLang server on the CPU, one server for all of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from conformance import *  # noqa: F403
from harness import Driver, Traits
from sglang_parts import make_engine, needs_server

pytestmark = [pytest.mark.engines, needs_server, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def driver(conformance_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Driver]:
    engine = make_engine(conformance_model, tmp_path_factory.mktemp("sglang"))
    driver = Driver(engine, conformance_model, Traits())
    try:
        yield await driver.start()
    finally:
        await engine.close(10.0)
