"""The client: proxies of interfaces, over one connection that is dialed again when lost; and streams of items.

`bind` makes a proxy. Idempotent calls are repeated on the next connection, all others fail with ActorDied. A stream
grants credit as its items are taken, so that at most a window is in flight, and is cancelled at its producer when its
consumer drops it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import math
import random
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Generic, TypeGuard, TypeVar, cast

import msgspec

from relax_rt.transport.rpc import unix_channel, wire
from relax_rt.transport.rpc.backoff import Backoff, BackoffPolicy
from relax_rt.transport.rpc.channel import Address, AddressError, Channel, ConnectionLost, NoReply, parse_address
from relax_rt.transport.rpc.errors import (
    ActorDied,
    DeadlineExceeded,
    ProtocolError,
    Refused,
    RelaxError,
    ShuttingDown,
    Unreachable,
)
from relax_rt.transport.rpc.identity import CurveKeys, Hello
from relax_rt.transport.rpc.interface import Method, methods_of, name_hint
from relax_rt.transport.rpc.wire import (
    CREDIT_MAX,
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
    error_of,
)

T = TypeVar("T")

DEFAULT_WINDOW = 64
SHUTDOWN_PAUSE_S = 0.05
"""Pause between attempts at a server that is shutting down, until its successor listens."""
DEFAULT_BACKOFF = BackoffPolicy(base_s=0.01, cap_s=0.5)
_CLOSE_PATIENCE_S = 1.0


class ClientStatistics(msgspec.Struct):
    """Numbers of a client since it was made; `connected` and `inflight` are of this moment."""

    connected: bool = False
    inflight: int = 0
    calls: int = 0
    tells: int = 0
    streams: int = 0
    faults: int = 0
    resent: int = 0
    reconnects: int = 0
    failed_dials: int = 0
    late_replies: int = 0
    unanswered: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class RpcClient:
    """A connection to one server, made when first needed and made again when lost; shared by all its proxies.

    Args:
        address: where the server is, or a coroutine function that finds out; it is asked before every connect.
        hello: who this process is.
        connect_timeout_s: bound of one attempt to connect and greet.
        max_message_bytes: bound of one message, in both directions.
        max_inflight: calls at work at once; more wait here. The server's own bound holds too.
        backoff: delays between attempts to connect; a call's deadline is their limit.
        curve: keys for tcp addresses.
        slot: whom to expect at the address; another one who answers there is not spoken to. Empty: anyone.
        rng: source of the delays' jitter.
    """

    def __init__(
        self,
        address: str | Callable[[], Awaitable[str]],
        hello: Hello,
        *,
        connect_timeout_s: float = 5.0,
        max_message_bytes: int = wire.DEFAULT_MAX_MESSAGE_BYTES,
        max_inflight: int = 1024,
        backoff: BackoffPolicy = DEFAULT_BACKOFF,
        curve: CurveKeys | None = None,
        slot: str = "",
        rng: random.Random | None = None,
    ) -> None:
        self.hello, self.slot = hello, slot
        self.max_message_bytes = max_message_bytes
        self.max_inflight = max_inflight
        self.counters = ClientStatistics()
        self.links: set[ClientConnection] = set()
        self._address = address
        self.where = address if isinstance(address, str) else "a peer not yet found"
        self._connect_timeout_s = connect_timeout_s
        self._backoff = Backoff(backoff, rng or random.Random())
        self._curve = curve
        self._link: ClientConnection | None = None
        self._dialing: asyncio.Task[None] | None = None
        self._waiters = 0
        self._unanswered_dials = 0
        self._connects = 0
        self._last_failure = ""
        self._closed = False

    @property
    def peer(self) -> Hello | None:
        """Who answered at the last connect; None before the first."""
        return self._link.peer if self._link else None

    def bind(self, api: type[T], *, timeout_s: float, window: int = DEFAULT_WINDOW) -> T:
        """An object with the methods of `api`, each of which calls the server.

        Args:
            api: the interface; the server finds it by its class name.
            timeout_s: deadline of each call and of each item of a stream, seconds; an argument named `wait_s` is
                added to it.
            window: items of one stream that may be under way.

        Raises:
            Refused: the interface cannot cross the wire, or timeout_s or window is out of range.
        """
        check_options(f"binding {api.__name__}", timeout_s, window)
        return cast(T, _Proxy(self, api, timeout_s, window))

    @property
    def connected(self) -> bool:
        """A connection stands."""
        return self._link is not None and self._link.usable

    async def connect(self, what: str, timeout_s: float) -> None:
        """Connect, if there is no connection, on behalf of `what`.

        Raises:
            Unreachable: not in time. AddressError, ProtocolError: it never will.
        """
        if not self.connected:
            await self._connected(what, asyncio.get_running_loop().time() + timeout_s, timeout_s)

    async def close(self) -> None:
        """End the connection; calls at work end with Unreachable."""
        self._closed = True
        if self._dialing is not None:
            self._dialing.cancel()
            await asyncio.wait({self._dialing})
        links = list(self.links)
        for link in links:
            link.channel.close()
        if links:
            _, late = await asyncio.wait([link.ended for link in links], timeout=_CLOSE_PATIENCE_S)
            if late:
                for link in links:
                    link.channel.abort()
                await asyncio.wait(late, timeout=_CLOSE_PATIENCE_S)

    def statistics(self) -> ClientStatistics:
        """Current statistics."""
        known = msgspec.structs.replace(self.counters, connected=self.connected)
        known.inflight = len(self._link.pending) if self._link else 0
        for link in self.links:
            known.bytes_in += link.channel.bytes_in
            known.bytes_out += link.channel.bytes_out
        return known

    async def call(
        self, method: Method, values: tuple[Any, ...], timeout_s: float, deaths: DeathLimit | None = None
    ) -> Any:
        """Call a method with all its arguments, in the order of the wire; what proxies do.

        An idempotent one that is lost is sent again until the deadline, or until `deaths` reaches its limit.
        """
        payload = method.encode_arguments(values)
        loop = asyncio.get_running_loop()
        budget_s = timeout_s + method.wait_s(values)
        deadline = loop.time() + budget_s
        while True:
            try:
                return await self.call_once(method, payload, deadline, budget_s)
            except ConnectionLost as lost:
                if lost.sent and not method.idempotent:
                    raise died_of(method, lost) from None
                self._last_failure = str(lost)
                if deaths is not None:
                    await deaths.count(f"call of {method}", lost, deadline - loop.time())
                if loop.time() >= deadline:
                    raise self._unreachable(f"call of {method}", budget_s) from None
                self.counters.resent += lost.sent
            except ShuttingDown:
                if loop.time() + SHUTDOWN_PAUSE_S >= deadline:
                    raise
                await asyncio.sleep(SHUTDOWN_PAUSE_S)

    async def call_once(self, method: Method, payload: bytes, deadline: float, budget_s: float) -> Any:
        """Send a call, once a connection stands.

        Raises:
            ConnectionLost: the connection ended under it.
        """
        if method.one_way:
            self.counters.tells += 1
        else:
            self.counters.calls += 1
        link = self._link
        if link is None or not link.usable or self._closed:
            link = await self._connected(f"call of {method}", deadline, budget_s)
        if method.one_way:
            await link.tell(method, payload, deadline)
            return None
        try:
            raw = await link.request(method, payload, deadline, min(1.0, budget_s / 2))
        except NoReply:
            self.counters.unanswered += 1
            raise Unreachable(
                f"call of {method} at {link.name()}",
                why=f"no answer in {budget_s:.3g} s, though the connection stands",
                hint="the process may hang or be stopped: look at its log",
            ) from None
        return method.decode_result(raw)

    def stream(
        self,
        method: Method,
        values: tuple[Any, ...],
        timeout_s: float,
        window: int = DEFAULT_WINDOW,
        explain: Explain | None = None,
        deaths: DeathLimit | None = None,
    ) -> RemoteStream[Any]:
        """Call a method that yields; what proxies do. It is sent when the first item is asked for."""
        payload = method.encode_arguments(values)
        budget_s = timeout_s + method.wait_s(values)

        async def opener(deadline: float) -> ItemBuffer:
            return await self.open(method, payload, deadline, budget_s, window)

        return RemoteStream(method, opener, budget_s, explain, deaths)

    async def open(self, method: Method, payload: bytes, deadline: float, timeout_s: float, window: int) -> ItemBuffer:
        """Open a stream, once a connection stands.

        Raises:
            ConnectionLost: the connection ended meanwhile.
        """
        link = self._link
        if link is None or not link.usable or self._closed:
            link = await self._connected(f"stream of {method}", deadline, timeout_s)
        incoming = await link.open(method, payload, deadline, timeout_s, window)
        self.counters.streams += 1
        return incoming

    def _unreachable(self, what: str, budget_s: float) -> Unreachable:
        why = self._last_failure or "no answer yet to the attempt to connect"
        return Unreachable(f"{what} at {self.where}", why=f"not connected for {budget_s:.3g} s: {why}")

    async def _connected(self, what: str, deadline: float, budget_s: float) -> ClientConnection:
        """The connection, once it stands. All callers wait for one dialing task; the last to give up ends it."""
        # One task dials for all callers, so that a hundred calls that lost one server make one attempt at a time. It
        # must not outlive them, so the last caller that stops waiting (deadline, cancellation) cancels it.
        loop = asyncio.get_running_loop()
        self._waiters += 1
        try:
            while True:
                if self._closed:
                    raise Unreachable(f"{what} at {self.where}", why="this client was closed")
                if self._link is not None and self._link.usable:
                    return self._link
                if self._dialing is None:
                    self._dialing = loop.create_task(self._dial_until_connected())
                    self._dialing.add_done_callback(self._dialed)
                dialing = self._dialing
                await asyncio.wait({dialing}, timeout=max(0.0, deadline - loop.time()))
                if not dialing.done():
                    raise self._unreachable(what, budget_s)
                if not dialing.cancelled() and (error := dialing.exception()) is not None:
                    # A copy for each caller: they would otherwise share, and lengthen, one traceback.
                    raise type(error)(error.what, why=error.why, hint=error.hint) if _plain(error) else error
                if loop.time() >= deadline:
                    raise self._unreachable(what, budget_s)
        finally:
            self._waiters -= 1
            if self._waiters == 0 and self._dialing is not None:
                self._dialing.cancel()

    def _dialed(self, task: asyncio.Task[None]) -> None:
        if self._dialing is task:
            self._dialing = None
        if not task.cancelled():
            task.exception()

    async def _dial_until_connected(self) -> None:
        while True:
            # A server that accepts and dies at once must not be hammered: only an answer ends the back-off.
            if self._unanswered_dials:
                delay = self._backoff.next_delay_s()
                if delay is None:
                    raise Unreachable(self.where, why=f"{self._backoff.attempts} attempts failed: {self._last_failure}")
                await asyncio.sleep(delay)
            self._unanswered_dials += 1
            try:
                async with asyncio.timeout(self._connect_timeout_s):
                    self._link = await self._dial()
            except (AddressError, ProtocolError):
                raise
            except RelaxError as error:
                self._last_failure = str(error)
            except TimeoutError:
                self._last_failure = f"{self.where} did not greet in {self._connect_timeout_s:.3g} s"
            else:
                self.counters.reconnects += self._connects > 0
                self._connects += 1
                return
            self.counters.failed_dials += 1

    async def _dial(self) -> ClientConnection:
        text = self._address if isinstance(self._address, str) else await self._address()
        address, self.where = parse_address(text), text
        link = ClientConnection(self, text)
        try:
            await self._open(address, link)
            await link.greeted
        except BaseException:
            if link in self.links:
                link.channel.close()
            raise
        return link

    async def _open(self, address: Address, link: ClientConnection) -> Channel:
        if address.scheme == "unix":
            return await unix_channel.dial(address, link.attach)
        # Loaded on demand: roles that stay on their node never need ZeroMQ.
        from relax_rt.transport.rpc import zmq_channel

        return await zmq_channel.dial(address, link.attach, self.max_message_bytes, self._curve)

    def mark_answered(self) -> None:
        """The server has answered: the next loss starts with a fresh back-off."""
        if self._unanswered_dials:
            self._unanswered_dials = 0
            self._backoff.reset()


class ClientConnection:
    """One connection of a client, with the calls and streams on it."""

    channel: Channel

    def __init__(self, client: RpcClient, address: str) -> None:
        loop = asyncio.get_running_loop()
        self.client = client
        self.address = address
        self.peer: HelloFrame | None = None
        self.dead = False
        self.going_away = False
        """The server sent GoAway: it starts nothing more on this connection."""
        self.pending: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._deadlines: dict[int, float] = {}
        # One timer for all calls, armed for the earliest deadline known when it was set. Calls end long before their
        # deadlines, so that it fires rarely; a timer of its own would be a good part of what a call costs.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self.streams: dict[int, ItemBuffer] = {}
        self.greeted: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._reason = ""
        self._last_id = 0
        self._slots: asyncio.Semaphore
        self._max_message_bytes = client.max_message_bytes

    @property
    def usable(self) -> bool:
        """New requests may go out on it."""
        return not self.dead and not self.going_away

    def name(self) -> str:
        return f"{self.peer.who} ({self.address})" if self.peer else self.address

    def attach(self, channel: Channel) -> ClientConnection:
        self.channel = channel
        self.client.links.add(self)
        hello = self.client.hello
        channel.send(
            wire.encode_message(
                HelloFrame(
                    protocol=hello.protocol,
                    run_id=hello.run_id,
                    who=hello.who,
                    pid=hello.pid,
                    max_message_bytes=self.client.max_message_bytes,
                )
            )
        )
        return self

    def received(self, message: bytes) -> None:
        try:
            if self.peer is None:
                self._greet(message)
            else:
                self._answer(message)
        except ProtocolError as error:
            self._fail(error)
            self.channel.close()

    def lost(self, reason: str) -> None:
        self.client.links.discard(self)
        self.client.counters.bytes_in += self.channel.bytes_in
        self.client.counters.bytes_out += self.channel.bytes_out
        self._reason = self._reason or reason
        if not self.greeted.done():
            self.greeted.set_exception(Unreachable(self.address, why=f"{reason} before it greeted"))
        self._fail(self._loss(f"{self.name()} was lost: {reason}", sent=True))
        if not self.ended.done():
            self.ended.set_result(None)

    def _loss(self, reason: str, *, sent: bool) -> ConnectionLost:
        return ConnectionLost(reason, sent=sent, who=str(self.peer.who) if self.peer else "", where=self.name())

    def _fail(self, error: Exception) -> None:
        self.dead = True
        if self._timer is not None:
            self._timer.cancel()
        if not self.greeted.done():
            self.greeted.set_exception(error)
        # Whether or not someone still awaits the greeting, its error is known here.
        self.greeted.cancelled() or self.greeted.exception()
        pending, self.pending = self.pending, {}
        for answer in pending.values():
            if not answer.done():
                answer.set_exception(error)
        streams, self.streams = self.streams, {}
        for incoming in streams.values():
            incoming.finish(error)

    def _greet(self, message: bytes) -> None:
        peer, mine = wire.decode_hello(message), self.client.hello
        protocol = peer if isinstance(peer, int) else peer.protocol
        if isinstance(peer, int) or protocol != mine.protocol:
            raise ProtocolError(
                f"connecting to {self.address}",
                why=f"it speaks protocol version {protocol}, this process version {mine.protocol}",
                hint="run the same release of relax-rt on both ends",
            )
        if peer.run_id != mine.run_id:
            raise ProtocolError(
                f"connecting to {self.address}",
                why=f"{peer.who} belongs to run {peer.run_id}, this process to run {mine.run_id}",
                hint="an earlier run still serves there, or the address is of another run",
            )
        if self.client.slot not in ("", peer.who.slot):
            # Its port has gone to another process of the run since it was found.
            self._fail(Unreachable(self.address, why=f"{peer.who} answers there, not {self.client.slot}"))
            self.channel.close()
            return
        self.peer = peer
        self.channel.who = peer.who.slot
        self._slots = asyncio.Semaphore(min(self.client.max_inflight, peer.max_inflight or self.client.max_inflight))
        self._max_message_bytes = min(self._max_message_bytes, peer.max_message_bytes or self._max_message_bytes)
        self.channel.limit(self.client.max_message_bytes)
        if not self.greeted.done():
            self.greeted.set_result(None)

    def _answer(self, message: bytes) -> None:
        answer = wire.decode_from_server(message)
        self.client.mark_answered()
        if isinstance(answer, GoAwayFrame):
            self.going_away = True
            self._reason = "it is closing"
            self._close_if_drained()
            return
        if isinstance(answer, ItemFrame):
            incoming = self.streams.get(answer.id)
            # Items of a cancelled stream may still be under way.
            if incoming is not None:
                incoming.put(answer.value)
            return
        if answer.id in self.streams or isinstance(answer, EndFrame):
            self._ended(answer)
            return
        waiting = self.pending.pop(answer.id, None)
        if waiting is None or waiting.done():
            self.client.counters.late_replies += 1
        elif isinstance(answer, ReplyFrame):
            waiting.set_result(answer.result)
        else:
            self.client.counters.faults += 1
            waiting.set_exception(error_of(answer))
        self._close_if_drained()

    def _close_if_drained(self) -> None:
        """Close a connection after GoAway once nothing is in flight on it."""
        if self.going_away and not self.dead and not self.pending and not self.streams:
            self.channel.close()

    def _ended(self, answer: EndFrame | FaultFrame | ReplyFrame) -> None:
        incoming = self.streams.get(answer.id)
        if incoming is None:
            return
        self.leave(answer.id, cancel=False)
        if isinstance(answer, FaultFrame):
            self.client.counters.faults += 1
            incoming.finish(error_of(answer))
        else:
            incoming.finish(StopAsyncIteration())

    async def open(self, method: Method, payload: bytes, deadline: float, timeout_s: float, window: int) -> ItemBuffer:
        """Open a stream. It counts as a call of the connection until it ends."""
        await self._acquire_slot(method, deadline)
        try:
            if not self.usable:
                raise self._loss(self._reason, sent=False)
            self._last_id += 1
            number = self._last_id
            self._write(
                method, OpenStreamFrame(number, method.api, method.name, timeout_s, window, msgspec.Raw(payload))
            )
        except BaseException:
            self._slots.release()
            raise
        incoming = self.streams[number] = ItemBuffer(self, number, window)
        return incoming

    def grant(self, number: int, credit: int) -> None:
        """The consumer of a stream has taken items."""
        if not self.dead:
            self.channel.send(wire.encode_message(GrantFrame(number, credit)))

    def leave(self, number: int, *, cancel: bool) -> None:
        """Remove a stream that has ended here; with `cancel` also cancel it at the server."""
        if self.streams.pop(number, None) is not None:
            self._slots.release()
            if cancel and not self.dead:
                self.channel.send(wire.encode_message(CancelFrame(number)))
            self._close_if_drained()

    async def request(self, method: Method, payload: bytes, deadline: float, grace_s: float) -> msgspec.Raw:
        """Send a request and wait for its answer, for grace_s beyond the deadline at most.

        The grace lets the server's own verdict (handler too slow) arrive, which tells a slow one from a dead one.
        """
        await self._acquire_slot(method, deadline)
        try:
            if not self.usable:
                raise self._loss(self._reason, sent=False)
            self._last_id += 1
            number, answer = self._last_id, self._loop.create_future()
            left_s = max(0.0, deadline - self._loop.time())
            self._write(method, RequestFrame(number, method.api, method.name, left_s, msgspec.Raw(payload)))
            self.pending[number] = answer
            self._deadlines[number] = deadline + grace_s
            if deadline + grace_s < self._timer_at:
                self._arm(deadline + grace_s)
            try:
                return cast(msgspec.Raw, await answer)
            except asyncio.CancelledError:
                self._abandon(number)
                raise
            finally:
                del self._deadlines[number]
        finally:
            self._slots.release()

    async def tell(self, method: Method, payload: bytes, deadline: float) -> None:
        """Write a one-way message; waits only for room in the write buffer."""
        if self.channel.congested:
            await self._uncongested(method, deadline)
        if not self.usable:
            raise self._loss(self._reason, sent=False)
        left_s = max(0.0, deadline - self._loop.time())
        self._write(method, TellFrame(method.api, method.name, left_s, msgspec.Raw(payload)))

    async def _acquire_slot(self, method: Method, deadline: float) -> None:
        """Take a slot of the connection, once the write buffer has room too."""
        if self._slots.locked():
            try:
                async with asyncio.timeout_at(deadline):
                    await self._slots.acquire()
            except TimeoutError:
                why = f"{len(self.pending)} calls are at work there already, the most that the connection may have"
                raise DeadlineExceeded(f"call of {method} at {self.name()}", why=why) from None
        else:
            await self._slots.acquire()
        if self.channel.congested:
            try:
                await self._uncongested(method, deadline)
            except BaseException:
                self._slots.release()
                raise

    async def _uncongested(self, method: Method, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                while self.channel.congested:
                    await self.channel.drain()
        except TimeoutError:
            why = "the connection's write buffer stayed full: the server does not read"
            raise DeadlineExceeded(f"call of {method} at {self.name()}", why=why) from None

    def _write(self, method: Method, message: RequestFrame | TellFrame | OpenStreamFrame) -> None:
        data = wire.encode_message(message)
        if len(data) > self._max_message_bytes:
            raise ProtocolError(
                f"call of {method}",
                why=f"its message has {len(data)} bytes; the limit of {self.name()} is {self._max_message_bytes}",
                hint="send less at once, or raise max_message_bytes on both ends",
            )
        self.channel.send(data)

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = self._loop.call_at(at, self._check_deadlines), at

    def _check_deadlines(self) -> None:
        """Fail the calls whose deadline has passed, and set the timer for the next one."""
        now, self._timer, self._timer_at = self._loop.time(), None, math.inf
        for number, at in list(self._deadlines.items()):
            if at <= now:
                self._timed_out(number)
        later = [at for number, at in self._deadlines.items() if number in self.pending]
        if later:
            self._arm(min(later))

    def _timed_out(self, number: int) -> None:
        answer = self.pending.get(number)
        if answer is not None and not answer.done():
            self._abandon(number)
            answer.set_exception(NoReply())

    def _abandon(self, number: int) -> None:
        """Give up on a request, and tell the server."""
        if self.pending.pop(number, None) is not None and not self.dead:
            self.channel.send(wire.encode_message(CancelFrame(number)))
            self._close_if_drained()


def check_options(what: str, timeout_s: float, window: int) -> None:
    """Raises: Refused, when a deadline or a window is out of range."""
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise Refused(what, why=f"timeout_s is {timeout_s}, not a positive number of seconds")
    if not 1 <= window <= CREDIT_MAX:
        raise Refused(what, why=f"window is {window}, not in 1..{CREDIT_MAX}")


def _plain(error: BaseException) -> TypeGuard[RelaxError]:
    return type(error) in (AddressError, ProtocolError, Unreachable)


def describe(function: Callable[..., Any], method: Method) -> Callable[..., Any]:
    """Give the function that calls a method the method's name."""
    function.__name__ = method.name
    function.__qualname__ = str(method)
    function.__doc__ = f"Calls {method}{method.signature} at the server."
    return function


