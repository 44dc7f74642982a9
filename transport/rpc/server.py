"""The serving end of the RPC layer."""

from __future__ import annotations

import asyncio
import collections
import contextvars
import dataclasses
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec

from relax_rt.transport.rpc import codec, stream
from relax_rt.transport.rpc.address import parse_address
from relax_rt.transport.rpc.calls import Call, StreamCall, bounded_s
from relax_rt.transport.rpc.channel import Channel
from relax_rt.transport.rpc.errors import DeadlineExceeded, ProtocolError, Refused, Retiring
from relax_rt.transport.rpc.faults import fault_of
from relax_rt.transport.rpc.identity import Hello
from relax_rt.transport.rpc.interface import Method, check_implementation, did_you_mean, methods_of
from relax_rt.transport.rpc.wire import Cancel, Grant, HelloFrame, Open, Request, Retire, Tell
from relax_rt.transport.rpc.zmq_keys import CurveKeys

T = TypeVar("T")
Handler = Callable[..., Awaitable[Any]]

log = logging.getLogger(__name__)
_caller: contextvars.ContextVar[Hello] = contextvars.ContextVar("relax_rpc_caller")

_CANCEL_PATIENCE_S = 1.0
_PARTING_S = 0.25
"""For clients to end connections on which nothing is under way; one that is stopped or far behind is not waited for."""
TOLD_BYTES = 1024 * 1024
"""One-way messages of one connection that are read though there is no room for them."""


def caller() -> Hello:
    """Inside a handler: who calls.

    Raises:
        Refused: not inside a handler.
    """
    hello = _caller.get(None)
    if hello is None:
        raise Refused("caller()", why="this code was not called by a remote peer")
    return hello


class ServerStatistics(msgspec.Struct, frozen=True):
    """Numbers of a server since it was made; `connections` and `inflight` are of this moment."""

    connections: int
    connections_total: int
    connections_refused: int
    inflight: int
    peak_inflight: int
    requests: int
    tells: int
    streams: int
    items: int
    replies: int
    faults: int
    cancelled: int
    expired: int
    protocol_errors: int
    bytes_in: int
    bytes_out: int
    by_method: dict[str, int]


@dataclasses.dataclass
class _Counters:
    connections_total: int = 0
    connections_refused: int = 0
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


class _Listener(Protocol):
    address: str

    def stop(self) -> None: ...

    async def close(self) -> None: ...


