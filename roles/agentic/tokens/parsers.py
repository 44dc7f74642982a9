"""Parse a completion into reasoning, text and tool calls, by the family of the chat template.

transformers' `parse_response` is used where a tokenizer has a `response_template`; few have one, and it fails as a
whole if one of several calls is malformed. The parsers here read the text once. A malformed call is counted and stays
text, because training has to see it; a server may drop it (decisions/0017-tool-parsers.md compares them with
SGLang's detectors).

A call between a family's marks is a call whatever its name: the environment answers that the tool does not exist.
Text without marks (llama3_json, pythonic) is a call only if it names an offered tool: an answer may be JSON too.
"""

from __future__ import annotations

import ast
import difflib
import re
import threading
import warnings
from collections.abc import Callable, Sequence, Set
from typing import Any

import msgspec

from relax_rt.roles.agentic.tokens.messages import THINK_END, THINK_START
from relax_rt.roles.agentic.tokens.types import Tool
from relax_rt.roles.models.chat_template import STRICT_JSON, parsed_arguments, written_arguments
from relax_rt.transport.rpc.errors import Refused


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call. `arguments` is a JSON object as text; `id` is the one that the model wrote, in families with ids."""

    name: str
    arguments: str
    id: str = ""


class ParsedCompletion(msgspec.Struct, frozen=True):
    """A parsed completion.

    Attributes:
        content: text, malformed calls included. reasoning: without its marks.
        malformed: number of tool calls that cannot be parsed, or that are inside unterminated reasoning.
    """

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: int = 0


FoundCalls = tuple[str, list[ToolCall], int]
"""Words, calls, and how many more were malformed."""
CallReader = Callable[[str, int], tuple[list[ToolCall], int] | None]
"""Calls of a text from a place on and where they end; None: there are none."""

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
SEP = "<｜tool▁sep｜>"
DEEPSEEK_CALL, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK = re.compile(rf"\s*(?:function{SEP}(?P<fenced>[^\n<]+)\n```json\s*|(?P<plain>[^\n<]+){SEP}\s*)")
FENCE = re.compile(r"\s*```")
KIMI_CALL, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
KIMI = re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)\s*<\|tool_call_argument_begin\|>\s*")
MISTRAL = "[TOOL_CALLS]"
MISTRAL_NAME = re.compile(r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\]\s*|\s*(?={))")
PYTHON_TAG, PYTHON_END = "<|python_tag|>", "<|python_end|>"
PYTHON_STARTS = ("<|python_start|>", PYTHON_TAG)
FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>")
FUNCTION_END = re.compile(r"\s*</function>")
PARAMETER, PARAMETER_END = re.compile(r"\s*<parameter=(?P<key>[^>\n]+)>\n?"), "</parameter>"
GLM_NAME = re.compile(r"\s*(?P<name>[\w.:/-]+)\s*")
GLM_KEY, GLM_VALUE_END = re.compile(r"\s*<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>"), "</arg_value>"
HARMONY_START, CHANNEL, HARMONY_BODY = "<|start|>", "<|channel|>", "<|message|>"
HARMONY_TO = re.compile(r"\bto=(?P<to>[\w.-]+)")
HARMONY_BEFORE = re.compile(r"(?:<\|start\|>)?(?:assistant)?\s*(?:to=[\w.-]+)?\s*")
HARMONY_CHANNEL = re.compile(r"\s*(?P<channel>\w+)")
HARMONY_END = re.compile(r"<\|(?:end|return|call)\|>|(?=<\|(?:start|channel)\|>)|\Z")
BETWEEN = re.compile(r"[\s;]*")
SPACE = re.compile(r"\s*")
MAX_HEAD = 256
"""Characters of a harmony message before its channel."""
CALL_KEYS = {"name", "arguments", "parameters", "type", "id"}
CALL_ID = re.compile(r"[\w.:-]{1,64}")
CALL_BEGUN = re.compile(
    r'{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"]*)"\s*(?:,\s*"(?P<next>\w+))?'
)
MAX_REFERENCES = 16
"""Maximum number of references and alternatives followed in a schema."""

_literals = threading.Lock()
"""Held while warning filters are changed: they are global to the process, and texts are parsed in threads."""


def _decode_json_at(text: str, at: int) -> tuple[Any, int] | None:
    """Return the JSON value at a position (leading space skipped) and its end; None if there is none."""
    begin = _skip(SPACE, text, at)
    try:
        return STRICT_JSON.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _make_call(name: Any, arguments: Any, id: str = "") -> ToolCall | None:
    """Build a call if it has a name and its arguments are an object or absent (null, empty text)."""
    arguments = parsed_arguments(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        return ToolCall(name, written_arguments(arguments), id)
    except (ValueError, TypeError, RecursionError):
        return None


def _call_object(value: Any) -> ToolCall | None:
    """Return a call as {"name": ..., "arguments" or "parameters": ...}."""
    if not isinstance(value, dict):
        return None
    arguments, name = value.get("arguments"), value.get("id")
    arguments = value.get("parameters") if arguments is None else arguments
    return _make_call(value.get("name"), arguments, name if isinstance(name, str) and CALL_ID.fullmatch(name) else "")


def parse_openai_call(value: Any) -> ToolCall | None:
    """Read a call of a message in OpenAI's form; None if it is malformed."""
    return _call_object(value.get("function", value)) if isinstance(value, dict) else None


