"""Columns of a row: each is used, mapped, handed to the reward, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from relax_rt.roles.data.columns import ColumnReader, unknown_notes
from relax_rt.roles.data.items import RawItem, answer_text
from relax_rt.transport.rpc.errors import RelaxError

TOOL = {"type": "function", "function": {"name": "w", "parameters": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "w", "arguments": "{}"}}


def read(row: Any, columns: dict[str, str] | None = None, **more: Any) -> RawItem:
    return ColumnReader(columns, **more).read("f:1", row)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


VERL = {
    "prompt": [user("1+1?")],
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "data_source": "sums",
    "ability": "math",
    "extra_info": {"index": 1},
}


@pytest.mark.parametrize(
    ("row", "form", "asked", "answer"),
    [
        ({"prompt": "q", "answer": "a"}, "prompt", "q", "a"),
        (VERL, "verl", "user: 1+1?", "2"),
        (VERL | {"prompt": "1+1?"}, "verl", "1+1?", "2"),
        (VERL | {"reward_model": {"ground_truth": ["2", "two"]}}, "verl", "user: 1+1?", ["2", "two"]),
        (VERL | {"reward_model": {"ground_truth": {"target": 24, "numbers": [1, 2]}}}, "verl", "user: 1+1?", ...),
        (VERL | {"answer": "own"}, "verl", "user: 1+1?", "own"),
        ({"prompt": [user("q")], "solution": "s"}, "trl", "user: q", "s"),
        ({"prompt": "q", "solution": "s"}, "trl", "q", "s"),
        ({"prompt": "q", "completion": "c"}, "trl", "q", "c"),
        ({"prompt": "q", "ground_truth": 7}, "trl", "q", 7),
        ({"prompt": [user("q")], "completion": [{"role": "assistant", "content": "c"}]}, "trl", "user: q", "c"),
        ({"prompt": [user("q")], "answer": [1]}, "trl", "user: q", [1]),
        ({"messages": [user("q"), {"role": "assistant", "content": "a"}]}, "openai", "user: q", "a"),
        ({"messages": [user("q")], "reference_answer": "r"}, "openai", "user: q", "r"),
        ({"messages": [{"role": "developer", "content": "d"}, user("q")], "answer": 2}, "openai", ..., 2),
        ({"messages": [user("q"), {"role": "assistant", "tool_calls": [CALL]}]}, "openai", "user: q", [CALL]),
        (
            {"conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}]},
            "sharegpt",
            "user: 1",
            "2",
        ),
        ({"conversation": [{"from": "user", "value": "1"}], "answer": "x"}, "sharegpt", "user: 1", "x"),
        ({"conversations": [user("1"), {"role": "assistant", "content": "2"}]}, "sharegpt", "user: 1", "2"),
        (
            {"conversations": [{"from": who, "value": who} for who in ("system", "human", "gpt", "human", "chatgpt")]},
            "sharegpt",
            "system: system\nuser: human\nassistant: gpt\nuser: human",
            "chatgpt",
        ),
    ],
)
def test_forms_are_found_by_their_columns(row: Any, form: str, asked: Any, answer: Any) -> None:
    reader = ColumnReader()
    raw = reader.read("f:1", row)
    assert reader.forms == {form: 1}
    assert asked is ... or raw.question == asked
    assert raw.answer == (row["reward_model"]["ground_truth"] if answer is ... else answer)
    assert not reader.unknown
    assert ColumnReader(form=form).read("f:1", row) == raw  # type: ignore[arg-type]
    other: Any = "verl" if form != "verl" else "openai"
    with pytest.raises(RelaxError, match=f"the row is of form '{form}'"):
        ColumnReader(form=other).read("f:1", row)


def test_columns_of_verl_reach_the_reward() -> None:
    assert read(VERL).metadata == {key: VERL[key] for key in ("reward_model", "data_source", "ability", "extra_info")}


@pytest.mark.parametrize(
    ("columns", "row", "expected"),
    [
        ({"prompt": "question"}, {"question": "q", "answer": "a"}, ("q", "a", {})),
        ({"prompt": "p", "answer": "a.b.c"}, {"p": "q", "a": {"b": {"c": 3}}}, ("q", 3, {"a": {"b": {"c": 3}}})),
        ({"answer": "a.b"}, {"prompt": "q", "a.b": 1, "a": {"b": 2}}, ("q", 1, {"a": {"b": 2}})),
        ({"answer": ""}, {"prompt": "q", "tests": ["t"]}, ("q", "", {"tests": ["t"]})),
        ({"metadata": "info"}, {"prompt": "q", "answer": 1, "info": {"k": 1}}, ("q", 1, {"k": 1})),
        (
            {"level": "info.level"},
            {"prompt": "q", "answer": 1, "info": {"level": 4}},
            ("q", 1, {"level": 4, "info": ...}),
        ),
        ({"prompt": "question"}, {"question": "q", "messages": "other", "answer": 1}, ("q", 1, {"messages": "other"})),
        ({"answer": "solution"}, {"prompt": "q", "solution": "s", "answer": "long"}, ("q", "s", {"answer": "long"})),
        ({}, {"prompt": [user("q")], "answer": 1, "solution": "long"}, ("user: q", 1, {"solution": "long"})),
        ({"pictures": "images"}, {"prompt": "q", "answer": 1, "images": ["p"]}, ("q", 1, {"pictures": ["p"]})),
    ],
)
def test_columns_are_mapped(columns: dict[str, str], row: Any, expected: Any) -> None:
    raw = read(row, columns)
    question, answer, metadata = expected
    assert (raw.question, raw.answer) == (question, answer)
    assert raw.metadata == {key: row[key] if value is ... else value for key, value in metadata.items()}


@pytest.mark.parametrize(
    ("row", "columns", "words"),
    [
        ({"question": "q", "answer": "a"}, {}, r'columns are \'question\'.*data.columns = { prompt = "question" }'),
        ({"problem": "q", "solution": "a"}, {}, 'data.columns = { prompt = "problem" }'),
        ({"prompt": "q", "label": 1}, {}, r'no `answer`.*data.columns = { answer = "label" }.*answer = "" } if there'),
        ({"prompt": "q", "solution": "a", "ground_truth": "b"}, {}, "solution and ground_truth.*say which"),
        ({"prompt": "q"}, {"answer": "reward_model.ground_truth"}, "the row has no 'reward_model'"),
        (VERL, {"answer": "reward_model.groundtruth"}, "`reward_model` has no .*did you mean 'ground_truth'"),
        (VERL, {"answer": "data_source.x"}, "`data_source` has no 'x'; it has 'sums'"),
        ({"prompt": "q", "answer": 1, "images": ["a.png"]}, {}, r'column `images`.*data.ignore = \["images"\]'),
        ({"prompt": "q", "answer": 1, "video": {"path": "v"}}, {}, "column `video`"),
        ({"prompt": "q", "answer": 1, "metadata": {"level": 1}, "level": 2}, {}, "column `level` is also a key"),
        ({"prompt": "q", "answer": 1, "metadata": "{"}, {}, "`metadata` is text that is not JSON"),
        ({"prompt": "q", "answer": 1, "metadata": [1]}, {}, "`metadata` is an object"),
        ({"prompt": "q", "answer": 1, "system": ["s"]}, {}, "`system` is text"),
        (
            {"messages": [{"role": "system", "content": "s"}, user("q")], "system": "t", "answer": 1},
            {},
            "`system` column",
        ),
        ({"prompt": "q", "answer": 1, "tools": {"name": "w"}}, {}, "`tools` is a list"),
        ({"prompt": "q", "answer": 1, "tools": [{"type": "function"}]}, {}, "`tools`: number 1 has no function"),
        ({"prompt": "q", "answer": 1, "tools": "[{"}, {}, "`tools` is text that is not JSON"),
        ({"prompt": ["q"], "answer": 1}, {}, "`prompt`, message 1 is not an object"),
        ({"prompt": 7, "answer": 1}, {}, "`prompt` is text or a list of messages"),
        ({"prompt": None, "answer": 1}, {}, "`prompt` is null"),
        ({"question": None, "answer": 1}, {"prompt": "question"}, "`question` is null"),
        ({"prompt": None, "messages": None, "answer": 1}, {}, "`prompt` and `messages` are null"),
        ({"conversations": None}, {}, "`conversations` is null"),
        ({"messages": "q", "answer": 1}, {}, "`messages` is a list of objects"),
        ({"conversations": "q"}, {}, "`conversations` is a list of turns"),
        ({"conversations": [{"from": "human", "value": "1"}]}, {}, "no `answer`"),
        ({"conversations": [{"from": "hunan", "value": "1"}]}, {}, "role 'hunan'.*is 'human' meant"),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, {}, "message 1 is a function call that is not"),
        ({"messages": [{"role": "user", "content": None}], "answer": 1}, {}, "its content is None"),
        (
            {"messages": [{"role": "assistant", "content": None}, user("q")], "answer": 1},
            {},
            "message 1.*content is None",
        ),
        ({"messages": [user("q") | {"content": 5}], "answer": 1}, {}, "its content is 5"),
        (
            {"messages": [user("q") | {"content": [{"type": "image_url"}]}], "answer": 1},
            {},
            "a part of type 'image_url'",
        ),
        ({"messages": [user("q") | {"content": [{"type": "text"}]}], "answer": 1}, {}, "a part that is no text"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": "x"}], "answer": 1},
            {},
            "`tool_calls` is a list",
        ),
        ({"messages": [user("q"), {"role": "assistant", "content": "a"}], "answer": "a"}, {}, "leave `answer` out"),
        ("text", {}, "a row is an object"),
        (None, {}, "a row is an object"),
    ],
)
def test_what_cannot_be_used_is_named(row: Any, columns: dict[str, str], words: str) -> None:
    with pytest.raises(RelaxError, match=f"f:1: .*{words}"):
        read(row, columns)


SAID = [user("q"), {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("row", "columns", "words"),
    [
        ({"messages": SAID, "answer": "a"}, {}, r'leave `answer` out (data.ignore = ["answer"]) to take that message'),
        ({"messages": SAID, "solution": "a"}, {}, r'leave `solution` out (data.ignore = ["solution"]) to take'),
        ({"messages": SAID, "reference_answer": "a"}, {}, "leave `reference_answer` out"),
        ({"prompt": SAID, "ground_truth": 7}, {}, "leave `ground_truth` out"),
        ({"prompt": SAID, "completion": "c"}, {}, "leave `completion` out"),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "solution": "a"},
            {},
            "leave `solution` out",
        ),
        ({"messages": SAID, "label": 1}, {"answer": "label"}, "leave data.columns.answer out to take that message"),
        ({"messages": SAID}, {"answer": ""}, "leave data.columns.answer out to take that message"),
        (VERL | {"prompt": SAID}, {}, "(leave the message out)"),
    ],
)
def test_an_answer_beside_a_last_turn_is_named_by_its_column(row: Any, columns: dict[str, str], words: str) -> None:
    with pytest.raises(RelaxError, match="f:1: the last message is the assistant's") as refused:
        read(row, columns)
    assert words in str(refused.value)
    if "data.ignore" in words:
        (name,) = row.keys() - {"messages"}
        assert read(row, ignore=[name]).answer == "a", "what the message says helps"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}], "1+1?"),
        ([{"type": "input_text", "text": "q"}], "q"),
        (["a", {"type": "text", "text": "b"}], "ab"),
        ([], ""),
        ("", ""),
    ],
)
def test_parts_of_text_are_joined(content: Any, text: str) -> None:
    raw = read({"messages": [user("") | {"content": content}], "answer": ""})
    assert raw.messages == [user(text)]


def test_roles_have_one_name() -> None:
    names = ("developer", "human", "gpt", "observation", "function_call", "tool", "user")
    values = ["c"] * 4 + ['{"name": "w", "arguments": {"x": 1}}', "sun", "and?"]
    turns = [{"from": name, "value": value} for name, value in zip(names, values, strict=True)]
    raw = read({"conversations": turns, "answer": 1, "tools": '[{"name": "w", "parameters": {"a": null}}]'})
    assert raw.messages is not None
    assert [m["role"] for m in raw.messages] == ["system", "user", "assistant", "tool", "assistant", "tool", "user"]
    assert raw.messages[4]["tool_calls"] == [{"type": "function", "function": {"name": "w", "arguments": {"x": 1}}}]
    assert raw.messages[4]["content"] == ""
    assert raw.tools == [{"type": "function", "function": {"name": "w", "parameters": {}}}]


def test_a_call_without_content_and_keys_that_parquet_fills_in() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [CALL], "name": None}
    raw = read(
        {"messages": [user("q") | {"tool_calls": None}, call, user("and?") | {"name": None}], "answer": ["a", "b"]}
    )
    assert raw.messages == [user("q"), {"role": "assistant", "content": "", "tool_calls": [CALL]}, user("and?")]
    assert raw.answer == ["a", "b"]


def test_a_system_and_a_developer_message_become_one() -> None:
    said = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, user("q")]
    assert read({"messages": said, "answer": ""}).messages == [{"role": "system", "content": "a\n\nb"}, user("q")]


@pytest.mark.parametrize("answer", ["a", 42, 42.5, True, None, ["sun", "sunny"], {"x": [1, {"y": None}]}])
def test_answers_keep_their_type(answer: Any) -> None:
    found = read({"prompt": "q", "answer": answer}).answer
    assert found == answer and type(found) is type(answer)


@pytest.mark.parametrize(
    ("row", "columns", "answer"),
    [
        ({"prompt": "q", "solution": "s"}, {}, "s"),
        ({"prompt": [user("q")], "completion": "c"}, {}, "c"),
        ({"messages": SAID}, {}, "a"),
        ({"conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}]}, {}, "2"),
        (VERL, {}, "2"),
        ({"prompt": "q", "solution": "s"}, {"answer": "answer"}, None),
        ({"prompt": "q"}, {}, None),
        ({"messages": [user("q")]}, {}, None),
    ],
)
def test_a_null_answer_gives_way_to_another_one(row: Any, columns: dict[str, str], answer: Any) -> None:
    assert read(row | {"answer": None}, columns).answer == answer


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("042", "042"),
        (42, "42"),
        (42.0, "42"),
        (-0.5, "-0.5"),
        (1e300, "1e+300"),
        (2.0**60, "1.152921504606847e+18"),
        (True, "true"),
        (None, ""),
        (["é", 1], '["é", 1]'),
        ({"a": 1}, '{"a": 1}'),
    ],
)
def test_an_answer_as_text(answer: Any, text: str) -> None:
    assert answer_text(answer) == text


def test_columns_of_unknown_names_are_reported_once() -> None:
    reader = ColumnReader()
    for number in range(1, 4):
        row = {"prompt": "q", "answer": 1, "tests": ["t"], "metadta": {"k": number}}
        assert reader.read(f"f:{number}", row).metadata == {"tests": ["t"], "metadta": {"k": number}}
    tests, metadata = unknown_notes(reader.unknown)
    assert "column 'tests' (3 rows, the first f:1)" in tests and "meant" not in tests
    assert "is 'metadata' meant? Then data.columns = { metadata = \"metadta\" }" in metadata


@pytest.mark.parametrize("column", ["metadta", "mesages", "answr", "tool", "sytem", "answers"])
def test_a_near_miss_of_a_known_column_is_asked_about(column: str) -> None:
    reader = ColumnReader()
    reader.read("f:1", {"prompt": "q", "answer": 1, column: "x"})
    (note,) = unknown_notes(reader.unknown)
    assert repr(column) in note and " meant?" in note


def test_ignored_columns_and_the_name_of_a_source() -> None:
    row = {"prompt": "q", "answer": 1, "images": ["p"], "tools": [TOOL], "extra": 1}
    raw = read(row, ignore=["images", "tools", "extra"], name="web")
    assert raw.tools is None and raw.metadata == {"source": "web"}
    assert read(row | {"source": "own"}, ignore=["images"], name="web").metadata["source"] == "own"
