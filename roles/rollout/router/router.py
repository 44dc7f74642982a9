"""The router as any process embeds it: it follows the run's engines and carries out what the core decides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from relax_rt.interfaces.members import Discovery, Members
from relax_rt.interfaces.registry import RegistryApi
from relax_rt.roles.rollout.generation import Generation
from relax_rt.roles.rollout.router.core import Action, Close, Deliver, End, Limits, Open, Probe, RouterCore
from relax_rt.roles.rollout.router.fleet import EngineNews
from relax_rt.roles.rollout.router.requests import Outcome, Wanted
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Refused, RelaxError, ShuttingDown

T = TypeVar("T")

log = logging.getLogger(__name__)

TICK_S = 0.1
VERSIONS_TIMEOUT_S = 2.0
PROBE_TIMEOUT_S = 2.0
AGAIN_S, LASTS_S = 0.2, 10.0
LEFT = "its `async with` has ended"
MOST_FAILURES = 5
"""A background job that failed so often, each time before it had lasted, does so for good."""


class Run(Protocol):
    """What a router needs of a run: discovery.RunDiscovery has it, and a role's context."""

    registry: RegistryApi

    def actor(self, name: str, api: type[T], *, timeout_s: float) -> T:
        """A reference to whoever fills a slot."""


class NotGenerated(RelaxError):
    """A request has ended and is not done; `outcome` has the tokens that were made."""

    outcome: Outcome


class RouterEnded(Refused):
    """A router can go on no more, whatever it is asked: a new one is needed."""


class EngineView(msgspec.Struct, frozen=True):
    """An engine as the router sees it; `lag` is -1 if its version is not known."""

    slot: str
    epoch: int
    state: str
    version: int
    lag: int
    ours: int
    room: int
    why: str


class RouterStatistics(msgspec.Struct, frozen=True):
    """Numbers of a router since it was made; running, waiting and engines are of this moment.

    Attributes:
        counts: submitted, done, cancelled, late, failed, refused; sent, lost, continued (sent on with tokens), tokens,
            tokens_kept (those sent on), turned_away_stale and the like.
        sent: sequences sent to each slot.
        waiting_on: what requests wait for, and how many.
    """

    running: int
    waiting: int
    committed: int
    counts: dict[str, int]
    sent: dict[str, int]
    waiting_on: dict[str, int]
    engines: list[EngineView]
    registry_away: str


class _Caller:
    """Who waits for a request."""

    def __init__(self, *, streams: bool) -> None:
        self.ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        # Bounded by the sequence's length.
        self.parts: asyncio.Queue[Deliver | None] | None = asyncio.Queue() if streams else None


