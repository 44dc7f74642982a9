"""The publication of a version as two pure machines: one in each engine's role, one beside the trainer.

    trainer:  staged -> committed -> settled
    engine:               `-> fetching -> verified -> swapped -> acknowledged | out(reason)

The registry stands between them: it holds the committed version, and what each incarnation says that it is whole at.
Neither machine waits for the other. An engine says nothing of a version before its own copy was verified and is what it
samples from; an engine that cannot get there ends, and its successor begins at the committed version or not at all.
Times are monotonic seconds of the caller's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from relax_rt.interfaces.registry import Member
from relax_rt.transport.base.versions import ROOT, VersionRecord
from relax_rt.transport.rpc.identity import Incarnation

RETRY_S = 0.2
REMEMBERED_COMMITS = 256

Failure = Literal["gone", "corrupt", "refused", "failed"]
"""gone: the version is not to be had (any more, or for now); corrupt: the bytes differ; refused: they do not fit this
engine, and never will; failed: anything else."""


class Fetch(msgspec.Struct, frozen=True):
    """Prepare this version in the background of generation. `full`: no delta, the last try went wrong."""

    record: VersionRecord
    full: bool


class Swap(msgspec.Struct, frozen=True):
    """Have the engine sample from the prepared version, from the next token boundary on."""

    record: VersionRecord


class Acknowledge(msgspec.Struct, frozen=True):
    """The version is whole here: say so."""

    record: VersionRecord


class Pause(msgspec.Struct, frozen=True):
    """Look for a newer version, and tick again in a while."""

    seconds: float


class Overtaken(msgspec.Struct, frozen=True):
    """The version cannot be had any more, and need not: a newer one is committed. The engine is what it was."""

    record: VersionRecord


class Out(msgspec.Struct, frozen=True):
    """The engine must end: nothing may be routed to it, and its successor starts anew."""

    record: VersionRecord
    why: str


Action: TypeAlias = Fetch | Swap | Acknowledge | Pause | Overtaken | Out


class Receiver:
    """An engine's side: brings it to one version after the other, each whole or not at all.

    Every event is answered by the one thing to do next. Answers to what is no longer in the air are ignored (None).

    Args:
        timeout_s: that it may work on getting from one version to the next it is whole at, those included that were
            overtaken on the way: newer versions give an engine that cannot take any no more time.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.state: Literal["idle", "fetching", "pausing", "swapping", "out"] = "idle"
        self.whole: VersionRecord | None = None
        self._target = VersionRecord(ROOT, ROOT, 0)
        self._committed = ROOT
        self._began = self._spent_s = 0.0
        self._full = False
        self._why = ""

    def left_s(self, now: float) -> float:
        """Time until the engine is out unless it gets there."""
        return max(0.0, self._began + self.timeout_s - self._spent_s - now)

    def follow(self, record: VersionRecord, now: float) -> Action | None:
        """A version is committed that this engine is to have."""
        if self.state != "idle":
            return None
        self._target, self._began, self._full, self._why = record, now, False, ""
        self._committed = max(self._committed, record.version)
        return self._fetch()

    def committed(self, version: int) -> None:
        """Heard of a newer committed version meanwhile."""
        self._committed = max(self._committed, version)

    def fetched(self, version: int, now: float) -> Action | None:
        """The engine's private copy is there and verified."""
        if self.state != "fetching" or version != self._target.version:
            return None
        if self._too_late(now):
            return self._late()
        self.state = "swapping"
        return Swap(self._target)

    def failed(self, version: int, failure: Failure, why: str, now: float) -> Action | None:
        """What was in the air failed."""
        if version != self._target.version or self.state not in ("fetching", "swapping"):
            return None
        if self.state == "swapping":
            # It may sample from anything now.
            return self._out(f"the swap failed: {why}")
        if failure in ("refused", "failed"):
            return self._out(why)
        self._why, self._full = why, True
        if self._too_late(now):
            return self._late()
        self.state = "pausing"
        return Pause(min(RETRY_S, self.timeout_s))

    def tick(self, now: float) -> Action | None:
        """Time has passed."""
        if self.state in ("idle", "out"):
            return None
        if self._too_late(now):
            return self._late()
        if self.state == "pausing" and self._committed > self._target.version:
            self.state = "idle"
            self._spent_s += now - self._began
            return Overtaken(self._target)
        return self._fetch() if self.state == "pausing" else None

    def swapped(self, version: int, loaded: int, now: float) -> Action | None:
        """The engine says it has swapped; `loaded` is the version that it samples from, by its own word."""
        if self.state != "swapping" or version != self._target.version:
            return None
        if loaded != version:
            return self._out(f"it answered that it swapped, and samples from version {loaded}")
        if self._too_late(now):
            return self._late()
        self.state, self.whole, self._spent_s = "idle", self._target, 0.0
        return Acknowledge(self._target)

    def _too_late(self, now: float) -> bool:
        return self._spent_s + now - self._began > self.timeout_s

    def _fetch(self) -> Fetch:
        self.state = "fetching"
        return Fetch(self._target, self._full)

    def _late(self) -> Out:
        doing = {"fetching": "being fetched", "pausing": "tried again", "swapping": "being swapped in"}[self.state]
        last = f"; last: {self._why}" if self._why else ""
        return self._out(f"not whole after {self.timeout_s:g} s, it was still {doing}{last}")

    def _out(self, why: str) -> Out:
        self.state = "out"
        return Out(self._target, why)


