"""What the sockets of both ends have in common, and how a listening one is made."""

from __future__ import annotations

import contextlib
import os
import socket

import zmq
from zmq.auth.thread import ThreadAuthenticator

from relax_rt.transport.address import Address, AddressError, parse_address
from relax_rt.transport.zmq_channel import HEARTBEAT_INTERVAL_MS, HEARTBEAT_TIMEOUT_MS
from relax_rt.transport.zmq_keys import CurveKeys


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


def configure(sock: zmq.Socket[bytes], *, max_message_bytes: int, high_water_messages: int) -> None:
    """Bounds and heartbeats of either end."""
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.MAXMSGSIZE, max_message_bytes),
        (zmq.SNDHWM, high_water_messages),
        (zmq.RCVHWM, high_water_messages),
        (zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS),
        (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
        (zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS),
        (zmq.IPV6, 1),
    ):
        sock.setsockopt(option, value)


class _Admission:
    """Tells the authenticator which keys may come in."""

    def __init__(self, keys: CurveKeys) -> None:
        self._admitted = keys.admitted

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._admitted


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
        if keys is None and not parsed.loopback:
            raise AddressError(
                f"listening on {address}", why="other machines reach it and there are no CURVE keys", hint="pass keys="
            )
        endpoint = _numeric(parsed)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads)
        self._authenticator: ThreadAuthenticator | None = None
        self.sock = self._context.socket(zmq.ROUTER)
        configure(self.sock, max_message_bytes=max_message_bytes, high_water_messages=high_water_messages)
        self.sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            if keys is not None:
                self._authenticate(keys)
            self.sock.bind(endpoint)
            if parsed.scheme == "ipc":
                os.chmod(parsed.path, 0o600)  # noqa: PTH101 - a string from the address
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise AddressError(f"listening on {address}", why=zmq.strerror(error.errno or 0)) from error
        if parsed.scheme == "tcp":
            port = self.sock.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
            parsed = Address("tcp", host=parsed.host, port=int(port))
        self.address = str(parsed)

    def _authenticate(self, keys: CurveKeys) -> None:
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.configure_curve_callback("*", _Admission(keys))
        self._authenticator.start()
        self.sock.curve_secretkey, self.sock.curve_publickey = keys.secret, keys.public
        self.sock.curve_server = True

    def close(self) -> None:
        """Blocks until nothing of it is left."""
        self.sock.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


def _numeric(address: Address) -> str:
    """The address as ZeroMQ binds it, which takes no host names."""
    if address.scheme != "tcp" or address.host == "*":
        return str(address)
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(f"listening on {address}", why=f"the host is not known: {error}") from error
    return str(Address("tcp", host=str(found[0][4][0]), port=address.port))
