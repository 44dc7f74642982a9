"""OpenAI Chat Completions and Completions (platform.openai.com/docs/api-reference). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from relax_rt.roles.gateway.calls import (
    MAX_MESSAGES,
    Answer,
    ApiFormat,
    Call,
    Choice,
    Head,
    StreamWriter,
    TokenLogprob,
    bad_request,
    check_tools,
    decode,
    event,
    function_tool,
    parse_max_tokens,
    parse_message,
    parse_n,
    parse_stops,
    parse_temperature,
    unsupported_options,
)

DONE = b"data: [DONE]\n\n"
MAX_PROMPTS = 128
DEFAULT_LENGTH = 16
"""Tokens of a completion where the call does not say, as the API defines."""
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class StreamOptions(msgspec.Struct):
    """Options of a stream: whether its last chunk has the token counts."""

    include_usage: bool | None = None


class SampledRequest(msgspec.Struct, kw_only=True):
    """Fields that both APIs read."""

    model: str
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def options(self) -> dict[str, Any]:
        """Return the fields of a Call that both APIs have."""
        return {
            "model": self.model,
            "n": parse_n(self.n),
            "temperature": parse_temperature(self.temperature),
            "stop": parse_stops(self.stop),
            "seed": self.seed,
            "stream": bool(self.stream),
            "usage_chunk": bool(self.stream_options and self.stream_options.include_usage),
        }


class ChatRequest(SampledRequest, kw_only=True):
    """The fields that are read. Others, which do not change the answer, are ignored."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Any = None
    modalities: list[str] | None = None


class CompletionRequest(SampledRequest, kw_only=True):
    """The fields that are read."""

    prompt: str | list[str | TokenId | list[TokenId]]
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class ChatWriter(StreamWriter):
    """Stream of Chat Completions. A choice's tool calls and log-probabilities all come at its end."""

    def begin(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, delta) for index in range(self._call.n))

    def _text(self, index: int, text: str) -> bytes:
        return self._chunk(index, {"content": text})

    def choice(self, choice: Choice) -> bytes:
        index, message, out = choice.index, choice.message, b""
        if reasoning := message.get("reasoning_content"):
            out += self._chunk(index, {"reasoning_content": reasoning})
        rest = self._unwritten(choice, message.get("content"))
        if rest or (choice.logprobs and self._call.logprobs):
            out += self._chunk(index, {"content": rest}, logprobs=choice.logprobs)
        for number, call in enumerate(message.get("tool_calls") or []):
            out += self._chunk(index, {"tool_calls": [{"index": number, **call}]})
        return out + self._chunk(index, {}, finish_reason=choice.finish_reason)

    def end(self, answer: Answer) -> bytes:
        if not self._call.usage_chunk:
            return DONE
        return event({**_head(self._head, "chat.completion.chunk"), "choices": [], "usage": answer.usage}) + DONE

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
            choice["logprobs"] = _chat_logprobs(logprobs) if logprobs else None
        chunk = {**_head(self._head, "chat.completion.chunk"), "choices": [choice]}
        return event(chunk | {"usage": None} if self._call.usage_chunk else chunk)


class ChatApi(ApiFormat):
    """Chat Completions."""

    writer = ChatWriter

    def parse(self, body: bytes) -> Call:
        request = decode(body, ChatRequest)
        if request.functions or request.function_call:
            message = "functions are no longer a part of the API: use tools"
            raise bad_request(message, "functions", "unsupported_parameter")
        if request.modalities and set(request.modalities) != {"text"}:
            message = f"modalities = {request.modalities}: the model makes text"
            raise bad_request(message, "modalities", "unsupported_value")
        tools = []
        for i, tool in enumerate(check_tools(request.tools or [])):
            if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
                message = f"tools[{i}] is of type {tool.get('type')!r}; functions can be offered"
                raise bad_request(message, f"tools[{i}].type")
            tools.append(function_tool(tool["function"], f"tools[{i}].function"))
        length = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
        return Call(
            **request.options(),
            messages=tuple(parse_message(one, f"messages[{i}]") for i, one in enumerate(request.messages)),
            tools=tuple(tools),
            may_call=request.tool_choice != "none",
            max_tokens=parse_max_tokens(getattr(request, length), length),
            logprobs=bool(request.logprobs),
            unsupported=unsupported_options(
                request,
                tool_choice=request.tool_choice,
                sequential_tools=request.parallel_tool_calls is False and bool(tools),
                text_format=("response_format", request.response_format),
                top_logprobs=("top_logprobs", request.top_logprobs),
            ),
        )

    def render(self, call: Call, answer: Answer) -> dict[str, Any]:
        return {
            **_head(answer.head, "chat.completion"),
            "choices": [
                {
                    "index": choice.index,
                    "message": {"refusal": None, **choice.message},
                    "logprobs": _chat_logprobs(choice.logprobs) if call.logprobs else None,
                    "finish_reason": choice.finish_reason,
                }
                for choice in answer.choices
            ],
            "usage": answer.usage,
        }


