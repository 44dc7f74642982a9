"""What happened in a run, from its events: process lives, recoveries, effective training time ratio. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from relax_rt.chaos.faults import FAULTS

Event = dict[str, Any]
REGISTRY = "registry/0"
"""The only slot whose processes are started before an epoch can be issued."""


def describe_event(number: int, event: Event) -> str:
    """An event as one line with its position in the log, for evidence."""
    who = str(event.get("slot") or event.get("role") or "")
    epoch = event.get("epoch")
    name = who + (f"#{epoch}" if who and epoch else "")
    extra = {k: event[k] for k in ("pid", "version", "step", "name", "reason", "wait_s") if event.get(k) is not None}
    details = " ".join(f"{k}={v}" for k, v in extra.items())
    return " ".join(
        word for word in (f"[{number}]", f"{event.get('m', 0.0):.3f}", str(event.get("kind")), name, details) if word
    )


class ProcessLife(msgspec.Struct, kw_only=True):
    """One process of a slot, in seconds of the machine's monotonic clock; None where the log has no such event.

    Attributes:
        session: index of the `up` of the run that it belongs to.
        diagnosis: of its exit. lines: positions of its events in the log.
        agent_ended: its agent ended first, and no exit was reported.
    """

    slot: str
    epoch: int
    pid: int
    session: int
    spawned: float
    ready: float | None = None
    exited: float | None = None
    first_work: float | None = None
    diagnosis: dict[str, Any] | None = None
    finished: bool = False
    agent_ended: bool = False
    lines: list[int] = []

    @property
    def failed(self) -> bool:
        """Whether it exited, and not in order."""
        return self.diagnosis is not None and self.diagnosis.get("kind") != "clean"


def process_lives(events: Sequence[Event]) -> list[ProcessLife]:
    """Every process in the log, in order of their starts."""
    found: list[ProcessLife] = []
    present: dict[str, ProcessLife] = {}
    session = -1
    for number, event in enumerate(events):
        kind, slot, m = event.get("kind"), str(event.get("slot", "")), float(event.get("m", 0.0))
        if kind in ("run_started", "agent_died"):
            session += kind == "run_started"
            for life in present.values():
                life.agent_ended = True
            present = {}
        elif kind == "slot_spawned":
            life = ProcessLife(
                slot=slot,
                epoch=int(event.get("epoch", 0)),
                pid=int(event.get("pid", 0)),
                session=max(0, session),
                spawned=m,
                lines=[number],
            )
            found.append(life)
            present[slot] = life
        elif slot in present and kind == "slot_ready":
            present[slot].ready = m
            present[slot].lines.append(number)
        elif slot in present and kind == "slot_exited":
            life = present.pop(slot)
            life.exited, life.finished = m, bool(event.get("finished"))
            life.diagnosis = event.get("diagnosis") or {}
            life.lines.append(number)
        elif kind == "first_work":
            current = present.get(str(event.get("by", "")).partition("#")[0])
            if current is not None and current.first_work is None and _is_from(event, current):
                current.first_work = m
    return found


def _is_from(event: Event, life: ProcessLife) -> bool:
    return life.slot == REGISTRY or str(event.get("by")) == f"{life.slot}#{life.epoch}"


class Recovery(msgspec.Struct, kw_only=True):
    """What followed a fault that ended a process, in seconds from the fault; None: it never happened.

    Attributes:
        exited_s: the exit was in the event log. ready_s: the slot's next process was ready.
        worked_s: it had done its first new work.
        wait_s: part of this that the restart waited on purpose (back-off).
    """

    number: int
    fault: str
    slot: str
    at: float
    exited_s: float | None = None
    ready_s: float | None = None
    worked_s: float | None = None
    wait_s: float = 0.0
    cause: str = ""

    @property
    def role(self) -> str:
        """The kind of role."""
        return self.slot.partition("/")[0]


def find_recoveries(events: Sequence[Event]) -> list[Recovery]:
    """The recovery from each fault that ended a process; of several faults, the last one before the exit."""
    by_slot: dict[str, list[ProcessLife]] = {}
    for life in process_lives(events):
        by_slot.setdefault(life.slot, []).append(life)
    waits = _waits(events)
    found: dict[tuple[str, int], Recovery] = {}
    for event in [e for _, e in injected_faults(events) if e.get("pid")]:
        of_slot = by_slot.get(str(event.get("slot", "")), [])
        place = next((n for n, life in enumerate(of_slot) if life.pid == event.get("pid")), None)
        if place is None:
            continue
        dead, at = of_slot[place], float(event["m"])
        if event.get("name") != "kill" and (dead.exited is None or dead.exited < at or not dead.failed):
            continue
        one = Recovery(number=int(event.get("number", 0)), fault=str(event.get("name")), slot=dead.slot, at=at)
        if dead.exited is not None:
            one.exited_s = dead.exited - at
            one.cause = str((dead.diagnosis or {}).get("cause", ""))
            one.wait_s = waits.get((dead.slot, dead.exited), 0.0)
        _time_recovery(one, of_slot[place + 1 :])
        found[dead.slot, dead.pid] = one
    return list(found.values())


def _time_recovery(one: Recovery, after: Sequence[ProcessLife]) -> None:
    """Set the time of the first ready process and of the first that worked; one may die before it works."""
    for life in after:
        if life.ready is not None and one.ready_s is None:
            one.ready_s = life.ready - one.at
        if life.first_work is not None:
            one.worked_s = life.first_work - one.at
            return


def injected_faults(events: Sequence[Event]) -> list[tuple[int, Event]]:
    """The injected faults by position in the log, without those that were reported as failed."""
    found: dict[int, Event] = {}
    by_number: dict[Any, int] = {}
    for number, event in enumerate(events):
        if event.get("kind") == "fault_injected":
            found[number] = event
            by_number[event.get("seed"), event.get("number")] = number
        elif event.get("kind") == "fault_failed":
            if "number" in event:
                found.pop(by_number.get((event.get("seed"), event.get("number")), -1), None)
            else:
                found.pop(_position_of(event, found), None)
    return list(found.items())


def confirmed_faults(events: Sequence[Event]) -> set[int]:
    """Positions of the faults that the role confirmed by an event of its own."""
    found: dict[int, Event] = {}
    confirmed: set[int] = set()
    for number, event in enumerate(events):
        if event.get("kind") == "fault_injected":
            found[number] = event
        elif event.get("kind") == "fault_started":
            confirmed.add(_position_of(event, found))
    return confirmed - {-1}


def _position_of(word: Event, found: dict[int, Event]) -> int:
    """Position of the newest fault that an event of a role is about; the event has the order, not the number."""
    for number, event in reversed(found.items()):
        fault = FAULTS.get(str(event.get("name")))
        same = (event.get("slot"), event.get("epoch")) == (word.get("slot"), word.get("epoch"))
        if same and fault is not None and fault.order == word.get("order"):
            return number
    return -1


def _waits(events: Iterable[Event]) -> dict[tuple[str, float], float]:
    """Back-off after each exit, by slot and time of the exit."""
    found: dict[tuple[str, float], float] = {}
    exits: dict[str, float] = {}
    for event in events:
        slot = str(event.get("slot", ""))
        if event.get("kind") == "slot_exited":
            exits[slot] = float(event.get("m", 0.0))
        elif event.get("kind") == "slot_restarting" and slot in exits:
            found[slot, exits.pop(slot)] = float(event.get("wait_s", 0.0))
    return found


def percentiles(durations: Sequence[float]) -> dict[str, float | int]:
    """n, median, and the 99th percentile where there are at least 200, else the maximum; seconds."""
    if not durations:
        return {"n": 0}
    ordered = sorted(durations)
    n = len(ordered)
    found: dict[str, float | int] = {"n": n, "p50": (ordered[(n - 1) // 2] + ordered[n // 2]) / 2}
    if n >= 200:
        found["p99"] = ordered[min(n - 1, -(-99 * n // 100) - 1)]
    found["max"] = ordered[-1]
    return found


Record = dict[str, Any]
MIN_GAPS = 5
"""Minimum number of undisturbed steps for an estimate."""


class Ettr(msgspec.Struct, frozen=True, kw_only=True):
    """The effective training time ratio and its parts.

    Attributes:
        value: None when it cannot be computed, for the reason in `why`.
        measured: both wall-clocks were measured; otherwise the undisturbed one is estimated from this run's own
            undisturbed steps, without checkpoints and slow steps.
        first, last: the steps between which the time was taken.
        undisturbed_s, disturbed_s: the two wall-clocks.
    """

    value: float | None = None
    measured: bool = False
    first: int = 0
    last: int = 0
    undisturbed_s: float = 0.0
    disturbed_s: float = 0.0
    why: str = ""


def final_path(steps: Sequence[Record]) -> dict[int, Record]:
    """The records on the path to the last step: a higher epoch's steps replace those that they repeat."""
    path: dict[int, Record] = {}
    for record in sorted(steps, key=lambda r: r.get("epoch", 0)):
        for later in [s for s in path if s >= record["step"]]:
            del path[later]
        path[record["step"]] = record
    return path


