"""Checks of processes: who lived when, under which epoch, who came back; no I/O.

Each check yields an int for every batch of things it has looked at, a Breach for each promise not kept, and in words
what was meant to be shown and was not.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from relax_rt.chaos.evidence import Breach, Evidence
from relax_rt.chaos.faults import FAULTS
from relax_rt.chaos.timeline import REGISTRY, Event, Life, begun, carried_out, line, lives
from relax_rt.transport.queue.ledger.events import ProcessExited

Found = Iterator[int | Breach | str]
BACK_WITHIN_S = 60.0
"""A death this close to the end of the log may still be on its way to its restart."""
EXIT_SEEN_WITHIN_S = 10.0
BEGUN_WITHIN_S = 10.0
QUEUE = "queue/0"
PROCESS_EXITED = str(ProcessExited.__struct_config__.tag)


def by_slot(found: list[Life]) -> dict[str, list[Life]]:
    """Lives of each slot, in order of their starts."""
    slots: dict[str, list[Life]] = {}
    for life in found:
        slots.setdefault(life.slot, []).append(life)
    return slots


def one_incarnation(evidence: Evidence) -> Found:
    """A slot never has two living incarnations: the earlier one's exit is confirmed before the next is spawned."""
    found = lives(evidence.events)
    yield len(found)
    for slot, of_slot in by_slot(found).items():
        for before, after in pairwise(of_slot):
            if before.session == after.session and (before.exited is None or before.exited > after.spawned):
                what = f"{slot}#{after.epoch} was spawned while {slot}#{before.epoch} (pid {before.pid}) lived"
                yield Breach("one_incarnation", what, evidence.lines([*before.lines, *after.lines[:1]]))
    yield from _words_of_the_dead(evidence, found)
    yield from _records_of_the_dead(evidence, found)


def _words_of_the_dead(evidence: Evidence, found: list[Life]) -> Found:
    """Events of a process must precede the report of its exit: the agent's report is checked against them.

    This also holds where no exit was reported: a process of an earlier session has ended before the next one began.
    """
    ends = _ends(evidence, found)
    for number, event in enumerate(evidence.events):
        end = ends.get(str(event.get("by")))
        if end is not None and float(event.get("m", 0.0)) > end[0]:
            what = f"{event['by']} wrote an event after {end[2]}"
            yield Breach("one_incarnation", what, evidence.lines([end[1], number]))


def _records_of_the_dead(evidence: Evidence, found: list[Life]) -> Found:
    """The same for their metrics records."""
    ends = _ends(evidence, found)
    for record in [*evidence.steps, *evidence.made]:
        end = ends.get(str(record.get("by")))
        if end is not None and float(record.get("m", 0.0)) > end[0]:
            what = f"{record['by']} recorded '{record.get('kind')}' after {end[2]}"
            yield Breach("one_incarnation", what, [*evidence.lines([end[1]]), f"record m={record['m']:.3f}"])


def _ends(evidence: Evidence, found: list[Life]) -> dict[str, tuple[float, int, str]]:
    """When each process was certainly dead, by which event, and which kind of event that was."""
    starts = [(float(e.get("m", 0.0)), n) for n, e in enumerate(evidence.events) if e.get("kind") == "run_started"]
    ends: dict[str, tuple[float, int, str]] = {}
    for life in found:
        if life.slot == REGISTRY:
            continue
        if life.exited is not None:
            ends[f"{life.slot}#{life.epoch}"] = (life.exited, life.lines[-1], "its exit")
        elif life.session + 1 < len(starts) and starts[life.session + 1][0] >= life.spawned:
            # Before it was spawned: the machine has started anew, and its clock with it.
            ends[f"{life.slot}#{life.epoch}"] = (*starts[life.session + 1], "the next session began")
    return ends


def epochs_grow(evidence: Evidence) -> Found:
    """An epoch is issued once, and each incarnation of a slot has a higher one than the last."""
    # Several are issued at a time, each told once it is on disk: over all slots the log need not have them in order.
    issued: dict[int, int] = {}
    newest: dict[str, int] = {}
    for number, event in enumerate(evidence.events):
        if event.get("kind") != "epoch_issued":
            continue
        yield 1
        epoch, slot = int(event.get("epoch", 0)), str(event.get("slot"))
        before = issued.get(epoch, newest.get(slot, -1))
        if epoch in issued or (before >= 0 and epoch < int(evidence.events[before]["epoch"])):
            what = f"epoch {epoch} was issued for {slot} after epoch {evidence.events[before]['epoch']}"
            yield Breach("epochs_grow", what, evidence.lines([before, number]))
        issued[epoch] = newest[slot] = number
    for slot, of_slot in by_slot(lives(evidence.events)).items():
        if slot == REGISTRY:
            continue
        yield len(of_slot)
        for before_life, after in pairwise(of_slot):
            if after.epoch <= before_life.epoch:
                what = f"{slot} was spawned with epoch {after.epoch} after epoch {before_life.epoch}"
                yield Breach("epochs_grow", what, evidence.lines([before_life.lines[0], after.lines[0]]))


