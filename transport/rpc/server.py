"""The server: offers implementations of interfaces, bounds what each peer may have in flight, and closes in order.

Calls beyond a bound are held until a handler ends; a peer that exceeds that too is not read.
"""

from __future__ import annotations

import asyncio
import collections
import contextvars
import dataclasses
import functools
import logging
import math
import traceback
import types
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Protocol, TypeVar, cast

import msgspec

from relax_rt.transport.rpc import unix_channel, wire
from relax_rt.transport.rpc.channel import Channel, parse_address
from relax_rt.transport.rpc.errors import DeadlineExceeded, ProtocolError, Refused, RelaxError, ShuttingDown
from relax_rt.transport.rpc.identity import CurveKeys, Hello
from relax_rt.transport.rpc.interface import Method, check_implementation, is_eager, methods_of, name_hint
from relax_rt.transport.rpc.wire import (
    CancelFrame,
    EndFrame,
    FaultFrame,
    GoAwayFrame,
    GrantFrame,
    HelloFrame,
    ItemFrame,
    OpenStreamFrame,
    ReplyFrame,
    RequestFrame,
    TellFrame,
    fault_of,
)

T = TypeVar("T")
Handler = Callable[..., Awaitable[Any]]

log = logging.getLogger(__name__)
_caller: contextvars.ContextVar[Hello] = contextvars.ContextVar("relax_rpc_caller")

_CANCEL_PATIENCE_S = 1.0
_CLIENT_CLOSE_S = 0.25
"""How long `close` waits for clients to close idle connections; one that is stopped is not waited for."""
ONE_WAY_BYTES = 1024 * 1024
"""Bytes of one-way messages of one connection that are held when there is no room."""


def caller() -> Hello:
    """Inside a handler: who calls.

    Raises:
        Refused: not inside a handler.
    """
    hello = _caller.get(None)
    if hello is None:
        raise Refused("caller()", why="this code was not called by a remote peer")
    return hello


class ServerStatistics(msgspec.Struct):
    """Numbers of a server since it was made; `connections` and `inflight` are of this moment."""

    connections: int = 0
    connections_total: int = 0
    connections_refused: int = 0
    inflight: int = 0
    peak_inflight: int = 0
    requests: int = 0
    tells: int = 0
    streams: int = 0
    items: int = 0
    replies: int = 0
    faults: int = 0
    cancelled: int = 0
    expired: int = 0
    protocol_errors: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    by_method: dict[str, int] = {}


class _Listener(Protocol):
    address: str

    def stop(self) -> None: ...

    async def close(self) -> None: ...


