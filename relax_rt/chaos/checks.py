"""Checks of the guarantees on the records of a run: processes, then training. Pure.

The trainer's and the rollouts' own records are compared with what agent, registry and queue recorded. Each check yields
an int for every batch of things it has judged, a Violation for each guarantee that was broken, and a str for each fault
whose effect was not observed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from relax_rt.chaos.evidence import Evidence, Violation
from relax_rt.chaos.faults import FAULTS
from relax_rt.chaos.timeline import (
    REGISTRY,
    Event,
    ProcessLife,
    confirmed_faults,
    describe_event,
    final_path,
    injected_faults,
    process_lives,
)
from relax_rt.transport.queue.ledger.events import ProcessExited

Found = Iterator[int | Violation | str]
RESTART_WITHIN_S = 60.0
"""An exit this close to the end of the log may not be answered yet."""
EXIT_SEEN_WITHIN_S = 10.0
STARTED_WITHIN_S = 10.0
QUEUE = "queue/0"
PROCESS_EXITED = str(ProcessExited.__struct_config__.tag)


def by_slot(found: list[ProcessLife]) -> dict[str, list[ProcessLife]]:
    """Lives of each slot, in order of their starts."""
    slots: dict[str, list[ProcessLife]] = {}
    for life in found:
        slots.setdefault(life.slot, []).append(life)
    return slots


def single_incarnation(evidence: Evidence) -> Found:
    """A slot never has two live incarnations: the earlier one's exit is confirmed before the next is spawned."""
    found = process_lives(evidence.events)
    yield len(found)
    for slot, of_slot in by_slot(found).items():
        for before, after in pairwise(of_slot):
            if before.session == after.session and (before.exited is None or before.exited > after.spawned):
                what = f"{slot}#{after.epoch} was spawned while {slot}#{before.epoch} (pid {before.pid}) lived"
                yield Violation("single_incarnation", what, evidence.describe([*before.lines, *after.lines[:1]]))
    yield from _events_after_exit(evidence, found)
    yield from _records_after_exit(evidence, found)


def _events_after_exit(evidence: Evidence, found: list[ProcessLife]) -> Found:
    """Events of a process must precede the report of its exit: the agent's report is checked against them.

    This also holds where no exit was reported: a process of an earlier session has ended before the next one began.
    """
    ends = _ends(evidence, found)
    for number, event in enumerate(evidence.events):
        end = ends.get(str(event.get("by")))
        if end is not None and float(event.get("m", 0.0)) > end[0]:
            what = f"{event['by']} wrote an event after {end[2]}"
            yield Violation("single_incarnation", what, evidence.describe([end[1], number]))


def _records_after_exit(evidence: Evidence, found: list[ProcessLife]) -> Found:
    """The same for their metrics records."""
    ends = _ends(evidence, found)
    for record in [*evidence.steps, *evidence.produced]:
        end = ends.get(str(record.get("by")))
        if end is not None and float(record.get("m", 0.0)) > end[0]:
            what = f"{record['by']} recorded '{record.get('kind')}' after {end[2]}"
            yield Violation("single_incarnation", what, [*evidence.describe([end[1]]), f"record m={record['m']:.3f}"])


def _ends(evidence: Evidence, found: list[ProcessLife]) -> dict[str, tuple[float, int, str]]:
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


def epochs_increase(evidence: Evidence) -> Found:
    """An epoch is issued once, and each incarnation of a slot has a higher one than the last."""
    # Several are issued concurrently, and each event follows its write to disk: over all slots the order may differ.
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
            yield Violation("epochs_increase", what, evidence.describe([before, number]))
        issued[epoch] = newest[slot] = number
    for slot, of_slot in by_slot(process_lives(evidence.events)).items():
        if slot == REGISTRY:
            continue
        yield len(of_slot)
        for before_life, after in pairwise(of_slot):
            if after.epoch <= before_life.epoch:
                what = f"{slot} was spawned with epoch {after.epoch} after epoch {before_life.epoch}"
                yield Violation("epochs_increase", what, evidence.describe([before_life.lines[0], after.lines[0]]))


