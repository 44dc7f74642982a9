"""The supervisor as a pure state machine: events in, actions out, no I/O, no clock of its own.

A slot goes pending -> requested -> starting -> ready, from any of these through hung, stopping or killing to its
exit, and from there to backoff (it is started again) or ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import msgspec

from relax_rt.supervision.diagnosis import Diagnosis
from relax_rt.supervision.protocol import (
    Action,
    Done,
    DumpStacks,
    Emit,
    Event,
    Kill,
    KillRequested,
    Progress,
    RestartRequested,
    RunStarted,
    SlotExited,
    SlotFinished,
    SlotReady,
    SlotSpawned,
    Start,
    Stop,
    StopRequested,
    Tick,
)
from relax_rt.supervision.spec import SlotSpec
from relax_rt.transport.errors import Refused

State = Literal["pending", "requested", "starting", "ready", "hung", "stopping", "killing", "backoff", "ended"]
LIVE: frozenset[State] = frozenset({"requested", "starting", "ready", "hung", "stopping", "killing"})
REKILL_S = 5.0
STORY = 24


class InvalidTransition(RuntimeError):
    """An event that cannot happen in the slot's state: a fault of the shell. Carries the slot's last events."""


class Ending(NamedTuple):
    """How the run will end once everything has stopped."""

    exit_code: int
    reason: str
    diagnosis: Diagnosis | None = None
    first: Diagnosis | None = None


class SlotView(msgspec.Struct, frozen=True, kw_only=True):
    """A slot as people see it; `since` is the core's clock at the last change of state."""

    slot: str
    state: State
    epoch: int
    pid: int
    restarts: int
    since: float
    progress: int
    detail: str
    waiting: str
    last: Diagnosis | None


class _Slot:
    def __init__(self, spec: SlotSpec) -> None:
        self.spec = spec
        self.state: State = "pending"
        self.since = 0.0
        self.deadline: float | None = None
        self.epoch = self.pid = self.restarts = 0
        self.failures: deque[float] = deque()
        self.recent: deque[Diagnosis] = deque(maxlen=spec.max_restarts + 1)
        self.good_s = 0.0
        self.good_from: float | None = None
        self.moved_at = 0.0
        self.progress = 0
        self.detail = self.waiting = ""
        self.was_ready = self.finished = self.restart_asked = self.failed = False
        self.resume: State = "ready"
        self.condemned: tuple[Literal["killed", "hang"], str] = ("killed", "")
        self.last: Diagnosis | None = None
        self.story: deque[str] = deque(maxlen=STORY)

    def view(self) -> SlotView:
        return SlotView(
            slot=self.spec.slot,
            state=self.state,
            epoch=self.epoch,
            pid=self.pid,
            restarts=self.restarts,
            since=self.since,
            progress=self.progress,
            detail=self.detail,
            waiting=self.waiting,
            last=self.last,
        )


