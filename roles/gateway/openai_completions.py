"""OpenAI Completions (platform.openai.com/docs/api-reference/completions): text or tokens gone on with. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from relax_rt.roles.gateway import request_parts
from relax_rt.roles.gateway.calls import (
    Answer,
    Call,
    CallError,
    Choice,
    Family,
    Head,
    TokenLogprob,
    bad,
    decode,
    event,
    stops,
)
from relax_rt.roles.gateway.openai_chat import DONE, StreamOptions

MAX_PROMPTS = 128
DEFAULT_LENGTH = 16
"""Tokens of an answer where the call says nothing, as the API has it."""
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class CompletionRequest(msgspec.Struct, kw_only=True):
    """The fields that are read."""

    model: str
    prompt: str | list[str | TokenId | list[TokenId]]
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


class CompletionsApi:
    """Completions. Several prompts have their answers one after the other: n of the first, n of the second."""

    family: Family = "openai"

    def parse(self, body: bytes) -> Call:
        """Parse a request body."""
        asked = decode(body, CompletionRequest)
        n = request_parts.choices(asked.n)
        if asked.best_of not in (None, n):
            raise bad("best_of chooses among answers by their likelihood: ask for n and choose", "best_of")
        if asked.suffix:
            raise bad("the model goes on with a text, it fills nothing in", "suffix", "unsupported_parameter")
        if asked.echo and asked.logprobs is not None:
            raise bad("a prompt is not sampled, its tokens have no log-probability", "logprobs", "unsupported_value")
        options = {name: getattr(asked, name) for name in request_parts.NEUTRAL_VALUES}
        length = DEFAULT_LENGTH if asked.max_tokens is None else asked.max_tokens
        return Call(
            model=asked.model,
            prompts=_prompts(asked.prompt),
            n=n,
            max_tokens=request_parts.length(length, "max_tokens"),
            temperature=request_parts.temperature(asked.temperature),
            stop=stops(asked.stop),
            seed=asked.seed,
            logprobs=asked.logprobs is not None,
            stream=bool(asked.stream),
            usage_chunk=bool(asked.stream_options and asked.stream_options.include_usage),
            echo=bool(asked.echo),
            unsupported=(
                *request_parts.distribution_changes(options),
                *request_parts.top_logprobs(asked.logprobs, "logprobs"),
            ),
        )

    def render(self, call: Call, answer: Answer) -> dict[str, Any]:
        """Render the answer's body."""
        choices = [
            {
                "index": choice.index,
                "text": choice.text,
                "logprobs": _logprobs(choice.logprobs, 0) if call.logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for choice in answer.choices
        ]
        return {**_head(answer.head), "choices": choices, "usage": answer.usage}

    def writer(self, call: Call, head: Head) -> CompletionWriter:
        """Return the writer of a stream."""
        return CompletionWriter(call, head)


class CompletionWriter:
    """Stream of server-sent events."""

    def __init__(self, call: Call, head: Head) -> None:
        self._call, self._head = call, head
        self._written: dict[int, int] = {}

    def begin(self) -> bytes:
        """Open the stream."""
        return b""

    def text(self, index: int, text: str) -> bytes:
        """Write more text of a choice."""
        return self._chunk(index, text, ()) if text else b""

    def choice(self, choice: Choice) -> bytes:
        """Write the rest of a choice."""
        rest = choice.text[self._written.get(choice.index, 0) :]
        return self._chunk(choice.index, rest, choice.logprobs, choice.finish_reason)

    def end(self, answer: Answer) -> bytes:
        """End the stream."""
        usage = event({**_head(self._head), "choices": [], "usage": answer.usage}) if self._call.usage_chunk else b""
        return usage + DONE

    def failed(self, error: CallError) -> bytes:
        """End the stream with an error."""
        return event(error.body("openai"))

    def _chunk(self, index: int, text: str, tokens: Sequence[TokenLogprob], finish: str | None = None) -> bytes:
        at = self._written.get(index, 0)
        self._written[index] = at + len(text)
        logprobs = _logprobs(tokens, 0) if self._call.logprobs and tokens else None
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return event({**_head(self._head), "choices": [choice]})


def _head(head: Head) -> dict[str, Any]:
    return {"id": head.id, "object": "text_completion", "created": head.created, "model": head.model}


def _logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    offsets = []
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
    """Texts or token ids.

    Raises:
        CallError: none, an empty one, too many, or texts and tokens mixed.
    """
    if isinstance(given, str):
        given = [given]
    if given and all(isinstance(one, int) for one in given):
        given = [given]
    if len({type(one) for one in given}) > 1:
        raise bad("prompt mixes texts and tokens: give a text, texts, token ids, or lists of token ids", "prompt")
    if not 1 <= len(given) <= MAX_PROMPTS or any(not one for one in given):
        raise bad(f"{len(given)} prompts, or an empty one: 1 to {MAX_PROMPTS} that are not empty", "prompt")
    return tuple(one if isinstance(one, str) else tuple(one) for one in given)
