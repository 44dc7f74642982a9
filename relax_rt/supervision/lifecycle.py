"""What can be done with slots: start them where there is room, stop, kill, hold and bring them back together, end them.

The mechanics under `Supervisor`, which decides when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from relax_rt.supervision.diagnosis import Diagnosis
from relax_rt.supervision.gang import Cohort
from relax_rt.supervision.placement import Need, Place, Placer, Waiting
from relax_rt.supervision.protocol import Action, Done, DumpStacks, Emit, Event, Kill, Start, StartGang, Stop
from relax_rt.supervision.slots import Slot, State
from relax_rt.supervision.tree import RoleNode, Tree

REKILL_S = 5.0


class InvalidTransition(RuntimeError):
    """An event that cannot happen in the slot's state: a fault of the shell. Carries the slot's last events."""


class Ending(NamedTuple):
    """How the run will end once everything has stopped."""

    exit_code: int
    reason: str
    diagnosis: Diagnosis | None = None
    first: Diagnosis | None = None


class Lifecycle:
    """The slots of a run, a clock that only events move, and the actions that the event at hand has led to."""

    def __init__(self, tree: Tree, uniform: Callable[[], float], placer: Placer | None) -> None:
        self._tree = tree
        self._uniform = uniform
        self._placer = placer
        self._now = float("-inf")
        self._out: list[Action] = []
        self._started = False
        self._ending: Ending | None = None
        self._done: Done | None = None

    # Starting.

    def _start(self, s: Slot) -> None:
        places = self._find_room([s])
        if isinstance(places, Waiting):
            self._await_room([s], places.reason)
        else:
            self._out.append(self._begin(s, places[0]))

    def _start_gang(self, role: RoleNode) -> None:
        """All ranks at once: a new generation, which no rank of an older one can be part of."""
        places = self._find_room(role.slots)
        if isinstance(places, Waiting):
            self._await_room(role.slots, places.reason)
            return
        role.generation += 1
        ranks = [self._begin(s, place) for s, place in zip(role.slots, places, strict=True)]
        self._out.append(StartGang(role.kind, role.generation, ranks))
        nodes = list(dict.fromkeys(place.node for place in places))
        self._emit_role("gang_started", role, generation=role.generation, ranks=len(ranks), nodes=nodes)

    def _begin(self, s: Slot, place: Place) -> Start:
        s.renew()
        s.node = place.node
        if place.node or place.devices:
            self._emit("slot_placed", s, node=place.node, devices=list(place.devices))
        self._enter(s, "requested", s.spec.spawn_timeout_s)
        return Start(s.name, place.node, place.devices)

    def _find_room(self, slots: Sequence[Slot]) -> list[Place] | Waiting:
        if self._placer is None:
            return [Place(s.name, "") for s in slots]
        needs = [Need(s.name, s.spec.kind, s.spec.threads, s.spec.gpus, s.spec.node, s.spec.memory_mib) for s in slots]
        if len(needs) > 1:
            return self._placer.place_gang(needs)
        place = self._placer.place(needs[0])
        return place if isinstance(place, Waiting) else [place]

    def _await_room(self, slots: Iterable[Slot], reason: str) -> None:
        for s in slots:
            gated = s.gated
            s.renew()
            s.gated, s.waiting, s.roomless = gated, reason, True
            self._enter(s, "pending", None)
            self._emit("slot_without_room", s, reason=reason)

    def _give_up_place(self, s: Slot) -> None:
        if self._placer is not None:
            self._placer.release(s.name)
            self._look_for_room_again()

    def _look_for_room_again(self) -> None:
        for s in self._tree:
            s.roomless = False

    # Ending a process.

    def _stop(self, s: Slot) -> None:
        self._out.append(Stop(s.name))
        self._enter(s, "stopping", s.spec.stop_timeout_s)

    def _kill(self, s: Slot, kind: Literal["killed", "hang"], reason: str) -> None:
        if s.state != "killing":
            self._emit("slot_killed", s, reason=reason)
        s.condemned = (kind, reason)
        self._out.append(Kill(s.name, kind, reason))
        self._enter(s, "killing", REKILL_S)

    def _kill_all(self, slots: Iterable[Slot], reason: str) -> None:
        for s in slots:
            if s.live and not s.lost and s.state != "killing":
                self._kill(s, "killed", reason)

    def _condemn(self, s: Slot, kind: Literal["killed", "hang"], reason: str) -> None:
        s.condemned = (kind, reason)
        s.resume = s.state
        self._emit("slot_hung", s, reason=reason)
        self._out.append(DumpStacks(s.name))
        self._enter(s, "hung", s.spec.dump_grace_s)

    # Coming back, alone or with others.

    def _regroup(
        self, members: Sequence[Slot], wait_s: float, cause: str, *, hard: bool = False, failed: bool = False
    ) -> None:
        """Bring these down, those of highest index first, and start them again once all have exited.

        hard: kill them, because what they do together cannot be finished.
        failed: one of them has failed, and that was counted.
        """
        members = list(members)
        cohort = Cohort(members, wait_s, cause, failed=failed)
        before = {id(s.cohort): s.cohort for s in members if s.cohort is not None}
        for s in members:
            if s.cohort is not None:
                s.cohort.members.remove(s)
            s.cohort = cohort
        for s in reversed(members):
            if not s.live:
                self._enter(s, "backoff", None)
            elif hard:
                self._kill_all([s], f"starts again with others: {cause}")
            elif not s.lost and s.state in ("requested", "starting", "ready"):
                self._stop(s)
        for left in [*before.values(), cohort]:
            self._release(left)

    def _hold(self, s: Slot) -> None:
        """It has exited, and waits for the others of its cohort."""
        assert s.cohort is not None
        self._enter(s, "backoff", None)
        self._release(s.cohort)

    def _release(self, cohort: Cohort) -> None:
        if cohort.missing or cohort.released:
            return
        cohort.released = True
        for s in cohort.members:
            s.restarts += 1
            self._emit("slot_restarting", s, wait_s=round(cohort.wait_s, 3), restarts=s.restarts, cause=cohort.cause)
            self._enter(s, "backoff", cohort.wait_s)

    def _leave_cohort(self, s: Slot) -> None:
        cohort, s.cohort = s.cohort, None
        if cohort is not None:
            cohort.members.remove(s)
            self._release(cohort)

    # The end of a slot, and of the run.

    def _end(self, s: Slot, *, failed: bool) -> None:
        self._leave_cohort(s)
        s.failed = failed
        self._enter(s, "ended", None)

    def _drain(self, ending: Ending) -> None:
        """The first cause counts; a later one is only logged."""
        if self._ending is not None:
            self._out.append(Emit("run_ending_already", {"reason": ending.reason}))
            return
        self._ending = ending
        fields = {"reason": ending.reason, "exit_code": ending.exit_code}
        # Each tier is stopped when those above it have ended; this is for one slot.
        most_s = max((s.spec.stop_most_s for s in self._tree if s.live), default=0.0)
        self._out.append(Emit("run_draining", {**fields, "slot_most_s": most_s}))
        for s in self._tree:
            s.cohort = None
            if s.state in ("pending", "backoff"):
                self._enter(s, "ended", None)

    def _advance_stop(self) -> None:
        assert self._ending is not None
        live = [s for s in self._tree if s.live]
        if not live:
            self._done = Done(*self._ending)
            self._out.append(Emit("run_done", {"reason": self._ending.reason, "exit_code": self._ending.exit_code}))
            self._out.append(self._done)
            return
        top = max(s.spec.tier for s in live)
        for s in live:
            if s.spec.tier == top and s.state in ("requested", "starting", "ready"):
                self._stop(s)

    # Records.

    def _enter(self, s: Slot, state: State, timeout_s: float | None) -> None:
        if s.state != state:
            s.story.append(f"{self._now:.3f} {s.state} -> {state}")
            s.since = self._now
        s.state, s.exited = state, False
        s.deadline = None if timeout_s is None else self._now + timeout_s

    def _emit(self, kind: str, s: Slot, **fields: Any) -> None:
        self._out.append(Emit(kind, {"slot": s.name, "epoch": s.epoch, **fields}))

    def _emit_role(self, kind: str, role: RoleNode, **fields: Any) -> None:
        self._out.append(Emit(kind, {"role": role.kind, **fields}))

    def _invalid(self, s: Slot, event: Event) -> InvalidTransition:
        story = "\n  ".join(s.story)
        return InvalidTransition(f"{type(event).__name__} in state {s.state!r} of {s.name}; its story:\n  {story}")
