"""What a model wrote, taken apart: thoughts, words and tool calls, by the family of its chat template.

transformers' `parse_response` serves where a tokenizer brings its `response_template`; few do, and it fails as a whole
where one of several calls is malformed. For the others these readers go over the text once; a call that cannot be read
stays text.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from relax_rt.roles.agentic.tokens.messages import THINK, THOUGHT
from relax_rt.roles.agentic.tokens.types import Tool
from relax_rt.transport.errors import Refused


class Call(msgspec.Struct, frozen=True):
    """A tool call; arguments are a JSON object as text."""

    name: str
    arguments: str


class Parsed(msgspec.Struct, frozen=True):
    """What a completion says.

    Attributes:
        content: words, malformed calls among them. reasoning: thoughts, without marks.
        malformed: tool calls that could not be read.
    """

    content: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    malformed: int = 0


Found = tuple[str, list[Call], int]
"""Words, calls, and how many more were malformed."""
Reader = Callable[[str, int], tuple[list[Call], int] | None]
"""Calls of a text from a place on and where they end; None: there are none."""

SEP = "<｜tool▁sep｜>"
DEEPSEEK_BEGIN, DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK = re.compile(rf"\s*(?:function{SEP}(?P<fenced>[^\n<]+)\n```json\s*|(?P<plain>[^\n<]+){SEP}\s*)")
FENCE = re.compile(r"\s*```")
MISTRAL = "[TOOL_CALLS]"
MISTRAL_NAME = re.compile(r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?={)")
PYTHON_TAG = "<|python_tag|>"
FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>(?P<body>.*?)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>", re.DOTALL)
BETWEEN = re.compile(r"[\s;]*")
SPACE = re.compile(r"\s*")


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


DECODER = json.JSONDecoder(parse_constant=_no_number)


def _json_at(text: str, at: int) -> tuple[Any, int] | None:
    """The JSON value that begins at a place, space before it skipped, and where it ends."""
    begin = _after(SPACE, text, at)
    try:
        return DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _call(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        found = _json_at(arguments, 0)
        arguments = found[0] if found else None
    if not isinstance(arguments, dict):
        return None
    return Call(value["name"], written(arguments))


def written(arguments: Any) -> str:
    """Arguments of a call as JSON text."""
    text = json.dumps(arguments, ensure_ascii=False)
    # Half a surrogate pair, which JSON can escape, is in no encoding.
    return json.dumps(arguments) if any("\ud800" <= character <= "\udfff" for character in text) else text


def _regions(text: str, opening: str, closing: str, read: Reader) -> Found:
    """Calls between marks; a last one may lack its closing mark, as models leave it out before they stop."""
    kept: list[str] = []
    calls: list[Call] = []
    malformed = at = 0
    while (begin := text.find(opening, at)) >= 0:
        body = begin + len(opening)
        found = read(text, body)
        end = -1
        if found is not None:
            end = _after(SPACE, text, found[1])
            end = end + len(closing) if text.startswith(closing, end) else end if end == len(text) else -1
        if found is None or end < 0:
            malformed += 1
            kept.append(text[at:body])
            at = body
        else:
            calls += found[0]
            kept.append(text[at:begin])
            at = end
    return "".join([*kept, text[at:]]), calls, malformed


def _read_json(text: str, at: int) -> tuple[list[Call], int] | None:
    """One call as JSON, or a list of them."""
    found = _json_at(text, at)
    if found is None:
        return None
    calls = [_call(value) for value in (found[0] if isinstance(found[0], list) else [found[0]])]
    known = [call for call in calls if call is not None]
    return (known, found[1]) if known and len(known) == len(calls) else None


def hermes(text: str, tools: Sequence[Tool]) -> Found:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen 2.5 and 3)."""
    return _regions(text, "<tool_call>", "</tool_call>", _read_json)


def qwen3_coder(text: str, tools: Sequence[Tool]) -> Found:
    """`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>` (Qwen3-Coder).

    Values are texts; they become numbers, lists and the like where the tool's schema says so.
    """

    def read(text: str, at: int) -> tuple[list[Call], int] | None:
        found = FUNCTION.match(text, at)
        if found is None or PARAMETER.sub("", found["body"]).strip():
            return None
        types = _types(tools, found["name"])
        values = {one["key"]: _typed(one["value"], types.get(one["key"])) for one in PARAMETER.finditer(found["body"])}
        return [Call(found["name"], written(values))], found.end()

    return _regions(text, "<tool_call>", "</tool_call>", read)


def _types(tools: Sequence[Tool], name: str) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, dict) and function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: one.get("type") for key, one in properties.items() if isinstance(one, dict)}
    return {}


