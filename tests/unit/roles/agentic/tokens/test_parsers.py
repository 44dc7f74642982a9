"""Tool calls and thoughts in the writing of the common families."""

from __future__ import annotations

import json
import keyword
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
from call_templates import ENDS, TEMPLATES
from chat_fixtures import LLAMA3, MOVES_TOOLS, QWEN3, TOOLS, smollm2, tiny, user
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_rt.roles.agentic.tokens.parsers import TOOL_PARSERS, parse, split_reasoning, tool_family
from relax_rt.roles.agentic.tokens.template import ChatTemplate
from relax_rt.roles.agentic.tokens.types import Tool
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.transport.rpc.errors import Refused

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PARAMETERS = "<parameter=a>\n1\n</parameter>\n<parameter=note>\n2\n</parameter>"
CODER = f"<tool_call>\n<function=add>\n{PARAMETERS}\n</function>\n</tool_call>"
V3 = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
V31 = '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'

READ = [
    ("hermes", f"Well.\n{HERMES}", "Well.", [("add", {"a": 1})], 0),
    ("hermes", f"{HERMES}\n{HERMES}", "", [("add", {"a": 1})] * 2, 0),
    ("hermes", HERMES.replace("arguments", "parameters"), "", [("add", {"a": 1})], 0),
    ("hermes", HERMES.replace('{"a": 1}', '"{\\"a\\": 1}"'), "", [("add", {"a": 1})], 0),
    # The model stopped before its closing mark; a mark inside an argument; calls without arguments.
    ("hermes", HERMES.removesuffix("\n</tool_call>"), "", [("add", {"a": 1})], 0),
    ("hermes", HERMES.replace("1", '"</tool_call>"'), "", [("add", {"a": "</tool_call>"})], 0),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})], 0),
    # One that cannot be read beside one that can.
    ("hermes", f"<tool_call>{{oops</tool_call>{HERMES}", "<tool_call>{oops</tool_call>", [("add", {"a": 1})], 1),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', [], 1),
    ("hermes", '<tool_call>{"name": "add", "arguments": [', '<tool_call>{"name": "add", "arguments": [', [], 1),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}', None, [], 1),
    ("qwen3_coder", CODER, "", [("add", {"a": 1, "note": "2"})], 0),
    ("qwen3_coder", "<tool_call><function=add>rest</function></tool_call>", None, [], 1),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})], 0),
    ("llama3_json", '<|python_tag|>{"name": "add"}; {"name": "now"}', "", [("add", {}), ("now", {})], 0),
    ("llama3_json", '{"name": "add"};rest', "rest", [("add", {})], 1),
    ("llama3_json", '{"sum": 3}', '{"sum": 3}', [], 0),
    ("llama3_json", '{"name": "add", "parameters": {"a"', None, [], 1),
    ("llama3_json", "<|python_tag|>print(1)", None, [], 1),
    ("mistral", '[TOOL_CALLS][{"name": "add"}, {"name": "now"}]', "", [("add", {}), ("now", {})], 0),
    ("mistral", 'Well.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now{}', "Well.", [("add", {"a": 1}), ("now", {})], 0),
    ("mistral", "[TOOL_CALLS]add(1)", None, [], 1),
    ("deepseek", f"Well.<｜tool▁calls▁begin｜>{V3}\n{V3}<｜tool▁calls▁end｜>", "Well.", [("add", {"a": 1})] * 2, 0),
    ("deepseek", f"<｜tool▁calls▁begin｜>{V31}<｜tool▁calls▁end｜>", "", [("add", {"a": 1})], 0),
    ("deepseek", V31.replace("1}", "1"), None, [], 1),
    ("none", HERMES, HERMES, [], 0),
]


@pytest.mark.parametrize(("family", "text", "content", "calls", "malformed"), READ)
def test_calls_are_read_and_what_cannot_be_read_stays_text(
    family: str, text: str, content: str | None, calls: list[tuple[str, object]], malformed: int
) -> None:
    parsed = parse(text, TOOLS, tool_parser=family, reasoning_parser="none", opened=False)
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls
    assert (parsed.content, parsed.malformed) == (text if content is None else content, malformed)


