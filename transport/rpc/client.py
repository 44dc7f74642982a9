"""The calling end of the RPC layer."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeGuard, TypeVar, cast

import msgspec

from relax_rt.transport.rpc import codec, stream
from relax_rt.transport.rpc.address import Address, AddressError, parse_address
from relax_rt.transport.rpc.backoff import Backoff, BackoffPolicy
from relax_rt.transport.rpc.channel import Channel, Lost, Silent
from relax_rt.transport.rpc.deaths import Deaths, died_of
from relax_rt.transport.rpc.errors import (
    ProtocolError,
    Refused,
    RelaxError,
    Retiring,
    Unreachable,
)
from relax_rt.transport.rpc.identity import Hello
from relax_rt.transport.rpc.interface import Method, did_you_mean, methods_of
from relax_rt.transport.rpc.items import DEFAULT_WINDOW, RETIRING_PAUSE_S, Explain, Inlet, RemoteStream
from relax_rt.transport.rpc.link import Link
from relax_rt.transport.rpc.wire import CREDIT_MAX
from relax_rt.transport.rpc.zmq_keys import CurveKeys

T = TypeVar("T")

DEFAULT_BACKOFF = BackoffPolicy(base_s=0.01, cap_s=0.5)
_CLOSE_PATIENCE_S = 1.0


class ClientStatistics(msgspec.Struct, frozen=True):
    """Numbers of a client since it was made; `connected` and `inflight` are of this moment."""

    connected: bool
    inflight: int
    calls: int
    tells: int
    streams: int
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
    streams: int = 0
    faults: int = 0
    resent: int = 0
    failed_dials: int = 0
    late_replies: int = 0
    unanswered: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


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
        slot: whom to expect at the address; another one who answers there is not spoken to. Empty: anyone.
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
        slot: str = "",
        rng: random.Random | None = None,
    ) -> None:
        self.hello, self.slot = hello, slot
        self.max_message_bytes = max_message_bytes
        self.max_inflight = max_inflight
        self.reconnects = 0
        self.counters = _Counters()
        self.links: set[Link] = set()
        self._address = address
        self.where = address if isinstance(address, str) else "a peer not yet found"
        self._connect_timeout_s = connect_timeout_s
        self._backoff = Backoff(backoff, rng or random.Random())
        self._curve = curve
        self._link: Link | None = None
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
        """See to it that a connection stands, for `what`.

        Raises:
            Unreachable: it does not, in time. AddressError, ProtocolError: it never will.
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
        """Numbers for people and metrics."""
        totals = dataclasses.asdict(self.counters)
        for link in self.links:
            totals["bytes_in"] += link.channel.bytes_in
            totals["bytes_out"] += link.channel.bytes_out
        alive = self._link is not None and self._link.usable
        return ClientStatistics(
            connected=alive,
            inflight=len(self._link.pending) if self._link else 0,
            reconnects=self.reconnects,
            **totals,
        )

    async def call(
        self, method: Method, values: tuple[Any, ...], timeout_s: float, deaths: Deaths | None = None
    ) -> Any:
        """Call a method with all its arguments, in the order of the wire; what proxies do.

        An idempotent one that is lost is sent again until the deadline, or until `deaths` has enough of it.
        """
        payload = method.encode_arguments(values)
        loop = asyncio.get_running_loop()
        budget_s = timeout_s + method.wait_s(values)
        deadline = loop.time() + budget_s
        while True:
            try:
                return await self.call_once(method, payload, deadline, budget_s)
            except Lost as lost:
                if lost.sent and not method.idempotent:
                    raise died_of(method, lost) from None
                self._last_failure = str(lost)
                if deaths is not None:
                    await deaths.count(f"call of {method}", lost, deadline - loop.time())
                if loop.time() >= deadline:
                    raise self._unreachable(f"call of {method}", budget_s) from None
                self.counters.resent += lost.sent
            except Retiring:
                if loop.time() + RETIRING_PAUSE_S >= deadline:
                    raise
                await asyncio.sleep(RETIRING_PAUSE_S)

    async def call_once(self, method: Method, payload: bytes, deadline: float, budget_s: float) -> Any:
        """Send a call, once a connection stands.

        Raises:
            Lost: the connection ended under it.
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
        except Silent:
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
        deaths: Deaths | None = None,
    ) -> RemoteStream[Any]:
        """Call a method that yields; what proxies do. It is sent when the first item is asked for."""
        payload = method.encode_arguments(values)
        budget_s = timeout_s + method.wait_s(values)

        async def opener(deadline: float) -> Inlet:
            return await self.open(method, payload, deadline, budget_s, window)

        return RemoteStream(method, opener, budget_s, explain, deaths)

    async def open(self, method: Method, payload: bytes, deadline: float, timeout_s: float, window: int) -> Inlet:
        """Open a stream, once a connection stands.

        Raises:
            Lost: the connection ended meanwhile.
        """
        link = self._link
        if link is None or not link.usable or self._closed:
            link = await self._connected(f"stream of {method}", deadline, timeout_s)
        inlet = await link.open(method, payload, deadline, timeout_s, window)
        self.counters.streams += 1
        return inlet

    def _unreachable(self, what: str, budget_s: float) -> Unreachable:
        why = self._last_failure or "no answer yet to the attempt to connect"
        return Unreachable(f"{what} at {self.where}", why=f"not connected for {budget_s:.3g} s: {why}")

    async def _connected(self, what: str, deadline: float, budget_s: float) -> Link:
        """The connection, once it stands. All callers wait for one dialing task; the last to give up ends it."""
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

    async def _dial(self) -> Link:
        text = self._address if isinstance(self._address, str) else await self._address()
        address, self.where = parse_address(text), text
        link = Link(self, text)
        try:
            await self._open(address, link)
            await link.greeted
        except BaseException:
            if link in self.links:
                link.channel.close()
            raise
        return link

    async def _open(self, address: Address, link: Link) -> Channel:
        if address.scheme == "unix":
            return await stream.dial(address, link.attach)
        # Loaded on demand: roles that stay on their node never need ZeroMQ.
        from relax_rt.transport.rpc import zmq_channel

        return await zmq_channel.dial(address, link.attach, self.max_message_bytes, self._curve)

    def proven(self) -> None:
        """The server has answered: the next loss starts a new back-off."""
        if self._unproven:
            self._unproven = 0
            self._backoff.reset()


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

    def __init__(self, client: Client, api: type, timeout_s: float, window: int) -> None:
        self.__dict__["_relax_of"] = (client, api)
        for name, method in methods_of(api).items():
            make = self._streamer(client, method, timeout_s, window) if method.stream else None
            self.__dict__[name] = describe(make or self._caller(client, method, timeout_s), method)

    @staticmethod
    def _caller(client: Client, method: Method, timeout_s: float) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            return await client.call(method, method.bind(args, kwargs), timeout_s)

        return call

    @staticmethod
    def _streamer(client: Client, method: Method, timeout_s: float, window: int) -> Callable[..., RemoteStream[Any]]:
        def stream(*args: Any, **kwargs: Any) -> RemoteStream[Any]:
            return client.stream(method, method.bind(args, kwargs), timeout_s, window)

        return stream

    def __getattr__(self, name: str) -> Any:
        _, api = self.__dict__["_relax_of"]
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"{api.__name__} has no method {name}: {did_you_mean(name, methods_of(api))}")

    def __repr__(self) -> str:
        client, api = self.__dict__["_relax_of"]
        return f"<{api.__name__} at {client.peer.who if client.peer else client.where}>"