def deaths_handled(evidence: Evidence) -> Found:
    """Each death has a diagnosis, and a restart or an escalation that says why there is none."""
    found = process_lives(evidence.events)
    end_m = max((float(e.get("m", 0.0)) for e in evidence.events), default=0.0)
    for slot, of_slot in by_slot(found).items():
        for place, life in enumerate(of_slot):
            if life.exited is None or life.diagnosis is None or life.finished or not life.failed:
                continue
            yield 1
            if not life.diagnosis.get("cause"):
                yield Violation(
                    "deaths_handled", f"{slot}#{life.epoch} died without a diagnosis", evidence.describe(life.lines)
                )
            back = any(after.session == life.session for after in of_slot[place + 1 :])
            recent = not evidence.ended and end_m - life.exited < RESTART_WITHIN_S
            if not back and not recent and not _explained(evidence.events, life):
                what = f"{slot}#{life.epoch} died without a restart or an explanation"
                yield Violation("deaths_handled", what, evidence.describe(life.lines[-1:]))


def _explained(events: list[Event], life: ProcessLife) -> bool:
    """Whether the log says why no process followed: the run or its agent ended, or the slot used up its restarts."""
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
    # The agent of the last session may have died together with its keeper, which then recorded nothing.
    return life.session < session


def faults_observed(evidence: Evidence) -> Found:
    """Each injected fault is confirmed by others: a kill by the agent, a fault inside a role by the role itself."""
    yield from _confirmed_by_role(evidence)
    known = {(life.slot, life.pid): life for life in process_lives(evidence.events)}
    end_m = max((float(e.get("m", 0.0)) for e in evidence.events), default=0.0)
    for number, event in injected_faults(evidence.events):
        if event.get("name") != "kill":
            continue
        yield 1
        life = known.get((str(event.get("slot")), int(event.get("pid", 0))))
        if life is None:
            what = f"{event.get('slot')} (pid {event.get('pid')}) was killed, but its start is not in the log"
            yield Violation("faults_observed", what, evidence.describe([number]))
            continue
        at = float(event.get("m", 0.0))
        if life.exited is None:
            if not life.agent_ended and end_m - at > EXIT_SEEN_WITHIN_S:
                what = f"the exit of {life.slot}#{life.epoch} after its kill is not in the log"
                yield Violation("faults_observed", what, evidence.describe([*life.lines, number]))
        elif (life.diagnosis or {}).get("signal") != "SIGKILL":
            what = (
                f"{life.slot}#{life.epoch} was killed, but its exit is recorded as {(life.diagnosis or {}).get('kind')}"
            )
            yield Violation("faults_observed", what, evidence.describe([number, life.lines[-1]]))


def _confirmed_by_role(evidence: Evidence) -> Found:
    known = {(life.slot, life.pid): life for life in process_lives(evidence.events)}
    confirmed = confirmed_faults(evidence.events)
    end_m = max((float(e.get("m", 0.0)) for e in evidence.events), default=0.0)
    for number, event in injected_faults(evidence.events):
        fault = FAULTS.get(str(event.get("name")))
        if fault is None or fault.means != "inside":
            continue
        yield 1
        at, life = float(event.get("m", 0.0)), known.get((str(event.get("slot")), int(event.get("pid", 0))))
        ended = life.exited if life is not None and life.exited is not None else end_m
        # The process may have ended for another reason before the fault could start.
        if number not in confirmed and ended - at > STARTED_WITHIN_S:
            what = f"{event.get('slot')} got the order '{fault.name}', and reported neither start nor failure"
            yield Violation("faults_observed", what, evidence.describe([number]))


def fencing(evidence: Evidence) -> Found:
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
                yield Violation(
                    "fencing", what, [describe_event(n, evidence.events[n]) for n in (newest[slot][1], number)]
                )


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
            yield Violation("fencing", f"{one.folder} has epoch {one.epoch}, which was never issued")
        for epoch, record in first.items():
            # Had it been there, the newer one would have begun behind it.
            if epoch > one.epoch and one.step >= record["step"] and one.folder not in damaged:
                what = (
                    f"{one.folder} of epoch {one.epoch} was written after epoch {epoch} had begun at {record['step']}"
                )
                yield Violation("fencing", what, [f"step record {record.get('by')} step={record['step']}"])


def _refusals(evidence: Evidence) -> Found:
    """An overtaken process must have been refused something: otherwise it may simply have written nothing."""
    found = {(life.slot, life.epoch): life for life in process_lives(evidence.events)}
    for number, event in enumerate(evidence.events):
        if event.get("kind") != "slot_overtaken":
            continue
        life = found.get((str(event.get("slot")), int(event.get("epoch", 0))))
        diagnosis = (life.diagnosis if life is not None else None) or {}
        text = f"{diagnosis.get('cause', '')} {diagnosis.get('trace', '')}"
        if "StaleEpoch" not in text and "fenced" not in text:
            yield f"no write of {event.get('slot')}#{event.get('epoch')} was refused after it was overtaken [{number}]"