def _arguments_at(text: str, at: int, *ends: str) -> tuple[Any, int] | None:
    """Read the JSON arguments at a position; {} where one of `ends` follows immediately."""
    begin = _skip(SPACE, text, at)
    return ({}, begin) if text.startswith(ends, begin) else _decode_json_at(text, begin)


def _calls_between_marks(text: str, opening: str, closing: str, read: CallReader) -> FoundCalls:
    """Calls between marks; a last one may lack its closing mark, as models leave it out before they stop."""
    kept: list[str] = []
    calls: list[ToolCall] = []
    malformed = at = 0
    while (begin := text.find(opening, at)) >= 0:
        body = begin + len(opening)
        found = read(text, body)
        end = -1
        if found is not None:
            end = _skip(SPACE, text, found[1])
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


def _strip_section_marks(found: FoundCalls, marks: tuple[str, str]) -> FoundCalls:
    """Remove the marks of a section of calls from the text. A section that was opened and has no call is malformed."""
    said, calls, malformed = found
    if calls and not malformed:
        for mark in marks:
            said = said.replace(mark, "")
    return said, calls, malformed or int(not calls and marks[0] in said)


def _read_json(text: str, at: int) -> tuple[list[ToolCall], int] | None:
    """Return one call as JSON, or a list of them."""
    found = _decode_json_at(text, at)
    if found is None:
        return None
    calls = [_call_object(value) for value in (found[0] if isinstance(found[0], list) else [found[0]])]
    known = [call for call in calls if call is not None]
    return (known, found[1]) if known and len(known) == len(calls) else None


def hermes(text: str, tools: Sequence[Tool]) -> FoundCalls:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen 2.5 and 3)."""
    return _calls_between_marks(text, TOOL_CALL, TOOL_CALL_END, _read_json)


def _key_values(
    text: str, at: int, key: re.Pattern[str], end: str, again: str
) -> tuple[list[tuple[str, str]], int] | None:
    """Read keys and values between marks. A value that contains the start of another (`again`) is unterminated.

    Returns:
        None: a value is unterminated.
    """
    found: list[tuple[str, str]] = []
    while (head := key.match(text, at)) is not None:
        close = text.find(end, head.end())
        if close < 0 or text.find(again, head.end(), close) >= 0:
            return None
        found.append((head["key"].strip(), text[head.end() : close]))
        at = close + len(end)
    return found, at


def qwen3_coder(text: str, tools: Sequence[Tool]) -> FoundCalls:
    """`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>` (Qwen3-Coder).

    Values are texts; they become numbers, lists and the like where the tool's schema says so.
    """

    def read(text: str, at: int) -> tuple[list[ToolCall], int] | None:
        calls: list[ToolCall] = []
        while (head := FUNCTION.match(text, at)) is not None:
            found = _key_values(text, head.end(), PARAMETER, PARAMETER_END, "<parameter=")
            tail = FUNCTION_END.match(text, found[1]) if found else None
            if found is None or tail is None:
                return None
            schema = _parameter_schema(tools, head["name"])
            values = {
                key: _convert_value(value.removesuffix("\n"), _schema_types(schema, key)) for key, value in found[0]
            }
            if (call := _make_call(head["name"].strip(), values)) is None:
                return None
            calls.append(call)
            at = tail.end()
        return (calls, at) if calls else None

    return _calls_between_marks(text, TOOL_CALL, TOOL_CALL_END, read)


def glm45(text: str, tools: Sequence[Tool]) -> FoundCalls:
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>` (GLM 4.5 to 4.7).

    Values are JSON, except those that the tool's schema declares as strings; a value that is not JSON is a string.
    """

    def read(text: str, at: int) -> tuple[list[ToolCall], int] | None:
        head = GLM_NAME.match(text, at)
        found = _key_values(text, head.end(), GLM_KEY, GLM_VALUE_END, "<arg_key>") if head else None
        if head is None or found is None or not (found[0] or text.startswith(TOOL_CALL_END, found[1])):
            # A name alone may be cut in its middle.
            return None
        schema = _parameter_schema(tools, head["name"])
        values: dict[str, Any] = {}
        for key, value in found[0]:
            kinds = _schema_types(schema, key)
            whole = None if kinds else _decode_json(value)
            values[key] = whole[0] if whole else _convert_value(value, kinds)
        call = _make_call(head["name"], values)
        return ([call], found[1]) if call else None

    return _calls_between_marks(text, TOOL_CALL, TOOL_CALL_END, read)


