"""Why a run is as it is, made from its event log and its present state; no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from relax_rt.cli.incidents import Incident, Incidents
from relax_rt.interfaces.agent import Diagnosis, RunStatus
from relax_rt.observe.losses import Losses, ReportedLoss
from relax_rt.observe.story import MAX_SLOTS, Note, Story
from relax_rt.observe.text import lacks
from relax_rt.transport.queue.ledger.messages import Retired

MAX_NOTES = 40
MAX_SHOWN = 60
MAX_EARLIER, MAX_CAUSES = 3, 3
"""Starts before the newest one that are shown, and causes of losses of each."""
AGENT_DIED = "agent died"
KILLED_WITH_KEEPER = "it was killed together with its keeper, which would have recorded its end"
ENDED = ("ended", "pending")


QUIET = ("slot_exited", "slot_ready", "members_lost", "item_retired", "item_reinstated")
"""Events that the incidents or the losses report."""


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """How often a slot failed in this run, why the last time, and how long it was away in all (s)."""

    slot: str
    failures: int
    last: Diagnosis
    away_s: float
    back: bool


class Waiting(msgspec.Struct, frozen=True):
    """A slot that does not work now, and what for."""

    slot: str
    state: str
    reason: str
    state_s: float


class EarlierStart(msgspec.Struct, frozen=True, kw_only=True):
    """A start of the run before the newest one.

    Attributes:
        began, ended: wall-clock times of its first and last event (s).
        status, reason: how and why it ended.
        losses: samples lost in it, the most frequent causes first.
    """

    began: float | None
    ended: float | None
    status: str
    reason: str
    losses: list[ReportedLoss] = []


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `why` knows.

    Attributes:
        first: the failure that came first in time.
        agent_died: how the node agent ended, if it did not end in order.
        last_event: wall-clock time of the newest event (s).
        deaths: the slots that failed, in the order of their first failure.
        incidents: each failure with what followed, in order: the newest of them.
        waiting: who waits for what now; empty when the run has ended.
        notes: the newest of all other events, in order.
        losses: samples lost in this start of the run, by cause. workers: description of each killed reward worker.
        retired: data items that are not sampled again.
        empty_steps: why the newest steps trained nothing; empty if they trained.
        earlier: the last starts before this one, in order.
    """

    name: str
    run_id: str
    status: str
    reason: str
    exit_code: int | None
    first: Diagnosis | None
    final: Diagnosis | None
    agent_died: str
    last_event: float | None
    deaths: list[Death]
    incidents: list[Incident]
    incidents_left_out: int
    waiting: list[Waiting]
    notes: list[Note]
    notes_left_out: int
    losses: list[ReportedLoss] = []
    workers: str = ""
    retired: list[Retired] = []
    empty_steps: str = ""
    earlier: list[EarlierStart] = []


class _Slot:
    def __init__(self) -> None:
        self.failures = 0
        self.first_failure: Diagnosis | None = None
        self.last: Diagnosis | None = None
        self.down_at: float | None = None
        self.away_s = 0.0


class _Start:
    """What is gathered of one start of the run; bounded."""

    def __init__(self) -> None:
        self.slots: dict[str, _Slot] = {}
        self.notes: deque[tuple[Note, dict[str, Any]]] = deque(maxlen=MAX_NOTES)
        self.noted = 0
        self.story = Story()
        self.incidents = Incidents()
        self.agent_died = ""
        self.first_event: float | None = None
        self.last_event: float | None = None
        self.end: tuple[str, str] | None = None
        """Status and reason, if it ended in order."""

    def earlier(self, losses: list[ReportedLoss]) -> EarlierStart:
        """What is kept of this start once another one begins."""
        status, reason = self.end or (AGENT_DIED, self.agent_died or KILLED_WITH_KEEPER)
        return EarlierStart(
            began=self.first_event, ended=self.last_event, status=status, reason=reason, losses=losses[:MAX_CAUSES]
        )


def known_names(status: RunStatus) -> list[str]:
    """The slots and roles of a run that can be asked for."""
    return sorted({slot.slot for slot in status.slots} | {slot.kind for slot in status.slots})


