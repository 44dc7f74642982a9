"""A real SGLang server on the CPU for tests: where its environment is, and an engine over it."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

from relax_rt.roles.rollout.engines.settings import RolloutSettings
from relax_rt.roles.rollout.engines.sglang.engine import SglangEngine
from relax_rt.roles.rollout.engines.sglang.options import server_environment, server_options
from relax_rt.roles.rollout.engines.sglang.server import ServerSpec
from relax_rt.roles.rollout.engines.sglang.weight_loading import OnFileFallback

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("RELAX_SGLANG_PYTHON") or ROOT / ".venv-sglang/bin/python")
KV_TOKENS = 16_384

needs_server = pytest.mark.skipif(not PYTHON.exists(), reason="no environment with SGLang: `make sglang-cpu-env`")


def make_engine(
    model: Path,
    folder: Path,
    *,
    python: str = str(PYTHON),
    routing: bool = False,
    on_file_fallback: OnFileFallback = lambda version, why: None,
    **table: Any,
) -> SglangEngine:
    """An engine whose server samples each sequence by its own seed; not started.

    Args:
        folder: for its sockets, weights and log; on a short path.
        table: of roles.rollout.sglang.
    """
    settings = RolloutSettings.model_validate(
        {
            "engine": "sglang",
            "dtype": "float32",
            "max_sequences": 12,
            "routing": routing,
            # A start takes 15 s on a machine that has nothing else to do.
            "sglang": {"device": "cpu", "deterministic": True, "boot_timeout_s": 400.0, **table},
        }
    )
    place = ServerSpec(
        python=python,
        folder=folder / "tmp",
        log=folder / "server.log",
        environment=server_environment("cpu", 1, folder / "tmp", os.environ),
    )
    options = functools.partial(server_options, settings, "cpu", kv_tokens=KV_TOKENS)
    return SglangEngine(
        model,
        settings,
        place,
        options,
        device="cpu",
        weights_folder=folder / "weights",
        kv_tokens=KV_TOKENS,
        attempt=folder / "attempt",
        on_file_fallback=on_file_fallback,
    )
