"""The calling side of actors: proxies whose calls are routed by name.

A call goes to one slot through all its incarnations, or to the least busy ready member of a role.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

from relax_rt.interfaces.registry import Members, RegistryApi
from relax_rt.transport.rpc.channel import ConnectionLost
from relax_rt.transport.rpc.client import (
    DEFAULT_WINDOW,
    DeathLimit,
    ItemBuffer,
    RemoteStream,
    RpcClient,
    check_options,
    describe,
    died_of,
)
from relax_rt.transport.rpc.errors import ActorDied, DeadlineExceeded, Refused, ShuttingDown, Unreachable
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.interface import Method, methods_of, name_hint

T = TypeVar("T")

CALL_TIMEOUT_S = 60.0
DIAGNOSIS_WAIT_S = 2.0
DIAGNOSIS_WAIT_AT_LEAST_S = 0.25
CONNECT_S = 1.0
"""A member that cannot be reached for this long is skipped for another."""
AVOID_S = 1.0
"""A lost member is not tried again for this long, unless it has a new incarnation."""
RECHECK_S = 0.05
DEATHS = 3
"""Incarnations that may die with one idempotent call, or stream, before it fails."""


class Target:
    """A slot's connection, and whether its incarnation failed lately."""

    def __init__(self, slot: str, client: RpcClient) -> None:
        self.slot = slot
        self.client = client
        self.outstanding = 0
        self._bad_epoch = -1
        self._bad_until = 0.0

    def usable(self, epoch: int, now: float) -> bool:
        """Whether this incarnation may be tried."""
        return epoch != self._bad_epoch or now >= self._bad_until

    def failed(self, epoch: int, now: float) -> None:
        """Avoid this incarnation for AVOID_S: it was lost or could not be reached."""
        self._bad_epoch, self._bad_until = epoch, now + AVOID_S


