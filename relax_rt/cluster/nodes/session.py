"""A joined node's session with the head: its lease, the orders it has received, the items it has to report.

Pure: no I/O, no clock. Used by the node's agent.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from relax_rt.cluster.nodes.api import MAX_ITEMS, Item, Order, Orders
from relax_rt.supervision.protocol import SlotEvent, SlotProgress

POLL_PART = 0.25
"""Fraction of the lease that a call for orders may wait at the head: the next call comes well before its end."""


class HeadSession:
    """What a joined node knows of its lease, orders and reports.

    The lease counts from when an answered call was *made*: the head received it no earlier.

    Args:
        lease_s: from the head.
        now: the time the node started. As in every method: seconds of a clock that runs on while the machine sleeps.
    """

    def __init__(self, lease_s: float, now: float) -> None:
        self.lease_s = lease_s
        self.since = 0
        """Number of the last order received."""
        self.addresses_version = 0
        self.addresses: dict[str, str] = {}
        self._renewed_at = now
        self._waiting: list[Item] = []
        self._progress: dict[str, int] = {}
        """Index in `_waiting` of a slot's last event, if that is a SlotProgress."""
        self._sent: list[Item] = []
        self._reported = 0

    @property
    def poll_s(self) -> float:
        """How long a call for orders may wait at the head."""
        return self.lease_s * POLL_PART

    def renew(self, made_at: float) -> None:
        """Renew the lease: the head has answered a call made at that time."""
        self._renewed_at = max(self._renewed_at, made_at)

    def left_s(self, now: float) -> float:
        """Time left of the lease; from 0 on every role here must be dead within JoinReply.stop_s."""
        return self._renewed_at + self.lease_s - now

    def take(self, answer: Orders) -> list[Order]:
        """The new orders of an answer, in order; each is returned once, however often it is sent."""
        if answer.addresses is not None:
            self.addresses, self.addresses_version = answer.addresses, answer.addresses_version
        known = max(0, self.since - (answer.first - 1))
        fresh = answer.items[known:]
        self.since += len(fresh)
        return fresh

    def add(self, item: Item) -> None:
        """Queue an item for the next report. Progress replaces the slot's last event if that is unsent progress."""
        if isinstance(item, SlotProgress):
            if (index := self._progress.get(item.slot)) is not None:
                before = self._waiting[index]
                assert isinstance(before, SlotProgress)
                # An announced extension of the deadline must not be lost.
                self._waiting[index] = msgspec.structs.replace(item, extend_s=before.extend_s + item.extend_s)
                return
            self._progress[item.slot] = len(self._waiting)
        elif isinstance(item, SlotEvent):
            self._progress.pop(item.slot, None)
        self._waiting.append(item)

    def report(self) -> tuple[int, Sequence[Item]]:
        """The number of the first item to send and the items: the same ones until `reported` confirms them."""
        if not self._sent:
            self._sent, self._waiting = self._waiting[:MAX_ITEMS], self._waiting[MAX_ITEMS:]
            self._progress.clear()
        return self._reported + 1, self._sent

    def reported(self, last: int) -> None:
        """The head has received every item up to this number."""
        done = max(0, last - self._reported)
        self._sent = self._sent[done:]
        self._reported += done

    @property
    def nothing_to_report(self) -> bool:
        """Nothing is queued and nothing is unconfirmed."""
        return not self._sent and not self._waiting