def _decode_json(text: str) -> tuple[Any] | None:
    """Return the value of a text that is valid JSON as a whole, in a tuple because it may be null."""
    try:
        return (STRICT_JSON.decode(text),)
    except (ValueError, RecursionError):
        return None


def _parameter_schema(tools: Sequence[Tool], name: str) -> dict[str, Any]:
    """Return the schema of a tool's parameters."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, dict) and function.get("name") == name.strip():
            parameters = function.get("parameters") or function.get("input_schema")
            return parameters if isinstance(parameters, dict) else {}
    return {}


JSON_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


def _schema_types(schema: dict[str, Any], key: str) -> list[str]:
    """Return the JSON types that a parameter may have, in the order in which its schema names them; none if it does
    not."""
    properties = schema.get("properties")
    found: list[str] = []
    open_schemas = [properties.get(key)] if isinstance(properties, dict) else []
    for _ in range(MAX_REFERENCES):
        if not open_schemas:
            break
        one = open_schemas.pop(0)
        if not isinstance(one, dict):
            continue
        if isinstance(one.get("$ref"), str):
            open_schemas.insert(0, _referenced(schema, one["$ref"]))
        kind = one.get("type")
        found += [name for name in (kind if isinstance(kind, list) else [kind]) if isinstance(name, str)]
        values = one["enum"] if isinstance(one.get("enum"), list) else [one["const"]] if "const" in one else []
        if kind is None:
            found += [JSON_TYPES[type(value)] for value in values if type(value) in JSON_TYPES]
            found += ["object"] * ("properties" in one) + ["array"] * ("items" in one)
        found += ["null"] * bool(one.get("nullable"))
        alternatives = [one[name] for name in ("anyOf", "oneOf", "allOf") if isinstance(one.get(name), list)]
        open_schemas += [other for several in alternatives for other in several]
        # What may be a text is one, unless the schema lists another type before it.
        if alternatives and any(isinstance(o, dict) and o.get("type") == "string" for s in alternatives for o in s):
            found.append("string")
    return list(dict.fromkeys(found))


def _referenced(schema: dict[str, Any], reference: str) -> Any:
    """Return what a local reference such as `#/$defs/Point` points at."""
    at: Any = schema
    for name in reference.removeprefix("#/").split("/"):
        at = at.get(name) if isinstance(at, dict) else None
    return at


def _convert_value(value: str, kinds: Sequence[str]) -> Any:
    """Convert a value written as text to a type of its schema; leave it text if it fits none.

    Templates that use only `| string` write True and None, so both spellings are accepted.
    """
    text = value.strip()
    if "null" in kinds and (
        text in ("null", "None") or ("string" not in kinds and text.casefold() in ("null", "none"))
    ):
        return None
    for kind in kinds:
        if kind == "string":
            return value
        if kind == "boolean" and text.casefold() in ("true", "false"):
            return text.casefold() == "true"
        if kind in ("integer", "number", "array", "object"):
            found = _decode_json(text) or (_parse_literal(text) if kind in ("array", "object") else None)
            if found and (fitting := _as_type(found[0], kind)) is not None:
                return fitting
    return value


def _as_type(value: Any, kind: str) -> Any:
    """Return the value if it has this JSON type, else None."""
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    found = JSON_TYPES.get(type(value))
    return value if found == kind or (kind, found) == ("number", "integer") else None


def _parse_literal(text: str) -> tuple[Any] | None:
    """Return the value of a Python literal that JSON can represent, in a tuple because it may be None."""
    tree = _parse_expression(text)
    try:
        return (_evaluate_literal(tree),) if tree is not None else None
    except (ValueError, RecursionError):
        return None


def _parse_expression(text: str) -> ast.expr | None:
    """Return a text as a Python expression."""
    try:
        with _literals, warnings.catch_warnings():
            # The parser warns of escapes that it does not know, as models write them.
            warnings.simplefilter("ignore")
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


CONSTANTS = {"true": True, "false": False, "null": None, "none": None}


def _evaluate_literal(node: ast.expr) -> Any:
    """Return the value of a literal.

    Raises:
        ValueError: it is not a literal, or JSON cannot represent it.
    """
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str | int | float)):
        return node.value
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_evaluate_literal(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_evaluate_literal(key) if key is not None else None for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_evaluate_literal, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _evaluate_literal(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    raise ValueError(f"{type(node).__name__} is not a literal")


def _tool_names(tools: Sequence[Tool]) -> set[str]:
    functions = (tool.get("function", tool) for tool in tools)
    return {str(function.get("name")) for function in functions if isinstance(function, dict)}


def llama3_json(text: str, tools: Sequence[Tool]) -> FoundCalls:
    """`{"name": ..., "parameters": {...}}`, several separated by `;` (Llama 3).

    The whole text consists of calls of offered tools, or the calls follow `<|python_tag|>`.
    """
    words, tag, body = text.partition(PYTHON_TAG)
    if not tag:
        words, body = "", text.strip()
        if not body.startswith("{"):
            return text, [], 0
    names = _tool_names(tools)

    def is_call(keys: Set[str]) -> bool:
        return bool(keys & {"arguments", "parameters"}) or keys <= CALL_KEYS

    calls: list[ToolCall] = []
    at = _skip(BETWEEN, body, 0)
    while at < len(body):
        found = _decode_json_at(body, at)
        call = _call_object(found[0]) if found else None
        if found is None or call is None or not (tag or (call.name in names and is_call(found[0].keys()))):
            break
        calls.append(call)
        at = _skip(BETWEEN, body, found[1])
    if at == len(body) and calls:
        return words, calls, 0
    # A text without a mark counts as an attempted call if it begins like a call of an offered tool.
    begun = CALL_BEGUN.match(body)
    meant = (
        begun is not None
        and begun["name"] in names
        and (
            begun["next"] in (None, *CALL_KEYS)
            or (begun.end() == len(body) and any(key.startswith(begun["next"]) for key in CALL_KEYS))
        )
    )
    return (words + body[at:] if calls else text), calls, int(bool(tag or calls or meant))


def pythonic(text: str, tools: Sequence[Tool]) -> FoundCalls:
    """`[name(key=value), ...]` with Python's literals (Llama 3.2 and 4).

    The whole text consists of calls of offered tools, or the calls follow `<|python_start|>` or `<|python_tag|>`.
    """
    body, words = text.strip(), ""
    starts = [(at, mark) for mark in PYTHON_STARTS if (at := text.find(mark)) >= 0]
    if starts:
        at, mark = min(starts)
        words, body = text[:at], text[at + len(mark) :].strip()
    body = body.removesuffix(PYTHON_END).strip()
    if not starts and not body.startswith("["):
        return text, [], 0
    names = _tool_names(tools)
    tree = _parse_expression(body)
    items = tree.elts if isinstance(tree, ast.List) else [] if tree is None else [tree] if starts else []
    if not starts and not (items and all(_called_name(item) in names for item in items)):
        begun = re.match(r"\[\s*([\w.]+)\s*\(", body)
        return text, [], int(begun is not None and begun[1] in names)
    calls = [call for item in items if (call := _python_call(item)) is not None]
    malformed = max(len(items), 1) - len(calls)
    return (words if not malformed else text), calls, malformed


def _called_name(node: ast.expr) -> str:
    """Return the name of the called function; empty if the node is not a call."""
    name = node.func if isinstance(node, ast.Call) else None
    while isinstance(name, ast.Attribute):
        name = name.value
    return ast.unparse(node.func) if isinstance(node, ast.Call) and isinstance(name, ast.Name) else ""


def _python_call(node: ast.expr) -> ToolCall | None:
    name = _called_name(node)
    if not name or not isinstance(node, ast.Call) or node.args or any(one.arg is None for one in node.keywords):
        return None
    try:
        return _make_call(name, {str(one.arg): _evaluate_literal(one.value) for one in node.keywords})
    except (ValueError, RecursionError):
        return None


def mistral(text: str, tools: Sequence[Tool]) -> FoundCalls:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` each (Mistral)."""

    def read(text: str, at: int) -> tuple[list[ToolCall], int] | None:
        named = MISTRAL_NAME.match(text, at)
        if named is None:
            return _read_json(text, at)
        found = _decode_json_at(text, named.end())
        call = _make_call(named["name"], found[0], named["id"] or "") if found else None
        return ([call], found[1]) if found and call else None

    return _calls_between_marks(text, MISTRAL, "", read)


