"""Our readers of tool calls beside the detectors of the SGLang server that users serve their models with.

A policy is trained on what our readers make of its text, and served by what SGLang's make of it. They agree on every
call in its family's form; where they do not, the difference is written down here, and shows when either changes.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from sglang_parts import PYTHON, needs_server

from relax_rt.roles.agentic.tokens.parsers import parse
from relax_rt.roles.rollout.engines.sglang.options import server_environment

pytestmark = [pytest.mark.engines, needs_server]

TYPES = {
    "text": "string",
    "count": "integer",
    "share": "number",
    "on": "boolean",
    "items": "array",
    "where": "object",
    "maybe": ["integer", "null"],
}
PARAMETERS = {
    "type": "object",
    "properties": {name: {"type": kind} for name, kind in TYPES.items()},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": PARAMETERS}}
    for name in ("f", "get_weather")
]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("f", {}),
    ("get_weather", {"text": "Zürich"}),
    ("f", {"count": 3, "share": 0.5}),
    ("f", {"on": True, "maybe": None}),
    ("f", {"items": [1, "a", False], "where": {"x": 1.5, "y": "b"}}),
    ("get_weather", {"text": "two\nlines", "count": -7}),
    ("f", {"text": 'quotes " and \\ slashes', "on": False}),
    ("f", {"text": "日本語 😀"}),
]


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_json(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def coder(name: str, arguments: dict[str, Any]) -> str:
    pairs = "".join(f"<parameter={key}>\n{text_of(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def glm(name: str, arguments: dict[str, Any]) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{text_of(value)}</arg_value>\n" for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def dumped(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def deepseek(call: str) -> str:
    return f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>"


def section(*calls: str) -> str:
    return f"<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>"


def kimi(*calls: tuple[str, dict[str, Any]]) -> str:
    each = (
        f"<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>{dumped(arguments)}<|tool_call_end|>"
        for place, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


def written(calls: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, str, str]]:
    """These calls in one reply of each family: our reader, SGLang's detector, text."""
    hermes = "\n".join(f"<tool_call>\n{as_json(*call)}\n</tool_call>" for call in calls)
    v3 = [f"function<｜tool▁sep｜>{name}\n```json\n{dumped(arguments)}\n```" for name, arguments in calls]
    v31 = [f"{name}<｜tool▁sep｜>{dumped(arguments)}" for name, arguments in calls]
    found = [
        ("hermes", "qwen25", hermes),
        ("hermes", "qwen25", f"Let me see.\n{hermes}"),
        ("qwen3_coder", "qwen3_coder", "\n".join(coder(*call) for call in calls)),
        ("glm45", "glm45", "\n".join(glm(*call) for call in calls)),
        ("llama3_json", "llama3", ";".join(as_json(*call, "parameters") for call in calls)),
        ("llama3_json", "llama3", "<|python_tag|>" + ";".join(as_json(*call, "parameters") for call in calls)),
        ("mistral", "mistral", f"[TOOL_CALLS] [{', '.join(as_json(*call) for call in calls)}]"),
        ("mistral", "mistral", "".join(f"[TOOL_CALLS]{name}[ARGS]{dumped(arguments)}" for name, arguments in calls)),
        ("deepseek", "deepseekv3", section(*map(deepseek, v3))),
        ("deepseek", "deepseekv31", section(*map(deepseek, v31))),
        ("kimi_k2", "kimi_k2", kimi(*calls)),
    ]
    if "\n" not in str(calls[0][1].get("text")):
        found.append(("pythonic", "pythonic", f"[{', '.join(python(*call) for call in calls)}]"))
    if len(calls) == 1:
        name, arguments = calls[0]
        head = f"<|start|>assistant<|channel|>commentary to=functions.{name}"
        body = f"{head}<|constrain|>json<|message|>{dumped(arguments)}<|call|>"
        found.append(("gpt_oss", "gpt-oss", body))
    return found


