"""The pure state machine that brings an engine from one policy version to the next, each whole or not at all.

    fetching -> verified -> swapped -> acknowledged | removed(reason)

`weight_follower` drives it. An engine reports a version only after its own copy was verified and is what it samples
from; an engine that cannot get there ends, and its successor starts at the committed version. Its counterpart beside
the trainer is `training.publication.engine_tracker`; neither waits for the other, the registry stands between them.
Times are monotonic seconds of the caller's clock.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from relax_rt.transport.base.versions import ROOT, VersionRecord

RETRY_S = 0.2


FetchFailure = Literal["gone", "corrupt", "refused", "failed"]
"""gone: the version is not to be had (any more, or for now); corrupt: the bytes differ; refused: they do not fit this
engine, and never will; failed: anything else."""


class FetchVersion(msgspec.Struct, frozen=True):
    """Prepare this version in the background of generation. `full`: no delta, the last try went wrong."""

    record: VersionRecord
    full: bool


class SwapVersion(msgspec.Struct, frozen=True):
    """Have the engine sample from the prepared version, from the next token boundary on."""

    record: VersionRecord


class AcknowledgeVersion(msgspec.Struct, frozen=True):
    """The version is whole here: say so."""

    record: VersionRecord


class WaitForVersion(msgspec.Struct, frozen=True):
    """Look for a newer version, and tick again in a while."""

    seconds: float


class VersionOvertaken(msgspec.Struct, frozen=True):
    """The version cannot be had any more, and need not: a newer one is committed. The engine is what it was."""

    record: VersionRecord


class RemoveEngine(msgspec.Struct, frozen=True):
    """The engine must end: nothing may be routed to it, and its successor starts anew."""

    record: VersionRecord
    why: str


Action: TypeAlias = FetchVersion | SwapVersion | AcknowledgeVersion | WaitForVersion | VersionOvertaken | RemoveEngine


class VersionMachine:
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
        return SwapVersion(self._target)

    def failed(self, version: int, failure: FetchFailure, why: str, now: float) -> Action | None:
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
        return WaitForVersion(min(RETRY_S, self.timeout_s))

    def tick(self, now: float) -> Action | None:
        """Time has passed."""
        if self.state in ("idle", "out"):
            return None
        if self._too_late(now):
            return self._late()
        if self.state == "pausing" and self._committed > self._target.version:
            self.state = "idle"
            self._spent_s += now - self._began
            return VersionOvertaken(self._target)
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
        return AcknowledgeVersion(self._target)

    def _too_late(self, now: float) -> bool:
        return self._spent_s + now - self._began > self.timeout_s

    def _fetch(self) -> FetchVersion:
        self.state = "fetching"
        return FetchVersion(self._target, self._full)

    def _late(self) -> RemoveEngine:
        doing = {"fetching": "being fetched", "pausing": "tried again", "swapping": "being swapped in"}[self.state]
        last = f"; last: {self._why}" if self._why else ""
        return self._out(f"not whole after {self.timeout_s:g} s, it was still {doing}{last}")

    def _out(self, why: str) -> RemoveEngine:
        self.state = "out"
        return RemoveEngine(self._target, why)
