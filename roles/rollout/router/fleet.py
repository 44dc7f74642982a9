"""Health and policy version of the engines, and which of them may get new work. Pure: time comes with each event.

An engine is

    healthy     at the committed version, without a suspicion
    stale       at other weights: it gets work only of callers that allow as much lag
    suspect     a call failed, or it generates no tokens although it has work: it is probed and gets no work
    dead        the registry says so, or it was suspect for too long
    restarting  a new incarnation that is not ready yet, or one that is stopping

Events about an incarnation that is not the newest of its slot change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from relax_rt.roles.rollout.router.interface import EngineReport
from relax_rt.transport.base.versions import ROOT, VersionRecord, VersionTree

EngineHealth = Literal["healthy", "suspect", "dead", "restarting", "stale"]

REMEMBERED = 64
"""Number of newest versions that `Fleet.allowed` considers."""
KNOWN = 8 * REMEMBERED
"""Number of newest versions whose distance is known for certain; up to twice as many are kept."""


class HealthLimits(msgspec.Struct, frozen=True):
    """Timeouts of an engine.

    Attributes:
        stuck_s: without a token although it has work.
        paused_s: the same while it reports a reason (weights are being swapped).
        dead_s: from suspect to dead.
        probe_every_s: between two probes.
    """

    stuck_s: float = 20.0
    paused_s: float = 60.0
    dead_s: float = 20.0
    probe_every_s: float = 1.0


class EngineEntry(msgspec.Struct, frozen=True):
    """The registry's entry of a slot: see registry.api.Member."""

    slot: str
    epoch: int
    state: str
    version: int = 0
    progress: int = 0


@dataclass(slots=True)
class EngineState:
    """What is known of the newest incarnation of a slot.

    Attributes:
        registered: state by the registry; "unlisted" once its list lacks the slot.
        assigned: this router's sequences that it has, or that are on their way to it. unacknowledged: those of them
            without an update yet, so that its report does not count them.
        failure: why the last call or probe failed. stall: why it counts as stuck.
        on_trial: it was stuck and is idle: it gets one sequence to show that it works again.
        report: its last one. revoked: sequences revoked since, which the report still counts.
    """

    slot: str
    epoch: int
    registered: str = "starting"
    version: int = 0
    generated: int = 0
    progress: int = 0
    progressed_at: float = 0.0
    probed_at: float = float("-inf")
    assigned: int = 0
    unacknowledged: int = 0
    failure: str = ""
    stall: str = ""
    suspect_since: float = 0.0
    declared_dead: bool = False
    on_trial: bool = False
    report: EngineReport | None = None
    revoked: int = 0
    full_until: float = float("-inf")

    @property
    def suspicion(self) -> str:
        """Why it is suspect."""
        return self.stall or self.failure or ("its lease lapsed" if self.registered == "lapsed" else "")

    @property
    def waiting_on(self) -> str:
        """Why it generates no tokens, as it reports."""
        return self.report.waiting_on if self.report is not None else ""


