"""Connections between nodes: the same messages over ZeroMQ, a ROUTER at the server, a DEALER at each client.

ZeroMQ hides connections; the RPC layer needs to see them end. A client never lets its socket reconnect by itself and
watches the socket's monitor: a loss ends the channel, and the client dials again with a new greeting. The server
pings every peer: a send to one that is gone fails, and ends that peer's channel.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import os
import socket
from collections.abc import Callable
from typing import Any, Protocol

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from relax_rt.transport.rpc import impair
from relax_rt.transport.rpc.channel import Address, AddressError, Channel, MessageReceiver
from relax_rt.transport.rpc.errors import Unreachable
from relax_rt.transport.rpc.identity import CurveKeys

SEND_HIGH_WATER_MESSAGES = 256
PING_INTERVAL_S = 0.5

_PING = b""
_CLOSED = b"\xc1"
"""The server ends the channel: a byte that no message begins with. Its socket, which others share, stays."""
_LINGER_MS = 500
_RETRY_SEND_S = 0.005
_REMEMBER_REFUSED = 1024
_ENDINGS = {
    zmq.EVENT_DISCONNECTED: "the peer closed it",
    zmq.EVENT_CLOSED: "nothing answers there",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the server does not admit this process's key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "only one end uses CURVE keys, or the peer does not speak ZeroMQ",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the secure handshake failed: the keys do not match",
}
HEARTBEAT_INTERVAL_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
"""After this silence of the wire a connection is taken for cut (a partition, a host that lost power)."""


class _Gone(Exception):
    """The peer of a channel is no longer connected."""


class _ZmqChannel:
    """Base of both ends: an outbox for messages that ZeroMQ does not take at once, and the end of the channel."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.who = ""
        self.bytes_in = 0
        self.bytes_out = 0
        self._loop = asyncio.get_running_loop()
        self._outbox: collections.deque[bytes] = collections.deque()
        self._drained: asyncio.Future[None] | None = None
        self._ended = False
        self._receiver: MessageReceiver

    def limit(self, max_message_bytes: int) -> None:
        """Nothing to do: the bound is a socket option; ZeroMQ disconnects a peer that exceeds it."""

    def send(self, message: bytes) -> None:
        if not (self._ended or (impair.active and impair.hold(self, message, out=True))):
            self._write(message)

    def pass_on(self, message: bytes, *, out: bool) -> None:
        """Impaired.pass_on: send or deliver a message that was held."""
        if self._ended:
            return
        if out:
            self._write(message)
        else:
            self._receiver.received(message)

    def _write(self, message: bytes) -> None:
        self.bytes_out += len(message)
        if self._outbox:
            self._outbox.append(message)
            return
        try:
            if not self._push(message):
                self._outbox.append(message)
                self._drained = self._loop.create_future()
                self._loop.call_later(_RETRY_SEND_S, self._flush)
        except _Gone:
            self._end("the peer is gone")

    @property
    def congested(self) -> bool:
        return bool(self._outbox)

    async def drain(self) -> None:
        if self._drained is not None:
            await asyncio.shield(self._drained)

    def _flush(self) -> None:
        try:
            while self._outbox and self._push(self._outbox[0]):
                self._outbox.popleft()
        except _Gone:
            self._end("the peer is gone")
        if self._outbox:
            self._loop.call_later(_RETRY_SEND_S, self._flush)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    def close(self) -> None:
        self._end("closed by this end")

    def abort(self) -> None:
        self._end("ended by this end")

    def _end(self, reason: str) -> None:
        if self._ended:
            return
        if impair.active:
            impair.ending(self, out=True)
        self._ended = True
        self._outbox.clear()
        self._wake()
        self._release()
        # Later, so that no caller of `send` or `close` is re-entered.
        self._loop.call_soon(lambda: self._receiver.lost(reason))

    def _push(self, message: bytes) -> bool:
        """Hand a message to ZeroMQ; False when its queue is full. Raises _Gone."""
        raise NotImplementedError

    def _release(self) -> None:
        raise NotImplementedError


def _send_now(sock: zmq.asyncio.Socket, parts: list[bytes]) -> bool:
    sent: Any = sock.send_multipart(parts, flags=zmq.NOBLOCK)
    error = sent.exception()
    if error is None:
        return True
    if isinstance(error, zmq.Again):
        return False
    raise _Gone(str(error))