class Late(msgspec.Struct, frozen=True):
    """An engine has not reached the committed version in time. It ends by itself if it can, else its supervisor does
    it."""

    who: Incarnation
    version: int
    has: int
    after_s: float


class Lost(msgspec.Struct, frozen=True):
    """An engine ended, or cannot be heard, before it had the committed version."""

    who: Incarnation
    version: int
    has: int
    why: str


class Settled(msgspec.Struct, frozen=True):
    """Every engine has the version or is out of it.

    Attributes:
        whole: engines that have it. late: that may still get it. starting: that have had no version yet.
    """

    version: int
    whole: int
    late: int
    starting: int
    after_s: float


Report: TypeAlias = Late | Lost | Settled


@dataclass(slots=True)
class _Engine:
    who: Incarnation
    version: int
    behind_since: float | None = None
    late: bool = False


class Publication:
    """The trainer's side: who has acknowledged what. It never asks an engine to do anything and cannot be held up.

    An incarnation counts as whole at a version only by its own word for that version, as the registry has it; a
    successor in its slot begins at nothing.

    Args:
        kinds: roles whose engines follow every version.
        timeout_s: after which an engine that has not acknowledged is late.
    """

    def __init__(self, kinds: Collection[str], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.version = ROOT
        self._kinds = frozenset(kinds)
        self._engines: dict[str, _Engine] = {}
        self._commits: deque[tuple[int, float]] = deque(maxlen=REMEMBERED_COMMITS)
        self._settled = True

    def committed(self, version: int, now: float) -> list[Report]:
        """A version was committed."""
        if version <= self.version:
            return []
        self.version, self._settled = version, False
        self._commits.append((version, now))
        for engine in self._engines.values():
            self._place(engine)
        return self._judge(now)

    def members(self, members: Iterable[Member], now: float) -> list[Report]:
        """What the registry says of its members: all of them or those that changed."""
        reports: list[Report] = []
        for member in members:
            if member.who.role in self._kinds:
                reports += self._member(member)
        return reports + self._judge(now)

    def tick(self, now: float) -> list[Report]:
        """Time has passed."""
        return self._judge(now)

    def whole(self, version: int) -> list[Incarnation]:
        """The living engines that sample from this version."""
        return [e.who for e in self._engines.values() if e.version == version]

    def patience_s(self, now: float) -> float:
        """How long the trainer may be kept waiting by engines: never past the deadline of the newest version."""
        if not self._commits or all(e.late or e.behind_since is None for e in self._engines.values()):
            return 0.0
        return max(0.0, self._commits[-1][1] + self.timeout_s - now)

    def _member(self, member: Member) -> list[Report]:
        slot, known = member.who.slot, self._engines.get(member.who.slot)
        if known is not None and member.who.epoch < known.who.epoch:
            return []
        ended = member.state in ("gone", "lapsed")
        reports: list[Report] = []
        if known is not None and (ended or member.who != known.who):
            del self._engines[slot]
            if known.behind_since is not None:
                why = member.detail if member.who == known.who else f"{member.who} has its slot"
                reports.append(Lost(known.who, self.version, known.version, f"{member.state}: {why}" if ended else why))
            known = None
        if ended:
            return reports
        if known is None:
            known = self._engines[slot] = _Engine(member.who, member.policy_version)
        known.version = max(known.version, member.policy_version)
        self._place(known)
        return reports

    def _place(self, engine: _Engine) -> None:
        """Since when it is behind: since the first commit that it has not."""
        engine.behind_since = next((at for version, at in self._commits if version > engine.version), None)
        if engine.behind_since is None:
            engine.late = False

    def _judge(self, now: float) -> list[Report]:
        reports: list[Report] = []
        for engine in self._engines.values():
            # One that has had no version yet is still starting: the supervisor has a deadline for that.
            if engine.version == ROOT or engine.behind_since is None or engine.late:
                continue
            if (after := now - engine.behind_since) > self.timeout_s:
                engine.late = True
                reports.append(Late(engine.who, self.version, engine.version, after))
        if self._settled or any(
            e.version and e.behind_since is not None and not e.late for e in self._engines.values()
        ):
            return reports
        starting = sum(e.version == ROOT for e in self._engines.values())
        if starting and now <= self._commits[-1][1] + self.timeout_s:
            return reports
        self._settled = True
        late, whole = sum(e.late for e in self._engines.values()), len(self.whole(self.version))
        return [*reports, Settled(self.version, whole, late, starting, now - self._commits[-1][1])]