class Router:
    """Sends requests to a run's engines::

        async with relax_rt.cluster.discovery.connect("runs/my-run") as run, Router(run) as router:
            outcome = await router.generate(Wanted(prompt=(1, 2, 3), max_new_tokens=100))

    Args:
        run: a connection to the run; it outlives the router.
        role: whose engines are used.
        limits: bounds and patience.
        frozen: the engines do not follow the policy; see Fleet.
    """

    def __init__(self, run: Run, role: str = "rollout", limits: Limits | None = None, *, frozen: bool = False) -> None:
        self.core = RouterCore(limits, frozen=frozen)
        self._run, self._role = run, role
        self._callers: dict[int, _Caller] = {}
        self._attempts: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._jobs: list[asyncio.Task[None]] = []
        self._members: Members | None = None
        self._broken = ""

    async def __aenter__(self) -> Router:
        self._broken = ""
        self._jobs = [asyncio.create_task(self._kept(job)) for job in (self._follow, self._tick)]
        return self

    async def __aexit__(self, *exc: object) -> None:
        # Who asks again when its request is cancelled would wait for ever: nobody tends to it any more.
        self._broken = self._broken or LEFT
        for number in list(self._callers):
            self._do(self.core.cancel(self._now(), number))
        tasks = [*self._jobs, *self._attempts.values(), *self._probes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def generate(self, wanted: Wanted) -> Outcome:
        """Have a sequence made; the outcome's kind is ``done``. Cancelling it ends the sequence at its engine.

        Raises:
            NotGenerated: it is late, too many engines were lost with it, or no engine could ever do it.
            Refused: it asks for nothing. RouterFull: the router has too many at hand. RouterEnded: it can go on no
                more.
        """
        number, caller = self._submit(wanted, streams=False)
        try:
            return _done(await caller.ended)
        finally:
            self._do(self.core.cancel(self._now(), number))

    async def stream(self, wanted: Wanted) -> AsyncIterator[Deliver]:
        """The same, in parts as they come; each token once, also when the sequence moves to another engine.

        Raises:
            As `generate`, after the tokens that were made.
        """
        number, caller = self._submit(wanted, streams=True)
        assert caller.parts is not None
        try:
            while (part := await caller.parts.get()) is not None:
                yield part
            _done(caller.ended.result())
        finally:
            self._do(self.core.cancel(self._now(), number))

    def waiting_on(self) -> dict[str, int]:
        """What requests wait for, in words, and how many for each."""
        return self.core.waiting_on()

    def statistics(self) -> RouterStatistics:
        """How it does."""
        core, fleet, now = self.core, self.core.fleet, self._now()
        running = sum(life.place is not None for life in core.lives.values())
        views = []
        for slot, engine in sorted(fleet.engines.items()):
            state, lag = fleet.state(slot), fleet.lag(engine.version)
            views.append(
                EngineView(
                    slot=slot,
                    epoch=engine.epoch,
                    state=state,
                    version=engine.version,
                    lag=int(lag) if lag < float("inf") else -1,
                    ours=engine.working,
                    room=max(0, fleet.room(now, slot, core.limits.first_room)),
                    why="" if state == "healthy" else fleet.why_not(slot, 0),
                )
            )
        return RouterStatistics(
            running=running,
            waiting=len(core.lives) - running,
            committed=fleet.committed.version,
            counts=dict(core.counts),
            sent=dict(core.sent),
            waiting_on=core.waiting_on(),
            engines=views,
            registry_away=self._members.away if self._members is not None else "",
        )

    # --- inside

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _submit(self, wanted: Wanted, *, streams: bool) -> tuple[int, _Caller]:
        if not self._jobs:
            raise Refused("a request", why="the router has not begun", hint="`async with Router(run) as router`")
        if self._broken:
            raise self._at_an_end()
        caller = _Caller(streams=streams)
        number, actions = self.core.submit(self._now(), wanted)
        self._callers[number] = caller
        self._do(actions)
        return number, caller

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Open(number, place):
                    task = asyncio.create_task(self._attempt(action))
                    self._attempts[number, place.attempt] = task
                case Close(number, place):
                    if (old := self._attempts.get((number, place.attempt))) is not None:
                        old.cancel()
                case Deliver(number):
                    if (caller := self._callers.get(number)) is not None and caller.parts is not None:
                        caller.parts.put_nowait(action)
                case End(number, outcome):
                    self._ended(number, outcome)
                case Probe(slot, epoch):
                    if slot not in self._probes:
                        self._probes[slot] = asyncio.create_task(self._probe(slot, epoch))

    def _ended(self, number: int, outcome: Outcome) -> None:
        if (caller := self._callers.pop(number, None)) is not None and not caller.ended.done():
            caller.ended.set_result(outcome)
            if caller.parts is not None:
                caller.parts.put_nowait(None)

    async def _attempt(self, order: Open) -> None:
        number, place, core = order.number, order.place, self.core
        stream = self._engine(place.slot, core.limits.silent_s).generate(order.order)
        try:
            async for piece in stream:
                self._do(core.piece(self._now(), number, place.attempt, piece))
            self._do(core.failed(self._now(), number, place.attempt, "its stream ended without an end"))
        except ShuttingDown as error:
            self._do(core.returned(self._now(), number, place.attempt, str(error)))
        except Refused as error:
            self._do(core.failed(self._now(), number, place.attempt, str(error), never=True))
        except RelaxError as error:
            self._do(core.failed(self._now(), number, place.attempt, str(error)))
        except Exception as error:
            # Not foreseen; the request is not to wait for its deadline because of it.
            log.exception("a sequence at %s", place.slot)
            self._do(core.failed(self._now(), number, place.attempt, f"{type(error).__name__}: {error}"))
        finally:
            self._attempts.pop((number, place.attempt), None)
            # Its producer hears of it, if it has not ended by itself.
            await stream.aclose()  # type: ignore[attr-defined]

    async def _probe(self, slot: str, epoch: int) -> None:
        try:
            report = await self._engine(slot, PROBE_TIMEOUT_S).load()
            self._do(self.core.report(self._now(), slot, report))
        except RelaxError as error:
            self._do(self.core.no_report(self._now(), slot, epoch, f"it does not say how it does: {error}"))
        except Exception as error:
            log.exception("a probe of %s", slot)
            self._do(self.core.no_report(self._now(), slot, epoch, f"{type(error).__name__}: {error}"))
        finally:
            self._probes.pop(slot, None)

    def _engine(self, slot: str, timeout_s: float) -> Generation:
        return self._run.actor(slot, Generation, timeout_s=timeout_s)

    async def _kept(self, job: Callable[[], Awaitable[None]]) -> None:
        """Have a background job go on: without it nobody would be sent anywhere, or nothing would ever be late."""
        failures, what = 0, job.__name__.strip("_")
        while True:
            began = self._now()
            try:
                await job()
                why = "it ended"
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                log.exception("the router's job %r", what)
            failures = 1 if self._now() - began > LASTS_S else failures + 1
            if failures >= MOST_FAILURES:
                self._break(f"its job {what!r} failed {failures} times, at last with {why}")
                return
            await asyncio.sleep(AGAIN_S)

    def _break(self, why: str) -> None:
        """Every caller is told; none would be answered any more, and no deadline be looked at."""
        self._broken = why
        log.error("the router is at an end: %s", why)
        callers, self._callers = self._callers, {}
        for caller in callers.values():
            if not caller.ended.done():
                caller.ended.set_exception(self._at_an_end())
            if caller.parts is not None:
                caller.parts.put_nowait(None)

    def _at_an_end(self) -> RouterEnded:
        hint = "ask within its `async with`" if self._broken == LEFT else "see the log; make a new router"
        return RouterEnded("a request to the router", why=self._broken, hint=hint)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._do(self.core.tick(self._now()))

    async def _follow(self) -> None:
        async with Discovery(self._run.registry).watch(self._role) as members:
            self._members = members
            async for now in members.changes():
                versions = await self._versions(members.committed)
                news = [
                    EngineNews(m.who.slot, m.who.epoch, m.state, m.policy_version, m.progress)
                    for m in now
                    if m.who.role == self._role
                ]
                self._do(self.core.news(self._now(), news, versions))

    async def _versions(self, committed: VersionRecord | None) -> list[VersionRecord]:
        """The committed versions, if there is a new one: fast commits are merged into one change."""
        if self.core.fleet.frozen or committed is None or committed.version <= self.core.fleet.committed.version:
            return []
        with contextlib.suppress(RelaxError, TimeoutError):
            async with asyncio.timeout(VERSIONS_TIMEOUT_S):
                return await self._run.registry.versions()
        log.warning("the registry does not tell its versions; only %d is known", committed.version)
        return [committed]


def _done(outcome: Outcome) -> Outcome:
    """Raises: NotGenerated, unless it is done."""
    if outcome.kind == "done":
        return outcome
    error = NotGenerated(f"a sequence is {outcome.kind}", why=outcome.why, hint=_HINTS.get(outcome.kind, ""))
    error.outcome = outcome
    raise error


_HINTS = {
    "late": "see router.statistics() for the engines; allow a lag, or more time",
    "refused": "ask for what its engines can do",
    "failed": "the request itself may be what ends engines: see their logs, `relax-rt why`",
}
