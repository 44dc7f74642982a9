"""A pure state machine beside the trainer: which engine is whole at which version, which is late or lost.

The registry holds the committed version, and the version that each incarnation says it is whole at. The publisher
passes both on. Times are monotonic seconds of the caller's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from relax_rt.interfaces.registry import Member
from relax_rt.transport.base.versions import ROOT
from relax_rt.transport.rpc.identity import Incarnation

REMEMBERED_COMMITS = 256


class EngineLate(msgspec.Struct, frozen=True):
    """An engine has not reached the committed version in time. It ends by itself if it can, else its supervisor does
    it."""

    who: Incarnation
    version: int
    has: int
    after_s: float


class EngineLost(msgspec.Struct, frozen=True):
    """An engine ended, or cannot be heard, before it had the committed version."""

    who: Incarnation
    version: int
    has: int
    why: str


class VersionSettled(msgspec.Struct, frozen=True):
    """Every engine has the version or is out of it.

    Attributes:
        whole: engines that have it. late: that may still get it. starting: that have had no version yet.
    """

    version: int
    whole: int
    late: int
    starting: int
    after_s: float


TrackerReport: TypeAlias = EngineLate | EngineLost | VersionSettled


@dataclass(slots=True)
class _TrackedEngine:
    who: Incarnation
    version: int
    behind_since: float | None = None
    late: bool = False


class EngineTracker:
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
        self._engines: dict[str, _TrackedEngine] = {}
        self._commits: deque[tuple[int, float]] = deque(maxlen=REMEMBERED_COMMITS)
        self._settled = True

    def committed(self, version: int, now: float) -> list[TrackerReport]:
        """A version was committed."""
        if version <= self.version:
            return []
        self.version, self._settled = version, False
        self._commits.append((version, now))
        for engine in self._engines.values():
            self._place(engine)
        return self._judge(now)

    def members(self, members: Iterable[Member], now: float) -> list[TrackerReport]:
        """What the registry says of its members: all of them or those that changed."""
        reports: list[TrackerReport] = []
        for member in members:
            if member.who.role in self._kinds:
                reports += self._member(member)
        return reports + self._judge(now)

    def tick(self, now: float) -> list[TrackerReport]:
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

    def _member(self, member: Member) -> list[TrackerReport]:
        slot, known = member.who.slot, self._engines.get(member.who.slot)
        if known is not None and member.who.epoch < known.who.epoch:
            return []
        ended = member.state in ("gone", "lapsed")
        reports: list[TrackerReport] = []
        if known is not None and (ended or member.who != known.who):
            del self._engines[slot]
            if known.behind_since is not None:
                why = member.detail if member.who == known.who else f"{member.who} has its slot"
                reports.append(
                    EngineLost(known.who, self.version, known.version, f"{member.state}: {why}" if ended else why)
                )
            known = None
        if ended:
            return reports
        if known is None:
            known = self._engines[slot] = _TrackedEngine(member.who, member.policy_version)
        known.version = max(known.version, member.policy_version)
        self._place(known)
        return reports

    def _place(self, engine: _TrackedEngine) -> None:
        """Since when it is behind: since the first commit that it has not."""
        engine.behind_since = next((at for version, at in self._commits if version > engine.version), None)
        if engine.behind_since is None:
            engine.late = False

    def _judge(self, now: float) -> list[TrackerReport]:
        reports: list[TrackerReport] = []
        for engine in self._engines.values():
            # One that has had no version yet is still starting: the supervisor has a deadline for that.
            if engine.version == ROOT or engine.behind_since is None or engine.late:
                continue
            if (after := now - engine.behind_since) > self.timeout_s:
                engine.late = True
                reports.append(EngineLate(engine.who, self.version, engine.version, after))
        if self._settled or any(
            e.version and e.behind_since is not None and not e.late for e in self._engines.values()
        ):
            return reports
        starting = sum(e.version == ROOT for e in self._engines.values())
        if starting and now <= self._commits[-1][1] + self.timeout_s:
            return reports
        self._settled = True
        late, whole = sum(e.late for e in self._engines.values()), len(self.whole(self.version))
        return [*reports, VersionSettled(self.version, whole, late, starting, now - self._commits[-1][1])]
