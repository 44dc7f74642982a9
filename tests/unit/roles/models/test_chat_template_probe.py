"""What a chat template takes is found when it is loaded: tool calls, results, roles and contents in its own form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_rt.roles.agentic.tokens.template import ChatTemplate
from relax_rt.roles.models.chat_template import (
    CALLS,
    DEVELOPER,
    PARALLEL,
    RESULTS,
    SYSTEM,
    TURNS,
    TemplateCapabilities,
    prepare_message,
    probe_template,
)
from relax_rt.roles.models.tiny import character_tokenizer
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.transport.rpc.errors import RelaxError

OPEN = "{{ '<|assistant|>' if add_generation_prompt }}"
OTHERS = "{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}"


def template(calls: str, others: str = OTHERS) -> str:
    """How a message with calls is written, and how the others are."""
    return (
        "{% for m in messages %}{% if m.tool_calls %}"
        + calls
        + "{% else %}"
        + others
        + "{% endif %}{% endfor %}"
        + OPEN
    )


EACH = "{% for c in m.tool_calls %}"
TEXT = template(EACH + "{{ '<|call|>' + c.function.name + '\\n' + c.function.arguments + '<|call_end|>' }}{% endfor %}")
FENCED = template(
    "{{ '<|assistant|>' + (m.content or '') }}"
    + EACH
    + "{{ c.function.name + '\\n```json\\n' + c.function.arguments }}"
    "{{ '\\n```' }}{% endfor %}"
)
ONLY_NULL = (
    "{% for m in messages %}{% if m.role == 'assistant' and (m.content is not defined or m.content is none) %}"
    + (EACH + "{{ c.function.name + c.function.arguments }}{% endfor %}")
    + "{% else %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
)
PIPED = template(EACH + "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}")
ITEMS = template(EACH + "{% for k, v in c.function.arguments.items() %}{{ k + '=' + v }}{% endfor %}{% endfor %}")
EITHER = template(
    EACH + "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}{% endfor %}"
)
PRINTED = template(EACH + "{{ c.function.arguments }}{% endfor %}")


def tokenizer(source: str) -> ChatTokenizer:
    raw = character_tokenizer()
    raw.chat_template = source
    return ChatTokenizer(raw, Path("probed"))


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
    }


USER = {"role": "user", "content": "1 + 1?"}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "2"}


@pytest.mark.parametrize(
    ("source", "as_text", "null"),
    [
        (TEXT, True, False),
        (FENCED, True, False),
        (ONLY_NULL, True, True),
        (PRINTED, True, False),
        (PIPED, False, False),
        (ITEMS, False, False),
        (EITHER, False, False),
    ],
)
@pytest.mark.parametrize("given", [{"a": 1, "b": [None, True]}, '{"a": 1, "b": [null, true]}'])
def test_arguments_are_given_as_the_template_wants_them(source: str, as_text: bool, null: bool, given: Any) -> None:
    chat = tokenizer(source)
    found = chat.capabilities
    assert (found.arguments_as_text, found.null_content, found.missing) == (as_text, null, {})
    if source is not ITEMS:
        text = chat.text([USER, call(given), RESULT])
        assert '{"a": 1, "b": [null, true]}' in text and "2<|end|>" in text
        assert ChatTemplate(chat).text([USER, call(given), RESULT]) == text


def test_a_call_without_an_envelope_is_the_same_call() -> None:
    chat, said = tokenizer(TEXT), call({"a": 1})
    bare = {**said, "tool_calls": [said["tool_calls"][0]["function"]]}
    assert chat.text([USER, bare, RESULT]) == chat.text([USER, said, RESULT])


def test_a_template_without_results_is_not_taken_for_one_of_single_calls() -> None:
    deaf = tokenizer(PIPED.replace("{% if m.tool", "{% if m.role == 'tool' %}{% elif m.tool")).capabilities
    single = tokenizer(PIPED.replace("m.tool_calls %}{{", "m.tool_calls[:1] %}{{")).capabilities
    assert (deaf.one_call, single.one_call) == (False, True)


@pytest.mark.parametrize("source", [TEXT, FENCED, ONLY_NULL, PRINTED, PIPED, EITHER])
@pytest.mark.parametrize("given", [None, "", "  ", "null", {}, "{}"])
def test_a_call_without_arguments_is_rendered_as_an_empty_object(source: str, given: Any) -> None:
    assert "{}" in tokenizer(source).text([USER, call(given), RESULT])


def test_text_that_is_no_json_is_left_to_the_template() -> None:
    assert "oops" in tokenizer(TEXT).text([USER, call("oops"), RESULT])
    for odd in ('{"a": NaN}', '{"a": 1e999}', "[1]"):
        assert prepare_message(call(odd), TemplateCapabilities())["tool_calls"][0]["function"]["arguments"] == odd


def missing(source: str) -> dict[str, str]:
    found = tokenizer(source).capabilities.missing
    return {key: ("raises " if fault.raises else "") + fault.why for key, fault in found.items()}


@pytest.mark.parametrize(
    ("source", "wrong", "why"),
    [
        (template("{{ raise_exception('no calls here') }}"), CALLS, "raises it raises TemplateError: no calls here"),
        (template("{{ m.content }}"), CALLS, "does not write all arguments of calls"),
        (template("{{ c.function }}"), CALLS, "raises it raises UndefinedError"),
        (template("{{ m.tool_calls | tojson | tojson }}"), CALLS, "as a quoted text"),
        (template("{{ m.tool_calls[0].function.arguments | string }}{{ {}.x.y }}"), CALLS, "raises it raises"),
        (template(EACH + "{{ c.function.arguments.items() | list }}{% endfor %}"), CALLS, "in Python's form"),
        (PIPED.replace("{% if m.tool", "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% elif m.tool"),
         RESULTS, "raises it raises TemplateError: no tools"),
        (PIPED.replace("{% if m.tool", "{% if m.role == 'tool' %}{% elif m.tool"), RESULTS, "does not write the words"),
        (PIPED.replace("{% for m", "{{ raise_exception('no system') if messages[0].role == 'system' }}{% for m"),
         SYSTEM, "raises it raises TemplateError: no system"),
        (PIPED.replace("{% if m.tool", "{% if m.role == 'system' %}{% elif m.tool"), SYSTEM, "does not write"),
        (PIPED.replace("{% for m", "{{ raise_exception('one turn') if messages | length > 2 and not tools }}{% for m"),
         TURNS, "raises it raises TemplateError: one turn"),
        (PIPED.replace("m.tool_calls %}{{", "m.tool_calls[:1] %}{{"), PARALLEL, "does not write all arguments"),
    ],
)  # fmt: skip
def test_what_a_template_cannot_render_is_found(source: str, wrong: str, why: str) -> None:
    assert why in missing(source)[wrong]


def test_a_template_that_can_do_it_all_lacks_nothing() -> None:
    for source in (TEXT, FENCED, ONLY_NULL, PIPED, ITEMS, EITHER, PRINTED):
        assert missing(source) == {}


def test_a_developer_is_a_system_message_where_the_template_does_not_know_one() -> None:
    told = [{"role": "developer", "content": "Be brief."}, USER]
    assert tokenizer(PIPED).text(told) == "<|system|>Be brief.<|end|><|user|>1 + 1?<|end|><|assistant|>"
    knows = tokenizer("{# developer, system #}" + PIPED)
    assert knows.capabilities.developer and knows.text(told).startswith("<|developer|>Be brief.")
    drops = tokenizer(PIPED.replace("{% if m.tool", "{% if m.role == 'developer' %}{% elif m.tool"))
    assert drops.capabilities.developer and DEVELOPER in drops.capabilities.missing
    with pytest.raises(RelaxError, match="takes no message with the role 'developer'"):
        drops.text(told)


@pytest.mark.parametrize("role", ["system", "developer", "tool"])
def test_a_message_that_would_be_left_out_is_refused(role: str) -> None:
    source = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
    with pytest.raises(RelaxError, match=f"takes no message with the role '{role}': it does not write"):
        tokenizer(source).text([USER, {"role": role, "content": "x"}])


def test_a_template_that_wants_lists_of_parts_gets_them() -> None:
    source = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    )
    assert tokenizer(source).capabilities.text_as_parts
    assert tokenizer(source).text([USER]) == "<|user|>1 + 1?"
    given = [{"type": "text", "text": "1 "}, {"type": "text", "text": "+ 1?"}]
    for one in (source, PIPED):
        assert "1 + 1?" in tokenizer(one).text([{"role": "user", "content": given}])


def test_keys_without_a_value_are_not_there() -> None:
    asks = "{% for m in messages %}{{ 'CALLS' if 'tool_calls' in m }}{{ m.content }}{% endfor %}"
    for calls in (None, []):
        said = {"role": "assistant", "content": "Yes.", "tool_calls": calls}
        assert "CALLS" not in tokenizer(asks).text([USER, said, USER])


def test_tools_are_given_to_the_template() -> None:
    source = "{{ tools | tojson if tools else 'none' }}" + PIPED
    tools = [{"type": "function", "function": {"name": "add"}}]
    chat = tokenizer(source)
    assert chat.text([USER]).startswith("none") and chat.text([USER], tools).startswith(json.dumps(tools))
    assert chat.render([USER], tools) == chat.encode(chat.text([USER], tools)) != chat.render([USER])


def test_what_a_template_stumbles_over_is_told_with_the_folder() -> None:
    for source in ("{{ messages[0].content.x.y }}", "{{ messages[5].content + 'a' }}", "{{ 1 / 0 }}"):
        with pytest.raises(RelaxError, match="the chat template of probed"):
            tokenizer(source).text([USER])


def test_a_probe_that_always_raises_finds_everything_missing() -> None:
    def never(messages: list[Any], tools: list[Any]) -> str:
        raise ValueError("no")

    found = probe_template(never, "")
    assert set(found.missing) == {SYSTEM, DEVELOPER, TURNS, CALLS, RESULTS, PARALLEL} and not found.one_call
