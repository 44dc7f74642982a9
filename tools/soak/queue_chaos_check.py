"""The checker of queue_chaos.py: what processes recorded on their own, held against what the queue says of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

import msgspec
from queue_chaos_journal import FREED, LOST, NOWHERE, QUEUED, SKIPPED, TRAINED, Content, Story
from queue_chaos_records import (
    Again,
    Checkpoint,
    Done,
    Fallback,
    Joined,
    Life,
    Made,
    Making,
    Put,
    Read,
    Step,
    Weights,
)

from relax_rt.transport.queue.ledger.messages import SampleKey

ROOT = 0
_TERMINAL_BY_NAME = ("freed", "finished", SKIPPED)
_ACTIVE = ("reserved", "waiting", "ready", "leased", "trained")


class Violation(msgspec.Struct, frozen=True):
    """check: which one fired."""

    check: str
    what: str


class Evidence(msgspec.Struct):
    """All that is known after a run.

    Attributes:
        lives: the records of all processes. story: what the journal tells.
        account: as the broker answered at the end.
        max_staleness, group_size, groups_per_step: of the policy.
        crashes: processes that ended by themselves. leftovers: files, memory, processes that should not be there.
        begin, end: of the faults, on the clock of the records. stall_s: longest time without a step; 0: not judged.
    """

    lives: list[Life]
    story: Story
    account: dict[str, int]
    max_staleness: float
    group_size: int
    groups_per_step: int
    crashes: list[str] = []
    leftovers: list[str] = []
    begin: float = 0.0
    end: float = 0.0
    stall_s: float = 0.0


class Tree:
    """The versions as the trainer made them, and distances between them, counted anew."""

    def __init__(self, lives: list[Life]) -> None:
        self._up: dict[int, tuple[int, int]] = {}
        for life in lives:
            for record in life.records:
                if isinstance(record, Weights):
                    self._up[record.version] = (record.parent, int(record.changed))

    def _above(self, version: int) -> dict[int, int]:
        """Every version on the way to the root, with the changes of weights up to there."""
        found, changes = {version: 0}, 0
        while version != ROOT:
            version, changed = self._up[version]
            changes += changed
            found[version] = changes
        return found

    def distance(self, a: int, b: int) -> float:
        """Changes of weights between two versions; infinite when one was never announced."""
        if any(version != ROOT and version not in self._up for version in (a, b)):
            return float("inf")
        above_a, above_b = self._above(a), self._above(b)
        return min(above_a[version] + above_b[version] for version in above_a.keys() & above_b.keys())


class Case:
    """The evidence, arranged for the checks."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence, self.story, self.lives = evidence, evidence.story, evidence.lives
        self.tree = Tree(self.lives)
        self.made: dict[SampleKey, list[tuple[str, int, Made]]] = {}
        self.reads: dict[int, tuple[Life, Read]] = {}
        for life in self.lives:
            joined = life.joined
            for record in life.records:
                if isinstance(record, Making) and joined is not None:
                    for made in record.samples:
                        self.made.setdefault(made.key, []).append((joined.slot, joined.epoch, made))
                elif isinstance(record, Read):
                    self.reads[record.lease] = (life, record)
        self.path, self.path_faults = self._path()

    def _path(self) -> tuple[dict[int, Step], list[str]]:
        """The trainer's own account of the steps that lead to its last weights."""
        path: dict[int, Step] = {}
        wrong: list[str] = []
        for life in self.lives:
            for record in life.records:
                if isinstance(record, Fallback):
                    path = {step: one for step, one in path.items() if step <= record.step}
                elif isinstance(record, Step):
                    if record.step in path or record.step != len(path) + 1:
                        wrong.append(f"step {record.step} of {life.slot}.{life.number} comes after {len(path)} steps")
                    path[record.step] = record
        return path, wrong

    def contents_of(self, lease: int, key: SampleKey) -> Content | None:
        """What a key stood for in a lease, as the journal has it."""
        granted = self.story.leases.get(lease)
        index = granted.contents.get(key) if granted is not None else None
        return self.story.contents[index] if index is not None else None

    def candidates(self, lease: int, key: SampleKey) -> list[Made]:
        """What a producer may have put as the sample that a lease shows under this key."""
        content = self.contents_of(lease, key)
        return [
            made
            for slot, epoch, made in self.made.get(key, [])
            if content is None or (slot, epoch) == (content.who.slot, content.who.epoch)
        ]

    def acknowledged(self) -> Iterator[tuple[Joined, SampleKey]]:
        for life in self.lives:
            if (joined := life.joined) is not None:
                for record in life.records:
                    if isinstance(record, Put):
                        yield from ((joined, key) for key in record.keys)

    def on_path(self) -> Iterator[tuple[Step, Read]]:
        for step in self.path.values():
            if step.lease in self.reads:
                yield step, self.reads[step.lease][1]


