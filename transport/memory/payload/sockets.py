"""What the threads of both ends wait on, and the listening socket."""

from __future__ import annotations

import contextlib
import os

import zmq
from zmq.auth.thread import ThreadAuthenticator

from relax_rt.transport.rpc.address import AddressError, parse_address
from relax_rt.transport.rpc.identity import CurveKeys
from relax_rt.transport.rpc.zmq_channel import as_server, bind, check_exposure, configure, numeric


class Wakeup:
    """Wakes a thread that polls sockets."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def set(self) -> None:
        """Safe in any thread, and in the middle of anything."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def __del__(self) -> None:
        # Not before: who still means to wake the thread must not write to a descriptor that is something else by now.
        os.close(self.fd)


class Listening:
    """A bound ROUTER with a context, and io threads, of its own. Only its own thread may use the socket.

    Raises:
        AddressError: malformed, in use, not of this machine, or open to other machines without keys.
    """

    def __init__(
        self, address: str, keys: CurveKeys | None, *, io_threads: int, max_message_bytes: int, high_water_messages: int
    ) -> None:
        parsed = parse_address(address)
        if parsed.scheme == "unix":
            raise AddressError(f"listening on {address}", why="payloads go over tcp:// or ipc://")
        check_exposure(parsed, keys, "pass keys=")
        at = numeric(parsed)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads)
        self._authenticator = ThreadAuthenticator(self._context) if keys is not None else None
        self.sock = self._context.socket(zmq.ROUTER)
        configure(self.sock, linger_ms=0, max_message_bytes=max_message_bytes, high_water_messages=high_water_messages)
        try:
            as_server(self.sock, keys, self._authenticator)
            self.address = str(bind(self.sock, parsed, at))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Blocks until nothing of it is left."""
        self.sock.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
