"""Sessions of a gateway, for roles that play episodes: the interface and its client."""

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
Exhausted = Literal["", "turns", "tokens"]
LEASE_S = 30.0
"""Sessions that their owner has not renewed for so long are forgotten."""


class SessionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a session, and how it is sampled; 0: the gateway's setting.

    Attributes:
        tokens: of its episode, prompts and answers of all branches together.
        new_tokens: of one answer.
        calls: that may be answered.
        group: unit of fairness in admission, such as the group of samples; empty: the session itself.
        seed: of its answers, with the call's number and the caller's seed; 0: derived from its name.
        temperature: None: the run's.
        weights: engines that may answer. lag: those as far behind as roles.gateway.lag allows; episode: for the first
            answer those at the newest weights, later those no older than its oldest token; newest: only those.
        routing: record routing rows; needs engines that were started for them.
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
        gateway: the incarnation that has the session; the session ends with it.
        node: where `base_url` holds; empty in a run of one node.
        remote_url: the base URL on other nodes; empty: it cannot be reached from them.
    """

    base_url: str
    api_key: str
    gateway: str = ""
    node: str = ""
    remote_url: str = ""


class GivenAnswer(msgspec.Struct, frozen=True):
    """An answer that a caller was given, trained or not: its id in the episode, the message as the caller got it, and
    how it ended.

    Attributes:
        response: id of its response, as the caller knows it. choice: its index there.
    """

    id: str
    message: dict[str, Any]
    finish_reason: str
    response: str = ""
    choice: int = 0


class ClosedSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session that has ended.

    Attributes:
        episode: what is trained.
        answers: all that callers were given, in the order of their calls, then of their choices. One that a change of
            history has dropped is among them, and not trained.
        exhausted: the limit that a call was refused for, the session's turns or tokens; empty: none.
        interrupted: calls in progress when it was closed.
        error: the runtime's error that the last call ended with; empty: it was answered.
        permanent: a retry would end with that error again.
        left: answers that their caller left before the end, of which nothing is trained.
    """

    episode: Episode
    answers: tuple[GivenAnswer, ...] = ()
    exhausted: Exhausted = ""
    interrupted: int = 0
    error: str = ""
    permanent: bool = False
    left: int = 0


class GatewayApi(Protocol):
    """Sessions of one gateway, which end with its process.

    A session is identified by its name and a nonce of its opener, so that a program or a late call that an earlier
    session of that name left behind does not reach it.
    """

    @idempotent
    async def open(
        self, session: Name, limits: SessionLimits, nonce: Nonce = "", owner: Incarnation | None = None
    ) -> Access:
        """Open a session; idempotent with the same nonce and limits.

        Args:
            owner: must `renew` its sessions. Its session with another nonce replaces an earlier one of this name, and a
                newer epoch of its slot ends the sessions of older ones. None: the session is forgotten after
                roles.gateway.session_idle_s without a call.

        Raises:
            Refused: it is open with other limits or for another owner; too many are open; routing rows are requested,
                which the engines do not record.
            StaleEpoch: the owner's slot has a newer epoch.
        """

    @idempotent
    async def renew(self, owner: Incarnation) -> str:
        """Renew the owner's sessions for another `LEASE_S`; return the current `Access.gateway`.

        Raises:
            StaleEpoch: the owner's slot has a newer epoch.
        """

    @idempotent
    async def close(self, session: Name, nonce: Nonce = "") -> ClosedSession:
        """End a session. Calls in progress are cancelled; the episode is what was sampled in answered calls. Idempotent
        until it is forgotten.

        Raises:
            Refused: no session of this name and nonce is open.
        """

    @idempotent
    async def forget(self, session: Name, nonce: Nonce = "") -> None:
        """End a session if it is open, and forget it; without effect if there is none."""

    @idempotent
    async def where(self) -> str:
        """Return the base URL, ``http://HOST:PORT/v1``."""


CALL_S = 60.0
"""Timeout of a call of the gateway: long enough for a restart of it."""
RENEW_S = LEASE_S / 6
RETRY_S = 0.5
RELEASE_TIMEOUT_S = 2.0
NONCE_BYTES = 9


class OpenSession:
    """An open session.

    Attributes:
        access: for the program.
        gone: has an error once the gateway that had the session has ended.
    """

    def __init__(self, api: GatewayApi, name: str, nonce: str, access: Access) -> None:
        self._api, self._name, self._nonce = api, name, nonce
        self.access = access
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def close(self) -> ClosedSession:
        """End it; raises as GatewayApi.close, and connection errors."""
        return await self._api.close(self._name, self._nonce)

    async def forget(self) -> None:
        """End and forget it."""
        await self._api.forget(self._name, self._nonce)


class SessionClient:
    """Opens sessions at a gateway and renews them, inside an `async with`.

    Args:
        slot: of the gateway.
    """

    def __init__(self, ctx: RoleContext, slot: str) -> None:
        self.slot = slot
        self._ctx = ctx
        self._api = ctx.actor(slot, GatewayApi, timeout_s=CALL_S)
        self._sessions: set[OpenSession] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.fenced: asyncio.Future[None]
        """Has an error once a newer epoch of this slot has ended its sessions."""

    async def __aenter__(self) -> SessionClient:
        self.fenced = asyncio.get_running_loop().create_future()
        self._renewing = asyncio.create_task(self._renew())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._renewing.cancel()
        await asyncio.gather(self._renewing, return_exceptions=True)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=RELEASE_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()
        self.fenced.cancel()

    @contextlib.asynccontextmanager
    async def session(self, name: str, limits: SessionLimits) -> AsyncIterator[OpenSession]:
        """Open a session with a new nonce, and forget it at the end.

        Raises:
            RelaxError: it cannot be opened, or the gateway does not answer.
        """
        nonce = secrets.token_urlsafe(NONCE_BYTES)
        try:
            access = await self._api.open(name, limits, nonce, self._ctx.who)
        except BaseException:
            # The gateway may have opened it all the same.
            self._in_background(self._api.forget(name, nonce))
            raise
        session = OpenSession(self._api, name, nonce, access)
        self._sessions.add(session)
        try:
            yield session
        finally:
            self._sessions.discard(session)
            session.gone.cancel()
            self._in_background(session.forget())

    # --- inside

    def _in_background(self, call: Coroutine[Any, Any, None]) -> None:
        async def quietly() -> None:
            with contextlib.suppress(RelaxError):
                await call

        task = asyncio.create_task(quietly())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _renew(self) -> None:
        """Renew all sessions. Those of another incarnation than the one that answers are gone."""
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
            for session in self._sessions:
                if session.access.gateway != there and not session.gone.done():
                    why = f"{session.access.gateway} had it, and now it is {there}"
                    session.gone.set_exception(RelaxError("the session", why=why))
                    session.gone.exception()  # Nobody may be waiting for it.
            await asyncio.sleep(RENEW_S)
