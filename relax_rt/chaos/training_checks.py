"""Checks of the training: steps, samples, staleness, versions, checkpoints; no I/O.

The trainer's and the rollouts' own records are held against what registry and queue say. Each check yields an int for
every batch of things it has looked at, and a Breach for each promise not kept.
"""

from __future__ import annotations

from collections.abc import Iterator

from relax_rt.chaos.evidence import Breach, Evidence
from relax_rt.chaos.timeline import Event, path_of

Found = Iterator[int | Breach]
ROOT = 0
TRAINER = "trainer/0"
"""Of a gang, the rank that writes checkpoints and takes them."""
REFUSED = ("checkpoint_damaged", "checkpoint_quarantined")
FINAL = ("config", "given_up")
"""Kinds of an end after which the run waits for a person."""
OF_CHECKPOINTS = ("checkpoint ", "none of the checkpoints ")
"""How the cause of such an end begins if it is for the checkpoints."""


def told(record: Event) -> str:
    """A trainer's record as one line, for evidence."""
    return (
        f"step record {record.get('by')} step={record.get('step')} version={record.get('version')} t={record['t']:.3f}"
    )


def steps_once(evidence: Evidence) -> Found:
    """Each step of the path to the end was taken once, none is missing, and a finished run has reached its target."""
    path = path_of(evidence.steps)
    yield len(path)
    numbers = sorted(path)
    missing = sorted(set(range(1, max(numbers, default=0) + 1)) - set(numbers))
    if missing:
        near = [told(path[s]) for s in numbers if s + 1 in missing or s - 1 in missing][:4]
        yield Breach("steps_once", f"no record of steps {missing[:10]} on the final path", near)
    if evidence.reached and evidence.target and max(numbers, default=0) != evidence.target:
        what = f"the run finished at step {max(numbers, default=0)} of {evidence.target}"
        yield Breach("steps_once", what, [told(path[s]) for s in numbers[-1:]])
    yield from _within_one_life(evidence.steps)


def _within_one_life(steps: list[Event]) -> Found:
    """One incarnation takes its steps in order."""
    last: dict[int, Event] = {}
    for record in steps:
        epoch = int(record.get("epoch", 0))
        before = last.get(epoch)
        if before is not None and record["step"] != before["step"] + 1:
            what = f"{record.get('by')} took step {record['step']} after step {before['step']}"
            yield Breach("steps_once", what, [told(before), told(record)])
        last[epoch] = record


def trained_once(evidence: Evidence) -> Found:
    """No sample counts twice on the final path, each step has a whole batch, and the queue's account agrees."""
    path, seen = path_of(evidence.steps), dict[str, Event]()
    for record in path.values():
        keys = record.get("keys", [])
        yield len(keys)
        for key in keys:
            if key in seen:
                what = f"sample {key} was trained in step {seen[key]['step']} and again in step {record['step']}"
                yield Breach("trained_once", what, [told(seen[key]), told(record)])
            seen[key] = record
        if evidence.batch and len(keys) != evidence.batch:
            yield Breach(
                "trained_once", f"step {record['step']} has {len(keys)} samples of {evidence.batch}", [told(record)]
            )
    accounts = [n for n, e in enumerate(evidence.events) if e.get("kind") == "queue_account"]
    if accounts:
        account = evidence.events[accounts[-1]]
        if account.get("trained_twice"):
            what = f"the queue counts {account['trained_twice']} samples trained twice"
            yield Breach("trained_once", what, evidence.lines(accounts[-1:]))
        if evidence.reached and account.get("freed", len(seen)) != len(seen):
            what = f"the trainer's path has {len(seen)} samples, the queue freed {account['freed']} as trained"
            yield Breach("trained_once", what, evidence.lines(accounts[-1:]))


