"""Interface between client or server and the connections that carry their messages (unix_channel, zmq_channel)."""

from __future__ import annotations

from typing import Protocol


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


class Receiver(Protocol):
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
