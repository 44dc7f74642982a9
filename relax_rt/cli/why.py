"""`relax-rt why`: explains the state of a run from its event log and its current status."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from relax_rt.cli.app import OK, Json, Run
from relax_rt.cli.display import (
    CAUSE_WIDTH,
    LABEL_WIDTH,
    REASON_WIDTH,
    TONE_STYLE,
    clock,
    console_for_output,
    show_json,
)
from relax_rt.cli.incidents import Incident, IncidentTracker, short_diagnosis
from relax_rt.cli.losses import print_losses
from relax_rt.cli.ps import describe_empty_steps
from relax_rt.cli.runs import split_run
from relax_rt.config.problems import BadInput, did_you_mean
from relax_rt.interfaces.agent import Diagnosis, RunStatus
from relax_rt.observe.events import read_events
from relax_rt.observe.losses import Losses, ReportedLoss
from relax_rt.observe.notes import MAX_SLOTS, EventNotes, Note
from relax_rt.observe.text import NOTHING, clip, duration, pending_on
from relax_rt.supervision import control
from relax_rt.transport.queue.ledger.messages import Retired, describe_loss

MAX_NOTES = 40
MAX_SHOWN = 60
TRACE_LINES, LOG_LINES = 15, 5
MAX_EARLIER, MAX_CAUSES = 3, 3
"""Starts before the newest one that are shown, and causes of losses of each."""
AGENT_DIED = "agent died"
KILLED_WITH_KEEPER = "it was killed together with its keeper, which would have recorded its end"
ENDED = ("ended", "pending")
QUIET = ("slot_exited", "slot_ready", "members_lost", "item_retired", "item_reinstated")
"""Events that give no note, because the incidents or the losses report them."""


def why(
    slot: Annotated[str | None, Parameter(help="Only this slot or role; or the run, as with --run.")] = None,
    run: Run = None,
    *,
    json: Json = False,
) -> int:
    """Explain the state of a run or a role."""
    run_dir, asked = split_run(slot or "", run, lambda path: known_names(control.status(path)))
    status = control.status(run_dir)
    known = known_names(status)
    if asked and known and asked not in known:
        hint = did_you_mean(asked, known) or f"slots and roles: {', '.join(known)}"
        raise BadInput(f"there is no slot, role or run {asked!r}", hint=hint)
    account = explain(read_events(run_dir), status, asked, empty_steps=describe_empty_steps(run_dir))
    show_json(account) if json else show_why(account, asked)
    return OK


class SlotFailures(msgspec.Struct, frozen=True, kw_only=True):
    """How often a slot failed in this run, why the last time, and how long it was away in all (s)."""

    slot: str
    failures: int
    last: Diagnosis
    away_s: float
    back: bool


class WaitingSlot(msgspec.Struct, frozen=True):
    """A slot that is waiting now, and for what."""

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
    """What `why` prints; its JSON form.

    Attributes:
        first: the failure that came first in time.
        agent_died: how the node agent ended, if it did not end in order.
        last_event: wall-clock time of the newest event (s).
        deaths: the slots that failed, in the order of their first failure.
        incidents: each failure with what followed, in order: the newest of them.
        waiting: the slots that wait now; empty when the run has ended.
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
    deaths: list[SlotFailures]
    incidents: list[Incident]
    incidents_left_out: int
    waiting: list[WaitingSlot]
    notes: list[Note]
    notes_left_out: int
    losses: list[ReportedLoss] = []
    workers: str = ""
    retired: list[Retired] = []
    empty_steps: str = ""
    earlier: list[EarlierStart] = []


class _SlotState:
    def __init__(self) -> None:
        self.failures = 0
        self.first_failure: Diagnosis | None = None
        self.last: Diagnosis | None = None
        self.down_at: float | None = None
        self.away_s = 0.0

    def update(self, event: dict[str, Any], at: float) -> None:
        """Count failures and the time between a failure and the next ready process."""
        if event.get("kind") == "slot_exited":
            try:
                diagnosis = msgspec.convert(event.get("diagnosis"), Diagnosis)
            except msgspec.ValidationError:
                return
            if diagnosis.failed:
                self.failures += 1
                self.first_failure = self.first_failure or diagnosis
                self.last = diagnosis
                self.down_at = self.down_at or at
        elif event.get("kind") == "slot_ready" and self.down_at is not None:
            self.away_s += max(0.0, at - self.down_at)
            self.down_at = None


