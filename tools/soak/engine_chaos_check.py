"""The verdict on a soak of engine_chaos.py: the records that engines, callers and registry made, held together."""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from relax_rt.transport.base.versions import VersionRecord, VersionTree

Line = dict[str, Any]

NEWS_S = 1.0
"""A router may be so far behind the registry: its watch answers at once, but processes of a busy machine wait. Of the
length of a step of the soak, so that it hides no more than one version."""
MARK_S = 0.5
"""A mark that is due is kept within this time, of which 0.1 s is the pause between marks: what was sampled
in the last of it may be lost with the engine."""
FALLS = 0.08
RISES = 0.03
ENOUGH_STEPS, TOP = 150, 0.9


class Incarnation(msgspec.Struct):
    """What one incarnation of an engine recorded, in order."""

    slot: str
    epoch: int
    lines: list[Line]

    def of(self, kind: str) -> list[Line]:
        return [line for line in self.lines if line["kind"] == kind]


class Asked(msgspec.Struct, frozen=True):
    """A request as its caller knows it."""

    seed: int
    lag: int
    kind: str
    tokens: int
    spans: list[tuple[int, int, int, int]]


class Committed:
    """When which version was committed, by the registry's events."""

    def __init__(self, events: Iterable[Line], records: Iterable[VersionRecord]) -> None:
        commits = sorted((float(e["t"]), int(e["version"])) for e in events if e["kind"] == "version_committed")
        self._times, self._versions = [t for t, _ in commits], [v for _, v in commits]
        self.all = set(self._versions)
        self._tree = VersionTree(records)

    def at(self, t: float) -> int:
        """The newest one then."""
        place = bisect_right(self._times, t)
        return self._versions[place - 1] if place else 0

    def distance(self, version: int, committed: int) -> int:
        """How far apart they are; negative: it is newer than what was committed."""
        return -1 if version > committed else self._tree.distance(version, committed)


def versions(engines: Sequence[Incarnation], asked: Sequence[Asked], committed: Committed) -> tuple[int, list[str]]:
    """No token of a version that was not whole on its engine at the time, and none of an unknown one."""
    wrong = [f"{i.slot}#{i.epoch}: {line}" for i in engines for line in i.of("wrong_version")]
    looked = sum(len(i.of("sampled")) for i in engines)
    for one in asked:
        at = 0
        for start, end, version, _ in one.spans:
            if start != at or end <= start or version not in committed.all:
                wrong.append(f"request {one.seed}: versions {one.spans}")
                break
            at = end
        if at != one.tokens:
            wrong.append(f"request {one.seed}: versions of {at} of {one.tokens} tokens")
        looked += one.tokens
    return looked, wrong


def weights(engines: Sequence[Incarnation], records: Iterable[VersionRecord]) -> tuple[int, list[str]]:
    """What an engine computes with is, to the byte, what the registry committed under the version that it names."""
    digests = {record.version: record.digest for record in records}
    newest = max(digests, default=0)
    looked, wrong = 0, []
    for incarnation in engines:
        for line in incarnation.of("holds"):
            if line["version"] > newest:
                continue  # committed after the registry was asked
            looked += 1
            if digests.get(line["version"]) != line["digest"]:
                committed = digests.get(line["version"], "nothing")
                wrong.append(f"{incarnation.slot}#{incarnation.epoch}: committed is {committed}, here is {line}")
    return looked, wrong


def routed(engines: Sequence[Incarnation], asked: Sequence[Asked], committed: Committed) -> tuple[int, list[str]]:
    """No engine was sent a sequence at a version further behind than its caller allows."""
    lags = {one.seed: one.lag for one in asked}
    looked, wrong = 0, []
    for incarnation in engines:
        for line in incarnation.of("begun"):
            if line["seed"] not in lags:
                continue  # its caller was cut off by the end of the soak
            looked += 1
            then = committed.at(line["at"] - NEWS_S)
            behind = committed.distance(line["version"], then) if line["version"] else 10**9
            if behind > lags[line["seed"]]:
                wrong.append(f"{incarnation.slot}#{incarnation.epoch} at {line['version']}, committed {then}: {line}")
    return looked, wrong


def outcomes(asked: Sequence[Asked], submitted: int, tokens: int) -> tuple[int, list[str]]:
    """Each request has one outcome, which is that it was done."""
    seeds = [one.seed for one in asked]
    wrong = [f"request {one.seed}: {one.kind}" for one in asked if one.kind not in ("done", "cancelled")]
    if len(set(seeds)) != len(seeds) or len(seeds) != submitted:
        wrong.append(f"{submitted} requests, {len(seeds)} outcomes of {len(set(seeds))} requests")
    done = sum(one.tokens for one in asked)
    if tokens != done:
        wrong.append(f"{tokens} tokens were delivered, the outcomes have {done}")
    return len(asked), wrong


