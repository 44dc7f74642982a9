"""Whose turn it is on a device that engines share with a trainer. Pure: the time comes with each event.

Engines have the device until the trainer wants it. Then each gives its memory back and says so; the trainer begins when
every engine has, or is dead, or is late and therefore out. When it is done, the engines take memory again.

Two rules keep both from having the device at once, whoever dies and whatever call is lost:

- An engine takes memory on the trainer's word, which counts as taken from when it is given; or when the registry shows
  that no trainer can be in its turn (`nobody_trains`).
- The trainer begins when all engines of a list that the registry gave after the trainer wanted the device, and that
  has the trainer's own address in it, have told *this* incarnation of the trainer that they hold nothing. Whoever
  enters the registry later sees the address, and asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from relax_rt.interfaces.registry import Member
from relax_rt.transport.rpc.errors import Refused

Word = Literal["have", "give"]
"""have: the engine may have memory of the device. give: it may not, and gives back what it has."""


class Report(msgspec.Struct, frozen=True):
    """What an engine says of itself with each call.

    Attributes:
        slot, epoch: who it is.
        call: number of the call, from 1. Of an earlier one than the last it acts on no answer.
        holds: it has memory of the device.
        trainer: epoch of the trainer whose word it had last; 0: of none.
    """

    slot: str
    epoch: int
    call: int
    holds: bool
    trainer: int


class Told(msgspec.Struct, frozen=True):
    """The word of a trainer, with its epoch."""

    trainer: int
    word: Word


class Out(msgspec.Struct, frozen=True):
    """An engine did not give way in time. It may hold memory until its process ends."""

    slot: str
    epoch: int
    why: str


class Train(msgspec.Struct, frozen=True):
    """The device is the trainer's; `without`: engines that are out, and may hold memory of it."""

    without: tuple[str, ...]


Action = Out | Train


@dataclass(slots=True)
class _Engine:
    """`holds` is None until it has said so to this trainer."""

    epoch: int
    call: int = 0
    holds: bool | None = None
    out: bool = False

    @property
    def in_the_way(self) -> bool:
        return self.holds is not False and not self.out


class Turns:
    """The trainer's account. Events are method calls; each that may have changed something gives actions.

    Args:
        trainer: epoch of this trainer.
        give_way_s: how long engines may take to give way.
    """

    def __init__(self, trainer: int, give_way_s: float) -> None:
        self.trainer, self.give_way_s = trainer, give_way_s
        self.turn: Literal["engines", "changing", "trainer"] = "engines"
        self.number = 0
        """Turns that the trainer has had."""
        self.deadline: float | None = None
        """When `late` is due; None: nobody is waited for."""
        self._engines: dict[str, _Engine] = {}
        self._listed = False

    @property
    def in_the_way(self) -> list[str]:
        """Engines that have not given way yet."""
        return sorted(slot for slot, engine in self._engines.items() if engine.in_the_way)

    def listed(self, members: Iterable[Member], now: float, *, whole: bool) -> list[Action]:
        """What the registry says of the engines' role.

        Args:
            whole: it is the whole list, asked for since the device was wanted.
        """
        seen: set[str] = set()
        for member in members:
            slot, epoch = member.who.slot, member.who.epoch
            seen.add(slot)
            known = self._engines.get(slot)
            if known is not None and known.epoch > epoch:
                continue
            if member.state == "gone":
                self._engines.pop(slot, None)
            elif known is None or known.epoch < epoch:
                # The one before has ended, or its slot would not have been given again.
                self._engines[slot] = _Engine(epoch)
        if whole:
            for slot in self._engines.keys() - seen:
                del self._engines[slot]
            if self.turn == "changing" and not self._listed:
                self._listed, self.deadline = True, now + self.give_way_s
        return self._settled()

    def heard(self, report: Report) -> list[Action]:
        """An engine has called."""
        engine = self._engines.get(report.slot)
        if engine is None or engine.epoch < report.epoch:
            engine = self._engines[report.slot] = _Engine(report.epoch)
        # Without this trainer's word it may yet go by the registry's: then it holds what it says it does not.
        if engine.epoch == report.epoch and report.call > engine.call and report.trainer == self.trainer:
            engine.call, engine.holds = report.call, report.holds
            engine.out = engine.out and report.holds
        return self._settled()

    def news_for(self, report: Report) -> bool:
        """Whether the answer to this call tells the engine anything but to stay as it is."""
        return report.trainer != self.trainer or self._word(report) != ("have" if report.holds else "give")

    def answer(self, report: Report) -> Told:
        """The answer to a call. What it allows counts as done."""
        word, engine = self._word(report), self._engines.get(report.slot)
        if word == "have" and engine is not None:
            engine.call, engine.holds = report.call, True
        return Told(self.trainer, word)

    def wanted(self) -> None:
        """The trainer wants the device. `listed` is to follow.

        Raises:
            Refused: it has it, or is about to get it.
        """
        if self.turn != "engines":
            raise Refused("the device for the trainer", why=f"a turn is under way ({self.turn})")
        self.turn, self._listed = "changing", False

    def done(self) -> None:
        """The trainer has given the device back, or wants it no more."""
        self.turn, self.deadline = "engines", None
        for engine in self._engines.values():
            engine.out = False

    def late(self, now: float) -> list[Action]:
        """Time has passed."""
        if self.turn != "changing" or self.deadline is None or now < self.deadline:
            return []
        actions: list[Action] = []
        for slot in self.in_the_way:
            engine = self._engines[slot]
            engine.out = True
            what = "was not heard of" if engine.holds is None else "did not give its memory back"
            actions.append(Out(slot, engine.epoch, f"it {what} within {self.give_way_s:g} s"))
        return [*actions, *self._settled()]

    def _word(self, report: Report) -> Word:
        engine = self._engines.get(report.slot)
        overtaken = engine is None or engine.epoch != report.epoch or engine.call > report.call
        return "give" if overtaken or self.turn != "engines" else "have"

    def _settled(self) -> list[Action]:
        if self.turn != "changing" or not self._listed or self.in_the_way:
            return []
        self.turn, self.deadline = "trainer", None
        self.number += 1
        return [Train(tuple(sorted(slot for slot, engine in self._engines.items() if engine.out)))]


def nobody_trains(member: Member | None, last: int) -> bool:
    """Whether an engine may have memory without a word: no trainer is in its turn, nor begins one before it has asked.

    Args:
        member: the trainer's entry, as the registry has it now, in which the engine itself is entered.
        last: epoch of the trainer whose word the engine had last; 0: of none.
    """
    if member is None or member.state == "gone":
        return True
    # It is being set up: it asks for a list of the engines when it has its address, before its first turn.
    return member.who.epoch > last and not member.address
