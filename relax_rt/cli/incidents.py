"""Failures reconstructed from the event log: cause, what the supervisor did, affected samples and steps, recovery.

One pass, bounded, no I/O. Used by `why`.
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
"""What the queue says of a death may come after the role is back: so long it still belongs to it."""
FAULT_BEFORE_S = 120.0
"""A hang is found some time after the fault that caused it."""
WITH_OTHERS = "starts again with others"
LEFT, LEFT_BEFORE_S = "the rollout ends", 15.0
"""A role that fails gives its groups back in its last words, before its end is seen."""


class Fault(msgspec.Struct, frozen=True):
    """An injected fault."""

    name: str
    by: str
    t: float
    seed: int | None = None
    number: int | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        of = [f"{self.seconds:g} s" if self.seconds else "", f"seed {self.seed}" if self.seed is not None else ""]
        of += [f"number {self.number}" if self.number is not None else ""]
        told = ", ".join(part for part in of if part)
        return f"fault {self.name!r} injected by {self.by}" + (f" ({told})" if told else "")


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
    fault: Fault | None = None
    before: list[str] = []
    policy: list[str] = []
    affected: list[str] = []
    perhaps: list[str] = []
    away_s: float | None = None
    first_work_s: float | None = None
    work: str = ""

    def line(self, *, told: bool = False) -> str:
        """The incident as one line; without the cause if that was `told` before."""
        parts = [(above(self.diagnosis) if told else gist(self.diagnosis)) + (f" [{self.fault}]" if self.fault else "")]
        others = len(self.slots) - 1
        parts += [f"{others} more with it"] if others else []
        parts += [*self.policy[:2], *self.affected[:2], *self.doubts()]
        parts.append(f"ready again after {duration(self.away_s)}" if self.away_s is not None else "not back")
        return "; ".join(parts)

    def doubts(self) -> list[str]:
        """Who else may have caused the effects, as a sentence; empty: nobody."""
        return [f"or by the end of {', '.join(self.perhaps)}, away at the same time"] if self.perhaps else []


def gist(diagnosis: Diagnosis) -> str:
    """A diagnosis clipped to one line, its cause first."""
    return clip(f"{diagnosis}", SHORT)


def above(diagnosis: Diagnosis) -> str:
    """Reference to a diagnosis that is printed in full further up."""
    return f"{diagnosis.slot}#{diagnosis.epoch} {diagnosis.kind}: as told above"


class _Left:
    """Unfinished sequences of a role that ended, and how many were resumed."""

    def __init__(self, at: float, holder: str) -> None:
        self.at, self.holder = at, holder
        self.groups: set[object] = set()
        self.sequences = self.partial = self.tokens = self.lost = self.resumed = 0
        self.incident: Incident | None = None
        self.line = ""

    def tell(self) -> None:
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


class _Open:
    """An incident that is not over yet."""

    def __init__(self, incident: Incident, role: str) -> None:
        self.incident, self.role = incident, role
        self.away = set(incident.slots)
        self.together = False
        self.lapsed: dict[str, int] = {}
        self.groups: dict[str, int] = {}
        self.ready_at: float | None = None

    def say(self, lines: list[str], text: str) -> None:
        if text not in lines and len(lines) < MAX_LINES:
            lines.append(clip(text, LINE))


class Incidents:
    """Processes the events of one start of a run, oldest first."""

    def __init__(self) -> None:
        self.found: deque[Incident] = deque(maxlen=MAX_INCIDENTS)
        self.total = 0
        self._open: dict[str, _Open] = {}
        self._settling: list[_Open] = []
        self._before: dict[str, list[str]] = {}
        self._faults: dict[str, Fault] = {}
        self._left: deque[_Left] = deque(maxlen=MAX_INCIDENTS)
        self.told: deque[tuple[int | None, int | None]] = deque(maxlen=MAX_OPEN)
        """Seed and number of the faults that stand with the failures they caused."""

    def take(self, event: dict[str, Any]) -> None:
        """Process one event of the log."""
        t = event.get("t")
        if not isinstance(t, int | float):
            return
        at, slot, kind = float(t), str(event.get("slot", "")), str(event.get("kind", ""))
        self._settle(at)
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
                self._leaves(at, kind, event)
            case _:
                self._policy(kind, slot, event)
                self._affected(kind, event)

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
            self._again(self._open[slot], diagnosis)
        elif len(self._open) < MAX_OPEN:
            incident = Incident(at=diagnosis.at or at, slots=[slot], diagnosis=diagnosis, before=before)
            fault = self._fault(slot)
            incident.fault = fault if fault is not None and incident.at - fault.t < FAULT_BEFORE_S else None
            self._open[slot] = _Open(incident, role)
            self.found.append(incident)
            self.total += 1
        holder = f"{diagnosis.slot}#{diagnosis.epoch}"
        for left in self._left:
            if left.holder == holder and at - left.at < LEFT_BEFORE_S and slot in self._open:
                left.incident = self._open[slot].incident
                left.tell()

    def _newest(self, role: str, diagnosis: Diagnosis | None = None) -> _Open | None:
        """The newest open incident of a role; with a diagnosis, the newest that this exit belongs to."""
        known = [one for one in self._open.values() if one.role == role]
        known = [one for one in known if diagnosis is None or _goes_with(one, diagnosis)]
        return max(known, key=lambda one: one.incident.at, default=None)

    def _again(self, one: _Open, diagnosis: Diagnosis) -> None:
        fault = self._fault(diagnosis.slot)
        told = f" [{fault}]" if fault is not None else ""
        same = diagnosis.cause == one.incident.diagnosis.cause
        why = ", for the same reason" if same else f": {diagnosis.kind}: {diagnosis.cause}"
        one.say(one.incident.policy, f"failed again before it was ready{why}{told}")

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

    def _settle(self, at: float) -> None:
        self._settling = [one for one in self._settling if at - (one.ready_at or at) <= SETTLE_S][-MAX_OPEN:]

    def _injected(self, at: float, slot: str, event: dict[str, Any]) -> None:
        if not slot or len(self._faults) >= MAX_OPEN:
            return
        seed, number, seconds = event.get("seed"), event.get("number"), event.get("seconds")
        self._faults[slot] = Fault(
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

    def _leaves(self, at: float, kind: str, event: dict[str, Any]) -> None:
        """Unfinished work of a role that ended, from the queue's events, and its resumption."""
        number = {key: value for key, value in event.items() if isinstance(value, int)}
        if kind == "group_resumed":
            tokens = [n for n in event.get("tokens") or [] if isinstance(n, int)]
            left = next((one for one in reversed(self._left) if event.get("group") in one.groups), None)
            if left is not None:
                left.groups.discard(event.get("group"))
                left.resumed += sum(n > 0 for n in tokens)
                left.tell()
            return
        returned = event.get("state") == "dropped(returned)" and event.get("why") != LEFT
        holder = str(event.get("holder" if kind == "group_reopened" else "by", ""))
        if returned or not holder:
            return
        left = next((one for one in self._left if one.holder == holder and at - one.at < LEFT_BEFORE_S), None)
        if left is None:
            left = _Left(at, holder)
            slot = holder.partition("#")[0]
            known = [one.incident for one in [*self._open.values(), *self._settling] if slot in one.incident.slots]
            left.incident = known[0] if known else None
            self._left.append(left)
        if kind == "groups_released":
            left.lost += number.get("tokens_lost", 0)
        else:
            left.groups.add(event.get("group"))
            left.sequences += number.get("missing", 0)
            left.partial += number.get("partial", 0)
            left.tokens += number.get("tokens", 0)
        left.tell()

    def _fault(self, slot: str) -> Fault | None:
        """The last fault injected into the slot; each is returned once."""
        fault = self._faults.pop(slot, None)
        if fault is not None:
            self.told.append((fault.seed, fault.number))
        return fault

    def _policy(self, kind: str, slot: str, event: dict[str, Any]) -> None:
        """Decisions of the supervisor."""
        role = str(event.get("role", "")) or slot.partition("/")[0]
        one = self._open.get(slot) or self._newest(role)
        if one is None:
            return
        lines, reason = one.incident.policy, str(event.get("reason", ""))
        match kind:
            case "slot_restarting" if slot == one.incident.slots[0]:
                wait = duration(float(event.get("wait_s") or 0.0))
                one.say(lines, f"restart {event.get('restarts', '?')} after a back-off of {wait}")
            case "gang_failed":
                one.together = True
                one.say(lines, f"generation {event.get('generation', '?')} of the gang ends as one failure")
            case "gang_started":
                told = f"{event.get('ranks', '?')} ranks start as generation {event.get('generation', '?')}"
                one.say(lines, f"{told} with a new rendezvous")
            case "role_restarting":
                one.together = True
                one.say(lines, f"escalated: the role starts again as one, as {slot} {reason}")
            case "slot_given_up":
                one.say(lines, f"escalated: given up, {event.get('left', '?')} others go on, as it {reason}")
                self._open.pop(slot, None)
            case "slot_unplaced" | "slot_waiting_for_node":
                one.say(lines, f"waits for room: {reason}")
            case "spawned_without_zygote":
                one.say(lines, f"started without the zygote: {reason}")

    def _affected(self, kind: str, event: dict[str, Any]) -> None:
        """Effects on samples and steps while a slot was down."""
        by = str(event.get("by", "")).partition("#")[0]
        touched = self._touched(str(event.get("task", "")))
        for one in touched:
            lines, before = one.incident.affected, list(one.incident.affected)
            if kind == "lease_lapsed" and "task" in event:
                self._lapsed(one, str(event["task"]), event.get("samples"))
            elif kind == "group_ended":
                self._group_ended(one, str(event.get("state", "")), _fate(event))
            elif kind == "samples_failed":
                one.say(lines, _failed(event))
            elif kind == "payloads_lost":
                one.say(lines, f"{event.get('samples')} samples were lost with their memory; their prompts return")
            elif kind == "rolled_back" and event.get("groups_undone"):
                one.say(lines, f"{event['groups_undone']} trained groups are undone back to step {event.get('step')}")
            elif kind == "resumed" and by in one.incident.slots:
                one.say(lines, f"goes on from checkpoint {event.get('checkpoint')}, step {event.get('step')}")
            elif kind == "queue_recovered" and by in one.incident.slots:
                one.say(lines, f"nothing acknowledged was lost: {event.get('records')} records of the journal replayed")
            elif kind == "groups_lost" and isinstance(event.get("groups"), list):
                one.say(lines, f"{by} stops work on {len(event['groups'])} groups that others have now")
            if lines != before and by not in one.incident.slots:
                others = {slot: None for o in touched if o.role != one.role for slot in o.incident.slots}
                one.incident.perhaps = list({**dict.fromkeys(one.incident.perhaps), **others})[:MAX_PERHAPS]

    def _touched(self, task: str) -> list[_Open]:
        """The incidents that an event may belong to: of several, those of the role that has the task's name."""
        known = list({id(one): one for one in [*self._open.values(), *self._settling]}.values())
        named = [one for one in known if task and (one.role.startswith(task) or task.startswith(one.role))]
        return named or known

    def _lapsed(self, one: _Open, task: str, samples: Any) -> None:
        one.lapsed[task] = one.lapsed.get(task, 0) + (samples if isinstance(samples, int) else 0)
        lines = one.incident.affected
        lines[:] = [line for line in lines if not line.endswith(f"of task {task} offered again")]
        one.say(lines, f"leases lapsed, {count(one.lapsed[task])} samples of task {task} offered again")

    def _group_ended(self, one: _Open, state: str, fate: str) -> None:
        if state not in one.groups and len(one.groups) >= MAX_LINES:
            return
        said = _groups(one.groups.get(state, 0), state, fate)
        one.groups[state] = one.groups.get(state, 0) + 1
        lines, now = one.incident.affected, clip(_groups(one.groups[state], state, fate), LINE)
        if said in lines:
            lines[lines.index(said)] = now
        else:
            one.say(lines, now)


def _failed(event: dict[str, Any]) -> str:
    what, reasons = f"samples of group {event.get('group')}", event.get("reasons")
    if event.get("task"):
        return f"{what} failed in task {event['task']}"
    why = f": {reasons[0]}" if isinstance(reasons, list) and reasons else ""
    return clip(f"{what} could not be made{why}", LINE)


def _groups(number: int, state: str, fate: str) -> str:
    if number == 1:
        return f"1 group ended as {state}: its prompt {fate}"
    return (
        f"{count(number)} groups ended as {state}: their prompts {fate.replace('is ', 'are ').replace('has ', 'have ')}"
    )


def _goes_with(one: _Open, diagnosis: Diagnosis) -> bool:
    """A rank ended because another failed, or a slot is restarted together with others."""
    if diagnosis.slot in one.incident.slots:
        return False
    return one.together or diagnosis.cause.startswith(WITH_OTHERS)


def _fate(event: dict[str, Any]) -> str:
    known = {"return": "is given out again", "retire": "is set aside", "failed": "is given out again"}
    return known.get(str(event.get("prompt_fate")), "has no further use")