class Server:
    """Offers implementations of interfaces to peers of the same run.

    Args:
        hello: who this process is; peers of another run or protocol are turned away.
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
        max_message_bytes: int = codec.DEFAULT_MAX_MESSAGE_BYTES,
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
        self.greeting = codec.encode_message(
            HelloFrame(
                protocol=hello.protocol,
                run_id=hello.run_id,
                who=hello.who,
                pid=hello.pid,
                max_message_bytes=max_message_bytes,
                max_inflight=max_inflight,
            )
        )
        self.counters = _Counters()
        self.by_method: Counter[str] = Counter()
        self.connections: set[Connection] = set()
        self.calls: set[Call] = set()
        self.held: dict[Connection, None] = {}
        """Connections that have requests for which there is no room; the first one's turn is next."""
        self.closing = False
        self._curve = curve
        self._offers: dict[str, dict[str, tuple[Method, Handler]]] = {}
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
        self._offers[api.__name__] = {name: (method, getattr(implementation, name)) for name, method in methods.items()}

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
            listener = await stream.listen(parsed, self._attach)
        else:
            # Loaded on demand: roles that stay on their node never need ZeroMQ.
            from relax_rt.transport.rpc import zmq_channel

            listener = await zmq_channel.listen(parsed, self._attach, self.max_message_bytes, self._curve)
        self._listeners.append(listener)
        return listener.address

    async def close(self, grace_s: float = 1.0) -> None:
        """Stop listening, let handlers at work finish for grace_s, cancel the rest, end all connections.

        Clients are told that nothing more is begun, so that they take new calls elsewhere and none is in doubt. Callers
        of cancelled handlers see the connection end: idempotent calls go to this server's successor.
        """
        self.closing = True
        for listener in self._listeners:
            listener.stop()
        for connection in list(self.connections):
            connection.retire()
        current = asyncio.current_task()
        tasks = {call.task for call in self.calls if call.task is not current}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=grace_s)
            for task in late:
                task.cancel()
            if late:
                _, stuck = await asyncio.wait(late, timeout=_CANCEL_PATIENCE_S)
                for task in stuck:
                    log.warning("%s: a handler ignores its cancellation: %s", self.hello.who, task)
        if parting := [connection.ended for connection in self.connections if connection.peer is not None]:
            await asyncio.wait(parting, timeout=_PARTING_S)
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
        """Numbers for people and metrics."""
        totals = dataclasses.asdict(self.counters)
        for connection in self.connections:
            totals["bytes_in"] += connection.channel.bytes_in
            totals["bytes_out"] += connection.channel.bytes_out
        return ServerStatistics(
            connections=len(self.connections), inflight=len(self.calls), by_method=dict(self.by_method), **totals
        )

    def find(self, api: str, name: str) -> tuple[Method, Handler]:
        """Raises: Refused, when the interface or the method is not offered."""
        offer = self._offers.get(api)
        if offer is None:
            raise Refused(
                f"call of {api}.{name}",
                why=f"{self.hello.who} offers no interface {api}",
                hint=did_you_mean(api, self._offers),
            )
        found = offer.get(name)
        if found is None:
            raise Refused(f"call of {api}.{name}", why=f"{api} has no method {name}", hint=did_you_mean(name, offer))
        return found

    def make_room(self) -> None:
        """A handler has ended: connections whose requests wait take turns."""
        while not self.closing and len(self.calls) < self.max_calls:
            connection = next((c for c in self.held if c.inflight < self.max_inflight), None)
            if connection is None:
                return
            # It comes back at the end if it has more.
            del self.held[connection]
            connection.go_on()

    def _attach(self, channel: Channel) -> Connection:
        self.counters.connections_total += 1
        connection = Connection(self, channel)
        if self.closing or len(self.connections) >= self.max_connections:
            if not self.closing:
                self.counters.connections_refused += 1
                log.warning("%s: no room for %s: %d connections", self.hello.who, channel.peer, self.max_connections)
            channel.close()
        else:
            self.connections.add(connection)
        return connection


