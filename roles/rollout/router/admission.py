"""Admission control of generation: how many sequences an engine runs, and which callers go first.

Two limits, both driven by the load of the engines:

- `EngineCap` bounds the sequences of one engine by the use of its KV cache. It runs beside the engine: a rollout asks
  it before it starts groups of its own and before it accepts a routed request.
- `FairAdmission`, a pure state machine, decides which calls of many clients run, wait or are rejected. The HTTP gateway
  uses it through `AdmissionQueue`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from relax_rt.transport.rpc.errors import Refused

T = TypeVar("T")

log = logging.getLogger(__name__)

TICK_S = 0.1


class CapLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one engine, and when its cap changes.

    Attributes:
        most, least: maximum of running sequences, and the number that may always run.
        high, low: high-water and low-water mark, as shares of the KV cache in use.
        shrink: the cap falls to this share of the running sequences.
        every_s: time between two changes of the cap, so that a change can take effect.
    """

    most: int
    least: int = 1
    high: float = 0.85
    low: float = 0.6
    shrink: float = 0.75
    every_s: float = 5.0

    def __post_init__(self) -> None:
        if not (1 <= self.least <= self.most and 0 <= self.low < self.high <= 1 and 0 < self.shrink < 1):
            raise Refused(
                f"limits {self}", why="they contradict each other", hint="1 <= least <= most, 0 <= low < high <= 1"
            )


class EngineCap:
    """Bounds the running sequences of one engine.

    Above the high-water mark the cap shrinks, and nothing is accepted until the use has fallen to the low-water mark.
    Below that the cap rises by one at a time, and only while about as many sequences run. Between the marks nothing
    changes: otherwise the cap would oscillate with every sequence that ends.
    """

    def __init__(self, limits: CapLimits) -> None:
        self.limits = limits
        self.cap = limits.most
        self.closed = False
        """The cache was above the high-water mark and has not been below the low-water mark since."""
        self._changed_at = float("-inf")

    def observe(self, now: float, kv_used: float, running: int) -> None:
        """Adapt the cap to the use of the KV cache (0 to 1) by the running sequences."""
        limits = self.limits
        if kv_used >= limits.high:
            self.closed = True
            if self._may_change(now):
                self._set(now, max(limits.least, int(min(self.cap, running) * limits.shrink)))
        elif kv_used <= limits.low:
            self.closed = False
            # Near the cap, not at it: this may be called just after a sequence has ended.
            if self.cap < limits.most and running > limits.shrink * self.cap and self._may_change(now):
                self._set(now, self.cap + 1)

    def room(self, running: int) -> int:
        """Return how many sequences may be accepted now."""
        if running < self.limits.least:
            return (self.limits.least if self.closed else max(self.cap, self.limits.least)) - running
        return 0 if self.closed else max(0, self.cap - running)

    def _may_change(self, now: float) -> bool:
        return now - self._changed_at >= self.limits.every_s

    def _set(self, now: float, cap: int) -> None:
        if cap != self.cap:
            self.cap, self._changed_at = cap, now


class AdmissionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of `FairAdmission`, and when its cap changes.

    Attributes:
        first, least, most: cap on running sequences at the start, its minimum and maximum (a larger single call may
            exceed it).
        waiting: maximum number of waiting calls.
        wait_s: longest wait of a call, from its submission or preemption.
        high, low: share of the engines' KV caches in use above which calls are preempted, below which the cap grows.
        slack: share of the running sequences that may wait at the router for an engine, to fill room as it comes.
        shrink: the cap falls to this share of the running sequences.
        grow: the cap grows by this share, by at least one.
        every_s: time between two changes of the cap, so that a change can take effect.
        preemptions: how often one call may be preempted.
    """

    first: int = 16
    least: int = 1
    most: int = 4096
    waiting: int = 4096
    wait_s: float = 300.0
    high: float = 0.9
    low: float = 0.7
    slack: float = 0.1
    shrink: float = 0.85
    grow: float = 0.25
    every_s: float = 0.5
    preemptions: int = 2

    def __post_init__(self) -> None:
        sound = 1 <= self.least <= self.first <= self.most and self.waiting >= 0 and self.wait_s > 0
        if not (sound and 0 < self.low < self.high <= 1 and 0 < self.shrink < 1 and self.grow > 0 <= self.slack):
            hint = "1 <= least <= first <= most, 0 < low < high <= 1, 0 < shrink < 1"
            raise Refused(f"limits {self}", why="they contradict each other", hint=hint)


class FleetLoad(msgspec.Struct, frozen=True):
    """Load of all engines.

    Attributes:
        room: further sequences that the engines accept.
        stalled: sequences that wait at the router for an engine.
        kv_used: use of the fullest KV cache, 0 to 1.
    """

    room: int
    stalled: int
    kv_used: float


class Admit(msgspec.Struct, frozen=True):
    """Run a call."""

    number: int


class Preempt(msgspec.Struct, frozen=True):
    """Cancel a call's sequences; the call waits again."""

    number: int


