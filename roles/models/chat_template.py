"""Probe which message forms a chat template accepts by rendering short conversations, and convert messages to them.

Templates differ in ways that their text does not show reliably: some want the arguments of a tool call as a mapping and
some as JSON text, some write calls only with a null content, some refuse or drop a role. A wrong form raises in the
middle of a run, or writes a prompt that the model was never trained on. `probe_template` therefore tries each form once
when a template is loaded; `ChatTokenizer` (prompts) and `ChatTemplate` (episodes) prepare their messages by the result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

Message = dict[str, Any]
Tool = dict[str, Any]
Apply = Callable[[list[Message], list[Tool]], str]
"""Renders messages with tools and opens no further turn."""

WORD, SECOND_WORD = "zqxwords", "zqxothers"
KEY, VALUE, SECOND_KEY, SECOND_VALUE = "zqxkey", "zqxvalue", "zqxtwokey", "zqxtwovalue"
NAME = "zqxtool"
PROBE_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "A text."}}},
    },
}
SYSTEM, DEVELOPER, CALLS, PARALLEL, RESULTS, TURNS = (
    "system",
    "developer",
    "calls",
    "parallel calls",
    "tool results",
    "second turn",
)
MAX_REASON = 300


class TemplateFault(msgspec.Struct, frozen=True):
    """What is wrong with a rendering.

    Attributes:
        raises: the template refused it; else something is left out or garbled.
    """

    why: str
    raises: bool = False


class TemplateCapabilities(msgspec.Struct, frozen=True):
    """Which message forms a chat template renders, and how.

    Attributes:
        arguments_as_text: the template expects arguments of tool calls as JSON text, else as a mapping.
        null_content: calls are written only if the content of their message is null or absent (newer versions of
            transformers remove null keys before rendering).
        text_as_parts: content is rendered only as a list of parts.
        developer: the template renders the role `developer`; else it is converted to `system`.
        missing: what it cannot render (SYSTEM, CALLS, ...) -> why.
    """

    arguments_as_text: bool = False
    null_content: bool = False
    text_as_parts: bool = False
    developer: bool = False
    missing: dict[str, TemplateFault] = {}

    @property
    def one_call(self) -> bool:
        """A turn with several calls cannot be rendered, one with a single call and its result can."""
        return PARALLEL in self.missing and not self.missing.keys() & {CALLS, RESULTS}


def template_errors() -> tuple[type[Exception], ...]:
    """Return what a template raises on messages that it does not take: its own refusals, and whatever its expressions
    do."""
    from jinja2 import TemplateError

    return TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError


def probe_template(apply: Apply, source: str) -> TemplateCapabilities:
    """Find out what a template takes.

    Args:
        source: its Jinja text, which shows whether it handles the role `developer`.
    """
    missing: dict[str, TemplateFault] = {}
    asked: Message = {"role": "user", "content": WORD}
    parts = (
        _fault(apply, [asked], WORD) is not None
        and _fault(apply, [{**asked, "content": [{"type": "text", "text": asked["content"]}]}], WORD) is None
    )

    def fault(
        found: TemplateCapabilities, messages: list[Message], *wanted: str, tools: Sequence[Tool] = ()
    ) -> TemplateFault | None:
        return _fault(apply, [prepare_message(message, found) for message in messages], *wanted, tools=tools)

    native = "developer" in source
    plain = TemplateCapabilities(text_as_parts=parts, developer=native)
    for role in (SYSTEM, DEVELOPER):
        if why := fault(plain, [{"role": role, "content": SECOND_WORD}, asked], SECOND_WORD):
            missing[role] = why
    said: Message = {"role": "assistant", "content": "Yes."}
    if why := fault(plain, [asked, said, {"role": "user", "content": SECOND_WORD}], SECOND_WORD):
        missing[TURNS] = why
    one = [_call("call00001", KEY, VALUE)]
    two = [*one, _call("call00002", SECOND_KEY, SECOND_VALUE)]
    forms = [
        TemplateCapabilities(text, null, parts, native)
        # As today's templates want it first; text and null are of older ones (DeepSeek's).
        for text in (False, True)
        for null in (False, True)
    ]
    faults = [fault(form, [asked, _calls(one)], KEY, VALUE, tools=[PROBE_TOOL]) for form in forms]
    # Where none is right, one that does not raise at least.
    form, why = min(zip(forms, faults, strict=True), key=lambda one: 0 if one[1] is None else 1 + one[1].raises)
    if why:
        missing[CALLS] = why
    results = [_result("call00001", WORD), _result("call00002", SECOND_WORD)]
    if why := fault(form, [{"role": "user", "content": "a"}, _calls(one), results[0]], WORD, tools=[PROBE_TOOL]):
        missing[RESULTS] = why
    several = [{"role": "user", "content": "a"}, _calls(two), *results]
    wanted = (KEY, VALUE, SECOND_KEY, SECOND_VALUE, WORD, SECOND_WORD)
    if why := fault(form, several, *wanted, tools=[PROBE_TOOL]):
        missing[PARALLEL] = why
    return msgspec.structs.replace(form, missing=missing)


def _fault(apply: Apply, messages: list[Message], *wanted: str, tools: Sequence[Tool] = ()) -> TemplateFault | None:
    """Describe what is wrong with the rendering of a conversation that must contain these words."""
    try:
        text = apply(messages, list(tools))
    except template_errors() as error:
        return TemplateFault(f"it raises {type(error).__name__}: {error}"[:MAX_REASON], raises=True)
    if absent := [word for word in wanted if word not in text]:
        return TemplateFault(
            f"it does not write {'the words' if absent[0] in (WORD, SECOND_WORD) else 'all arguments of calls'}"
        )
    for key in (KEY, SECOND_KEY):
        if f'\\"{key}' in text:
            return TemplateFault("it writes the arguments as a quoted text")
        if f"'{key}'" in text:
            return TemplateFault("it writes the arguments in Python's form, not as JSON")
    return None


def _call(name: str, key: str, value: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": NAME, "arguments": {key: value}}}


def _calls(calls: list[dict[str, Any]]) -> Message:
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _result(call: str, words: str) -> Message:
    return {"role": "tool", "content": words, "tool_call_id": call, "name": NAME}


def unseen_role(messages: Sequence[Message], found: TemplateCapabilities) -> str:
    """Return why messages would be lost in silence: the template has no place for a role that they have; empty if
    none."""
    for message in messages:
        role = message.get("role")
        key = {"tool": RESULTS, SYSTEM: SYSTEM, DEVELOPER: DEVELOPER}.get(str(role))
        if key in found.missing and content_text(message.get("content")):
            return f"the model's chat template takes no message with the role {role!r}: {found.missing[key].why}"
    return ""


def prepare_message(message: Message, found: TemplateCapabilities) -> Message:
    """Return a message as the template wants it: a text for content that is text, a role that it knows, and the
    arguments of tool calls in the form that was found. Null content is empty text but where the template asks for
    null."""
    content = content_text(message.get("content"))
    if found.text_as_parts and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    role = message.get("role")
    ready = {**message, "content": content, "role": SYSTEM if role == DEVELOPER and not found.developer else role}
    calls = tool_calls_of(message)
    if not calls:
        # Templates ask whether the key is there, not what is in it.
        ready.pop("tool_calls", None)
        return ready
    if found.null_content and not content_text(message.get("content")):
        ready["content"] = None
    form = argument_text if found.arguments_as_text else parsed_arguments
    # Rows of data have calls without OpenAI's envelope, too.
    calls = [call if "function" in call else {"type": "function", "function": call} for call in calls]
    ready["tool_calls"] = [
        {**call, "function": {**call["function"], "arguments": form(call["function"].get("arguments"))}}
        for call in calls
    ]
    return ready


def tool_calls_of(message: Message) -> list[Any]:
    """Return the tool calls of a message."""
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def content_text(content: Any) -> Any:
    """Join content to one text; it stays a list if it has parts other than text (images, audio)."""
    if content is None:
        return ""
    if isinstance(content, list) and all("text" in part for part in content):
        return "".join(part["text"] for part in content)
    return content


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is beyond what a number holds, and would be written as Infinity")
    return value


STRICT_JSON = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
"""JSON without NaN and Infinity, also where a number such as 1e999 would become one."""


def parsed_arguments(arguments: Any) -> Any:
    """Parse arguments of a tool call to an object; null and empty text become {}; text that is not JSON stays text."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        # The text `null` comes from clients that serialise the arguments they received.
        parsed = STRICT_JSON.decode(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else {} if parsed is None else arguments


def argument_text(arguments: Any) -> str:
    """Return arguments of a tool call as JSON text; a text is left as it is, unless it is empty."""
    if isinstance(arguments, str) and arguments.strip() not in ("", "null"):
        return arguments
    return written_arguments(parsed_arguments(arguments))


def written_arguments(arguments: Any) -> str:
    """Return arguments of a call as JSON text.

    Raises:
        ValueError: a number is not finite, which JSON cannot represent.
    """
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    # Half a surrogate pair, which JSON can escape, is in no encoding.
    return json.dumps(arguments) if any("\ud800" <= character <= "\udfff" for character in text) else text
