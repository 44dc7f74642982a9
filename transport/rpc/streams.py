"""Streams of items at the consumer's end. Credit is granted as items are taken, so that at most a window is in flight.

A stream that its consumer drops is cancelled at its producer. DeathLimit bounds how often a request is repeated.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec

from relax_rt.transport.rpc.channel import ConnectionLost, NoReply
from relax_rt.transport.rpc.errors import ActorDied, ProtocolError, ShuttingDown, Unreachable
from relax_rt.transport.rpc.interface import Method

T = TypeVar("T")

DEFAULT_WINDOW = 64
SHUTDOWN_PAUSE_S = 0.05
"""Pause between attempts at a server that is shutting down, until its successor listens."""


class StreamOwner(Protocol):
    """What a StreamBuffer needs of its connection."""

    def grant(self, number: int, credit: int) -> None: ...

    def leave(self, number: int, *, cancel: bool) -> None: ...

    def name(self) -> str: ...


class ItemBuffer:
    """One stream on one connection: items received and not yet taken."""

    def __init__(self, link: StreamOwner, number: int, window: int) -> None:
        self.link = link
        self.on_end: Callable[[BaseException], None] | None = None
        self._number = number
        self._window = window
        self._batch = max(1, window // 2)
        self._items: collections.deque[msgspec.Raw] = collections.deque()
        self._taken = 0
        self._end: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()

    def put(self, item: msgspec.Raw) -> None:
        """Add an item that was received.

        Raises:
            ProtocolError: the producer has no credit for it.
        """
        if len(self._items) + self._taken >= self._window:
            raise ProtocolError(f"an item of stream {self._number}", why=f"beyond the {self._window} granted")
        self._items.append(item)
        self._wake()

    def finish(self, end: BaseException) -> None:
        """End the stream: with StopAsyncIteration, or the error."""
        if self._end is None:
            self._end = end
            self._wake()
            if self.on_end is not None:
                self.on_end(end)

    def cancel(self) -> None:
        """The consumer stops: end the stream, also at its producer."""
        if self._end is None:
            self.link.leave(self._number, cancel=True)
            self.finish(StopAsyncIteration())

    async def take(self, patience_s: float) -> msgspec.Raw:
        """The next item.

        Raises:
            NoReply: none came in patience_s.
            ConnectionLost: the connection ended.
            StopAsyncIteration: there are no more. RelaxError: the producer failed.
        """
        if not self._items:
            await self._filled(patience_s)
        item = self._items.popleft()
        self._taken += 1
        if self._taken >= self._batch and self._end is None:
            self.link.grant(self._number, self._taken)
            self._taken = 0
        return item

    async def _filled(self, patience_s: float) -> None:
        timer: asyncio.TimerHandle | None = None
        try:
            while not self._items:
                if self._end is not None:
                    raise self._end
                self._waiter = self._loop.create_future()
                timer = timer or self._loop.call_later(patience_s, self._timed_out)
                await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _timed_out(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(NoReply())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


Opener = Callable[[float], Awaitable[ItemBuffer]]
"""Opens the stream at the far end before a deadline of the loop's clock."""
Explain = Callable[[ActorDied, float], Awaitable[ActorDied]]