@pytest.mark.parametrize("family", TOOL_PARSERS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "Well.",
        '{"a":' * 50_000,
        "<tool_call>" * 500,
        "<tool_call>" + "[" * 50_000,
        "[" * 50_000,
        "<|channel|>" * 5_000,
        " " * 50_000 + "x",
        "[f(a=" + "-" * 50_000 + "1)]",
        "<tool_call>f<arg_key>a</arg_key><arg_value>" * 500,
    ],
)
def test_nothing_that_is_no_call_is_lost(family: str, text: str) -> None:
    assert parse(text, TOOLS, tool_parser=family, reasoning_parser="none", opened=False).content == text


def test_without_tools_nothing_is_a_call() -> None:
    parsed = parse(HERMES, (), tool_parser="hermes", reasoning_parser="none", opened=False)
    assert (parsed.content, parsed.calls) == (HERMES, ())


@pytest.mark.parametrize(
    ("text", "opened", "thought", "said"),
    [
        ("<think>\nhm\n</think>\n\nYes.", False, "hm", "Yes."),
        ("hm\n</think>\n\nYes.", True, "hm", "Yes."),
        ("<think>\nhm", False, "hm", ""),
        ("hm", True, "hm", ""),
        ("Yes. <think>no</think>", False, "", "Yes. <think>no</think>"),
    ],
)
def test_thoughts_are_told_from_words(text: str, opened: bool, thought: str, said: str) -> None:
    assert split_reasoning(text, opened=opened) == (thought, said)


def test_families_are_known_by_the_templates_text() -> None:
    assert [tool_family(text) for text in (QWEN3, LLAMA3, MOVES_TOOLS)] == ["hermes", "llama3_json", "none"]
    assert tool_family("<tool_call>\n<function=x>") == "qwen3_coder"
    assert tool_family("[TOOL_CALLS]") == "mistral"
    assert tool_family("<｜tool▁call▁begin｜>") == "deepseek"
    chat = ChatTemplate(tiny(), template=QWEN3, tool_parser="mistral")
    assert (chat.tool_parser, chat.reasoning_parser) == ("mistral", "think")
    assert ChatTemplate(tiny()).reasoning_parser == "none"
    with pytest.raises(Refused, match="did you mean 'hermes'"):
        ChatTemplate(tiny(), tool_parser="hermse")
    with pytest.raises(Refused, match="no response_template"):
        ChatTemplate(tiny(), tool_parser="model")


def test_the_tokenizers_own_response_template_goes_first() -> None:
    raw = deepcopy(smollm2().raw)
    raw.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "content": {},
            "thinking": {"open": "<<", "close": ">>"},
            "tool_calls": {
                "open": "CALL",
                "close": "END",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": {"name": "{content.f}", "arguments": "{content.x}"}},
            },
        },
    }
    chat = ChatTemplate(ChatTokenizer(raw, smollm2().folder))
    assert chat.tool_parser == "model"
    prompt = "<|im_start|>assistant\n"
    parsed = chat.parse('<<hm>>Well.CALL{"f": "add", "x": {"a": 1}}END', TOOLS, prompt=prompt)
    assert (parsed.content, parsed.reasoning, parsed.malformed) == ("Well.", "hm", 0)
    assert [(call.name, call.arguments) for call in parsed.calls] == [("add", '{"a": 1}')]
    parsed = chat.parse("CALL{END", TOOLS, prompt=prompt)
    assert (parsed.content, parsed.malformed) == ("CALL{END", 1)


def test_special_tokens_are_no_words() -> None:
    chat = ChatTemplate(smollm2(), template=QWEN3)
    parsed = chat.parse("<think>\nh<|im_start|>m\n</think>\n\nYes<|im_end|>.", (), prompt="")
    assert (parsed.content, parsed.reasoning) == ("Yes.", "hm")


def tool(name: str = "f", properties: dict[str, Any] | None = None, **more: Any) -> Tool:
    parameters = {"type": "object", "properties": properties or {}, **more}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def read(
    parser: str, text: str, *tools: Tool, reasoning: str = "think", opened: bool = False
) -> tuple[list[tuple[str, Any]], int, str]:
    """Calls, how many were malformed, and words."""
    offered = tools or (tool(), tool("g"))
    parsed = parse(text, offered, tool_parser=parser, reasoning_parser=reasoning, opened=opened)
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls], parsed.malformed, parsed.content


def hermes(arguments: str) -> str:
    return f'<tool_call>{{"name":"f","arguments":{arguments}}}</tool_call>'


