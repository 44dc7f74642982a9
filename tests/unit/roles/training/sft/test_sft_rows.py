"""Rows of a cold start's file: what they mean, and what is said of those that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sft_parts import write_rows

from relax_rt.roles.training.sft.data import MAX_FAULTS, parse_row, read_sft_rows
from relax_rt.transport.rpc.errors import RelaxError

USER, ANSWER = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}


def test_conversations_and_prompts_are_rows() -> None:
    row = parse_row("f:1", {"messages": [USER, ANSWER, USER, ANSWER]}, "sft")
    assert (row.messages, row.completion, row.rejected) == ([USER, ANSWER, USER], "2", None)
    assert row.question == "user: 1+1?\nassistant: 2\nuser: 1+1?"
    row = parse_row("f:1", {"prompt": "1+1?", "completion": "2", "metadata": {"level": 1}}, "sft")
    assert (row.question, row.messages, row.completion, row.metadata) == ("1+1?", None, "2", {"level": 1})


def test_preferences_are_texts_or_a_message() -> None:
    row = parse_row(
        "f:1", {"prompt": "1+1?", "chosen": "2", "rejected": [{"role": "assistant", "content": "3"}]}, "dpo"
    )
    assert (row.completion, row.rejected) == ("2", "3")
    row = parse_row("f:1", {"messages": [USER], "chosen": "2", "rejected": "3"}, "dpo")
    assert row.messages == [USER]


@pytest.mark.parametrize(
    ("kind", "row", "says"),
    [
        ("sft", [1], "a row is an object"),
        ("sft", {"promt": "a", "completion": "b"}, "is 'promt' meant to be 'prompt'?"),
        ("sft", {"prompt": "a", "messages": [USER], "completion": "b"}, "one of `messages` and `prompt`"),
        ("sft", {"prompt": "a"}, "there is no `completion`"),
        ("sft", {"prompt": "a", "compltion": "b"}, "is 'compltion' meant to be 'completion'?"),
        ("sft", {"prompt": "a", "completion": "  "}, "`completion` is text that is not empty"),
        ("sft", {"prompt": 7, "completion": "b"}, "`prompt` is text"),
        ("sft", {"messages": [USER]}, "the last message is of role 'user'"),
        ("sft", {"messages": [ANSWER]}, "no message before the assistant's"),
        ("sft", {"messages": [USER, {"role": "assistant", "content": ""}]}, "last message is empty"),
        ("sft", {"messages": [USER, ANSWER, ANSWER]}, "followed by another"),
        ("sft", {"messages": [USER, {"role": "bot", "content": "x"}]}, "role 'bot'"),
        ("sft", {"messages": [USER, ANSWER], "completion": "2"}, "leave `completion` out"),
        ("dpo", {"prompt": "a", "chosen": "b"}, "there is no `rejected`"),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
        ("dpo", {"messages": [USER, ANSWER], "chosen": "b", "rejected": "c"}, "followed by another"),
        ("dpo", {"prompt": "a", "chosen": [USER], "rejected": "c"}, "one message of the assistant"),
        ("sft", {"prompt": "a", "completion": "b", "metadata": 3}, "`metadata` is an object"),
    ],
)
def test_unusable_rows_are_told_with_their_line(kind: Any, row: Any, says: str) -> None:
    with pytest.raises(RelaxError) as caught:
        parse_row("file.jsonl:7", row, kind)
    assert caught.value.what == "file.jsonl:7" and says in caught.value.why


def test_all_faults_of_a_file_are_told_up_to_a_number(tmp_path: Path) -> None:
    good, bad = {"prompt": "a", "completion": "b"}, {"prompt": "a"}
    name = write_rows(tmp_path / "x.jsonl", [good, *[bad] * (MAX_FAULTS + 3), good])
    rows, faults = read_sft_rows(tmp_path / name, name, "sft")
    assert [row.where for row in rows] == [f"{tmp_path / name}:{n}" for n in (1, MAX_FAULTS + 5)]
    assert [fault.what for fault in faults[:2]] == [f"{tmp_path / name}:{n}" for n in (2, 3)]
    assert len(faults) == MAX_FAULTS + 1 and faults[-1].why == "3 more rows cannot be used"


def test_a_line_that_is_not_json_is_one_fault_among_others(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n[1]\n{"prompt": "a", "completion": "b"}\n')
    rows, faults = read_sft_rows(tmp_path / "x.jsonl", "x.jsonl", "sft")
    assert len(rows) == 1
    says = ["1 there is no `completion`", "2 not a JSON object", "3 a row is an object"]
    told = [f"{fault.what.rpartition(':')[2]} {fault.why}" for fault in faults]
    assert all(one.startswith(start) for one, start in zip(told, says, strict=True)), told


def test_a_parquet_file_is_read_too(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_pylist([{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": None}])
    parquet.write_table(table, tmp_path / "x.parquet")
    rows, faults = read_sft_rows(tmp_path / "x.parquet", "x.parquet", "sft")
    assert [row.completion for row in rows] == ["b"]
    assert "row 2" in faults[0].what and "no `completion`" in faults[0].why


def test_a_file_that_is_not_there_is_told_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text("")
    with pytest.raises(RelaxError) as caught:
        read_sft_rows(tmp_path / "chat.jsonl", "chat.jsonl", "sft")
    assert caught.value.what == "cold_start.path = 'chat.jsonl'" and "chats.jsonl" in caught.value.hint
