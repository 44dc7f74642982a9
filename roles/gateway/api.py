"""What the gateway offers to roles of the run: sessions, each an episode whose tokens it keeps."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

import msgspec

from relax_rt.roles.agentic.tokens.types import Episode
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.interface import idempotent

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200, pattern=r"^[\x21-\x7e]+$")]
Nonce = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[A-Za-z0-9_-]*$")]
Count = Annotated[int, msgspec.Meta(ge=0)]
UsedUp = Literal["", "turns", "tokens"]
LEASE_S = 30.0
"""Sessions of an owner who has not renewed them for so long are forgotten."""


class SessionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a session, and how it is sampled; 0: the gateway's setting.

    Attributes:
        tokens: of its episode, prompts and answers of all branches together.
        new_tokens: of one answer.
        calls: that may be answered.
        group: whom it counts for where calls wait for their turn, say the group of samples; empty: itself.
        seed: of its answers, with the call's place and the caller's seed; 0: by its name.
        temperature: None: the run's.
        weights: engines that may answer. lag: those as far behind as roles.gateway.lag says; episode: for the first
            answer those at the newest weights, for the others those no older than its oldest token; newest: no others.
        routing: its episode has routing rows, of engines that were started for them.
    """

    tokens: Count = 0
    new_tokens: Count = 0
    calls: Count = 0
    group: Annotated[str, msgspec.Meta(max_length=200)] = ""
    seed: Count = 0
    temperature: Annotated[float, msgspec.Meta(ge=0, le=10)] | None = None
    weights: Literal["lag", "episode", "newest"] = "lag"
    routing: bool = False


class Access(msgspec.Struct, frozen=True):
    """How a program reaches the gateway.

    Attributes:
        base_url, api_key: of an OpenAI client. For Anthropic's, the base URL goes without ``/v1``.
        gateway: the incarnation that has the session: with another one it is gone.
        node: where `base_url` holds; empty in a run of one node.
        remote_url: the base URL on other nodes; empty: it cannot be reached from them.
    """

    base_url: str
    api_key: str
    gateway: str = ""
    node: str = ""
    remote_url: str = ""


class Said(msgspec.Struct, frozen=True):
    """An answer, trained or not: its id in the episode, the message as the caller was told it, and how it ended.

    Attributes:
        response: id of what it came in, as the caller knows it. choice: its index there.
    """

    id: str
    message: dict[str, Any]
    finish_reason: str
    response: str = ""
    choice: int = 0


class Closed(msgspec.Struct, frozen=True, kw_only=True):
    """A session that has ended.

    Attributes:
        episode: what is trained of it.
        said: all answers that callers were given, in the order of their calls, then of their choices. One that a change
            of history has dropped is among them, and not trained.
        used_up: what a call was refused for: the session's turns or tokens; empty if none was.
        waiting: calls that were at work when it was closed.
        trouble: the error of the runtime's own that the last call ended with; empty if it was answered.
        never: asked again, it would end so again.
        left: answers that their caller left before the end, of which nothing is trained.
    """

    episode: Episode
    said: tuple[Said, ...] = ()
    used_up: UsedUp = ""
    waiting: int = 0
    trouble: str = ""
    never: bool = False
    left: int = 0


class GatewayApi(Protocol):
    """Sessions of one gateway. A gateway that dies takes them along: then there is none of that name any more.

    A session is known by its name and a nonce of whoever opens it, so that what an earlier one of that name left behind
    (a program, a call that comes late) reaches nothing of this one.
    """

    @idempotent
    async def open(
        self, session: Name, limits: SessionLimits, nonce: Nonce = "", owner: Incarnation | None = None
    ) -> Access:
        """Begin an episode; the same once more if it is open with this nonce and these limits.

        Args:
            owner: must `renew` what he has opened. Another nonce of his takes the place of an earlier one of this name,
                and a newer epoch of his slot that of all that older ones opened. None: the session is forgotten after
                roles.gateway.session_idle_s without a call.

        Raises:
            Refused: it is open with others, or too many are; or engines tell no routing rows, and it wants them.
            StaleEpoch: the owner's slot has a newer epoch.
        """

    @idempotent
    async def renew(self, owner: Incarnation) -> str:
        """Keep the owner's sessions for another `LEASE_S`; the answer is `Access.gateway`, as it is now.

        Raises:
            StaleEpoch: the owner's slot has a newer epoch.
        """

    @idempotent
    async def close(self, session: Name, nonce: Nonce = "") -> Closed:
        """End it: calls at work are ended, what was sampled in those that were answered is the episode. It can be had
        again until it is forgotten.

        Raises:
            Refused: none of this name and nonce is open.
        """

    @idempotent
    async def forget(self, session: Name, nonce: Nonce = "") -> None:
        """The episode has arrived, or is not wanted: end it if it is open, and forget it. Without effect if there is
        none."""

    @idempotent
    async def where(self) -> str:
        """The base URL, ``http://HOST:PORT/v1``."""
