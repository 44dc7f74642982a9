"""Sessions of a gateway as a role uses them that plays episodes: kept by a lease, and seen to be gone when they are."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.gateway.api import LEASE_S, Access, Closed, GatewayApi, SessionLimits
from relax_rt.transport.rpc.errors import RelaxError, StaleEpoch

CALL_S = 60.0
"""A call of the gateway; it waits so long for one that is started again."""
RENEW_S = LEASE_S / 6
RETRY_S = 0.5
LAST_WORD_S = 2.0
NONCE_BYTES = 9


class Lent:
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


class Lessee:
    """`async with` it: sessions are renewed as long as it lasts.

    Args:
        slot: of the gateway.
    """

    def __init__(self, ctx: RoleContext, slot: str) -> None:
        self.slot = slot
        self._ctx = ctx
        self._api = ctx.actor(slot, GatewayApi, timeout_s=CALL_S)
        self._lent: set[Lent] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.fenced: asyncio.Future[None]
        """Has an error when a newer epoch of this slot has taken its sessions."""

    async def __aenter__(self) -> Lessee:
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
    async def session(self, name: str, limits: SessionLimits) -> AsyncIterator[Lent]:
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
        lent = Lent(self._api, name, nonce, access)
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