def trained_what_was_made(evidence: Evidence) -> Found:
    """Trained samples equal those that a rollout produced: same content, same versions, by the rollouts' records."""
    made: dict[str, list[tuple[str, list[int]]]] = {}
    for record in evidence.made:
        for key, digest, versions in record.get("samples", []):
            made.setdefault(key, []).append((digest, list(versions)))
    if not made and not evidence.trains:
        return
    for record in path_of(evidence.steps).values():
        if (uneven := _uneven("trained_what_was_made", record, "keys", "digests", "versions")) is not None:
            yield uneven
            continue
        digests = record.get("digests", [])
        yield len(digests)
        for key, digest, versions in zip(record["keys"], digests, record["versions"], strict=True):
            if (digest, list(versions)) not in made.get(key, []):
                what = f"sample {key} of step {record['step']} was never made like that by a rollout"
                shown = [told(record), f"made: {made.get(key, 'no record')}", f"trained: {(digest, versions)}"]
                yield Breach("trained_what_was_made", what, shown)


def _uneven(check: str, record: Event, *columns: str) -> Breach | None:
    """A record whose columns differ in length cannot be attributed to samples."""
    sizes = {name: len(record.get(name, [])) for name in columns}
    if len(set(sizes.values())) == 1:
        return None
    told_sizes = ", ".join(f"{size} {name}" for name, size in sizes.items())
    return Breach(check, f"the record of step {record['step']} does not fit together: {told_sizes}", [told(record)])


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


def staleness_held(evidence: Evidence) -> Found:
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
            yield Breach("staleness_held", what, [told(record)])
        if (uneven := _uneven("staleness_held", record, "keys", "versions", "staleness")) is not None:
            yield uneven
            continue
        weights = int(record.get("trained_version", ROOT))
        if weights != ROOT and weights not in tree.up:
            # Its commit may have been in a segment that is no longer kept; then nothing is said of these samples.
            if tree.up and evidence.complete:
                what = f"step {record['step']} was trained on weights of version {weights}, which was never committed"
                yield Breach("staleness_held", what, [told(record)])
            continue
        for key, versions, said in zip(record["keys"], record["versions"], recorded, strict=True):
            known = [tree.distance(weights, v) for v in versions]
            if None in known or not known:
                if evidence.complete and tree.up:
                    what = f"sample {key} of step {record['step']} has tokens of a version never committed: {versions}"
                    yield Breach("staleness_held", what, [told(record)])
                continue
            yield 1
            far = max(d for d in known if d is not None)
            if far > bound:
                what = f"sample {key} of step {record['step']} is {far} versions old, the bound is {bound:g}"
                yield Breach("staleness_held", what, [told(record), f"told as {said}, versions {versions}"])


def versions_grow(evidence: Evidence) -> Found:
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
            yield Breach("versions_grow", what, evidence.lines([n for n in (at.get(kind, -1), number) if n >= 0]))
        newest[kind], at[kind] = max(newest[kind], version), number
        if kind == "version_committed" and evidence.complete and int(event["parent"]) not in committed:
            what = f"version {version} has parent {event['parent']}, which was not committed"
            yield Breach("versions_grow", what, evidence.lines([number]))


def fallen_behind(evidence: Evidence) -> Iterator[Breach]:
    """Lives of the trainer that repeat what a checkpoint covers, although no event says that it was refused.

    They start before the newest checkpoint that was reported complete before them. Starting later is no breach: a kill
    between a checkpoint's rename and its event leaves it unreported.
    """
    begun, said = _begun(evidence.events), dict[int, int]()
    for number, event in enumerate(evidence.events):
        if event.get("kind") == "resumed":
            said.setdefault(_epoch_of(event), number)
    first: dict[int, int] = {}
    for record in evidence.steps:
        first.setdefault(int(record.get("epoch", 0)), int(record["step"]))
    words = [(n, e) for n, e in enumerate(evidence.events) if e.get("kind") in ("checkpoint", "slot_exited", *REFUSED)]
    for epoch in sorted({*first, *said}):
        word = evidence.events[said[epoch]] if epoch in said else {"step": first[epoch] - 1}
        start, shown = int(word["step"]), [places[epoch] for places in (begun, said) if epoch in places]
        if first.get(epoch, start + 1) != start + 1:
            what = f"{TRAINER}#{epoch} went on from step {start} by its own word, and its first step is {first[epoch]}"
            yield Breach("checkpoint_stands", what, evidence.lines(shown))
        # Of a life whose beginning is not in the log, by the order of epochs alone.
        standing = _standing(words, epoch, begun.get(epoch, len(evidence.events)))
        newest = max(standing, key=lambda n: int(evidence.events[n].get("step", 0)), default=None)
        if newest is not None and (step := int(evidence.events[newest].get("step", 0))) > start:
            folder = evidence.events[newest].get("folder")
            what = (
                f"{TRAINER}#{epoch} began behind step {start}, although {folder} of step {step} was complete before it "
                "and no event says that it was refused"
            )
            yield Breach("checkpoint_stands", what, evidence.lines([newest, *shown]))


