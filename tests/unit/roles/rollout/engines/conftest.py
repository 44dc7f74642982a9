"""The conformance suite of all engines lies in tests/engines; here it runs against the embedded one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).resolve().parents[4] / "engines"
if str(SUITE) not in sys.path:
    sys.path.insert(0, str(SUITE))
pytest.register_assert_rewrite("harness", "conformance", "moe_conformance", "trainer_conformance")


@pytest.fixture(scope="session")
def conformance_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small random model that every engine loads in float32."""
    from harness import build_model

    return build_model(tmp_path_factory.mktemp("conformance"))


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with experts."""
    from harness import build_moe_model

    return build_moe_model(tmp_path_factory.mktemp("moe"))