Check = Callable[[Case], Iterator[str]]


def _lost(case: Case) -> Iterator[str]:
    """What was acknowledged is in the journal, and all that it took in is somewhere."""
    story = case.story
    if story.error:
        yield f"the journal cannot be applied again: {story.error}"
        return
    counts = Counter((who.slot, who.epoch, key) for who, key in case.acknowledged())
    for (slot, epoch, key), times in counts.items():
        if story.puts.get((slot, epoch, key), 0) < times:
            yield f"sample {key} of {slot}#{epoch} was acknowledged, and the journal does not know its put"
    for life, read in case.reads.values():
        if read.lease not in story.leases:
            yield f"lease {read.lease} of {life.slot} was granted, and the journal does not know it"
    for content in story.contents:
        if content.fate == NOWHERE:
            yield f"sample {content.key} of {content.who} is neither in the queue nor did it end"


def _twice(case: Case) -> Iterator[str]:
    """No sample and no prompt is trained on twice on the final path."""
    keys: Counter[SampleKey] = Counter()
    prompts: Counter[int] = Counter()
    for _, read in case.on_path():
        keys.update(one.key for one in read.samples)
        prompts.update({one.key.group: one.prompt for one in read.samples}.values())
    yield from (f"sample {key} was trained on {n} times" for key, n in keys.items() if n > 1)
    yield from (f"prompt {prompt} was trained on {n} times" for prompt, n in prompts.items() if n > 1)
    for name in ("trained_twice", "prompts_trained_twice"):
        if case.evidence.account.get(name, 0):
            yield f"the queue itself counts {case.evidence.account[name]} {name}"


def _steps(case: Case) -> Iterator[str]:
    """Every step is there once, of whole groups, and the queue has the same path."""
    yield from case.path_faults
    ours: dict[int, set[int]] = {}
    for step, read in case.on_path():
        sizes = Counter(one.key.group for one in read.samples)
        ours[step.step] = set(sizes)
        evidence = case.evidence
        if len(sizes) != evidence.groups_per_step or set(sizes.values()) != {evidence.group_size}:
            yield f"step {step.step} was trained on groups {dict(sizes)}"
    for step in case.path.values():
        if step.step not in ours:
            yield f"step {step.step} was made of lease {step.lease}, which nobody has read"
    theirs = {step: set(groups) for step, groups in case.story.path.items()}
    for number in sorted(ours.keys() | theirs.keys()):
        if not case.story.error and ours.get(number) != theirs.get(number):
            yield f"step {number}: the trainer has groups {ours.get(number)}, the queue {theirs.get(number)}"


def _staleness(case: Case) -> Iterator[str]:
    """Whatever the trainer got, it got within the bound, by our own count."""
    for _, read in case.reads.values():
        if read.task != "train":
            continue
        for one in read.samples:
            found = [_distance(case, read.version, made) for made in case.candidates(read.lease, one.key)]
            if found and min(found) > case.evidence.max_staleness:
                yield f"sample {one.key} had staleness {min(found)} when version {read.version} took it"
            if found and one.staleness not in found:
                yield f"sample {one.key} at version {read.version}: told {one.staleness}, counted {found}"


def _distance(case: Case, version: int, made: Made) -> float:
    return max((case.tree.distance(version, span.version) for span in made.versions), default=0)


