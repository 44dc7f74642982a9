"""Numbered calls: a client numbers its changing calls and repeats each until it is answered.

The brokers of the queue and of the store keep the newest answers of each caller, and answer a repetition alike.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
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
            if self._silence_reported and not self._unanswered:
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

    def _check_silence(self) -> None:
        """Report a wait: a broker that lives answers sooner, if only with the reason of a wait."""
        self._silence = None
        if not self._unanswered:
            return
        loop = asyncio.get_running_loop()
        due = next(iter(self._unanswered.values())) + SILENT_S
        if due <= loop.time():
            self._silence_reported = True
            self._on_wait(f"the queue's broker has not answered for {SILENT_S:g} s")
            due = loop.time() + SILENT_S
        self._silence = loop.call_at(due, self._check_silence)

    async def _again(self, seq: int, send: Callable[[int], Awaitable[T]], error: Exception, deadline: float) -> T:
        loop = asyncio.get_running_loop()
        backoff = Backoff(_BACKOFF, self._rng)
        while loop.time() < deadline:
            self._on_wait(f"the queue cannot be reached: {error}")
            await asyncio.sleep(backoff.next_delay_s() or 0.0)
            self._resent += 1
            try:
                return await send(seq)
            except (Unreachable, DeadlineExceeded) as another:
                error = another
        raise error

    def statistics(self) -> CallStatistics:
        """Current statistics."""
        return CallStatistics(self._seq, self._resent, len(self._unanswered))
