"""Handlers at work: one request of a connection, answered once or by a stream."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import traceback
from typing import TYPE_CHECKING, Any

import msgspec

from relax_rt.transport.rpc import codec
from relax_rt.transport.rpc.errors import DeadlineExceeded, ProtocolError, Refused
from relax_rt.transport.rpc.faults import fault_of
from relax_rt.transport.rpc.interface import Method
from relax_rt.transport.rpc.wire import End, Fault, Item, Open, Reply, Request, Tell

if TYPE_CHECKING:
    from relax_rt.transport.rpc.server import Connection

log = logging.getLogger(__name__)


def bounded_s(timeout_s: float) -> float:
    """A duration that overflows no clock, hostile or infinite as it may be; in this order, NaN counts as 0."""
    return min(max(0.0, timeout_s), 1e7)


class Call:
    """A handler at work, until a deadline of the loop's clock."""

    def __init__(
        self, connection: Connection, request: Request | Tell | Open, context: contextvars.Context, deadline: float
    ) -> None:
        loop = asyncio.get_running_loop()
        self.connection = connection
        self.request = request
        self.task = loop.create_task(self._serve(), context=context)
        self._expired = False
        self._dropped = False
        self._timer = loop.call_at(deadline, self._expire)
        self.task.add_done_callback(self._done)

    def drop(self) -> None:
        """The caller wants no answer any more."""
        self._dropped = True
        self.task.cancel()

    def _expire(self) -> None:
        self._expired = True
        self.task.cancel()

    async def _serve(self) -> None:
        message, faulty = await self._outcome()
        self._timer.cancel()
        if message is None or self._dropped:
            return
        if await self._send(message):
            self.connection.server.counters.replies += not faulty
            self.connection.server.counters.faults += faulty

    async def _send(self, message: bytes) -> bool:
        """Write a message once there is room; False when the peer does not read and was disconnected for it."""
        channel, server = self.connection.channel, self.connection.server
        if channel.congested:
            try:
                async with asyncio.timeout(server.write_timeout_s):
                    while channel.congested:
                        await channel.drain()
            except TimeoutError:
                log.warning("%s: disconnecting %s: it does not read", server.hello.who, channel.peer)
                channel.abort()
                return False
        channel.send(message)
        return True

    async def _outcome(self) -> tuple[bytes | None, bool]:
        """The encoded answer, None when there is none to send, and whether it is a fault."""
        request, server = self.request, self.connection.server
        try:
            method, handler = server.find(request.api, request.method)
            if method.stream:
                raise Refused(f"call of {method}", why="it gives a stream", hint="read it with `async for`")
            args, kwargs = method.decode_arguments(request.args)
            result = await handler(*args, **kwargs)
            if isinstance(request, Tell):
                return None, False
            assert isinstance(request, Request)
            message = codec.encode_message(Reply(request.id, msgspec.Raw(codec.encode(result, f"result of {method}"))))
            self._check_size(len(message), str(method))
        except Exception as error:  # noqa: BLE001 - whatever user code raises goes to the caller
            return self._fault(error), True
        return message, False

    def _check_size(self, size: int, method: str) -> None:
        server, peer = self.connection.server, self.connection.peer
        limit = min(server.max_message_bytes, (peer and peer.max_message_bytes) or server.max_message_bytes)
        if size > limit:
            raise ProtocolError(
                f"result of {method}", why=f"it has {size} bytes; the limit is {limit}", hint="answer in parts"
            )

    def _fault(self, error: BaseException) -> bytes | None:
        request, who = self.request, self.connection.server.hello.who
        if isinstance(request, Tell):
            self.connection.server.counters.faults += 1
            trace = "".join(traceback.format_exception(error))
            log.warning("%s: %s.%s, told by %s, failed:\n%s", who, request.api, request.method, self._peer(), trace)
            return None
        where = f"{who} {request.api}.{request.method}"
        # A handler may turn its cancellation into an error of its own; the deadline is the cause.
        return codec.encode_message(self._late() if self._expired else fault_of(error, request.id, where))

    def _late(self) -> Fault:
        request = self.request
        assert not isinstance(request, Tell)
        self.connection.server.counters.expired += 1
        where = f"{self.connection.server.hello.who} {request.api}.{request.method}"
        return fault_of(DeadlineExceeded(where, why=self._lateness()), request.id, where)

    def _lateness(self) -> str:
        return f"not finished in the {self.request.timeout_s:.3g} s that its caller gave it"

    def _peer(self) -> str:
        return str(self.connection.peer.who) if self.connection.peer else self.connection.channel.peer

    def _done(self, task: asyncio.Task[None]) -> None:
        self._timer.cancel()
        connection, request = self.connection, self.request
        if task.cancelled() and not self._dropped and not connection.server.closing and not isinstance(request, Tell):
            where = f"{connection.server.hello.who} {request.api}.{request.method}"
            cause = asyncio.CancelledError("the handler was cancelled by its own process")
            fault = self._late() if self._expired else fault_of(cause, request.id, where)
            connection.channel.send(codec.encode_message(fault))
            connection.server.counters.faults += 1
        elif not task.cancelled() and task.exception() is not None:
            log.error("%s: answering %s failed", connection.server.hello.who, self._peer(), exc_info=task.exception())
        connection.finished(self)