def _journal_unread(evidence: Evidence) -> Found:
    """A journal that cannot be read proves nothing, and the queue could not recover from it."""
    if evidence.journal_error:
        yield Violation("fencing", f"the queue's journal cannot be read: {evidence.journal_error}")
    elif not evidence.has_journal:
        ready = [n for n, e in enumerate(evidence.events) if (e.get("kind"), e.get("slot")) == ("slot_ready", QUEUE)]
        if ready:
            yield Violation("fencing", "the run had a queue, but there is no journal", evidence.describe(ready[:1]))


def _late_in_queue(evidence: Evidence) -> Found:
    """Check the queue's own journal; which incarnations were fenced is derived here independently."""
    newest: dict[str, int] = {}
    ended: dict[str, int] = {}
    for write in evidence.writes:
        slot, _, epoch = write.who.rpartition("#")
        if slot:
            yield 1
            why = f"epoch {newest[slot]} wrote before" if int(epoch) < newest.get(slot, 0) else ""
            if write.who in ended:
                why = f"its end was journaled at {ended[write.who]}"
            if why:
                shown = [f"journal {write.n}: {write.what} of {write.who}"]
                yield Violation("fencing", f"the queue accepted '{write.what}' of {write.who}: {why}", shown)
            newest[slot] = max(newest.get(slot, 0), int(epoch))
        # After the check above: a process may report its own end.
        if write.what == PROCESS_EXITED and write.about:
            ended.setdefault(write.about, write.n)


def supervisor_consistent(evidence: Evidence) -> Found:
    """The supervisor never reached an impossible state."""
    for number, event in enumerate(evidence.events):
        if event.get("kind") == "run_started":
            yield 1
        elif event.get("kind") == "supervisor_fault":
            yield Violation("supervisor_consistent", str(event.get("error", "")), evidence.describe([number]))


def run_recovered(evidence: Evidence) -> Found:
    """The run reached its target, or it is live and every slot has recovered."""
    yield 1
    if not evidence.ended:
        if not evidence.recovered:
            exits = [n for n, e in enumerate(evidence.events) if e.get("kind") == "slot_exited"]
            yield Violation(
                "run_recovered", "the run is live, but not every slot has recovered", evidence.describe(exits[-3:])
            )
    elif evidence.status != "finished":
        at = f" at step {evidence.last_step} of {evidence.target}" if evidence.target else ""
        ends = [n for n, e in enumerate(evidence.events) if e.get("kind") in ("run_ended", "agent_died")]
        yield Violation("run_recovered", f"the run ended as {evidence.status!r}{at}", evidence.describe(ends[-1:]))


def no_leftovers(evidence: Evidence) -> Found:
    """An ended run leaves no process, no socket and no shared memory."""
    yield 1
    for what in evidence.leftovers:
        yield Violation("no_leftovers", what)


# --- training

ROOT = 0
TRAINER = "trainer/0"
"""The rank of a gang that writes and loads checkpoints."""
REFUSED = ("checkpoint_damaged", "checkpoint_quarantined")
FINAL = ("config", "given_up")
"""Kinds of exits after which the run waits for the user."""
OF_CHECKPOINTS = ("checkpoint ", "none of the checkpoints ")
"""How the cause of such an exit begins if it is about the checkpoints."""


def describe_record(record: Event) -> str:
    """A step record as one line, for evidence."""
    return (
        f"step record {record.get('by')} step={record.get('step')} version={record.get('version')} t={record['t']:.3f}"
    )


def steps_once(evidence: Evidence) -> Found:
    """Each step of the path to the end was taken once, none is missing, and a finished run has reached its target."""
    path = final_path(evidence.steps)
    yield len(path)
    numbers = sorted(path)
    missing = sorted(set(range(1, max(numbers, default=0) + 1)) - set(numbers))
    if missing:
        near = [describe_record(path[s]) for s in numbers if s + 1 in missing or s - 1 in missing][:4]
        yield Violation("steps_once", f"no record of steps {missing[:10]} on the final path", near)
    if evidence.reached and evidence.target and max(numbers, default=0) != evidence.target:
        what = f"the run finished at step {max(numbers, default=0)} of {evidence.target}"
        yield Violation("steps_once", what, [describe_record(path[s]) for s in numbers[-1:]])
    yield from _in_order(evidence.steps)