def deepseek(text: str, tools: Sequence[Tool]) -> FoundCalls:
    """DeepSeek V3 and R1 (name, then fenced JSON), and V3.1 (name, then JSON)."""

    def read(text: str, at: int) -> tuple[list[ToolCall], int] | None:
        head = DEEPSEEK.match(text, at)
        found = _arguments_at(text, head.end(), "```", DEEPSEEK_CALL_END) if head else None
        if head is None or found is None:
            return None
        call = _make_call((head["fenced"] or head["plain"]).strip(), found[0])
        end = _skip(FENCE, text, found[1]) if head["fenced"] else found[1]
        return ([call], end) if call else None

    return _strip_section_marks(_calls_between_marks(text, DEEPSEEK_CALL, DEEPSEEK_CALL_END, read), DEEPSEEK_SECTION)


def kimi_k2(text: str, tools: Sequence[Tool]) -> FoundCalls:
    """`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` (Kimi K2)."""

    def read(text: str, at: int) -> tuple[list[ToolCall], int] | None:
        head = KIMI.match(text, at)
        found = _arguments_at(text, head.end(), KIMI_CALL_END) if head else None
        call = _make_call(head["name"], found[0], head["id"]) if head and found else None
        return ([call], found[1]) if found and call else None

    return _strip_section_marks(_calls_between_marks(text, KIMI_CALL, KIMI_CALL_END, read), KIMI_SECTION)