class _Proxy:
    """Looks like an implementation of the interface."""

    def __init__(self, client: RpcClient, api: type, timeout_s: float, window: int) -> None:
        self.__dict__["_relax_of"] = (client, api)
        for name, method in methods_of(api).items():
            make = self._streamer(client, method, timeout_s, window) if method.stream else None
            self.__dict__[name] = describe(make or self._caller(client, method, timeout_s), method)

    @staticmethod
    def _caller(client: RpcClient, method: Method, timeout_s: float) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            return await client.call(method, method.bind(args, kwargs), timeout_s)

        return call

    @staticmethod
    def _streamer(client: RpcClient, method: Method, timeout_s: float, window: int) -> Callable[..., RemoteStream[Any]]:
        def stream(*args: Any, **kwargs: Any) -> RemoteStream[Any]:
            return client.stream(method, method.bind(args, kwargs), timeout_s, window)

        return stream

    def __getattr__(self, name: str) -> Any:
        _, api = self.__dict__["_relax_of"]
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"{api.__name__} has no method {name}: {name_hint(name, methods_of(api))}")

    def __repr__(self) -> str:
        client, api = self.__dict__["_relax_of"]
        return f"<{api.__name__} at {client.peer.who if client.peer else client.where}>"


class ItemBuffer:
    """One stream on one connection: items received and not yet taken."""

    def __init__(self, link: ClientConnection, number: int, window: int) -> None:
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
                raise died(at, f"{lost}, after {self._count} items", "a stream is not resumed", lost)
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
