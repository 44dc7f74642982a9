"""Prompts that a role finds in the run's folder are those that it would have read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_rt.roles.data import kept
from relax_rt.roles.data.source import PromptSource
from relax_rt.roles.models.tiny import character_tokenizer
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.roles.sections import DataTable


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(character_tokenizer(), Path("/nonexistent"))


def rows(path: Path, count: int, **more: object) -> DataTable:
    path.write_text("".join(json.dumps({"prompt": f"q{i}", "answer": str(i), **more}) + "\n" for i in range(count)))
    return DataTable(path=str(path))


def load(data: DataTable, tokenizer: ChatTokenizer, folder: Path, seed: int = 3) -> PromptSource:
    return kept.load_kept(data, tokenizer, seed=seed, config_dir=Path(), folder=folder)


def test_the_second_time_nothing_is_read(
    tokenizer: ChatTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rows(tmp_path / "a.jsonl", 60, metadata={"k": [1, {"x": None}]})
    first = load(data, tokenizer, tmp_path)
    monkeypatch.setattr(PromptSource, "load", None)
    again = load(data, tokenizer, tmp_path, seed=4)
    assert (again.train, again.held_out, again.report) == (first.train, first.held_out, first.report)
    assert [again.prompt(i) for i in range(20)] != [first.prompt(i) for i in range(20)], "the order is the seed's"


def test_prompts_of_a_task_are_kept_as_well(
    tokenizer: ChatTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their metadata have tuples, which come out of a file as lists."""
    pytest.importorskip("reasoning_gym")
    data = DataTable(task="basic_arithmetic", size=60, template="{expression}")
    first = load(data, tokenizer, tmp_path)
    monkeypatch.setattr(PromptSource, "load", None)
    assert load(data, tokenizer, tmp_path).train == first.train


def test_other_data_are_read_and_take_their_place(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    load(rows(tmp_path / "a.jsonl", 60), tokenizer, tmp_path / "run")
    (before,) = (tmp_path / "run").iterdir()
    found = load(rows(tmp_path / "a.jsonl", 61), tokenizer, tmp_path / "run")
    assert found.report.read == 61
    (after,) = (tmp_path / "run").iterdir()
    assert after != before


def test_a_damaged_file_is_read_anew(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    data = rows(tmp_path / "a.jsonl", 60)
    first = load(data, tokenizer, tmp_path)
    (path,) = tmp_path.glob("prompts-*")
    path.write_bytes(path.read_bytes()[:-7])
    assert load(data, tokenizer, tmp_path).train == first.train
    assert load(data, tokenizer, tmp_path / "no such folder").train == first.train
