"""Routing rows of a real SGLang server on the CPU, one server for all of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from harness import Driver, Traits
from moe_conformance import *  # noqa: F403
from sglang_parts import make_engine, needs_server

from relax_rt.transport.errors import Refused

pytestmark = [pytest.mark.engines, needs_server, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def driver(moe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Driver]:
    engine = make_engine(moe_model, tmp_path_factory.mktemp("sglang"), routing=True)
    driver = Driver(engine, moe_model, Traits())
    try:
        yield await driver.start()
    finally:
        await engine.close(10.0)


async def test_a_dense_model_has_none(conformance_model: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="it is dense"):
        make_engine(conformance_model, tmp_path, routing=True)
