"""Which engines there are, how they do, and which of them new work may go to. Pure: the time comes with each event.

An engine is

    healthy     at the committed version, and nothing speaks against it
    stale       well, but at other weights: work goes to it only if the caller allows as much lag
    suspect     a call was lost, or it makes no tokens though it has work: it is probed, and gets nothing
    dead        the registry says so, or it was suspect for too long
    restarting  a new incarnation that is not ready yet, or one that is stopping

Whatever is said of an incarnation that is not the newest one of its slot changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from relax_rt.transport.base.versions import ROOT, VersionRecord, VersionTree

State = Literal["healthy", "suspect", "dead", "restarting", "stale"]

REMEMBERED = 64
"""Versions, the newest, that are looked at when it is asked which ones are allowed."""
KNOWN = 8 * REMEMBERED
"""Versions, the newest, whose distances are known for certain; up to twice as many are kept."""


class Patience(msgspec.Struct, frozen=True):
    """How long an engine may do what.

    Attributes:
        stuck_s: have work and make no token.
        paused_s: the same while it says why (weights are being swapped).
        dead_s: stay suspect before it is given up.
        probe_every_s: how often it is asked how it does.
    """

    stuck_s: float = 20.0
    paused_s: float = 60.0
    dead_s: float = 20.0
    probe_every_s: float = 1.0


class EngineNews(msgspec.Struct, frozen=True):
    """What the registry says of a slot: see registry.api.Member."""

    slot: str
    epoch: int
    state: str
    version: int = 0
    progress: int = 0


class Sign(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's own word.

    Attributes:
        version: policy version that it samples from.
        generated: tokens it has made since it began.
        outstanding_tokens: tokens still to come, at most, for all its callers.
        room: further requests that it would take.
        kv_used: share of its cache in use.
        waiting_on: why it makes no tokens, if it does not.
        stopping: it takes nothing new and ends soon.
    """

    epoch: int
    version: int
    generated: int
    outstanding_tokens: int = 0
    room: int = 1
    kv_used: float = 0.0
    waiting_on: str = ""
    stopping: bool = False


@dataclass(slots=True)
class Engine:
    """What is known of the newest incarnation of a slot."""

    slot: str
    epoch: int
    told: str = "starting"
    version: int = 0
    generated: int = 0
    progress: int = 0
    progressed_at: float = 0.0
    probed_at: float = float("-inf")
    working: int = 0
    """Sequences of ours that it has, or that are on their way to it."""
    unheard: int = 0
    """Those of them of which it has said nothing yet: its sign does not count them."""
    lost_why: str = ""
    stuck_why: str = ""
    doubted_at: float = 0.0
    given_up: bool = False
    on_trial: bool = False
    """It was stuck, has nothing to do now, and gets one sequence to show that it works again."""
    sign: Sign | None = None
    taken_back: int = 0
    """Sequences taken away from it since the sign, which counts them still."""
    full_until: float = float("-inf")

    @property
    def doubt(self) -> str:
        """Why it is suspect."""
        return self.stuck_why or self.lost_why or ("its lease lapsed" if self.told == "lapsed" else "")

    @property
    def waiting_on(self) -> str:
        """Why it makes no tokens, by its own word."""
        return self.sign.waiting_on if self.sign is not None else ""


