"""Where the bearers of a name are: one connection a slot, the registry's list of members, and how each has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import TypeVar, cast

from relax_rt.actors.reference import Options, Reference, Route
from relax_rt.actors.routes import RoleRoute, SlotRoute, Target
from relax_rt.cluster.registry.api import RegistryApi
from relax_rt.cluster.registry.client import Members
from relax_rt.transport.rpc.client import Client
from relax_rt.transport.rpc.errors import ActorDied, DeadlineExceeded, Refused
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.items import DEFAULT_WINDOW

T = TypeVar("T")

CALL_TIMEOUT_S = 60.0
DIAGNOSIS_WAIT_S = 2.0
DIAGNOSIS_WAIT_AT_LEAST_S = 0.25


class Directory:
    """Makes references, and keeps what they share.

    Args:
        client: the connection to a slot; asked once for each, and closed by whoever made it.
        registry: tells who is there; None without one, then only single slots can be referred to.
    """

    def __init__(self, client: Callable[[str], Client], registry: RegistryApi | None) -> None:
        self._client = client
        self._registry = registry
        self._targets: dict[str, Target] = {}
        self._members: Members | None = None
        self._following: asyncio.Task[None] | None = None

    def actor(self, name: str, api: type[T], *, timeout_s: float = CALL_TIMEOUT_S, window: int = DEFAULT_WINDOW) -> T:
        """A reference to the actor in a slot (``reward/0``) or to those of a role (``reward``).

        It is made without a look at who is there: calls wait, within their deadline, for someone who bears the name.

        Args:
            name: slot or role.
            api: the actor's class.
            timeout_s: deadline of a call, and of each item of a stream, seconds.
            window: items of one stream that may be under way.

        Raises:
            Refused: the name is empty, the class is no interface, or an option is out of range.
        """
        role, slash, index = name.partition("/")
        if not role or (slash and not index.isdecimal()):
            raise Refused(f"a reference to {name!r}", why="it names no slot and no role", hint="as reward/0, or reward")
        route: Route = SlotRoute(self, name) if slash else RoleRoute(self, name)
        return cast(T, Reference(route, api, Options(timeout_s, window)))

    def target(self, slot: str) -> Target:
        """A slot's connection and the calls on it, shared by all references."""
        found = self._targets.get(slot)
        if found is None:
            found = self._targets[slot] = Target(slot, self._client(slot))
        return found

    def members(self, what: str) -> Members:
        """All members, followed from now on in the background.

        Raises:
            Refused: there is no registry; `what` needs one.
        """
        if self._registry is None:
            raise Refused(what, why="the run has no registry", hint="name one slot, as reward/0")
        if self._members is None:
            self._members = Members(self._registry, "")
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._members.follow())
            self._following.add_done_callback(self._ended)
        return self._members

    def _ended(self, following: asyncio.Task[None]) -> None:
        """It is not to end, but someone may have cancelled all tasks: it is begun again when it is next needed."""
        if self._members is not None:
            cause = "it was cancelled" if following.cancelled() else repr(following.exception())
            self._members.away = f"nobody follows the members: {cause}"

    async def explained(self, died: ActorDied, left_s: float) -> ActorDied:
        """The error with the end of the incarnation, waited for a bounded time."""
        if not died.who or self._registry is None:
            return died
        end = await self.end_of(_incarnation(died.who), _patience_s(left_s))
        known = f"{died.who} ended: {end}" if end else f"how {died.who} ended is not known yet"
        told = ActorDied(died.what, why=f"{known}; {died.why}", hint=died.hint)
        told.who, told.diagnosis = died.who, end
        return told

    async def end_of(self, who: Incarnation, wait_s: float) -> str:
        """How an incarnation ended, in words; empty if that is not known in time."""
        members = self.members(f"the end of {who}")
        try:
            await members.until(lambda known: known.end_of(who) is not None, f"the end of {who}", timeout_s=wait_s)
        except DeadlineExceeded:
            return ""
        return members.end_of(who) or ""

    async def alive(self, names: Collection[str], left_s: float) -> list[str]:
        """Those of some incarnations that live, as the registry says once the news of their ends has had its time."""
        if self._registry is None:
            return []
        whos = [_incarnation(name) for name in names]
        members = self.members("who has died")

        def ended(known: Members) -> bool:
            return all(known.end_of(who) is not None for who in whos)

        try:
            await members.until(ended, "the ends of those that were lost", timeout_s=_patience_s(left_s))
        except DeadlineExceeded:
            # Nothing is known of anyone while the registry is away.
            return [] if members.away else [str(who) for who in whos if members.lives(who)]
        return []

    async def close(self) -> None:
        """End the following of members."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})


def _incarnation(text: str) -> Incarnation:
    slot, _, epoch = text.rpartition("#")
    return Incarnation(slot, int(epoch))


def _patience_s(left_s: float) -> float:
    """How long news of an end is waited for, with so much left until the deadline."""
    return min(DIAGNOSIS_WAIT_S, max(left_s, DIAGNOSIS_WAIT_AT_LEAST_S))