class Reject(msgspec.Struct, frozen=True):
    """Fail a waiting call."""

    number: int
    why: str
    retry_after_s: float


AdmissionAction = Admit | Preempt | Reject


class _QueuedCall:
    """A waiting or running call."""

    def __init__(self, number: int, group: str, sequences: int, now: float) -> None:
        self.number, self.group, self.sequences = number, group, sequences
        self.waits_since = now
        self.preemptions = 0
        self.pinned = False
        """Its caller has seen tokens, so that it cannot be restarted."""


class FairAdmission:
    """Decides which calls run: events in, actions out.

    The cap on running sequences *grows* while it is reached and the engines have room, *holds* between, and shrinks
    when the engines fall behind: then the youngest calls are *preempted* and wait again at the head of their queue, so
    that older ones, which have more work to lose, end first. A call that was preempted too often, or whose caller has
    seen tokens, is not preempted.

    Fairness: the next call is of the group with the fewest running sequences; among equals of the one that was served
    longest ago. When the queue is full, a new call takes the place of the youngest call of the group that waits with
    most, or is rejected itself.

    Work is counted in sequences, as engines count it: a call has one for each answer. A call larger than the cap runs
    when nothing else does; no other call overtakes the next one.
    """

    def __init__(self, limits: AdmissionLimits | None = None) -> None:
        self.limits = limits or AdmissionLimits()
        self.cap = self.limits.first
        self.counts: Counter[str] = Counter()
        self._calls: OrderedDict[int, _QueuedCall] = OrderedDict()
        """Running calls, in the order of their admission."""
        self._queues: dict[str, OrderedDict[int, _QueuedCall]] = {}
        """Waiting calls, by group."""
        self._waiting: dict[int, _QueuedCall] = {}
        self._sequences = 0
        self._running: Counter[str] = Counter()
        """Running sequences of each group."""
        self._served: dict[str, int] = {}
        """Number of the last admission, by group."""
        self._admissions = 0
        self._ranks: list[tuple[int, int, str]] = []
        """A heap of (running, last admission, group) of the waiting groups. A rank that has changed is pushed
        again; the outdated one is dropped when it comes to the top."""
        self._changed_at = float("-inf")
        self._gap_s = 0.0
        """Moving average of the time between two calls that end."""
        self._ended_at: float | None = None

    @property
    def running(self) -> int:
        """Number of admitted sequences."""
        return self._sequences

    @property
    def waiting(self) -> int:
        """Number of waiting calls."""
        return len(self._waiting)

    # --- events

    def submit(self, now: float, number: int, group: str, sequences: int = 1) -> list[AdmissionAction]:
        """Queue a new call; `number` must be new, `sequences` at least one."""
        self.counts["arrived"] += 1
        actions: list[AdmissionAction] = []
        # With `waiting = 0` calls are still admitted as long as there is room.
        if self.waiting >= self.limits.waiting and not (not self.waiting and self._fits(sequences)):
            # It takes the place of the youngest call of the longest queue, if that is longer than its own.
            longest = max(self._queues.items(), key=lambda item: (len(item[1]), item[0]), default=("", OrderedDict()))[
                1
            ]
            if len(longest) <= len(self._queues.get(group, ())) + 1:
                return [self._reject(number, f"{self.waiting} calls wait already, the bound", now)]
            victim = next(reversed(longest.values()))
            self._dequeue(victim)
            actions.append(self._reject(victim.number, "others, who had fewer calls waiting, came", now))
        self._enqueue(_QueuedCall(number, group, sequences, now), first=False)
        return actions + self._admit()

    def finish(self, now: float, number: int) -> list[AdmissionAction]:
        """Remove a call that has ended or was cancelled; without effect if it is unknown."""
        if (call := self._waiting.get(number)) is not None:
            self._dequeue(call)
            self.counts["cancelled"] += 1
        elif (call := self._calls.pop(number, None)) is not None:
            self._release(call)
            self.counts["ended"] += 1
            if self._ended_at is not None:
                self._gap_s += 0.1 * (now - self._ended_at - self._gap_s)
            self._ended_at = now
        return self._admit()

    def pin(self, number: int) -> bool:
        """Exclude a running call from preemption, because its caller sees tokens. False: it was just preempted."""
        if (call := self._calls.get(number)) is not None:
            call.pinned = True
        return call is not None

    def tick(self, now: float, load: FleetLoad) -> list[AdmissionAction]:
        """Reject calls that have waited too long, and adapt the cap to the engines' load."""
        late = [call for call in self._waiting.values() if now - call.waits_since >= self.limits.wait_s]
        actions: list[AdmissionAction] = []
        for call in late:
            self._dequeue(call)
            actions.append(self._reject(call.number, f"it waited {self.limits.wait_s:g} s for its turn", now))
        if now - self._changed_at >= self.limits.every_s:
            actions += self._adapt(now, load)
        return actions + self._admit()

    # --- inside

    def _adapt(self, now: float, load: FleetLoad) -> list[AdmissionAction]:
        limits, running = self.limits, self.running
        behind = load.stalled > max(1.0, limits.slack * running)
        if load.kv_used >= limits.high or behind:
            # Sequences without an engine are too many in any case; with full caches also a share of the others.
            fits = running - load.stalled + int(limits.slack * running)
            cap = min(fits, int(running * limits.shrink)) if load.kv_used >= limits.high else fits
            self._set(now, min(self.cap, max(limits.least, cap)))
            return self._preempt(now, running - self.cap)
        full = running >= self.cap or self.waiting > 0
        if load.kv_used < limits.low and not load.stalled and load.room > 0 and full and self.cap < limits.most:
            wanted = sum(call.sequences for call in self._waiting.values())
            by = max(1, int(self.cap * limits.grow), min(load.room, wanted))
            self._set(now, min(limits.most, self.cap + by))
        return []

    def _set(self, now: float, cap: int) -> None:
        if cap != self.cap:
            self.cap, self._changed_at = cap, now

    def _preempt(self, now: float, excess: int) -> list[AdmissionAction]:
        """Move the youngest calls that may be preempted back to the head of their queues; the oldest continues."""
        found: list[_QueuedCall] = []
        for call in reversed(self._calls.values()):
            if sum(one.sequences for one in found) >= excess or len(found) + 1 == len(self._calls):
                break
            if not call.pinned and call.preemptions < self.limits.preemptions:
                found.append(call)
        for call in found:
            del self._calls[call.number]
            self._release(call)
            call.preemptions += 1
            call.waits_since = now
            self.counts["preempted"] += 1
            self._enqueue(call, first=True)
        return [Preempt(call.number) for call in found]

    def _fits(self, sequences: int) -> bool:
        return self.running + sequences <= self.cap or not self.running

    def _admit(self) -> list[AdmissionAction]:
        actions: list[AdmissionAction] = []
        while self._waiting:
            group = self._next_group()
            call = next(iter(self._queues[group].values()))
            if not self._fits(call.sequences):
                break
            self._dequeue(call)
            self._admissions += 1
            self._served[group] = self._admissions
            self._calls[call.number] = call
            self._sequences += call.sequences
            self._running[group] += call.sequences
            self._rank(group)
            self.counts["admitted"] += 1
            actions.append(Admit(call.number))
        return actions

    def _next_group(self) -> str:
        while (best := self._ranks[0]) != self._rank_of(best[2]) or best[2] not in self._queues:
            heapq.heappop(self._ranks)
        return best[2]

    def _rank_of(self, group: str) -> tuple[int, int, str]:
        return self._running[group], self._served.get(group, 0), group

    def _rank(self, group: str) -> None:
        """Push a group's current rank; outdated ones stay until they come to the top, or are too many."""
        if group in self._queues:
            heapq.heappush(self._ranks, self._rank_of(group))
        if len(self._ranks) > 64 + 4 * len(self._queues):
            self._ranks = [self._rank_of(one) for one in self._queues]
            heapq.heapify(self._ranks)

    def _enqueue(self, call: _QueuedCall, *, first: bool) -> None:
        queue = self._queues.setdefault(call.group, OrderedDict())
        queue[call.number] = self._waiting[call.number] = call
        if first:
            queue.move_to_end(call.number, last=False)
        if len(queue) == 1:
            self._rank(call.group)

    def _dequeue(self, call: _QueuedCall) -> None:
        del self._waiting[call.number]
        queue = self._queues[call.group]
        del queue[call.number]
        if not queue:
            del self._queues[call.group]
            self._forget(call.group)

    def _release(self, call: _QueuedCall) -> None:
        group = call.group
        self._sequences -= call.sequences
        self._running[group] -= call.sequences
        if not self._running[group]:
            del self._running[group]
            self._forget(group)
        self._rank(group)

    def _forget(self, group: str) -> None:
        """Drop the state of a group without calls."""
        if group not in self._running and group not in self._queues:
            self._served.pop(group, None)

    def _reject(self, number: int, why: str, now: float) -> Reject:
        """Reject a call, with an estimate of the time until the waiting calls will have been admitted, 1 to 60 s."""
        self.counts["rejected"] += 1
        return Reject(number, why, min(60.0, max(1.0, self.waiting * self._gap_s)))


