"""The supervisor as a pure state machine: events in, actions out, no I/O, no clock of its own.

A slot goes pending -> requested -> starting -> ready, from any of these through hung, stopping or killing to its
exit, and from there to backoff (it is started again, alone or with others) or ended. One that no node has room for is
pending again, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from relax_rt.supervision.diagnosis import Diagnosis
from relax_rt.supervision.lifecycle import Ending, InvalidTransition
from relax_rt.supervision.placement import Placer
from relax_rt.supervision.protocol import (
    Action,
    Done,
    DrainRequested,
    Event,
    Kill,
    KillRequested,
    NodeJoined,
    NodeLost,
    Progress,
    RestartRequested,
    RunStarted,
    ScaleRequested,
    SlotExited,
    SlotFinished,
    SlotReady,
    SlotSpawned,
    Stop,
    StopRequested,
    Tick,
)
from relax_rt.supervision.requests import Requests
from relax_rt.supervision.slots import Slot, SlotView
from relax_rt.supervision.spec import RoleSpec, SlotSpec
from relax_rt.supervision.tree import RoleRestart, Tree

__all__ = ["InvalidTransition", "SlotView", "Supervisor"]

PAUSE_S = 60.0
"""Slots report every second: if no report arrived for this long, the agent itself was suspended."""
BEAT_LATE_S = 5.0
"""An idle role says so every second; it is given at least this long, however short its `hang_after_s`."""


class Supervisor(Requests):
    """The tree's state. `handle` takes one event and answers with the actions to carry out, in order.

    Args:
        specs: the slots.
        uniform: a draw from [0, 1) for the jitter of back-off, as `random.Random(seed).random`.
        roles: rules of the roles; a role without them is one_for_one and needs all its slots.
        placer: finds room for slots; without one, every slot has room on this node.
        stall_after_s: the run ends when no slot that counts_for_stall made progress for this long; None: never.
        finished: why the run ends when every significant role has finished; empty: the last of them is named.
    """

    def __init__(
        self,
        specs: Iterable[SlotSpec],
        uniform: Callable[[], float],
        roles: Iterable[RoleSpec] = (),
        placer: Placer | None = None,
        stall_after_s: float | None = None,
        finished: str = "",
    ) -> None:
        super().__init__(Tree(specs, roles), uniform, placer)
        self._finished = finished
        self._stall_after_s = stall_after_s
        self._moved_at = float("-inf")
        """When a slot that counts_for_stall made progress last, or was not expected to."""

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
        return [slot.view() for slot in self._tree.ordered()]

    def next_deadline(self) -> float | None:
        """When the next Tick is due."""
        stalled_at = self._stalled_at()
        due = [s.deadline for s in self._tree if s.deadline is not None]
        return min([*due, *([stalled_at] if stalled_at is not None else [])], default=None)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take an event at time `now` (monotonic seconds).

        Raises:
            InvalidTransition: the event cannot happen in the slot's state.
            Refused: what an operator or a node asks for cannot be done, and why.
        """
        if now - self._now > PAUSE_S:
            # The machine or the agent was suspended, so reports could not arrive.
            self._moved_at = max(self._moved_at, now - PAUSE_S) if self._moved_at > float("-inf") else self._moved_at
        self._now = max(self._now, now)
        self._out = []
        match event:
            case RunStarted():
                self._started = True
            case StopRequested(reason=reason, exit_code=code):
                self._drain(Ending(code, reason))
            case KillRequested(reason=reason, exit_code=code):
                self._drain(Ending(code, reason))
                self._kill_all(self._tree, reason)
            case RestartRequested(slot=slot, reason=reason):
                self._on_restart_requested(slot, reason)
            case ScaleRequested(kind=kind, count=count):
                self._on_scale_requested(kind, count)
            case DrainRequested(what=what):
                self._on_drain_requested(what)
            case NodeJoined(node=node):
                self._on_node_joined(node)
            case NodeLost():
                self._on_node_lost(event)
            case Tick():
                pass
            case _:
                self._on_slot_event(event)
        # Before the deadlines, among which are starts: nothing starts once the work is over.
        self._conclude()
        for s in self._tree:
            if s.deadline is not None and s.deadline <= self._now:
                self._on_deadline(s)
        self._look_for_stall()
        self._advance()
        return self._out

    # What processes do.

    def _on_slot_event(self, event: SlotSpawned | SlotReady | SlotFinished | SlotExited | Progress) -> None:
        slot = self._tree.slots.get(event.slot)
        if slot is None:
            raise InvalidTransition(f"{type(event).__name__} for {event.slot}, which is no slot of this run")
        if not isinstance(event, Progress):
            slot.story.append(f"{self._now:.3f} {slot.state}: {type(event).__name__}")
        if not slot.live:
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

    def _on_spawned(self, s: Slot, event: SlotSpawned) -> None:
        if s.pid:
            raise self._invalid(s, event)
        s.epoch, s.pid = event.epoch, event.pid
        self._emit("slot_spawned", s, pid=s.pid)
        if s.state == "requested":
            self._enter(s, "starting", s.spec.start_timeout_s)
        elif s.state == "stopping":
            self._out.append(Stop(s.name))
        elif s.state == "killing":
            self._out.append(Kill(s.name, *s.condemned))

    def _on_ready(self, s: Slot, event: SlotReady) -> None:
        if not s.pid:
            raise self._invalid(s, event)
        if s.state == "starting":
            s.was_ready = True
            s.moved_at = self._now
            self._emit("slot_ready", s)
            self._enter(s, "ready", self._patience_s(s))
            s.role.begin_good_time(s, self._now)

    def _on_finished(self, s: Slot) -> None:
        s.finished = True
        if s.state in ("starting", "ready", "hung"):
            self._enter(s, "stopping", s.spec.stop_timeout_s)

    def _on_progress(self, s: Slot, event: Progress) -> None:
        # An idle role's report is itself the sign of life: it comes only if its event loop answered.
        if s.spec.counts_for_stall and (event.n > s.progress or event.extend_s > 0):
            self._moved_at = max(self._moved_at, self._now + event.extend_s)
        moved = event.n > s.progress or bool(s.waiting) or bool(event.waiting)
        s.progress, s.waiting, s.detail = max(s.progress, event.n), event.waiting, event.detail
        if moved:
            s.moved_at = self._now
        if s.state == "hung" and moved and s.resume == "ready":
            self._emit("slot_recovered", s)
            self._enter(s, "ready", self._patience_s(s))
        elif s.state == "ready" and moved:
            s.deadline = self._now + self._patience_s(s)
        elif s.state == "starting" and event.waiting and s.deadline is not None:
            # Whom it waits for may take long to start, and has a deadline of its own.
            s.deadline = max(s.deadline, self._now + s.spec.start_timeout_s)
        elif s.state == "stopping" and moved and s.spec.drains and not s.finished and s.deadline is not None:
            s.deadline = max(s.deadline, self._now + s.spec.stop_timeout_s)
        if event.extend_s > 0 and s.state in ("starting", "ready", "stopping") and s.deadline is not None:
            s.deadline += event.extend_s
        if s.state == "stopping" and s.deadline is not None:
            s.deadline = min(s.deadline, s.since + s.spec.stop_most_s)

    def _stalled_at(self) -> float | None:
        """When the run ends unless something moves."""
        if self._stall_after_s is None or self._ending is not None or self._moved_at == float("-inf"):
            return None
        return self._moved_at + self._stall_after_s

    def _look_for_stall(self) -> None:
        """End a run in which every slot is up and none gets on, each waiting for another.

        No slot is at fault by its own deadlines: waiting is a sign of life. Slots that start, hang or stop have
        deadlines of their own, and are movement; what an operator drained waits for the operator.
        """
        working = [s for s in self._tree if s.spec.counts_for_stall]
        if self._started and any(s.state not in ("ready", "ended") or s.drained for s in working):
            self._moved_at = self._now
        at = self._stalled_at()
        if at is None or at > self._now:
            return
        for s in working:
            if s.state == "ready":
                self._emit("slot_stalled", s, waiting=s.waiting or s.detail or "no reason given")
        waits = "; ".join(f"{s.name}: {s.waiting}" for s in working if s.state == "ready" and s.waiting)
        what = f"nothing moved for {self._stall_after_s:g} s, no token, step, reward or download"
        self._drain(Ending(1, f"{what}: {waits or 'no slot gives a reason'}"))

    def _patience_s(self, s: Slot) -> float:
        return max(s.spec.hang_after_s, BEAT_LATE_S) if s.waiting else s.spec.hang_after_s

    def _on_exited(self, s: Slot, diagnosis: Diagnosis, *, counted: bool = True) -> None:
        s.exited = True
        s.window.settle(self._now if diagnosis.kind != "hang" else s.moved_at)
        s.last = diagnosis
        s.forget_process()
        self._give_up_place(s)
        asked = s.restart_asked or s.drained or s.retired or s.cohort is not None or self._ending is not None
        finished = s.finished or (not diagnosis.failed and not asked)
        over = finished and (s.spec.significant or s.spec.restart != "permanent")
        self._emit("slot_exited", s, finished=finished, diagnosis=msgspec.to_builtins(diagnosis))
        if self._ending is not None:
            self._end(s, failed=diagnosis.failed and not s.finished)
            if s.role.rules.gang and diagnosis.failed:
                self._kill_all(s.role.slots, f"{s.name} has failed, and its gang cannot go on without it")
        elif s.retired or s.drained:
            self._end_by_request(s)
        elif diagnosis.final and not s.finished:
            self._end_run(s, diagnosis)
        elif s.cohort is not None and (s.role.rules.gang or not over):
            # Seen later but ended earlier: a peer may notice a death before we do.
            if s.cohort.failed and s.role.as_one and s.window.amend(diagnosis):
                s.cohort.cause = f"{s.name}: {diagnosis.cause}"
            self._hold(s)
        elif s.restart_asked and not s.finished:
            self._regroup([s], 0.0, "restart requested")
        elif not counted and s.spec.restart != "temporary":
            self._regroup(s.role.restarted_with(s), 0.0, diagnosis.cause, hard=s.role.rules.gang)
        elif over:
            self._on_over(s)
        else:
            self._on_failure(s, diagnosis)

    def _on_over(self, s: Slot) -> None:
        self._end(s, failed=False)
        open_ = [o for o in self._tree if o.spec.significant and (o.state != "ended" or o.drained)]
        if s.spec.significant and not open_:
            self._drain(Ending(0, self._finished or f"{s.name} has finished"))

    # Failures, restarts and escalation.

    def _on_failure(self, s: Slot, diagnosis: Diagnosis) -> None:
        if diagnosis.kind == "import_error" and not s.was_ready:
            self._end_run(s, diagnosis)
            return
        if s.role.rules.gang:
            generation = s.role.generation
            self._emit_role("gang_failed", s.role, slot=s.name, generation=generation, cause=diagnosis.cause)
        if s.spec.restart == "temporary":
            self._end(s, failed=True)
            if s.spec.significant:
                self._fail(s, diagnosis, 1, "failed and is never restarted")
            elif s.role.rules.gang:
                self._kill_all(s.role.slots, f"{s.name} has failed, and its gang is never restarted")
            return
        before = s.window.failed(diagnosis)
        if before is None:
            self._escalate(s, diagnosis)
            return
        wait_s = min(s.spec.backoff_max_s, s.spec.backoff_first_s * 2.0**before) * self._uniform()
        cause = f"{s.name}: {diagnosis.cause}"
        self._regroup(s.role.restarted_with(s), wait_s, cause, hard=s.role.rules.gang, failed=True)

    def _end_run(self, s: Slot, diagnosis: Diagnosis) -> None:
        """Another start would fail in the same way."""
        self._end(s, failed=True)
        what = "cannot go on" if s.was_ready else "cannot start"
        # Exit code 2 says that nothing was done yet.
        begun = s.was_ready or any(o.was_ready for o in self._tree if o.spec.significant)
        self._fail(s, diagnosis, 2 if diagnosis.kind == "config" and not begun else 1, what)

    def _escalate(self, s: Slot, diagnosis: Diagnosis) -> None:
        """The slot has used up its restarts: go on without it, else restart its role once as one, else end the run."""
        role = s.role
        what = f"failed {len(s.window.remembered)} times in {s.spec.period_s:g} s of its own good time"
        if role.can_spare(s):
            self._end(s, failed=True)
            s.given_up, s.waiting = True, f"given up: it {what}"
            left = sum(o.state != "ended" for o in role.slots)
            self._emit("slot_given_up", s, reason=what, cause=diagnosis.cause, left=left)
        elif role.may_restart(s):
            members = role.restarted_as_one(s)
            first = min((d for o in members for d in o.window.remembered), key=lambda d: d.at, default=diagnosis)
            role.restarts.append(RoleRestart(s, s.window.good_s, first))
            for member in members:
                member.window.clear()
            self._emit_role("role_restarting", role, slot=s.name, reason=what, cause=diagnosis.cause)
            wait_s = s.spec.backoff_max_s * self._uniform()
            self._regroup(members, wait_s, f"{s.name} {what}", hard=role.rules.gang)
        else:
            self._end(s, failed=True)
            self._fail(s, diagnosis, 1, what)

    def _fail(self, s: Slot, diagnosis: Diagnosis, exit_code: int, what: str) -> None:
        """End the run because of one slot; the earliest failure still remembered anywhere is named with it."""
        every = [d for other in self._tree for d in other.window.remembered if d.failed]
        every += [restart.first for role in self._tree.roles.values() for restart in role.restarts]
        first = min(every, key=lambda d: d.at, default=None)
        other = first if first is not diagnosis else None
        self._drain(Ending(exit_code, f"{s.name} {what}: {diagnosis.cause}", diagnosis, other))

    def _on_deadline(self, s: Slot) -> None:
        match s.state:
            case "requested":
                self._kill(s, "killed", f"no process came of it within {s.spec.spawn_timeout_s:g} s of its order")
            case "starting":
                self._condemn(s, "hang", f"not ready within start_timeout_s = {s.spec.start_timeout_s:g} s")
            case "ready" if s.waiting:
                reason = f"no sign of life for {self._patience_s(s):g} s while it waited: {s.waiting}"
                self._condemn(s, "hang", reason)
            case "ready":
                reason = f"busy without progress for hang_after_s = {s.spec.hang_after_s:g} s"
                self._condemn(s, "hang", reason + (f" while: {s.detail}" if s.detail else ""))
            case "hung":
                self._kill(s, *s.condemned)
            case "stopping":
                self._kill(s, "killed", f"still running {self._now - s.since:.4g} s after it was asked to stop")
            case "killing":
                self._kill(s, *s.condemned)
            case "backoff" if s.role.rules.gang:
                self._start_gang(s.role)
            case "backoff":
                self._start(s)
            case _:
                s.deadline = None

    # The order of start and stop.

    def _advance(self) -> None:
        self._conclude()
        if self._ending is None and self._started:
            self._advance_start()
        if self._ending is not None and self._done is None:
            self._advance_stop()

    def _conclude(self) -> None:
        """Begin the end of the run when no work is left."""
        work = [s for s in self._tree if not s.spec.system]
        if self._ending is None and self._started and work and all(s.state == "ended" and not s.drained for s in work):
            failed = [s.name for s in work if s.failed]
            reason = f"failed: {', '.join(failed)}" if failed else "all roles have finished"
            self._drain(Ending(int(bool(failed)), reason))

    def _advance_start(self) -> None:
        for role in self._tree.by_tier():
            waiting = [s for s in role.slots if s.state == "pending" and not s.roomless]
            if waiting and self._tree.not_ready_below(role.tier):
                waiting = [s for s in waiting if not s.gated]
            if role.rules.gang and len(waiting) == len(role.slots) > 0:
                self._start_gang(role)
            elif not role.rules.gang:
                for s in waiting:
                    self._start(s)
