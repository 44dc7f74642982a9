"""Which of the engines that may have a request gets it. Pure and deterministic: the same facts, the same choice.

Without a wish, where the fewest tokens are still to come. With an affinity (a session, a shared prefix) the engine that
rendezvous hashing names, so that its prefix cache serves, as long as it is not loaded beyond its share. What is
expected to become long goes where the fewest long ones are: a batch ends with its longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

LOAD_LIMIT = 1.25
"""An engine takes what its affinity names up to this multiple of the mean load."""
PREFIX_TOKENS = 64
"""Prompts that have these first tokens in common want the same engine, if affinity by prefix is asked for."""
LONG_FACTOR = 2.0
"""Long is what is expected to have so many times the mean of the recent ones."""
MEMORY = 0.05
"""Weight of the newest request in that mean."""


class Candidate(msgspec.Struct, frozen=True):
    """An engine that has room.

    Attributes:
        outstanding: tokens that it has still to make, at most.
        longs: long sequences among them, as far as we sent them.
    """

    slot: str
    outstanding: int
    longs: int = 0


class Need(msgspec.Struct, frozen=True):
    """A request, as far as the choice looks at it.

    Attributes:
        name: of the request; breaks ties.
        expected: tokens it will make.
        affinity: what it wants to be near to; empty: nothing.
        long: it is expected to outlast the others.
    """

    name: str
    expected: int
    affinity: str = ""
    long: bool = False


def choose(need: Need, candidates: Sequence[Candidate]) -> str:
    """The slot of the engine that gets the request; empty without candidates."""
    if not candidates:
        return ""
    if need.long:
        return min(candidates, key=lambda c: (c.longs, c.outstanding, -weight(need.name, c.slot), c.slot)).slot
    if need.affinity:
        share = LOAD_LIMIT * (sum(c.outstanding for c in candidates) + need.expected) / len(candidates)
        # One that is empty always takes it: a share may be less than one request.
        bound = max(share, need.expected)
        # Not all can be above: the emptiest has at most the mean.
        fit = [c for c in candidates if c.outstanding + need.expected <= bound]
        if fit:
            return max(fit, key=lambda c: (weight(need.affinity, c.slot), c.slot)).slot
    return min(candidates, key=lambda c: (c.outstanding, -weight(need.name, c.slot), c.slot)).slot


def weight(key: str, slot: str) -> int:
    """Rendezvous hashing: a key belongs to the slot with the greatest weight, so that a slot that comes or goes moves
    only what is its own."""
    return int.from_bytes(blake2b(f"{key}\0{slot}".encode(), digest_size=8).digest(), "big")


def prefix_key(prompt: Sequence[int]) -> str:
    """Names the beginning of a prompt."""
    return "prefix " + ",".join(map(str, prompt[:PREFIX_TOKENS]))


class Lengths:
    """The mean length that requests are expected to have, the newer ones weighing more."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._seen = 0

    def long(self, expected: int) -> bool:
        """Whether a request is long among its like; counts it."""
        long = self._seen > 0 and expected >= LONG_FACTOR * self._mean
        self._seen += 1
        self._mean += max(MEMORY, 1 / self._seen) * (expected - self._mean)
        return long