def _refused(case: Case) -> Iterator[str]:
    """Nothing is refused or lost without cause."""
    for refusal in case.story.refusals:
        farthest = max((case.tree.distance(refusal.trainer_version, one) for one in refusal.versions), default=0)
        if farthest <= case.evidence.max_staleness:
            yield f"group {refusal.group} was refused at staleness {farthest}, version {refusal.trainer_version}"
    freed = _freed_and_undone(case)
    for content in case.story.contents:
        if content.fate == LOST and content.key.group not in freed:
            yield f"sample {content.key} is lost, though its memory had no reason to be freed"


def _freed_and_undone(case: Case) -> set[int]:
    """Groups whose memory was freed before their step was undone.

    Its checkpoint was there and was given up deliberately, or the step had been skipped.
    """
    found: set[int] = set()
    path: dict[int, Step] = {}
    covered = 0
    for life in case.lives:
        for record in life.records:
            if isinstance(record, Step):
                path[record.step] = record
            elif isinstance(record, Checkpoint):
                covered = record.step
            elif isinstance(record, Fallback):
                for undone in [path.pop(step) for step in list(path) if step > record.step]:
                    if (undone.step <= covered or undone.skipped) and undone.lease in case.reads:
                        found.update(one.key.group for one in case.reads[undone.lease][1].samples)
                # That checkpoint is in place, also when its process died before it wrote so down.
                covered = record.step
    return found


def _digest(case: Case) -> Iterator[str]:
    """What is read is what was put, whenever it is read."""
    for life, read in case.reads.values():
        for one in read.samples:
            digests = {made.digest for made in case.candidates(read.lease, one.key)}
            if one.digest not in digests:
                yield f"{life.slot} read {one.digest} as sample {one.key} of lease {read.lease}, put was {digests}"
    for life in case.lives:
        for record in life.records:
            if isinstance(record, Again) and record.digest != record.now:
                yield f"{life.slot} kept sample {record.key} of lease {record.lease}, and its memory was used again"
    yield from _scores(case)


def _scores(case: Case) -> Iterator[str]:
    """The reward's columns are those that follow from the sample's own tokens."""
    for life, read in case.reads.values():
        for one in read.samples:
            if one.score != one.due and (one.score or read.task == "train"):
                yield f"{life.slot} read a wrong reward of sample {one.key} in lease {read.lease}"


def _fence(case: Case) -> Iterator[str]:
    """Nobody is heard when a newer process has its place."""
    if not case.story.error:
        yield from case.story.unheard
    joins: dict[str, list[Joined]] = {}
    for life in case.lives:
        if (joined := life.joined) is not None:
            if any(other.epoch == joined.epoch for other in joins.get(joined.slot, [])):
                yield f"two processes of {joined.slot} have epoch {joined.epoch}"
            joins.setdefault(joined.slot, []).append(joined)
    for life in case.lives:
        if (joined := life.joined) is None:
            continue
        followed = min((one.at for one in joins[joined.slot] if one.epoch > joined.epoch), default=float("inf"))
        for record in life.records:
            if isinstance(record, Put | Done | Step | Fallback) and record.begun > followed:
                yield f"{type(record).__name__} of {joined.slot}#{joined.epoch} was taken after it was followed"


def _counts(case: Case) -> Iterator[str]:
    """The queue's account adds up, with itself and with the fates of the samples."""
    story, account = case.story, case.evidence.account
    if story.error:
        return
    yield from (f"audit: {one}" for one in story.audit)
    if account != story.account:
        differing = {
            name for name in account.keys() | story.account.keys() if account.get(name) != story.account.get(name)
        }
        yield f"the broker's account and that of its journal differ in {sorted(differing)}"
    states = {name: n for name, n in account.items() if name in (*_ACTIVE, *_TERMINAL_BY_NAME) or _is_end(name)}
    if sum(states.values()) != account["samples_issued"]:
        yield f"{account['samples_issued']} samples were issued, {sum(states.values())} are in {states}"
    fates = Counter(content.fate for content in story.contents)
    queued = sum(account.get(name, 0) for name in ("waiting", "ready", "leased"))
    exact = {FREED: account.get(FREED, 0), TRAINED: account.get(TRAINED, 0), SKIPPED: account.get(SKIPPED, 0)}
    for name, n in {**exact, QUEUED: queued}.items():
        if fates[name] != n:
            yield f"{fates[name]} samples were put and are {name}, the account says {n}"
    others = sum(n for name, n in fates.items() if name not in {*exact, QUEUED})
    ended = sum(n for name, n in states.items() if _is_end(name))
    if others > ended:
        yield f"{others} samples came to an end, the account has {ended} ends"
    trained = sum(len(read.samples) for step, read in case.on_path() if not step.skipped)
    if trained != fates[FREED] + fates[TRAINED]:
        yield f"the trainer has {trained} samples on its path, the queue {fates[FREED] + fates[TRAINED]}"


