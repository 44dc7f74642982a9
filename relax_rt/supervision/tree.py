"""The tree of a run: its roles with their slots, who waits for whom at the start, and who is restarted with whom."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from relax_rt.supervision.diagnosis import Diagnosis
from relax_rt.supervision.gang import listed
from relax_rt.supervision.slots import Slot, Window
from relax_rt.supervision.spec import RoleSpec, SlotSpec


class RoleRestart(NamedTuple):
    """A restart of a whole role: whose failures brought it about, at which good time of that slot, and the first."""

    slot: Slot
    good_s: float
    first: Diagnosis


class RoleNode:
    """A role and its slots, by index."""

    def __init__(self, rules: RoleSpec, template: SlotSpec, tree: Tree) -> None:
        self.rules, self.template, self._tree = rules, template, tree
        self.slots: list[Slot] = []
        self.generation = 0
        self.restarts: deque[RoleRestart] = deque(maxlen=rules.role_restarts + 1)
        self._window = Window(template.max_restarts, template.period_s)

    @property
    def kind(self) -> str:
        """Its name."""
        return self.rules.kind

    @property
    def tier(self) -> int:
        """Its place in the start order."""
        return self.template.tier

    @property
    def as_one(self) -> bool:
        """Its failures are counted together."""
        return self.rules.gang or self.rules.strategy == "one_for_all"

    def add(self, spec: SlotSpec) -> Slot:
        """A new slot."""
        window = self._window if self.as_one else Window(spec.max_restarts, spec.period_s)
        slot = Slot(spec, self, window)
        self.slots = sorted([*self.slots, slot], key=lambda s: s.index)
        return slot

    def spec_of(self, index: int) -> SlotSpec:
        """Rules of the slot of that index."""
        return msgspec.structs.replace(self.template, slot=f"{self.kind}/{index}")

    def begin_good_time(self, slot: Slot, now: float) -> None:
        """The slot is ready; what counts as one does well once all of it is."""
        if not self.as_one or all(s.state in ("ready", "ended") for s in self.slots):
            slot.window.begin(now)

    def restarted_with(self, slot: Slot) -> list[Slot]:
        """Who starts again when this slot has failed, itself included."""
        if self.rules.gang:
            return [s for s in self.slots if not s.drained]
        if self.rules.strategy == "one_for_one":
            return [slot]
        others = (s for s in self.slots if s.state not in ("pending", "ended") and not s.retired)
        first = 0 if self.rules.strategy == "one_for_all" else slot.index
        return [s for s in others if s is slot or s.index >= first]

    def restarted_as_one(self, slot: Slot) -> list[Slot]:
        """Who starts again when the whole role does, on account of this slot; those given up as well."""
        if self.rules.gang:
            return self.restarted_with(slot)
        down = ("pending", "ended")
        return [s for s in self.slots if s is slot or s.given_up or not (s.retired or s.drained or s.state in down)]

    def can_spare(self, slot: Slot) -> bool:
        """Whether enough others remain if this slot is given up."""
        if self.rules.gang or self.rules.strategy != "one_for_one":
            return False
        others = [s for s in self.slots if s is not slot and s.state != "ended" and not s.retired]
        needed = len(self.slots) if self.rules.min_ready is None else self.rules.min_ready
        return len(others) >= needed

    def may_restart(self, slot: Slot) -> bool:
        """Whether the role as a whole may be restarted once more because of this slot."""
        period_s = self.rules.role_period_s
        held = [r for r in self.restarts if not r.slot.retired and r.slot.window.good_s - r.good_s < period_s]
        self.restarts = deque(held, maxlen=self.restarts.maxlen)
        return len(held) < self.rules.role_restarts

    @property
    def unready(self) -> list[Slot]:
        """Slots that higher tiers wait for; empty when enough are ready."""
        wanted = [s for s in self.slots if s.state != "ended"]
        ready = [s for s in wanted if s.state == "ready"]
        least = len(wanted) if self.rules.min_ready is None else min(self.rules.min_ready, len(wanted))
        return [] if len(ready) >= least else [s for s in wanted if s.state != "ready"]

    def holdup(self, slot: Slot) -> str:
        """Why a slot that should run is not started; empty when it is not held up."""
        if slot.state == "backoff" and slot.cohort is not None:
            return slot.cohort.holdup
        if slot.state == "pending" and slot.gated and (waits := self._tree.not_ready_below(self.tier)):
            names = [s.name for s in waits]
            return f"waits until {listed(names)} {'is' if len(names) == 1 else 'are'} ready"
        return ""


class Tree:
    """All slots of a run."""

    def __init__(self, specs: Iterable[SlotSpec], rules: Iterable[RoleSpec]) -> None:
        self.slots: dict[str, Slot] = {}
        self.roles: dict[str, RoleNode] = {}
        of = {role.kind: role for role in rules}
        specs = list(specs)
        for role in of.values():
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
        """All slots in start order."""
        return [slot for role in self.by_tier() for slot in role.slots]

    def by_tier(self) -> list[RoleNode]:
        """All roles in start order."""
        return sorted(self.roles.values(), key=lambda role: role.tier)

    def not_ready_below(self, tier: int) -> list[Slot]:
        """Slots of lower tiers that this tier waits for."""
        return [slot for role in self.roles.values() if role.tier < tier for slot in role.unready]

    def add(self, role: RoleNode, index: int) -> Slot:
        """A new slot of a role."""
        slot = role.add(role.spec_of(index))
        self.slots[slot.name] = slot
        return slot

    def forget(self, slot: Slot) -> None:
        """A slot that was scaled away."""
        del self.slots[slot.name]
        slot.role.slots.remove(slot)
