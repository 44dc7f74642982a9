"""Where a server is (``unix:///path`` on a node, ``tcp://host:port`` between nodes), and the connection to it.

Client and server speak through a `Channel`; unix_channel and zmq_channel implement it.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from typing import Protocol

from relax_rt.transport.rpc.errors import RelaxError

UNIX_PATH_MAX_BYTES = 107
"""The kernel's sun_path holds 108 bytes, the terminating NUL included."""


class AddressError(RelaxError):
    """An address is malformed, or nothing can listen on it."""


@dataclasses.dataclass(frozen=True)
class Address:
    """A parsed address.

    Attributes:
        scheme: ``unix`` (stream socket), ``tcp`` (ZeroMQ) or ``ipc`` (ZeroMQ on a unix socket).
        path: file system path for unix and ipc, else empty.
        host: host name or numeric address for tcp, without brackets.
        port: 0 asks a server for any free port.
    """

    scheme: str
    path: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.scheme != "tcp":
            return f"{self.scheme}://{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether only processes of this machine can reach it."""
        if self.scheme != "tcp" or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(text: str) -> Address:
    """Parse an address.

    Raises:
        AddressError: unknown scheme, relative or overlong path, missing host, port not in 0..65535.
    """
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in ("unix", "tcp", "ipc"):
        raise AddressError(f"address {text!r}", why="not an address", hint="use unix:///path or tcp://host:port")
    if scheme == "tcp":
        host, separator, port = rest.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not separator or not host:
            raise AddressError(f"address {text!r}", why="no host and port", hint="use tcp://host:port")
        if not (port.isascii() and port.isdigit() and int(port) <= 65535):
            raise AddressError(f"address {text!r}", why=f"the port {port!r} is not a number from 0 to 65535")
        return Address("tcp", host=host, port=int(port))
    if not rest.startswith("/"):
        raise AddressError(f"address {text!r}", why="the path is not absolute", hint=f"write {scheme}:///{rest}")
    size = len(rest.encode())
    if size > UNIX_PATH_MAX_BYTES:
        raise AddressError(
            f"address {text!r}",
            why=f"the path has {size} bytes; the kernel allows {UNIX_PATH_MAX_BYTES} for a socket",
            hint="use a shorter directory",
        )
    return Address(scheme, path=rest)


class ConnectionLost(Exception):
    """The connection ended under a call.

    Attributes:
        sent: the call was written, so it may have been carried out.
        who: the incarnation at the other end, as ``reward/0#7``; empty if it had not greeted.
        where: the other end, for messages.
    """

    def __init__(self, reason: str, *, sent: bool, who: str = "", where: str = "") -> None:
        super().__init__(reason)
        self.sent, self.who, self.where = sent, who, where


class NoReply(Exception):
    """The deadline and its grace have passed without an answer."""


class MessageReceiver(Protocol):
    """The side of a connection that takes messages; called on the event loop, never concurrently."""

    def received(self, message: bytes) -> None:
        """A whole message came in."""

    def lost(self, reason: str) -> None:
        """The connection ended; called once, also after `Channel.close`."""


class Channel(Protocol):
    """One connection that carries messages in order, in both directions."""

    peer: str
    """Where the other end is, for logs."""
    who: str
    """The slot at the other end; set by the RPC layer once it has greeted, empty before."""
    bytes_in: int
    bytes_out: int

    def limit(self, max_message_bytes: int) -> None:
        """Accept messages up to this size from now on; before, only as large as a greeting."""

    def send(self, message: bytes) -> None:
        """Write a message, or keep it in a buffer; await `drain` while `congested`. Ignored once closed."""

    @property
    def congested(self) -> bool:
        """The write buffer is above its high-water mark."""

    async def drain(self) -> None:
        """Wait until the write buffer is below its mark, or the connection is lost. Has no deadline of its own."""

    def pause(self) -> None:
        """Deliver no more messages until `resume`; what can be left unread stays unread."""

    def resume(self) -> None:
        """Undo `pause`."""

    def close(self) -> None:
        """End the connection; what was written is still sent if the peer reads."""

    def abort(self) -> None:
        """End the connection at once; what was written and not yet sent is lost."""
