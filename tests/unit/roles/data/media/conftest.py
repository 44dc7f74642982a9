"""A small model that sees, and the harness of engines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).resolve().parents[4] / "engines"
if str(SUITE) not in sys.path:
    sys.path.insert(0, str(SUITE))
pytest.register_assert_rewrite("harness", "trainer_conformance")


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder."""
    pytest.importorskip("torch")
    pytest.importorskip("PIL")
    from tiny_vision import build_seeing_model

    return build_seeing_model(tmp_path_factory.mktemp("seeing"))
