"""Routing rows of a real SGLang server on the CPU, one server for all of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from harness import Driver, Traits
from moe_conformance import *  # noqa: F403
from moe_conformance import check
from sglang_parts import make_engine, needs_server

from relax_rt.roles.rollout.engines.sglang.engine import SglangEngine
from relax_rt.transport.rpc.errors import Refused

pytestmark = [pytest.mark.engines, needs_server, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def driver(moe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Driver]:
    engine = make_engine(moe_model, tmp_path_factory.mktemp("sglang"), routing=True)
    driver = Driver(engine, moe_model, Traits())
    try:
        yield await driver.start()
    finally:
        await engine.close(10.0)


async def test_experts_are_shared_under_the_servers_names(driver: Driver) -> None:
    assert isinstance(driver.engine, SglangEngine)
    loader, source = driver.engine._loader, driver.source()
    loader._use_handles = True
    try:
        await driver.engine.prepare(source)
        await driver.engine.commit(source.record, "recompute")
        assert loader._use_handles, "it had to take the file"
    finally:
        loader._use_handles = False
    asked = driver.request([7, 8, 9], 3, new=20, routing=True)
    for completion in await driver.complete(asked):
        check(driver, asked, completion)


async def test_a_dense_model_has_none(conformance_model: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="it is dense"):
        make_engine(conformance_model, tmp_path, routing=True)