def _in_order(steps: list[Event]) -> Found:
    """One incarnation takes its steps in order."""
    last: dict[int, Event] = {}
    for record in steps:
        epoch = int(record.get("epoch", 0))
        before = last.get(epoch)
        if before is not None and record["step"] != before["step"] + 1:
            what = f"{record.get('by')} made step {record['step']} after step {before['step']}"
            yield Violation("steps_once", what, [describe_record(before), describe_record(record)])
        last[epoch] = record


def trained_once(evidence: Evidence) -> Found:
    """No sample counts twice on the final path, each step has a whole batch, and the queue's account agrees."""
    path, seen = final_path(evidence.steps), dict[str, Event]()
    for record in path.values():
        keys = record.get("keys", [])
        yield len(keys)
        for key in keys:
            if key in seen:
                what = f"sample {key} was trained in step {seen[key]['step']} and again in step {record['step']}"
                yield Violation("trained_once", what, [describe_record(seen[key]), describe_record(record)])
            seen[key] = record
        if evidence.batch and len(keys) != evidence.batch:
            yield Violation(
                "trained_once",
                f"step {record['step']} has {len(keys)} samples of {evidence.batch}",
                [describe_record(record)],
            )
    accounts = [n for n, e in enumerate(evidence.events) if e.get("kind") == "queue_account"]
    if accounts:
        account = evidence.events[accounts[-1]]
        if account.get("trained_twice"):
            what = f"the queue counts {account['trained_twice']} samples trained twice"
            yield Violation("trained_once", what, evidence.describe(accounts[-1:]))
        if evidence.reached and account.get("freed", len(seen)) != len(seen):
            what = f"the trainer's path has {len(seen)} samples, the queue freed {account['freed']} as trained"
            yield Violation("trained_once", what, evidence.describe(accounts[-1:]))


def trained_as_produced(evidence: Evidence) -> Found:
    """Trained samples equal those that a rollout produced: same content, same versions, by the rollouts' records."""
    made: dict[str, list[tuple[str, list[int]]]] = {}
    for record in evidence.produced:
        for key, digest, versions in record.get("samples", []):
            made.setdefault(key, []).append((digest, list(versions)))
    if not made and not evidence.trains:
        return
    for record in final_path(evidence.steps).values():
        if (unequal := _unequal_columns("trained_as_produced", record, "keys", "digests", "versions")) is not None:
            yield unequal
            continue
        digests = record.get("digests", [])
        yield len(digests)
        for key, digest, versions in zip(record["keys"], digests, record["versions"], strict=True):
            if (digest, list(versions)) not in made.get(key, []):
                what = f"sample {key} of step {record['step']} was not produced like that by a rollout"
                shown = [
                    describe_record(record),
                    f"produced: {made.get(key, 'no record')}",
                    f"trained: {(digest, versions)}",
                ]
                yield Violation("trained_as_produced", what, shown)


def _unequal_columns(check: str, record: Event, *columns: str) -> Violation | None:
    """A record whose columns differ in length cannot be attributed to samples."""
    sizes = {name: len(record.get(name, [])) for name in columns}
    if len(set(sizes.values())) == 1:
        return None
    lengths = ", ".join(f"{size} {name}" for name, size in sizes.items())
    return Violation(
        check,
        f"the record of step {record['step']} has columns of different lengths: {lengths}",
        [describe_record(record)],
    )


def commits(evidence: Evidence) -> dict[int, int]:
    """Position in the log of each version's commit: reported by the registry, or by the trainer that got its answer.

    A registry that is killed between the commit and its event leaves only the trainer's event.
    """
    found: dict[int, int] = {}
    for kind in ("published", "version_committed"):
        found |= {int(e["version"]): n for n, e in enumerate(evidence.events) if e.get("kind") == kind}
    return found


