"""A joined node's side of its bond with the head: its lease, what it was ordered, what it has to report. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from relax_rt.cluster.nodes.api import MAX_ITEMS, Item, Order, Orders, SlotEvent, tell
from relax_rt.supervision.protocol import SlotProgress

POLL_PART = 0.25
"""Part of the lease that a call for orders may wait at the head: the next one is made long before the lease ends."""


class LimbCore:
    """What a node knows of its standing.

    The lease counts from when a call was *made* that was answered: the head heard of us no earlier.

    Args:
        lease_s: from the head.
        now: seconds of a clock that runs on while the machine sleeps, as with every call; the time at which
            the node began.
    """

    def __init__(self, lease_s: float, now: float) -> None:
        self.lease_s = lease_s
        self.since = 0
        """Number of the last order taken."""
        self.map_version = 0
        self.places: dict[str, str] = {}
        self._answered_from = now
        self._waiting: list[Item | SlotEvent] = []
        self._progress: dict[str, int] = {}
        """Where in `_waiting` the last word of a slot is, if it is one of progress."""
        self._sent: list[Item] = []
        self._reported = 0

    @property
    def poll_s(self) -> float:
        """How long a call for orders may wait at the head."""
        return self.lease_s * POLL_PART

    def answered(self, made_at: float) -> None:
        """The head has answered a call made then."""
        self._answered_from = max(self._answered_from, made_at)

    def left_s(self, now: float) -> float:
        """What is left of the lease; at 0 or below every role here must be dead within the time that the head gave."""
        return self._answered_from + self.lease_s - now

    def take(self, answer: Orders) -> list[Order]:
        """The orders of an answer that are new, in order; each is given out once."""
        if answer.places is not None:
            self.places, self.map_version = answer.places, answer.map_version
        known = max(0, self.since - (answer.first - 1))
        fresh = answer.items[known:]
        self.since += len(fresh)
        return fresh

    def happened(self, event: SlotEvent) -> None:
        """Report an event. A slot's progress takes the place of its last word, if that was one too and is not sent."""
        if not isinstance(event, SlotProgress):
            self._progress.pop(event.slot, None)
        elif (index := self._progress.get(event.slot)) is not None:
            before = self._waiting[index]
            assert isinstance(before, SlotProgress)
            # Slow work once announced must not be forgotten.
            self._waiting[index] = msgspec.structs.replace(event, extend_s=before.extend_s + event.extend_s)
            return
        else:
            self._progress[event.slot] = len(self._waiting)
        self._waiting.append(event)

    def say(self, item: Item) -> None:
        """Report something else."""
        self._waiting.append(item)

    def report(self) -> tuple[int, Sequence[Item]]:
        """What to send now: number of the first, and the items. The same again until `reported` has confirmed it."""
        if not self._sent:
            batch, self._waiting = self._waiting[:MAX_ITEMS], self._waiting[MAX_ITEMS:]
            self._progress.clear()
            self._sent = [tell(item) if isinstance(item, SlotEvent) else item for item in batch]
        return self._reported + 1, self._sent

    def reported(self, last: int) -> None:
        """The head has everything up to this number."""
        done = max(0, last - self._reported)
        self._sent = self._sent[done:]
        self._reported += done

    @property
    def silent(self) -> bool:
        """There is nothing to report."""
        return not self._sent and not self._waiting
