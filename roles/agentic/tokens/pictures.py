"""The pictures of a session: messages name them by digest, so that histories stay short and are compared cheaply."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from relax_rt.roles.agentic.tokens.types import Message
from relax_rt.roles.data.media.pictures import IMAGE, MOST_PICTURES, digest_in, is_picture
from relax_rt.transport.rpc.errors import Refused

if TYPE_CHECKING:
    from relax_rt.roles.data.media.sight import Looked

MOST_MEDIA_BYTES = 16 << 20
"""Of a session, where nobody says less: a message between roles holds them all."""


class Picture(NamedTuple):
    """Encoded, and the tokens that stand for it."""

    data: bytes
    tokens: tuple[int, ...]


class Pictures:
    """Those that a ledger was shown.

    Args:
        most_bytes: of all together, encoded.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._held: dict[str, Picture] = {}

    def add(self, looked: Looked) -> Message:
        """See TokenLedger.show."""
        part = {"type": IMAGE, "digest": looked.digest}
        if looked.digest in self._held:
            return part
        if len(self._held) >= MOST_PICTURES:
            raise Refused("another picture", why=f"the episode has {MOST_PICTURES}, the bound", hint="show fewer")
        if self._bytes + len(looked.data) > self._most_bytes:
            why = f"with it the episode's pictures have {self._bytes + len(looked.data)} bytes, at most "
            hint = (
                "show fewer or smaller ones, or raise roles.env.media_kib (of programs roles.gateway.session_media_kib)"
            )
            raise Refused(f"a picture of {len(looked.data)} bytes", why=f"{why}{self._most_bytes}", hint=hint)
        # Its tensors are the engine's affair.
        self._held[looked.digest] = Picture(looked.data, looked.tokens)
        self._bytes += len(looked.data)
        return part

    def data(self, digests: Iterable[str]) -> dict[str, bytes]:
        """Encoded pictures."""
        return {digest: self._held[digest].data for digest in digests}

    def of(self, messages: Sequence[Message]) -> list[Picture]:
        """The pictures in messages, in order.

        Raises:
            Refused: one was not shown before.
        """
        parts = (
            part for message in messages if isinstance(message.get("content"), list) for part in message["content"]
        )
        found = []
        for part in parts:
            if is_picture(part):
                if (held := self._held.get(digest_in(part))) is None:
                    why = "the model's processor has not looked at it, or the model reads text alone"
                    raise Refused("a picture in a message", why=why)
                found.append(held)
        return found