class _Tree:
    """Versions as the registry committed them and the trainer recorded them; distances are computed here
    independently."""

    def __init__(self, evidence: Evidence) -> None:
        changed = {int(r["version"]): bool(r.get("changed", True)) for r in evidence.steps}
        steps: dict[int, int] = {ROOT: 0}
        self.up: dict[int, tuple[int, int]] = {}
        for version, number in sorted(commits(evidence).items()):
            event = evidence.events[number]
            parent, step = int(event["parent"]), int(event["step"])
            steps[version] = step
            # Of a step whose record died with its trainer: the weights changed if the step did.
            self.up[version] = (parent, int(changed.get(version, step > steps.get(parent, -1) or parent == ROOT)))

    def _above(self, version: int) -> dict[int, int]:
        found, changes = {version: 0}, 0
        while version in self.up:
            version, change = self.up[version]
            changes += change
            found[version] = changes
        return found

    def distance(self, a: int, b: int) -> int | None:
        """Publications that changed the weights between two versions; None without a common ancestor."""
        up_a, up_b = self._above(a), self._above(b)
        return min((up_a[v] + up_b[v] for v in up_a.keys() & up_b.keys()), default=None)


def staleness_bounded(evidence: Evidence) -> Found:
    """Every token was within the staleness bound when it was trained on, by the versions that engines recorded."""
    bound = evidence.max_staleness
    if bound is None:
        return
    tree = _Tree(evidence)
    for record in evidence.steps:
        recorded = record.get("staleness", [])
        worst = max(recorded, default=0)
        if worst > bound:
            what = f"step {record['step']} trained on a sample of staleness {worst}, the bound is {bound:g}"
            yield Violation("staleness_bounded", what, [describe_record(record)])
        if (unequal := _unequal_columns("staleness_bounded", record, "keys", "versions", "staleness")) is not None:
            yield unequal
            continue
        weights = int(record.get("trained_version", ROOT))
        if weights != ROOT and weights not in tree.up:
            # Its commit may have been in a segment that is no longer kept; then nothing is said of these samples.
            if tree.up and evidence.complete:
                what = f"step {record['step']} was trained on weights of version {weights}, which was never committed"
                yield Violation("staleness_bounded", what, [describe_record(record)])
            continue
        for key, versions, said in zip(record["keys"], record["versions"], recorded, strict=True):
            known = [tree.distance(weights, v) for v in versions]
            if None in known or not known:
                if evidence.complete and tree.up:
                    what = f"sample {key} of step {record['step']} has tokens of an uncommitted version: {versions}"
                    yield Violation("staleness_bounded", what, [describe_record(record)])
                continue
            yield 1
            far = max(d for d in known if d is not None)
            if far > bound:
                what = f"sample {key} of step {record['step']} is {far} versions old, the bound is {bound:g}"
                yield Violation(
                    "staleness_bounded", what, [describe_record(record), f"recorded as {said}, versions {versions}"]
                )


def versions_increase(evidence: Evidence) -> Found:
    """Policy versions only grow, none is issued or committed twice, and each has a committed parent."""
    newest = {"version_issued": 0, "version_committed": 0}
    at: dict[str, int] = {}
    committed = {ROOT, *commits(evidence)}
    for number, event in enumerate(evidence.events):
        kind = str(event.get("kind"))
        if kind not in newest:
            continue
        yield 1
        version = int(event["version"])
        if version <= newest[kind]:
            what = f"version {version} was {kind[8:]} after version {newest[kind]}"
            yield Violation(
                "versions_increase", what, evidence.describe([n for n in (at.get(kind, -1), number) if n >= 0])
            )
        newest[kind], at[kind] = max(newest[kind], version), number
        if kind == "version_committed" and evidence.complete and int(event["parent"]) not in committed:
            what = f"version {version} has parent {event['parent']}, which was not committed"
            yield Violation("versions_increase", what, evidence.describe([number]))