class Fleet:
    """The engines of a run; see the module.

    Args:
        frozen: their weights are no policy version and never change: every engine is at 0, which is the right one.
    """

    def __init__(self, patience: Patience | None = None, *, frozen: bool = False) -> None:
        self.patience, self.frozen = patience or Patience(), frozen
        self.engines: dict[str, Engine] = {}
        self.committed = VersionRecord(ROOT, ROOT, 0)
        self._records: dict[int, VersionRecord] = {}
        self._versions = VersionTree()
        self._forgotten = ROOT
        """The newest version that is known no more."""

    # --- events

    def news(self, now: float, members: Iterable[EngineNews]) -> None:
        """The whole list of the registry."""
        listed = {member.slot: member for member in members}
        for slot in [slot for slot in self.engines if slot not in listed]:
            if self.engines[slot].told != "gone":
                self.engines[slot].told = "unlisted"
        for member in listed.values():
            engine = self._incarnation(now, member.slot, member.epoch)
            if engine is None or engine.told == "gone":
                continue
            if member.state != engine.told and member.state == "lapsed":
                engine.doubted_at = now
            engine.told = member.state
            engine.version = max(engine.version, member.version)
            if member.progress > engine.progress:
                engine.progress, engine.on_trial = member.progress, False
                self._progressed(now, engine)

    def commit(self, records: Sequence[VersionRecord]) -> None:
        """Committed versions; those that are known may be left out, those that are not yet known may follow later."""
        news = (r for r in records if r.version > self._forgotten and r.version not in self._records)
        new = sorted(news, key=lambda r: r.version)
        if not new:
            return
        afresh = new[0].version < self.committed.version
        self._records.update((r.version, r) for r in new)
        if len(self._records) > 2 * KNOWN:
            afresh = True
            for version in sorted(self._records)[:-KNOWN]:
                del self._records[version]
                self._forgotten = version
        if afresh:
            self._versions, new = VersionTree(), [self._records[v] for v in sorted(self._records)]
        for record in new:
            if record.parent not in self._versions:
                # Its parent was not told: of what came before nothing is known to be near it.
                self._versions = VersionTree()
                record = msgspec.structs.replace(record, parent=ROOT)
            self._versions.add(record)
        self.committed = self._records[max(self._records)]

    def heard(self, now: float, slot: str, sign: Sign) -> None:
        """An engine said how it does: in answer to a probe, or along with tokens."""
        engine = self._incarnation(now, slot, sign.epoch)
        if engine is None or engine.told == "gone":
            return
        if engine.told == "starting":
            # It serves, so that it has started: the registry's news of it is on its way.
            engine.told = "ready"
        if sign.stopping:
            engine.told = "draining"
        engine.version = max(engine.version, sign.version)
        moved, engine.generated = sign.generated > engine.generated, max(engine.generated, sign.generated)
        engine.sign, engine.taken_back = sign, 0
        engine.lost_why, engine.given_up = "", engine.given_up and bool(engine.stuck_why)
        if moved:
            engine.on_trial = False
            self._progressed(now, engine)
        elif not (sign.outstanding_tokens or engine.working):
            engine.on_trial = engine.on_trial or bool(engine.stuck_why)
            self._progressed(now, engine)

    def lost(self, now: float, slot: str, epoch: int, why: str) -> None:
        """A call of it was lost, or a probe was not answered."""
        engine = self.engines.get(slot)
        if engine is not None and engine.epoch == epoch and engine.told != "gone":
            if not engine.doubt:
                engine.doubted_at = now
            engine.lost_why = why

    def full(self, now: float, slot: str, for_s: float) -> None:
        """It turned a request away because it has enough."""
        if slot in self.engines:
            self.engines[slot].full_until = now + for_s

    def took(self, now: float, slot: str, epoch: int) -> None:
        """A sequence was sent to it."""
        engine = self.engines.get(slot)
        if engine is not None and engine.epoch == epoch:
            if not engine.working:
                engine.progressed_at = now
            engine.working += 1
            engine.unheard += 1

    def met(self, slot: str, epoch: int) -> None:
        """It says its first word of a sequence that was sent to it: its signs count that from now on."""
        engine = self.engines.get(slot)
        if engine is not None and engine.epoch == epoch:
            engine.unheard = max(0, engine.unheard - 1)

    def left(self, slot: str, epoch: int, *, met: bool, ended: bool = False) -> None:
        """A sequence has ended there, as its last sign knows, or was taken away; `met`: it had said a word of it."""
        engine = self.engines.get(slot)
        if engine is not None and engine.epoch == epoch:
            engine.working = max(0, engine.working - 1)
            engine.unheard = max(0, engine.unheard - (not met))
            engine.taken_back += met and not ended

    def tick(self, now: float) -> None:
        """Doubt those that are stuck, give up those that were doubted for too long."""
        for engine in self.engines.values():
            allowed_s = self.patience.paused_s if engine.waiting_on else self.patience.stuck_s
            idle_s = now - engine.progressed_at
            if engine.working and idle_s > allowed_s and not engine.stuck_why:
                if not engine.doubt:
                    engine.doubted_at = now
                reason = f", {engine.waiting_on}" if engine.waiting_on else ""
                engine.stuck_why = f"no token in {idle_s:.0f} s though it has work{reason}"
            if engine.doubt and now - engine.doubted_at > self.patience.dead_s:
                engine.given_up = True

    def to_probe(self, now: float) -> list[Engine]:
        """Engines that are to be asked how they do, now; each is asked once in a while."""
        due = [
            engine
            for engine in self.engines.values()
            if engine.told not in ("gone", "starting") and now - engine.probed_at >= self.patience.probe_every_s
        ]
        for engine in due:
            engine.probed_at = now
        return due

    # --- what follows from them

    def state(self, slot: str) -> State:
        """How an engine does."""
        engine = self.engines[slot]
        if engine.told == "gone" or engine.given_up:
            return "dead"
        if engine.told in ("starting", "draining", "unlisted"):
            return "restarting"
        if engine.doubt:
            return "suspect"
        return "healthy" if self.lag(engine.version) == 0 else "stale"

    def lag(self, version: int) -> float:
        """Distance of a version from the committed one; infinite if it is not known."""
        if self.frozen:
            return 0
        if version > self.committed.version > ROOT:
            return 0  # it knows of a commit of which we have not heard yet
        if version == ROOT or version not in self._versions:
            return float("inf")
        return self._versions.distance(version, self.committed.version)

    def routable(self, slot: str, lag: int) -> bool:
        """Whether new work may go to an engine, if weights that lag so far behind are allowed."""
        state = self.state(slot)
        return state == "healthy" or (state == "stale" and self.lag(self.engines[slot].version) <= lag)

    def allowed(self, lag: int) -> tuple[int, ...]:
        """The versions within a lag, oldest first; the committed one is the last."""
        if self.frozen:
            return (ROOT,)
        near = [r.version for r in self._versions.records()[-REMEMBERED:] if self.lag(r.version) <= lag]
        return tuple(near)

    def stuck(self, slot: str, epoch: int) -> str:
        """Why sequences that an incarnation has are to be taken away from it; empty if they are not."""
        engine = self.engines.get(slot)
        if engine is None or engine.epoch > epoch:
            return "a newer incarnation fills the slot"
        if engine.told == "gone":
            return "its process has ended"
        return engine.stuck_why or (engine.doubt if engine.given_up else "")

    def room(self, now: float, slot: str, first_room: int) -> int:
        """Further sequences that an engine takes, as far as is known."""
        engine = self.engines[slot]
        if now < engine.full_until:
            return 0
        if engine.on_trial:
            return 1 - engine.working
        if engine.sign is None:
            return first_room - engine.working
        return engine.sign.room - engine.unheard + engine.taken_back

    def why_not(self, slot: str, lag: int) -> str:
        """Why no new work goes to an engine, in words."""
        engine, state = self.engines[slot], self.state(slot)
        if state == "stale":
            at = f"at version {engine.version}" if engine.version else "without weights yet"
            behind = self.lag(engine.version)
            return f"{slot} is {at}" + (f", {behind:g} behind" if 0 < behind < float("inf") else "")
        if state in ("suspect", "dead"):
            return f"{slot} is {state}: {engine.doubt or 'its process has ended'}"
        return f"{slot} is {state}" if state == "restarting" else f"{slot} is full"

    def _incarnation(self, now: float, slot: str, epoch: int) -> Engine | None:
        """The engine if this is its newest incarnation, made anew if it is newer than what was known."""
        engine = self.engines.get(slot)
        if engine is None or engine.epoch < epoch:
            engine = self.engines[slot] = Engine(slot, epoch, progressed_at=now)
        return engine if engine.epoch == epoch else None

    def _progressed(self, now: float, engine: Engine) -> None:
        engine.progressed_at = now
        engine.stuck_why = ""
        engine.given_up = False
