"""Anthropic Messages (docs.claude.com/en/api/messages). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from relax_rt.roles.gateway.calls import (
    MAX_MESSAGES,
    Answer,
    ApiFormat,
    Call,
    CallError,
    Choice,
    Family,
    Head,
    Message,
    StreamWriter,
    bad_request,
    check_tools,
    decode,
    event,
    function_tool,
    parse_content,
    parse_max_tokens,
    parse_stops,
    parse_temperature,
    parse_user_content,
    unsupported_options,
)

ERROR = "Error: "
"""Written before the result of a tool that failed: chat templates have no field for that."""
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesRequest(msgspec.Struct, kw_only=True):
    """The fields that are read."""

    model: str
    max_tokens: int
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    temperature: float | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    output_config: dict[str, Any] | None = None
    top_p: float | None = None
    top_k: int | None = None


class CountRequest(MessagesRequest, kw_only=True):
    """A request to count tokens has no answer."""

    max_tokens: int = 1


class MessagesWriter(StreamWriter):
    """Stream of Messages: blocks one after the other, each with its deltas."""

    def __init__(self, call: Call, head: Head) -> None:
        super().__init__(call, head)
        self._index = -1
        self._text_open = False

    def begin(self) -> bytes:
        return _event("message_start", message=_message(self._head, [], _usage(self._head, 0)))

    def _text(self, index: int, text: str) -> bytes:
        out = b"" if self._text_open else self._begin_block({"type": "text", "text": ""})
        self._text_open = True
        return out + self._delta({"type": "text_delta", "text": text})

    def choice(self, choice: Choice) -> bytes:
        out = b""
        for block in _blocks(choice):
            if block["type"] == "text":
                out += self.text(choice.index, self._unwritten(choice, block["text"]))
                out += self._end_block() if self._text_open else b""
                self._text_open = False
            elif block["type"] == "thinking":
                out += self._begin_block({"type": "thinking", "thinking": "", "signature": ""})
                out += self._delta({"type": "thinking_delta", "thinking": block["thinking"]}) + self._end_block()
            else:
                out += self._begin_block({**block, "input": {}})
                arguments = msgspec.json.encode(block["input"]).decode()
                out += self._delta({"type": "input_json_delta", "partial_json": arguments}) + self._end_block()
        if self._text_open:
            out, self._text_open = out + self._end_block(), False
        usage = {"output_tokens": choice.tokens}
        return out + _event("message_delta", delta=_ending(choice), usage=usage)

    def end(self, answer: Answer) -> bytes:
        return _event("message_stop")

    def failed(self, error: CallError) -> bytes:
        return event(error.body("anthropic", self._head.id), "error")

    def _begin_block(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _end_block(self) -> bytes:
        return _event("content_block_stop", index=self._index)


class MessagesApi(ApiFormat):
    """Messages."""

    family: ClassVar[Family] = "anthropic"
    request: ClassVar[type[MessagesRequest]] = MessagesRequest
    writer = MessagesWriter

    def parse(self, body: bytes) -> Call:
        request = decode(body, self.request)
        tool_choice = request.tool_choice or {}
        kind = tool_choice.get("type", "auto")
        messages: list[Message] = []
        if system := parse_content(request.system, "system"):
            messages.append({"role": "system", "content": system})
        for i, one in enumerate(request.messages):
            messages += _parse_message(one, f"messages[{i}]")
        tools = []
        for i, tool in enumerate(check_tools(request.tools or [])):
            if tool.get("type") not in (None, "custom"):
                message = f"tools[{i}] is of type {tool['type']!r}; tools of the caller's own can be offered"
                raise bad_request(message, f"tools[{i}]")
            tools.append(function_tool({**tool, "parameters": tool.get("input_schema")}, f"tools[{i}]"))
        return Call(
            model=request.model,
            messages=tuple(messages),
            tools=tuple(tools),
            may_call=kind != "none",
            max_tokens=parse_max_tokens(request.max_tokens, "max_tokens"),
            temperature=parse_temperature(request.temperature),
            stop=parse_stops(request.stop_sequences, "stop_sequences"),
            stream=bool(request.stream),
            unsupported=unsupported_options(
                request,
                tool_choice=kind,
                sequential_tools=bool(tool_choice.get("disable_parallel_tool_use")) and bool(tools),
                text_format=("output_config.format", (request.output_config or {}).get("format")),
            ),
        )

    def render(self, call: Call, answer: Answer) -> dict[str, Any]:
        choice = answer.choices[0]
        message = _message(answer.head, _blocks(choice), _usage(answer.head, choice.tokens))
        return message | _ending(choice)


class CountTokensApi(MessagesApi):
    """Messages whose prompt tokens are counted."""

    request = CountRequest


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _message(head: Head, blocks: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": blocks,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _usage(head: Head, tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": head.prompt_tokens - head.reused_tokens,
        "cache_read_input_tokens": head.reused_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": tokens,
    }


def _ending(choice: Choice) -> dict[str, Any]:
    reason = "stop_sequence" if choice.stop is not None else STOP_REASONS[choice.finish_reason]
    return {"stop_reason": reason, "stop_sequence": choice.stop}


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    """Return an answer's reasoning, text and tool calls as blocks."""
    message, found = choice.message, []
    if reasoning := message.get("reasoning_content"):
        found.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if text := message.get("content"):
        found.append({"type": "text", "text": text})
    for call in message.get("tool_calls") or []:
        function = call["function"]
        arguments = function["arguments"]
        try:
            parsed = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            # The API wants an object: what the model wrote is passed on under one key.
            parsed = {"arguments": arguments}
        found.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": parsed})
    return found


