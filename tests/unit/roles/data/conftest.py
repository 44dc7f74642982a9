"""Indices of these tests go to a cache folder of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_rt.roles.models.tiny import character_tokenizer
from relax_rt.roles.models.tokenizer import ChatTokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("RELAX_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(character_tokenizer(), Path("/nonexistent"))
