"""How ZeroMQ sockets are set up: bounds, heartbeats, keys, and the address that a listening one is bound to."""

from __future__ import annotations

import os
import socket
from typing import Any, Protocol

import zmq

from relax_rt.transport.rpc.address import Address, AddressError
from relax_rt.transport.rpc.zmq_keys import CurveKeys

HEARTBEAT_INTERVAL_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
"""After this silence of the wire a connection is taken for cut (a partition, a host that lost power)."""


class Authenticator(Protocol):
    """ZeroMQ's, in a thread or on an event loop."""

    def start(self) -> None: ...

    def configure_curve_callback(self, domain: str, credentials_provider: Any) -> None: ...


class _Admission:
    """Tells the authenticator which keys may come in."""

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
    """For a socket that connects once: one that came back by itself would hide that what was sent on the old
    connection is lost."""
    sock.setsockopt(zmq.RECONNECT_IVL, -1)
    if keys is not None:
        sock.curve_secretkey, sock.curve_publickey = keys.secret, keys.public
        sock.curve_serverkey = keys.server_key


def as_server(sock: zmq.Socket[Any], keys: CurveKeys | None, authenticator: Authenticator | None) -> None:
    """For a ROUTER: a send to a peer that is gone fails, and only who has an admitted key gets anything."""
    sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if keys is not None and authenticator is not None:
        authenticator.configure_curve_callback("*", _Admission(keys))
        authenticator.start()
        sock.curve_secretkey, sock.curve_publickey = keys.secret, keys.public
        sock.curve_server = True


def check_exposure(address: Address, keys: CurveKeys | None, hint: str) -> None:
    """Raises:
    AddressError: other machines could come in without keys.
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
