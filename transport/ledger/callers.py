"""Fencing of old incarnations, and the answers kept for repeated calls."""

from __future__ import annotations

import msgspec

from relax_rt.transport.errors import Refused, StaleEpoch
from relax_rt.transport.identity import Incarnation
from relax_rt.transport.ledger.extents import owner_key
from relax_rt.transport.queue.api import Admission, Freed

ANSWERS_KEPT = 128
"""Answers kept for each incarnation; a client has fewer changing calls under way (see QueueClient)."""


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """An answer given: tickets, the id of a lease (its batch is rebuilt), or freed extents."""

    admission: Admission | None = None
    lease: int = 0
    freed: list[Freed] = []


class Callers(msgspec.Struct):
    """The lowest epoch of each slot that is still heard, and the newest answers of each incarnation (by owner key)."""

    lowest: dict[str, int] = {}
    answers: dict[str, dict[int, Kept]] = {}

    def check(self, who: Incarnation) -> None:
        """Raises:
        StaleEpoch: a newer incarnation of the slot was seen, or this one was reported dead.
        """
        lowest = self.lowest.get(who.slot)
        if lowest is not None and who.epoch < lowest:
            raise StaleEpoch(
                f"call of {who}", why=f"the slot's epoch is {lowest} or higher", hint="a fenced process must exit"
            )

    def knows(self, who: Incarnation) -> bool:
        """Whether the incarnation is the slot's newest one and has joined."""
        return owner_key(who) in self.answers

    def join(self, who: Incarnation) -> None:
        """Hear this incarnation from now on and none before it."""
        self.fence(who.slot, who.epoch)
        self.answers.setdefault(owner_key(who), {})

    def fence(self, slot: str, lowest: int) -> None:
        """Incarnations of the slot with a lower epoch are not heard any more."""
        self.lowest[slot] = max(self.lowest.get(slot, lowest), lowest)
        prefix = slot.replace("/", "-")
        for owner in list(self.answers):
            name, _, epoch = owner.rpartition("-")
            if name == prefix and int(epoch) < lowest:
                del self.answers[owner]

    def alive(self, owner: str) -> bool:
        """Whether the incarnation with this key (see extents.owner_key) is one that is heard."""
        return owner in self.answers

    def answer(self, who: Incarnation, seq: int) -> Kept | None:
        """The answer given to this call before, if it was.

        Raises:
            Refused: the call is so old that its answer is no longer kept.
        """
        kept = self.answers[owner_key(who)]
        if seq in kept:
            return kept[seq]
        if kept and seq <= max(kept) - ANSWERS_KEPT:
            raise Refused(f"call {seq} of {who}", why=f"answers are kept for the last {ANSWERS_KEPT} calls only")
        return None

    def keep(self, who: Incarnation, seq: int, answer: Kept) -> None:
        """Keep the answer of a call that changed the ledger."""
        kept = self.answers[owner_key(who)]
        kept[seq] = answer
        while len(kept) > ANSWERS_KEPT:
            del kept[min(kept)]
