"""Ways from a name to who answers: one slot through all its incarnations, or the least busy ready member of a role."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from relax_rt.actors.reference import Route
from relax_rt.transport.rpc.channel import Lost
from relax_rt.transport.rpc.client import Client
from relax_rt.transport.rpc.deaths import Deaths, died_of
from relax_rt.transport.rpc.errors import ActorDied, Retiring, Unreachable
from relax_rt.transport.rpc.interface import Method
from relax_rt.transport.rpc.items import Inlet, RemoteStream

if TYPE_CHECKING:
    from relax_rt.actors.directory import Directory
    from relax_rt.cluster.registry.client import Members

CONNECT_S = 1.0
"""A member that cannot be reached for this long is passed over for another."""
AVOID_S = 1.0
"""A member that was lost is not tried again for this long, unless it has a new incarnation."""
LOOK_AGAIN_S = 0.05
DEATHS = 3
"""Incarnations that may die with one idempotent call, or stream, before it is given up."""


class Target:
    """A slot that calls go to."""

    def __init__(self, slot: str, client: Client) -> None:
        self.slot = slot
        self.client = client
        self.outstanding = 0
        self._bad_epoch = -1
        self._bad_until = 0.0

    def usable(self, epoch: int, now: float) -> bool:
        """It is worth a try."""
        return epoch != self._bad_epoch or now >= self._bad_until

    def failed(self, epoch: int, now: float) -> None:
        """This incarnation was lost or could not be reached."""
        self._bad_epoch, self._bad_until = epoch, now + AVOID_S


class SlotRoute:
    """Calls whoever fills a slot."""

    def __init__(self, directory: Directory, slot: str) -> None:
        self.name = slot
        self._directory = directory
        self._target = directory.target(slot)

    async def call(self, method: Method, values: tuple[Any, ...], timeout_s: float) -> Any:
        """See Client.call; an ActorDied says how the incarnation ended."""
        target = self._target
        target.outstanding += 1
        start_s = asyncio.get_running_loop().time()
        try:
            return await target.client.call(method, values, timeout_s, Deaths(DEATHS, self._directory.alive))
        except ActorDied as died:
            left_s = start_s + timeout_s - asyncio.get_running_loop().time()
            raise await self._directory.explained(died, left_s) from None
        finally:
            target.outstanding -= 1

    def stream(self, method: Method, values: tuple[Any, ...], timeout_s: float, window: int) -> RemoteStream[Any]:
        """See Client.stream."""
        known = self._directory
        deaths = Deaths(DEATHS, known.alive)
        return self._target.client.stream(method, values, timeout_s, window, known.explained, deaths)

    async def all(self, timeout_s: float) -> list[Route]:
        """Itself."""
        return [self]


class RoleRoute:
    """Calls the ready member of a role that has the fewest calls of this process outstanding."""

    def __init__(self, directory: Directory, role: str) -> None:
        self.name = role
        self._directory = directory
        self._turn = 0

    async def call(self, method: Method, values: tuple[Any, ...], timeout_s: float) -> Any:
        """Call a member; one that is lost before the call is sent, or under a call that may be repeated, is passed
        over for another until the deadline, or until too many have died with it."""
        payload = method.encode_arguments(values)
        loop = asyncio.get_running_loop()
        budget_s = timeout_s + method.wait_s(values)
        deadline = loop.time() + budget_s
        what = f"call of {method} at {self.name}"
        deaths = Deaths(DEATHS, self._directory.alive)
        while True:
            target, epoch = await self._pick(what, deadline)
            try:
                return await target.client.call_once(method, payload, deadline, budget_s)
            except Lost as lost:
                target.failed(epoch, loop.time())
                left_s = deadline - loop.time()
                try:
                    if lost.sent and not method.idempotent:
                        raise died_of(method, lost)
                    await deaths.count(f"call of {method}", lost, left_s)
                except ActorDied as died:
                    raise await self._directory.explained(died, left_s) from None
            except Retiring:
                target.failed(epoch, loop.time())
            finally:
                target.outstanding -= 1

    def stream(self, method: Method, values: tuple[Any, ...], timeout_s: float, window: int) -> RemoteStream[Any]:
        """Open a stream at a member."""
        payload = method.encode_arguments(values)
        budget_s = timeout_s + method.wait_s(values)

        async def opener(deadline: float) -> Inlet:
            target, epoch = await self._pick(f"stream of {method} at {self.name}", deadline)
            loop = asyncio.get_running_loop()

            def ended(end: BaseException) -> None:
                target.outstanding -= 1
                if isinstance(end, Lost | Retiring):
                    target.failed(epoch, loop.time())

            try:
                inlet = await target.client.open(method, payload, deadline, budget_s, window)
            except BaseException as error:
                ended(error)
                raise
            inlet.on_end = ended
            return inlet

        known = self._directory
        return RemoteStream(method, opener, budget_s, known.explained, Deaths(DEATHS, known.alive))

    async def all(self, timeout_s: float) -> list[Route]:
        """A route to each ready member.

        Raises:
            Unreachable: there was none in time.
        """
        what = f"the members of {self.name}"
        deadline = asyncio.get_running_loop().time() + timeout_s
        members = self._directory.members(what)
        while not (ready := members.ready_of(self.name)):
            await self._changed(members, what, deadline, 10.0)
        return [SlotRoute(self._directory, member.who.slot) for member in ready]

    async def _pick(self, what: str, deadline: float) -> tuple[Target, int]:
        """The target to call, connected and counted as called, and the epoch it was chosen with.

        Raises:
            Unreachable: no member is ready and can be reached, in time.
        """
        loop = asyncio.get_running_loop()
        members = self._directory.members(what)
        while True:
            found = self._least_busy(members, loop.time())
            if found is None:
                await self._changed(members, what, deadline, LOOK_AGAIN_S)
                continue
            target, epoch = found
            # Counted from here on: others who choose meanwhile see it.
            target.outstanding += 1
            if target.client.connected:
                return found
            try:
                await target.client.connect(what, max(0.001, min(CONNECT_S, deadline - loop.time())))
            except Unreachable:
                target.outstanding -= 1
                target.failed(epoch, loop.time())
                if loop.time() >= deadline:
                    raise
            except BaseException:
                target.outstanding -= 1
                raise
            else:
                return found

    def _least_busy(self, members: Members, now: float) -> tuple[Target, int] | None:
        ready = members.ready_of(self.name)
        best: tuple[Target, int] | None = None
        # Begun at another one each time, so that equals take turns.
        self._turn += 1
        for n in range(len(ready)):
            who = ready[(self._turn + n) % len(ready)].who
            target = self._directory.target(who.slot)
            if target.usable(who.epoch, now) and (best is None or target.outstanding < best[0].outstanding):
                best = target, who.epoch
        return best

    async def _changed(self, members: Members, what: str, deadline: float, at_most_s: float) -> None:
        """Wait for news of the members.

        Raises:
            Unreachable: the deadline has come.
        """
        left_s = deadline - asyncio.get_running_loop().time()
        if left_s <= 0:
            known = [m for m in members.by_slot.values() if m.who.role == self.name]
            states = ", ".join(f"{m.who} is {m.state}" for m in known) or "it has no members"
            away = f"; the registry is away: {members.away}" if members.away else ""
            raise Unreachable(what, why=f"no member is ready: {states}{away}", hint="see `relax-rt ps`")
        await members.news(min(left_s, at_most_s))