# --- for callers


class AdmissionRejected(Refused):
    """A call was rejected: too many wait, or it waited for too long."""

    retry_after_s: float = 1.0


class _AdmissionWait:
    """One call of `AdmissionQueue`: futures for its next admission and preemption."""

    def __init__(self) -> None:
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.preempted: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class AdmissionQueue:
    """Makes calls of many clients wait for admission, as `FairAdmission` decides. Use with `async with`.

    Args:
        load: load of the engines, `Router.load`.
    """

    def __init__(self, limits: AdmissionLimits, load: Callable[[], FleetLoad]) -> None:
        self.core = FairAdmission(limits)
        self._load = load
        self._numbers = itertools.count(1)
        self._waits: dict[int, _AdmissionWait] = {}
        self._ticking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AdmissionQueue:
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)

    async def run(self, group: str, work: Callable[[Callable[[], bool]], Awaitable[T]], *, sequences: int = 1) -> T:
        """Wait for admission and do the work; restart it each time it is preempted.

        Args:
            group: unit of fairness.
            work: gets `pin`, which it calls before an effect that must not be repeated. False: the call was preempted
                and is about to be cancelled.
            sequences: number that the work generates.

        Raises:
            AdmissionRejected: too many calls wait, or this one waited for too long.
        """
        number, wait = next(self._numbers), _AdmissionWait()
        self._waits[number] = wait
        self._do(self.core.submit(self._now(), number, group, sequences))
        try:
            while True:
                await wait.admitted
                task = asyncio.ensure_future(work(lambda: self.core.pin(number)))
                try:
                    either: list[asyncio.Future[Any]] = [task, wait.preempted]
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                    if task.done() or not wait.preempted.done():
                        return await task
                finally:
                    await _cancel(task)
                wait.preempted = asyncio.get_running_loop().create_future()
        finally:
            del self._waits[number]
            for future in (wait.admitted, wait.preempted):
                future.cancel()
            self._do(self.core.finish(self._now(), number))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _do(self, actions: list[AdmissionAction]) -> None:
        for action in actions:
            if (wait := self._waits.get(action.number)) is None:
                continue
            match action:
                case Admit() if not wait.admitted.done():
                    wait.admitted.set_result(None)
                case Reject(_, why, retry_after_s) if not wait.admitted.done():
                    error = AdmissionRejected("too much to do", why=why)
                    error.retry_after_s = retry_after_s
                    wait.admitted.set_exception(error)
                case Preempt():
                    wait.admitted = asyncio.get_running_loop().create_future()
                    if not wait.preempted.done():
                        wait.preempted.set_result(None)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._do(self.core.tick(self._now(), self._load()))
            except Exception:
                # The loop must go on: without ticks no wait would ever end.
                log.exception("admission control")


async def _cancel(task: asyncio.Future[T]) -> None:
    """Cancel a task and wait until it has ended.

    It is not awaited, because a cancellation of the caller could not be told from the task's own.
    """
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()
