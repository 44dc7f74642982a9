"""Kinds of faults that can be injected, and schedules of them. Pure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from relax_rt.config.problems import BadInput, did_you_mean
from relax_rt.observe.text import parse_duration

Means = Literal["signal", "inside", "disk", "epoch"]


class FaultKind(msgspec.Struct, frozen=True):
    """A kind of fault.

    Attributes:
        what: description, one line.
        means: signal, to the process group of the role; inside, carried out by the host process of the role; disk, on
            the file system of the run directory; epoch, by issuing a newer epoch for the slot while its process is
            stopped.
        seconds: default duration; 0: instantaneous.
        max_s: longest duration.
        amount, unit: its size, if it has one.
        order: its name in the message to the role, for means inside.
    """

    name: str
    what: str
    means: Means
    seconds: float = 0.0
    max_s: float = 600.0
    amount: float = 0.0
    unit: str = ""
    order: str = ""


_ALL = (
    FaultKind("kill", "SIGKILL", "signal"),
    FaultKind("stop", "SIGSTOP for a while, then SIGCONT", "signal", seconds=3.0),
    FaultKind("overtake", "SIGSTOP while a newer epoch is issued for the slot, then SIGCONT", "epoch", seconds=1.0),
    FaultKind("hang_loop", "the event loop of the role is blocked", "inside", seconds=3.0, order="hang_loop"),
    FaultKind("hold_gil", "native code holds the GIL of the role", "inside", seconds=3.0, order="hold_gil"),
    FaultKind(
        "memory",
        "the role allocates memory, beyond its memory_mib if it has one",
        "inside",
        5.0,
        amount=256.0,
        unit="MiB",
        order="eat_memory",
    ),
    FaultKind(
        "clock_jump",
        "time.time and time.time_ns of the role jump; no other clock does",
        "inside",
        5.0,
        amount=3600.0,
        unit="s",
        order="clock_jump",
    ),
    FaultKind("delay", "messages of the role are delayed", "inside", 5.0, amount=0.2, unit="s", order="delay"),
    FaultKind("partition", "messages of the role are lost", "inside", 3.0, order="partition"),
    FaultKind("disk", "the run directory's file system is full", "disk", seconds=3.0, max_s=60.0),
)
FAULTS: dict[str, FaultKind] = {fault.name: fault for fault in _ALL}
ALIASES = {"eat_memory": "memory", "pause": "stop", "sigkill": "kill", "sigstop": "stop", "gil": "hold_gil"}


def find_fault(name: str) -> FaultKind:
    """The fault of a name.

    Raises:
        BadInput: there is none.
    """
    known = FAULTS.get(ALIASES.get(name, name))
    if known is None:
        hint = did_you_mean(name, [*FAULTS]) or f"faults: {', '.join(FAULTS)}"
        raise BadInput(f"there is no fault {name!r}", hint=hint)
    return known


def parse_faults(text: str) -> list[FaultKind]:
    """Faults of a comma-separated list, in its order, each once.

    Raises:
        BadInput: one is unknown, or the list is empty.
    """
    names = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not names:
        raise BadInput("no fault is named", hint=f"faults: {', '.join(FAULTS)}")
    return list({fault.name: fault for fault in map(find_fault, names)}.values())


class RequestedFault(msgspec.Struct, frozen=True):
    """A fault given on the command line: ``stop:rollout/0:12s``."""

    fault: FaultKind
    target: str
    seconds: float


def parse_fault(text: str, slots: Sequence[str]) -> RequestedFault:
    """Parse ``fault:slot`` or ``fault:slot:duration``; a role's name means its first slot.

    Raises:
        BadInput: the fault or the slot is unknown, or the duration is too long.
    """
    name, _, rest = text.partition(":")
    target, _, lasts = rest.partition(":")
    fault = find_fault(name)
    if fault.means == "disk":
        target, lasts = "", rest or lasts
    else:
        target = _find_slot(target, slots)
    return RequestedFault(fault, target, checked_duration(fault, parse_duration(lasts) if lasts else fault.seconds))


def checked_duration(fault: FaultKind, wanted_s: float) -> float:
    """Check a fault's duration.

    Raises:
        BadInput: it is longer than the fault allows.
    """
    if wanted_s > fault.max_s:
        raise BadInput(f"{fault.name} for {wanted_s:g} s", why=f"it may last at most {fault.max_s:g} s")
    return wanted_s


def _find_slot(target: str, slots: Sequence[str]) -> str:
    if target in slots:
        return target
    of_role = [slot for slot in slots if slot.partition("/")[0] == target]
    if of_role:
        return of_role[0]
    names = [*slots, *dict.fromkeys(slot.partition("/")[0] for slot in slots)]
    raise BadInput(f"there is no slot {target!r}", hint=did_you_mean(target, names) or f"slots: {', '.join(slots)}")


def parse_roles(text: str, slots: Iterable[str]) -> dict[str, list[str]]:
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


MAX_FAULTS = 100_000
MIN_PER_ROLE = 2
"""Faults for each kind of role, in a schedule that is long enough."""


class ScheduledFault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of a schedule.

    Attributes:
        number: from 1; together with the seed it identifies the fault.
        at_s: time since the schedule began, for schedules by time.
        at_step: training step at which it is due, for schedules by step; 0: by time.
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
    seed: int, mean_s: float, for_s: float, faults: Sequence[FaultKind], slots: Mapping[str, Sequence[str]]
) -> list[ScheduledFault]:
    """Faults at exponentially distributed intervals: a role is drawn uniformly, then one of its slots, then a fault.

    Args:
        mean_s: mean time between two faults. for_s: length of the schedule.
        slots: the slots of each role.

    Raises:
        BadInput: a time is not positive, or the schedule has too many faults.
    """
    if mean_s <= 0 or for_s <= 0:
        raise BadInput(f"faults every {mean_s:g} s for {for_s:g} s", why="both must be longer than nothing")
    if for_s / mean_s > MAX_FAULTS:
        raise BadInput(f"{for_s / mean_s:.0f} faults", why=f"a schedule has at most {MAX_FAULTS}")
    times, draw = random.Random(f"times {seed}"), _Draw(seed, faults, slots)
    planned: list[ScheduledFault] = []
    at_s = times.expovariate(1 / mean_s)
    while at_s < for_s and len(planned) < MAX_FAULTS:
        planned.append(draw.draw(len(planned) + 1, at_s=round(at_s, 3)))
        at_s += times.expovariate(1 / mean_s)
    return _balanced(seed, planned, slots)


def by_steps(
    seed: int, share: float, first: int, last: int, faults: Sequence[FaultKind], slots: Mapping[str, Sequence[str]]
) -> list[ScheduledFault]:
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
    return _balanced(seed, [draw.draw(number, at_step=step) for number, step in enumerate(chosen, 1)], slots)


def immediate_faults(seed: int, wanted: Sequence[RequestedFault]) -> list[ScheduledFault]:
    """The faults given on the command line, all at the start."""
    rng = random.Random(f"amounts {seed}")
    return [
        ScheduledFault(
            number=n, fault=one.fault.name, slot=one.target, seconds=one.seconds, amount=_amount(one.fault, rng)
        )
        for n, one in enumerate(wanted, 1)
    ]


def _balanced(seed: int, planned: list[ScheduledFault], slots: Mapping[str, Sequence[str]]) -> list[ScheduledFault]:
    """The same faults, with at least MIN_PER_ROLE for each kind of role if there are enough.

    A kind with too few gets faults at random from the kind that has most. Times and kinds of faults stay as drawn.
    """
    roles = {role: list(found) for role, found in sorted(slots.items()) if found}
    counts = Counter(dict.fromkeys(roles, 0))
    counts.update(fault.slot.partition("/")[0] for fault in planned if fault.slot)
    if counts.total() < MIN_PER_ROLE * len(roles):
        return planned
    rng, balanced = random.Random(f"evened {seed}"), list(planned)
    for role, of_role in roles.items():
        while counts[role] < MIN_PER_ROLE:
            most = max(counts, key=lambda name: (counts[name], name))
            place = rng.choice([n for n, s in enumerate(balanced) if s.slot.partition("/")[0] == most])
            balanced[place] = replace(balanced[place], slot=of_role[int(rng.random() * len(of_role))])
            counts[most] -= 1
            counts[role] += 1
    return balanced


class _Draw:
    """Draws targets and kinds from separate random streams: another list of kinds gives the same targets."""

    def __init__(self, seed: int, faults: Sequence[FaultKind], slots: Mapping[str, Sequence[str]]) -> None:
        if not faults or not any(slots.values()):
            raise BadInput("a schedule without faults or without slots", hint="name at least one of each")
        self._faults = list(faults)
        self._slots = {role: list(found) for role, found in sorted(slots.items()) if found}
        self._targets, self._kinds = random.Random(f"targets {seed}"), random.Random(f"faults {seed}")
        self._amounts = random.Random(f"amounts {seed}")

    def draw(self, number: int, *, at_s: float = 0.0, at_step: int = 0) -> ScheduledFault:
        of_role = self._slots[self._targets.choice(list(self._slots))]
        slot = of_role[int(self._targets.random() * len(of_role))]
        fault = self._kinds.choice(self._faults)
        return ScheduledFault(
            number=number,
            fault=fault.name,
            slot="" if fault.means == "disk" else slot,
            at_s=at_s,
            at_step=at_step,
            seconds=fault.seconds,
            amount=_amount(fault, self._amounts),
        )


def _amount(fault: FaultKind, rng: random.Random) -> float:
    """The amount of a fault; clocks jump forward or back."""
    back = rng.random() < 0.5
    return -fault.amount if fault.name == "clock_jump" and back else fault.amount
