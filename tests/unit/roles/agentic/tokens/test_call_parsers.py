"""Tool calls and thoughts in the writing of the common families."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest
from chat_fixtures import LLAMA3, MOVES_TOOLS, QWEN3, TOOLS, smollm2, tiny

from relax_rt.roles.agentic.tokens.parsers import TOOL_PARSERS, parse, split_reasoning, tool_family
from relax_rt.roles.agentic.tokens.template import ChatTemplate
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
