"""Why a run is as it is, made from its event log and its present state; no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from relax_rt.observe.story import Note, Story
from relax_rt.supervision.api import RunStatus
from relax_rt.supervision.diagnosis import Diagnosis

MAX_NOTES = 40
ENDED = ("ended", "pending")


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


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `why` knows.

    Attributes:
        first: the failure that came first in time.
        deaths: the slots that failed, in the order of their first failure.
        waiting: who waits for what now; empty when the run has ended.
        notes: what happened, in order: the newest of it.
    """

    name: str
    run_id: str
    status: str
    reason: str
    exit_code: int | None
    first: Diagnosis | None
    final: Diagnosis | None
    deaths: list[Death]
    waiting: list[Waiting]
    notes: list[Note]
    notes_left_out: int


class _Slot:
    def __init__(self) -> None:
        self.failures: list[Diagnosis] = []
        self.down_at: float | None = None
        self.away_s = 0.0


def account(events: Iterable[dict[str, Any]], status: RunStatus, slot: str = "") -> Account:
    """The account of the newest start of a run.

    Args:
        events: the event log, oldest first.
        status: how the run does now.
        slot: tell of this slot only; a kind of role means all of its slots.
    """
    slots: dict[str, _Slot] = {}
    notes: list[Note] = []
    story = Story()
    for event in events:
        if event.get("kind") == "run_started":
            slots, notes, story = {}, [], Story()
        about = str(event.get("slot", ""))
        if slot and about and not _matches(about, slot):
            continue
        _take(slots, event, about)
        note = story.note(event)
        if note is not None:
            notes.append(note)
    failures = [d for s in slots.values() for d in s.failures]
    return Account(
        name=status.name,
        run_id=status.run_id,
        status=status.status,
        reason=status.reason,
        exit_code=status.exit_code,
        first=min(failures, key=lambda d: d.at) if failures else None,
        final=status.diagnosis,
        deaths=_deaths(slots),
        waiting=_waiting(status, slot),
        notes=notes[-MAX_NOTES:],
        notes_left_out=max(0, len(notes) - MAX_NOTES),
    )


def _matches(about: str, asked: str) -> bool:
    return about == asked or about.partition("/")[0] == asked


def _take(slots: dict[str, _Slot], event: dict[str, Any], about: str) -> None:
    at = event.get("t")
    if not about or not isinstance(at, int | float):
        return
    slot = slots.setdefault(about, _Slot())
    if event.get("kind") == "slot_exited":
        diagnosis = _diagnosis(event.get("diagnosis"))
        if diagnosis is not None and diagnosis.failed:
            slot.failures.append(diagnosis)
            slot.down_at = slot.down_at or float(at)
    elif event.get("kind") == "slot_ready" and slot.down_at is not None:
        slot.away_s += max(0.0, float(at) - slot.down_at)
        slot.down_at = None


def _diagnosis(raw: Any) -> Diagnosis | None:
    try:
        return msgspec.convert(raw, Diagnosis)
    except msgspec.ValidationError:
        return None


def _deaths(slots: dict[str, _Slot]) -> list[Death]:
    failed = [(name, slot) for name, slot in slots.items() if slot.failures]
    failed.sort(key=lambda pair: pair[1].failures[0].at)
    return [
        Death(
            slot=name,
            failures=len(slot.failures),
            last=slot.failures[-1],
            away_s=slot.away_s,
            back=slot.down_at is None,
        )
        for name, slot in failed
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
            reason = "the tiers below it" if slot.state == "pending" else "nothing: it has ended"
        if not reason and slot.last is not None and slot.last.failed:
            reason = f"after {slot.last.kind}: {slot.last.cause}"
        reason = reason or slot.detail or ("to be ready" if slot.state == "starting" else "")
        found.append(Waiting(slot.slot, slot.state, reason, slot.state_s))
    return found
