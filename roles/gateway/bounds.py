"""How much a request is, told before anything is made of it: memory of its values, and characters to render. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from relax_rt.roles.gateway.calls import Call, Message

LONG_BYTES = 16_384
"""Of a request: rendering and reading its conversation takes so long that other callers would notice."""
LARGE_BYTES = 1 << 18
"""Of a request: so does parsing it."""
CHARACTERS_A_TOKEN = 64
"""A text with more than that for each token that there is room for is refused without being looked at. Text and code
have about four; tokens of long runs of spaces have more."""
VALUE_BYTES = 64
"""Of a value of JSON that is no text, once it is parsed, about."""
PARSED_TIMES = 4
"""The values of a body may take so many times what the body itself may have."""
TEXTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""Texts of JSON; one without an end has the rest, so that nothing is read twice."""


def parsed_bytes(body: bytes) -> int:
    """Memory that the values of a JSON body take once it is parsed, about; 0 where texts are most of it, which take no
    more than they do in the body."""
    if _marks(body) * VALUE_BYTES <= PARSED_TIMES * len(body):
        return 0
    return _marks(TEXTS.sub(b"", body)) * VALUE_BYTES


def _marks(body: bytes) -> int:
    return sum(body.count(mark) for mark in (b",", b"[", b"{"))


def characters(call: Call) -> int:
    """Of the texts that are to be rendered for a call; tools are bounded by themselves, and pictures are no text."""
    prompts = sum(len(prompt) for prompt in call.prompts if isinstance(prompt, str))
    return len(call.instructions) + prompts + sum(len(text) for one in call.messages for text in _texts(one))


def _texts(message: Message) -> Iterator[str]:
    content = message.get("content") or ""
    if isinstance(content, str):
        yield content
    else:
        yield from (part["text"] for part in content if part.get("type") == "text")
    yield message.get("reasoning_content") or ""
    for call in message.get("tool_calls") or []:
        yield from (call["function"]["name"], call["function"]["arguments"])
