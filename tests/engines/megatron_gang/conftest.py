"""Gangs and models of the Megatron tests; all of them are left out where Megatron-Core is not installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytest.register_assert_rewrite("megatron_parts", "gang_gradients", "gang_harness", "gang_publication")
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Megatron-Core comes with the extra `megatron`; `make test-engines` installs it."""
    if importlib.util.find_spec("megatron") is None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="megatron-core is not installed: make test-engines"))


@pytest.fixture(scope="session")
def gang() -> Iterator[Callable[[int], object]]:
    """A gang of so many ranks, started once."""
    from gang_harness import Gang

    started: dict[int, Gang] = {}

    def of(world: int) -> Gang:
        if world not in started:
            started[world] = Gang(world, HERE / "work.py")
        return started[world]

    yield of
    for one in started.values():
        one.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a small model of a family."""
    from megatron_parts import save_model

    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            made[family] = save_model(tmp_path_factory.mktemp(family), family)
        return made[family]

    return of
