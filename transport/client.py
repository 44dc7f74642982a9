"""The calling end of the RPC layer."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeGuard, TypeVar, cast

import msgspec

from relax_rt.transport import codec, stream
from relax_rt.transport.address import Address, AddressError, parse_address
from relax_rt.transport.backoff import Backoff, BackoffPolicy
from relax_rt.transport.channel import Channel
from relax_rt.transport.errors import ActorDied, DeadlineExceeded, ProtocolError, Refused, RelaxError, Unreachable
from relax_rt.transport.faults import error_of
from relax_rt.transport.identity import Hello
from relax_rt.transport.interface import Method, did_you_mean, methods_of
from relax_rt.transport.wire import Cancel, HelloFrame, Reply, Request, Tell
from relax_rt.transport.zmq_keys import CurveKeys

T = TypeVar("T")

DEFAULT_BACKOFF = BackoffPolicy(base_s=0.01, cap_s=0.5)
_CLOSE_PATIENCE_S = 1.0


class ClientStatistics(msgspec.Struct, frozen=True):
    """Numbers of a client since it was made; `connected` and `inflight` are of this moment."""

    connected: bool
    inflight: int
    calls: int
    tells: int
    faults: int
    resent: int
    reconnects: int
    failed_dials: int
    late_replies: int
    unanswered: int
    bytes_in: int
    bytes_out: int


@dataclasses.dataclass
class _Counters:
    calls: int = 0
    tells: int = 0
    faults: int = 0
    resent: int = 0
    failed_dials: int = 0
    late_replies: int = 0
    unanswered: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class _Lost(Exception):
    """The connection ended under a call."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


class _Silent(Exception):
    """The deadline has passed by more than the grace, and neither answer nor fault has come."""


