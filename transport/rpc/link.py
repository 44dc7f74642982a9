"""One connection of a client, and the calls and streams on it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import msgspec

from relax_rt.transport.rpc import codec
from relax_rt.transport.rpc.channel import Channel, Lost, Silent
from relax_rt.transport.rpc.errors import DeadlineExceeded, ProtocolError, Unreachable
from relax_rt.transport.rpc.faults import error_of
from relax_rt.transport.rpc.interface import Method
from relax_rt.transport.rpc.items import Inlet
from relax_rt.transport.rpc.wire import Cancel, End, Fault, Grant, HelloFrame, Item, Open, Reply, Request, Retire, Tell

if TYPE_CHECKING:
    from relax_rt.transport.rpc.client import Client


class Link:
    """One connection of the client and the calls on it."""

    channel: Channel

    def __init__(self, client: Client, address: str) -> None:
        loop = asyncio.get_running_loop()
        self.client = client
        self.address = address
        self.peer: HelloFrame | None = None
        self.dead = False
        self.retired = False
        """The server begins nothing more that comes on this connection."""
        self.pending: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self.streams: dict[int, Inlet] = {}
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
        return not self.dead and not self.retired

    def name(self) -> str:
        return f"{self.peer.who} ({self.address})" if self.peer else self.address

    def attach(self, channel: Channel) -> Link:
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
        self._fail(self._loss(f"{self.name()} was lost: {reason}", sent=True))
        if not self.ended.done():
            self.ended.set_result(None)

    def _loss(self, reason: str, *, sent: bool) -> Lost:
        return Lost(reason, sent=sent, who=str(self.peer.who) if self.peer else "", where=self.name())

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
        streams, self.streams = self.streams, {}
        for inlet in streams.values():
            inlet.finish(error)

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
        answer = codec.decode_from_server(message)
        self.client.proven()
        if isinstance(answer, Retire):
            self.retired = True
            self._reason = "it is closing"
            self._part()
            return
        if isinstance(answer, Item):
            inlet = self.streams.get(answer.id)
            # Of a stream that was cancelled items may still be under way.
            if inlet is not None:
                inlet.put(answer.value)
            return
        if answer.id in self.streams or isinstance(answer, End):
            self._ended(answer)
            return
        waiting = self.pending.pop(answer.id, None)
        if waiting is None or waiting.done():
            self.client.counters.late_replies += 1
        elif isinstance(answer, Reply):
            waiting.set_result(answer.result)
        else:
            self.client.counters.faults += 1
            waiting.set_exception(error_of(answer))
        self._part()

    def _part(self) -> None:
        """End a connection that the server has retired, once nothing is under way on it."""
        if self.retired and not self.dead and not self.pending and not self.streams:
            self.channel.close()

    def _ended(self, answer: End | Fault | Reply) -> None:
        inlet = self.streams.get(answer.id)
        if inlet is None:
            return
        self.leave(answer.id, cancel=False)
        if isinstance(answer, Fault):
            self.client.counters.faults += 1
            inlet.finish(error_of(answer))
        else:
            inlet.finish(StopAsyncIteration())

    async def open(self, method: Method, payload: bytes, deadline: float, timeout_s: float, window: int) -> Inlet:
        """Open a stream. It counts as a call of the connection until it ends."""
        await self._room(method, deadline)
        try:
            if not self.usable:
                raise self._loss(self._reason, sent=False)
            self._last_id += 1
            number = self._last_id
            self._write(method, Open(number, method.api, method.name, timeout_s, window, msgspec.Raw(payload)))
        except BaseException:
            self._slots.release()
            raise
        inlet = self.streams[number] = Inlet(self, number, window)
        return inlet

    def grant(self, number: int, credit: int) -> None:
        """The consumer of a stream has taken items."""
        if not self.dead:
            self.channel.send(codec.encode_message(Grant(number, credit)))

    def leave(self, number: int, *, cancel: bool) -> None:
        """A stream has ended here; with `cancel` the server is told."""
        if self.streams.pop(number, None) is not None:
            self._slots.release()
            if cancel and not self.dead:
                self.channel.send(codec.encode_message(Cancel(number)))
            self._part()

    async def request(self, method: Method, payload: bytes, deadline: float, grace_s: float) -> msgspec.Raw:
        """Send a request and wait for its answer, for grace_s beyond the deadline at most.

        The grace lets the server's own verdict (handler too slow) arrive, which tells a slow one from a dead one.
        """
        await self._room(method, deadline)
        try:
            if not self.usable:
                raise self._loss(self._reason, sent=False)
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
        if not self.usable:
            raise self._loss(self._reason, sent=False)
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

    def _write(self, method: Method, message: Request | Tell | Open) -> None:
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
            answer.set_exception(Silent())

    def _forget(self, number: int) -> None:
        """Give up on a request, and tell the server."""
        if self.pending.pop(number, None) is not None and not self.dead:
            self.channel.send(codec.encode_message(Cancel(number)))
            self._part()