def theirs(requests: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """What SGLang's detectors make of texts: detector, reasoning parser (or none), text."""
    asked = [
        {"parser": parser, "reasoning": reasoning, "tools": TOOLS, "text": text} for parser, reasoning, text in requests
    ]
    environment = server_environment("cpu", 1, Path("/tmp"), os.environ)
    done = subprocess.run(
        [str(PYTHON), str(Path(__file__).parent / "sglang_detectors.py")],
        input=json.dumps(asked),
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def ours(parser: str, text: str) -> tuple[list[list[Any]], int]:
    reasoning = "gpt_oss" if parser == "gpt_oss" else "think"
    parsed = parse(text, TOOLS, tool_parser=parser, reasoning_parser=reasoning, opened=False)
    return [[call.name, json.loads(call.arguments)] for call in parsed.calls], parsed.malformed


def test_calls_in_their_familys_form_are_read_alike() -> None:
    replies = [[call] for call in CALLS] + [CALLS[:2], CALLS[2:5]]
    corpus = [(wanted, *one) for wanted in replies for one in written(wanted)]
    answers = theirs([(detector, "", text) for _, _, detector, text in corpus])
    different = []
    for (wanted, parser, detector, text), answer in zip(corpus, answers, strict=True):
        want = [[name, arguments] for name, arguments in wanted]
        calls, malformed = ours(parser, text)
        assert (calls, malformed) == (want, 0), text
        if json.dumps(answer["calls"]) != json.dumps(want):
            different.append((detector, text, answer["calls"]))
    assert not different


CODER = "qwen3_coder", "qwen3_coder", ""
V31 = "f<｜tool▁sep｜>{}"
HERMES = "<tool_call>\n{}\n</tool_call>"
DIFFERENT: list[tuple[str, str, str, str, list[Any], int, list[Any]]] = [
    # Our reader, detector, reasoning parser, text; our calls and malformed ones, SGLang's calls.
    ("hermes", "qwen25", "", HERMES.replace("{}", '{"name": "f", "arguments": null}'), [["f", {}]], 0, [["f", None]]),
    ("hermes", "qwen25", "", HERMES.replace("{}", '{"name": "f", "arguments": ""}'), [["f", {}]], 0, [["f", ""]]),
    ("hermes", "qwen25", "", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', [["f", {}]], 0, []),
    ("hermes", "qwen25", "", HERMES.replace("{}", '{"name": "f", "arguments": [1]}'), [], 1, [["f", [1]]]),
    # A call that cannot be read, and one of a tool that is not offered, are nothing there.
    ("hermes", "qwen25", "", HERMES.replace("{}", "{oops"), [], 1, []),
    ("hermes", "qwen25", "", HERMES.replace("{}", '{"name": "h", "arguments": {}}'), [["h", {}]], 0, []),
    (*CODER, coder("f", {"maybe": "None"}), [["f", {"maybe": None}]], 0, [["f", {"maybe": "None"}]]),
    (*CODER, coder("f", {"on": "yes"}), [["f", {"on": "yes"}]], 0, [["f", {"on": False}]]),
    (*CODER, coder("f", {"text": "null"}), [["f", {"text": "null"}]], 0, [["f", {"text": None}]]),
    (
        *CODER,
        "<tool_call>\n<function=f>\n<parameter=text>\nhi\n<parameter=count>\n3\n</parameter>\n</function>\n</tool_call>",
        [], 1, [["f", {"text": "hi", "count": 3}]],
    ),
    # Reasoning ends where a call begins, there.
    (
        "hermes", "qwen25", "qwen3", "<think>x " + HERMES.replace("{}", '{"name": "f", "arguments": {}}'),
        [], 1, [["f", {}]],
    ),
    # One of several that cannot be read takes the others with it, there.
    ("deepseek", "deepseekv31", "", section(*map(deepseek, (V31, V31[:-1]))), [["f", {}]], 1, []),
]  # fmt: skip


def test_where_they_differ_it_is_written_down() -> None:
    answers = theirs([(detector, reasoning, text) for _, detector, reasoning, text, *_ in DIFFERENT])
    for (parser, _, _, text, calls, malformed, served), answer in zip(DIFFERENT, answers, strict=True):
        assert ours(parser, text) == (calls, malformed), text
        assert answer["calls"] == served, text
