"""Fixtures of the engines' conformance suite."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.register_assert_rewrite("harness", "conformance", "moe_conformance", "trainer_conformance")


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Gangs end with the folder whose tests they serve: the groups that they have been in keep threads, which wake a
    hundred times a second each, and take a core together."""
    if (nextitem is None or nextitem.path.parent != item.path.parent) and "gang_harness" in sys.modules:
        for gang in list(sys.modules["gang_harness"].LIVING):
            gang.close()


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
