"""Connections over unix stream sockets: length-prefixed messages on an asyncio or uvloop transport."""

from __future__ import annotations

import asyncio
import collections
import errno
import os
import pathlib
import socket
import stat
from collections.abc import Callable
from typing import cast

from relax_rt.transport.rpc import impair
from relax_rt.transport.rpc.channel import Address, AddressError, Channel, MessageReceiver
from relax_rt.transport.rpc.errors import ProtocolError, Unreachable
from relax_rt.transport.rpc.wire import HEADER, HELLO_MAX_BYTES, FrameDecoder

WRITE_HIGH_WATER_BYTES = 1024 * 1024
_JOIN_BELOW_BYTES = 64 * 1024
_BACKLOG = 512


class StreamChannel(asyncio.Protocol):
    """A connection on a stream socket. `attach` makes the receiver once the connection stands."""

    def __init__(self, peer: str, attach: Callable[[Channel], MessageReceiver]) -> None:
        self.peer = peer
        self.who = ""
        self.bytes_in = 0
        self.bytes_out = 0
        self._attach = attach
        self._decoder = FrameDecoder(HELLO_MAX_BYTES)
        self._waiting: collections.deque[bytes] = collections.deque()
        self._paused = False
        self._closed = False
        self._reason = ""
        self._drained: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport
        self._receiver: MessageReceiver

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        self._receiver = self._attach(self)

    def data_received(self, data: bytes) -> None:
        self.bytes_in += len(data)
        try:
            messages = self._decoder.feed(data)
        except ProtocolError as error:
            self._fail(str(error))
            return
        for message in messages:
            if not (impair.active and impair.hold(self, message, out=False)):
                self._deliver(message)

    def _deliver(self, message: bytes) -> None:
        # The receiver may pause or close while it takes one of several messages of a chunk.
        if self._paused:
            self._waiting.append(message)
        elif not self._closed:
            self._receiver.received(message)

    def pass_on(self, message: bytes, *, out: bool) -> None:
        """Impaired.pass_on: send or deliver a message that was held."""
        if not out:
            self._deliver(message)
        elif not self._closed:
            self._write(message)

    def connection_lost(self, exc: Exception | None) -> None:
        if impair.active and not self._closed:
            impair.ending(self, out=False)
        self._closed = True
        self._wake()
        self._waiting.clear()
        self._receiver.lost(self._reason or (f"the connection broke: {exc}" if exc else "the peer closed it"))

    def pause_writing(self) -> None:
        self._drained = self._drained or asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        self._wake()

    def limit(self, max_message_bytes: int) -> None:
        self._decoder.max_message_bytes = max_message_bytes

    def send(self, message: bytes) -> None:
        if self._closed or (impair.active and impair.hold(self, message, out=True)):
            return
        self._write(message)

    def _write(self, message: bytes) -> None:
        self.bytes_out += len(message) + HEADER.size
        header = HEADER.pack(len(message))
        if len(message) < _JOIN_BELOW_BYTES:
            self._transport.write(header + message)
        else:
            self._transport.write(header)
            self._transport.write(message)

    @property
    def congested(self) -> bool:
        return self._drained is not None

    async def drain(self) -> None:
        if self._drained is not None:
            await asyncio.shield(self._drained)

    def pause(self) -> None:
        if not self._paused and not self._closed:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self._paused or self._closed:
            return
        self._paused = False
        while self._waiting and not self._paused and not self._closed:
            self._receiver.received(self._waiting.popleft())
        # A receiver may have paused again meanwhile, or closed the connection.
        if not self._paused and not self._closed:
            self._transport.resume_reading()

    def close(self) -> None:
        self._fail("closed by this end")

    def _fail(self, reason: str) -> None:
        if not self._closed:
            if impair.active:
                impair.ending(self, out=True)
            self._closed, self._reason = True, reason
            self._transport.close()

    def abort(self) -> None:
        self._fail("ended by this end")
        self._transport.abort()

    def _wake(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None


class StreamListener:
    """A listening unix socket; removes its file when closed, unless a successor has put its own there."""

    def __init__(self, address: Address, server: asyncio.Server, identity: tuple[int, int]) -> None:
        self.address = str(address)
        self._path = pathlib.Path(address.path)
        self._server = server
        self._identity = identity

    def stop(self) -> None:
        """Accept no more connections."""
        self._server.close()
        try:
            entry = self._path.lstat()
        except FileNotFoundError:
            return
        if (entry.st_dev, entry.st_ino) == self._identity:
            self._path.unlink(missing_ok=True)

    async def close(self) -> None:
        """Nothing to wait for: the connections belong to the RPC server."""


async def listen(address: Address, attach: Callable[[Channel], MessageReceiver]) -> StreamListener:
    """Listen on a unix socket of mode 0600, in place of a stale one.

    Raises:
        AddressError: the directory is missing, no permission, or another process serves there.
    """
    sock, identity = _bind(address)
    try:
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(
            lambda: StreamChannel(f"a client of {address}", attach), sock=sock, backlog=_BACKLOG
        )
    except OSError as error:
        sock.close()
        raise AddressError(f"listening on {address}", why=os.strerror(error.errno or 0)) from error
    return StreamListener(address, server, identity)


def _bind(address: Address) -> tuple[socket.socket, tuple[int, int]]:
    """A bound socket and what identifies its file: device and inode."""
    path = pathlib.Path(address.path)
    if not path.parent.is_dir():
        raise AddressError(f"listening on {address}", why=f"the directory {path.parent} does not exist")
    _remove_stale(address, path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.bind(address.path)
        # Before listen() no one can connect, so the socket is never open to others, whatever the umask.
        path.chmod(0o600)
        entry = path.lstat()
    except OSError as error:
        sock.close()
        raise AddressError(f"listening on {address}", why=os.strerror(error.errno or 0)) from error
    return sock, (entry.st_dev, entry.st_ino)


def _remove_stale(address: Address, path: pathlib.Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise AddressError(f"listening on {address}", why=os.strerror(error.errno or 0)) from error
    if not stat.S_ISSOCK(mode):
        raise AddressError(f"listening on {address}", why="a file that is no socket lies there", hint="move it away")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(address.path)
    if code == errno.ECONNREFUSED:
        path.unlink(missing_ok=True)
    elif code in (0, errno.EAGAIN, errno.EINPROGRESS):
        raise AddressError(f"listening on {address}", why="another process serves there", hint="end it first")
    elif code != errno.ENOENT:
        raise AddressError(f"listening on {address}", why=os.strerror(code))


async def dial(address: Address, attach: Callable[[Channel], MessageReceiver]) -> Channel:
    """Connect to a unix socket.

    Raises:
        Unreachable: nothing listens there.
    """
    loop = asyncio.get_running_loop()
    try:
        _, channel = await loop.create_unix_connection(lambda: StreamChannel(str(address), attach), address.path)
    except OSError as error:
        raise Unreachable(str(address), why=os.strerror(error.errno) if error.errno else str(error)) from error
    return channel
