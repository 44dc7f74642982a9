"""Faults that can be injected, and schedules of them. Pure. Used by the injector, the checks and `relax-rt chaos`."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from relax_rt.config.problems import BadInput, did_you_mean

Means = Literal["signal", "inside", "disk", "epoch"]


class Fault(msgspec.Struct, frozen=True):
    """A kind of fault.

    Attributes:
        what: one line for people.
        means: signal, to the role's process group; inside, carried out by the role's own host; disk, on the run
            directory's file system; epoch, by issuing a newer epoch for the slot while its process is stopped.
        seconds: default duration; 0: instantaneous.
        longest_s: upper limit.
        amount, unit: its size, where it has one.
        order: its name in the message to the role, for means inside.
    """

    name: str
    what: str
    means: Means
    seconds: float = 0.0
    longest_s: float = 600.0
    amount: float = 0.0
    unit: str = ""
    order: str = ""


_ALL = (
    Fault("kill", "SIGKILL", "signal"),
    Fault("stop", "SIGSTOP for a while, then SIGCONT", "signal", seconds=3.0),
    Fault("overtake", "stopped while a newer epoch is issued for its slot, then continued", "epoch", seconds=1.0),
    Fault("hang_loop", "its event loop is blocked", "inside", seconds=3.0, order="hang_loop"),
    Fault("hold_gil", "native code holds its interpreter", "inside", seconds=3.0, order="hold_gil"),
    Fault(
        "memory",
        "it takes memory, beyond the role's memory_mib if it has one",
        "inside",
        5.0,
        amount=256.0,
        unit="MiB",
        order="eat_memory",
    ),
    Fault(
        "clock_jump",
        "time.time and time.time_ns of its Python code jump; no other clock does",
        "inside",
        5.0,
        amount=3600.0,
        unit="s",
        order="clock_jump",
    ),
    Fault("delay", "its messages are late", "inside", 5.0, amount=0.2, unit="s", order="delay"),
    Fault("partition", "its messages are lost", "inside", 3.0, order="partition"),
    Fault("disk", "the run directory's file system is full", "disk", seconds=3.0, longest_s=60.0),
)
FAULTS: dict[str, Fault] = {fault.name: fault for fault in _ALL}
ALIASES = {"eat_memory": "memory", "pause": "stop", "sigkill": "kill", "sigstop": "stop", "gil": "hold_gil"}

_TIME = re.compile(r"^(\d+(?:\.\d*)?|\.\d+)(ms|s|m|h)?$")
_UNIT_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


def seconds(text: str) -> float:
    """Parse a duration: ``500ms``, ``5s``, ``2.5m``, ``1h``, or seconds.

    Raises:
        BadInput: it is not a duration.
    """
    found = _TIME.match(text.strip())
    if found is None:
        raise BadInput(f"{text!r} is no duration", hint="as 500ms, 5s, 2m, 1h")
    return float(found[1]) * _UNIT_S[found[2]]


def fault_named(name: str) -> Fault:
    """The fault of a name.

    Raises:
        BadInput: there is none.
    """
    known = FAULTS.get(ALIASES.get(name, name))
    if known is None:
        hint = did_you_mean(name, [*FAULTS]) or f"faults: {', '.join(FAULTS)}"
        raise BadInput(f"there is no fault {name!r}", hint=hint)
    return known


def faults_named(text: str) -> list[Fault]:
    """Faults of a comma-separated list, in its order, each once.

    Raises:
        BadInput: one is unknown, or the list is empty.
    """
    names = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not names:
        raise BadInput("no fault is named", hint=f"faults: {', '.join(FAULTS)}")
    return list({fault.name: fault for fault in map(fault_named, names)}.values())


class Once(msgspec.Struct, frozen=True):
    """A fault given on the command line: ``stop:rollout/0:12s``."""

    fault: Fault
    target: str
    seconds: float


def once_named(text: str, slots: Sequence[str]) -> Once:
    """Parse ``fault:slot`` or ``fault:slot:duration``; a role's name means its first slot.

    Raises:
        BadInput: the fault or the slot is unknown, or the duration is too long.
    """
    name, _, rest = text.partition(":")
    target, _, lasts = rest.partition(":")
    fault = fault_named(name)
    if fault.means == "disk":
        target, lasts = "", rest or lasts
    else:
        target = _slot_named(target, slots)
    return Once(fault, target, lasting(fault, seconds(lasts) if lasts else fault.seconds))


def lasting(fault: Fault, wanted_s: float) -> float:
    """Check a fault's duration.

    Raises:
        BadInput: it is longer than the fault allows.
    """
    if wanted_s > fault.longest_s:
        raise BadInput(f"{fault.name} for {wanted_s:g} s", why=f"it lasts at most {fault.longest_s:g} s")
    return wanted_s


def _slot_named(target: str, slots: Sequence[str]) -> str:
    if target in slots:
        return target
    of_role = [slot for slot in slots if slot.partition("/")[0] == target]
    if of_role:
        return of_role[0]
    names = [*slots, *dict.fromkeys(slot.partition("/")[0] for slot in slots)]
    raise BadInput(f"there is no slot {target!r}", hint=did_you_mean(target, names) or f"slots: {', '.join(slots)}")


def roles_named(text: str, slots: Iterable[str]) -> dict[str, list[str]]:
    """The slots of each role in a comma-separated list of roles and slots; all roles if it is empty.

    Raises:
        BadInput: one is unknown.
    """
    known: dict[str, list[str]] = {}
    for slot in slots:
        known.setdefault(slot.partition("/")[0], []).append(slot)
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        return known
    chosen: dict[str, list[str]] = {}
    for word in words:
        role = word.partition("/")[0]
        found = [slot for slot in known.get(role, []) if word in (role, slot)]
        if not found:
            names = [*known, *(slot for of_role in known.values() for slot in of_role)]
            hint = did_you_mean(word, names) or f"roles: {', '.join(known)}"
            raise BadInput(f"no role is called {word!r}", hint=hint)
        chosen[role] = list(dict.fromkeys([*chosen.get(role, []), *found]))
    return chosen


MAX_STRIKES = 100_000
AT_LEAST = 2
"""Strikes for each kind of role, in a schedule that is long enough."""


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of a schedule.

    Attributes:
        number: from 1; together with the seed it identifies the strike.
        at_s: time since the schedule began, for schedules by time.
        at_step: the training step at which it is due, for schedules by step; 0: by time.
        slot: empty for a fault of the whole run (disk).
        seconds: its duration. amount: its size, in the fault's unit.
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
    """Faults at exponentially distributed intervals: a role is drawn uniformly, then one of its slots, then a fault.

    Args:
        mean_s: mean time between two faults. for_s: length of the schedule.
        slots: the slots of each role.

    Raises:
        BadInput: a time is not positive, or the schedule has too many faults.
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
    """Faults in a share of the training steps, drawn without repetition.

    Args:
        share: of the steps from `first` to `last`, both included.

    Raises:
        BadInput: the share is out of range, or there are no steps.
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
    """The faults given on the command line, all at the start."""
    signs = random.Random(f"amounts {seed}")
    return [
        Strike(number=n, fault=one.fault.name, slot=one.target, seconds=one.seconds, amount=_amount(one.fault, signs))
        for n, one in enumerate(wanted, 1)
    ]


def _evened(seed: int, strikes: list[Strike], slots: Mapping[str, Sequence[str]]) -> list[Strike]:
    """The same strikes, with at least two for each kind of role if there are enough.

    A kind with too few takes them at random from the kind that has most; times and faults stay as drawn.
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
    """Draws targets and faults from separate random streams: another list of faults leaves the targets alone."""

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
    """Clocks jump in either direction."""
    back = dice.random() < 0.5
    return -fault.amount if fault.name == "clock_jump" and back else fault.amount
