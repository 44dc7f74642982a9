"""Reconstructs failures from the event log: cause, what the supervisor did, affected samples and steps, recovery.

Used by `why` and `export`. One pass over the events in bounded memory. Events of one failure come from several
processes and in no fixed order, so they are matched by slot, epoch and time.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from relax_rt.interfaces.agent import Diagnosis
from relax_rt.observe.text import clip, count, duration

MAX_INCIDENTS = 200
MAX_LINES = 12
MAX_OPEN = 4096
MAX_PERHAPS = 4
LINE, SHORT = 200, 110
SETTLE_S = 2.0
"""The queue may report effects of an exit after the role is ready again: for so long they count for that exit."""
FAULT_BEFORE_S = 120.0
"""A hang is detected some time after the fault that caused it."""
WITH_OTHERS = "starts again with others"
ROLLOUT_ENDS, UNFINISHED_BEFORE_S = "the rollout ends", 15.0
"""A failing rollout releases its groups shortly before its exit is seen."""


class InjectedFault(msgspec.Struct, frozen=True):
    """An injected fault."""

    name: str
    by: str
    t: float
    seed: int | None = None
    number: int | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.seconds:g} s"] if self.seconds else []
        parts += [f"seed {self.seed}"] if self.seed is not None else []
        parts += [f"number {self.number}"] if self.number is not None else []
        return f"fault {self.name!r} injected by {self.by}" + (f" ({', '.join(parts)})" if parts else "")


class Incident(msgspec.Struct, kw_only=True):
    """One failure and what followed from it.

    Attributes:
        at: wall-clock time of the exit that began it.
        slots: the slots that went down with it, the one that failed first.
        diagnosis: of that first slot.
        fault: the injected fault that caused it, if any.
        before: what was observed before its end: a hang.
        policy: what the supervisor did, as sentences.
        affected: what happened to samples and steps, as sentences.
        perhaps: slots of other roles that were down when some of that was reported: their failure may be the cause.
        away_s: time until all its slots were ready again; None while they are not.
        first_work_s: time until the first of them had done new work, if that was reported.
        work: that work.
    """

    at: float
    slots: list[str]
    diagnosis: Diagnosis
    fault: InjectedFault | None = None
    before: list[str] = []
    policy: list[str] = []
    affected: list[str] = []
    perhaps: list[str] = []
    away_s: float | None = None
    first_work_s: float | None = None
    work: str = ""

    def line(self, *, printed: bool = False) -> str:
        """The incident as one line; without the cause if the diagnosis was printed before."""
        cause = short_diagnosis(self.diagnosis) if printed else clip(f"{self.diagnosis}", SHORT)
        parts = [cause + (f" [{self.fault}]" if self.fault else "")]
        others = len(self.slots) - 1
        parts += [f"{others} more with it"] if others else []
        parts += [*self.policy[:2], *self.affected[:2], *self.other_causes()]
        parts.append(f"ready again after {duration(self.away_s)}" if self.away_s is not None else "not back")
        return "; ".join(parts)

    def other_causes(self) -> list[str]:
        """Other slots whose failure may have caused the effects, as at most one sentence."""
        return [f"or caused by the end of {', '.join(self.perhaps)}, away at the same time"] if self.perhaps else []


def short_diagnosis(diagnosis: Diagnosis) -> str:
    """Reference to a diagnosis that is printed in full further up."""
    return f"{diagnosis.slot}#{diagnosis.epoch} {diagnosis.kind}: as above"


class _UnfinishedWork:
    """Unfinished sequences of a rollout that ended, and how many were resumed."""

    def __init__(self, at: float, holder: str) -> None:
        self.at, self.holder = at, holder
        self.groups: set[object] = set()
        self.sequences = self.partial = self.tokens = self.lost = self.resumed = 0
        self.incident: Incident | None = None
        self.line = ""

    def update_line(self) -> None:
        """Put the sentence into the incident's lines, in place of the earlier one."""
        if self.incident is None or not self.sequences:
            return
        lines, before = self.incident.affected, self.line
        self.line = f"{count(self.sequences)} sequences were left unfinished, "
        self.line += f"{count(self.partial)} of them with {count(self.tokens)} tokens in the journal"
        self.line += f", {count(self.lost)} tokens lost" if self.lost else ""
        self.line += f"; {count(self.resumed)} were resumed from these" if self.resumed else ""
        if before in lines:
            lines[lines.index(before)] = self.line
        elif len(lines) < MAX_LINES:
            lines.append(self.line)