def _epoch_of(event: Event) -> int:
    """Epoch of the writer; 0 if the event does not say."""
    epoch = str(event.get("by", "")).rpartition("#")[2]
    return int(epoch) if epoch.isdecimal() else 0


def _begun(events: list[Event]) -> dict[int, int]:
    """Position of the first event of each life of the trainer."""
    found: dict[int, int] = {}
    for number, event in enumerate(events):
        if event.get("kind") == "slot_spawned" and event.get("slot") == TRAINER:
            found.setdefault(int(event.get("epoch", 0)), number)
        elif str(event.get("by")).startswith(f"{TRAINER}#"):
            found.setdefault(_epoch_of(event), number)
    return found


def _standing(words: list[tuple[int, Event]], epoch: int, begun: int) -> list[int]:
    """Positions of the events of checkpoints from which a life had to resume: reported before it started and not
    refused since."""
    found: dict[str, int] = {}
    for number, event in words:
        before, kind = number < begun, event["kind"]
        if kind == "checkpoint" and before and _epoch_of(event) < epoch:
            found[str(event.get("folder"))] = number
        elif kind in REFUSED and (before or _epoch_of(event) == epoch):
            found.pop(str(event.get("checkpoint")), None)
        elif before and _left_to_a_person(event):
            found.clear()
    return list(found.values())


def _left_to_a_person(event: Event) -> bool:
    """The trainer ended the run because of its checkpoints: a person may have moved them, which no event reports."""
    end = event.get("diagnosis") or {}
    return (
        event["kind"] == "slot_exited"
        and event.get("slot") == TRAINER
        and end.get("kind") in FINAL
        and str(end.get("cause", "")).startswith(OF_CHECKPOINTS)
    )


def checkpoint_stands(evidence: Evidence) -> Found:
    """The trainer falls back to its newest checkpoint; a finished run has that of its last step, as committed."""
    yield from fallen_behind(evidence)
    newest = max(evidence.checkpoints, key=lambda c: c.step, default=None)
    yield len(evidence.checkpoints)
    path = path_of(evidence.steps)
    if evidence.reached and evidence.target and (newest is None or newest.step != evidence.target):
        there = newest.folder if newest else "nowhere"
        what = f"the newest checkpoint is {there}, the run finished step {evidence.target}"
        yield Breach("checkpoint_stands", what, [told(path[s]) for s in sorted(path)[-1:]])
    known = commits(evidence)
    for one in evidence.checkpoints:
        number = known.get(one.version)
        if number is None:
            if evidence.complete:
                yield Breach("checkpoint_stands", f"{one.folder} has version {one.version}, which was never committed")
        elif evidence.events[number].get("digest") != one.digest:
            what = f"{one.folder} has version {one.version} with digest {one.digest}, committed was another"
            yield Breach("checkpoint_stands", what, evidence.lines([number]))
    if evidence.reached and evidence.evaluations and newest is not None:
        after = [e for e in evidence.evaluations if e.get("when") == "after"]
        if after and after[-1].get("version") != newest.version:
            what = f"version {after[-1].get('version')} was evaluated last, the final checkpoint is of {newest.version}"
            yield Breach("checkpoint_stands", what, [f"evaluation record t={after[-1]['t']:.3f}"])