def gpt_oss(text: str, tools: Sequence[Tool]) -> FoundCalls:
    """`<|channel|>commentary to=functions.name<|message|>{...}<|call|>` (harmony, gpt-oss).

    The text of other messages is the content.
    """
    said: list[str] = []
    calls: list[ToolCall] = []
    malformed = 0
    for _, to, body, whole in _harmony_messages(text):
        if to is None:
            said.append(body)
            continue
        found = _decode_json(body) if body.strip() else ({},)
        call = _make_call(to.removeprefix("functions."), found[0]) if found else None
        if call is None:
            malformed += 1
            said.append(whole)
        else:
            calls.append(call)
    return "".join(said), calls, malformed


def _harmony_messages(text: str) -> list[tuple[str, str | None, str, str]]:
    """Split a harmony text into messages: channel (empty: text outside any), recipient, body, and the full text."""
    found: list[tuple[str, str | None, str, str]] = []

    def words(some: str) -> None:
        if some.strip():
            found.append(("", None, some, some))

    at = 0
    while (channel := text.find(CHANNEL, at)) >= 0 and (body := text.find(HARMONY_BODY, channel)) >= 0:
        # The recipient is before or after the channel.
        start = text.rfind(HARMONY_START, at, channel)
        begin = start if start >= 0 else at
        if channel - begin > MAX_HEAD or not HARMONY_BEFORE.fullmatch(text, begin, channel):
            begin = channel
        words(text[at:begin])
        kind = HARMONY_CHANNEL.match(text, channel + len(CHANNEL))
        to = HARMONY_TO.search(text, begin, body)
        end = HARMONY_END.search(text, body + len(HARMONY_BODY))
        assert end is not None
        said = text[body + len(HARMONY_BODY) : end.start()]
        found.append((kind["channel"] if kind else "", to["to"] if to else None, said, text[begin : end.end()]))
        at = end.end()
    words(text[at:])
    return found