def checkpoint_ignored(evidence: Evidence) -> Iterator[Violation]:
    """Lives of the trainer that repeat what a checkpoint covers, although no event says that it was refused.

    They start before the newest checkpoint that was reported complete before them. Starting later is no breach: a kill
    between a checkpoint's rename and its event leaves it unreported.
    """
    started, said = _first_events(evidence.events), dict[int, int]()
    for number, event in enumerate(evidence.events):
        if event.get("kind") == "resumed":
            said.setdefault(_epoch_of(event), number)
    first: dict[int, int] = {}
    for record in evidence.steps:
        first.setdefault(int(record.get("epoch", 0)), int(record["step"]))
    words = [(n, e) for n, e in enumerate(evidence.events) if e.get("kind") in ("checkpoint", "slot_exited", *REFUSED)]
    for epoch in sorted({*first, *said}):
        event = evidence.events[said[epoch]] if epoch in said else {"step": first[epoch] - 1}
        start, shown = int(event["step"]), [places[epoch] for places in (started, said) if epoch in places]
        if first.get(epoch, start + 1) != start + 1:
            what = f"{TRAINER}#{epoch} reported to resume from step {start}, but its first step is {first[epoch]}"
            yield Violation("checkpoint_recovery", what, evidence.describe(shown))
        # Of a life whose beginning is not in the log, by the order of epochs alone.
        usable = _usable_checkpoints(words, epoch, started.get(epoch, len(evidence.events)))
        newest = max(usable, key=lambda n: int(evidence.events[n].get("step", 0)), default=None)
        if newest is not None and (step := int(evidence.events[newest].get("step", 0))) > start:
            folder = evidence.events[newest].get("folder")
            what = (
                f"{TRAINER}#{epoch} resumed from step {start}, although {folder} of step {step} was complete before it "
                "and no event says that it was refused"
            )
            yield Violation("checkpoint_recovery", what, evidence.describe([newest, *shown]))


def _epoch_of(event: Event) -> int:
    """Epoch of the writer; 0 if the event does not say."""
    epoch = str(event.get("by", "")).rpartition("#")[2]
    return int(epoch) if epoch.isdecimal() else 0


def _first_events(events: list[Event]) -> dict[int, int]:
    """Position of the first event of each life of the trainer."""
    found: dict[int, int] = {}
    for number, event in enumerate(events):
        if event.get("kind") == "slot_spawned" and event.get("slot") == TRAINER:
            found.setdefault(int(event.get("epoch", 0)), number)
        elif str(event.get("by")).startswith(f"{TRAINER}#"):
            found.setdefault(_epoch_of(event), number)
    return found


def _usable_checkpoints(words: list[tuple[int, Event]], epoch: int, begun: int) -> list[int]:
    """Positions of the events of checkpoints from which a life had to resume: reported before it started and not
    refused since."""
    found: dict[str, int] = {}
    for number, event in words:
        before, kind = number < begun, event["kind"]
        if kind == "checkpoint" and before and _epoch_of(event) < epoch:
            found[str(event.get("folder"))] = number
        elif kind in REFUSED and (before or _epoch_of(event) == epoch):
            found.pop(str(event.get("checkpoint")), None)
        elif before and _needs_user(event):
            found.clear()
    return list(found.values())


def _needs_user(event: Event) -> bool:
    """The trainer ended the run because of its checkpoints: the user may have moved them, which no event reports."""
    end = event.get("diagnosis") or {}
    return (
        event["kind"] == "slot_exited"
        and event.get("slot") == TRAINER
        and end.get("kind") in FINAL
        and str(end.get("cause", "")).startswith(OF_CHECKPOINTS)
    )


def checkpoint_recovery(evidence: Evidence) -> Found:
    """The trainer resumes from its newest checkpoint; a finished run has that of its last step, as committed."""
    yield from checkpoint_ignored(evidence)
    newest = max(evidence.checkpoints, key=lambda c: c.step, default=None)
    yield len(evidence.checkpoints)
    path = final_path(evidence.steps)
    if evidence.reached and evidence.target and (newest is None or newest.step != evidence.target):
        there = newest.folder if newest else "nowhere"
        what = f"the newest checkpoint is {there}, the run finished step {evidence.target}"
        yield Violation("checkpoint_recovery", what, [describe_record(path[s]) for s in sorted(path)[-1:]])
    known = commits(evidence)
    for one in evidence.checkpoints:
        number = known.get(one.version)
        if number is None:
            if evidence.complete:
                yield Violation(
                    "checkpoint_recovery", f"{one.folder} has version {one.version}, which was never committed"
                )
        elif evidence.events[number].get("digest") != one.digest:
            what = f"{one.folder} has version {one.version} with digest {one.digest}, another digest was committed"
            yield Violation("checkpoint_recovery", what, evidence.describe([number]))
    if evidence.reached and evidence.evaluations and newest is not None:
        after = [e for e in evidence.evaluations if e.get("when") == "after"]
        if after and after[-1].get("version") != newest.version:
            what = f"version {after[-1].get('version')} was evaluated last, the final checkpoint is of {newest.version}"
            yield Violation("checkpoint_recovery", what, [f"evaluation record t={after[-1]['t']:.3f}"])
