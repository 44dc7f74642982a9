"""The router, which any process can embed: follows the run's engines and carries out what `router.core` decides.

Where many clients compete (the HTTP gateway), an `AdmissionQueue` (router.admission) limits the calls in front of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from relax_rt.interfaces.members import Members, watch_members
from relax_rt.interfaces.registry import RegistryApi
from relax_rt.roles.rollout.router.admission import FleetLoad
from relax_rt.roles.rollout.router.core import (
    CancelAttempt,
    Deliver,
    Finish,
    GenerationRequest,
    Outcome,
    ProbeEngine,
    RouterAction,
    RouterCore,
    RouterLimits,
    StartAttempt,
)
from relax_rt.roles.rollout.router.fleet import EngineEntry
from relax_rt.roles.rollout.router.interface import Generation
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Refused, RelaxError, ShuttingDown

T = TypeVar("T")

log = logging.getLogger(__name__)

TICK_S = 0.1
VERSIONS_TIMEOUT_S = 2.0
PROBE_TIMEOUT_S = 2.0
RETRY_S = 0.2
STABLE_S = 10.0
"""The failures of a background task that ran for so long are counted anew."""
MAX_FAILURES = 5
"""A background task that failed so often, each time within STABLE_S, ends the router."""
LEFT = "its `async with` has ended"


class RunConnection(Protocol):
    """The part of a run that a router needs; discovery.RunDiscovery has it, and a role's context."""

    registry: RegistryApi

    def actor(self, name: str, api: type[T], *, timeout_s: float) -> T:
        """Return a reference to the process in a slot."""


class NotGenerated(RelaxError):
    """A request has ended and is not done; `outcome` has the tokens that were generated."""

    outcome: Outcome


class RouterEnded(Refused):
    """This router has ended: a new one is needed."""


class EngineView(msgspec.Struct, frozen=True):
    """An engine as the router sees it; `lag` is -1 if its version is unknown."""

    slot: str
    epoch: int
    state: str
    version: int
    lag: int
    ours: int
    room: int
    why: str


