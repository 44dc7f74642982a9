"""Policy versions form a tree: a roll-back starts a branch. Distances are counted on it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from relax_rt.transport.rpc.errors import Refused

ROOT = 0
"""Version before any publication; parent of the first one."""


class VersionRecord(msgspec.Struct, frozen=True):
    """One policy version.

    Attributes:
        version: issued at stage, only grows, never reused.
        parent: the version whose weights these were made from.
        step: the optimizer step that made them (0: the initial weights).
        digest: xxh3-128 of the weights, hex; empty while the publication is pending.
        changed: False for a re-publication of the parent's weights (after a restart from a checkpoint).
    """

    version: int
    parent: int
    step: int
    digest: str = ""
    changed: bool = True


class VersionTree:
    """The versions of a run and the distances between them.

    `distance(a, b)` is the number of publications that changed the weights on the path from a to b through
    their nearest common ancestor. Subtracting version numbers is wrong after a roll-back.
    """

    def __init__(self, records: Iterable[VersionRecord] = ()) -> None:
        self._records: dict[int, VersionRecord] = {}
        self._depth: dict[int, int] = {ROOT: 0}
        for record in records:
            self.add(record)

    def add(self, record: VersionRecord) -> None:
        """Add a version, or complete a known one with its digest.

        Raises:
            Refused: the parent is unknown, or the number was used for another version.
        """
        known = self._records.get(record.version)
        if known is not None:
            if (known.parent, known.step, known.changed) != (record.parent, record.step, record.changed):
                raise Refused(f"policy version {record.version}", why=f"already used for {known}, not {record}")
            self._records[record.version] = record
            return
        if record.parent not in self._depth:
            raise Refused(f"policy version {record.version}", why=f"its parent {record.parent} is not known")
        if record.version <= max(self._depth):
            raise Refused(f"policy version {record.version}", why=f"versions only grow; newest is {max(self._depth)}")
        self._records[record.version] = record
        self._depth[record.version] = self._depth[record.parent] + 1

    def __contains__(self, version: int) -> bool:
        return version in self._depth

    def __getitem__(self, version: int) -> VersionRecord:
        return self._records[version]

    def records(self) -> list[VersionRecord]:
        """All versions, oldest first."""
        return [self._records[v] for v in sorted(self._records)]

    def distance(self, a: int, b: int) -> int:
        """Publications that changed the weights between versions a and b.

        Raises:
            Refused: one of the versions is not known.
        """
        for version in (a, b):
            if version not in self._depth:
                raise Refused(f"distance of versions {a} and {b}", why=f"version {version} is not known")
        steps = 0
        while a != b:
            # The deeper one climbs, so both meet at the nearest common ancestor.
            if self._depth[a] >= self._depth[b]:
                record = self._records[a]
                a = record.parent
            else:
                record = self._records[b]
                b = record.parent
            steps += record.changed
        return steps