class Fleet:
    """The engines of a run.

    Args:
        frozen: their weights are no policy version and never change: every engine is at version 0.
    """

    def __init__(self, limits: HealthLimits | None = None, *, frozen: bool = False) -> None:
        self.limits, self.frozen = limits or HealthLimits(), frozen
        self.engines: dict[str, EngineState] = {}
        self.committed = VersionRecord(ROOT, ROOT, 0)
        self._records: dict[int, VersionRecord] = {}
        self._versions = VersionTree()
        self._forgotten = ROOT
        """The newest version that was dropped from `_records`."""

    # --- events

    def on_members(self, now: float, members: Iterable[EngineEntry]) -> None:
        """Apply the registry's whole list."""
        listed = {member.slot: member for member in members}
        for slot in [slot for slot in self.engines if slot not in listed]:
            if self.engines[slot].registered != "gone":
                self.engines[slot].registered = "unlisted"
        for member in listed.values():
            engine = self._incarnation(now, member.slot, member.epoch)
            if engine is None or engine.registered == "gone":
                continue
            if member.state != engine.registered and member.state == "lapsed":
                engine.suspect_since = now
            engine.registered = member.state
            engine.version = max(engine.version, member.version)
            if member.progress > engine.progress:
                engine.progress, engine.on_trial = member.progress, False
                self._progressed(now, engine)

    def on_committed(self, records: Sequence[VersionRecord]) -> None:
        """Add committed versions; known ones may be missing, and older unknown ones may follow later."""
        unknown = (r for r in records if r.version > self._forgotten and r.version not in self._records)
        new = sorted(unknown, key=lambda r: r.version)
        if not new:
            return
        rebuild = new[0].version < self.committed.version
        self._records.update((r.version, r) for r in new)
        if len(self._records) > 2 * KNOWN:
            rebuild = True
            for version in sorted(self._records)[:-KNOWN]:
                del self._records[version]
                self._forgotten = version
        if rebuild:
            self._versions, new = VersionTree(), [self._records[v] for v in sorted(self._records)]
        for record in new:
            if record.parent not in self._versions:
                # With the parent, the distance to earlier versions is unknown.
                self._versions = VersionTree()
                record = msgspec.structs.replace(record, parent=ROOT)
            self._versions.add(record)
        self.committed = self._records[max(self._records)]

    def on_report(self, now: float, slot: str, report: EngineReport) -> None:
        """Apply an engine's report, from a probe or an update."""
        engine = self._incarnation(now, slot, report.epoch)
        if engine is None or engine.registered == "gone":
            return
        if engine.registered == "starting":
            # It answers, so it has started: the registry's change is on its way.
            engine.registered = "ready"
        if report.stopping:
            engine.registered = "draining"
        engine.version = max(engine.version, report.version)
        moved, engine.generated = report.generated > engine.generated, max(engine.generated, report.generated)
        engine.report, engine.revoked = report, 0
        engine.failure, engine.declared_dead = "", engine.declared_dead and bool(engine.stall)
        if moved:
            engine.on_trial = False
            self._progressed(now, engine)
        elif not (report.outstanding_tokens or engine.assigned):
            engine.on_trial = engine.on_trial or bool(engine.stall)
            self._progressed(now, engine)

    def on_failure(self, now: float, slot: str, epoch: int, why: str) -> None:
        """Suspect an engine: a call of it failed, or a probe was not answered."""
        engine = self.engines.get(slot)
        if engine is not None and engine.epoch == epoch and engine.registered != "gone":
            if not engine.suspicion:
                engine.suspect_since = now
            engine.failure = why

    def back_off(self, now: float, slot: str, for_s: float) -> None:
        """Send nothing to an engine for a while: it rejected a request."""
        if slot in self.engines:
            self.engines[slot].full_until = now + for_s

    def assign(self, now: float, slot: str, epoch: int) -> None:
        """Count a sequence that is sent to an engine."""
        engine = self.engines.get(slot)
        if engine is not None and engine.epoch == epoch:
            if not engine.assigned:
                engine.progressed_at = now
            engine.assigned += 1
            engine.unacknowledged += 1

    def acknowledge(self, slot: str, epoch: int) -> None:
        """Note an engine's first update for a sequence: from now on its reports count it."""
        engine = self.engines.get(slot)
        if engine is not None and engine.epoch == epoch:
            engine.unacknowledged = max(0, engine.unacknowledged - 1)

    def unassign(self, slot: str, epoch: int, *, acknowledged: bool, ended: bool = False) -> None:
        """Uncount a sequence that is no longer at an engine.

        Args:
            acknowledged: the engine had sent an update for it.
            ended: it ended there, and the engine's last report includes that; else it was revoked.
        """
        engine = self.engines.get(slot)
        if engine is not None and engine.epoch == epoch:
            engine.assigned = max(0, engine.assigned - 1)
            engine.unacknowledged = max(0, engine.unacknowledged - (not acknowledged))
            engine.revoked += acknowledged and not ended

    def tick(self, now: float) -> None:
        """Suspect stuck engines; declare dead those that were suspect for too long."""
        for engine in self.engines.values():
            allowed_s = self.limits.paused_s if engine.waiting_on else self.limits.stuck_s
            idle_s = now - engine.progressed_at
            if engine.assigned and idle_s > allowed_s and not engine.stall:
                if not engine.suspicion:
                    engine.suspect_since = now
                reason = f", {engine.waiting_on}" if engine.waiting_on else ""
                engine.stall = f"no token in {idle_s:.0f} s though it has work{reason}"
            if engine.suspicion and now - engine.suspect_since > self.limits.dead_s:
                engine.declared_dead = True

    def take_due_probes(self, now: float) -> list[EngineState]:
        """Return the engines to probe now; they count as probed."""
        due = [
            engine
            for engine in self.engines.values()
            if engine.registered not in ("gone", "starting") and now - engine.probed_at >= self.limits.probe_every_s
        ]
        for engine in due:
            engine.probed_at = now
        return due

    # --- queries

    def health(self, slot: str) -> EngineHealth:
        """Return the health of a slot's newest incarnation."""
        engine = self.engines[slot]
        if engine.registered == "gone" or engine.declared_dead:
            return "dead"
        if engine.registered in ("starting", "draining", "unlisted"):
            return "restarting"
        if engine.suspicion:
            return "suspect"
        return "healthy" if self.lag(engine.version) == 0 else "stale"

    def lag(self, version: int) -> float:
        """Return the distance of a version from the committed one; infinite if unknown."""
        if self.frozen:
            return 0
        if version > self.committed.version > ROOT:
            return 0  # it knows of a commit that has not reached us yet
        if version == ROOT or version not in self._versions:
            return float("inf")
        return self._versions.distance(version, self.committed.version)

    def routable(self, slot: str, lag: int) -> bool:
        """Whether an engine may get new work that allows this lag."""
        health = self.health(slot)
        return health == "healthy" or (health == "stale" and self.lag(self.engines[slot].version) <= lag)

    def allowed(self, lag: int) -> tuple[int, ...]:
        """Return the versions within a lag, oldest first; the committed one is the last."""
        if self.frozen:
            return (ROOT,)
        return tuple(r.version for r in self._versions.records()[-REMEMBERED:] if self.lag(r.version) <= lag)

    def why_revoke(self, slot: str, epoch: int) -> str:
        """Return why the sequences of an incarnation must be revoked; empty: they must not."""
        engine = self.engines.get(slot)
        if engine is None or engine.epoch > epoch:
            return "a newer incarnation fills the slot"
        if engine.registered == "gone":
            return "its process has ended"
        return engine.stall or (engine.suspicion if engine.declared_dead else "")

    def room(self, now: float, slot: str, first_room: int) -> int:
        """Return how many further sequences an engine accepts; before its first report `first_room`.

        A report is older than what was assigned or revoked since, so these are added.
        """
        engine = self.engines[slot]
        if now < engine.full_until:
            return 0
        if engine.on_trial:
            return 1 - engine.assigned
        if engine.report is None:
            return first_room - engine.assigned
        return engine.report.room - engine.unacknowledged + engine.revoked

    def why_not(self, slot: str, lag: int) -> str:
        """Describe why an engine gets no new work."""
        engine, health = self.engines[slot], self.health(slot)
        if health == "stale":
            at = f"at version {engine.version}" if engine.version else "without weights yet"
            behind = self.lag(engine.version)
            return f"{slot} is {at}" + (f", {behind:g} behind" if 0 < behind < float("inf") else "")
        if health in ("suspect", "dead"):
            return f"{slot} is {health}: {engine.suspicion or 'its process has ended'}"
        return f"{slot} is {health}" if health == "restarting" else f"{slot} is full"

    def _incarnation(self, now: float, slot: str, epoch: int) -> EngineState | None:
        """Return the slot's state if this is its newest incarnation; a new one if it is newer than the known one."""
        engine = self.engines.get(slot)
        if engine is None or engine.epoch < epoch:
            engine = self.engines[slot] = EngineState(slot, epoch, progressed_at=now)
        return engine if engine.epoch == epoch else None

    def _progressed(self, now: float, engine: EngineState) -> None:
        engine.progressed_at = now
        engine.stall = ""
        engine.declared_dead = False