class RpcServer:
    """Offers implementations of interfaces to peers of the same run.

    Args:
        hello: who this process is; peers of another run or protocol are rejected.
        max_message_bytes: bound of one message, in both directions.
        max_inflight: handlers at work for one connection; as many requests may wait for room, who sends more is
            not read.
        max_connections: further ones are closed at once.
        curve: keys for tcp addresses; without them only loopback is listened on.
        hello_timeout_s: a connection that has not greeted by then is closed.
        write_timeout_s: a peer that does not read its answers for that long is disconnected.
        stream_idle_s: a stream whose consumer takes nothing for that long is ended.
        max_calls: handlers at work for all connections together; beyond it requests wait in the same way.
    """

    def __init__(
        self,
        hello: Hello,
        *,
        max_message_bytes: int = wire.DEFAULT_MAX_MESSAGE_BYTES,
        max_inflight: int = 1024,
        max_connections: int = 1024,
        curve: CurveKeys | None = None,
        hello_timeout_s: float = 5.0,
        write_timeout_s: float = 30.0,
        stream_idle_s: float = 600.0,
        max_calls: int = 65_536,
    ) -> None:
        self.hello = hello
        self.max_message_bytes = max_message_bytes
        self.max_inflight = max_inflight
        self.max_connections = max_connections
        self.hello_timeout_s = hello_timeout_s
        self.write_timeout_s = write_timeout_s
        self.stream_idle_s = stream_idle_s
        self.max_calls = max_calls
        self.greeting = wire.encode_message(
            HelloFrame(
                protocol=hello.protocol,
                run_id=hello.run_id,
                who=hello.who,
                pid=hello.pid,
                max_message_bytes=max_message_bytes,
                max_inflight=max_inflight,
            )
        )
        self.counters = ServerStatistics()
        self.by_method: Counter[str] = Counter()
        self.connections: set[ServerConnection] = set()
        self.calls: set[CallTask] = set()
        self.held: dict[ServerConnection, None] = {}
        """Connections with held requests; the first one is next."""
        self.closing = False
        self._curve = curve
        self._offers: dict[str, dict[str, tuple[Method, Handler]]] = {}
        self.eager: dict[tuple[str, str], tuple[Method, Handler]] = {}
        """Methods whose implementations are marked as eager, by interface and name."""
        self._listeners: list[_Listener] = []

    def offer(self, api: type[T], implementation: T) -> None:
        """Serve an interface, named by its class name.

        Raises:
            Refused: the interface cannot cross the wire, the implementation lacks a method, or the name is taken.
        """
        if api.__name__ in self._offers:
            raise Refused(f"offering {api.__name__}", why=f"{self.hello.who} offers an interface of this name already")
        check_implementation(api, implementation)
        methods = methods_of(api)
        offer = {name: (method, getattr(implementation, name)) for name, method in methods.items()}
        self._offers[api.__name__] = offer
        for name, (method, handler) in offer.items():
            if is_eager(handler) and not method.stream and not method.one_way:
                self.eager[api.__name__, name] = (method, handler)

    async def listen(self, address: str) -> str:
        """Accept connections at an address, besides those listened on before; returns it with the real port.

        Raises:
            AddressError: malformed, in use, no permission, or a directory that does not exist.
            Refused: the server is closed.
        """
        if self.closing:
            raise Refused(f"listening on {address}", why="the server is closed")
        parsed = parse_address(address)
        listener: _Listener
        if parsed.scheme == "unix":
            listener = await unix_channel.listen(parsed, self._attach)
        else:
            # Loaded on demand: roles that stay on their node never need ZeroMQ.
            from relax_rt.transport.rpc import zmq_channel

            listener = await zmq_channel.listen(parsed, self._attach, self.max_message_bytes, self._curve)
        self._listeners.append(listener)
        return listener.address

    async def close(self, grace_s: float = 1.0) -> None:
        """Stop listening, let handlers at work finish for grace_s, cancel the rest, end all connections.

        Clients get GoAway: nothing more is started, so that they send new calls elsewhere and none is in doubt. Callers
        of cancelled handlers see the connection end: idempotent calls go to this server's successor.
        """
        self.closing = True
        for listener in self._listeners:
            listener.stop()
        for connection in list(self.connections):
            connection.go_away()
        current = asyncio.current_task()
        calls = {call.task: call for call in self.calls if call.task is not current}
        if calls:
            _, late = await asyncio.wait(calls, timeout=grace_s)
            for task in late:
                calls[task].cancel()
            if late:
                _, stuck = await asyncio.wait(late, timeout=_CANCEL_PATIENCE_S)
                for task in stuck:
                    log.warning("%s: a handler ignores its cancellation: %s", self.hello.who, task)
        if closing_clients := [connection.ended for connection in self.connections if connection.peer is not None]:
            await asyncio.wait(closing_clients, timeout=_CLIENT_CLOSE_S)
        for connection in list(self.connections):
            connection.channel.close()
        await self._connections_ended()
        for listener in self._listeners:
            await listener.close()
        self._listeners.clear()

    async def _connections_ended(self) -> None:
        ended = [connection.ended for connection in self.connections]
        if ended:
            await asyncio.wait(ended, timeout=_CANCEL_PATIENCE_S)
        ended = []
        for connection in list(self.connections):
            connection.channel.abort()
            ended.append(connection.ended)
        if ended:
            await asyncio.wait(ended, timeout=_CANCEL_PATIENCE_S)

    def statistics(self) -> ServerStatistics:
        """Current statistics."""
        known = msgspec.structs.replace(self.counters, by_method=dict(self.by_method))
        known.connections, known.inflight = len(self.connections), len(self.calls)
        for connection in self.connections:
            known.bytes_in += connection.channel.bytes_in
            known.bytes_out += connection.channel.bytes_out
        return known

    def find(self, api: str, name: str) -> tuple[Method, Handler]:
        """Raises: Refused, when the interface or the method is not offered."""
        offer = self._offers.get(api)
        if offer is None:
            raise Refused(
                f"call of {api}.{name}",
                why=f"{self.hello.who} offers no interface {api}",
                hint=name_hint(api, self._offers),
            )
        found = offer.get(name)
        if found is None:
            raise Refused(f"call of {api}.{name}", why=f"{api} has no method {name}", hint=name_hint(name, offer))
        return found

    def start_held_calls(self) -> None:
        """A handler has ended: start held requests, connection by connection."""
        while not self.closing and len(self.calls) < self.max_calls:
            connection = next((c for c in self.held if c.inflight < self.max_inflight), None)
            if connection is None:
                return
            # It is appended again if it has more.
            del self.held[connection]
            connection.start_held()

    def _attach(self, channel: Channel) -> ServerConnection:
        self.counters.connections_total += 1
        connection = ServerConnection(self, channel)
        if self.closing or len(self.connections) >= self.max_connections:
            if not self.closing:
                self.counters.connections_refused += 1
                log.warning("%s: no room for %s: %d connections", self.hello.who, channel.peer, self.max_connections)
            channel.close()
        else:
            self.connections.add(connection)
        return connection


