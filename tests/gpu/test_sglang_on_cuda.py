"""SGLang on a device: its environment is named by RELAX_SGLANG_CUDA_PYTHON, since it pins a torch of its own."""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from conformance import *  # noqa: F403
from harness import Driver, Traits

from relax_rt.roles.rollout.engines.settings import RolloutSettings
from relax_rt.roles.rollout.engines.sglang.engine import SglangEngine
from relax_rt.roles.rollout.engines.sglang.options import server_environment, server_options
from relax_rt.roles.rollout.engines.sglang.server import ServerSpec

PYTHON = os.environ.get("RELAX_SGLANG_CUDA_PYTHON", "")
KV_TOKENS = 65_536

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="RELAX_SGLANG_CUDA_PYTHON names no interpreter that has SGLang for CUDA"),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["file", "handles"])
async def driver(
    request: pytest.FixtureRequest, conformance_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Driver]:
    folder = tmp_path_factory.mktemp("sglang")
    settings = RolloutSettings.model_validate(
        {
            "engine": "sglang",
            "dtype": "float32",
            "max_sequences": 12,
            "memory_fraction": 0.3,
            "sglang": {"device": "cuda", "deterministic": True, "boot_timeout_s": 600.0, "weights": request.param},
            "start_timeout_s": 700.0,
        }
    )
    environment = server_environment("cuda", 1, folder / "tmp", os.environ)
    place = ServerSpec(python=PYTHON, folder=folder / "tmp", log=folder / "server.log", environment=environment)
    options = functools.partial(server_options, settings, "cuda", kv_tokens=KV_TOKENS)
    not_shown: list[str] = []
    engine = SglangEngine(
        conformance_model,
        settings,
        place,
        options,
        device="cuda",
        weights_folder=folder / "weights",
        kv_tokens=KV_TOKENS,
        on_file_fallback=lambda version, why: not_shown.append(f"version {version}: {why}"),
    )
    # Kernels of a device sum in another order than the plain forward pass on the CPU.
    driver = Driver(engine, conformance_model, Traits(tolerance=5e-3))
    try:
        yield await driver.start()
    finally:
        await engine.close(10.0)
    assert not not_shown