class _StartRecord:
    """What the event log says about one start of the run; bounded.

    Args:
        slot: of interest; empty: all.
        quiet: kinds of events that give no note.
    """

    def __init__(self, slot: str, quiet: Collection[str]) -> None:
        self._slot, self._quiet = slot, quiet
        self.slots: dict[str, _SlotState] = {}
        self.notes: deque[tuple[Note, tuple[Any, Any] | None]] = deque(maxlen=MAX_NOTES)
        """Notes, those of injected faults with seed and number."""
        self.noted = 0
        self._event_notes = EventNotes()
        self.incidents = IncidentTracker()
        self.agent_died = ""
        self.first_event: float | None = None
        self.last_event: float | None = None
        self.end: tuple[str, str] | None = None
        """Status and reason, if it ended in order."""

    def update(self, event: dict[str, Any]) -> None:
        """Process one event."""
        about, kind, at = str(event.get("slot", "")), event.get("kind"), event.get("t")
        if isinstance(at, int | float):
            self.last_event = float(at)
            self.first_event = float(at) if self.first_event is None else self.first_event
        if kind == "run_ended":
            self.end = str(event.get("status", "")), str(event.get("reason", ""))
        if kind == "agent_died":
            self.agent_died = str(event.get("cause", ""))
        if self._event_notes.requested.update(event):
            return
        # Before the filter by slot: the queue's events about an exit name no slot, and a gang has several.
        self.incidents.update(event)
        if self._slot and about and not _matches(about, self._slot):
            return
        if about and isinstance(at, int | float) and (about in self.slots or len(self.slots) < MAX_SLOTS):
            self.slots.setdefault(about, _SlotState()).update(event, float(at))
        note = self._event_notes.note(event)
        if note is not None and kind not in self._quiet:
            fault = (event.get("seed"), event.get("number")) if kind == "fault_injected" else None
            self.notes.append((note, fault))
            self.noted += 1

    def failed_slots(self) -> list[SlotFailures]:
        """The slots that failed, in the order of their first failure."""
        failed = [(s.first_failure.at, name, s, s.last) for name, s in self.slots.items() if s.first_failure and s.last]
        return [
            SlotFailures(slot=name, failures=s.failures, last=last, away_s=s.away_s, back=s.down_at is None)
            for _, name, s, last in sorted(failed, key=lambda one: one[0])
        ]

    def as_earlier(self, losses: list[ReportedLoss]) -> EarlierStart:
        """What is kept of this start once another one begins."""
        status, reason = self.end or (AGENT_DIED, self.agent_died or KILLED_WITH_KEEPER)
        return EarlierStart(
            began=self.first_event, ended=self.last_event, status=status, reason=reason, losses=losses[:MAX_CAUSES]
        )


def known_names(status: RunStatus) -> list[str]:
    """The slots and roles of a run that can be asked for."""
    return sorted({slot.slot for slot in status.slots} | {slot.kind for slot in status.slots})


def explain(events: Iterable[dict[str, Any]], status: RunStatus, slot: str = "", *, empty_steps: str = "") -> Account:
    """Explain the newest start of a run.

    Args:
        events: the event log, oldest first.
        status: the current status.
        slot: report this slot only; a kind of role means all of its slots.
        empty_steps: see Account.
    """
    # What ended the run stands at the top of the account, if it is known.
    quiet = (*QUIET, "run_draining") if status.diagnosis is not None else QUIET
    start, losses = _StartRecord(slot, quiet), Losses()
    earlier: deque[EarlierStart] = deque(maxlen=MAX_EARLIER)
    for event in events:
        if event.get("kind") == "run_started":
            if start.last_event is not None:
                earlier.append(start.as_earlier(losses.losses))
            start = _StartRecord(slot, quiet)
        losses.update(event)
        start.update(event)
    incidents = [i for i in start.incidents.found if not slot or any(_matches(name, slot) for name in i.slots)]
    first_failures = [s.first_failure for s in start.slots.values() if s.first_failure is not None]
    agent_died = start.agent_died
    if status.status == AGENT_DIED:
        agent_died = agent_died or status.reason or KILLED_WITH_KEEPER
    # A fault that is printed with the failure that it caused needs no line of its own.
    printed = set(start.incidents.matched_faults)
    return Account(
        name=status.name,
        run_id=status.run_id,
        status=status.status,
        reason=status.reason,
        exit_code=status.exit_code,
        first=min(first_failures, key=lambda d: d.at, default=None),
        final=status.diagnosis,
        agent_died=agent_died,
        last_event=start.last_event,
        deaths=start.failed_slots(),
        incidents=incidents[-MAX_SHOWN:],
        incidents_left_out=max(0, len(incidents) - MAX_SHOWN) + start.incidents.total - len(start.incidents.found),
        waiting=_waiting(status, slot),
        notes=[note for note, fault in start.notes if fault is None or fault not in printed],
        notes_left_out=start.noted - len(start.notes),
        losses=losses.losses,
        workers=losses.workers,
        retired=losses.retired,
        empty_steps=empty_steps,
        earlier=list(earlier),
    )


