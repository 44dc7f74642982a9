"""The tiny model without its warm start."""

from __future__ import annotations

from pathlib import Path

import pytest
from fresh_model import save_fresh

pytest.importorskip("torch")


@pytest.fixture(scope="session")
def fresh_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_fresh(tmp_path_factory.mktemp("fresh"))


@pytest.fixture
def home(tmp_path: Path, fresh_model: Path) -> Path:
    """A folder for a config, with the model in it."""
    (tmp_path / "model").symlink_to(fresh_model)
    return tmp_path
