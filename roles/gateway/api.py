"""What the gateway offers to roles of the run: sessions, each an episode whose tokens it keeps."""

from __future__ import annotations

from typing import Annotated, Protocol

import msgspec

from relax_rt.roles.agentic.tokens import Episode
from relax_rt.transport.interface import idempotent

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200, pattern=r"^[\x21-\x7e]+$")]
Count = Annotated[int, msgspec.Meta(ge=0)]


class SessionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a session; 0: the gateway's setting.

    Attributes:
        tokens: of its episode, prompts and answers of all branches together.
        new_tokens: of one answer.
        calls: that may be answered.
        group: whom it counts for where calls wait for their turn, say the group of samples; empty: itself.
    """

    tokens: Count = 0
    new_tokens: Count = 0
    calls: Count = 0
    group: Annotated[str, msgspec.Meta(max_length=200)] = ""


class Access(msgspec.Struct, frozen=True):
    """How a program reaches the gateway: the base URL and the API key of an OpenAI client. For Anthropic's, the base
    URL goes without ``/v1``."""

    base_url: str
    api_key: str


class GatewayApi(Protocol):
    """Sessions of one gateway. A gateway that dies takes them along: then there is none of that name any more."""

    @idempotent
    async def open(self, session: Name, limits: SessionLimits) -> Access:
        """Begin an episode; the same once more if it is open with these limits.

        Raises:
            Refused: it is open with others, or too many are.
        """

    async def close(self, session: Name) -> Episode:
        """End it: calls at work are ended, what was sampled in those that were answered is the episode.

        Raises:
            Refused: none of this name is open.
        """

    @idempotent
    async def cancel(self, session: Name) -> None:
        """End it and forget its tokens; without effect if it is not open."""

    @idempotent
    async def where(self) -> str:
        """The base URL, ``http://HOST:PORT/v1``."""