def _matches(about: str, asked: str) -> bool:
    return about == asked or about.partition("/")[0] == asked


def _waiting(status: RunStatus, asked: str) -> list[WaitingSlot]:
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
            reason = pending_on(slot.state) or "nothing: it has ended"
        reason = reason or slot.detail
        if not reason and slot.last is not None and slot.last.failed:
            reason = f"after {slot.last.kind}: {slot.last.cause}"
        reason = reason or pending_on(slot.state)
        found.append(WaitingSlot(slot.slot, slot.state, reason, slot.state_s))
    return found


# --- printing


def show_why(account: Account, asked: str = "") -> None:
    """Print the account of a run; for one role, its last failure in full."""
    console = console_for_output()
    final = None if asked else account.final
    reason = account.reason if final is None else account.reason.removesuffix(f": {final.cause}")
    head = f"{account.name} is {account.status}" + (f": {clip(reason, REASON_WIDTH)}" if reason else "")
    console.print(Text(head, "bold"))
    if account.agent_died:
        console.print(Text("\nThe node agent died, and its roles ended with it", "bold"))
        console.print(Text(f"  {account.agent_died}", "red"))
        if account.last_event is not None:
            console.print(Text(f"  the last event is of {clock(account.last_event)}", "bright_black"))
        console.print(Text("  `relax-rt up` resumes it from its newest checkpoint; later samples are made again"))
    elif account.first is None and account.final is None:
        who = f"{asked} has" if asked else "No role has"
        lost = ", but samples are lost" if account.losses else ""
        lost += ", but its newest steps trained nothing" if account.empty_steps and not lost else ""
        line = f"{who} {'not ' if asked else ''}failed since the run was started{lost}."
        console.print(Text(line, "yellow" if lost else "green"))
    first = None if asked or not _led_to_end(account) else account.first
    if final is not None:
        _show_diagnosis(console, "What ended the run", final)
    if first is not None:
        _show_diagnosis(console, "First failure", first)
    if account.empty_steps:
        console.print(Text("\nSteps that trained nothing", "bold"))
        console.print(Text(f"  {account.empty_steps}", "yellow"), soft_wrap=True)
    print_losses(console, account.losses, account.retired, account.workers)
    if not asked:
        _show_earlier(console, account)
    _show_incidents(console, account, [one for one in (final, first) if one is not None])
    if account.waiting:
        console.print(Text("\nWaiting slots", "bold"))
    for slot in account.waiting:
        console.print(
            Text(f"  {slot.slot}  {slot.state} for {duration(slot.state_s)}  {clip(slot.reason, REASON_WIDTH)}")
        )
    if account.notes:
        console.print(Text("\nOther events", "bold"))
    if account.notes_left_out:
        console.print(Text(f"  ({account.notes_left_out} earlier left out)", "bright_black"))
    for note in account.notes:
        console.print(Text(f"  {clock(note.t)}  {note.text}", TONE_STYLE.get(note.tone, "")))


def _show_earlier(console: Console, account: Account) -> None:
    """Print how earlier starts ended, and what they lost."""
    if account.earlier:
        console.print(Text("\nEarlier starts of this run", "bold"))
    for one in account.earlier:
        began, ended = (
            NOTHING if t is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))
            for t in (one.began, one.ended)
        )
        line = f"  {began} to {ended}  {one.status}: {clip(one.reason, REASON_WIDTH)}"
        console.print(Text(line), soft_wrap=True)
        for loss in one.losses:
            console.print(Text(f"    lost: {describe_loss(loss)}", "yellow"), soft_wrap=True)


