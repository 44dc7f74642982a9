"""Calls that wait at a broker: who, for which topic, since when; woken when the topic is touched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import msgspec

MAX_WAITERS = 65_536
POLL_S = 0.25


class WaitingCall(msgspec.Struct):
    """One call that waits."""

    who: str
    topic: str
    reason: str
    since: float


class WaitCount(msgspec.Struct):
    """Waits on a topic that are over, and the seconds they took together."""

    n: int = 0
    total_s: float = 0.0


class WaitingCalls:
    """The waiting calls of a broker.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiters: dict[str, dict[int, asyncio.Future[None]]] = {}
        self._waiting: dict[int, WaitingCall] = {}
        self._over: dict[str, WaitCount] = {}
        self._token = 0

    def enter(self, who: str, topic: str) -> int:
        """Register a call that may wait on a topic; returns its token, or 0 when there are MAX_WAITERS already."""
        if len(self._waiting) >= MAX_WAITERS:
            return 0
        self._token += 1
        self._waiting[self._token] = WaitingCall(who, topic, "", self._clock())
        return self._token

    async def wait(self, token: int, reason: str, limit_s: float) -> None:
        """Wait until the topic is touched, or for limit_s. A call without a token polls."""
        if not token:
            await asyncio.sleep(min(limit_s, POLL_S))
            return
        one = self._waiting[token]
        one.reason = reason
        # No asyncio.timeout: brokers come here without a task of their own (see rpc.interface.eager).
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        waiters = self._waiters.setdefault(one.topic, {})
        waiters[token] = waiter
        timer = loop.call_later(limit_s, _wake, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            waiters.pop(token, None)

    def leave(self, token: int) -> None:
        """The call was answered or cancelled."""
        one = self._waiting.pop(token, None)
        if one is not None and one.reason:
            count = self._over.setdefault(one.topic, WaitCount())
            count.n += 1
            count.total_s += self._clock() - one.since

    def touch(self, topics: Iterable[str]) -> None:
        """Wake the calls that wait on these topics."""
        for topic in topics:
            for waiter in self._waiters.pop(topic, {}).values():
                _wake(waiter)

    def touch_all(self) -> None:
        """Wake all calls."""
        self.touch(list(self._waiters))

    def __len__(self) -> int:
        return sum(bool(one.reason) for one in self._waiting.values())

    def reasons(self) -> dict[str, str]:
        """What each caller waits for now."""
        return {one.who: one.reason for one in self._waiting.values() if one.reason}

    def now(self) -> list[dict[str, str | float]]:
        """The calls that wait now, with topic, reason and seconds."""
        at = self._clock()
        return [
            {"who": one.who, "topic": one.topic, "reason": one.reason, "for_s": at - one.since}
            for one in self._waiting.values()
            if one.reason
        ]

    def over(self) -> dict[str, dict[str, float]]:
        """By topic: how many waits have ended, and their seconds together."""
        return {topic: {"waits": count.n, "total_s": count.total_s} for topic, count in sorted(self._over.items())}


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
