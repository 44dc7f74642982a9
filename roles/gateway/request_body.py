"""Reads a request's body, bounded in bytes, time and the memory of its values."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

from relax_rt.roles.gateway.calls import Call, CallError, Message

Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Scope = MutableMapping[str, Any]

LINGER_S = 2.0
LINGER_BYTES = 256 << 20
"""Of somebody with a key; they are not kept."""


class ClientDisconnected(Exception):
    """The caller is gone."""


def header(scope: Scope, name: bytes) -> str:
    """A header's first value; empty: there is none."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


class MemoryBudget:
    """Bytes of requests that may be held at the same time, all calls together."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0

    @contextlib.contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """A call's part of it, given back at its end: what comes is to be told.

        Raises:
            CallError: 503: there is no more (when more is told).
        """
        mine = 0

        def hold(nbytes: int) -> None:
            nonlocal mine
            mine += nbytes
            self.held += nbytes
            if self.held > self.most:
                message = f"calls at hand have {self.most} bytes of requests already, the bound"
                raise CallError(503, message, code="busy", retry_after_s=1.0)

        try:
            yield hold
        finally:
            self.held -= mine


async def read_body(
    scope: Scope, receive: Receive, most: int, timeout_s: float, hold: Callable[[int], None] = lambda _: None
) -> bytes:
    """The whole body.

    Args:
        most: bytes at most; more are refused while they come, and nothing of them is kept.
        timeout_s: for all of it, seconds.
        hold: is told of bytes that come.

    Raises:
        CallError: 413 it is too large, 408 it takes too long; what `hold` raises.
        ClientDisconnected: the caller is gone.
    """
    length = header(scope, b"content-length")
    if length.isdigit() and int(length) > most:
        raise too_large(int(length), most)
    found = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                event = await receive()
                if event["type"] == "http.disconnect":
                    raise ClientDisconnected
                hold(len(event.get("body", b"")))
                found += event.get("body", b"")
                if len(found) > most:
                    raise too_large(len(found), most)
                if not event.get("more_body", False):
                    return bytes(found)
    except TimeoutError:
        message = f"the body was not here in {timeout_s:g} s, {len(found)} bytes of it were"
        raise CallError(408, message, code="body_timeout") from None


def too_large(nbytes: int, most: int) -> CallError:
    """A body that is refused."""
    message = f"the body has {nbytes} bytes or more, the bound is {most} (roles.gateway.body_mib)"
    return CallError(413, message, code="body_too_large")


async def drain_body(receive: Receive, most: int = LINGER_BYTES) -> None:
    """Take and forget what still comes, for a while and `most` bytes: a connection that is closed while its caller
    writes is reset, and he would not see the answer."""
    count = 0
    try:
        async with asyncio.timeout(LINGER_S):
            while count < most:
                event = await receive()
                count += len(event.get("body", b""))
                if event["type"] == "http.disconnect" or not event.get("more_body", False):
                    return
    except TimeoutError:
        return


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
    """Count the characters to render for a call; tools have a bound of their own, and images are no text."""
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