class RouterStatistics(msgspec.Struct, frozen=True):
    """Counters since a router was created, and its current requests and engines.

    Attributes:
        counts: submitted, done, cancelled, late, failed, refused; sent, lost, resumed (sent on with tokens), tokens,
            resumed_tokens, rejected_stale and the like.
        sent: sequences sent to each slot.
        waiting_on: what requests wait for, and how many wait for each.
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
    """The caller of a request: a future, and a queue if it streams."""

    def __init__(self, *, streams: bool) -> None:
        self.ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        # Bounded by the sequence's length.
        self.parts: asyncio.Queue[Deliver | None] | None = asyncio.Queue() if streams else None


class Router:
    """Sends requests to a run's engines::

        async with relax_rt.cluster.discovery.connect("runs/my-run") as run, Router(run) as router:
            outcome = await router.generate(GenerationRequest(prompt=(1, 2, 3), max_new_tokens=100))

    Args:
        run: a connection to the run; it outlives the router.
        role: the role whose engines are used.
        frozen: the engines do not follow the policy; see Fleet.
    """

    def __init__(
        self, run: RunConnection, role: str = "rollout", limits: RouterLimits | None = None, *, frozen: bool = False
    ) -> None:
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
        self._jobs = [asyncio.create_task(self._keep_running(job)) for job in (self._follow, self._tick)]
        return self

    async def __aexit__(self, *exc: object) -> None:
        # Set first: a caller that retries when its request is cancelled would wait for ever, as no task serves it.
        self._broken = self._broken or LEFT
        for number in list(self._callers):
            self._execute(self.core.cancel(self._now(), number))
        tasks = [*self._jobs, *self._attempts.values(), *self._probes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def generate(self, wanted: GenerationRequest) -> Outcome:
        """Generate a sequence; the outcome's kind is ``done``. Cancelling it ends the sequence at its engine.

        Raises:
            NotGenerated: it is late, too many engines were lost with it, or no engine could serve it.
            Refused: it asks for nothing. RouterFull: too many requests are open. RouterEnded: the router has ended.
        """
        number, caller = self._submit(wanted, streams=False)
        try:
            return _require_done(await caller.ended)
        finally:
            self._execute(self.core.cancel(self._now(), number))

    async def stream(self, wanted: GenerationRequest) -> AsyncIterator[Deliver]:
        """Generate a sequence and yield its tokens as they come, each once, also when it moves to another engine.

        Raises:
            As `generate`, after the tokens that were generated.
        """
        number, caller = self._submit(wanted, streams=True)
        assert caller.parts is not None
        try:
            while (part := await caller.parts.get()) is not None:
                yield part
            _require_done(caller.ended.result())
        finally:
            self._execute(self.core.cancel(self._now(), number))

    def waiting_on(self) -> dict[str, int]:
        """Return what requests wait for, and how many wait for each."""
        return self.core.waiting_on()

    def statistics(self) -> RouterStatistics:
        """Return current requests and engines, and counters."""
        core, fleet, now = self.core, self.core.fleet, self._now()
        running = sum(one.assignment is not None for one in core.requests.values())
        views = []
        for slot, engine in sorted(fleet.engines.items()):
            state, lag = fleet.health(slot), fleet.lag(engine.version)
            views.append(
                EngineView(
                    slot=slot,
                    epoch=engine.epoch,
                    state=state,
                    version=engine.version,
                    lag=int(lag) if lag < float("inf") else -1,
                    ours=engine.assigned,
                    room=max(0, fleet.room(now, slot, core.limits.first_room)),
                    why="" if state == "healthy" else fleet.why_not(slot, 0),
                )
            )
        return RouterStatistics(
            running=running,
            waiting=len(core.requests) - running,
            committed=fleet.committed.version,
            counts=dict(core.counts),
            sent=dict(core.sent),
            waiting_on=core.waiting_on(),
            engines=views,
            registry_away=self._members.away if self._members is not None else "",
        )

    def load(self) -> FleetLoad:
        """Return the load of the engines, as far as it is known, for `AdmissionQueue`."""
        core, fleet, now = self.core, self.core.fleet, self._now()
        able = [slot for slot in fleet.engines if fleet.health(slot) in ("healthy", "stale")]
        reports = [report for slot in able if (report := fleet.engines[slot].report) is not None]
        return FleetLoad(
            room=sum(max(0, fleet.room(now, slot, core.limits.first_room)) for slot in able),
            stalled=sum(one.assignment is None for one in core.requests.values()),
            kv_used=max((report.kv_used for report in reports), default=0.0),
        )

    # --- inside

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _submit(self, wanted: GenerationRequest, *, streams: bool) -> tuple[int, _Caller]:
        if not self._jobs:
            raise Refused("a request", why="the router has not begun", hint="`async with Router(run) as router`")
        if self._broken:
            raise self._ended_error()
        caller = _Caller(streams=streams)
        number, actions = self.core.submit(self._now(), wanted)
        self._callers[number] = caller
        self._execute(actions)
        return number, caller

    def _execute(self, actions: Sequence[RouterAction]) -> None:
        for action in actions:
            match action:
                case StartAttempt(number, assignment):
                    self._attempts[number, assignment.attempt] = asyncio.create_task(self._attempt(action))
                case CancelAttempt(number, assignment):
                    if (old := self._attempts.get((number, assignment.attempt))) is not None:
                        old.cancel()
                case Deliver(number):
                    if (caller := self._callers.get(number)) is not None and caller.parts is not None:
                        caller.parts.put_nowait(action)
                case Finish(number, outcome):
                    if (caller := self._callers.pop(number, None)) is not None and not caller.ended.done():
                        caller.ended.set_result(outcome)
                        if caller.parts is not None:
                            caller.parts.put_nowait(None)
                case ProbeEngine(slot, epoch):
                    if slot not in self._probes:
                        self._probes[slot] = asyncio.create_task(self._probe(slot, epoch))

    async def _attempt(self, start: StartAttempt) -> None:
        number, attempt, slot, core = start.number, start.assignment.attempt, start.assignment.slot, self.core
        stream = self._engine(slot, core.limits.silent_s).generate(start.request)
        try:
            async for update in stream:
                self._execute(core.on_update(self._now(), number, attempt, update))
            self._execute(core.on_failure(self._now(), number, attempt, "its stream ended without an end"))
        except ShuttingDown as error:
            self._execute(core.on_returned(self._now(), number, attempt, str(error)))
        except Refused as error:
            self._execute(core.on_failure(self._now(), number, attempt, str(error), never=True))
        except RelaxError as error:
            self._execute(core.on_failure(self._now(), number, attempt, str(error)))
        except Exception as error:
            # A bug; the request must not wait for its deadline because of it.
            log.exception("a sequence at %s", slot)
            self._execute(core.on_failure(self._now(), number, attempt, f"{type(error).__name__}: {error}"))
        finally:
            self._attempts.pop((number, attempt), None)
            # Has the engine end the sequence, unless it has ended.
            await stream.aclose()  # type: ignore[attr-defined]

    async def _probe(self, slot: str, epoch: int) -> None:
        try:
            report = await self._engine(slot, PROBE_TIMEOUT_S).load()
            self._execute(self.core.on_report(self._now(), slot, report))
        except RelaxError as error:
            self._execute(self.core.on_no_report(self._now(), slot, epoch, f"no report: {error}"))
        except Exception as error:
            log.exception("a probe of %s", slot)
            self._execute(self.core.on_no_report(self._now(), slot, epoch, f"{type(error).__name__}: {error}"))
        finally:
            self._probes.pop(slot, None)

    def _engine(self, slot: str, timeout_s: float) -> Generation:
        return self._run.actor(slot, Generation, timeout_s=timeout_s)

    async def _keep_running(self, job: Callable[[], Awaitable[None]]) -> None:
        """Restart a background task that ends: without it no request would be sent, or none would ever expire."""
        failures, what = 0, job.__name__.strip("_")
        while True:
            began = self._now()
            try:
                await job()
                why = "it ended"
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                log.exception("the router's job %r", what)
            failures = 1 if self._now() - began > STABLE_S else failures + 1
            if failures >= MAX_FAILURES:
                break
            await asyncio.sleep(RETRY_S)
        # Fail every caller: none would be answered any more, and no deadline checked.
        self._broken = f"its job {what!r} failed {failures} times, at last with {why}"
        log.error("the router has ended: %s", self._broken)
        callers, self._callers = self._callers, {}
        for caller in callers.values():
            if not caller.ended.done():
                caller.ended.set_exception(self._ended_error())
            if caller.parts is not None:
                caller.parts.put_nowait(None)

    def _ended_error(self) -> RouterEnded:
        hint = "ask within its `async with`" if self._broken == LEFT else "see the log; make a new router"
        return RouterEnded("a request to the router", why=self._broken, hint=hint)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._execute(self.core.tick(self._now()))

    async def _follow(self) -> None:
        async with watch_members(self._run.registry, self._role) as members:
            self._members = members
            async for now in members.changes():
                committed, versions = members.committed, list[VersionRecord]()
                fleet = self.core.fleet
                if committed is not None and not fleet.frozen and committed.version > fleet.committed.version:
                    # Several fast commits arrive as one change: ask for all versions.
                    versions = await self._versions(committed)
                entries = [
                    EngineEntry(m.who.slot, m.who.epoch, m.state, m.policy_version, m.progress)
                    for m in now
                    if m.who.role == self._role
                ]
                self._execute(self.core.on_members(self._now(), entries, versions))

    async def _versions(self, committed: VersionRecord) -> list[VersionRecord]:
        with contextlib.suppress(RelaxError, TimeoutError):
            async with asyncio.timeout(VERSIONS_TIMEOUT_S):
                return await self._run.registry.versions()
        log.warning("the registry does not list its versions; only %d is known", committed.version)
        return [committed]


def _require_done(outcome: Outcome) -> Outcome:
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