class Connection:
    """A peer of the server: first greets, then calls."""

    def __init__(self, server: Server, channel: Channel) -> None:
        loop = asyncio.get_running_loop()
        self.server = server
        self.channel = channel
        self.peer: HelloFrame | None = None
        self.requests: dict[int, Call] = {}
        self.inflight = 0
        self._held: collections.OrderedDict[int | str, _Held] = collections.OrderedDict()
        self._held_bytes = self._told_bytes = self._tells = 0
        self._paused = False
        self.ended: asyncio.Future[None] = loop.create_future()
        self._context = contextvars.copy_context()
        self._hello_timer = loop.call_later(server.hello_timeout_s, self._no_hello)

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
        # No one is left to take an answer. What was told stays told.
        for call in list(self.requests.values()):
            call.drop()
        if not self.ended.done():
            self.ended.set_result(None)

    def _name(self) -> str:
        return str(self.peer.who) if self.peer else self.channel.peer

    def _no_hello(self) -> None:
        self.server.counters.protocol_errors += 1
        log.warning("%s: disconnecting %s: it did not greet", self.server.hello.who, self.channel.peer)
        self.channel.close()

    def _greet(self, message: bytes) -> None:
        peer, mine = codec.decode_hello(message), self.server.hello
        # Sent also when the peer will not do: it compares too, and tells its user.
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
        request = codec.decode_from_client(message)
        if isinstance(request, Cancel):
            call = self.requests.get(request.id)
            if call is not None:
                self.server.counters.cancelled += 1
                call.drop()
            elif request.id in self._held:
                self.server.counters.cancelled += 1
                self._give_up(request.id)
            return
        if isinstance(request, Grant):
            call = self.requests.get(request.id)
            if isinstance(call, StreamCall):
                call.grant(request.credit)
            return
        server = self.server
        if server.closing:
            self._turn_away(request)
            return
        if not isinstance(request, Tell) and (request.id in self.requests or request.id in self._held):
            raise ProtocolError(f"request {request.id} of {request.api}.{request.method}", why="its id is in use")
        now = asyncio.get_running_loop().time()
        if self._held or self.inflight >= server.max_inflight or len(server.calls) >= server.max_calls:
            self._hold(request, len(message), now)
        else:
            self._start(request, now)

    def _hold(self, request: Request | Tell | Open, size: int, now: float) -> None:
        """Keep a request until there is room, and read on: cancellations, credit and the peer's end come behind it."""
        key: int | str
        if isinstance(request, Tell):
            self._tells += 1
            key = f"tell {self._tells}"
            self._told_bytes += size
        else:
            key = request.id
        self._held_bytes += size
        timer = asyncio.get_running_loop().call_at(now + bounded_s(request.timeout_s), self._late, key)
        self._held[key] = _Held(request, size, now, timer)
        self.server.held.setdefault(self, None)
        if self._full():
            self._paused = True
            self.channel.pause()

    def _full(self) -> bool:
        # A caller bounds its requests to what the greeting said, but not what it tells: that waits in the sockets.
        server = self.server
        many = len(self._held) >= server.max_inflight
        return many or self._told_bytes >= TOLD_BYTES or self._held_bytes >= server.max_message_bytes

    def _release(self, key: int | str) -> _Held:
        held = self._held.pop(key)
        held.timer.cancel()
        self._held_bytes -= held.size
        if isinstance(held.request, Tell):
            self._told_bytes -= held.size
        return held

    def retire(self) -> None:
        """The server closes: nothing that is held, or comes from here on, is begun, and the peer is told so."""
        for key in list(self._held):
            self._turn_away(self._give_up(key).request)
        if self.peer is not None:
            self.channel.send(codec.encode_message(Retire()))

    def _turn_away(self, request: Request | Tell | Open) -> None:
        if not isinstance(request, Tell):
            where = f"{self.server.hello.who} {request.api}.{request.method}"
            error = Retiring(where, why="it is stopping and begins no more calls")
            self.channel.send(codec.encode_message(fault_of(error, request.id, where)))

    def _drop_held(self) -> None:
        """Carry out none of the requests that are held; what was told stays told."""
        for key in [key for key, held in self._held.items() if not isinstance(held.request, Tell)]:
            self._release(key)
        if not self._held:
            self.server.held.pop(self, None)

    def _give_up(self, key: int | str) -> _Held:
        """A request that is held is not carried out."""
        held = self._release(key)
        if not self._held:
            self.server.held.pop(self, None)
        self._read_on()
        return held

    def _late(self, key: int | str) -> None:
        request = self._give_up(key).request
        self.server.counters.expired += 1
        if not isinstance(request, Tell):
            where = f"{self.server.hello.who} {request.api}.{request.method}"
            why = f"not begun in the {request.timeout_s:.3g} s that its caller gave it: there was no room"
            self.server.counters.faults += 1
            self.channel.send(codec.encode_message(fault_of(DeadlineExceeded(where, why=why), request.id, where)))

    def _read_on(self) -> None:
        if self._paused and not self._full() and not self.ended.done():
            self._paused = False
            self.channel.resume()

    def _start(self, request: Request | Tell | Open, arrived: float) -> None:
        server = self.server
        context = self._context.copy()
        kind = StreamCall if isinstance(request, Open) else Call
        call = kind(self, request, context, arrived + bounded_s(request.timeout_s))  # type: ignore[arg-type]
        server.calls.add(call)
        server.by_method[f"{request.api}.{request.method}"] += 1
        server.counters.peak_inflight = max(server.counters.peak_inflight, len(server.calls))
        if isinstance(request, Tell):
            server.counters.tells += 1
        else:
            if isinstance(request, Open):
                server.counters.streams += 1
            else:
                server.counters.requests += 1
            self.requests[request.id] = call
        self.inflight += 1

    def finished(self, call: Call) -> None:
        self.server.calls.discard(call)
        if not isinstance(call.request, Tell):
            del self.requests[call.request.id]
        self.inflight -= 1
        if self.server.held:
            self.server.make_room()

    def go_on(self) -> None:
        """Carry out the first request that was held, and read on."""
        held = self._release(next(iter(self._held)))
        self._start(held.request, held.arrived)
        if self._held:
            self.server.held[self] = None
        self._read_on()


@dataclasses.dataclass
class _Held:
    """A request for which there is no room yet."""

    request: Request | Tell | Open
    size: int
    arrived: float
    timer: asyncio.TimerHandle