def no_calls(text: str, tools: Sequence[Tool]) -> FoundCalls:
    """Return text is text."""
    return text, [], 0


TOOL_PARSERS: dict[str, Callable[[str, Sequence[Tool]], FoundCalls]] = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "glm45": glm45,
    "llama3_json": llama3_json,
    "pythonic": pythonic,
    "mistral": mistral,
    "deepseek": deepseek,
    "kimi_k2": kimi_k2,
    "gpt_oss": gpt_oss,
    "none": no_calls,
}
REASONING_PARSERS = ("think", "gpt_oss", "none")
AUTO, MODEL = "auto", "model"
"""Choose by the template's text; use the tokenizer's own `response_template`."""

SIGNS = (
    ("<arg_key>", "glm45"),
    (KIMI_CALL, "kimi_k2"),
    ("tool_declare<|im_middle|>", "kimi_k2"),
    (CHANNEL, "gpt_oss"),
    ("<function=", "qwen3_coder"),
    (TOOL_CALL, "hermes"),
    (MISTRAL, "mistral"),
    (DEEPSEEK_CALL, "deepseek"),
    ("[func_name1(", "pythonic"),
    (PYTHON_TAG, "llama3_json"),
    ('"parameters":', "llama3_json"),
)
"""Text in a template -> its family; the first match counts."""


def tool_family(template: str) -> str:
    """Return the tool parser that a template's text suggests; none if it has no calls."""
    return next((family for sign, family in SIGNS if sign in template), "none")


def reasoning_family(template: str) -> str:
    """Return the reasoning parser that a template's text suggests."""
    if CHANNEL in template:
        return "gpt_oss"
    return "think" if THINK_END in template or THINK_START in template else "none"


class ChatFormat(msgspec.Struct, frozen=True):
    """How conversations are rendered and completions parsed.

    Attributes:
        chat_template: a file, relative to the config, in place of the model's own template.
    """

    chat_template: str | None = None
    tool_parser: str = AUTO
    reasoning_parser: str = AUTO


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
    """Split the reasoning at the beginning of a text from the rest.

    Args:
        opened: the prompt has opened the reasoning.
    """
    begun = text.lstrip()
    if not opened and not begun.startswith(THINK_START):
        return "", text
    thought, _, said = begun.removeprefix(THINK_START).partition(THINK_END)
    return thought.strip("\n"), said.lstrip("\n")


def split_harmony(text: str) -> tuple[str, str]:
    """Split a harmony text into analysis and the rest: text without marks, messages to tools unchanged."""
    thoughts, said = [], []
    for channel, to, body, whole in _harmony_messages(text):
        if channel == "analysis" and to is None:
            thoughts.append(body.strip("\n"))
        else:
            said.append(body if to is None else whole)
    return "\n".join(thoughts), "".join(said)


def parse(
    text: str, tools: Sequence[Tool], *, tool_parser: str, reasoning_parser: str, opened: bool
) -> ParsedCompletion:
    """Parse a completion; without tools no calls are parsed.

    Calls in unterminated reasoning are counted as malformed, not executed, so that the counts show a policy that does
    not end its reasoning.
    """
    reasoning, said = "", text
    if reasoning_parser == "think":
        reasoning, said = split_reasoning(text, opened=opened)
    elif reasoning_parser == "gpt_oss":
        reasoning, said = split_harmony(text)
    if not tools:
        return ParsedCompletion(said, reasoning)
    content, calls, malformed = TOOL_PARSERS[tool_parser](said, tools)
    if reasoning_parser == "think" and reasoning and THINK_END not in text:
        _, inside, broken = TOOL_PARSERS[tool_parser](reasoning, tools)
        malformed += len(inside) + broken
    return ParsedCompletion(content.strip() if calls else content, reasoning, tuple(calls), malformed)
