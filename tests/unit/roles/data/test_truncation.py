"""Overlong prompts lose their oldest content, and keep what every prompt begins and ends with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.data.source import PromptSource, truncated
from relax_rt.roles.models.tiny import character_tokenizer
from relax_rt.roles.models.tokenizer import ChatTokenizer

TEMPLATE = (
    "<|pad|>{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)
"""`<|pad|>` stands for a beginning of sequence."""


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    raw = character_tokenizer()
    raw.chat_template = TEMPLATE
    return ChatTokenizer(raw, Path("tiny"))


def say(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


SYSTEM, OLD, REPLY = say("system", "SYS"), say("user", "a" * 20), say("assistant", "b" * 20)
NEW = say("user", "0123456789")
FUNCTION = {"name": "f", "arguments": {}}
CALL = {**say("assistant", None), "tool_calls": [{"id": "1", "type": "function", "function": FUNCTION}]}
PARTS = [{"type": "text", "text": "01234"}, {"type": "text", "text": "56789"}]
RESULT = say("tool", "42")
OPENING = "<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("messages", "most", "text"),
    [
        # One message: its beginning goes, its marks do not. 1 + 1 + content + 1 + 1 tokens.
        ([NEW], 10, f"<|pad|><|user|>456789{OPENING}"),
        ([NEW], 5, f"<|pad|><|user|>9{OPENING}"),
        ([SYSTEM, NEW], 16, f"<|pad|><|system|>SYS<|end|><|user|>3456789{OPENING}"),
        ([say("developer", "SYS"), NEW], 16, f"<|pad|><|system|>SYS<|end|><|user|>3456789{OPENING}"),
        # Whole exchanges go first.
        ([OLD, REPLY, NEW], 20, f"<|pad|><|user|>0123456789{OPENING}"),
        ([SYSTEM, OLD, REPLY, NEW], 20, f"<|pad|><|system|>SYS<|end|><|user|>0123456789{OPENING}"),
        ([SYSTEM, OLD, REPLY, say("user", "c"), say("assistant", "d"), NEW], 26,
         f"<|pad|><|system|>SYS<|end|><|user|>c<|end|><|assistant|>d<|end|><|user|>0123456789{OPENING}"),
        ([SYSTEM, REPLY, NEW], 20, f"<|pad|><|system|>SYS<|end|><|user|>0123456789{OPENING}"),
        ([say("user", PARTS)], 8, f"<|pad|><|user|>6789{OPENING}"),
    ],
)  # fmt: skip
def test_the_oldest_content_goes(
    tokenizer: ChatTokenizer, messages: list[dict[str, Any]], most: int, text: str
) -> None:
    found = truncated(messages, tokenizer.render, most)
    assert found is not None
    kept, tokens = found
    assert tokenizer.spell(tokens) == text and len(tokens) <= most
    assert tokens == tokenizer.render(kept)


def test_a_call_stays_with_its_result(tokenizer: ChatTokenizer) -> None:
    asked = [SYSTEM, OLD, REPLY, say("user", "c" * 30), CALL, RESULT]
    whole = len(tokenizer.render(asked[3:]))
    found = truncated(asked, tokenizer.render, whole)
    assert found is not None
    kept, tokens = found
    assert [one["role"] for one in kept] == ["system", "user", "assistant", "tool"] and len(tokens) <= whole
    assert set(kept[1]["content"]) == {"c"} and 0 < len(kept[1]["content"]) < 30


@pytest.mark.parametrize(
    ("messages", "most"),
    [
        ([NEW], 4),
        ([SYSTEM, NEW], 9),
        ([say("system", "s" * 40), NEW], 30),
        ([SYSTEM, say("user", "c"), CALL, say("tool", "r" * 40)], 30),
        ([SYSTEM, REPLY], 10),
        ([say("user", [{"type": "image"}, {"type": "text", "text": "c"}])], 1),
    ],
)
def test_what_cannot_be_shortened_is_not(tokenizer: ChatTokenizer, messages: list[dict[str, Any]], most: int) -> None:
    def render(some: list[dict[str, Any]]) -> list[int]:
        return [0] * 50 if isinstance(some[-1]["content"], list) else tokenizer.render(some)

    assert truncated(messages, render, most) is None


def test_a_run_counts_what_was_cut_and_what_could_not_be(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    rows = [{"prompt": f"{n:02d}" + "x" * (10 if n % 3 else 40), "answer": ""} for n in range(30)]
    rows += [{"messages": [say("system", f"{n:02d}" + "s" * 60), say("user", "x")], "answer": ""} for n in range(3)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = DataTable(path="d.jsonl", max_prompt_tokens=20, overlong="truncate_left", held_out=0.3)
    source = PromptSource.load(data, tokenizer, seed=0, config_dir=tmp_path)
    assert (source.report.truncated, source.report.dropped, source.report.longest_tokens) == (10, 3, 20)
    for item in (*source.train, *source.held_out):
        assert tokenizer.spell(item.tokens).startswith("<|pad|><|user|>")
        assert item.tokens == tokenizer.render(item.messages)