class Member(msgspec.Struct):
    """What an engine has of an unfinished member: tokens it began with, as the queue said, and as it recorded."""

    had: list[int]
    sampled: list[tuple[float, int]]


def lost(engines: Sequence[Incarnation], every: int) -> tuple[int, list[str], dict[str, float]]:
    """Who goes on with a member has all that the queue had acknowledged; and what is due is acknowledged in time."""
    kept: dict[tuple[int, int], list[int]] = {}
    asked: dict[tuple[int, int], list[int]] = {}
    ends = {(i.slot, i.epoch): i.lines[-1]["at"] for i in engines if i.lines}
    held: dict[tuple[int, int], tuple[tuple[str, int], Member]] = {}
    looked, dropped, owed, wrong, losses = 0, 0, 0, [], list[int]()
    lines = sorted(((line["at"], n, i, line) for i in engines for n, line in enumerate(i.lines)), key=lambda x: x[:2])
    requests: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
    for at, _, incarnation, line in lines:
        who = incarnation.slot, incarnation.epoch
        if line["kind"] == "taken":
            keys = [(line["group"], member) for member in line["members"]]
            requests[*who, line["request"]] = keys
            for key, had in zip(keys, line["had"], strict=True):
                before = held.get(key)
                if before is not None and before[0] != who and before[1].sampled:
                    looked += 1
                    marked = kept.get(key, [])
                    due = max((n for t, n in before[1].sampled if t < ends[before[0]] - MARK_S), default=0)
                    owed += due >= every
                    losses.append(max(n for _, n in before[1].sampled) - len(had))
                    # What the queue was asked to mark it may have, though nobody lived to hear its answer.
                    if had not in (marked[: len(had)], asked.get(key, [])[: len(had)]):
                        wrong.append(f"{key} goes on behind other tokens than were marked")
                    # None at all: the queue let go of what had become too old to be trained on.
                    dropped += bool(marked and not had)
                    if had and len(had) < len(marked):
                        wrong.append(f"{key} goes on behind {len(had)} of {len(marked)} marked tokens")
                    if (had or not marked) and due - len(had) >= every:
                        wrong.append(f"{key} lost {due - len(had)} tokens that were due, the mark is {every}")
                kept[key] = list(had)
                asked.pop(key, None)
                held[key] = who, Member(had, [])
        elif line["kind"] == "marking":
            key = line["group"], line["member"]
            if key not in held or held[key][0] != who:
                continue  # it is somebody else's by now: the queue must refuse it
            asked[key] = kept.get(key, [])[: line["start"]] + line["tokens"]
        elif line["kind"] == "marked":
            key = line["group"], line["member"]
            kept[key] = kept.get(key, [])[: line["start"]] + line["tokens"]
        elif line["kind"] == "sampled":
            keys = requests.get((*who, line["request"]), [])
            key = keys[line["place"]] if line["place"] < len(keys) else (-1, -1)
            if key in held and held[key][0] == who:
                held[key][1].sampled.append((at, line["upto"]))
    figures = {
        "handed_on": float(looked),
        "had_due": float(owed),
        "let_go": float(dropped),
        "tokens_lost_median": float(statistics.median(losses)) if losses else 0.0,
        "tokens_lost_max": float(max(losses, default=0)),
    }
    return looked, wrong, figures


def rising(rewards: Sequence[float]) -> tuple[int, list[str], list[str], list[float]]:
    """The mean reward rises from third to third, or is at its top: (steps, what is wrong, not shown, the thirds)."""
    n = len(rewards) // 3
    thirds = [statistics.fmean(rewards[k * n : (k + 1) * n]) for k in range(3)] if n else []
    if len(rewards) < ENOUGH_STEPS:
        return len(rewards), [], [f"whether the reward rises: {len(rewards)} steps, {ENOUGH_STEPS} are needed"], thirds
    wrong = [f"it fell from {a:.3f} to {b:.3f}" for a, b in itertools.pairwise(thirds) if b < a - FALLS]
    if thirds[2] < thirds[0] + RISES and thirds[2] < TOP:
        wrong.append(f"it did not rise: {thirds[0]:.3f} to {thirds[2]:.3f}")
    return len(rewards), wrong, [], thirds


def on_the_path(steps: Iterable[Line]) -> list[Line]:
    """Step records in the order of training, those that were done again only once."""
    path: dict[int, Line] = {}
    for record in steps:
        path[int(record["step"])] = record
    return [path[step] for step in sorted(path)]
