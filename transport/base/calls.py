"""Numbered calls: a client numbers its changing calls and repeats each until it is answered.

The brokers of the queue and of the store keep the newest answers of each caller, and answer a repetition alike.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import msgspec

from relax_rt.transport.rpc.backoff import Backoff, BackoffPolicy
from relax_rt.transport.rpc.errors import DeadlineExceeded, Unreachable

WINDOW = 64
"""No call is sent whose number is this much higher than one without an answer: the broker keeps the answers of twice
as many (state.REPLIES_KEPT), so that a call sent again is always recognised."""
_BACKOFF = BackoffPolicy(base_s=0.05, cap_s=1.0)

SILENT_S = 2.5
"""Waits are slices of a second; a reply that takes longer than this is reported as a wait."""

T = TypeVar("T")


class CallStatistics(msgspec.Struct, frozen=True):
    """Changing calls since the client was made: made, repeated, and those that wait for an answer now."""

    calls: int
    resent: int
    unanswered: int


class NumberedCalls:
    """Numbers changing calls, and repeats each under its number until it is answered.

    Args:
        who: seeds the delays.
        patience_s: how long a broker that cannot be reached is asked again.
        on_wait: gets the reason of a wait, and an empty string when it ends.
    """

    def __init__(self, who: str, patience_s: float, on_wait: Callable[[str], None]) -> None:
        self._rng = random.Random(who)
        self._patience_s, self._on_wait = patience_s, on_wait
        self._seq = 0
        self._resent = 0
        self._unanswered: dict[int, float] = {}
        """When each call without an answer began, by number, which is also their order."""
        self._answered = asyncio.Event()
        self._resending = 0
        self._waiting: dict[int, asyncio.Task[Any] | None] = {}
        self._silence: asyncio.TimerHandle | None = None
        self._silence_reported = False

    def next_number(self) -> int:
        """The number of a call that is sent once, after all others."""
        self._seq += 1
        return self._seq

    async def call(self, send: Callable[[int], Awaitable[T]]) -> T:
        """Send a changing call, again and again with the same number until it is answered or patience ends.

        Raises:
            Unreachable, DeadlineExceeded: no answer within patience_s.
        """
        while self._unanswered and self._seq + 1 - (oldest := next(iter(self._unanswered))) >= WINDOW:
            if (waiting := self._waiting.pop(oldest, None)) is not None:
                waiting.cancel()
            self._answered.clear()
            await self._answered.wait()
        self._seq += 1
        seq = self._seq
        loop = asyncio.get_running_loop()
        began = self._unanswered[seq] = loop.time()
        if self._silence is None:
            # One timer for all calls, which mostly finds nothing: a call is answered long before.
            self._silence = loop.call_later(SILENT_S, self._check_silence)
        try:
            return await send(seq)
        except (Unreachable, DeadlineExceeded) as error:
            self._resending += 1
            try:
                return await self._again(seq, send, error, began + self._patience_s)
            finally:
                self._resending -= 1
                if not self._resending:
                    self._on_wait("")
        finally:
            del self._unanswered[seq]
            self._answered.set()
            if self._silence_reported and loop.time() < self._silent_at():
                self._silence_reported = False
                self._on_wait("")

    async def wait(self, send: Callable[[int, float], Awaitable[T]], wait_s: float) -> T:
        """A changing call that may wait at the broker; it ends early when newer calls cannot be sent because of it.

        Raises: see `call`.
        """

        async def once(seq: int) -> T:
            task = self._waiting[seq] = asyncio.current_task()
            try:
                return await send(seq, wait_s)
            except asyncio.CancelledError:
                # `call` takes the entry away when it ends this wait. Whoever else cancels leaves it there.
                if seq in self._waiting or task is None or task.uncancel():
                    raise
            finally:
                self._waiting.pop(seq, None)
            # Its answer may be on the way; under the same number the broker gives the same one.
            return await send(seq, 0.0)

        return await self.call(once)

    def _silent_at(self) -> float:
        """When the oldest call without an answer has waited too long for it."""
        return next(iter(self._unanswered.values()), math.inf) + SILENT_S

    def _check_silence(self) -> None:
        """Report a wait: a broker that lives answers sooner, if only with the reason of a wait."""
        self._silence = None
        if not self._unanswered:
            return
        loop = asyncio.get_running_loop()
        due = self._silent_at()
        if due <= loop.time():
            self._silence_reported = True
            self._on_wait(f"the broker has not answered for {SILENT_S:g} s")
            due = loop.time() + SILENT_S
        self._silence = loop.call_at(due, self._check_silence)

    async def _again(self, seq: int, send: Callable[[int], Awaitable[T]], error: Exception, deadline: float) -> T:
        loop = asyncio.get_running_loop()
        backoff = Backoff(_BACKOFF, self._rng)
        while loop.time() < deadline:
            self._on_wait(f"the broker cannot be reached: {error}")
            await asyncio.sleep(backoff.next_delay_s() or 0.0)
            self._resent += 1
            try:
                return await send(seq)
            except (Unreachable, DeadlineExceeded) as another:
                error = another
        raise error

    def statistics(self) -> CallStatistics:
        return CallStatistics(self._seq, self._resent, len(self._unanswered))


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
        for topic in topics:
            for waiter in self._waiters.pop(topic, {}).values():
                _wake(waiter)

    def touch_all(self) -> None:
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
