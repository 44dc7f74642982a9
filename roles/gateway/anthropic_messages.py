"""Anthropic Messages (docs.claude.com/en/api/messages). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from relax_rt.roles.gateway import request_parts
from relax_rt.roles.gateway.calls import (
    MAX_MESSAGES,
    Answer,
    Call,
    CallError,
    Choice,
    Family,
    Head,
    Message,
    Unsupported,
    bad,
    decode,
    event,
    stops,
)
from relax_rt.roles.gateway.request_parts import bounded_tools, content, function_tool, user_content

ERROR = "Error: "
"""Before the result of a tool that failed: chat templates know no such mark."""
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


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
    """What is to be counted has no answer."""

    max_tokens: int = 1


class MessagesApi:
    """Translates requests and answers."""

    family: Family = "anthropic"
    request: type[MessagesRequest] = MessagesRequest

    def parse(self, body: bytes) -> Call:
        """Parse a request body."""
        asked = decode(body, self.request)
        choice = asked.tool_choice or {}
        kind = choice.get("type", "auto")
        found: list[Message] = []
        if system := content(asked.system, "system"):
            found.append({"role": "system", "content": system})
        for i, one in enumerate(asked.messages):
            found += _messages(one, f"messages[{i}]")
        return Call(
            model=asked.model,
            messages=tuple(found),
            tools=tuple(_tools(asked.tools or [])),
            may_call=kind != "none",
            max_tokens=request_parts.length(asked.max_tokens, "max_tokens"),
            temperature=request_parts.temperature(asked.temperature),
            stop=stops(asked.stop_sequences, "stop_sequences"),
            stream=bool(asked.stream),
            unsupported=tuple(_unsupported(asked, kind, parallel=not choice.get("disable_parallel_tool_use"))),
        )

    def render(self, call: Call, answer: Answer) -> dict[str, Any]:
        """Render the answer's body."""
        choice = answer.choices[0]
        message = _message(answer.head, _blocks(choice), _usage(answer.head, choice.tokens))
        return message | _ending(choice)

    def writer(self, call: Call, head: Head) -> MessagesWriter:
        """Return the writer of a stream."""
        return MessagesWriter(head)


class CountTokensApi(MessagesApi):
    """What a call of `Messages` would be, to count the tokens of its prompt."""

    request = CountRequest


