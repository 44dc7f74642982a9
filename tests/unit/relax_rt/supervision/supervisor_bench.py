"""A supervisor on the bench: an invented clock, and processes that exist only as epochs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relax_rt.interfaces.agent import Diagnosis, Kind, SlotStatus
from relax_rt.supervision.placement import Placer
from relax_rt.supervision.protocol import (
    Action,
    Emit,
    Event,
    RunDone,
    RunStarted,
    SlotExited,
    SlotReady,
    SlotSpawned,
    Start,
    StartGang,
)
from relax_rt.supervision.supervisor import Supervisor
from relax_rt.supervision.tree import RoleSpec, SlotSpec


class Bench:
    """Call it with events; `actions` are what the last call led to. Roles without rules are never restarted whole."""

    def __init__(
        self,
        *specs: SlotSpec,
        draw: float = 0.5,
        roles: Sequence[RoleSpec] = (),
        placer: Placer | None = None,
        finished: str = "",
    ) -> None:
        given = {role.kind for role in roles}
        kinds = dict.fromkeys(spec.kind for spec in specs if spec.kind not in given)
        rules = [*roles, *(RoleSpec(kind=kind, role_restarts=0) for kind in kinds)]
        self.core = Supervisor(specs, lambda: draw, rules, placer, finished=finished)
        self.now = 0.0
        self.epoch = 0
        self.actions: list[Action] = []

    def __call__(self, *events: Event, after: float = 0.0) -> list[Action]:
        self.now += after
        self.actions = [a for event in events for a in self.core.handle(event, self.now)]
        return self.actions

    def up(self, slot: str) -> list[Action]:
        self.epoch += 1
        return self(SlotSpawned(slot, self.epoch, 1000 + self.epoch), SlotReady(slot))

    def dies(self, slot: str, kind: Kind = "exception", after: float = 0.0, at: float | None = None) -> list[Action]:
        self.now += after
        return self(SlotExited(slot, self.diagnosis(slot, kind, at)))

    def diagnosis(self, slot: str, kind: Kind, at: float | None = None) -> Diagnosis:
        epoch = self.view(slot).epoch
        when = self.now if at is None else at
        return Diagnosis(slot=slot, epoch=epoch, kind=kind, cause=f"{kind} of {slot}", at=when)

    def view(self, slot: str) -> SlotStatus:
        return next(v for v in self.core.view() if v.slot == slot)

    def state(self, slot: str) -> str:
        return self.view(slot).state

    def of(self, kind: type) -> list[str]:
        """The slots that these actions are about."""
        return [a.slot for a in self.actions if isinstance(a, kind)]  # type: ignore[attr-defined]

    @property
    def starts(self) -> list[str]:
        """The slots that are to be started, alone or in a gang."""
        found: list[str] = []
        for action in self.actions:
            if isinstance(action, Start):
                found.append(action.slot)
            elif isinstance(action, StartGang):
                found += [start.slot for start in action.ranks]
        return found

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Fields of the events of that kind that the last call wrote."""
        return [a.fields for a in self.actions if isinstance(a, Emit) and a.kind == kind]

    @property
    def done(self) -> RunDone:
        assert self.core.done is not None
        return self.core.done


def spec(slot: str, **fields: Any) -> SlotSpec:
    return SlotSpec(slot=slot, kind=slot.partition("/")[0], **fields)


def running(*specs: SlotSpec, **fields: Any) -> Bench:
    """A started run whose slots are all ready."""
    b = Bench(*specs, **fields)
    b(RunStarted())
    for one in specs:
        b.up(one.slot)
    return b