def _is_end(name: str) -> bool:
    return name in ("failed", "quarantined", LOST) or name.startswith(("refused(", "dropped("))


def _progress(case: Case) -> Iterator[str]:
    """Training gets on while processes die."""
    evidence = case.evidence
    steps = [one.at for life in case.lives for one in life.records if isinstance(one, Step)]
    during = sorted(at for at in steps if evidence.begin <= at <= evidence.end)
    if not during:
        yield "no step was made while there were faults"
    elif evidence.stall_s:
        marks = [evidence.begin, *during, evidence.end]
        longest = max(after - before for before, after in pairwise(marks))
        if longest > evidence.stall_s:
            yield f"no step for {longest:.1f} s"


def _leftovers(case: Case) -> Iterator[str]:
    yield from case.evidence.crashes
    yield from case.evidence.leftovers


CHECKS: dict[str, Check] = {
    "lost": _lost,
    "twice": _twice,
    "steps": _steps,
    "staleness": _staleness,
    "refused": _refused,
    "digest": _digest,
    "fence": _fence,
    "counts": _counts,
    "progress": _progress,
    "leftovers": _leftovers,
}


def check(evidence: Evidence) -> list[Violation]:
    """Everything that is wrong; empty when the queue kept its word."""
    case = Case(evidence)
    return [Violation(name, what) for name, one in CHECKS.items() for what in one(case)]


def steps_between(evidence: Evidence, kills: list[float]) -> dict[str, int]:
    """In how many of the times between two kills a step was made."""
    steps = [one.at for life in evidence.lives for one in life.records if isinstance(one, Step)]
    spans = list(pairwise([evidence.begin, *kills, evidence.end]))
    busy = sum(any(begin <= at < end for at in steps) for begin, end in spans)
    return {"times_between_kills": len(spans), "times_between_kills_with_steps": busy}


def numbers(evidence: Evidence) -> dict[str, int]:
    """Counts for the table."""
    case = Case(evidence)
    fates = Counter(content.fate for content in case.story.contents)
    steps = [one for life in case.lives for one in life.records if isinstance(one, Step)]
    falls = [one for life in case.lives for one in life.records if isinstance(one, Fallback)]
    return {
        "steps": len(steps),
        "steps_on_path": len(case.path),
        "fallbacks": len(falls),
        "fallbacks_to_older": sum(one.deliberate for one in falls),
        "checkpoints": sum(isinstance(one, Checkpoint) for life in case.lives for one in life.records),
        "samples_acknowledged": sum(1 for _ in case.acknowledged()),
        "samples_kept": len(case.story.contents),
        "samples_late": case.story.late,
        "samples_on_path": fates[FREED] + fates[TRAINED],
        "samples_refused_stale": fates["refused(stale)"],
        "samples_lost_with_checkpoint": fates[LOST],
        "samples_otherwise_ended": sum(fates.values())
        - fates[FREED] - fates[TRAINED] - fates["refused(stale)"] - fates[LOST] - fates[QUEUED],
        "samples_in_queue": fates[QUEUED],
        "samples_offered_again": case.evidence.account.get("samples_offered_again", 0),
        "leases_lapsed": case.story.tallies.get("lease_lapsed", 0),
        "samples_of_lapsed_leases": case.story.tallies.get("samples_of_lapsed_leases", 0),
        "reads": len(case.reads),
        "looked_at_again": sum(isinstance(one, Again) for life in case.lives for one in life.records),
        "blocks_spilled": case.evidence.account.get("blocks_spilled", 0),
        "bytes_spilled": case.evidence.account.get("bytes_spilled", 0),
    }  # fmt: skip


__all__ = ["CHECKS", "Evidence", "Violation", "check", "numbers", "steps_between"]
