"""Sessions of a gateway, as a role that plays episodes uses them: the interface and its client."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Coroutine
from typing import Annotated, Any, Literal, Protocol

import msgspec

from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.agentic.tokens.types import Episode
from relax_rt.transport.rpc.errors import RelaxError, StaleEpoch
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


CALL_S = 60.0
"""A call of the gateway; it waits so long for one that is started again."""
RENEW_S = LEASE_S / 6
RETRY_S = 0.5
LAST_WORD_S = 2.0
NONCE_BYTES = 9


class OpenSession:
    """A session that is open.

    Attributes:
        access: for the program.
        gone: has an error when the gateway that had the session is no more.
    """

    def __init__(self, api: GatewayApi, name: str, nonce: str, access: Access) -> None:
        self._api, self._name, self._nonce = api, name, nonce
        self.access = access
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def close(self) -> Closed:
        """End it; see GatewayApi.close for what it raises, besides errors of the way there."""
        return await self._api.close(self._name, self._nonce)

    async def forget(self) -> None:
        """It is not wanted any more."""
        await self._api.forget(self._name, self._nonce)


class SessionClient:
    """`async with` it: sessions are renewed as long as it lasts.

    Args:
        slot: of the gateway.
    """

    def __init__(self, ctx: RoleContext, slot: str) -> None:
        self.slot = slot
        self._ctx = ctx
        self._api = ctx.actor(slot, GatewayApi, timeout_s=CALL_S)
        self._lent: set[OpenSession] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.fenced: asyncio.Future[None]
        """Has an error when a newer epoch of this slot has taken its sessions."""

    async def __aenter__(self) -> SessionClient:
        self.fenced = asyncio.get_running_loop().create_future()
        self._renewing = asyncio.create_task(self._renew())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._renewing.cancel()
        await asyncio.gather(self._renewing, return_exceptions=True)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_WORD_S)
        for task in self._tasks:
            task.cancel()
        self.fenced.cancel()

    @contextlib.asynccontextmanager
    async def session(self, name: str, limits: SessionLimits) -> AsyncIterator[OpenSession]:
        """Open one, and have it forgotten in the end. The nonce is another each time.

        Raises:
            RelaxError: it cannot be opened, or the gateway does not answer.
        """
        nonce = secrets.token_urlsafe(NONCE_BYTES)
        try:
            access = await self._api.open(name, limits, nonce, self._ctx.who)
        except BaseException:
            # It may have been opened all the same.
            self._later(self._api.forget(name, nonce))
            raise
        lent = OpenSession(self._api, name, nonce, access)
        self._lent.add(lent)
        try:
            yield lent
        finally:
            self._lent.discard(lent)
            lent.gone.cancel()
            self._later(lent.forget())

    # --- inside

    def _later(self, call: Coroutine[Any, Any, None]) -> None:
        async def quietly() -> None:
            with contextlib.suppress(RelaxError):
                await call

        task = asyncio.create_task(quietly())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _renew(self) -> None:
        """Sessions of another incarnation than the one that answers are gone."""
        while True:
            try:
                there = await self._api.renew(self._ctx.who)
            except StaleEpoch as error:
                if not self.fenced.done():
                    self.fenced.set_exception(error)
                return
            except RelaxError:
                await asyncio.sleep(RETRY_S)
                continue
            for lent in self._lent:
                if lent.access.gateway != there and not lent.gone.done():
                    why = f"{lent.access.gateway} had it, and now it is {there}"
                    lent.gone.set_exception(RelaxError("the session", why=why))
                    lent.gone.exception()  # Nobody may be waiting for it.
            await asyncio.sleep(RENEW_S)