class CompletionWriter(StreamWriter):
    """Stream of Completions."""

    def _text(self, index: int, text: str) -> bytes:
        return self._chunk(index, text, ())

    def choice(self, choice: Choice) -> bytes:
        rest = self._unwritten(choice, choice.text)
        return self._chunk(choice.index, rest, choice.logprobs, choice.finish_reason)

    def end(self, answer: Answer) -> bytes:
        chunk = {**_head(self._head, "text_completion"), "choices": [], "usage": answer.usage}
        return (event(chunk) if self._call.usage_chunk else b"") + DONE

    def _chunk(self, index: int, text: str, tokens: Sequence[TokenLogprob], finish: str | None = None) -> bytes:
        logprobs = _completion_logprobs(tokens) if self._call.logprobs and tokens else None
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return event({**_head(self._head, "text_completion"), "choices": [choice]})


class CompletionsApi(ApiFormat):
    """Completions. Several prompts have their answers one after the other: n of the first, n of the second."""

    writer = CompletionWriter

    def parse(self, body: bytes) -> Call:
        request = decode(body, CompletionRequest)
        options = request.options()
        if request.best_of not in (None, options["n"]):
            raise bad_request("best_of chooses among answers by their likelihood: ask for n and choose", "best_of")
        if request.suffix:
            message = "the model goes on with a text, it fills nothing in"
            raise bad_request(message, "suffix", "unsupported_parameter")
        if request.echo and request.logprobs is not None:
            message = "a prompt is not sampled, its tokens have no log-probability"
            raise bad_request(message, "logprobs", "unsupported_value")
        length = DEFAULT_LENGTH if request.max_tokens is None else request.max_tokens
        return Call(
            **options,
            prompts=_prompts(request.prompt),
            max_tokens=parse_max_tokens(length, "max_tokens"),
            logprobs=request.logprobs is not None,
            echo=bool(request.echo),
            unsupported=unsupported_options(request, top_logprobs=("logprobs", request.logprobs)),
        )

    def render(self, call: Call, answer: Answer) -> dict[str, Any]:
        choices = [
            {
                "index": choice.index,
                "text": choice.text,
                "logprobs": _completion_logprobs(choice.logprobs) if call.logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for choice in answer.choices
        ]
        return {**_head(answer.head, "text_completion"), "choices": choices, "usage": answer.usage}


def _head(head: Head, kind: str) -> dict[str, Any]:
    return {"id": head.id, "object": kind, "created": head.created, "model": head.model}


def _chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": [token.as_openai() for token in tokens], "refusal": None}


def _completion_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    offset, offsets = 0, []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.token)
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "text_offset": offsets,
        "top_logprobs": None,
    }


def _prompts(given: str | list[Any]) -> tuple[str | tuple[int, ...], ...]:
    """Return texts or token ids; refuse none, an empty one, too many, and texts and tokens mixed."""
    if isinstance(given, str):
        given = [given]
    if given and all(isinstance(one, int) for one in given):
        given = [given]
    if len({type(one) for one in given}) > 1:
        message = "prompt mixes texts and tokens: give a text, texts, token ids, or lists of token ids"
        raise bad_request(message, "prompt")
    if not 1 <= len(given) <= MAX_PROMPTS or any(not one for one in given):
        raise bad_request(f"{len(given)} prompts, or an empty one: 1 to {MAX_PROMPTS} that are not empty", "prompt")
    return tuple(one if isinstance(one, str) else tuple(one) for one in given)