def deaths_answered(evidence: Evidence) -> Found:
    """Each death has a diagnosis, and a restart or an escalation that says why there is none."""
    found = lives(evidence.events)
    end_m = max((float(e.get("m", 0.0)) for e in evidence.events), default=0.0)
    for slot, of_slot in by_slot(found).items():
        for place, life in enumerate(of_slot):
            if life.exited is None or life.diagnosis is None or life.finished or not life.failed:
                continue
            yield 1
            if not life.diagnosis.get("cause"):
                yield Breach(
                    "deaths_answered", f"{slot}#{life.epoch} died without a diagnosis", evidence.lines(life.lines)
                )
            back = any(after.session == life.session for after in of_slot[place + 1 :])
            patient = not evidence.ended and end_m - life.exited < BACK_WITHIN_S
            if not back and not patient and not _let_go(evidence.events, life):
                what = f"{slot}#{life.epoch} died, and nobody came after it or said why"
                yield Breach("deaths_answered", what, evidence.lines(life.lines[-1:]))


def _let_go(events: list[Event], life: Life) -> bool:
    """The log says why no process followed: the run or its agent ended, or the slot used up its restarts."""
    role, session = life.slot.partition("/")[0], -1
    for event in events:
        kind = event.get("kind")
        session += kind == "run_started"
        if max(0, session) != life.session:
            continue
        if kind in ("run_draining", "agent_died", "run_ended"):
            return True
        if kind in ("slot_given_up", "slot_drained", "scaled", "node_lost") and (
            life.slot in (event.get("slot"), event.get("what")) or role in (event.get("role"), event.get("what"))
        ):
            return True
        if kind == "node_lost":
            return True
    # The last session's agent may have died with a keeper that had no time to say so.
    return life.session < session


def faults_seen(evidence: Evidence) -> Found:
    """Each injected fault is confirmed by others: a kill by the agent, a fault inside a role by the role itself."""
    yield from _begun(evidence)
    known = {(life.slot, life.pid): life for life in lives(evidence.events)}
    end_m = max((float(e.get("m", 0.0)) for e in evidence.events), default=0.0)
    for number, event in carried_out(evidence.events):
        if event.get("name") != "kill":
            continue
        yield 1
        life = known.get((str(event.get("slot")), int(event.get("pid", 0))))
        if life is None:
            what = f"{event.get('slot')} (pid {event.get('pid')}) was killed, and no start of it is told"
            yield Breach("faults_seen", what, evidence.lines([number]))
            continue
        at = float(event.get("m", 0.0))
        if life.exited is None:
            if not life.over and end_m - at > EXIT_SEEN_WITHIN_S:
                what = f"the exit of {life.slot}#{life.epoch} after its kill is not told"
                yield Breach("faults_seen", what, evidence.lines([*life.lines, number]))
        elif (life.diagnosis or {}).get("signal") != "SIGKILL":
            what = f"{life.slot}#{life.epoch} was killed, and its exit is told as {(life.diagnosis or {}).get('kind')}"
            yield Breach("faults_seen", what, evidence.lines([number, life.lines[-1]]))


def _begun(evidence: Evidence) -> Found:
    known = {(life.slot, life.pid): life for life in lives(evidence.events)}
    confirmed = begun(evidence.events)
    end_m = max((float(e.get("m", 0.0)) for e in evidence.events), default=0.0)
    for number, event in carried_out(evidence.events):
        fault = FAULTS.get(str(event.get("name")))
        if fault is None or fault.means != "inside":
            continue
        yield 1
        at, life = float(event.get("m", 0.0)), known.get((str(event.get("slot")), int(event.get("pid", 0))))
        ended = life.exited if life is not None and life.exited is not None else end_m
        # It may have died of something else before it could begin.
        if number not in confirmed and ended - at > BEGUN_WITHIN_S:
            what = f"{event.get('slot')} was asked for '{fault.name}', and never said that it began or failed"
            yield Breach("faults_seen", what, evidence.lines([number]))


def late_writes(evidence: Evidence) -> Found:
    """No write of a fenced incarnation is accepted: by the registry, the queue, the checkpoint folder."""
    yield from _late_in_registry(evidence)
    yield from _late_in_queue(evidence)
    yield from _journal_unread(evidence)
    yield from _late_checkpoints(evidence)
    yield from _refusals(evidence)


def _late_in_registry(evidence: Evidence) -> Found:
    newest: dict[str, tuple[int, int]] = {}
    for number, event in enumerate(evidence.events):
        kind, slot = event.get("kind"), str(event.get("slot", ""))
        epoch = int(event.get("epoch", 0) or 0)
        if kind == "epoch_issued":
            newest[slot] = (epoch, number)
        elif kind in ("slot_announced", "version_issued", "version_committed") and slot in newest:
            yield 1
            if epoch < newest[slot][0]:
                what = f"the registry accepted '{kind}' of {slot}#{epoch} after epoch {newest[slot][0]} was issued"
                yield Breach("late_writes", what, [line(n, evidence.events[n]) for n in (newest[slot][1], number)])


