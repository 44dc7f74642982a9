"""Reads a request's body, bounded in bytes and time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

from relax_rt.roles.gateway.errors import CallError

Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Scope = MutableMapping[str, Any]

LINGER_S = 2.0
LINGER_BYTES = 256 << 20
"""Of somebody with a key; they are not kept."""


class Gone(Exception):
    """The caller is gone."""


def header(scope: Scope, name: bytes) -> str:
    """A header's first value; empty: there is none."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


class Memory:
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
        Gone: the caller is gone.
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
                    raise Gone
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


async def linger(receive: Receive, most: int = LINGER_BYTES) -> None:
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
