"""The faults there are, by name, and how a person asks for them; no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from relax_rt.config.problems import BadInput, did_you_mean

Means = Literal["signal", "inside", "disk", "epoch"]


class Fault(msgspec.Struct, frozen=True):
    """One way to harm a run.

    Attributes:
        what: one line for people.
        means: signal, to the role's process group; inside, carried out by the role's own host; disk, on the run
            directory's file system; epoch, by issuing a newer epoch for the slot while its process is stopped.
        seconds: how long it lasts if nothing else is said; 0: it is over at once.
        longest_s: upper limit.
        amount, unit: how much of it, if that has a meaning.
        order: its name on the way to the role, for means inside.
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
    """A duration as people write it: ``500ms``, ``5s``, ``2.5m``, ``1h``, or bare seconds.

    Raises:
        BadInput: it is none.
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
    """One fault asked for by hand: ``stop:rollout/0:12s``."""

    fault: Fault
    target: str
    seconds: float


def once_named(text: str, slots: Sequence[str]) -> Once:
    """``fault:slot`` or ``fault:slot:duration``; the slot may be a role's name, meaning its first.

    Raises:
        BadInput: the fault or the slot is unknown, or it lasts too long.
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
    """The fault's duration.

    Raises:
        BadInput: longer than it may be.
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
    """The slots of each role that a comma-separated list names (roles, or single slots); all if it is empty.

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