class ServerConnection:
    """A peer of the server: first greets, then calls."""

    def __init__(self, server: RpcServer, channel: Channel) -> None:
        loop = asyncio.get_running_loop()
        self.server = server
        self.channel = channel
        self.peer: HelloFrame | None = None
        self.requests: dict[int, CallTask] = {}
        self.inflight = 0
        self._held: collections.OrderedDict[int | str, _HeldRequest] = collections.OrderedDict()
        self._held_bytes = self._one_way_bytes = self._tells = 0
        self._paused = False
        self.ended: asyncio.Future[None] = loop.create_future()
        self._context = contextvars.copy_context()
        self._hello_timer = loop.call_later(server.hello_timeout_s, self._hello_timed_out)

    def received(self, message: bytes) -> None:
        try:
            if self.peer is None:
                self._greet(message)
            else:
                self._dispatch(message)
        except ProtocolError as error:
            self.server.counters.protocol_errors += 1
            log.warning("%s: disconnecting %s: %s", self.server.hello.who, self._name(), error)
            self.channel.close()

    def lost(self, reason: str) -> None:
        self._hello_timer.cancel()
        self.server.connections.discard(self)
        self._drop_held()
        self.server.counters.bytes_in += self.channel.bytes_in
        self.server.counters.bytes_out += self.channel.bytes_out
        # Nobody takes the answers. One-way messages are still carried out.
        for call in list(self.requests.values()):
            call.drop()
        if not self.ended.done():
            self.ended.set_result(None)

    def _name(self) -> str:
        return str(self.peer.who) if self.peer else self.channel.peer

    def _hello_timed_out(self) -> None:
        self.server.counters.protocol_errors += 1
        log.warning("%s: disconnecting %s: it did not greet", self.server.hello.who, self.channel.peer)
        self.channel.close()

    def _greet(self, message: bytes) -> None:
        peer, mine = wire.decode_hello(message), self.server.hello
        # Sent also to a peer that does not match: it compares too, and reports the reason to its user.
        self.channel.send(self.server.greeting)
        protocol = peer if isinstance(peer, int) else peer.protocol
        if isinstance(peer, int) or protocol != mine.protocol:
            raise ProtocolError("its protocol", why=f"it speaks version {protocol}, this end {mine.protocol}")
        if peer.run_id != mine.run_id:
            raise ProtocolError(f"{peer.who}", why=f"it belongs to run {peer.run_id}, this end to {mine.run_id}")
        self._hello_timer.cancel()
        self.peer = peer
        self.channel.who = peer.who.slot
        self._context.run(_caller.set, Hello(peer.protocol, peer.run_id, peer.who, peer.pid))
        self.channel.limit(self.server.max_message_bytes)

    def _dispatch(self, message: bytes) -> None:
        request = wire.decode_from_client(message)
        if isinstance(request, CancelFrame):
            call = self.requests.get(request.id)
            if call is not None:
                self.server.counters.cancelled += 1
                call.drop()
            elif request.id in self._held:
                self.server.counters.cancelled += 1
                self._drop_held_request(request.id)
            return
        if isinstance(request, GrantFrame):
            call = self.requests.get(request.id)
            if isinstance(call, StreamTask):
                call.grant(request.credit)
            return
        server = self.server
        if server.closing:
            self._reject(request)
            return
        if not isinstance(request, TellFrame) and (request.id in self.requests or request.id in self._held):
            raise ProtocolError(f"request {request.id} of {request.api}.{request.method}", why="its id is in use")
        now = asyncio.get_running_loop().time()
        if self._held or self.inflight >= server.max_inflight or len(server.calls) >= server.max_calls:
            self._hold(request, len(message), now)
        else:
            self._start(request, now)

    def _hold(self, request: RequestFrame | TellFrame | OpenStreamFrame, size: int, now: float) -> None:
        """Keep a request until there is room. Reading goes on, as cancellations and credit come behind it."""
        key: int | str
        if isinstance(request, TellFrame):
            self._tells += 1
            key = f"tell {self._tells}"
            self._one_way_bytes += size
        else:
            key = request.id
        self._held_bytes += size
        timer = asyncio.get_running_loop().call_at(now + bounded_s(request.timeout_s), self._expire_held, key)
        self._held[key] = _HeldRequest(request, size, now, timer)
        self.server.held.setdefault(self, None)
        if self._full():
            self._paused = True
            self.channel.pause()

    def _full(self) -> bool:
        # A client bounds its requests by the limit in the greeting; one-way messages are bounded only here.
        server = self.server
        many = len(self._held) >= server.max_inflight
        return many or self._one_way_bytes >= ONE_WAY_BYTES or self._held_bytes >= server.max_message_bytes

    def _release(self, key: int | str) -> _HeldRequest:
        held = self._held.pop(key)
        held.timer.cancel()
        self._held_bytes -= held.size
        if isinstance(held.request, TellFrame):
            self._one_way_bytes -= held.size
        return held

    def go_away(self) -> None:
        """The server closes: reject held requests, and send GoAway."""
        for key in list(self._held):
            self._reject(self._drop_held_request(key).request)
        if self.peer is not None:
            self.channel.send(wire.encode_message(GoAwayFrame()))

    def _reject(self, request: RequestFrame | TellFrame | OpenStreamFrame) -> None:
        if not isinstance(request, TellFrame):
            where = f"{self.server.hello.who} {request.api}.{request.method}"
            error = ShuttingDown(where, why="it is stopping and begins no more calls")
            self.channel.send(wire.encode_message(fault_of(error, request.id, where)))

    def _drop_held(self) -> None:
        """Drop held requests; one-way messages are still carried out."""
        for key in [key for key, held in self._held.items() if not isinstance(held.request, TellFrame)]:
            self._release(key)
        if not self._held:
            self.server.held.pop(self, None)

    def _drop_held_request(self, key: int | str) -> _HeldRequest:
        """Drop one held request."""
        held = self._release(key)
        if not self._held:
            self.server.held.pop(self, None)
        self._resume_reading()
        return held

    def _expire_held(self, key: int | str) -> None:
        request = self._drop_held_request(key).request
        self.server.counters.expired += 1
        if not isinstance(request, TellFrame):
            where = f"{self.server.hello.who} {request.api}.{request.method}"
            why = f"not begun in the {request.timeout_s:.3g} s that its caller gave it: there was no room"
            self.server.counters.faults += 1
            self.channel.send(wire.encode_message(fault_of(DeadlineExceeded(where, why=why), request.id, where)))

    def _resume_reading(self) -> None:
        if self._paused and not self._full() and not self.ended.done():
            self._paused = False
            self.channel.resume()

    def _start(self, request: RequestFrame | TellFrame | OpenStreamFrame, arrived: float) -> None:
        server = self.server
        server.by_method[f"{request.api}.{request.method}"] += 1
        if type(request) is RequestFrame and not self.channel.congested:
            eager = server.eager.get((request.api, request.method))
            if eager is not None:
                self._run_eagerly(request, *eager, arrived)
                return
        kind = StreamTask if isinstance(request, OpenStreamFrame) else CallTask
        self._add(kind(self, request, self._context.copy(), arrived + bounded_s(request.timeout_s)))  # type: ignore[arg-type]

    def _run_eagerly(self, request: RequestFrame, method: Method, handler: Handler, arrived: float) -> None:
        """Run a handler up to its first wait. A task is made only for one that waits.

        A task costs two turns of the event loop, a timer and a copy of the context, which together is more than most
        calls of a broker take.
        """
        counters = self.server.counters
        try:
            args, kwargs = method.decode_arguments(request.args)
            work = cast(Coroutine[Any, Any, Any], handler(*args, **kwargs))
            waits_for = self._context.run(work.send, None)
        except StopIteration as end:
            message, faulty = self.encode_reply(request, method, end.value)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - whatever user code raises goes to the caller
            message, faulty = self.encode_fault(request, error), True
        else:
            deadline = arrived + bounded_s(request.timeout_s)
            self._add(CallTask(self, request, self._context.copy(), deadline, (method, resume(work, waits_for))))
            return
        counters.requests += 1
        counters.replies += not faulty
        counters.faults += faulty
        self.channel.send(message)

    def _add(self, call: CallTask) -> None:
        """Register a call that has a task."""
        server, request = self.server, call.request
        server.calls.add(call)
        server.counters.peak_inflight = max(server.counters.peak_inflight, len(server.calls))
        if isinstance(request, TellFrame):
            server.counters.tells += 1
        else:
            if isinstance(request, OpenStreamFrame):
                server.counters.streams += 1
            else:
                server.counters.requests += 1
            self.requests[request.id] = call
        self.inflight += 1

    def encode_reply(self, request: RequestFrame, method: Method, result: Any) -> tuple[bytes, bool]:
        """The encoded answer, and whether it is a fault because the result cannot be sent."""
        try:
            message = wire.encode_message(
                ReplyFrame(request.id, msgspec.Raw(wire.encode(result, f"result of {method}")))
            )
            self.check_size(len(message), method)
        except RelaxError as error:
            return self.encode_fault(request, error), True
        return message, False

    def encode_fault(self, request: RequestFrame | OpenStreamFrame, error: BaseException) -> bytes:
        where = f"{self.server.hello.who} {request.api}.{request.method}"
        return wire.encode_message(fault_of(error, request.id, where))

    def check_size(self, size: int, method: Method) -> None:
        """Raises: ProtocolError, when a result of this size is over the limit of either end."""
        server, peer = self.server, self.peer
        limit = min(server.max_message_bytes, (peer and peer.max_message_bytes) or server.max_message_bytes)
        if size > limit:
            raise ProtocolError(
                f"result of {method}", why=f"it has {size} bytes; the limit is {limit}", hint="answer in parts"
            )

    def finished(self, call: CallTask) -> None:
        self.server.calls.discard(call)
        if not isinstance(call.request, TellFrame):
            del self.requests[call.request.id]
        self.inflight -= 1
        if self.server.held:
            self.server.start_held_calls()

    def start_held(self) -> None:
        """Start the first held request, and read on if that made room."""
        held = self._release(next(iter(self._held)))
        self._start(held.request, held.arrived)
        if self._held:
            self.server.held[self] = None
        self._resume_reading()