class _OpenIncident:
    """An incident whose slots are not all ready again."""

    def __init__(self, incident: Incident, role: str) -> None:
        self.incident, self.role = incident, role
        self.away = set(incident.slots)
        self.together = False
        self.lapsed: dict[str, int] = {}
        self.groups: dict[str, int] = {}
        self.ready_at: float | None = None

    def add(self, lines: list[str], text: str) -> None:
        """Add a sentence once, up to MAX_LINES."""
        if text not in lines and len(lines) < MAX_LINES:
            lines.append(clip(text, LINE))


class IncidentTracker:
    """Finds the incidents in the events of one start of a run, oldest first."""

    def __init__(self) -> None:
        self.found: deque[Incident] = deque(maxlen=MAX_INCIDENTS)
        self.total = 0
        self._open: dict[str, _OpenIncident] = {}
        self._settling: list[_OpenIncident] = []
        self._before: dict[str, list[str]] = {}
        self._faults: dict[str, InjectedFault] = {}
        self._unfinished: deque[_UnfinishedWork] = deque(maxlen=MAX_INCIDENTS)
        self.matched_faults: deque[tuple[int | None, int | None]] = deque(maxlen=MAX_OPEN)
        """Seed and number of the faults that are attached to the failure they caused."""

    def update(self, event: dict[str, Any]) -> None:
        """Process one event of the log."""
        t = event.get("t")
        if not isinstance(t, int | float):
            return
        at, slot, kind = float(t), str(event.get("slot", "")), str(event.get("kind", ""))
        self._settling = [one for one in self._settling if at - (one.ready_at or at) <= SETTLE_S][-MAX_OPEN:]
        match kind:
            case "slot_exited":
                self._exited(at, slot, event)
            case "slot_ready":
                self._ready(at, slot)
            case "slot_hung" | "slot_killed":
                if len(self._before) < MAX_OPEN:
                    self._before.setdefault(slot, []).append(f"{kind.removeprefix('slot_')}: {event.get('reason', '')}")
            case "slot_recovered":
                self._before.pop(slot, None)
            case "fault_injected":
                self._injected(at, slot, event)
            case "first_work":
                self._worked(at, str(event.get("by", "")).partition("#")[0], str(event.get("what", "")))
            case "group_reopened" | "groups_released" | "group_resumed":
                self._work_unfinished(at, kind, event)
            case _:
                self._add_decision(kind, slot, event)
                self._add_effect(kind, event)

    def _exited(self, at: float, slot: str, event: dict[str, Any]) -> None:
        before = self._before.pop(slot, [])
        try:
            diagnosis = msgspec.convert(event.get("diagnosis"), Diagnosis)
        except msgspec.ValidationError:
            return
        if not diagnosis.failed:
            return
        role = slot.partition("/")[0]
        shared = self._newest(role, diagnosis)
        if shared is not None:
            if slot not in shared.incident.slots:
                shared.incident.slots.append(slot)
            shared.away.add(slot)
            self._open[slot] = shared
        elif slot in self._open:
            self._failed_again(self._open[slot], diagnosis)
        elif len(self._open) < MAX_OPEN:
            incident = Incident(at=diagnosis.at or at, slots=[slot], diagnosis=diagnosis, before=before)
            fault = self._pop_fault(slot)
            incident.fault = fault if fault is not None and incident.at - fault.t < FAULT_BEFORE_S else None
            self._open[slot] = _OpenIncident(incident, role)
            self.found.append(incident)
            self.total += 1
        holder = f"{diagnosis.slot}#{diagnosis.epoch}"
        for work in self._unfinished:
            if work.holder == holder and at - work.at < UNFINISHED_BEFORE_S and slot in self._open:
                work.incident = self._open[slot].incident
                work.update_line()

    def _newest(self, role: str, diagnosis: Diagnosis | None = None) -> _OpenIncident | None:
        """The newest open incident of a role; with a diagnosis, the newest that this exit belongs to."""
        known = [one for one in self._open.values() if one.role == role]
        known = [one for one in known if diagnosis is None or _same_incident(one, diagnosis)]
        return max(known, key=lambda one: one.incident.at, default=None)

    def _failed_again(self, one: _OpenIncident, diagnosis: Diagnosis) -> None:
        fault = self._pop_fault(diagnosis.slot)
        caused_by = f" [{fault}]" if fault is not None else ""
        same = diagnosis.cause == one.incident.diagnosis.cause
        why = ", for the same reason" if same else f": {diagnosis.kind}: {diagnosis.cause}"
        one.add(one.incident.policy, f"failed again before it was ready{why}{caused_by}")

    def _ready(self, at: float, slot: str) -> None:
        self._before.pop(slot, None)
        one = self._open.pop(slot, None)
        if one is None:
            return
        one.away.discard(slot)
        if not one.away:
            one.ready_at = at
            one.incident.away_s = max(0.0, at - one.incident.at)
            self._settling.append(one)

    def _injected(self, at: float, slot: str, event: dict[str, Any]) -> None:
        if not slot or len(self._faults) >= MAX_OPEN:
            return
        seed, number, seconds = event.get("seed"), event.get("number"), event.get("seconds")
        self._faults[slot] = InjectedFault(
            str(event.get("name", "")),
            str(event.get("by", "")),
            at,
            seed if isinstance(seed, int) else None,
            number if isinstance(number, int) else None,
            float(seconds) if isinstance(seconds, int | float) else 0.0,
        )

    def _worked(self, at: float, slot: str, what: str) -> None:
        for one in [*self._settling, *self._open.values()]:
            if slot in one.incident.slots and one.incident.first_work_s is None:
                one.incident.first_work_s, one.incident.work = max(0.0, at - one.incident.at), what

    def _work_unfinished(self, at: float, kind: str, event: dict[str, Any]) -> None:
        """Count unfinished work of a rollout that ended, from the queue's events, and its resumption."""
        counts = {key: value for key, value in event.items() if isinstance(value, int)}
        if kind == "group_resumed":
            tokens = [n for n in event.get("tokens") or [] if isinstance(n, int)]
            work = next((one for one in reversed(self._unfinished) if event.get("group") in one.groups), None)
            if work is not None:
                work.groups.discard(event.get("group"))
                work.resumed += sum(n > 0 for n in tokens)
                work.update_line()
            return
        returned = event.get("state") == "dropped(returned)" and event.get("why") != ROLLOUT_ENDS
        holder = str(event.get("holder" if kind == "group_reopened" else "by", ""))
        if returned or not holder:
            return
        work = next(
            (one for one in self._unfinished if one.holder == holder and at - one.at < UNFINISHED_BEFORE_S), None
        )
        if work is None:
            work = _UnfinishedWork(at, holder)
            slot = holder.partition("#")[0]
            known = [one.incident for one in [*self._open.values(), *self._settling] if slot in one.incident.slots]
            work.incident = known[0] if known else None
            self._unfinished.append(work)
        if kind == "groups_released":
            work.lost += counts.get("tokens_lost", 0)
        else:
            work.groups.add(event.get("group"))
            work.sequences += counts.get("missing", 0)
            work.partial += counts.get("partial", 0)
            work.tokens += counts.get("tokens", 0)
        work.update_line()

    def _pop_fault(self, slot: str) -> InjectedFault | None:
        """The last fault injected into the slot; each is attached to one failure."""
        fault = self._faults.pop(slot, None)
        if fault is not None:
            self.matched_faults.append((fault.seed, fault.number))
        return fault

    def _add_decision(self, kind: str, slot: str, event: dict[str, Any]) -> None:
        """Add a decision of the supervisor."""
        role = str(event.get("role", "")) or slot.partition("/")[0]
        one = self._open.get(slot) or self._newest(role)
        if one is None:
            return
        lines, reason = one.incident.policy, str(event.get("reason", ""))
        match kind:
            case "slot_restarting" if slot == one.incident.slots[0]:
                wait = duration(float(event.get("wait_s") or 0.0))
                one.add(lines, f"restart {event.get('restarts', '?')} after a back-off of {wait}")
            case "gang_failed":
                one.together = True
                one.add(lines, f"generation {event.get('generation', '?')} of the gang ends as one failure")
            case "gang_started":
                start = f"{event.get('ranks', '?')} ranks start as generation {event.get('generation', '?')}"
                one.add(lines, f"{start} with a new rendezvous")
            case "role_restarting":
                one.together = True
                one.add(lines, f"escalated: the role is restarted as a whole, as {slot} {reason}")
            case "slot_given_up":
                one.add(lines, f"escalated: given up, {event.get('left', '?')} others go on, as it {reason}")
                self._open.pop(slot, None)
            case "slot_unplaced":
                one.add(lines, f"waits for room: {reason}")
            case "spawned_without_zygote":
                one.add(lines, f"started without the zygote: {reason}")

    def _add_effect(self, kind: str, event: dict[str, Any]) -> None:
        """Add an effect on samples or steps while a slot was down."""
        by = str(event.get("by", "")).partition("#")[0]
        candidates = self._candidates(str(event.get("task", "")))
        for one in candidates:
            lines, before = one.incident.affected, list(one.incident.affected)
            if kind == "lease_lapsed" and "task" in event:
                self._lapsed(one, str(event["task"]), event.get("samples"))
            elif kind == "group_ended":
                self._group_ended(one, str(event.get("state", "")), _fate(event))
            elif kind == "samples_failed":
                one.add(lines, _failed(event))
            elif kind == "payloads_lost":
                one.add(lines, f"{event.get('samples')} samples were lost with their memory; their prompts return")
            elif kind == "rolled_back" and event.get("groups_undone"):
                one.add(lines, f"{event['groups_undone']} trained groups are undone back to step {event.get('step')}")
            elif kind == "resumed" and by in one.incident.slots:
                one.add(lines, f"resumes from checkpoint {event.get('checkpoint')}, step {event.get('step')}")
            elif kind == "queue_recovered" and by in one.incident.slots:
                one.add(lines, f"nothing acknowledged was lost: {event.get('records')} records of the journal replayed")
            elif kind == "groups_lost" and isinstance(event.get("groups"), list):
                one.add(lines, f"{by} stops work on {len(event['groups'])} groups that are leased to others now")
            if lines != before and by not in one.incident.slots:
                others = {slot: None for o in candidates if o.role != one.role for slot in o.incident.slots}
                one.incident.perhaps = list({**dict.fromkeys(one.incident.perhaps), **others})[:MAX_PERHAPS]

    def _candidates(self, task: str) -> list[_OpenIncident]:
        """The incidents that may have caused an event: of several, those of the role that has the task's name."""
        known = list({id(one): one for one in [*self._open.values(), *self._settling]}.values())
        named = [one for one in known if task and (one.role.startswith(task) or task.startswith(one.role))]
        return named or known

    def _lapsed(self, one: _OpenIncident, task: str, samples: Any) -> None:
        one.lapsed[task] = one.lapsed.get(task, 0) + (samples if isinstance(samples, int) else 0)
        lines = one.incident.affected
        lines[:] = [line for line in lines if not line.endswith(f"of task {task} offered again")]
        one.add(lines, f"leases lapsed, {count(one.lapsed[task])} samples of task {task} offered again")

    def _group_ended(self, one: _OpenIncident, state: str, fate: str) -> None:
        if state not in one.groups and len(one.groups) >= MAX_LINES:
            return
        before = _ended_groups(one.groups.get(state, 0), state, fate)
        one.groups[state] = one.groups.get(state, 0) + 1
        lines, line = one.incident.affected, clip(_ended_groups(one.groups[state], state, fate), LINE)
        if before in lines:
            lines[lines.index(before)] = line
        else:
            one.add(lines, line)


def _failed(event: dict[str, Any]) -> str:
    what, reasons = f"samples of group {event.get('group')}", event.get("reasons")
    if event.get("task"):
        return f"{what} failed in task {event['task']}"
    why = f": {reasons[0]}" if isinstance(reasons, list) and reasons else ""
    return clip(f"{what} could not be made{why}", LINE)


def _ended_groups(number: int, state: str, fate: str) -> str:
    if number == 1:
        return f"1 group ended as {state}: its prompt {fate}"
    return (
        f"{count(number)} groups ended as {state}: their prompts {fate.replace('is ', 'are ').replace('has ', 'have ')}"
    )


def _same_incident(one: _OpenIncident, diagnosis: Diagnosis) -> bool:
    """Whether an exit belongs to an open incident: a rank ended because another failed, or slots restart together."""
    if diagnosis.slot in one.incident.slots:
        return False
    return one.together or diagnosis.cause.startswith(WITH_OTHERS)


def _fate(event: dict[str, Any]) -> str:
    known = {"return": "is sampled again", "retire": "is retired", "failed": "is sampled again"}
    return known.get(str(event.get("prompt_fate")), "is not sampled again")
