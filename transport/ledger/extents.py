"""Which extents of shared memory are live, and which their owners may use again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from relax_rt.transport.errors import Refused
from relax_rt.transport.identity import Incarnation
from relax_rt.transport.queue.api import Column, Freed

AliveTest = Callable[[str], bool]
"""Whether the owner with this key can still be told."""


def owner_of(slab: str) -> str:
    """The owner's key in a slab's name ``<slot>-<epoch>-<n>.slab``."""
    return slab.rpartition("-")[0]


def owner_key(who: Incarnation) -> str:
    """How an incarnation is named in slab names."""
    return f"{who.slot.replace('/', '-')}-{who.epoch}"


def extents_of(columns: Iterable[Column]) -> list[Freed]:
    """The extents that the columns of one put span: one for each slab (a put is one extent in one slab)."""
    spans: dict[str, tuple[int, int]] = {}
    for column in columns:
        if column.slab:
            first, end = spans.get(column.slab, (column.offset, 0))
            spans[column.slab] = (min(first, column.offset), max(end, column.offset + column.nbytes))
    return [Freed(slab, first, end - first) for slab, (first, end) in spans.items()]


class Live(msgspec.Struct, array_like=True):
    """A live extent: its sample holds one reference, and every lease that can see it one more (a pin)."""

    nbytes: int
    references: int = 1


class ExtentTable(msgspec.Struct):
    """Live extents by slab and offset, and freed ones by owner until the owner is told."""

    live: dict[str, dict[int, Live]] = {}
    freed: dict[str, list[Freed]] = {}
    payload_bytes: int = 0

    def check(self, extents: Sequence[Freed], who: Incarnation) -> None:
        """Raises:
        Refused: an extent is not in the caller's own slab, is in use, or comes twice.
        """
        if len({(extent.slab, extent.offset) for extent in extents}) != len(extents):
            raise Refused(f"put by {who}", why="an extent is twice in the same call")
        for extent in extents:
            if owner_of(extent.slab) != owner_key(who):
                raise Refused(f"put by {who}", why=f"slab {extent.slab} is not its own")
            if extent.offset in self.live.get(extent.slab, {}):
                raise Refused(f"put by {who}", why=f"extent {extent.slab}+{extent.offset} is in use")

    def add(self, extents: Iterable[Freed]) -> None:
        """The extents hold a sample's columns from now on."""
        for extent in extents:
            self.live.setdefault(extent.slab, {})[extent.offset] = Live(extent.nbytes)
            self.payload_bytes += extent.nbytes

    def pin(self, extents: Iterable[Freed]) -> None:
        """One more reference to each."""
        for extent in extents:
            self.live[extent.slab][extent.offset].references += 1

    def release(self, extents: Iterable[Freed], callers_alive: AliveTest) -> None:
        """One reference less; the last one frees the extent."""
        for extent in extents:
            slab = self.live[extent.slab]
            slab[extent.offset].references -= 1
            if slab[extent.offset].references == 0:
                del slab[extent.offset]
                if not slab:
                    del self.live[extent.slab]
                self.payload_bytes -= extent.nbytes
                self.return_to_owner(extent, callers_alive)

    def return_to_owner(self, extent: Freed, callers_alive: AliveTest) -> None:
        """Its owner may use it again, and is told with its next answer; a dead owner's is forgotten."""
        owner = owner_of(extent.slab)
        if callers_alive(owner):
            self.freed.setdefault(owner, []).append(extent)

    def collect(self, who: Incarnation) -> list[Freed]:
        """What the caller may use again since it last asked."""
        return self.freed.pop(owner_key(who), [])

    def forget_owner(self, who: Incarnation) -> None:
        """The owner is dead: nobody waits for its freed extents."""
        self.freed.pop(owner_key(who), None)

    def clear(self) -> None:
        """Shared memory is gone."""
        self.live, self.freed, self.payload_bytes = {}, {}, 0