def _led_to_end(account: Account) -> bool:
    """Whether the first failure led to the end: not if it was recovered from and is another role's, or the same again.

    A run that has not ended has no more important failure.
    """
    first, final = account.first, account.final
    if first is None or final is None:
        return True
    if first.slot.partition("/")[0] == final.slot.partition("/")[0]:
        return first.cause != final.cause
    return any(death.slot == first.slot and not death.back for death in account.deaths)


def _show_incidents(console: Console, account: Account, printed: Collection[Diagnosis]) -> None:
    """Print the failed slots, each failure as a line, and the last one in full; shorten diagnoses that were printed."""
    if account.deaths:
        console.print(Text("\nFailed and restarted", "bold"))
    for death in account.deaths:
        times = "once" if death.failures == 1 else f"{death.failures} times"
        state = f"back, away for {duration(death.away_s)} in all" if death.back else "not back"
        cause = "as above" if _is_printed(death.last, printed) else clip(death.last.cause, CAUSE_WIDTH)
        console.print(Text(f"  {death.slot}  {times}, {state}; last: {death.last.kind}: {cause}"), soft_wrap=True)
    if len(account.incidents) > 1:
        console.print(Text("\nEach failure", "bold"))
        if account.incidents_left_out:
            console.print(Text(f"  ({account.incidents_left_out} earlier left out)", "bright_black"))
        for same in _group_repeated(account.incidents):
            final = same[-1]
            again = f"{len(same)} times until {clock(final.at)}, the last: " if len(same) > 1 else ""
            line = f"  {clock(same[0].at)}  {again}{final.line(printed=_is_printed(final.diagnosis, printed))}"
            console.print(Text(line), soft_wrap=True)
    if account.incidents:
        ended = [incident for incident in account.incidents if incident.diagnosis == account.final]
        newest = [*account.incidents, *ended][-1]
        _show_incident(console, newest, printed=_is_printed(newest.diagnosis, printed))


def _is_printed(diagnosis: Diagnosis, printed: Collection[Diagnosis]) -> bool:
    return any((one.slot, one.kind, one.cause) == (diagnosis.slot, diagnosis.kind, diagnosis.cause) for one in printed)


def _group_repeated(incidents: Sequence[Incident]) -> list[list[Incident]]:
    """Group failures of one slot with the same cause; external kills are never the same."""
    found: dict[object, list[Incident]] = {}
    for incident in incidents:
        one = incident.diagnosis
        alone = incident.fault is not None or one.kind == "killed"
        found.setdefault(id(incident) if alone else (one.slot, one.kind, one.cause), []).append(incident)
    return list(found.values())


def _show_incident(console: Console, incident: Incident, *, printed: bool) -> None:
    """Print one failure and what followed from it."""
    console.print(Text(f"\nLast failure: {incident.slots[0]}", "bold"))
    rows: list[tuple[str, str]] = [("cause", str(incident.fault))] if incident.fault else []
    rows += [("seen", line) for line in incident.before]
    rows.append((clock(incident.at), short_diagnosis(incident.diagnosis) if printed else f"{incident.diagnosis}"))
    rows += [("with it", ", ".join(incident.slots[1:]))] if incident.slots[1:] else []
    rows += [("policy", line) for line in incident.policy] or [("policy", "not restarted")]
    rows += [("affected", line) for line in incident.affected] or [("affected", "no sample, by the event log")]
    rows += [("", line) for line in incident.other_causes()]
    if incident.away_s is None:
        rows.append(("since then", "not back"))
    else:
        rows.append((clock(incident.at + incident.away_s), f"ready again, after {duration(incident.away_s)}"))
    if incident.first_work_s is not None:
        rows.append(("first work", f"after {duration(incident.first_work_s)}: {incident.work}"))
    last = ""
    for name, text in rows:
        console.print(Text.assemble("  ", (f"{'' if name == last else name:<{LABEL_WIDTH}}", "bright_black"), text))
        last = name


def _show_diagnosis(console: Console, title: str, diagnosis: Diagnosis) -> None:
    console.print(Text(f"\n{title}", "bold"))
    console.print(Text(f"  {clock(diagnosis.at)}  {diagnosis}", "red"))
    for line in diagnosis.evidence(TRACE_LINES, LOG_LINES):
        console.print(Text(f"    {line}", "bright_black"))
