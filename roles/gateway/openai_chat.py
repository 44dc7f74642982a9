"""OpenAI Chat Completions (platform.openai.com/docs/api-reference/chat). Pure."""

from __future__ import annotations

from collections.abc import Sequence
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
    TokenLogprob,
    Unsupported,
    bad,
    decode,
    event,
    stops,
)
from relax_rt.roles.gateway.request_parts import bounded_tools, function_tool, message

DONE = b"data: [DONE]\n\n"


class StreamOptions(msgspec.Struct):
    """Options of a stream: whether its last chunk has the token counts."""

    include_usage: bool | None = None


class ChatRequest(msgspec.Struct, kw_only=True):
    """The fields that are read. Others that change nothing about the answer are passed over."""

    model: str
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Any = None
    modalities: list[str] | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


class ChatApi:
    """Translates requests and answers."""

    family: Family = "openai"

    def parse(self, body: bytes) -> Call:
        """Parse a request body."""
        asked = decode(body, ChatRequest)
        if asked.functions or asked.function_call:
            raise bad("functions are no longer a part of the API: use tools", "functions", "unsupported_parameter")
        if asked.modalities and set(asked.modalities) != {"text"}:
            raise bad(f"modalities = {asked.modalities}: the model makes text", "modalities", "unsupported_value")
        length = "max_completion_tokens" if asked.max_completion_tokens is not None else "max_tokens"
        return Call(
            model=asked.model,
            messages=tuple(message(one, f"messages[{i}]") for i, one in enumerate(asked.messages)),
            tools=tuple(_tools(asked.tools or [])),
            may_call=asked.tool_choice != "none",
            n=request_parts.choices(asked.n),
            max_tokens=request_parts.length(getattr(asked, length), length),
            temperature=request_parts.temperature(asked.temperature),
            stop=stops(asked.stop),
            seed=asked.seed,
            logprobs=bool(asked.logprobs),
            stream=bool(asked.stream),
            usage_chunk=bool(asked.stream_options and asked.stream_options.include_usage),
            unsupported=tuple(_unsupported(asked)),
        )

    def render(self, call: Call, answer: Answer) -> dict[str, Any]:
        """Render the answer's body."""
        return {
            **_head(answer.head, "chat.completion"),
            "choices": [
                {
                    "index": choice.index,
                    "message": {"refusal": None, **choice.message},
                    "logprobs": _logprobs(choice.logprobs) if call.logprobs else None,
                    "finish_reason": choice.finish_reason,
                }
                for choice in answer.choices
            ],
            "usage": answer.usage,
        }

    def writer(self, call: Call, head: Head) -> ChatWriter:
        """Return the writer of a stream."""
        return ChatWriter(call, head)


class ChatWriter:
    """Stream of Chat Completions. A choice's tool calls and log-probabilities all come at its end."""

    def __init__(self, call: Call, head: Head) -> None:
        self._call, self._head = call, head
        self._written: dict[int, int] = {}

    def begin(self) -> bytes:
        """Open the stream."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, delta) for index in range(self._call.n))

    def text(self, index: int, text: str) -> bytes:
        """Write more text of a choice."""
        if not text:
            return b""
        self._written[index] = self._written.get(index, 0) + len(text)
        return self._chunk(index, {"content": text})

    def choice(self, choice: Choice) -> bytes:
        """Write the rest of a choice."""
        index, said, out = choice.index, choice.message, b""
        if reasoning := said.get("reasoning_content"):
            out += self._chunk(index, {"reasoning_content": reasoning})
        rest = (said.get("content") or "")[self._written.get(index, 0) :]
        if rest or (choice.logprobs and self._call.logprobs):
            out += self._chunk(index, {"content": rest}, logprobs=choice.logprobs)
        for number, call in enumerate(said.get("tool_calls") or []):
            out += self._chunk(index, {"tool_calls": [{"index": number, **call}]})
        return out + self._chunk(index, {}, finish_reason=choice.finish_reason)

    def end(self, answer: Answer) -> bytes:
        """End the stream."""
        if not self._call.usage_chunk:
            return DONE
        return event({**_head(self._head, "chat.completion.chunk"), "choices": [], "usage": answer.usage}) + DONE

    def failed(self, error: CallError) -> bytes:
        """End the stream with an error."""
        return event(error.body("openai"))

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason}
        if self._call.logprobs:
            choice["logprobs"] = _logprobs(logprobs) if logprobs else None
        chunk = {**_head(self._head, "chat.completion.chunk"), "choices": [choice]}
        return event(chunk | {"usage": None} if self._call.usage_chunk else chunk)


def _head(head: Head, kind: str) -> dict[str, Any]:
    return {"id": head.id, "object": kind, "created": head.created, "model": head.model}


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    content = [{"token": t.token, "logprob": t.logprob, "bytes": t.bytes, "top_logprobs": []} for t in tokens]
    return {"content": content, "refusal": None}


def _tools(given: Sequence[Any]) -> list[dict[str, Any]]:
    found = []
    for i, tool in enumerate(bounded_tools(given)):
        if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise bad(f"tools[{i}] is of type {tool.get('type')!r}; functions can be offered", f"tools[{i}].type")
        found.append(function_tool(tool["function"], f"tools[{i}].function"))
    return found


def _unsupported(asked: ChatRequest) -> list[Unsupported]:
    options = {name: getattr(asked, name) for name in request_parts.NEUTRAL_VALUES}
    return [
        *request_parts.distribution_changes(options),
        *request_parts.forced_tool(asked.tool_choice),
        *request_parts.sequential_tools(asked.parallel_tool_calls, bool(asked.tools)),
        *request_parts.output_format(asked.response_format, "response_format"),
        *request_parts.top_logprobs(asked.top_logprobs),
    ]
