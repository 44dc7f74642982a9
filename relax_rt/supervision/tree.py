"""The data of the supervisor: rules of slots and roles, and the state of each slot of a run.

A run is a tree of roles with their slots. This module knows who waits for whom at the start, who is restarted with
whom, and how often. `Supervisor` (supervisor.py) alone changes it; people see `SlotStatus`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import msgspec

from relax_rt.interfaces.agent import Diagnosis, SlotStatus

RestartClass = Literal["permanent", "transient", "temporary"]
Strategy = Literal["one_for_one", "one_for_all", "rest_for_one"]
State = Literal["pending", "requested", "starting", "ready", "hung", "stopping", "killing", "backoff", "ended"]
LIVE: frozenset[State] = frozenset({"requested", "starting", "ready", "hung", "stopping", "killing"})
HISTORY = 24


class SlotSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rules of one slot: its order, restart policy and time limits.

    Attributes:
        slot: its name, ``rollout/0``.
        kind: the role that fills it.
        tier: start order; lower tiers are ready before higher ones start, stop runs in reverse.
        restart: permanent (always), transient (after a failure), temporary (never).
        significant: the run ends in order when every significant slot has finished.
        system: part of every run (registry, queue); the run ends when all slots that are not have ended.
        counts_for_stall: whether progress of this slot resets the stall timer (not registry, queue, writer, dashboard).
        spawn_timeout_s: from the order to start until a process exists. This covers waits that are not the role's: for
            its epoch, a zygote's imports, device memory that the dead still hold; each has a shorter limit.
        start_timeout_s: from spawn to ready; each progress message of a slot that waits for another restarts it.
        stop_timeout_s: from the stop request to the kill.
        drains: after a stop request each progress restarts stop_timeout_s.
        drain_timeout_s: from the stop request to the kill at most, whatever the role reports.
        hang_after_s: busy without progress for this long is a hang.
        dump_grace_s: time for the stack dump between finding a hang and the kill.
        max_restarts, period_s: restarts allowed within a window. The window is measured in the slot's own good
            time (ready, and up to its last progress): waits, starts and hangs do not age a restart, so a role that
            fails slowly is found out as surely as one that fails at once.
        backoff_first_s, backoff_max_s: upper limits of the wait before the first and any restart (full jitter).
        threads, gpus, memory_mib, node: what it asks of the node it is placed on (memory 0: it has no limit), and the
            only node it may run on (empty: any).
    """

    slot: str
    kind: str
    tier: int = 50
    restart: RestartClass = "permanent"
    significant: bool = False
    system: bool = False
    counts_for_stall: bool = True
    spawn_timeout_s: float = 300.0
    start_timeout_s: float = 180.0
    stop_timeout_s: float = 20.0
    drains: bool = False
    drain_timeout_s: float = 600.0
    hang_after_s: float = 120.0
    dump_grace_s: float = 1.0
    max_restarts: int = 5
    period_s: float = 120.0
    backoff_first_s: float = 0.1
    backoff_max_s: float = 5.0
    threads: int = 1
    gpus: float = 0.0
    memory_mib: int = 0
    node: str = ""

    @property
    def longest_stop_s(self) -> float:
        """From the stop request to the kill at most."""
        return max(self.drain_timeout_s, self.stop_timeout_s)


class RoleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rules of one role: how its slots depend on each other.

    Attributes:
        kind: its name.
        strategy: which slots are restarted when one fails: that one, all, or it and those of higher index.
            With one_for_all the limit on restarts counts the role's failures, not each slot's.
        gang: its slots are ranks of one whole. They start, fail and restart together, a failure of any counts once,
            and the others are killed, because a collective that lost a member cannot be finished.
        min_ready: slots that must be ready before higher tiers start, and must be left when one is given up.
            None: all.
        role_restarts, role_period_s: restarts of the whole role allowed within a window of ready time, once one of its
            slots has used up its own.
        slot: rules of the slots that `scale` adds; None: those of its first slot.
    """

    kind: str
    strategy: Strategy = "one_for_one"
    gang: bool = False
    min_ready: int | None = None
    role_restarts: int = 1
    role_period_s: float = 3600.0
    slot: SlotSpec | None = None


class RestartWindow:
    """Limits restarts after failures: `max_restarts` within `period_s` of ready time.

    Good time is what passes between `resume` and `pause`: waits, starts and hangs do not age a restart.
    """

    # In wall-clock time a role whose start takes longer than period_s / max_restarts would never reach the limit, and
    # a run that cannot work would restart it for ever.

    def __init__(self, max_restarts: int, period_s: float) -> None:
        self.ready_s = 0.0
        self._max, self._period_s = max_restarts, period_s
        self._ready_from: float | None = None
        self._failures: deque[tuple[float, Diagnosis]] = deque(maxlen=max_restarts + 1)

    def resume(self, now: float) -> None:
        if self._ready_from is None:
            self._ready_from = now

    def pause(self, until: float) -> None:
        if self._ready_from is not None:
            self.ready_s += max(0.0, until - self._ready_from)
            self._ready_from = None

    def failed(self, diagnosis: Diagnosis) -> int | None:
        """Count a failure; return the number of restarts already in the window, None when one more is too many."""
        while self._failures and self.ready_s - self._failures[0][0] >= self._period_s:
            self._failures.popleft()
        before = len(self._failures)
        self._failures.append((self.ready_s, diagnosis))
        return before if before < self._max else None

    def amend_cause(self, diagnosis: Diagnosis) -> bool:
        """Take another failure of slots that failed as one: the earlier is the cause. True if it is this one."""
        if not self._failures or not diagnosis.failed or diagnosis.at >= self._failures[-1][1].at:
            return False
        self._failures[-1] = (self._failures[-1][0], diagnosis)
        return True

    def clear(self) -> None:
        self._failures.clear()

    @property
    def remembered(self) -> list[Diagnosis]:
        """The failures that count now."""
        return [diagnosis for _, diagnosis in self._failures]


class Slot:
    """The state of one slot."""

    def __init__(self, spec: SlotSpec, role: RoleNode, window: RestartWindow) -> None:
        self.spec, self.role, self.window = spec, role, window
        self.index = int(spec.slot.rpartition("/")[2])
        self.state: State = "pending"
        self.since = 0.0
        self.deadline: float | None = None
        self.epoch = self.pid = self.restarts = 0
        self.node = ""
        self.progressed_at = 0.0
        self.progress = 0
        self.detail = self.waiting = ""
        self.was_ready = self.finished = self.failed = False
        self.restart_asked = False
        """By an operator."""
        self.drained = self.given_up = False
        """Ended, but to be started again by an operator; the run does not end because of a drained one."""
        self.retired = False
        """Scaled away: it is removed once it has exited."""
        self.gated = True
        """It has not been started yet, so lower tiers come first."""
        self.unplaceable = False
        """No node has room for it, and nothing has changed since that was found."""
        self.exited = False
        """Its process is gone, and what comes next is being decided."""
        self.lost = False
        """It was lost with its node, and its exit is about to be handled: no executor takes orders for it."""
        self.restart_group: RestartGroup | None = None
        self.hung_in: State = "ready"
        self.kill_reason: tuple[Literal["killed", "hang"], str] = ("killed", "")
        self.last: Diagnosis | None = None
        self.history: deque[str] = deque(maxlen=HISTORY)

    @property
    def name(self) -> str:
        return self.spec.slot

    @property
    def live(self) -> bool:
        """A process exists, or may come to exist."""
        return self.state in LIVE and not self.exited

    def forget_process(self) -> None:
        self.pid = self.progress = 0
        self.detail = self.waiting = ""
        self.lost = False

    def reset(self) -> None:
        """Forget the last incarnation before a new one starts."""
        self.forget_process()
        self.epoch = 0
        self.finished = self.restart_asked = self.failed = False
        self.drained = self.given_up = self.gated = self.unplaceable = False
        self.restart_group = None

    def status(self, now: float) -> SlotStatus:
        """Return what the supervisor knows of it; its agent adds what it knows of the process."""
        stopping = self.state == "stopping" and self.deadline is not None
        return SlotStatus(
            slot=self.name,
            kind=self.spec.kind,
            tier=self.spec.tier,
            state=self.state,
            epoch=self.epoch,
            pid=self.pid,
            restarts=self.restarts,
            state_s=now - self.since if self.since else 0.0,
            progress=self.progress,
            detail=self.detail,
            waiting=self.waiting or self.role.blocked_by(self),
            last=self.last,
            node=self.node,
            given_up=self.given_up,
            generation=self.role.generation,
            kill_s=max(0.0, (self.deadline or 0.0) - now) if stopping else None,
            kill_latest_s=max(0.0, self.since + self.spec.longest_stop_s - now) if stopping else None,
        )


class RestartGroup:
    """Slots that are brought down to be restarted together: none starts before all have exited.

    One slot that failed on its own is a group of one.

    Attributes:
        wait_s: the one back-off of all of them, from the moment at which the last has exited.
        cause: why, in words.
        failed: because of a failure that was counted.
    """

    def __init__(self, members: Iterable[Slot], wait_s: float, cause: str, *, failed: bool) -> None:
        self.members = list(members)
        self.wait_s, self.cause, self.failed = wait_s, cause, failed
        self.released = False
        """All have exited, and the back-off has begun."""

    @property
    def missing(self) -> list[Slot]:
        """Members that have not exited yet."""
        return [slot for slot in self.members if slot.live]


class RoleRestart(NamedTuple):
    """A restart of a whole role: the slot whose failures caused it, its ready time then, and its first failure."""

    slot: Slot
    ready_s: float
    first: Diagnosis


class RoleNode:
    """A role and its slots, by index."""

    def __init__(self, rules: RoleSpec, template: SlotSpec, tree: SlotTree) -> None:
        self.rules, self.template, self._tree = rules, template, tree
        self.slots: list[Slot] = []
        self.generation = 0
        self.restarts: deque[RoleRestart] = deque(maxlen=rules.role_restarts + 1)
        self._window = RestartWindow(template.max_restarts, template.period_s)

    @property
    def kind(self) -> str:
        return self.rules.kind

    @property
    def tier(self) -> int:
        return self.template.tier

    @property
    def fails_together(self) -> bool:
        """Its failures are counted together."""
        return self.rules.gang or self.rules.strategy == "one_for_all"

    def add(self, spec: SlotSpec) -> Slot:
        window = self._window if self.fails_together else RestartWindow(spec.max_restarts, spec.period_s)
        slot = Slot(spec, self, window)
        self.slots = sorted([*self.slots, slot], key=lambda s: s.index)
        return slot

    def begin_ready_time(self, slot: Slot, now: float) -> None:
        """The slot is ready; ready time of slots that count as one begins once all of them are."""
        if not self.fails_together or all(s.state in ("ready", "ended") for s in self.slots):
            slot.window.resume(now)

    def restarted_with(self, slot: Slot) -> list[Slot]:
        """Return the slots that restart when this one has failed, itself included."""
        if self.rules.gang:
            return [s for s in self.slots if not s.drained]
        if self.rules.strategy == "one_for_one":
            return [slot]
        others = (s for s in self.slots if s.state not in ("pending", "ended") and not s.retired)
        first = 0 if self.rules.strategy == "one_for_all" else slot.index
        return [s for s in others if s is slot or s.index >= first]

    def restarted_as_one(self, slot: Slot) -> list[Slot]:
        """Return the slots that restart when the whole role does because of this one; also those given up."""
        if self.rules.gang:
            return self.restarted_with(slot)
        down = ("pending", "ended")
        return [s for s in self.slots if s is slot or s.given_up or not (s.retired or s.drained or s.state in down)]

    def can_continue_without(self, slot: Slot) -> bool:
        """Return whether enough others remain if this slot is given up."""
        if self.rules.gang or self.rules.strategy != "one_for_one":
            return False
        others = [s for s in self.slots if s is not slot and s.state != "ended" and not s.retired]
        needed = len(self.slots) if self.rules.min_ready is None else self.rules.min_ready
        return len(others) >= needed

    def may_restart(self, slot: Slot) -> bool:
        """Return whether the role as a whole may be restarted once more because of this slot."""
        period_s = self.rules.role_period_s
        held = [r for r in self.restarts if not r.slot.retired and r.slot.window.ready_s - r.ready_s < period_s]
        self.restarts = deque(held, maxlen=self.restarts.maxlen)
        return len(held) < self.rules.role_restarts

    @property
    def unready(self) -> list[Slot]:
        """Slots that higher tiers wait for; empty when enough are ready."""
        wanted = [s for s in self.slots if s.state != "ended"]
        ready = [s for s in wanted if s.state == "ready"]
        least = len(wanted) if self.rules.min_ready is None else min(self.rules.min_ready, len(wanted))
        return [] if len(ready) >= least else [s for s in wanted if s.state != "ready"]

    def blocked_by(self, slot: Slot) -> str:
        """Return what a slot that should run waits for, in words; empty when it waits for nothing."""
        if slot.state == "backoff" and slot.restart_group is not None and (waits := slot.restart_group.missing):
            return f"waits until {_listed(waits)} {'has' if len(waits) == 1 else 'have'} exited"
        if slot.state == "pending" and slot.gated and (waits := self._tree.not_ready_below(self.tier)):
            return f"waits until {_listed(waits)} {'is' if len(waits) == 1 else 'are'} ready"
        return ""


def _listed(slots: list[Slot], most: int = 4) -> str:
    names, more = ", ".join(slot.name for slot in slots[:most]), len(slots) - most
    return names + (f" and {more} more" if more > 0 else "")


class SlotTree:
    """All slots of a run."""

    def __init__(self, specs: Iterable[SlotSpec], rules: Iterable[RoleSpec]) -> None:
        self.slots: dict[str, Slot] = {}
        self.roles: dict[str, RoleNode] = {}
        specs = list(specs)
        for role in {role.kind: role for role in rules}.values():
            template = role.slot or next((spec for spec in specs if spec.kind == role.kind), None)
            if template is not None:
                self.roles[role.kind] = RoleNode(role, template, self)
        for spec in specs:
            if spec.kind not in self.roles:
                self.roles[spec.kind] = RoleNode(RoleSpec(kind=spec.kind), spec, self)
            self.slots[spec.slot] = self.roles[spec.kind].add(spec)

    def __iter__(self) -> Iterator[Slot]:
        return iter(list(self.slots.values()))

    def ordered(self) -> list[Slot]:
        """Return all slots in start order."""
        return [slot for role in self.by_tier() for slot in role.slots]

    def by_tier(self) -> list[RoleNode]:
        """Return all roles in start order."""
        return sorted(self.roles.values(), key=lambda role: role.tier)

    def not_ready_below(self, tier: int) -> list[Slot]:
        """Return the slots of lower tiers that this tier waits for."""
        return [slot for role in self.roles.values() if role.tier < tier for slot in role.unready]

    def add(self, role: RoleNode, index: int) -> Slot:
        """Add a slot of a role."""
        slot = role.add(msgspec.structs.replace(role.template, slot=f"{role.kind}/{index}"))
        self.slots[slot.name] = slot
        return slot

    def remove(self, slot: Slot) -> None:
        """Remove a slot that was scaled away."""
        del self.slots[slot.name]
        slot.role.slots.remove(slot)