class MessagesWriter:
    """Stream of server-sent events."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._index = -1
        self._written = 0
        self._open = False

    def begin(self) -> bytes:
        """Open the stream."""
        return _event("message_start", message=_message(self._head, [], _usage(self._head, 0)))

    def text(self, index: int, text: str) -> bytes:
        """Write more text of a choice."""
        if not text:
            return b""
        begun = b"" if self._open else self._begin({"type": "text", "text": ""})
        self._open = True
        self._written += len(text)
        return begun + self._delta({"type": "text_delta", "text": text})

    def choice(self, choice: Choice) -> bytes:
        """Write the rest of a choice."""
        blocks, out = _blocks(choice), b""
        for block in blocks:
            if block["type"] == "text":
                out += self.text(0, block["text"][self._written :])
                out += self._end() if self._open else b""
                self._open = False
            elif block["type"] == "thinking":
                out += self._begin({"type": "thinking", "thinking": "", "signature": ""})
                out += self._delta({"type": "thinking_delta", "thinking": block["thinking"]}) + self._end()
            else:
                out += self._begin({**block, "input": {}})
                given = msgspec.json.encode(block["input"]).decode()
                out += self._delta({"type": "input_json_delta", "partial_json": given}) + self._end()
        if self._open:
            out, self._open = out + self._end(), False
        usage = {"output_tokens": choice.tokens}
        return out + _event("message_delta", delta=_ending(choice), usage=usage)

    def end(self, answer: Answer) -> bytes:
        """End the stream."""
        return _event("message_stop")

    def failed(self, error: CallError) -> bytes:
        """End the stream with an error."""
        return event(error.body("anthropic", self._head.id), "error")

    def _begin(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _end(self) -> bytes:
        return _event("content_block_stop", index=self._index)


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
    reason = "stop_sequence" if choice.stop is not None else REASONS[choice.finish_reason]
    return {"stop_reason": reason, "stop_sequence": choice.stop}


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    """What was thought, said and is to be called."""
    said, found = choice.message, []
    if reasoning := said.get("reasoning_content"):
        found.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if text := said.get("content"):
        found.append({"type": "text", "text": text})
    for call in said.get("tool_calls") or []:
        function = call["function"]
        found.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": _input(function["arguments"])}
        )
    return found


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as the object that the API wants; what is none lies under one key."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {"arguments": arguments}


def _messages(given: Mapping[str, Any], at: str) -> list[Message]:
    role, parts = given.get("role"), given.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad(f"{at}.role is {role!r}, not user or assistant", f"{at}.role")
    if not isinstance(parts, list):
        if not isinstance(parts, str):
            raise bad(f"{at}.content is neither text nor a list of blocks", f"{at}.content")
        return [{"role": role, "content": parts}]
    if any(not isinstance(part, Mapping) for part in parts):
        raise bad(f"{at}.content has a block that is no object", f"{at}.content")
    return [_assistant(parts, at)] if role == "assistant" else _others(str(role), parts, at)


def _assistant(parts: Sequence[Mapping[str, Any]], at: str) -> Message:
    """What the model said earlier: blocks of text, thoughts and calls of tools in one message."""
    texts, thoughts, calls = [], [], []
    for i, part in enumerate(parts):
        kind, here = part.get("type"), f"{at}.content[{i}]"
        if kind == "thinking":
            thoughts.append(str(part.get("thinking") or ""))
        elif kind == "tool_use":
            name = part.get("name")
            if not isinstance(name, str):
                raise bad(f"{here}.name is missing", f"{here}.name")
            function = {"name": name, "arguments": msgspec.json.encode(part.get("input") or {}).decode()}
            calls.append({"id": str(part.get("id") or ""), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(content([part], f"{at}.content") or "")
    found: Message = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if any(thoughts):
        found["reasoning_content"] = "".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return found


def _others(role: str, parts: Sequence[Mapping[str, Any]], at: str) -> list[Message]:
    """What the model was told: results of tools are messages of their own, before the text beside them."""
    results: list[Message] = []
    rest = []
    for i, part in enumerate(parts):
        if part.get("type") == "tool_result":
            told = content(part.get("content"), f"{at}.content[{i}].content") or ""
            told = f"{ERROR}{told}" if part.get("is_error") is True else told
            results.append({"role": "tool", "tool_call_id": str(part.get("tool_use_id") or ""), "content": told})
        else:
            rest.append(part)
    if rest:
        read = user_content if role == "user" else content
        results.append({"role": role, "content": read(rest, f"{at}.content") or ""})
    return results


def _tools(given: Sequence[Any]) -> list[dict[str, Any]]:
    found = []
    for i, tool in enumerate(bounded_tools(given)):
        if tool.get("type") not in (None, "custom"):
            raise bad(
                f"tools[{i}] is of type {tool['type']!r}; tools of the caller's own can be offered", f"tools[{i}]"
            )
        found.append(function_tool({**tool, "parameters": tool.get("input_schema")}, f"tools[{i}]"))
    return found


def _unsupported(asked: MessagesRequest, choice: str, *, parallel: bool) -> list[Unsupported]:
    return [
        *request_parts.distribution_changes({"top_p": asked.top_p, "top_k": asked.top_k}),
        *request_parts.forced_tool(choice),
        *request_parts.sequential_tools(parallel, bool(asked.tools)),
        *request_parts.output_format((asked.output_config or {}).get("format"), "output_config.format"),
    ]
