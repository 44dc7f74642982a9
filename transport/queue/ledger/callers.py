"""Fencing of old incarnations, where their nodes are, and the answers kept for repeated calls."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.memory.slab_names import is_spilled, owner_key
from relax_rt.transport.queue.api import Admission, Advice, Chosen, Marked, Offered
from relax_rt.transport.rpc.errors import Refused, StaleEpoch
from relax_rt.transport.rpc.identity import Incarnation

ANSWERS_KEPT = 128
"""Answers kept for each incarnation; a client has fewer changing calls under way (see QueueClient)."""


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """An answer given: tickets, the groups of an offer, the id of a lease (its batch is rebuilt), freed extents."""

    admission: Admission | None = None
    offered: Offered | None = None
    lease: int = 0
    freed: list[Extent] = []
    advice: Advice | None = None
    marked: Marked | None = None
    chosen: Chosen | None = None


class Home(msgspec.Struct, frozen=True, array_like=True):
    """Where an incarnation lives.

    Attributes:
        who: the incarnation.
        node: its node; payloads: address of its payload server, empty if the node's own serves its slabs.
        pid, started: its process on the broker's node, 0 when it is not to be watched.
    """

    who: Incarnation
    node: str = ""
    payloads: str = ""
    pid: int = 0
    started: int = 0


class Callers(msgspec.Struct):
    """The lowest epoch of each slot that is still heard, and the newest answers of each incarnation (by owner key).

    Attributes:
        homes: of those who joined of their own accord, by owner key; kept while slabs of theirs may be read.
        node, payloads: the broker's own.
    """

    lowest: dict[str, int] = {}
    answers: dict[str, dict[int, Kept]] = {}
    homes: dict[str, Home] = {}
    node: str = ""
    payloads: str = ""

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

    def forget_homes(self, live: Iterable[str]) -> None:
        """Drop the homes of incarnations that are neither heard nor own one of the `live` slab owners."""
        keep = {*live, *self.answers}
        self.homes = {owner: home for owner, home in self.homes.items() if owner in keep}

    def remote(self, who: Incarnation, owners: Iterable[str]) -> dict[str, str]:
        """Payload servers of those owners whose slabs are not where the caller's are."""
        here = self._memory_of(owner_key(who))
        places = {owner: self._memory_of(owner) for owner in owners}
        return {owner: place[1] for owner, place in places.items() if place != here}

    def _memory_of(self, owner: str) -> tuple[str, str]:
        """Node and payload server of an owner's slabs. Processes that serve their own do not share memory."""
        home = self.homes.get(owner)
        if home is None or not home.payloads or is_spilled(owner + "-"):
            return self.node_of(owner), self.payloads
        return home.node, home.payloads

    def node_of(self, owner: str) -> str:
        """The node of a slab's owner; one that did not say, and spilled blocks, are on the broker's."""
        home = self.homes.get(owner)
        return home.node if home is not None and not is_spilled(owner + "-") else self.node

    def alive(self, owner: str) -> bool:
        """Whether the incarnation with this key (see slab_names.owner_key) is one that is heard."""
        return owner in self.answers

    def ended(self, owner: str) -> bool:
        """Whether the incarnation with this key is fenced."""
        slot, _, epoch = owner.rpartition("-")
        lowest = self.lowest.get("/".join(slot.rsplit("-", 1)))
        return lowest is not None and epoch.isdigit() and int(epoch) < lowest

    def answer(self, who: Incarnation, seq: int) -> Kept | None:
        """The answer given to this call before, if it was.

        Raises:
            Refused: the call is so old that its answer is no longer kept.
        """
        kept = self.answers[owner_key(who)]
        if seq in kept:
            return kept[seq]
        if len(kept) >= ANSWERS_KEPT and seq < min(kept):
            raise Refused(f"call {seq} of {who}", why=f"answers are kept for the last {ANSWERS_KEPT} calls only")
        return None

    def keep(self, who: Incarnation, seq: int, answer: Kept) -> None:
        """Keep the answer of a call that changed the ledger.

        Those with the highest numbers are kept: a call with a lower one that is not among them was answered long ago.
        """
        kept = self.answers.get(owner_key(who))
        if kept is None:
            # The call was the caller's own end.
            return
        kept[seq] = answer
        if len(kept) > ANSWERS_KEPT:
            del kept[min(kept)]
