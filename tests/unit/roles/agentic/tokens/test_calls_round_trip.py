"""A call that a template writes is read back as the same call, for each family."""

from __future__ import annotations

import json
import keyword
from functools import cache
from typing import Any

import pytest
from call_templates import ENDS, TEMPLATES
from chat_fixtures import tiny, user
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_rt.roles.agentic.tokens.template import ChatTemplate

PARSERS = {
    "glm47": "glm45",
    "mistral args": "mistral",
    "deepseek v3": "deepseek",
    "deepseek v3.1": "deepseek",
}
ONE_CALL = {"gpt_oss"}
PLAIN_VALUES = {"qwen3_coder", "glm45", "glm47"}
"""Families whose marks end a value: no value can hold them."""
MARKS = ("<parameter=", "</parameter>", "<arg_key>", "</arg_value>")

OPENINGS = {
    "hermes": "<tool_call>",
    "qwen3_coder": "<tool_call>",
    "glm45": "<tool_call>",
    "glm47": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "mistral args": "[TOOL_CALLS]",
    "deepseek v3": "<｜tool▁calls▁begin｜>",
    "deepseek v3.1": "<｜tool▁calls▁begin｜>",
    "kimi_k2": "<|tool_calls_section_begin|>",
}
"""What begins a call, in families that mark it."""
NAMES = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.sampled_from(["</tool_call>", "<tool_call>", "a\n", "\na", "True", "null", "3", "[1]", "\\d", '"', "'", "```"]),
)
NUMBERS = st.one_of(st.integers(-(10**12), 10**12), st.floats(allow_nan=False, allow_infinity=False))
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(NAMES, SCALARS, max_size=3))
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=4)), min_size=1, max_size=3)
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


@cache
def chat_of(family: str) -> ChatTemplate:
    return ChatTemplate(tiny(), template=TEMPLATES[family])


def tool(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    properties = {key: {"type": KINDS.get(type(value), ["integer", "null"])} for key, value in arguments.items()}
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_templates_family_and_form_are_found(family: str) -> None:
    chat = chat_of(family)
    assert chat.tool_parser == PARSERS.get(family, family)
    assert chat.capabilities.arguments_as_text == family.startswith("deepseek")
    assert set(chat.capabilities.missing) == ({"parallel calls"} if family in ONE_CALL else set())


@pytest.mark.parametrize("family", TEMPLATES)
@settings(max_examples=60)
@given(calls=CALLS)
def test_what_a_template_writes_is_read_back(family: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    if family in PLAIN_VALUES:
        text = json.dumps(calls, ensure_ascii=False)
        calls = [] if any(mark in text for mark in MARKS) else calls
    calls = list({name: (name, arguments) for name, arguments in calls}.values())[: 1 if family in ONE_CALL else 3]
    if not calls:
        return
    chat, tools = chat_of(family), [tool(*call) for call in calls]
    functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in calls]
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"call0000{n}", "type": "function", "function": one} for n, one in enumerate(functions)],
    }
    prompt = chat.text([user("Go.")], tools)
    whole = chat.text([user("Go."), message], tools, generation=False)
    assert whole.startswith(prompt)
    end = ENDS.get(family, "<|end|>")
    assert whole.endswith(end)
    text = whole[len(prompt) :]
    for written in (text, text.removesuffix(end)) if family in ENDS else (text.removesuffix(end),):
        parsed = chat.parse(written, tools, prompt=prompt)
        # As JSON, so that 1 and 1.0 and true are three things.
        assert [(one.name, json.dumps(json.loads(one.arguments))) for one in parsed.calls] == [
            (name, json.dumps(arguments)) for name, arguments in calls
        ]
        assert (parsed.content, parsed.malformed) == ("", 0)


@pytest.mark.parametrize("family", OPENINGS)
@settings(max_examples=60)
@given(calls=CALLS, at=st.integers(0, 400), junk=st.sampled_from(["", "{", "}", '"', "\n", "<", "True", "="]))
def test_a_broken_call_is_never_lost_without_a_count(
    family: str, calls: list[tuple[str, dict[str, Any]]], at: int, junk: str
) -> None:
    chat, tools = chat_of(family), [tool(*call) for call in calls]
    name, arguments = calls[0]
    function = {"name": name, "arguments": arguments}
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
    }
    prompt = chat.text([user("Go.")], tools)
    text = chat.text([user("Go."), message], tools, generation=False)[len(prompt) :].removesuffix(
        ENDS.get(family, "<|end|>")
    )
    at = min(at, len(text))
    broken = text[:at] + junk + text[at + len(junk) :]
    parsed = chat.parse(broken, tools, prompt=prompt)
    if OPENINGS[family] in broken:
        assert parsed.calls or parsed.malformed
    for one in parsed.calls:
        assert isinstance(json.loads(one.arguments), dict)