class Client:
    """A connection to one server, made when first needed and made again when lost; shared by all its proxies.

    Args:
        address: where the server is, or a coroutine function that finds out; it is asked before every connect.
        hello: who this process is.
        connect_timeout_s: bound of one attempt to connect and greet.
        max_message_bytes: bound of one message, in both directions.
        max_inflight: calls at work at once; more wait here. The server's own bound holds too.
        backoff: delays between attempts to connect; a call's deadline is their limit.
        curve: keys for tcp addresses.
        rng: source of the delays' jitter.
    """

    def __init__(
        self,
        address: str | Callable[[], Awaitable[str]],
        hello: Hello,
        *,
        connect_timeout_s: float = 5.0,
        max_message_bytes: int = codec.DEFAULT_MAX_MESSAGE_BYTES,
        max_inflight: int = 1024,
        backoff: BackoffPolicy = DEFAULT_BACKOFF,
        curve: CurveKeys | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.hello = hello
        self.max_message_bytes = max_message_bytes
        self.max_inflight = max_inflight
        self.reconnects = 0
        self.counters = _Counters()
        self.links: set[_Link] = set()
        self._address = address
        self.where = address if isinstance(address, str) else "a peer not yet found"
        self._connect_timeout_s = connect_timeout_s
        self._backoff = Backoff(backoff, rng or random.Random())
        self._curve = curve
        self._link: _Link | None = None
        self._dialing: asyncio.Task[None] | None = None
        self._waiters = 0
        self._unproven = 0
        self._connects = 0
        self._last_failure = ""
        self._closed = False

    @property
    def peer(self) -> Hello | None:
        """Who answered at the last connect; None before the first."""
        return self._link.peer if self._link else None

    def bind(self, api: type[T], *, timeout_s: float) -> T:
        """An object with the methods of `api`, each of which calls the server.

        Args:
            api: the interface; the server finds it by its class name.
            timeout_s: deadline of each call, seconds; an argument named `wait_s` is added to it.

        Raises:
            Refused: the interface cannot cross the wire, or timeout_s is not a positive number.
        """
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise Refused(f"binding {api.__name__}", why=f"timeout_s is {timeout_s}, not a positive number of seconds")
        return cast(T, _Proxy(self, api, timeout_s))

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
        """Numbers for people and metrics."""
        totals = dataclasses.asdict(self.counters)
        for link in self.links:
            totals["bytes_in"] += link.channel.bytes_in
            totals["bytes_out"] += link.channel.bytes_out
        alive = self._link is not None and not self._link.dead
        return ClientStatistics(
            connected=alive,
            inflight=len(self._link.pending) if self._link else 0,
            reconnects=self.reconnects,
            **totals,
        )

    async def call(self, method: Method, values: tuple[Any, ...], timeout_s: float) -> Any:
        """Call a method with all its arguments, in the order of the wire; what proxies do."""
        payload = method.encode_arguments(values)
        loop = asyncio.get_running_loop()
        budget_s = timeout_s + method.wait_s(values)
        deadline = loop.time() + budget_s
        self.counters.calls += not method.one_way
        self.counters.tells += method.one_way
        while True:
            link = self._link
            if link is None or link.dead or self._closed:
                link = await self._connected(method, deadline, budget_s)
            try:
                if method.one_way:
                    await link.tell(method, payload, deadline)
                    return None
                raw = await link.request(method, payload, deadline, min(1.0, budget_s / 2))
            except _Lost as lost:
                self._after_loss(lost, method, link, deadline, budget_s)
            except _Silent:
                self.counters.unanswered += 1
                raise Unreachable(
                    f"call of {method} at {link.name()}",
                    why=f"no answer in {budget_s:.3g} s, though the connection stands",
                    hint="the process may hang or be stopped: look at its log",
                ) from None
            else:
                return method.decode_result(raw)

    def _after_loss(self, lost: _Lost, method: Method, link: _Link, deadline: float, budget_s: float) -> None:
        """Return to have the call sent again."""
        if lost.sent and not method.idempotent:
            raise ActorDied(
                f"call of {method} at {link.name()}",
                why=f"{lost}; the call may have been carried out",
                hint="it is not marked idempotent, so it is not sent again",
            ) from None
        self._last_failure = str(lost)
        if asyncio.get_running_loop().time() >= deadline:
            raise self._unreachable(method, budget_s) from None
        self.counters.resent += lost.sent

    def _unreachable(self, method: Method, budget_s: float) -> Unreachable:
        why = self._last_failure or "no answer yet to the attempt to connect"
        return Unreachable(f"call of {method} at {self.where}", why=f"not connected for {budget_s:.3g} s: {why}")

    async def _connected(self, method: Method, deadline: float, budget_s: float) -> _Link:
        """The connection, once it stands. All callers wait for one dialing task; the last to give up ends it."""
        loop = asyncio.get_running_loop()
        self._waiters += 1
        try:
            while True:
                if self._closed:
                    raise Unreachable(f"call of {method} at {self.where}", why="this client was closed")
                if self._link is not None and not self._link.dead:
                    return self._link
                if self._dialing is None:
                    self._dialing = loop.create_task(self._dial_until_connected())
                    self._dialing.add_done_callback(self._dialed)
                dialing = self._dialing
                await asyncio.wait({dialing}, timeout=max(0.0, deadline - loop.time()))
                if not dialing.done():
                    raise self._unreachable(method, budget_s)
                if not dialing.cancelled() and (error := dialing.exception()) is not None:
                    # A copy for each caller: they would otherwise share, and lengthen, one traceback.
                    raise type(error)(error.what, why=error.why, hint=error.hint) if _plain(error) else error
                if loop.time() >= deadline:
                    raise self._unreachable(method, budget_s)
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
            if self._unproven:
                delay = self._backoff.next_delay_s()
                if delay is None:
                    raise Unreachable(self.where, why=f"{self._backoff.attempts} attempts failed: {self._last_failure}")
                await asyncio.sleep(delay)
            self._unproven += 1
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
                self.reconnects += self._connects > 0
                self._connects += 1
                return
            self.counters.failed_dials += 1

    async def _dial(self) -> _Link:
        text = self._address if isinstance(self._address, str) else await self._address()
        address, self.where = parse_address(text), text
        link = _Link(self, text)
        try:
            await self._open(address, link)
            await link.greeted
        except BaseException:
            if link in self.links:
                link.channel.close()
            raise
        return link

    async def _open(self, address: Address, link: _Link) -> Channel:
        if address.scheme == "unix":
            return await stream.dial(address, link.attach)
        # Loaded on demand: roles that stay on their node never need ZeroMQ.
        from relax_rt.transport import zmq_channel

        return await zmq_channel.dial(address, link.attach, self.max_message_bytes, self._curve)

    def proven(self) -> None:
        """The server has answered: the next loss starts a new back-off."""
        if self._unproven:
            self._unproven = 0
            self._backoff.reset()


def _plain(error: BaseException) -> TypeGuard[RelaxError]:
    return type(error) in (AddressError, ProtocolError, Unreachable)


class _Link:
    """One connection of the client and the calls on it."""

    channel: Channel

    def __init__(self, client: Client, address: str) -> None:
        loop = asyncio.get_running_loop()
        self.client = client
        self.address = address
        self.peer: HelloFrame | None = None
        self.dead = False
        self.pending: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self.greeted: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._reason = ""
        self._last_id = 0
        self._slots: asyncio.Semaphore
        self._max_message_bytes = client.max_message_bytes

    def name(self) -> str:
        return f"{self.peer.who} ({self.address})" if self.peer else self.address

    def attach(self, channel: Channel) -> _Link:
        self.channel = channel
        self.client.links.add(self)
        hello = self.client.hello
        channel.send(
            codec.encode_message(
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
        self._fail(_Lost(f"{self.name()} was lost: {reason}", sent=True))
        if not self.ended.done():
            self.ended.set_result(None)

    def _fail(self, error: Exception) -> None:
        self.dead = True
        if not self.greeted.done():
            self.greeted.set_exception(error)
        # Whether or not someone still awaits the greeting, its error is known here.
        self.greeted.cancelled() or self.greeted.exception()
        pending, self.pending = self.pending, {}
        for answer in pending.values():
            if not answer.done():
                answer.set_exception(error)

    def _greet(self, message: bytes) -> None:
        peer, mine = codec.decode_hello(message), self.client.hello
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
        self.peer = peer
        self._slots = asyncio.Semaphore(min(self.client.max_inflight, peer.max_inflight or self.client.max_inflight))
        self._max_message_bytes = min(self._max_message_bytes, peer.max_message_bytes or self._max_message_bytes)
        self.channel.limit(self.client.max_message_bytes)
        if not self.greeted.done():
            self.greeted.set_result(None)

    def _answer(self, message: bytes) -> None:
        answer = codec.decode_from_server(message)
        self.client.proven()
        waiting = self.pending.pop(answer.id, None)
        if waiting is None or waiting.done():
            self.client.counters.late_replies += 1
        elif isinstance(answer, Reply):
            waiting.set_result(answer.result)
        else:
            self.client.counters.faults += 1
            waiting.set_exception(error_of(answer))

    async def request(self, method: Method, payload: bytes, deadline: float, grace_s: float) -> msgspec.Raw:
        """Send a request and wait for its answer, for grace_s beyond the deadline at most.

        The grace lets the server's own verdict (handler too slow) arrive, which tells a slow one from a dead one.
        """
        await self._room(method, deadline)
        try:
            if self.dead:
                raise _Lost(self._reason, sent=False)
            self._last_id += 1
            number, answer = self._last_id, self._loop.create_future()
            left_s = max(0.0, deadline - self._loop.time())
            self._write(method, Request(number, method.api, method.name, left_s, msgspec.Raw(payload)))
            self.pending[number] = answer
            timer = self._loop.call_at(deadline + grace_s, self._silent, number)
            try:
                return cast(msgspec.Raw, await answer)
            except asyncio.CancelledError:
                self._forget(number)
                raise
            finally:
                timer.cancel()
        finally:
            self._slots.release()

    async def tell(self, method: Method, payload: bytes, deadline: float) -> None:
        """Write a one-way message; waits only for room in the write buffer."""
        if self.channel.congested:
            await self._uncongested(method, deadline)
        if self.dead:
            raise _Lost(self._reason, sent=False)
        left_s = max(0.0, deadline - self._loop.time())
        self._write(method, Tell(method.api, method.name, left_s, msgspec.Raw(payload)))

    async def _room(self, method: Method, deadline: float) -> None:
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

    def _write(self, method: Method, message: Request | Tell) -> None:
        data = codec.encode_message(message)
        if len(data) > self._max_message_bytes:
            raise ProtocolError(
                f"call of {method}",
                why=f"its message has {len(data)} bytes; the limit of {self.name()} is {self._max_message_bytes}",
                hint="send less at once, or raise max_message_bytes on both ends",
            )
        self.channel.send(data)

    def _silent(self, number: int) -> None:
        answer = self.pending.get(number)
        if answer is not None and not answer.done():
            self._forget(number)
            answer.set_exception(_Silent())

    def _forget(self, number: int) -> None:
        """Give up on a request, and tell the server."""
        if self.pending.pop(number, None) is not None and not self.dead:
            self.channel.send(codec.encode_message(Cancel(number)))


class _Proxy:
    """Looks like an implementation of the interface."""

    def __init__(self, client: Client, api: type, timeout_s: float) -> None:
        self.__dict__["_relax_of"] = (client, api)
        for name, method in methods_of(api).items():
            self.__dict__[name] = self._caller(client, method, timeout_s)

    @staticmethod
    def _caller(client: Client, method: Method, timeout_s: float) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            return await client.call(method, method.bind(args, kwargs), timeout_s)

        call.__name__ = method.name
        call.__qualname__ = str(method)
        call.__doc__ = f"Calls {method}{method.signature} at the server."
        return call

    def __getattr__(self, name: str) -> Any:
        _, api = self.__dict__["_relax_of"]
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"{api.__name__} has no method {name}: {did_you_mean(name, methods_of(api))}")

    def __repr__(self) -> str:
        client, api = self.__dict__["_relax_of"]
        return f"<{api.__name__} at {client.peer.who if client.peer else client.where}>"