class Directory:
    """Makes references, and keeps the connections and members that they share.

    Args:
        client: the connection to a slot; made once for each, and closed by its maker.
        registry: None in a run without one; then only single slots can be referred to.
    """

    def __init__(self, client: Callable[[str], RpcClient], registry: RegistryApi | None) -> None:
        self._client = client
        self._registry = registry
        self._targets: dict[str, Target] = {}
        self._members: Members | None = None
        self._following: asyncio.Task[None] | None = None

    def actor(self, name: str, api: type[T], *, timeout_s: float = CALL_TIMEOUT_S, window: int = DEFAULT_WINDOW) -> T:
        """A reference to the actor in a slot (``reward/0``) or to those of a role (``reward``).

        Nothing is checked yet: calls wait, within their deadline, for a member of that name.

        Args:
            name: slot or role.
            api: the actor's class.
            timeout_s: deadline of a call, and of each item of a stream, seconds.
            window: items of one stream that may be in flight.

        Raises:
            Refused: the name is empty, the class is no interface, or an option is out of range.
        """
        role, slash, index = name.partition("/")
        if not role or (slash and not index.isdecimal()):
            raise Refused(f"a reference to {name!r}", why="it names no slot and no role", hint="as reward/0, or reward")
        route: Route = SlotRoute(self, name) if slash else RoleRoute(self, name)
        return cast(T, Reference(route, api, timeout_s, window))

    def target(self, slot: str) -> Target:
        """The target of a slot, shared by all references."""
        found = self._targets.get(slot)
        if found is None:
            found = self._targets[slot] = Target(slot, self._client(slot))
        return found

    def members(self, what: str) -> Members:
        """All members, watched from now on in the background. Raises Refused: there is no registry; `what` needs
        one."""
        if self._registry is None:
            raise Refused(what, why="the run has no registry", hint="name one slot, as reward/0")
        if self._members is None:
            self._members = Members(self._registry, "")
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._members.follow())
            self._following.add_done_callback(self._watch_ended)
        return self._members

    def _watch_ended(self, following: asyncio.Task[None]) -> None:
        """Record why the watch ended: someone may have cancelled all tasks. It starts again when it is next needed."""
        if self._members is not None:
            cause = "it was cancelled" if following.cancelled() else repr(following.exception())
            self._members.away = f"the members are not watched: {cause}"

    async def explained(self, died: ActorDied, left_s: float) -> ActorDied:
        """The error with the diagnosis of the dead incarnation, if that arrives within a bounded time."""
        if not died.who or self._registry is None:
            return died
        end = await self.end_of(_incarnation(died.who), _report_wait_s(left_s))
        known = f"{died.who} ended: {end}" if end else f"how {died.who} ended is not known yet"
        explained = ActorDied(died.what, why=f"{known}; {died.why}", hint=died.hint)
        explained.who, explained.diagnosis = died.who, end
        return explained

    async def end_of(self, who: Incarnation, wait_s: float) -> str:
        """How an incarnation ended; empty if that is not known in time."""
        members = self.members(f"the end of {who}")
        try:
            await members.until(lambda known: known.end_of(who) is not None, f"the end of {who}", timeout_s=wait_s)
        except DeadlineExceeded:
            return ""
        return members.end_of(who) or ""

    async def alive(self, names: Collection[str], left_s: float) -> list[str]:
        """Which of these incarnations live, according to the registry, after a wait for reports of their ends."""
        if self._registry is None:
            return []
        whos = [_incarnation(name) for name in names]
        members = self.members("who has died")

        def ended(known: Members) -> bool:
            return all(known.end_of(who) is not None for who in whos)

        try:
            await members.until(ended, "the ends of those that were lost", timeout_s=_report_wait_s(left_s))
        except DeadlineExceeded:
            # While the registry is away nothing is known.
            return [] if members.away else [str(who) for who in whos if members.lives(who)]
        return []

    async def close(self) -> None:
        """Stop watching the members."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})


class SlotRoute:
    """Calls the current incarnation of a slot."""

    def __init__(self, directory: Directory, slot: str) -> None:
        self.name = slot
        self._directory = directory
        self._target = directory.target(slot)

    async def call(self, method: Method, values: tuple[Any, ...], timeout_s: float) -> Any:
        target = self._target
        target.outstanding += 1
        start_s = asyncio.get_running_loop().time()
        try:
            return await target.client.call(method, values, timeout_s, DeathLimit(DEATHS, self._directory.alive))
        except ActorDied as died:
            left_s = start_s + timeout_s - asyncio.get_running_loop().time()
            raise await self._directory.explained(died, left_s) from None
        finally:
            target.outstanding -= 1

    def stream(self, method: Method, values: tuple[Any, ...], timeout_s: float, window: int) -> RemoteStream[Any]:
        known = self._directory
        deaths = DeathLimit(DEATHS, known.alive)
        return self._target.client.stream(method, values, timeout_s, window, known.explained, deaths)

    async def all(self, timeout_s: float) -> list[SlotRoute]:
        """Itself."""
        return [self]


class RoleRoute:
    """Calls the ready member of a role that has the fewest calls of this process outstanding."""

    def __init__(self, directory: Directory, role: str) -> None:
        self.name = role
        self._directory = directory
        self._turn = 0

    async def call(self, method: Method, values: tuple[Any, ...], timeout_s: float) -> Any:
        """Call a member. One that is lost before the call is sent, or during an idempotent call, is replaced by another
        until the deadline, or until DEATHS members have died with the call."""
        payload = method.encode_arguments(values)
        loop = asyncio.get_running_loop()
        budget_s = timeout_s + method.wait_s(values)
        deadline = loop.time() + budget_s
        what = f"call of {method} at {self.name}"
        deaths = DeathLimit(DEATHS, self._directory.alive)
        while True:
            target, epoch = await self._pick(what, deadline)
            try:
                return await target.client.call_once(method, payload, deadline, budget_s)
            except ConnectionLost as lost:
                target.failed(epoch, loop.time())
                left_s = deadline - loop.time()
                try:
                    if lost.sent and not method.idempotent:
                        raise died_of(method, lost)
                    await deaths.count(f"call of {method}", lost, left_s)
                except ActorDied as died:
                    raise await self._directory.explained(died, left_s) from None
            except ShuttingDown:
                target.failed(epoch, loop.time())
            finally:
                target.outstanding -= 1

    def stream(self, method: Method, values: tuple[Any, ...], timeout_s: float, window: int) -> RemoteStream[Any]:
        """Open a stream at a member."""
        payload = method.encode_arguments(values)
        budget_s = timeout_s + method.wait_s(values)

        async def opener(deadline: float) -> ItemBuffer:
            target, epoch = await self._pick(f"stream of {method} at {self.name}", deadline)
            loop = asyncio.get_running_loop()

            def ended(end: BaseException) -> None:
                target.outstanding -= 1
                if isinstance(end, ConnectionLost | ShuttingDown):
                    target.failed(epoch, loop.time())

            try:
                incoming = await target.client.open(method, payload, deadline, budget_s, window)
            except BaseException as error:
                ended(error)
                raise
            incoming.on_end = ended
            return incoming

        known = self._directory
        return RemoteStream(method, opener, budget_s, known.explained, DeathLimit(DEATHS, known.alive))

    async def all(self, timeout_s: float) -> list[SlotRoute]:
        """A route to each ready member. Raises Unreachable: there was none in time."""
        what = f"the members of {self.name}"
        deadline = asyncio.get_running_loop().time() + timeout_s
        members = self._directory.members(what)
        while not (ready := members.ready_of(self.name)):
            await self._await_change(members, what, deadline, 10.0)
        return [SlotRoute(self._directory, member.who.slot) for member in ready]

    async def _pick(self, what: str, deadline: float) -> tuple[Target, int]:
        """Choose the target to call, connect it and count the call; returns it with its epoch. Raises Unreachable: no
        member is ready and can be reached, in time."""
        loop = asyncio.get_running_loop()
        members = self._directory.members(what)
        while True:
            found = self._least_busy(members, loop.time())
            if found is None:
                await self._await_change(members, what, deadline, RECHECK_S)
                continue
            target, epoch = found
            # Counted before connecting, so that concurrent calls see it.
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
        # Start at another member each time, so that equally busy ones take turns.
        self._turn += 1
        for n in range(len(ready)):
            who = ready[(self._turn + n) % len(ready)].who
            target = self._directory.target(who.slot)
            if target.usable(who.epoch, now) and (best is None or target.outstanding < best[0].outstanding):
                best = target, who.epoch
        return best

    async def _await_change(self, members: Members, what: str, deadline: float, at_most_s: float) -> None:
        """Wait for news of the members. Raises Unreachable: the deadline has come."""
        left_s = deadline - asyncio.get_running_loop().time()
        if left_s <= 0:
            known = [m for m in members.by_slot.values() if m.who.role == self.name]
            states = ", ".join(f"{m.who} is {m.state}" for m in known) or "it has no members"
            away = f"; the registry is away: {members.away}" if members.away else ""
            raise Unreachable(what, why=f"no member is ready: {states}{away}", hint="see `relax-rt ps`")
        await members.news(min(left_s, at_most_s))


def _incarnation(text: str) -> Incarnation:
    slot, _, epoch = text.rpartition("#")
    return Incarnation(slot, int(epoch))


def _report_wait_s(left_s: float) -> float:
    """How long to wait for the report of an end when left_s remain until the deadline."""
    return min(DIAGNOSIS_WAIT_S, max(left_s, DIAGNOSIS_WAIT_AT_LEAST_S))


Route = SlotRoute | RoleRoute
"""Sends calls to a slot, or to a member of a role."""


class Reference:
    """A proxy with the methods of actor class `api`, created at their first use.

    Args:
        timeout_s: deadline of a call, and of each item of a stream.
        window: items of a stream that may be in flight.
    """

    def __init__(self, route: Route, api: type, timeout_s: float, window: int = DEFAULT_WINDOW) -> None:
        check_options(f"a reference to {route.name}", timeout_s, window)
        methods_of(api)
        # Any attribute may be the name of an actor's method, so that all of ours are in one.
        self.__dict__["_relax_reference"] = (route, api, timeout_s, window)

    def __getattr__(self, name: str) -> Any:
        parts: tuple[Route, type, float, int] = self.__dict__["_relax_reference"]
        route, api, timeout_s, window = parts
        method = methods_of(api).get(name)
        if method is None:
            if not name.startswith("_") and callable(getattr(api, name, None)):
                raise AttributeError(
                    f"{api.__name__}.{name} cannot be called from afar: it is not a public async method"
                )
            raise AttributeError(f"{api.__name__} has no method {name}: {name_hint(name, methods_of(api))}")

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await route.call(method, method.bind(args, kwargs), timeout_s)

        def stream(*args: Any, **kwargs: Any) -> RemoteStream[Any]:
            return route.stream(method, method.bind(args, kwargs), timeout_s, window)

        function = describe(stream if method.stream else call, method)
        self.__dict__[name] = function
        return function

    def with_options(self, *, timeout_s: float | None = None, window: int | None = None) -> Reference:
        route, api, old_timeout_s, old_window = self.__dict__["_relax_reference"]
        return Reference(
            route,
            api,
            old_timeout_s if timeout_s is None else timeout_s,
            old_window if window is None else window,
        )

    async def all(self) -> list[Reference]:
        route, api, timeout_s, window = self.__dict__["_relax_reference"]
        return [Reference(one, api, timeout_s, window) for one in await route.all(timeout_s)]

    def __repr__(self) -> str:
        route, api, *_ = self.__dict__["_relax_reference"]
        return f"<reference to {api.__name__} {route.name}>"