@dataclasses.dataclass
class _HeldRequest:
    """A request that waits for room."""

    request: RequestFrame | TellFrame | OpenStreamFrame
    size: int
    arrived: float
    timer: asyncio.TimerHandle


@types.coroutine
def resume(work: Coroutine[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    """Continue a coroutine whose first step was run and that waits for this future."""
    while True:
        try:
            value = yield waits_for
        except BaseException as error:  # noqa: BLE001 - it goes to the coroutine that waits
            step = functools.partial(work.throw, error)
        else:
            step = functools.partial(work.send, value)
        try:
            waits_for = step()
        except StopIteration as end:
            return cast(T, end.value)


class CallTask:
    """A running handler, cancelled at a deadline of the loop's clock.

    Args:
        rest: what is left of an eager handler, with its method.
    """

    def __init__(
        self,
        connection: ServerConnection,
        request: RequestFrame | TellFrame | OpenStreamFrame,
        context: contextvars.Context,
        deadline: float,
        rest: tuple[Method, Awaitable[Any]] | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.connection = connection
        self.request = request
        self._rest = rest
        self.task = loop.create_task(self._serve(), context=context)
        self._expired = False
        self._dropped = False
        self._timer = loop.call_at(deadline, self._expire)
        self.task.add_done_callback(self._done)

    def drop(self) -> None:
        """The caller cancelled, or is gone: cancel the handler, send nothing."""
        self._dropped = True
        self.cancel()

    def cancel(self) -> None:
        """Cancel the handler."""
        if self._rest is None:
            self.task.cancel()
        else:
            # The handler ran eagerly up to its first wait. A task that is cancelled before its first step would never
            # resume it, so that it would not see its cancellation. The loop takes that step before this call.
            asyncio.get_running_loop().call_soon(self.task.cancel)

    def _expire(self) -> None:
        self._expired = True
        self.cancel()

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
            if self._rest is not None:
                (method, rest), self._rest = self._rest, None
                result = await rest
            else:
                method, handler = server.find(request.api, request.method)
                if method.stream:
                    raise Refused(f"call of {method}", why="it gives a stream", hint="read it with `async for`")
                args, kwargs = method.decode_arguments(request.args)
                result = await handler(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever user code raises goes to the caller
            return self._fault(error), True
        if isinstance(request, TellFrame):
            return None, False
        assert isinstance(request, RequestFrame)
        return self.connection.encode_reply(request, method, result)

    def _fault(self, error: BaseException) -> bytes | None:
        request, who = self.request, self.connection.server.hello.who
        if isinstance(request, TellFrame):
            self.connection.server.counters.faults += 1
            trace = "".join(traceback.format_exception(error))
            log.warning("%s: %s.%s, sent by %s, failed:\n%s", who, request.api, request.method, self._peer(), trace)
            return None
        # A handler may turn its cancellation into an error of its own; the deadline is the cause.
        if self._expired:
            return wire.encode_message(self._expired_fault())
        return self.connection.encode_fault(request, error)

    def _expired_fault(self) -> FaultFrame:
        request = self.request
        assert not isinstance(request, TellFrame)
        self.connection.server.counters.expired += 1
        where = f"{self.connection.server.hello.who} {request.api}.{request.method}"
        return fault_of(DeadlineExceeded(where, why=self._expiry_reason()), request.id, where)

    def _expiry_reason(self) -> str:
        return f"not finished in the {self.request.timeout_s:.3g} s that its caller gave it"

    def _peer(self) -> str:
        return str(self.connection.peer.who) if self.connection.peer else self.connection.channel.peer

    def _done(self, task: asyncio.Task[None]) -> None:
        self._timer.cancel()
        connection, request = self.connection, self.request
        if (
            task.cancelled()
            and not self._dropped
            and not connection.server.closing
            and not isinstance(request, TellFrame)
        ):
            where = f"{connection.server.hello.who} {request.api}.{request.method}"
            cause = asyncio.CancelledError("the handler was cancelled by its own process")
            fault = self._expired_fault() if self._expired else fault_of(cause, request.id, where)
            connection.channel.send(wire.encode_message(fault))
            connection.server.counters.faults += 1
        elif not task.cancelled() and task.exception() is not None:
            log.error("%s: answering %s failed", connection.server.hello.who, self._peer(), exc_info=task.exception())
        connection.finished(self)


class StreamTask(CallTask):
    """A running handler that yields; its next item is requested only when the consumer has granted credit."""

    request: OpenStreamFrame

    def __init__(
        self, connection: ServerConnection, request: OpenStreamFrame, context: contextvars.Context, deadline: float
    ) -> None:
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
        return (wire.encode_message(EndFrame(request.id)) if whole else None), False

    async def _produce(self, method: Method, items: Any) -> bool:
        """Send items as credit allows; False when the consumer does not read."""
        server, what = self.connection.server, f"item of {method}"
        try:
            while True:
                if not self._credit:
                    await self._wait_for_credit()
                    self._due = self._clock() + self._between_s
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return True
                self._due = math.inf
                value = msgspec.Raw(wire.encode(item, what))
                message = wire.encode_message(ItemFrame(self.request.id, value))
                self.connection.check_size(len(message), method)
                if not await self._send(message):
                    return False
                self._credit -= 1
                server.counters.items += 1
                self._due = self._clock() + self._between_s
        finally:
            if (aclose := getattr(items, "aclose", None)) is not None:
                await aclose()

    async def _wait_for_credit(self) -> None:
        self._granted = asyncio.get_running_loop().create_future()
        self._due, self._idle = self._clock() + self.connection.server.stream_idle_s, True
        try:
            await self._granted
        finally:
            self._granted, self._idle = None, False

    def _expire(self) -> None:
        # One timer for all items: it fires now and then, and checks whether the deadline has moved.
        left_s = self._due - self._clock()
        if left_s > 0:
            pause_s = min(left_s, max(self._between_s, 0.001))
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._expire)
        else:
            self._expired_why = self._stream_expiry_reason()
            super()._expire()

    def _stream_expiry_reason(self) -> str:
        if self._idle:
            return f"its consumer took nothing for {self.connection.server.stream_idle_s:.3g} s"
        return f"no item in the {self.request.timeout_s:.3g} s that its caller gave it"

    def _expiry_reason(self) -> str:
        return self._expired_why


def bounded_s(timeout_s: float) -> float:
    """A duration that overflows no clock, hostile or infinite as it may be; in this order, NaN counts as 0."""
    return min(max(0.0, timeout_s), 1e7)
