"""When which slot is harmed and how: drawn from a seed alone, so that the same seed gives the same harm; no I/O."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from relax_rt.chaos.faults import Fault, Once
from relax_rt.config.problems import BadInput

MAX_STRIKES = 100_000
AT_LEAST = 2
"""Strikes for each kind of role, in a schedule that is long enough."""


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of a schedule.

    Attributes:
        number: from 1; with the seed it names the strike.
        at_s: time since the schedule began, for schedules by time.
        at_step: it falls when this training step is the newest, for schedules by step; 0: by time.
        slot: empty for a fault of the whole run (disk).
        seconds: how long it lasts. amount: how much, in the fault's unit.
    """

    number: int
    fault: str
    slot: str
    at_s: float = 0.0
    at_step: int = 0
    seconds: float = 0.0
    amount: float = 0.0


def poisson(
    seed: int, mean_s: float, for_s: float, faults: Sequence[Fault], slots: Mapping[str, Sequence[str]]
) -> list[Strike]:
    """Faults with exponentially distributed pauses: a role is drawn uniformly, then one of its slots, then a fault.

    Args:
        mean_s: mean time between two faults. for_s: length of the schedule.
        slots: the slots of each role.

    Raises:
        BadInput: a time that is not positive, or more faults than anybody could want.
    """
    if mean_s <= 0 or for_s <= 0:
        raise BadInput(f"faults every {mean_s:g} s for {for_s:g} s", why="both must be longer than nothing")
    if for_s / mean_s > MAX_STRIKES:
        raise BadInput(f"{for_s / mean_s:.0f} faults", why=f"a schedule has at most {MAX_STRIKES}")
    times, draw = random.Random(f"times {seed}"), _Draw(seed, faults, slots)
    strikes: list[Strike] = []
    at_s = times.expovariate(1 / mean_s)
    while at_s < for_s and len(strikes) < MAX_STRIKES:
        strikes.append(draw.strike(len(strikes) + 1, at_s=round(at_s, 3)))
        at_s += times.expovariate(1 / mean_s)
    return _evened(seed, strikes, slots)


def by_steps(
    seed: int, share: float, first: int, last: int, faults: Sequence[Fault], slots: Mapping[str, Sequence[str]]
) -> list[Strike]:
    """Faults in a share of the training steps, the steps drawn without repetition.

    Args:
        share: of the steps from `first` to `last`, both included.

    Raises:
        BadInput: no share, or no steps.
    """
    if not 0 < share <= 1:
        raise BadInput(f"faults in {share:g} of the steps", why="a share lies above 0 and is at most 1")
    steps = range(first, last + 1)
    if not steps:
        raise BadInput(f"faults in steps {first} to {last}", why="there is no such step")
    count = max(1, round(share * len(steps)))
    chosen = sorted(random.Random(f"times {seed}").sample(steps, count))
    draw = _Draw(seed, faults, slots)
    return _evened(seed, [draw.strike(number, at_step=step) for number, step in enumerate(chosen, 1)], slots)


def at_once(seed: int, wanted: Sequence[Once]) -> list[Strike]:
    """The faults asked for by hand, all at the beginning."""
    signs = random.Random(f"amounts {seed}")
    return [
        Strike(number=n, fault=one.fault.name, slot=one.target, seconds=one.seconds, amount=_amount(one.fault, signs))
        for n, one in enumerate(wanted, 1)
    ]


def _evened(seed: int, strikes: list[Strike], slots: Mapping[str, Sequence[str]]) -> list[Strike]:
    """The same strikes, each kind of role with at least two of them if there are enough for that.

    What a kind lacks is taken from the one that is struck most, at random; times and faults stay as they were drawn.
    """
    roles = {role: list(found) for role, found in sorted(slots.items()) if found}
    counts = Counter(dict.fromkeys(roles, 0))
    counts.update(strike.slot.partition("/")[0] for strike in strikes if strike.slot)
    if counts.total() < AT_LEAST * len(roles):
        return strikes
    dice, evened = random.Random(f"evened {seed}"), list(strikes)
    for role, of_role in roles.items():
        while counts[role] < AT_LEAST:
            most = max(counts, key=lambda name: (counts[name], name))
            place = dice.choice([n for n, s in enumerate(evened) if s.slot.partition("/")[0] == most])
            evened[place] = replace(evened[place], slot=of_role[int(dice.random() * len(of_role))])
            counts[most] -= 1
            counts[role] += 1
    return evened


class _Draw:
    """Draws what and whom; each from a stream of its own, so that another list of faults leaves the targets alone."""

    def __init__(self, seed: int, faults: Sequence[Fault], slots: Mapping[str, Sequence[str]]) -> None:
        if not faults or not any(slots.values()):
            raise BadInput("a schedule without faults or without slots", hint="name at least one of each")
        self._faults = list(faults)
        self._slots = {role: list(found) for role, found in sorted(slots.items()) if found}
        self._whom, self._what = random.Random(f"targets {seed}"), random.Random(f"faults {seed}")
        self._amounts = random.Random(f"amounts {seed}")

    def strike(self, number: int, *, at_s: float = 0.0, at_step: int = 0) -> Strike:
        of_role = self._slots[self._whom.choice(list(self._slots))]
        slot = of_role[int(self._whom.random() * len(of_role))]
        fault = self._what.choice(self._faults)
        return Strike(
            number=number,
            fault=fault.name,
            slot="" if fault.means == "disk" else slot,
            at_s=at_s,
            at_step=at_step,
            seconds=fault.seconds,
            amount=_amount(fault, self._amounts),
        )


def _amount(fault: Fault, dice: random.Random) -> float:
    """Clocks jump either way."""
    back = dice.random() < 0.5
    return -fault.amount if fault.name == "clock_jump" and back else fault.amount
