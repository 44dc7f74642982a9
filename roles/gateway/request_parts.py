"""Parts of requests that the APIs share: messages, tools and sampling options, brought to one form. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from relax_rt.roles.data.media.images import IMAGES, is_image
from relax_rt.roles.data.media.images import MAX_BYTES as MAX_MEDIA_BYTES
from relax_rt.roles.gateway.calls import MAX_CHOICES, MAX_TOOL_BYTES, MAX_TOOLS, CallError, Message, Unsupported, bad

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MEDIA = {
    **dict.fromkeys(IMAGES, "image"),
    **dict.fromkeys(("input_audio", "audio"), "audio"),
    **dict.fromkeys(("video_url", "input_video", "video"), "video"),
    **dict.fromkeys(("file", "input_file", "document"), "file"),
}
TEXTS = frozenset({"text", "input_text", "output_text", "refusal"})
PLACE = "at"


def message(given: Mapping[str, Any], at: str) -> Message:
    """One message of Chat Completions; texts in parts are joined.

    Raises:
        CallError: it is none, or has parts that the model cannot take.
    """
    role = ROLES.get(given.get("role", ""))
    if role is None:
        raise bad(f"{at}.role is {given.get('role')!r}, not one of {', '.join(ROLES)}", f"{at}.role")
    read = user_content if role == "user" else content
    found: Message = {"role": role, "content": read(given.get("content"), f"{at}.content")}
    if isinstance(name := given.get("name"), str):
        found["name"] = name
    if role == "assistant":
        _of_assistant(given, found, at)
    elif found["content"] is None:
        raise bad(f"{at} has no content", f"{at}.content")
    if role == "tool":
        found["tool_call_id"] = _text(given, "tool_call_id", at)
    return found


def _of_assistant(given: Mapping[str, Any], found: Message, at: str) -> None:
    if given.get("function_call") is not None:
        raise bad(f"{at}.function_call is no longer a part of the API: use tool_calls", f"{at}.function_call")
    reasoning = given.get("reasoning_content") or given.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        found["reasoning_content"] = reasoning
    if calls := given.get("tool_calls"):
        if not isinstance(calls, list):
            raise bad(f"{at}.tool_calls is no list", f"{at}.tool_calls")
        found["tool_calls"] = [tool_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls)]
    elif found["content"] is None:
        found["content"] = ""


def tool_call(given: Any, at: str) -> dict[str, Any]:
    """A call of a tool that the model made earlier.

    Raises:
        CallError: it has no name, or arguments that are no text.
    """
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping):
        raise bad(f"{at} is no call of a function", at)
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        raise bad(f"{at}.function.arguments is to be JSON in a string", f"{at}.function.arguments")
    call = {"name": _text(function, "name", f"{at}.function"), "arguments": arguments}
    return {"id": str(given.get("id") or ""), "type": "function", "function": call}


def content(given: Any, at: str) -> str | None:
    """Text, or texts in parts, as text; None where nothing is given.

    Raises:
        CallError: it is neither, or has a part that is no text.
    """
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise bad(f"{at} is neither text nor a list of parts", at)
    return "".join(_part(part, f"{at}[{i}]") for i, part in enumerate(given))


def user_content(given: Any, at: str) -> str | list[Message] | None:
    """What the user says: as `content`, or with images a list of parts. An image stays as it came, and is told where
    it was (`at`); nothing of it is decoded.

    Raises:
        CallError: it is none of these, or too large.
    """
    if not isinstance(given, list) or not any(map(is_image, given)):
        return content(given, at)
    found: list[Message] = []
    for i, part in enumerate(given):
        here = f"{at}[{i}]"
        if is_image(part):
            _check_bytes(part, here)
            found.append({**part, PLACE: here})
        else:
            found.append({"type": "text", "text": _part(part, here)})
    return found


def _part(part: Any, at: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in TEXTS:
        return _text(part, "refusal" if kind == "refusal" else "text", at)
    if kind in MEDIA:
        _check_bytes(part, at)
        read = "texts are, and by models that see images in what the user says"
        raise bad(f"{at} is of type {MEDIA[kind]}, which is not read there: {read}", at, "unsupported_media")
    raise bad(f"{at} is a part of type {kind!r}; text is what can be read", at)


def image_refused(part: Mapping[str, Any]) -> CallError:
    """Why an image is not taken where the model does not see. Nothing of it is decoded or fetched."""
    at = str(part[PLACE])
    return bad(f"{at} is of type image, and the model that is trained here reads text alone", at, "unsupported_media")


def _check_bytes(part: Any, at: str) -> None:
    if (nbytes := _media_bytes(part)) > MAX_MEDIA_BYTES:
        message = f"{at} is {MEDIA[part['type']]} data of {nbytes} bytes, the bound is {MAX_MEDIA_BYTES}"
        raise CallError(413, message, param=at, code="media_too_large")


def _media_bytes(part: Any) -> int:
    """Bytes of base64 data in a part, about, without decoding it."""
    if not isinstance(part, Mapping):
        return 0
    values = [*part.values(), *(v for inner in part.values() if isinstance(inner, Mapping) for v in inner.values())]
    return max((len(value) for value in values if isinstance(value, str)), default=0) * 3 // 4


def function_tool(given: Mapping[str, Any], at: str) -> dict[str, Any]:
    """A function in the form of Chat Completions: {"type": "function", "function": {…}}."""
    described = given.get("description")
    found: dict[str, Any] = {"name": _text(given, "name", at), "description": described or ""}
    parameters = given.get("parameters")
    found["parameters"] = parameters if isinstance(parameters, Mapping) else {"type": "object", "properties": {}}
    return {"type": "function", "function": found}


def bounded_tools(tools: Sequence[Any]) -> Sequence[Any]:
    """Raises: CallError: there are too many, they are too large together, or one is no table."""
    if len(tools) > MAX_TOOLS:
        raise bad(f"{len(tools)} tools, at most {MAX_TOOLS} can be offered", "tools")
    if any(not isinstance(tool, Mapping) for tool in tools):
        raise bad("a tool that is no object", "tools")
    if tools and (nbytes := len(msgspec.json.encode(tools))) > MAX_TOOL_BYTES:
        message = f"the tools have {nbytes} bytes as JSON, the bound is {MAX_TOOL_BYTES} for all of a call"
        raise CallError(413, message, param="tools", code="tools_too_large")
    return tools


def _text(given: Mapping[str, Any], key: str, at: str) -> str:
    value = given.get(key)
    if not isinstance(value, str):
        raise bad(f"{at}.{key} is missing or no text", f"{at}.{key}")
    return value


TRUNCATES = "it changes the distribution that is sampled from, and tokens would have no behaviour log-probability"
CONSTRAINED = "answers are sampled freely, without a grammar: nothing can force it"
NEUTRAL_VALUES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "top_p": ((None, 1, 1.0), TRUNCATES),
    "top_k": ((None, 0, -1), TRUNCATES),
    "min_p": ((None, 0, 0.0), TRUNCATES),
    "frequency_penalty": ((None, 0, 0.0), TRUNCATES),
    "presence_penalty": ((None, 0, 0.0), TRUNCATES),
    "repetition_penalty": ((None, 1, 1.0), TRUNCATES),
    "logit_bias": ((None, {}), TRUNCATES),
}
"""Options of samplers: the values that leave the distribution as it is, and why others cannot be."""


def distribution_changes(given: Mapping[str, Any]) -> Iterator[Unsupported]:
    """Options that would change the distribution."""
    for name, (neutral, why) in NEUTRAL_VALUES.items():
        if given.get(name) not in neutral:
            yield Unsupported(name, why)


def forced_tool(given: Any) -> Iterator[Unsupported]:
    """A choice of tools that would have to be forced upon the model; `auto` and `none` are none."""
    if given not in (None, "auto", "none"):
        yield Unsupported("tool_choice", CONSTRAINED)


def sequential_tools(asked: bool | None, tools: bool) -> Iterator[Unsupported]:
    """That an answer is not to call several tools."""
    if asked is False and tools:
        yield Unsupported("parallel_tool_calls", CONSTRAINED)


def output_format(given: Any, name: str) -> Iterator[Unsupported]:
    """A format of the answer other than text."""
    kind = given.get("type", "text") if isinstance(given, Mapping) else "text"
    if kind != "text":
        yield Unsupported(name, CONSTRAINED)


def choices(n: int | None) -> int:
    """How many answers.

    Raises:
        CallError: none, or too many.
    """
    n = 1 if n is None else n
    if not 1 <= n <= MAX_CHOICES:
        raise bad(f"n = {n}: 1 to {MAX_CHOICES} answers can be had at once", "n")
    return n


def length(given: int | None, name: str) -> int | None:
    """Tokens at most.

    Raises:
        CallError: not even one.
    """
    if given is not None and given < 1:
        raise bad(f"{name} = {given}: at least one token", name)
    return given


def temperature(given: float | None) -> float | None:
    """0 is greedy.

    Raises:
        CallError: it is none.
    """
    if given is not None and not 0 <= given <= 10:
        raise bad(f"temperature = {given}: 0 to 10", "temperature")
    return given


def top_logprobs(given: int | None, name: str = "top_logprobs") -> Iterator[Unsupported]:
    """Log-probabilities of tokens that were not sampled."""
    if given:
        yield Unsupported(name, "the log-probability of the sampled token is kept, no others")