def record_time(record: Record) -> float:
    """Time of a record in seconds: by the monotonic clock where it has one, because a role's wall clock may jump."""
    return float(record["m"] if "m" in record else record["t"])


def elapsed_s(steps: Sequence[Record], first: int, last: int) -> float | None:
    """Wall-clock from the first completion of step `first` to the final completion of `last`."""
    path = final_path(steps)
    began = [record_time(r) for r in steps if r["step"] == first]
    if last not in path or not began:
        return None
    return record_time(path[last]) - min(began)


def ettr(steps: Sequence[Record], baseline: Sequence[Record] | None, faults: Sequence[tuple[float, float]]) -> Ettr:
    """The ratio of a run.

    Args:
        steps: its step records, in order.
        baseline: those of an undisturbed run of the same config; None: estimate.
        faults: begin and end of each disturbance, recovery included, on the clock of the records (see record_time).
    """
    path = final_path(steps)
    if len(path) < 2:
        return Ettr(why="fewer than two steps were made")
    first, last = min(path), max(path)
    if baseline is not None:
        last = min(last, max(final_path(baseline), default=0))
        undisturbed_s = elapsed_s(baseline, first, last)
        if not undisturbed_s or last <= first:
            return Ettr(why="the baseline run has not made the same steps")
    else:
        ordered = sorted(steps, key=record_time)
        gaps = [
            record_time(b) - record_time(a)
            for a, b in pairwise(ordered)
            if b.get("epoch") == a.get("epoch")
            and b["step"] == a["step"] + 1
            and not any(begin < record_time(b) and end > record_time(a) for begin, end in faults)
        ]
        if len(gaps) < MIN_GAPS:
            return Ettr(why=f"only {len(gaps)} undisturbed steps; give an undisturbed run as baseline")
        undisturbed_s = statistics.median(gaps) * (last - first)
    disturbed_s = elapsed_s(steps, first, last)
    if not disturbed_s:
        return Ettr(why=f"step {last} was not reached")
    return Ettr(
        value=undisturbed_s / disturbed_s,
        measured=baseline is not None,
        first=first,
        last=last,
        undisturbed_s=undisturbed_s,
        disturbed_s=disturbed_s,
    )
