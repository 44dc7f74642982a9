"""Follows the members of a run by watching the registry. Used by actors, discovery and the router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from relax_rt.interfaces.registry import Changes, Member, RegistryApi
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import DeadlineExceeded, RelaxError
from relax_rt.transport.rpc.identity import Incarnation

POLL_S = 20.0
RETRY_S = 0.5
RETRY_MOST_S = 10.0

log = logging.getLogger(__name__)


class Members:
    """What is known of the members of one role (of all, for the empty name), kept up to date in the background.

    While the registry is away the last known members stay: see `away`.
    """

    def __init__(self, registry: RegistryApi, role: str) -> None:
        self.role = role
        self.by_slot: dict[str, Member] = {}
        self.committed: VersionRecord | None = None
        self.away = ""
        """Why the registry does not answer; empty while it does."""
        self._registry = registry
        self._revision = 0
        self._changed = asyncio.Condition()
        self._count = 0
        """Changes so far; 0: nothing is known yet."""
        self._ready: dict[str, list[Member]] = {}
        self._ready_at = 0

    @property
    def ready(self) -> list[Member]:
        """The members that do their work, by slot."""
        return [m for _, m in sorted(self.by_slot.items()) if m.state == "ready"]

    def ready_of(self, role: str) -> list[Member]:
        """The members of one role that do their work, by slot; the list is shared and not to be changed."""
        if self._ready_at != self._count:
            self._ready_at, self._ready = self._count, {}
            for member in self.ready:
                self._ready.setdefault(member.who.role, []).append(member)
        return self._ready.get(role, [])

    def end_of(self, who: Incarnation) -> str | None:
        """How an incarnation ended; empty if it has and how is no longer known, None if it lives as far as is known."""
        member = self.by_slot.get(who.slot)
        if member is None or member.who.epoch < who.epoch:
            return None
        if member.who == who:
            return member.detail if member.state == "gone" else None
        if member.before is not None and member.before.epoch >= who.epoch:
            return member.before.reason if member.before.epoch == who.epoch else ""
        return None

    def lives(self, who: Incarnation) -> bool:
        """It is the one in its slot, as far as is known, and has not ended."""
        member = self.by_slot.get(who.slot)
        return member is not None and member.who == who and member.state != "gone"

    async def news(self, wait_s: float) -> None:
        """Wait until something has changed, for wait_s at most."""
        seen = self._count
        try:
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(lambda: self._count != seen)
        except TimeoutError:
            pass

    async def changes(self) -> AsyncIterator[list[Member]]:
        """The whole list, as soon as it is known and after each change; fast changes are merged into one."""
        seen = 0
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda seen=seen: self._count != seen)  # type: ignore[misc]
                seen = self._count
                members = [m for _, m in sorted(self.by_slot.items())]
            yield members

    async def until(self, holds: Callable[[Members], bool], what: str, *, timeout_s: float) -> None:
        """Wait until something holds of the members. Raises DeadlineExceeded: it did not, in time."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: holds(self))
        except TimeoutError as error:
            known = ", ".join(f"{m.who} {m.state}" for m in self.by_slot.values()) or "none"
            why = f"{known} after {timeout_s:g} s" + (f"; the registry is away: {self.away}" if self.away else "")
            raise DeadlineExceeded(f"waiting for {what}", why=why) from error

    async def follow(self) -> None:
        """Watch for ever, as a task of `watch_members`. A failure is shown in `away`, and the watch starts again."""
        failures = 0
        while True:
            try:
                await self._take(await self._registry.watch(self._revision, POLL_S))
            except RelaxError as error:
                self.away = str(error)
                await asyncio.sleep(RETRY_S)
            except Exception as error:
                # Not foreseen: what is known may be half of it, so that all is asked for again.
                log.exception("following the members failed")
                self.away = f"following failed: {type(error).__name__}: {error}"
                self._revision = 0
                failures += 1
                await asyncio.sleep(min(RETRY_S * 2 ** min(failures - 1, 10), RETRY_MOST_S))
            else:
                self.away, failures = "", 0

    async def _take(self, answer: Changes) -> None:
        own = {m.who.slot: m for m in answer.members if not self.role or m.who.role == self.role}
        async with self._changed:
            first, self._revision = self._revision == 0, answer.revision
            if first or own or answer.snapshot or answer.committed != self.committed:
                self.by_slot = own if answer.snapshot else {**self.by_slot, **own}
                self.committed = answer.committed
                self._count += 1
                self._changed.notify_all()


@asynccontextmanager
async def watch_members(registry: RegistryApi, role: str = "") -> AsyncIterator[Members]:
    """Follow the members of a role, of all for the empty name, until the block ends."""
    members = Members(registry, role)
    task = asyncio.create_task(members.follow())
    try:
        yield members
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