NO_ARGUMENTS = [
    ("hermes", hermes("null")),
    ("hermes", hermes('""')),
    ("hermes", hermes('"  "')),
    ("hermes", hermes('"null"')),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": null}'),
    ("llama3_json", '{"name": "f", "parameters": null}'),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": ""}'),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": null}]'),
    ("mistral", "[TOOL_CALLS]f[ARGS]null"),
    ("mistral", '[TOOL_CALLS]f[ARGS]""'),
    ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>null<｜tool▁call▁end｜>"),
    ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜>"),
    ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n\n```<｜tool▁call▁end｜>"),
    ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|><|tool_call_end|>"),
    ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>null<|tool_call_end|>"),
    ("gpt_oss", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
    ("glm45", "<tool_call>f\n</tool_call>"),
    ("pythonic", "[f()]"),
]


@pytest.mark.parametrize(("parser", "text"), NO_ARGUMENTS)
def test_a_call_without_arguments_has_none(parser: str, text: str) -> None:
    assert read(parser, text) == ([("f", {})], 0, "")


NOT_FINITE = [
    ("hermes", hermes('{"n":1e999}')),
    ("hermes", hermes('{"n":-1e999}')),
    ("hermes", hermes('{"n":[0.5, 123456789e400]}')),
    ("hermes", hermes('"{\\"n\\": 1e400}"')),
    ("hermes", hermes('"{\\"n\\": NaN}"')),
    ("hermes", hermes('{"n":-Infinity}')),
    ("llama3_json", '{"name": "f", "parameters": {"n": 1e999}}'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"n": 1e999}'),
    ("deepseek", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"n": 9e999}<｜tool▁call▁end｜>'),
    ("kimi_k2", '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"n": 1e999}<|tool_call_end|>'),
    ("gpt_oss", '<|channel|>commentary to=functions.f<|message|>{"n": 1e999}<|call|>'),
    ("pythonic", "[f(n=1e999)]"),
    ("pythonic", "[f(n=[-1e999])]"),
]


@pytest.mark.parametrize(("parser", "text"), NOT_FINITE)
def test_a_number_that_json_lacks_makes_a_call_malformed(parser: str, text: str) -> None:
    assert read(parser, text) == ([], 1, text)


@pytest.mark.parametrize(
    ("text", "opened", "malformed"),
    [
        ("<think>x " + hermes("{}"), False, 1),
        ("<think>\n" + hermes("{}") + hermes('{"a": 1}'), False, 2),
        ("x " + hermes("{}"), True, 1),
        ("<think>x <tool_call>{oops", False, 1),
        (" <think>" + hermes("null"), False, 1),
        ("x <tool_call>", True, 1),
        # One that ends was only thought of, and one without a call loses nothing.
        ("<think>x " + hermes("{}") + "</think>No.", False, 0),
        ("<think>x", False, 0),
        ("x", True, 0),
    ],
)
def test_calls_in_a_thought_that_does_not_end_are_malformed(text: str, opened: bool, malformed: int) -> None:
    assert read("hermes", text, opened=opened)[:2] == ([], malformed)


def test_calls_of_other_families_in_a_thought_that_does_not_end_are_malformed() -> None:
    for parser, text in NO_ARGUMENTS:
        if parser != "gpt_oss":
            assert read(parser, f"<think>\n{text}")[:2] == ([], 1), text


def coder(**values: str) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"


POINT = {"Point": {"type": "object", "properties": {"x": {"type": "number"}}}}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "FALSE", False),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "none", "none"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "None", None),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "3", "3"),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": True}, "True", True),
        ({"$ref": "#/$defs/Point"}, '{"x": 1.5}', {"x": 1.5}),
        ({"allOf": [{"$ref": "#/$defs/Point"}]}, "{'x': None}", {"x": None}),
        ({"type": "array"}, "['a', True, None, -1]", ["a", True, None, -1]),
        ({"type": "array"}, "('a', 'b')", ["a", "b"]),
        ({"type": "object"}, "{'path': '\\d'}", {"path": "\\d"}),
        ({"items": {"type": "integer"}}, "[1]", [1]),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "integer"}, " 3 ", 3),
        # What is no value of the type stays the text that was written.
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "array"}, "{1, 2}", "{1, 2}"),
        ({"type": "array"}, "[open('x')]", "[open('x')]"),
        ({"type": "object"}, "[1]", "[1]"),
        ({"type": "string"}, "True", "True"),
        ({"type": "string"}, "null", "null"),
        ({}, "3", "3"),
        ({"$ref": "#/$defs/Nowhere"}, "3", "3"),
        ({"$ref": "#/properties/v"}, "3", "3"),
        ("no schema", "3", "3"),
    ],
)
def test_values_written_as_text_get_the_types_of_their_schema(schema: Any, text: str, value: Any) -> None:
    offered = tool(properties={"v": schema}, **{"$defs": POINT})
    calls, malformed, _ = read("qwen3_coder", coder(v=text), offered)
    assert (calls, malformed) == ([("f", {"v": value})], 0)
    # An integer and a float, and 1 and true, are not the same here.
    assert json.dumps(calls[0][1]["v"]) == json.dumps(value)


BROKEN_PAIRS = [
    ("qwen3_coder", "<parameter=a>\nhi\n<parameter=n>\n3\n</parameter>\n"),
    ("qwen3_coder", "<parameter=a>\nhi\n"),
    ("qwen3_coder", "<parameter=a>\n1\n</parameter>\nand <parameter=n>\n3\n</parameter>\n"),
    ("qwen3_coder", "<parameter=a>1</parameter><parameter=n>2<parameter=n>3</parameter>"),
    ("qwen3_coder", "<parameter=a\n1\n</parameter>"),
    ("qwen3_coder", "<parameter=a>\n<parameter=n>\n</parameter>\n"),
    ("qwen3_coder", "<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n<parameter=n>\n3\n</parameter>\n"),
    ("qwen3_coder", "<parameter=a>hi <parameter=n>3 <parameter=m>4</parameter>"),
]


@pytest.mark.parametrize(("parser", "pairs"), BROKEN_PAIRS)
def test_a_value_without_an_end_does_not_swallow_the_next(parser: str, pairs: str) -> None:
    text = f"<tool_call>\n<function=f>\n{pairs}</function>\n</tool_call>"
    assert read(parser, text) == ([], 1, text)


def test_a_value_may_hold_marks_that_do_not_end_it() -> None:
    html = "</function>\n</tool_call>\n<tool_call>"
    assert read("qwen3_coder", coder(a=html)) == ([("f", {"a": html})], 0, "")
    two = "<tool_call>\n<function=f>\n</function>\n<function=g>\n</function>\n</tool_call>"
    assert read("qwen3_coder", two) == ([("f", {}), ("g", {})], 0, "")


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 3}',
        '{"name": "Bob"}',
        '{"name": "Bob", "parameters": {"age": 3}}',
        '{"name": "Bob", "age"',
        '[{"name": "f", "arguments": {}}]',
        '{"name": "f", "age": 3}',
        '{"result": {"name": "f"}}',
        '{"name": 3}',
        '{"name": null, "items": []}',
        '{"name": "f is a function", "arguments": "two"}',
        "{}",
        "{name}",
    ],
)
def test_an_answer_in_json_is_no_call(text: str) -> None:
    assert read("llama3_json", text) == ([], 0, text)


@pytest.mark.parametrize(
    ("text", "calls", "malformed", "content"),
    [
        ('Let me see. <|python_tag|>{"name": "f"}', [("f", {})], 0, "Let me see."),
        ('{"type": "function", "name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})], 0, ""),
        ('{"name": "f", "parameters": {}, "reason": "x"}', [("f", {})], 0, ""),
        ('{"name": "f", "parameters": 3}', [], 1, None),
        ('{"type": "function", "name": "f", "para', [], 1, None),
        # What is marked as a call is one, and the environment says that there is no such tool.
        ('<|python_tag|>{"name": "h"}', [("h", {})], 0, ""),
        ("Well. <|python_tag|>print(1)", [], 1, None),
    ],
)
def test_calls_of_llama(text: str, calls: list[Any], malformed: int, content: str | None) -> None:
    assert read("llama3_json", text) == (calls, malformed, text if content is None else content)


@pytest.mark.parametrize(
    ("text", "calls", "malformed", "content"),
    [
        ('[f(a=1, b="x"), g()]', [("f", {"a": 1, "b": "x"}), ("g", {})], 0, ""),
        ("[f(a=true, b=[1, -2.5], d={'e': null})]", [("f", {"a": True, "b": [1, -2.5], "d": {"e": None}})], 0, ""),
        ("<|python_start|>[f(a=1)]<|python_end|>", [("f", {"a": 1})], 0, ""),
        ("Well. <|python_start|>[h.i(a=1)]", [("h.i", {"a": 1})], 0, "Well."),
        (r"[f(a='\d')]", [("f", {"a": r"\d"})], 0, ""),
        ("[f(1)]", [], 1, None),
        ("[f(**{'a': 1})]", [], 1, None),
        ("[f(a=g())]", [], 1, None),
        ("[f(a=1", [], 1, None),
        ("[f(a=1), g(2)]", [("f", {"a": 1})], 1, "[f(a=1), g(2)]"),
        ("[h(a=1)]", [], 0, None),
        ("[1, 2]", [], 0, None),
        ("[x for x in f()]", [], 0, None),
        ("See [f(a=1)].", [], 0, None),
    ],
)  # fmt: skip
def test_calls_in_python(text: str, calls: list[Any], malformed: int, content: str | None) -> None:
    assert read("pythonic", text) == (calls, malformed, text if content is None else content)


ONE = "<arg_key>a</arg_key>\n<arg_value>1</arg_value>"


@pytest.mark.parametrize(
    ("text", "calls", "malformed"),
    [
        (f"<tool_call>f\n{ONE}\n</tool_call>", [("f", {"a": 1})], 0),
        (f"<tool_call>f{ONE}</tool_call><tool_call>g</tool_call>", [("f", {"a": 1}), ("g", {})], 0),
        (f"<tool_call>f\n{ONE}", [("f", {"a": 1})], 0),
        (f"<tool_call>f\n{ONE.replace('1', 'True')}</tool_call>", [("f", {"a": "True"})], 0),
        (f"<tool_call>f\n{ONE.replace('1', '[1, null]')}</tool_call>", [("f", {"a": [1, None]})], 0),
        ("<tool_call>f", [], 1),
        (f"<tool_call>f\n{ONE.removesuffix('</arg_value>')}</tool_call>", [], 1),
        (f"<tool_call>f\n<arg_key>b</arg_key><arg_value>2{ONE}</tool_call>", [], 1),
        (f"<tool_call>\n{ONE}</tool_call>", [], 1),
        (f"<tool_call>f\n{ONE}and more</tool_call>", [], 1),
    ],
)
def test_calls_of_glm(text: str, calls: list[Any], malformed: int) -> None:
    assert read("glm45", text)[:2] == (calls, malformed)


@pytest.mark.parametrize(("schema", "value"), [("string", "1"), ("integer", 1), (["boolean", "null"], "1")])
def test_values_of_glm_follow_the_schema(schema: Any, value: Any) -> None:
    text = f"<tool_call>f\n{ONE}\n</tool_call>"
    assert read("glm45", text, tool(properties={"a": {"type": schema}}))[0] == [("f", {"a": value})]


def kimi(*calls: str) -> str:
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def kimi_call(name: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def test_calls_of_kimi() -> None:
    text = "Well." + kimi(kimi_call("functions.f:0", '{"a": 1}'), kimi_call(" g.h:12 ", "{}"))
    parsed = parse(text, [tool()], tool_parser="kimi_k2", reasoning_parser="think", opened=False)
    assert [(one.name, one.arguments, one.id) for one in parsed.calls] == [
        ("f", '{"a": 1}', "functions.f:0"),
        ("g.h", "{}", "g.h:12"),
    ]
    assert (parsed.content, parsed.malformed) == ("Well.", 0)
    for broken in (
        kimi(),
        kimi(kimi_call("f", "{}")),
        kimi(kimi_call("functions.f:0", "{")),
        kimi("f"),
        kimi_call("0", "{}"),
    ):
        assert read("kimi_k2", broken)[:2] == ([], 1), broken


HM = "<|channel|>analysis<|message|>hm"


@pytest.mark.parametrize(
    ("text", "calls", "malformed", "content", "reasoning"),
    [
        ("<|channel|>final<|message|>Yes.<|return|>", [], 0, "Yes.", ""),
        ("<|channel|>final<|message|>Yes.", [], 0, "Yes.", ""),
        (f"{HM}<|end|><|start|>assistant<|channel|>final<|message|>Yes.", [], 0, "Yes.", "hm"),
        (
            f"{HM}<|end|><|start|>assistant<|channel|>commentary to=functions.f "
            '<|constrain|>json<|message|>{"a": 1}<|call|>',
            [("f", {"a": 1})],
            0,
            "",
            "hm",
        ),
        (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', [("f", {"a": 1})], 0, "", ""),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|channel|>commentary"
            "<|message|>{}<|call|>",
            [("f", {})],
            0,
            "I look.",
            "",
        ),
        # A thought that does not end, and then a call; and a call that is cut.
        (f"{HM}<|start|>assistant to=functions.f<|channel|>commentary<|message|>{{}}", [("f", {})], 0, "", "hm"),
        ('<|channel|>commentary to=functions.f<|message|>{"a": ', [], 1, None, ""),
        ("<|channel|>commentary to=functions.f<|message|>[1]<|call|>", [], 1, None, ""),
        ("Yes.", [], 0, "Yes.", ""),
        ("<|channel|>final", [], 0, "<|channel|>final", ""),
    ],
)  # fmt: skip
def test_harmony(text: str, calls: list[Any], malformed: int, content: str | None, reasoning: str) -> None:
    parsed = parse(text, [tool()], tool_parser="gpt_oss", reasoning_parser="gpt_oss", opened=False)
    assert [(one.name, json.loads(one.arguments)) for one in parsed.calls] == calls
    assert (parsed.malformed, parsed.reasoning) == (malformed, reasoning)
    assert parsed.content == (text if content is None else content)
    without = parse(text, (), tool_parser="gpt_oss", reasoning_parser="gpt_oss", opened=False)
    assert (without.calls, without.malformed, without.reasoning) == ((), 0, reasoning)


def test_arguments_behind_which_more_follows_are_malformed() -> None:
    for arguments in ('"{} and more"', '"{}{}"', '"[]"', '"3"', "[]", "3"):
        assert read("hermes", hermes(arguments))[:2] == ([], 1), arguments


def test_a_section_that_holds_no_call_is_malformed() -> None:
    for parser, text in (
        ("deepseek", "Well.<｜tool▁calls▁begin｜>"),
        ("deepseek", "<｜tool▁calls▁begin｜>f<｜tool▁calls▁end｜>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
    ):
        assert read(parser, text) == ([], 1, text)


def test_ids_that_the_model_wrote_are_kept() -> None:
    for text, name in (
        ('[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}', "abc123def"),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abc123def"}]', "abc123def"),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "not an id"}]', ""),
    ):
        parsed = parse(text, [tool()], tool_parser="mistral", reasoning_parser="none", opened=False)
        assert [(one.arguments, one.id) for one in parsed.calls] == [('{"a": 1}', name)]


ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{{ '<|assistant|>' + (m.tool_calls[0].function | tojson) + '<|end|>' }}"
    "{% else %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)


def test_where_the_template_takes_one_call_a_turn_the_others_are_malformed() -> None:
    chat = ChatTemplate(tiny(), template=ONE_CALL, tool_parser="hermes")
    parsed = chat.parse(hermes("{}") + hermes("{}") + hermes("null"), [tool()], prompt="")
    assert (len(parsed.calls), parsed.malformed) == (1, 2)


@pytest.mark.parametrize(
    ("source", "family"),
    [
        ("<tool_call>{{ name }}<arg_key>", "glm45"),
        ("<|tool_call_begin|>functions", "kimi_k2"),
        ("tool_declare<|im_middle|>", "kimi_k2"),
        ("<|channel|>commentary", "gpt_oss"),
        ("[func_name1(a=b)]", "pythonic"),
        ("<|start|>", "none"),
    ],
)
def test_newer_families_are_known_by_their_templates(source: str, family: str) -> None:
    assert tool_family(source) == family


PARSERS = {
    "glm47": "glm45",
    "mistral args": "mistral",
    "deepseek v3": "deepseek",
    "deepseek v3.1": "deepseek",
}
ONE_CALL_FAMILIES = {"gpt_oss"}
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


def tool_for(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
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
    assert set(chat.capabilities.missing) == ({"parallel calls"} if family in ONE_CALL_FAMILIES else set())


@pytest.mark.parametrize("family", TEMPLATES)
@settings(max_examples=60)
@given(calls=CALLS)
def test_what_a_template_writes_is_read_back(family: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    if family in PLAIN_VALUES:
        text = json.dumps(calls, ensure_ascii=False)
        calls = [] if any(mark in text for mark in MARKS) else calls
    calls = list({name: (name, arguments) for name, arguments in calls}.values())[
        : 1 if family in ONE_CALL_FAMILIES else 3
    ]
    if not calls:
        return
    chat, tools = chat_of(family), [tool_for(*call) for call in calls]
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
    chat, tools = chat_of(family), [tool_for(*call) for call in calls]
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