def _parse_message(given: Mapping[str, Any], at: str) -> list[Message]:
    role, parts = given.get("role"), given.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"{at}.role is {role!r}, not user or assistant", f"{at}.role")
    if not isinstance(parts, list):
        if not isinstance(parts, str):
            raise bad_request(f"{at}.content is neither text nor a list of blocks", f"{at}.content")
        return [{"role": role, "content": parts}]
    if any(not isinstance(part, Mapping) for part in parts):
        raise bad_request(f"{at}.content has a block that is no object", f"{at}.content")
    if role == "assistant":
        return [_assistant_message(parts, at)]
    # Results of tools are messages of their own, before the text beside them.
    results: list[Message] = []
    rest = []
    for i, part in enumerate(parts):
        if part.get("type") == "tool_result":
            result = parse_content(part.get("content"), f"{at}.content[{i}].content") or ""
            result = f"{ERROR}{result}" if part.get("is_error") is True else result
            results.append({"role": "tool", "tool_call_id": str(part.get("tool_use_id") or ""), "content": result})
        else:
            rest.append(part)
    if rest:
        parse = parse_user_content if role == "user" else parse_content
        results.append({"role": role, "content": parse(rest, f"{at}.content") or ""})
    return results


def _assistant_message(parts: Sequence[Mapping[str, Any]], at: str) -> Message:
    """Join blocks of text, reasoning and tool calls that the model made earlier to one message."""
    texts, thoughts, calls = [], [], []
    for i, part in enumerate(parts):
        kind, here = part.get("type"), f"{at}.content[{i}]"
        if kind == "thinking":
            thoughts.append(str(part.get("thinking") or ""))
        elif kind == "tool_use":
            name = part.get("name")
            if not isinstance(name, str):
                raise bad_request(f"{here}.name is missing", f"{here}.name")
            function = {"name": name, "arguments": msgspec.json.encode(part.get("input") or {}).decode()}
            calls.append({"id": str(part.get("id") or ""), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(parse_content([part], f"{at}.content") or "")
    found: Message = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if any(thoughts):
        found["reasoning_content"] = "".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return found