def _late_checkpoints(evidence: Evidence) -> Found:
    """A folder written by an incarnation although a newer one had started from an earlier step."""
    first: dict[int, Event] = {}
    for record in evidence.steps:
        first.setdefault(int(record.get("epoch", 0)), record)
    damaged = {str(e.get("checkpoint")) for e in evidence.events if e.get("kind") == "checkpoint_damaged"}
    issued = {int(e.get("epoch", 0)) for e in evidence.events if e.get("kind") == "epoch_issued"}
    for one in evidence.checkpoints:
        yield 1
        if evidence.complete and one.epoch not in issued:
            yield Breach("late_writes", f"{one.folder} is of epoch {one.epoch}, which was never issued")
        for epoch, record in first.items():
            # Had it been there, the newer one would have begun behind it.
            if epoch > one.epoch and one.step >= record["step"] and one.folder not in damaged:
                what = (
                    f"{one.folder} of epoch {one.epoch} was written after epoch {epoch} had begun at {record['step']}"
                )
                yield Breach("late_writes", what, [f"step record {record.get('by')} step={record['step']}"])


def _refusals(evidence: Evidence) -> Found:
    """An overtaken process must have been refused something; that nothing was accepted may mean that it was silent."""
    found = {(life.slot, life.epoch): life for life in lives(evidence.events)}
    for number, event in enumerate(evidence.events):
        if event.get("kind") != "slot_overtaken":
            continue
        life = found.get((str(event.get("slot")), int(event.get("epoch", 0))))
        diagnosis = (life.diagnosis if life is not None else None) or {}
        told = f"{diagnosis.get('cause', '')} {diagnosis.get('trace', '')}"
        if "StaleEpoch" not in told and "fenced" not in told:
            yield f"no write of {event.get('slot')}#{event.get('epoch')} was refused after it was overtaken [{number}]"


def _journal_unread(evidence: Evidence) -> Found:
    """A journal that cannot be read proves nothing, and the queue could not recover from it."""
    if evidence.journal_error:
        yield Breach("late_writes", f"the queue's journal cannot be read: {evidence.journal_error}")
    elif not evidence.has_journal:
        ready = [n for n, e in enumerate(evidence.events) if (e.get("kind"), e.get("slot")) == ("slot_ready", QUEUE)]
        if ready:
            yield Breach("late_writes", "the run had a queue, and no journal of it is there", evidence.lines(ready[:1]))


def _late_in_queue(evidence: Evidence) -> Found:
    """Check the queue's own journal; which incarnations were fenced is derived here independently."""
    newest: dict[str, int] = {}
    ended: dict[str, int] = {}
    for write in evidence.writes:
        slot, _, epoch = write.who.rpartition("#")
        if slot:
            yield 1
            why = f"epoch {newest[slot]} was heard before" if int(epoch) < newest.get(slot, 0) else ""
            if write.who in ended:
                why = f"its end was journaled at {ended[write.who]}"
            if why:
                shown = [f"journal {write.n}: {write.what} of {write.who}"]
                yield Breach("late_writes", f"the queue accepted '{write.what}' of {write.who}: {why}", shown)
            newest[slot] = max(newest.get(slot, 0), int(epoch))
        # After the check above: a process may report its own end.
        if write.what == PROCESS_EXITED and write.about:
            ended.setdefault(write.about, write.n)


def supervisor_sound(evidence: Evidence) -> Found:
    """The supervisor met no impossible state."""
    for number, event in enumerate(evidence.events):
        if event.get("kind") == "run_started":
            yield 1
        elif event.get("kind") == "supervisor_fault":
            yield Breach("supervisor_sound", str(event.get("error", "")), evidence.lines([number]))


def run_recovered(evidence: Evidence) -> Found:
    """The run reached its target, or it goes on and every slot has come back."""
    yield 1
    if not evidence.ended:
        if not evidence.recovered:
            exits = [n for n, e in enumerate(evidence.events) if e.get("kind") == "slot_exited"]
            yield Breach(
                "run_recovered", "the run goes on, and not every slot has come back", evidence.lines(exits[-3:])
            )
    elif evidence.status != "finished":
        at = f" at step {evidence.last_step} of {evidence.target}" if evidence.target else ""
        ends = [n for n, e in enumerate(evidence.events) if e.get("kind") in ("run_ended", "agent_died")]
        yield Breach("run_recovered", f"the run ended as {evidence.status!r}{at}", evidence.lines(ends[-1:]))


def nothing_left(evidence: Evidence) -> Found:
    """An ended run leaves no process, no socket and no shared memory."""
    yield 1
    for what in evidence.leftovers:
        yield Breach("nothing_left", what)