class RemoteStream(Generic[T]):
    """The result of calling a stream method: an asynchronous iterator, opened when the first item is requested.

    It ends at its producer as soon as it is closed, cancelled, or dropped by leaving the loop.

    Args:
        method: what is called.
        opener: opens it.
        timeout_s: longest wait for one item.
        explain: adds how the producer ended to an ActorDied.
        deaths: bounds how often it is opened again; None: only the deadline does.
    """

    def __init__(
        self,
        method: Method,
        opener: Opener,
        timeout_s: float,
        explain: Explain | None = None,
        deaths: DeathLimit | None = None,
    ) -> None:
        self._method = method
        self._opener = opener
        self._timeout_s = timeout_s
        self._explain = explain
        self._deaths = deaths
        self._inlet: ItemBuffer | None = None
        self._count = 0
        self._busy = False
        self._closed = False

    def __aiter__(self) -> RemoteStream[T]:
        return self

    async def __anext__(self) -> T:
        if self._closed:
            raise StopAsyncIteration
        if self._busy:
            raise RuntimeError(f"the next item of {self._method} is waited for already")
        self._busy = True
        try:
            return cast(T, await self._next())
        except BaseException:
            self._close()
            raise
        finally:
            self._busy = False

    async def aclose(self) -> None:
        """End the stream; its producer is cancelled."""
        self._close()

    def __del__(self) -> None:
        if self._inlet is not None and not self._closed:
            # The collector may run in any thread, and after the loop.
            with contextlib.suppress(RuntimeError):
                self._inlet._loop.call_soon_threadsafe(self._inlet.cancel)

    def __repr__(self) -> str:
        return f"<stream of {self._method}, {self._count} items taken>"

    def _close(self) -> None:
        self._closed = True
        if self._inlet is not None:
            self._inlet.cancel()

    async def _next(self) -> Any:
        loop = asyncio.get_running_loop()
        start = loop.time()
        deadline = start + self._timeout_s
        while True:
            try:
                incoming = self._inlet
                if incoming is None:
                    incoming = self._inlet = await self._opener(deadline)
                left_s = deadline - loop.time()
                item = await incoming.take(max(0.0, left_s) + min(1.0, self._timeout_s / 2))
            except ConnectionLost as lost:
                self._inlet = None
                await self._after(lost, deadline - loop.time())
            except ShuttingDown:
                self._inlet = None
                if self._count or loop.time() + SHUTDOWN_PAUSE_S >= deadline:
                    raise
                await asyncio.sleep(SHUTDOWN_PAUSE_S)
            except NoReply:
                raise Unreachable(
                    f"stream of {self._method} at {incoming.link.name() if incoming else 'its producer'}",
                    why=f"no item in {self._timeout_s:.3g} s, though the connection stands",
                    hint="the process may hang or be stopped: look at its log",
                ) from None
            else:
                self._count += 1
                return self._method.decode_result(item)

    async def _after(self, lost: ConnectionLost, left_s: float) -> None:
        """Return if the stream may be opened again (no item was taken yet), else raise."""
        what = f"stream of {self._method}"
        at = f"{what} at {lost.where}"
        try:
            if lost.sent and (self._count or not self._method.idempotent):
                raise died(at, f"{lost}, after {self._count} items", "a stream is not taken up again", lost)
            if self._deaths is not None:
                await self._deaths.count(what, lost, left_s)
        except ActorDied as end:
            raise (await self._explain(end, left_s) if self._explain else end) from None
        if left_s <= 0:
            raise Unreachable(at, why=f"not opened in {self._timeout_s:.3g} s: {lost}") from None


Alive = Callable[[Collection[str], float], Awaitable[Collection[str]]]
"""Given incarnations and seconds, returns those known to be alive."""


class DeathLimit:
    """Bounds how many incarnations one idempotent request may kill.

    A request that crashes whoever handles it would otherwise be repeated through all incarnations.

    Args:
        most: after this many deaths the request is not sent again.
        alive: clears incarnations of which only the connection was lost; without it each loss counts.
    """

    def __init__(self, most: int, alive: Alive | None = None) -> None:
        self._most = most
        self._alive = alive
        self._lost: dict[str, None] = {}

    async def count(self, what: str, lost: ConnectionLost, left_s: float) -> None:
        """Count a lost connection.

        Raises:
            ActorDied: the limit is reached.
        """
        if not lost.sent:
            return
        self._lost[lost.who] = None
        if len(self._lost) >= self._most and self._alive is not None:
            for who in await self._alive(tuple(self._lost), left_s):
                self._lost.pop(who, None)
        if len(self._lost) >= self._most:
            raise died(
                f"{what} at {lost.where}",
                f"{lost}; {len(self._lost)} incarnations have died with it: {', '.join(self._lost)}",
                "the request itself may be what kills them, so it is not sent again",
                lost,
            )


def died_of(method: Method, lost: ConnectionLost) -> ActorDied:
    """The error for a lost call that must not be repeated."""
    why, hint = f"{lost}; the call may have been carried out", "it is not marked idempotent, so it is not sent again"
    return died(f"call of {method} at {lost.where}", why, hint, lost)


def died(what: str, why: str, hint: str, lost: ConnectionLost) -> ActorDied:
    """The error of a request whose incarnation was lost."""
    error = ActorDied(what, why=why, hint=hint)
    error.who = lost.who
    return error
