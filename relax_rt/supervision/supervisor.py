"""The supervisor as a pure state machine: events in, actions out, no I/O, no clock of its own.

A slot goes pending -> requested -> starting -> ready, from any of these through hung, stopping or killing to its exit,
and from there to backoff (it is restarted, alone or with others) or ended. A slot that no node has room for is pending
again, with the reason.

`handle` is the whole flow: take the event, apply deadlines, look for a stall, then advance the start or the stop of the
run. The head's agent (cluster/head.py) feeds it and carries out its actions, the simulation under a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from relax_rt.interfaces.agent import Diagnosis, SlotStatus
from relax_rt.supervision.placement import NoRoom, Placement, Placer
from relax_rt.supervision.protocol import (
    Action,
    DrainRequested,
    DumpStacks,
    Emit,
    Event,
    Kill,
    KillRequested,
    NodeJoined,
    NodeLost,
    RestartRequested,
    RunDone,
    RunStarted,
    ScaleRequested,
    SlotExited,
    SlotFinished,
    SlotProgress,
    SlotReady,
    SlotSpawned,
    Start,
    StartGang,
    Stop,
    StopRequested,
    Tick,
)
from relax_rt.supervision.tree import RestartGroup, RoleNode, RoleRestart, RoleSpec, Slot, SlotSpec, SlotTree, State
from relax_rt.transport.rpc.errors import Refused

PAUSE_S = 60.0
"""Slots report every second: if no report arrived for this long, the agent itself was suspended."""
IDLE_REPORT_TIMEOUT_S = 5.0
"""An idle role reports every second; it is given at least this long, however short its `hang_after_s`."""
KILL_AGAIN_S = 5.0
LEAST_STARTS = 2
"""Slots of a role that may be starting at a time, however few cores there are."""
MAX_SLOTS = 4096
"""Of one role, as in its settings."""


class InvalidTransition(RuntimeError):
    """An event that cannot happen in the slot's state: a fault of the agent. Carries the slot's last events."""


class Ending(NamedTuple):
    """How the run will end once everything has stopped."""

    exit_code: int
    reason: str
    diagnosis: Diagnosis | None = None
    first: Diagnosis | None = None


class Supervisor:
    """The state of a run's tree. `handle` takes one event and returns the actions to carry out, in order.

    Args:
        specs: the slots.
        uniform: a draw from [0, 1) for the jitter of back-off, as `random.Random(seed).random`.
        roles: rules of the roles; a role without them is one_for_one and needs all its slots.
        placer: finds room for slots; without one, every slot has room on this node.
        stall_after_s: the run ends when no slot that counts_for_stall made progress for this long; None: never.
        finished: why the run ends when every significant role has finished; empty: name the last of them.
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
        self._tree = SlotTree(specs, roles)
        self._uniform, self._placer = uniform, placer
        self._stall_after_s, self._finished = stall_after_s, finished
        self._now = float("-inf")
        self._out: list[Action] = []
        """The actions that the current event has led to."""
        self._started = False
        self._ending: Ending | None = None
        self._done: RunDone | None = None
        self._progressed_at = float("-inf")
        """When a slot that counts_for_stall last made progress, or was not expected to."""

    # What the agent reads.

    @property
    def draining(self) -> str:
        """Why the run is ending; empty while it is not."""
        return self._ending.reason if self._ending else ""

    @property
    def done(self) -> RunDone | None:
        """Set when every slot has ended."""
        return self._done

    @property
    def counts(self) -> dict[str, int]:
        """The number of slots that each role should have, in start order."""
        return {role.kind: sum(not s.retired for s in role.slots) for role in self._tree.by_tier()}

    def can_scale(self, kind: str) -> bool:
        """Return whether the number of the role's slots may change at all."""
        role = self._tree.roles.get(kind)
        return role is not None and not role.rules.gang and not role.template.system and self._ending is None

    def view(self, now: float | None = None) -> list[SlotStatus]:
        """Return all slots, in start order, as of a time; None: that of the last event."""
        return [slot.status(self._now if now is None else now) for slot in self._tree.ordered()]

    def next_deadline(self) -> float | None:
        """Return when the next Tick is due."""
        stalled_at = self._stalled_at()
        due = [s.deadline for s in self._tree if s.deadline is not None]
        return min([*due, *([stalled_at] if stalled_at is not None else [])], default=None)

    # The flow.

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take an event at time `now` (monotonic seconds).

        Raises:
            InvalidTransition: the event cannot happen in the slot's state.
            Refused: what an operator or a node requests cannot be done, and why.
        """
        if now - self._now > PAUSE_S and self._progressed_at > float("-inf"):
            # The machine or the agent was suspended, so reports could not arrive.
            self._progressed_at = max(self._progressed_at, now - PAUSE_S)
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
                self._placer_or_refuse(f"node {node.name!r} cannot join").add(node)
                self._retry_placement()
            case NodeLost():
                self._on_node_lost(event)
            case Tick():
                pass
            case _:
                self._on_slot_event(event)
        # The clock never runs backwards here: an event that was posted late counts at the time of the latest one.
        # `_conclude` comes before the deadlines, among which are starts: nothing starts once the work is over. It comes
        # again after them, because an expired deadline may have ended the last slot.
        self._conclude()
        for s in self._tree:
            if s.deadline is not None and s.deadline <= self._now:
                self._on_deadline(s)
        self._check_stall()
        self._conclude()
        if self._ending is None and self._started:
            self._start_pending()
        if self._ending is not None and self._done is None:
            if live := [s for s in self._tree if s.live]:
                # Tier by tier, the highest that still lives first.
                top = max(s.spec.tier for s in live)
                for s in live:
                    if s.spec.tier == top and s.state in ("requested", "starting", "ready"):
                        self._stop(s)
            else:
                self._done = RunDone(*self._ending)
                self._out.append(Emit("run_done", {"reason": self._ending.reason, "exit_code": self._ending.exit_code}))
                self._out.append(self._done)
        return self._out

    def _conclude(self) -> None:
        """Begin the end of the run when no work is left."""
        work = [s for s in self._tree if not s.spec.system]
        if self._ending is None and self._started and work and all(s.state == "ended" and not s.drained for s in work):
            failed = [s.name for s in work if s.failed]
            reason = f"failed: {', '.join(failed)}" if failed else "all roles have finished"
            self._drain(Ending(int(bool(failed)), reason))

    def _start_pending(self) -> None:
        """Start pending slots whose lower tiers are ready."""
        for role in self._tree.by_tier():
            waiting = [s for s in role.slots if s.state == "pending" and not s.unplaceable]
            if waiting and self._tree.not_ready_below(role.tier):
                waiting = [s for s in waiting if not s.gated]
            if role.rules.gang and len(waiting) == len(role.slots) > 0:
                self._start_gang(role)
            elif not role.rules.gang:
                for s in waiting:
                    self._start(s)

    # What processes do.

    def _on_slot_event(self, event: SlotSpawned | SlotReady | SlotFinished | SlotExited | SlotProgress) -> None:
        slot = self._tree.slots.get(event.slot)
        if slot is None:
            raise InvalidTransition(f"{type(event).__name__} for {event.slot}, which is no slot of this run")
        if not isinstance(event, SlotProgress):
            slot.history.append(f"{self._now:.3f} {slot.state}: {type(event).__name__}")
        if not slot.live:
            raise self._invalid(slot, event)
        match event:
            case SlotSpawned(epoch=epoch, pid=pid):
                if slot.pid:
                    raise self._invalid(slot, event)
                slot.epoch, slot.pid = epoch, pid
                self._emit("slot_spawned", slot, pid=pid)
                if slot.state == "requested":
                    self._enter(slot, "starting", slot.spec.start_timeout_s)
                elif slot.state == "stopping":
                    self._out.append(Stop(slot.name))
                elif slot.state == "killing":
                    self._out.append(Kill(slot.name, *slot.kill_reason))
            case SlotReady():
                if not slot.pid:
                    raise self._invalid(slot, event)
                if slot.state == "starting":
                    slot.was_ready = True
                    slot.progressed_at = self._now
                    self._emit("slot_ready", slot)
                    self._enter(slot, "ready", self._hang_timeout_s(slot))
                    slot.role.begin_ready_time(slot, self._now)
            case SlotFinished():
                slot.finished = True
                if slot.state in ("starting", "ready", "hung"):
                    self._enter(slot, "stopping", slot.spec.stop_timeout_s)
            case SlotProgress():
                self._on_progress(slot, event)
            case SlotExited():
                self._on_exited(slot, event.diagnosis)

    def _on_progress(self, s: Slot, event: SlotProgress) -> None:
        if s.spec.counts_for_stall and (event.n > s.progress or event.extend_s > 0):
            self._progressed_at = max(self._progressed_at, self._now + event.extend_s)
        # An idle role's report is itself the sign of life: it comes only if its event loop answered.
        moved = event.n > s.progress or bool(s.waiting) or bool(event.waiting)
        s.progress, s.waiting, s.detail = max(s.progress, event.n), event.waiting, event.detail
        if moved:
            s.progressed_at = self._now
        if s.state == "hung" and moved and s.hung_in == "ready":
            self._emit("slot_recovered", s)
            self._enter(s, "ready", self._hang_timeout_s(s))
        elif s.state == "ready" and moved:
            s.deadline = self._now + self._hang_timeout_s(s)
        elif s.state == "starting" and event.waiting and s.deadline is not None:
            # Whom it waits for may take long to start, and has a deadline of its own.
            s.deadline = max(s.deadline, self._now + s.spec.start_timeout_s)
        elif s.state == "stopping" and moved and s.spec.drains and not s.finished and s.deadline is not None:
            s.deadline = max(s.deadline, self._now + s.spec.stop_timeout_s)
        if event.extend_s > 0 and s.state in ("starting", "ready", "stopping") and s.deadline is not None:
            s.deadline += event.extend_s
        if s.state == "stopping" and s.deadline is not None:
            s.deadline = min(s.deadline, s.since + s.spec.longest_stop_s)

    def _hang_timeout_s(self, s: Slot) -> float:
        # A busy role is judged by its counter, an idle one by its reports, which cease when its event loop is stuck.
        return max(s.spec.hang_after_s, IDLE_REPORT_TIMEOUT_S) if s.waiting else s.spec.hang_after_s

    def _on_exited(self, s: Slot, diagnosis: Diagnosis, *, counted: bool = True) -> None:
        """Decide what comes after an exit: the first case that applies.

        counted: False for an exit that the loss of its node caused, which is no failure of the slot.
        """
        # The order of the cases is the policy. An ending run restarts nothing. A slot that an operator took down stays
        # down, whatever it died of. A failure that no restart can fix ends the run. A member of a group only waits for
        # the others: its exit was requested. Any other exit that was not requested is a
        # failure, unless the role had finished.
        #
        # `exited` marks the slot as no longer live while this is decided, for the loops below that look at all slots;
        # entering the next state clears it.
        s.exited = True
        s.window.pause(self._now if diagnosis.kind != "hang" else s.progressed_at)
        s.last = diagnosis
        s.forget_process()
        if self._placer is not None:
            self._placer.release(s.name)
            self._retry_placement()
        asked = s.restart_asked or s.drained or s.retired or s.restart_group is not None or self._ending is not None
        finished = s.finished or (not diagnosis.failed and not asked)
        over = finished and (s.spec.significant or s.spec.restart != "permanent")
        self._emit("slot_exited", s, finished=finished, diagnosis=msgspec.to_builtins(diagnosis))
        if self._ending is not None:
            self._end(s, failed=diagnosis.failed and not s.finished)
            if s.role.rules.gang and diagnosis.failed:
                self._kill_all(s.role.slots, f"{s.name} has failed, and its gang cannot continue without it")
        elif s.retired or s.drained:
            self._end_by_request(s)
        elif diagnosis.final and not s.finished:
            self._end_run(s, diagnosis)
        elif s.restart_group is not None and (s.role.rules.gang or not over):
            # Seen later but ended earlier: a peer may notice a death before we do.
            if s.restart_group.failed and s.role.fails_together and s.window.amend_cause(diagnosis):
                s.restart_group.cause = f"{s.name}: {diagnosis.cause}"
            self._enter(s, "backoff", None)
            self._release(s.restart_group)
        elif s.restart_asked and not s.finished:
            self._restart_together([s], 0.0, "restart requested")
        elif not counted and s.spec.restart != "temporary":
            self._restart_together(s.role.restarted_with(s), 0.0, diagnosis.cause, hard=s.role.rules.gang)
        elif over:
            self._end(s, failed=False)
            open_ = [o for o in self._tree if o.spec.significant and (o.state != "ended" or o.drained)]
            if s.spec.significant and not open_:
                self._drain(Ending(0, self._finished or f"{s.name} has finished"))
        else:
            self._on_failure(s, diagnosis)

    # Stalls.

    def _stalled_at(self) -> float | None:
        """Return when the run ends unless a slot makes progress."""
        if self._stall_after_s is None or self._ending is not None or self._progressed_at == float("-inf"):
            return None
        return self._progressed_at + self._stall_after_s

    def _check_stall(self) -> None:
        """End a run in which every slot is up and none makes progress, each waiting for another.

        No slot violates its own deadlines: waiting is a sign of life. Slots that start, hang or stop have deadlines of
        their own, and count as progress; what an operator drained waits for the operator.
        """
        working = [s for s in self._tree if s.spec.counts_for_stall]
        if self._started and any(s.state not in ("ready", "ended") or s.drained for s in working):
            self._progressed_at = self._now
        at = self._stalled_at()
        if at is None or at > self._now:
            return
        for s in working:
            if s.state == "ready":
                self._emit("slot_stalled", s, waiting=s.waiting or s.detail or "no reason given")
        waits = "; ".join(f"{s.name}: {s.waiting}" for s in working if s.state == "ready" and s.waiting)
        what = f"nothing moved for {self._stall_after_s:g} s, no token, step, reward or download"
        self._drain(Ending(1, f"{what}: {waits or 'no slot gives a reason'}"))

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
        self._restart_together(s.role.restarted_with(s), wait_s, cause, hard=s.role.rules.gang, failed=True)

    def _escalate(self, s: Slot, diagnosis: Diagnosis) -> None:
        """The slot has used up its restarts: continue without it, else restart its role once as one, else end the
        run."""
        # A restart of the whole role clears the windows of its slots: state that they share (a poisoned rendezvous, a
        # peer that answers wrongly) is gone with it. It is itself limited, so that a run that cannot work ends.
        role = s.role
        what = f"failed {len(s.window.remembered)} times in {s.spec.period_s:g} s of ready time"
        if role.can_continue_without(s):
            self._end(s, failed=True)
            s.given_up, s.waiting = True, f"given up: it {what}"
            left = sum(o.state != "ended" for o in role.slots)
            self._emit("slot_given_up", s, reason=what, cause=diagnosis.cause, left=left)
        elif role.may_restart(s):
            members = role.restarted_as_one(s)
            first = min((d for o in members for d in o.window.remembered), key=lambda d: d.at, default=diagnosis)
            role.restarts.append(RoleRestart(s, s.window.ready_s, first))
            for member in members:
                member.window.clear()
            self._emit_role("role_restarting", role, slot=s.name, reason=what, cause=diagnosis.cause)
            wait_s = s.spec.backoff_max_s * self._uniform()
            self._restart_together(members, wait_s, f"{s.name} {what}", hard=role.rules.gang)
        else:
            self._end(s, failed=True)
            self._fail(s, diagnosis, 1, what)

    def _end_run(self, s: Slot, diagnosis: Diagnosis) -> None:
        """End the run: another start would fail in the same way."""
        self._end(s, failed=True)
        what = "cannot go on" if s.was_ready else "cannot start"
        # Exit code 2: the run ended before it did any work.
        worked = s.was_ready or any(o.was_ready for o in self._tree if o.spec.significant)
        self._fail(s, diagnosis, 2 if diagnosis.kind == "config" and not worked else 1, what)

    def _fail(self, s: Slot, diagnosis: Diagnosis, exit_code: int, what: str) -> None:
        """End the run because of one slot; name the earliest failure that is still remembered anywhere with it."""
        every = [d for other in self._tree for d in other.window.remembered if d.failed]
        every += [restart.first for role in self._tree.roles.values() for restart in role.restarts]
        first = min(every, key=lambda d: d.at, default=None)
        other = first if first is not diagnosis else None
        self._drain(Ending(exit_code, f"{s.name} {what}: {diagnosis.cause}", diagnosis, other))

    def _drain(self, ending: Ending) -> None:
        """Begin the end of the run. The first cause counts; a later one is only logged."""
        if self._ending is not None:
            self._out.append(Emit("run_ending_already", {"reason": ending.reason}))
            return
        self._ending = ending
        fields = {"reason": ending.reason, "exit_code": ending.exit_code}
        # Each tier is stopped when those above it have ended; this is for one slot.
        most_s = max((s.spec.longest_stop_s for s in self._tree if s.live), default=0.0)
        self._out.append(Emit("run_draining", {**fields, "slot_most_s": most_s}))
        for s in self._tree:
            s.restart_group = None
            if s.state in ("pending", "backoff"):
                self._enter(s, "ended", None)

    def _on_deadline(self, s: Slot) -> None:
        match s.state:
            case "requested":
                self._kill(s, "killed", f"no process was started within {s.spec.spawn_timeout_s:g} s of the order")
            case "starting":
                self._mark_hung(s, f"not ready within start_timeout_s = {s.spec.start_timeout_s:g} s")
            case "ready" if s.waiting:
                reason = f"no sign of life for {self._hang_timeout_s(s):g} s while it waited: {s.waiting}"
                self._mark_hung(s, reason)
            case "ready":
                reason = f"busy without progress for hang_after_s = {s.spec.hang_after_s:g} s"
                self._mark_hung(s, reason + (f" while: {s.detail}" if s.detail else ""))
            case "stopping":
                self._kill(s, "killed", f"still running {self._now - s.since:.4g} s after it was asked to stop")
            case "hung" | "killing":
                self._kill(s, *s.kill_reason)
            case "backoff" if s.role.rules.gang:
                self._start_gang(s.role)
            case "backoff":
                self._start(s)
            case _:
                s.deadline = None

    # Starting.

    def _start(self, s: Slot) -> None:
        if reason := self._start_limit(s):
            if s.state != "pending":
                s.reset()
                self._enter(s, "pending", None)
            s.waiting = reason
            return
        found = self._find_room([s])
        if isinstance(found, NoRoom):
            self._await_room([s], found.reason)
        else:
            self._out.append(self._order_start(s, found[0]))

    def _start_limit(self, s: Slot) -> str:
        """Return why the slot must wait for other starts of its role, or empty.

        Starts take cores, and so does watching over them. The limit is each role's own: what one role's start waits
        for, as another role's weights, is never delayed by it. Slots that start as one (a gang, one_for_all) may wait
        for each other, so they are not limited.
        """
        if self._placer is None or s.role.fails_together:
            return ""
        pin = s.spec.node
        most = max(LEAST_STARTS, sum(node.cores for node in self._placer.nodes if pin in ("", node.name)))
        starting = [o for o in s.role.slots if o.state in ("requested", "starting") and pin in ("", o.node)]
        if len(starting) < most:
            return ""
        return f"{len(starting)} others of its role are starting, as many as there are cores for"

    def _start_gang(self, role: RoleNode) -> None:
        """Start all ranks at once: a new generation, which no rank of an older one can be part of."""
        found = self._find_room(role.slots)
        if isinstance(found, NoRoom):
            self._await_room(role.slots, found.reason)
            return
        role.generation += 1
        ranks = [self._order_start(s, place) for s, place in zip(role.slots, found, strict=True)]
        self._out.append(StartGang(role.kind, role.generation, ranks))
        nodes = list(dict.fromkeys(place.node for place in found))
        self._emit_role("gang_started", role, generation=role.generation, ranks=len(ranks), nodes=nodes)

    def _order_start(self, s: Slot, at: Placement) -> Start:
        s.reset()
        s.node = at.node
        if at.node or at.devices:
            self._emit("slot_placed", s, node=at.node, devices=list(at.devices))
        self._enter(s, "requested", s.spec.spawn_timeout_s)
        return Start(s.name, at.node, at.devices)

    def _find_room(self, slots: Sequence[Slot]) -> list[Placement] | NoRoom:
        if self._placer is None:
            return [Placement(s.name, "") for s in slots]
        if len(slots) > 1:
            return self._placer.place_gang([s.spec for s in slots])
        found = self._placer.place(slots[0].spec)
        return found if isinstance(found, NoRoom) else [found]

    def _await_room(self, slots: Iterable[Slot], reason: str) -> None:
        for s in slots:
            gated = s.gated
            s.reset()
            s.gated, s.waiting, s.unplaceable = gated, reason, True
            self._enter(s, "pending", None)
            self._emit("slot_unplaced", s, reason=reason)

    def _retry_placement(self) -> None:
        for s in self._tree:
            s.unplaceable = False

    # Ending a process.

    def _stop(self, s: Slot) -> None:
        self._out.append(Stop(s.name))
        self._enter(s, "stopping", s.spec.stop_timeout_s)

    def _kill(self, s: Slot, kind: Literal["killed", "hang"], reason: str) -> None:
        if s.state != "killing":
            self._emit("slot_killed", s, reason=reason)
        s.kill_reason = (kind, reason)
        self._out.append(Kill(s.name, kind, reason))
        self._enter(s, "killing", KILL_AGAIN_S)

    def _kill_all(self, slots: Iterable[Slot], reason: str) -> None:
        for s in slots:
            if s.live and not s.lost and s.state != "killing":
                self._kill(s, "killed", reason)

    def _mark_hung(self, s: Slot, reason: str) -> None:
        """Dump the slot's stacks; it is killed after a moment unless it makes progress."""
        s.kill_reason = ("hang", reason)
        s.hung_in = s.state
        self._emit("slot_hung", s, reason=reason)
        self._out.append(DumpStacks(s.name))
        self._enter(s, "hung", s.spec.dump_grace_s)

    # Restarting, alone or with others.

    def _restart_together(
        self, members: Sequence[Slot], wait_s: float, cause: str, *, hard: bool = False, failed: bool = False
    ) -> None:
        """Bring these down, those of highest index first, and start them again once all have exited.

        hard: kill them, because what they do together cannot be finished.
        failed: one of them has failed, and that was counted.
        """
        # A member may be part of an older group, as when a second rank fails while its gang is being brought down: it
        # moves to the new one. What remains of the old group may now be complete, so it is released as well; a group
        # whose members have all moved releases nothing.
        members = list(members)
        group = RestartGroup(members, wait_s, cause, failed=failed)
        before = {id(s.restart_group): s.restart_group for s in members if s.restart_group is not None}
        for s in members:
            if s.restart_group is not None:
                s.restart_group.members.remove(s)
            s.restart_group = group
        for s in reversed(members):
            if not s.live:
                self._enter(s, "backoff", None)
            elif hard:
                self._kill_all([s], f"starts again with others: {cause}")
            elif not s.lost and s.state in ("requested", "starting", "ready"):
                self._stop(s)
        for left in [*before.values(), group]:
            self._release(left)

    def _release(self, group: RestartGroup) -> None:
        """Begin the back-off of a group once all of it has exited."""
        if group.missing or group.released:
            return
        group.released = True
        for s in group.members:
            s.restarts += 1
            self._emit("slot_restarting", s, wait_s=round(group.wait_s, 3), restarts=s.restarts, cause=group.cause)
            self._enter(s, "backoff", group.wait_s)

    def _leave_restart_group(self, s: Slot) -> None:
        group, s.restart_group = s.restart_group, None
        if group is not None:
            group.members.remove(s)
            self._release(group)

    def _end(self, s: Slot, *, failed: bool) -> None:
        self._leave_restart_group(s)
        s.failed = failed
        self._enter(s, "ended", None)

    # What operators request: restart, scale, drain. The exits that these cause are not failures.

    def _on_restart_requested(self, name: str, reason: str) -> None:
        what = f"cannot restart {name!r}"
        if name not in self._tree.slots and name not in self._tree.roles and self._is_node(name):
            self._refuse_while_ending(what)
            placer = self._placer_or_refuse(what)
            if not placer.closed(name):
                raise Refused(what, why="the node is not drained", hint="slots and roles on it are restarted by name")
            placer.open(name)
            self._out.append(Emit("node_reopened", {"node": name}))
            self._retry_placement()
            return
        s, role = self._find(name, what)
        self._refuse_while_ending(what)
        if s is not None and s.retired:
            raise Refused(what, why="it is being scaled away", hint=f"`relax-rt scale {s.spec.kind}` brings it back")
        chosen = [s] if s is not None else [o for o in role.slots if not o.retired]
        if not chosen:
            raise Refused(what, why="the role has no slots", hint=f"`relax-rt scale {role.kind} N` adds some")
        unplaceable = [why for slot in chosen if (why := self._no_room(slot))]
        if len(unplaceable) == len(chosen):
            raise Refused(what, why=f"there can be no room for it: {unplaceable[0]}")
        for slot in chosen:
            self._emit("slot_restart_requested", slot, reason=reason)
        if role.rules.gang:
            for slot in role.slots:
                slot.drained = False
            if all(slot.gated for slot in role.slots):
                for slot in role.slots:
                    slot.waiting, slot.unplaceable = "", False
                    self._enter(slot, "pending", None)
            elif any(slot.state != "pending" for slot in role.slots):
                self._restart_together(role.slots, 0.0, reason)
            return
        for slot in chosen:
            if slot.state in ("requested", "starting", "ready", "hung"):
                slot.restart_asked = True
                self._stop(slot)
            else:
                self._bring_back(slot)

    def _no_room(self, s: Slot) -> str:
        """Return why a restart of it would only wait; empty when it need not."""
        if s.state == "pending" and s.unplaceable:
            return s.waiting
        return self._placer.barred(s.spec) if self._placer is not None else ""

    def _bring_back(self, s: Slot) -> None:
        """Start a slot again that is going down, or is down."""
        s.retired = s.drained = False
        if s.live:
            s.restart_asked = True
        elif s.state in ("backoff", "ended") and (s.restart_group is None or s.restart_group.released):
            if s.given_up:
                s.window.clear()
            s.failed = s.given_up = False
            s.waiting, s.unplaceable = "", False
            # What has never been started still waits for the tiers below.
            self._enter(s, "pending" if s.gated else "backoff", None if s.gated else 0.0)

    def _on_scale_requested(self, kind: str, count: int) -> None:
        what = f"cannot scale {kind} to {count}"
        role = self._tree.roles.get(kind)
        if role is None:
            raise Refused(what, why="no such role", hint="roles: " + ", ".join(self._tree.roles))
        self._refuse_while_ending(what)
        self._refuse_system(what, role)
        if role.rules.gang:
            hint = f"change roles.{kind}.count and start the run again: it resumes"
            raise Refused(what, why="it is a gang, and the number of ranks is part of what they compute", hint=hint)
        if not 0 <= count <= MAX_SLOTS:
            raise Refused(what, why=f"a role has 0 to {MAX_SLOTS} slots")
        if role.rules.min_ready is not None and count < role.rules.min_ready:
            raise Refused(what, why=f"roles.{kind}.min_ready = {role.rules.min_ready}")
        before = sum(not s.retired for s in role.slots)
        self._emit_role("scaled", role, before=before, count=count)
        for s in reversed(list(role.slots)):
            if s.index >= count:
                s.retired = True
                self._take_down(s)
        have = {s.index: s for s in role.slots}
        for index in range(count):
            if index not in have:
                self._tree.add(role, index)
            elif have[index].retired or have[index].drained or have[index].given_up:
                self._bring_back(have[index])

    def _on_drain_requested(self, what: str) -> None:
        refusal = f"cannot drain {what!r}"
        self._refuse_while_ending(refusal)
        if self._is_node(what):
            self._drain_node(what, refusal)
            return
        s, role = self._find(what, refusal)
        self._refuse_system(refusal, role)
        # A gang without one of its ranks is no gang.
        chosen = role.slots if s is None or role.rules.gang else [s]
        for slot in reversed(list(chosen)):
            if slot.state != "ended":
                slot.drained = True
                self._take_down(slot)

    def _take_down(self, s: Slot) -> None:
        self._leave_restart_group(s)
        if not s.live:
            self._end_by_request(s)
        elif s.state in ("requested", "starting", "ready"):
            self._stop(s)

    def _end_by_request(self, s: Slot) -> None:
        self._end(s, failed=False)
        if s.retired:
            self._tree.remove(s)
        else:
            s.waiting = "drained: it starts again when it is restarted or its role is scaled"
        self._emit("slot_drained", s, retired=s.retired)

    # Nodes.

    def _placer_or_refuse(self, refusal: str) -> Placer:
        if self._placer is None:
            raise Refused(refusal, why="this run is for one node")
        return self._placer

    def _is_node(self, name: str) -> bool:
        return self._placer is not None and name in [node.name for node in self._placer.nodes]

    def _drain_node(self, name: str, refusal: str) -> None:
        """Stop the slots on a node in order; they start again wherever there is room."""
        slots = [s for s in self._tree if s.live and s.node == name]
        for s in slots:
            if s.spec.system:
                raise Refused(refusal, why=f"{s.name} runs there, and the run cannot do without it")
        self._placer_or_refuse(refusal).close(name, f"it is drained, and `relax-rt restart {name}` opens it again")
        self._out.append(Emit("node_draining", {"node": name, "slots": [s.name for s in slots]}))
        for s in slots:
            if s.role.rules.gang:
                if s.restart_group is None and not s.drained:
                    self._restart_together(s.role.slots, 0.0, f"node {name} is being drained")
            elif s.state in ("requested", "starting", "ready"):
                s.restart_asked = True
                self._stop(s)

    def _on_node_lost(self, event: NodeLost) -> None:
        placer = self._placer_or_refuse(f"node {event.node!r} cannot be lost")
        lost = [s for s in self._tree if s.live and s.node == event.node]
        placer.remove(event.node, keep=event.keep)
        for s in lost:
            s.lost = True
        for s in lost:
            cause = f"node {event.node} is lost: {event.reason}"
            diagnosis = Diagnosis(slot=s.name, epoch=s.epoch, pid=s.pid, kind="node_lost", cause=cause, at=event.at)
            self._on_exited(s, diagnosis, counted=False)

    # Refusals and records.

    def _find(self, name: str, refusal: str) -> tuple[Slot | None, RoleNode]:
        """Return the slot of this name, if it is one, and its role; else the role of this name."""
        s, role = self._tree.slots.get(name), self._tree.roles.get(name)
        role = role or (s.role if s else None)
        if role is None:
            known = ", ".join([*self._tree.roles, *self._tree.slots])
            raise Refused(refusal, why="no such slot, role or node", hint=f"known: {known}")
        return s, role

    def _refuse_while_ending(self, what: str) -> None:
        if self._ending is not None:
            raise Refused(what, why=f"the run is ending: {self._ending.reason}")

    def _refuse_system(self, what: str, role: RoleNode) -> None:
        if role.template.system:
            raise Refused(what, why=f"the run cannot do without its {role.kind}")

    def _enter(self, s: Slot, state: State, timeout_s: float | None) -> None:
        if s.state != state:
            s.history.append(f"{self._now:.3f} {s.state} -> {state}")
            s.since = self._now
        s.state, s.exited = state, False
        s.deadline = None if timeout_s is None else self._now + timeout_s

    def _emit(self, kind: str, s: Slot, **fields: Any) -> None:
        self._out.append(Emit(kind, {"slot": s.name, "epoch": s.epoch, **fields}))

    def _emit_role(self, kind: str, role: RoleNode, **fields: Any) -> None:
        self._out.append(Emit(kind, {"role": role.kind, **fields}))

    def _invalid(self, s: Slot, event: Event) -> InvalidTransition:
        history = "\n  ".join(s.history)
        return InvalidTransition(f"{type(event).__name__} in state {s.state!r} of {s.name}; its history:\n  {history}")