class DealerChannel(_ZmqChannel):
    """The client's end: one socket for one connection."""

    def __init__(
        self, address: Address, sock: zmq.asyncio.Socket, attach: Callable[[Channel], MessageReceiver]
    ) -> None:
        super().__init__(str(address))
        self._sock = sock
        self._monitor = sock.get_monitor_socket(sum(_ENDINGS))
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._receiver = attach(self)
        if not self._ended:
            self._tasks = [self._loop.create_task(self._watch()), self._loop.create_task(self._read())]

    def pause(self) -> None:
        self._unpaused.clear()

    def resume(self) -> None:
        self._unpaused.set()

    async def _read(self) -> None:
        try:
            while not self._ended:
                parts = await self._sock.recv_multipart()
                if parts == [_PING]:
                    continue
                if parts == [_CLOSED]:
                    self._end("the peer closed it")
                    return
                self.bytes_in += len(parts[0])
                await self._unpaused.wait()
                if not (impair.active and impair.hold(self, parts[0], out=False)):
                    self._receiver.received(parts[0])
        except zmq.ZMQError as error:
            self._end(str(error))

    async def _watch(self) -> None:
        reason = "the peer closed it"
        try:
            event = await recv_monitor_message(self._monitor)
            reason = _ENDINGS.get(zmq.Event(event["event"]), reason)
        except zmq.ZMQError as error:
            reason = str(error)
        self._end(reason)

    def _push(self, message: bytes) -> bool:
        return _send_now(self._sock, [message])

    def _release(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._sock.disable_monitor()
        self._monitor.close(linger=0)
        self._sock.close(linger=_LINGER_MS)


class RouterChannel(_ZmqChannel):
    """The server's end: one peer of a shared socket."""

    def __init__(self, listener: RouterListener, identity: bytes) -> None:
        super().__init__(f"peer {identity.hex()} of {listener.address}")
        self.identity = identity
        self._listener = listener

    def accept(self, attach: Callable[[Channel], MessageReceiver]) -> None:
        self._receiver = attach(self)

    def deliver(self, message: bytes) -> None:
        self.bytes_in += len(message)
        if not (self._ended or (impair.active and impair.hold(self, message, out=False))):
            self._receiver.received(message)

    def pause(self) -> None:
        if not self._ended:
            self._listener.pause(self)

    def resume(self) -> None:
        self._listener.resume(self)

    def _push(self, message: bytes) -> bool:
        return _send_now(self._listener.sock, [self.identity, message])

    def _release(self) -> None:
        with contextlib.suppress(_Gone):
            self._push(_CLOSED)
        self._listener.forget(self)


class RouterListener:
    """A listening ROUTER socket and the peers that talk through it."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        sock: zmq.asyncio.Socket,
        address: str,
        attach: Callable[[Channel], MessageReceiver],
        authenticator: AsyncioAuthenticator | None,
    ) -> None:
        self.address = address
        self.sock = sock
        self._context = context
        self._attach = attach
        self._authenticator = authenticator
        self._channels: dict[bytes, RouterChannel] = {}
        self._refused: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        self._paused: set[RouterChannel] = set()
        self._readable = asyncio.Event()
        self._readable.set()
        self._stopped = False
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._ping())]

    def pause(self, channel: RouterChannel) -> None:
        """Read nothing while one peer is at its bound: the socket cannot be left unread for one peer alone."""
        self._paused.add(channel)
        self._readable.clear()

    def resume(self, channel: RouterChannel) -> None:
        self._paused.discard(channel)
        if not self._paused:
            self._readable.set()

    def forget(self, channel: RouterChannel) -> None:
        self._channels.pop(channel.identity, None)
        self.resume(channel)
        # Drop what it still sends, instead of taking it for a bad greeting each time.
        self._refused[channel.identity] = None
        if len(self._refused) > _REMEMBER_REFUSED:
            self._refused.popitem(last=False)

    def stop(self) -> None:
        """Accept no new peers."""
        self._stopped = True

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        if self._authenticator is not None:
            self._authenticator.stop()
        self.sock.close(linger=_LINGER_MS)
        # Blocks until the lingering messages are out.
        await asyncio.to_thread(self._context.term)

    async def _read(self) -> None:
        while True:
            await self._readable.wait()
            parts = await self.sock.recv_multipart()
            if len(parts) != 2 or parts[0] in self._refused:
                continue
            channel = self._channels.get(parts[0])
            if channel is None:
                if self._stopped:
                    continue
                channel = RouterChannel(self, parts[0])
                self._channels[channel.identity] = channel
                channel.accept(self._attach)
            channel.deliver(parts[1])

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            for channel in list(self._channels.values()):
                if not channel.congested:
                    channel.send(_PING)


def _configure(sock: zmq.asyncio.Socket, max_message_bytes: int) -> None:
    configure(
        sock,
        linger_ms=_LINGER_MS,
        max_message_bytes=max_message_bytes,
        high_water_messages=SEND_HIGH_WATER_MESSAGES,
    )


async def listen(
    address: Address, attach: Callable[[Channel], MessageReceiver], max_message_bytes: int, keys: CurveKeys | None
) -> RouterListener:
    """Listen at a tcp (or ipc) address; with keys, only peers whose key is admitted get anything.

    Raises:
        AddressError: the port is in use, the host is not of this machine, or it is open to others without keys.
    """
    check_exposure(address, keys, "pass curve=")
    at = await asyncio.to_thread(numeric, address)
    context = zmq.asyncio.Context()
    sock = context.socket(zmq.ROUTER)
    _configure(sock, max_message_bytes)
    authenticator = AsyncioAuthenticator(context) if keys is not None else None
    try:
        as_server(sock, keys, authenticator)
        real = bind(sock, address, at)
    except BaseException:
        if authenticator is not None:
            authenticator.stop()
        sock.close(linger=0)
        context.term()
        raise
    return RouterListener(context, sock, str(real), attach, authenticator)


async def dial(
    address: Address, attach: Callable[[Channel], MessageReceiver], max_message_bytes: int, keys: CurveKeys | None
) -> Channel:
    """Begin to connect. The server's greeting confirms the connection; `MessageReceiver.lost` reports its failure.

    Raises:
        AddressError: port 0.
        Unreachable: the process has no room for another socket.
    """
    if address.scheme == "tcp" and address.port == 0:
        raise AddressError(f"connecting to {address}", why="port 0 is for listening", hint="use the real port")
    try:
        sock = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    except zmq.ZMQError as error:
        hint = "raise the limit of open files" if error.errno == errno.EMFILE else ""
        raise Unreachable(str(address), why=str(error), hint=hint) from error
    _configure(sock, max_message_bytes)
    as_client(sock, keys)
    channel = DealerChannel(address, sock, attach)
    try:
        sock.connect(str(address))
    except zmq.ZMQError as error:
        channel.abort()
        raise Unreachable(str(address), why=str(error)) from error
    return channel


# --- sockets, also of the payload server


class Authenticator(Protocol):
    """ZeroMQ's authenticator, in a thread or on an event loop."""

    def start(self) -> None: ...

    def configure_curve_callback(self, domain: str, credentials_provider: Any) -> None: ...


class _Admission:
    """Credentials provider: which keys are admitted."""

    def __init__(self, keys: CurveKeys) -> None:
        self._admitted = keys.admitted

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._admitted


def configure(sock: zmq.Socket[Any], *, linger_ms: int, max_message_bytes: int, high_water_messages: int) -> None:
    """Bounds and heartbeats of either end."""
    for option, value in (
        (zmq.LINGER, linger_ms),
        (zmq.MAXMSGSIZE, max_message_bytes),
        (zmq.SNDHWM, high_water_messages),
        (zmq.RCVHWM, high_water_messages),
        (zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS),
        (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
        (zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS),
        (zmq.IPV6, 1),
    ):
        sock.setsockopt(option, value)


def as_client(sock: zmq.Socket[Any], keys: CurveKeys | None) -> None:
    """Options of a client's socket. It never reconnects by itself: that would hide the loss of what was in flight."""
    sock.setsockopt(zmq.RECONNECT_IVL, -1)
    if keys is not None:
        sock.curve_secretkey, sock.curve_publickey = keys.secret, keys.public
        sock.curve_serverkey = keys.server_key


def as_server(sock: zmq.Socket[Any], keys: CurveKeys | None, authenticator: Authenticator | None) -> None:
    """Options of a ROUTER: a send to a peer that is gone fails, and only peers with an admitted key are served."""
    sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if keys is not None and authenticator is not None:
        authenticator.configure_curve_callback("*", _Admission(keys))
        authenticator.start()
        sock.curve_secretkey, sock.curve_publickey = keys.secret, keys.public
        sock.curve_server = True


def check_exposure(address: Address, keys: CurveKeys | None, hint: str) -> None:
    """Raises:
    AddressError: other machines could connect without keys.
    """
    if keys is None and not address.loopback:
        raise AddressError(
            f"listening on {address}", why="other machines reach it and there are no CURVE keys", hint=hint
        )


def numeric(address: Address) -> Address:
    """The address as ZeroMQ binds it, which takes no host names. Blocks while the name is looked up.

    Raises:
        AddressError: the host is not known.
    """
    if address.scheme != "tcp" or address.host == "*":
        return address
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(f"listening on {address}", why=f"the host is not known: {error}") from error
    return Address("tcp", host=str(found[0][4][0]), port=address.port)


def bind(sock: zmq.Socket[Any], address: Address, at: Address) -> Address:
    """Bind to `at`, the numeric form of `address`; answers with the address under which it is found.

    Raises:
        AddressError: in use, or not of this machine.
    """
    try:
        sock.bind(str(at))
        if address.scheme == "ipc":
            os.chmod(address.path, 0o600)  # noqa: PTH101 - a string from the address, nothing to gain from a Path
    except (zmq.ZMQError, OSError) as error:
        raise AddressError(f"listening on {address}", why=zmq.strerror(error.errno or 0)) from error
    if address.scheme != "tcp":
        return address
    port = sock.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return Address("tcp", host=address.host, port=int(port))