class Supervisor:
    """The tree's state. `handle` takes one event and answers with the actions to carry out, in order.

    Args:
        specs: the slots.
        uniform: a draw from [0, 1) for the jitter of back-off, as `random.Random(seed).random`.
    """

    def __init__(self, specs: Iterable[SlotSpec], uniform: Callable[[], float]) -> None:
        self._slots = {spec.slot: _Slot(spec) for spec in specs}
        self._uniform = uniform
        self._now = float("-inf")
        self._out: list[Action] = []
        self._started = False
        self._ending: Ending | None = None
        self._done: Done | None = None

    @property
    def draining(self) -> str:
        """Why the run is ending; empty while it is not."""
        return self._ending.reason if self._ending else ""

    @property
    def done(self) -> Done | None:
        """Set when every slot has ended."""
        return self._done

    def view(self) -> list[SlotView]:
        """All slots, in start order."""
        return [s.view() for s in sorted(self._slots.values(), key=lambda s: s.spec.tier)]

    def next_deadline(self) -> float | None:
        """When the next Tick is due."""
        return min((s.deadline for s in self._slots.values() if s.deadline is not None), default=None)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take an event at time `now` (monotonic seconds).

        Raises:
            InvalidTransition: the event cannot happen in the slot's state.
            Refused: an operator's restart of a slot that does not exist or of a run that is ending.
        """
        self._now = max(self._now, now)
        self._out = []
        match event:
            case RunStarted():
                self._started = True
            case StopRequested(reason=reason, exit_code=code):
                self._drain(Ending(code, reason))
            case KillRequested(reason=reason, exit_code=code):
                self._drain(Ending(code, reason))
                self._kill_all(reason)
            case RestartRequested(slot=slot, reason=reason):
                self._on_restart_requested(slot, reason)
            case Tick():
                pass
            case _:
                self._on_slot_event(event)
        for s in self._slots.values():
            if s.deadline is not None and s.deadline <= self._now:
                self._on_deadline(s)
        self._advance()
        return self._out

    def _on_slot_event(self, event: SlotSpawned | SlotReady | SlotFinished | SlotExited | Progress) -> None:
        slot = self._slots.get(event.slot)
        if slot is None:
            raise InvalidTransition(f"{type(event).__name__} for {event.slot}, which is no slot of this run")
        if not isinstance(event, Progress):
            slot.story.append(f"{self._now:.3f} {slot.state}: {type(event).__name__}")
        if slot.state not in LIVE:
            raise self._invalid(slot, event)
        match event:
            case SlotSpawned():
                self._on_spawned(slot, event)
            case SlotReady():
                self._on_ready(slot, event)
            case SlotFinished():
                self._on_finished(slot)
            case Progress():
                self._on_progress(slot, event)
            case SlotExited():
                self._on_exited(slot, event.diagnosis)

    def _on_spawned(self, s: _Slot, event: SlotSpawned) -> None:
        if s.pid:
            raise self._invalid(s, event)
        s.epoch, s.pid = event.epoch, event.pid
        self._emit("slot_spawned", s, pid=s.pid)
        if s.state == "requested":
            self._enter(s, "starting", s.spec.start_timeout_s)
        elif s.state == "stopping":
            self._out.append(Stop(s.spec.slot))
        elif s.state == "killing":
            self._out.append(Kill(s.spec.slot, *s.condemned))

    def _on_ready(self, s: _Slot, event: SlotReady) -> None:
        if not s.pid:
            raise self._invalid(s, event)
        if s.state == "starting":
            s.was_ready = True
            s.good_from = s.moved_at = self._now
            self._emit("slot_ready", s)
            self._enter(s, "ready", None if s.waiting else s.spec.hang_after_s)

    def _on_finished(self, s: _Slot) -> None:
        s.finished = True
        if s.state in ("starting", "ready", "hung"):
            self._enter(s, "stopping", s.spec.stop_timeout_s)

    def _on_progress(self, s: _Slot, event: Progress) -> None:
        moved = event.n > s.progress or bool(s.waiting) or bool(event.waiting)
        s.progress, s.waiting, s.detail = max(s.progress, event.n), event.waiting, event.detail
        if moved:
            s.moved_at = self._now
        if s.state == "hung" and moved and s.resume == "ready":
            self._emit("slot_recovered", s)
            self._enter(s, "ready", s.spec.hang_after_s)
        if s.state == "ready" and s.waiting:
            s.deadline = None
        elif s.state == "ready" and (moved or s.deadline is None):
            s.deadline = self._now + s.spec.hang_after_s
        if event.extend_s > 0 and s.state in ("starting", "ready", "stopping") and s.deadline is not None:
            s.deadline += event.extend_s

    def _on_exited(self, s: _Slot, diagnosis: Diagnosis) -> None:
        self._settle_good_time(s, self._now if diagnosis.kind != "hang" else s.moved_at)
        s.last = diagnosis
        s.pid, s.progress, s.detail, s.waiting = 0, 0, "", ""
        asked = s.restart_asked or self._ending is not None
        finished = s.finished or (not diagnosis.failed and not asked)
        self._emit("slot_exited", s, finished=finished, diagnosis=msgspec.to_builtins(diagnosis))
        if self._ending is not None:
            self._end(s, failed=diagnosis.failed and not s.finished)
        elif s.restart_asked and not s.finished:
            self._retry(s, 0.0)
        elif finished and s.spec.significant:
            self._end(s, failed=False)
            open_ = [o.spec.slot for o in self._slots.values() if o.spec.significant and o.state != "ended"]
            if not open_:
                self._drain(Ending(0, f"{s.spec.slot} has finished"))
        elif finished and s.spec.restart != "permanent":
            self._end(s, failed=False)
        elif diagnosis.kind == "config" or (diagnosis.kind == "import_error" and not s.was_ready):
            # Another start would fail in the same way.
            self._end(s, failed=True)
            self._fail(s, diagnosis, 2 if diagnosis.kind == "config" else 1, "cannot start")
        elif s.spec.restart == "temporary":
            self._end(s, failed=True)
            if s.spec.significant:
                self._fail(s, diagnosis, 1, "failed and is never restarted")
        else:
            self._on_failure(s, diagnosis)

    def _on_failure(self, s: _Slot, diagnosis: Diagnosis) -> None:
        while s.failures and s.good_s - s.failures[0] >= s.spec.period_s:
            s.failures.popleft()
            s.recent.popleft()
        s.recent.append(diagnosis)
        if len(s.failures) >= s.spec.max_restarts:
            self._end(s, failed=True)
            count = len(s.failures) + 1
            self._fail(s, diagnosis, 1, f"failed {count} times in {s.spec.period_s:g} s of its own good time")
            return
        limit = min(s.spec.backoff_max_s, s.spec.backoff_first_s * 2.0 ** len(s.failures))
        s.failures.append(s.good_s)
        self._retry(s, limit * self._uniform())

    def _retry(self, s: _Slot, wait_s: float) -> None:
        s.restarts += 1
        self._emit("slot_restarting", s, wait_s=round(wait_s, 3), restarts=s.restarts)
        self._enter(s, "backoff", wait_s)

    def _fail(self, s: _Slot, diagnosis: Diagnosis, exit_code: int, what: str) -> None:
        """End the run because of one slot; the earliest failure still remembered anywhere is named with it."""
        every = [d for other in self._slots.values() for d in other.recent if d.failed]
        first = min(every, key=lambda d: d.at, default=None)
        self._drain(
            Ending(
                exit_code,
                f"{s.spec.slot} {what}: {diagnosis.cause}",
                diagnosis,
                first if first is not diagnosis else None,
            )
        )

    def _on_restart_requested(self, name: str, reason: str) -> None:
        s = self._slots.get(name)
        if s is None:
            raise Refused(f"cannot restart {name!r}", why="no such slot", hint="slots: " + ", ".join(self._slots))
        if self._ending is not None:
            raise Refused(f"cannot restart {name}", why=f"the run is ending: {self._ending.reason}")
        self._emit("slot_restart_requested", s, reason=reason)
        if s.state in ("requested", "starting", "ready", "hung"):
            s.restart_asked = True
            self._stop(s)
        elif s.state in ("stopping", "killing"):
            s.restart_asked = True
        elif s.state in ("backoff", "ended"):
            s.failed = False
            self._enter(s, "backoff", 0.0)

    def _on_deadline(self, s: _Slot) -> None:
        match s.state:
            case "requested":
                self._kill(s, "killed", f"not spawned within {s.spec.start_timeout_s:g} s")
            case "starting":
                self._condemn(s, "hang", f"not ready within start_timeout_s = {s.spec.start_timeout_s:g} s")
            case "ready":
                reason = f"busy without progress for hang_after_s = {s.spec.hang_after_s:g} s"
                self._condemn(s, "hang", reason + (f" while: {s.detail}" if s.detail else ""))
            case "hung":
                self._kill(s, *s.condemned)
            case "stopping":
                self._kill(s, "killed", f"still running {s.spec.stop_timeout_s:g} s after it was asked to stop")
            case "killing":
                self._kill(s, *s.condemned)
            case "backoff":
                self._start(s)
            case _:
                s.deadline = None

    def _condemn(self, s: _Slot, kind: Literal["killed", "hang"], reason: str) -> None:
        s.condemned = (kind, reason)
        s.resume = s.state
        self._emit("slot_hung", s, reason=reason)
        self._out.append(DumpStacks(s.spec.slot))
        self._enter(s, "hung", s.spec.dump_grace_s)

    def _start(self, s: _Slot) -> None:
        s.epoch = s.pid = s.progress = 0
        s.detail = s.waiting = ""
        s.finished = s.restart_asked = s.failed = False
        s.good_from = None
        self._out.append(Start(s.spec.slot, s.restarts))
        self._enter(s, "requested", s.spec.start_timeout_s)

    def _stop(self, s: _Slot) -> None:
        self._out.append(Stop(s.spec.slot))
        self._enter(s, "stopping", s.spec.stop_timeout_s)

    def _kill(self, s: _Slot, kind: Literal["killed", "hang"], reason: str) -> None:
        if s.state != "killing":
            self._emit("slot_killed", s, reason=reason)
        s.condemned = (kind, reason)
        self._out.append(Kill(s.spec.slot, kind, reason))
        self._enter(s, "killing", REKILL_S)

    def _end(self, s: _Slot, *, failed: bool) -> None:
        s.failed = failed
        self._enter(s, "ended", None)

    def _drain(self, ending: Ending) -> None:
        """The first cause counts; a later one is only logged."""
        if self._ending is not None:
            self._out.append(Emit("run_ending_already", {"reason": ending.reason}))
            return
        self._ending = ending
        self._out.append(Emit("run_draining", {"reason": ending.reason, "exit_code": ending.exit_code}))
        for s in self._slots.values():
            if s.state in ("pending", "backoff"):
                self._enter(s, "ended", None)

    def _kill_all(self, reason: str) -> None:
        for s in self._slots.values():
            if s.state in LIVE and s.state != "killing":
                self._kill(s, "killed", reason)

    def _advance(self) -> None:
        if self._ending is None and self._started:
            self._advance_start()
        if self._ending is not None and self._done is None:
            self._advance_stop()

    def _advance_start(self) -> None:
        work = [s for s in self._slots.values() if not s.spec.system]
        if work and all(s.state == "ended" for s in work):
            failed = [s.spec.slot for s in work if s.failed]
            self._drain(
                Ending(int(bool(failed)), f"failed: {', '.join(failed)}" if failed else "all roles have finished")
            )
            return
        for s in sorted(self._slots.values(), key=lambda s: s.spec.tier):
            below = (o for o in self._slots.values() if o.spec.tier < s.spec.tier)
            if s.state == "pending" and all(o.state in ("ready", "ended") for o in below):
                self._start(s)

    def _advance_stop(self) -> None:
        assert self._ending is not None
        live = [s for s in self._slots.values() if s.state in LIVE]
        if not live:
            self._done = Done(*self._ending)
            self._out.append(Emit("run_done", {"reason": self._ending.reason, "exit_code": self._ending.exit_code}))
            self._out.append(self._done)
            return
        top = max(s.spec.tier for s in live)
        for s in live:
            if s.spec.tier == top and s.state in ("requested", "starting", "ready"):
                self._stop(s)

    def _enter(self, s: _Slot, state: State, timeout_s: float | None) -> None:
        if s.state != state:
            s.story.append(f"{self._now:.3f} {s.state} -> {state}")
            s.since = self._now
        s.state = state
        s.deadline = None if timeout_s is None else self._now + timeout_s

    def _settle_good_time(self, s: _Slot, until: float) -> None:
        if s.good_from is not None:
            s.good_s += max(0.0, until - s.good_from)
            s.good_from = None

    def _emit(self, kind: str, s: _Slot, **fields: Any) -> None:
        self._out.append(Emit(kind, {"slot": s.spec.slot, "epoch": s.epoch, **fields}))

    def _invalid(self, s: _Slot, event: Event) -> InvalidTransition:
        story = "\n  ".join(s.story)
        return InvalidTransition(f"{type(event).__name__} in state {s.state!r} of {s.spec.slot}; its story:\n  {story}")
