"""Starts that were decided on and that no executor knows of yet. Pure: no I/O, no clock, no tasks.

Between the decision and the order lies a wait (for epochs, for a gang's socket) in which the slot may be asked to stop,
its node may be lost, and the next start of the same slot may be decided on. What comes of a start concerns a slot only
while the slot's newest start is this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from relax_rt.supervision.diagnosis import Diagnosis


class Attempt:
    """One start: of a slot, or of a gang as a whole.

    Attributes:
        slots: what it is to start.
        broken: it was called off, or one of its slots was forgotten: no order may come of it.
    """

    def __init__(self, slots: Iterable[str]) -> None:
        self.slots = tuple(slots)
        self.broken = False
        self._off: dict[str, Diagnosis] = {}


class Starts:
    """The newest attempt of each slot, until it is answered for."""

    def __init__(self) -> None:
        self._newest: dict[str, Attempt] = {}

    def __contains__(self, slot: object) -> bool:
        """Whether a start of the slot is under way."""
        return slot in self._newest

    def begin(self, slots: Iterable[str]) -> Attempt:
        """A start of these slots; an earlier one has no say in them any more."""
        attempt = Attempt(slots)
        self.forget(attempt.slots)
        for slot in attempt.slots:
            self._newest[slot] = attempt
        return attempt

    def call_off(self, off: Diagnosis) -> Attempt | None:
        """End the start of a slot, and of its gang with it; the slot exits with this diagnosis once the attempt is
        settled. None when no start of it is under way: somebody else answers for the slot."""
        attempt = self._newest.get(off.slot)
        if attempt is not None:
            attempt.broken = True
            attempt._off[off.slot] = off
        return attempt

    def forget(self, slots: Iterable[str]) -> list[Attempt]:
        """Nothing more is to be said of these slots' starts; answers with the attempts that are broken by it."""
        attempts = {attempt: None for slot in slots if (attempt := self._newest.pop(slot, None)) is not None}
        for attempt in attempts:
            attempt.broken = True
        return list(attempts)

    def settle(self, attempt: Attempt) -> Iterator[tuple[str, Diagnosis | None]]:
        """The attempt is over: each slot that it still answers for, and what it was called off with, if it was.

        What the caller does with one slot may call off the next, or begin another start of it: the account is kept
        between any two of them.
        """
        for slot in attempt.slots:
            if self._newest.get(slot) is attempt:
                del self._newest[slot]
                yield slot, attempt._off.pop(slot, None)