def _typed(value: str, kind: Any) -> Any:
    if kind in (None, "string"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def llama3_json(text: str, tools: Sequence[Tool]) -> Found:
    """Nothing but `{"name": ..., "parameters": {...}}`, several with `;` between them (Llama 3)."""
    body = text.strip()
    marked = body.startswith(PYTHON_TAG)
    body = body.removeprefix(PYTHON_TAG).lstrip()
    if not marked and not body.startswith("{"):
        return text, [], 0
    calls: list[Call] = []
    at = 0
    while at < len(body):
        found = _json_at(body, at)
        call = _call(found[0]) if found else None
        if found is None or call is None:
            break
        calls.append(call)
        at = _after(BETWEEN, body, found[1])
    if at == len(body) and calls:
        return "", calls, 0
    # An object alone is an answer in JSON unless it looks like a call.
    meant = marked or bool(calls) or '"name"' in body
    return (body[at:] if calls else text), calls, int(meant)


def mistral(text: str, tools: Sequence[Tool]) -> Found:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` each (Mistral)."""

    def read(text: str, at: int) -> tuple[list[Call], int] | None:
        named = MISTRAL_NAME.match(text, at)
        if named is None:
            return _read_json(text, at)
        found = _json_at(text, named.end())
        call = _call({"name": named["name"], "arguments": found[0]}) if found else None
        return ([call], found[1]) if found and call else None

    return _regions(text, MISTRAL, "", read)


def deepseek(text: str, tools: Sequence[Tool]) -> Found:
    """DeepSeek V3 and R1 (name, then fenced JSON), and V3.1 (name, then JSON)."""

    def read(text: str, at: int) -> tuple[list[Call], int] | None:
        head = DEEPSEEK.match(text, at)
        found = _json_at(text, head.end()) if head else None
        if head is None or found is None:
            return None
        call = _call({"name": (head["fenced"] or head["plain"]).strip(), "arguments": found[0]})
        end = _after(FENCE, text, found[1]) if head["fenced"] else found[1]
        return ([call], end) if call else None

    said, calls, malformed = _regions(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", read)
    if calls and not malformed:
        said = said.replace(DEEPSEEK_BEGIN, "").replace(DEEPSEEK_END, "")
    return said, calls, malformed


def no_calls(text: str, tools: Sequence[Tool]) -> Found:
    """Text is text."""
    return text, [], 0


TOOL_PARSERS: dict[str, Callable[[str, Sequence[Tool]], Found]] = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "llama3_json": llama3_json,
    "mistral": mistral,
    "deepseek": deepseek,
    "none": no_calls,
}
REASONING_PARSERS = ("think", "none")
AUTO, MODEL = "auto", "model"
"""By the template's text; by the tokenizer's own `response_template`."""


def tool_family(template: str) -> str:
    """The tool parser that a template's text speaks for; none where it names no calls."""
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    if MISTRAL in template:
        return "mistral"
    if "<｜tool▁call▁begin｜>" in template:
        return "deepseek"
    return "llama3_json" if PYTHON_TAG in template or '"parameters":' in template else "none"


def reasoning_family(template: str) -> str:
    """think, where a template's text knows such thoughts."""
    return "think" if THOUGHT in template or THINK in template else "none"


def check_parsers(tool_parser: str, reasoning_parser: str) -> None:
    """Names that are none.

    Raises:
        Refused: with what may have been meant.
    """
    for what, name, known in (
        ("tool_parser", tool_parser, (*TOOL_PARSERS, MODEL, AUTO)),
        ("reasoning_parser", reasoning_parser, (*REASONING_PARSERS, AUTO)),
    ):
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else "known are " + ", ".join(known)
            raise Refused(f"{what} = {name!r}", why="no such parser", hint=hint)


def split_reasoning(text: str, *, opened: bool) -> tuple[str, str]:
    """Thoughts at the beginning of a text, and the rest of it.

    Args:
        opened: the prompt has opened the thought.
    """
    begun = text.lstrip()
    if not opened and not begun.startswith(THINK):
        return "", text
    thought, _, said = begun.removeprefix(THINK).partition(THOUGHT)
    return thought.strip("\n"), said.lstrip("\n")


def parse(text: str, tools: Sequence[Tool], *, tool_parser: str, reasoning_parser: str, opened: bool) -> Parsed:
    """Take a completion apart; without tools no calls are looked for."""
    reasoning, said = split_reasoning(text, opened=opened) if reasoning_parser == "think" else ("", text)
    content, calls, malformed = TOOL_PARSERS[tool_parser](said, tools) if tools else (said, [], 0)
    return Parsed(content.strip() if calls else content, reasoning, tuple(calls), malformed)
