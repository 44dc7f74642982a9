"""The tiny model without its warm start."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from relax_rt.roles.models.tiny import character_tokenizer, tiny_model


@pytest.fixture(scope="session")
def fresh_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fresh")
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_model(len(tokenizer), seed=0).save_pretrained(folder)
    return folder


@pytest.fixture
def home(tmp_path: Path, fresh_model: Path) -> Path:
    """A folder for a config, with the model in it."""
    (tmp_path / "model").symlink_to(fresh_model)
    return tmp_path