def account(events: Iterable[dict[str, Any]], status: RunStatus, slot: str = "", *, empty_steps: str = "") -> Account:
    """The account of the newest start of a run.

    Args:
        events: the event log, oldest first.
        status: how the run does now.
        slot: report this slot only; a kind of role means all of its slots.
        empty_steps: see Account.
    """
    found = _Start()
    # What ended the run stands at the top of the account, if it is known.
    losses = Losses()
    earlier: deque[EarlierStart] = deque(maxlen=MAX_EARLIER)
    quiet = (*QUIET, "run_draining") if status.diagnosis is not None else QUIET
    for event in events:
        if event.get("kind") == "run_started":
            if found.last_event is not None:
                earlier.append(found.earlier(losses.losses))
            found = _Start()
        losses.take(event)
        _gather(found, event, slot, quiet)
    incidents = [i for i in found.incidents.found if not slot or any(_matches(name, slot) for name in i.slots)]
    failed = [s.first_failure for s in found.slots.values() if s.first_failure is not None]
    died = found.agent_died
    # A fault that is printed with the failure that it caused needs no second line.
    shown = set(found.incidents.told)
    notes = [note for note, fault in found.notes if (fault.get("seed"), fault.get("number")) not in shown or not fault]
    if status.status == AGENT_DIED:
        died = died or status.reason or KILLED_WITH_KEEPER
    return Account(
        name=status.name,
        run_id=status.run_id,
        status=status.status,
        reason=status.reason,
        exit_code=status.exit_code,
        first=min(failed, key=lambda d: d.at, default=None),
        final=status.diagnosis,
        agent_died=died,
        last_event=found.last_event,
        deaths=_deaths(found.slots),
        incidents=incidents[-MAX_SHOWN:],
        incidents_left_out=max(0, len(incidents) - MAX_SHOWN) + found.incidents.total - len(found.incidents.found),
        waiting=_waiting(status, slot),
        notes=notes,
        notes_left_out=found.noted - len(found.notes),
        losses=losses.losses,
        workers=losses.workers,
        retired=losses.retired,
        empty_steps=empty_steps,
        earlier=list(earlier),
    )


def _gather(found: _Start, event: dict[str, Any], slot: str, quiet: Collection[str]) -> None:
    about, kind, at = str(event.get("slot", "")), event.get("kind"), event.get("t")
    if isinstance(at, int | float):
        found.last_event = float(at)
        found.first_event = float(at) if found.first_event is None else found.first_event
    if kind == "run_ended":
        found.end = str(event.get("status", "")), str(event.get("reason", ""))
    if kind == "agent_died":
        found.agent_died = str(event.get("cause", ""))
    if found.story.requested.take(event):
        return
    # Before the filter by slot: what the queue says of a death names no slot, and a gang has several.
    found.incidents.take(event)
    if slot and about and not _matches(about, slot):
        return
    if about and isinstance(at, int | float):
        _take(found.slots, event, about, float(at))
    note = found.story.note(event)
    if note is not None and kind not in quiet:
        fault = {k: event.get(k) for k in ("seed", "number")} if kind == "fault_injected" else {}
        found.notes.append((note, fault))
        found.noted += 1


def _matches(about: str, asked: str) -> bool:
    return about == asked or about.partition("/")[0] == asked


def _take(slots: dict[str, _Slot], event: dict[str, Any], about: str, at: float) -> None:
    if about not in slots and len(slots) >= MAX_SLOTS:
        return
    slot = slots.setdefault(about, _Slot())
    if event.get("kind") == "slot_exited":
        diagnosis = _diagnosis(event.get("diagnosis"))
        if diagnosis is not None and diagnosis.failed:
            slot.failures += 1
            slot.first_failure = slot.first_failure or diagnosis
            slot.last = diagnosis
            slot.down_at = slot.down_at or at
    elif event.get("kind") == "slot_ready" and slot.down_at is not None:
        slot.away_s += max(0.0, at - slot.down_at)
        slot.down_at = None


def _diagnosis(raw: Any) -> Diagnosis | None:
    try:
        return msgspec.convert(raw, Diagnosis)
    except msgspec.ValidationError:
        return None


def _deaths(slots: dict[str, _Slot]) -> list[Death]:
    failed = [(name, s, s.first_failure, s.last) for name, s in slots.items()]
    known = [(name, s, first, last) for name, s, first, last in failed if first is not None and last is not None]
    known.sort(key=lambda one: one[2].at)
    return [
        Death(slot=name, failures=s.failures, last=last, away_s=s.away_s, back=s.down_at is None)
        for name, s, _, last in known
    ]


def _waiting(status: RunStatus, asked: str) -> list[Waiting]:
    if status.exit_code is not None:
        return []
    found = []
    for slot in status.slots:
        if asked and not _matches(slot.slot, asked):
            continue
        if slot.state == "ready" and not slot.waiting:
            continue
        reason = slot.waiting
        if not reason and slot.state in ENDED:
            reason = lacks(slot.state) or "nothing: it has ended"
        reason = reason or slot.detail
        if not reason and slot.last is not None and slot.last.failed:
            reason = f"after {slot.last.kind}: {slot.last.cause}"
        reason = reason or lacks(slot.state)
        found.append(Waiting(slot.slot, slot.state, reason, slot.state_s))
    return found
