"""Judges a run of the whole control plane by what happened, not by what its parts think of it."""

from __future__ import annotations

from sim_checker import Checker

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.identity import Incarnation

HEARD = "a fenced incarnation was heard"
EPOCHS = "a number was issued twice"
TWO = "two incarnations of a slot live at once"
VERSIONS = "policy versions went back"
FOREIGN_WEIGHTS = "an engine took weights that were not committed"
LAPSED = "a lease ran out although its holder was well"
MIXED = "ranks of different gangs met"
UNANSWERED = "a death was neither answered by a restart nor escalated"
OVERDUE = "a slot stayed in a state beyond its deadline"
UNESCALATED = "restarts without end"
ENDED = "the run ended although it need not have"
LEFT = "something lives after the end"
LOST_NODE = "a node was taken for lost although it was well"
GROWN = "a record of the past grows without bound"


class PlaneChecker(Checker):
    """Adds to the data plane's checks those of incarnations, versions and lives."""

    def __init__(self, max_staleness: float) -> None:
        super().__init__(max_staleness)
        self.newest: dict[tuple[str, str], int] = {}
        self.epoch = 0
        self.numbers: set[int] = set()
        self.committed: dict[int, VersionRecord] = {}
        self.on_engine: dict[Incarnation, int] = {}
        self._reported: dict[Incarnation, int] = {}
        self.effects = 0

    def issued(self, slot: str, epoch: int) -> None:
        """The registry issued an epoch: from here on it hears no earlier one of the slot."""
        if epoch <= self.epoch:
            self.found(EPOCHS, f"epoch {epoch} for {slot} after {self.epoch}")
        self.epoch = max(self.epoch, epoch)
        self.newest["registry", slot] = epoch

    def issued_version(self, who: Incarnation, version: int) -> None:
        self.effect("registry", who)
        if version in self.numbers:
            self.found(EPOCHS, f"version {version} was issued twice")
        self.numbers.add(version)

    def effect(self, where: str, who: Incarnation, detail: str = "") -> None:
        """A resource took a write. From here on it may take none of an earlier incarnation."""
        self.effects += 1
        newest = self.newest.get((where, who.slot), 0)
        if who.epoch < newest:
            self.found(HEARD, f"{who} by the {where}, after epoch {newest}{detail}")
        else:
            self.newest[where, who.slot] = who.epoch

    def reported(self, who: Incarnation, version: int) -> None:
        """What the registry now says of an engine."""
        if version < self._reported.get(who, 0):
            self.found(VERSIONS, f"the registry says {version} of {who}, and said {self._reported[who]}")
        self._reported[who] = version

    def committed_version(self, who: Incarnation, record: VersionRecord) -> None:
        newest = max(self.committed, default=0)
        if record.version <= newest:
            self.found(VERSIONS, f"{who} committed {record.version} after {newest}")
        if record.parent and record.parent not in self.committed and record.parent not in self.parents:
            self.found(VERSIONS, f"the parent of {record} is not known")
        if self.newest.get(("registry", who.slot), 0) > who.epoch:
            self.found(VERSIONS, f"{who} committed {record.version}, and is fenced")
        self.committed[record.version] = record

    def took_weights(self, who: Incarnation, version: int, digest: str) -> None:
        record = self.committed.get(version)
        if record is None or record.digest != digest:
            self.found(FOREIGN_WEIGHTS, f"{who} took {digest!r} as version {version}, committed is {record}")
        if version < self.on_engine.get(who, 0):
            self.found(VERSIONS, f"{who} went from version {self.on_engine[who]} to {version}")
        self.on_engine[who] = version