class StreamCall(Call):
    """A handler that yields. It is asked for an item only when the consumer has granted credit for it."""

    request: Open

    def __init__(self, connection: Connection, request: Open, context: contextvars.Context, deadline: float) -> None:
        self._clock = asyncio.get_running_loop().time
        self._between_s = bounded_s(request.timeout_s)
        self._due = deadline
        self._credit = request.credit
        self._granted: asyncio.Future[None] | None = None
        self._idle = False
        super().__init__(connection, request, context, deadline)

    def grant(self, credit: int) -> None:
        self._credit += credit
        if self._granted is not None and not self._granted.done():
            self._granted.set_result(None)

    async def _outcome(self) -> tuple[bytes | None, bool]:
        request = self.request
        try:
            method, handler = self.connection.server.find(request.api, request.method)
            if not method.stream:
                raise Refused(f"stream of {method}", why="it gives one result", hint="await it")
            args, kwargs = method.decode_arguments(request.args)
            whole = await self._produce(method, handler(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - whatever user code raises goes to the caller
            return self._fault(error), True
        return (codec.encode_message(End(request.id)) if whole else None), False

    async def _produce(self, method: Method, items: Any) -> bool:
        """Send items as credit allows; False when the consumer does not read."""
        server, what, name = self.connection.server, f"item of {method}", str(method)
        try:
            while True:
                if not self._credit:
                    await self._credited()
                    self._due = self._clock() + self._between_s
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return True
                self._due = math.inf
                value = msgspec.Raw(codec.encode(item, what))
                message = codec.encode_message(Item(self.request.id, value))
                self._check_size(len(message), name)
                if not await self._send(message):
                    return False
                self._credit -= 1
                server.counters.items += 1
                self._due = self._clock() + self._between_s
        finally:
            if (aclose := getattr(items, "aclose", None)) is not None:
                await aclose()

    async def _credited(self) -> None:
        self._granted = asyncio.get_running_loop().create_future()
        self._due, self._idle = self._clock() + self.connection.server.stream_idle_s, True
        try:
            await self._granted
        finally:
            self._granted, self._idle = None, False

    def _expire(self) -> None:
        # One timer for all items: it goes off now and then, and looks whether the deadline has moved.
        left_s = self._due - self._clock()
        if left_s > 0:
            pause_s = min(left_s, max(self._between_s, 0.001))
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._expire)
        else:
            self._late_why = self._why_late()
            super()._expire()

    def _why_late(self) -> str:
        if self._idle:
            return f"its consumer took nothing for {self.connection.server.stream_idle_s:.3g} s"
        return f"no item in the {self.request.timeout_s:.3g} s that its caller gave it"

    def _lateness(self) -> str:
        return self._late_why
