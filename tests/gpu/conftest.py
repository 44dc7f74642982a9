"""Tests that need a CUDA device: skipped with the reason where there is none."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytest.register_assert_rewrite("harness", "conformance")
for folder in (
    HERE.parent / "unit" / "transport" / "weights",
    HERE.parent / "engines",
    HERE.parent / "integration" / "supervision_toys",
):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # what other tests have made: ranks that harm themselves, engines' drivers, runs


@cache
def missing() -> str:
    """Why tests of this folder cannot run here; empty where they can."""
    try:
        import torch

        from relax_rt.transport.rpc.errors import Refused
        from relax_rt.transport.weights import device
    except ImportError as error:
        return str(error)
    try:
        device.cupy()
    except Refused as error:
        return str(error)
    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker("gpu")
        if missing():
            item.add_marker(pytest.mark.skip(reason=missing()))


@pytest.fixture(scope="session")
def conformance_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small random model that every engine loads in float32."""
    from harness import build_model

    return build_model(tmp_path_factory.mktemp("conformance"))
