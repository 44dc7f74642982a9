"""Errors of the runtime. Each says what failed, on what input, why, and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RelaxError(Exception):
    """Base of every error that relax-rt raises on purpose.

    Args:
        what: what failed, with the input it failed on.
        why: the cause, as far as it is known.
        hint: what the user can do next.
    """

    def __init__(self, what: str, *, why: str = "", hint: str = "") -> None:
        self.what, self.why, self.hint = what, why, hint
        super().__init__(what + (f": {why}" if why else "") + (f" ({hint})" if hint else ""))


class GivenUp(RelaxError):
    """A process has come to a limit that its next incarnation would come to as well: it ends the run."""


class Refused(RelaxError):
    """The far end understood the request and will not carry it out; trying again changes nothing."""


class Gone(Refused):
    """What was requested existed and is gone; a newer one has replaced it or soon will."""


class StaleEpoch(Refused):
    """A newer incarnation holds the slot: the caller is fenced and must exit."""


class ProtocolError(RelaxError):
    """The two ends do not speak the same protocol, or a message broke its bounds."""


class Unreachable(RelaxError):
    """No answer from the far end before the deadline; the request may or may not have been carried out."""


class ActorDied(Unreachable):
    """The far end died while it worked on a request that must not be repeated.

    Attributes:
        who: the incarnation that died, as ``reward/0#7``; empty if it is not known.
        diagnosis: how its process ended, as its supervisor says; empty if that is not known.
    """

    who: str = ""
    diagnosis: str = ""


class ShuttingDown(RelaxError):
    """The far end is stopping in order and has not begun this request: its successor, or another, may take it."""


class DeadlineExceeded(RelaxError):
    """A wait reached its deadline."""


class RemoteError(RelaxError):
    """A handler at the far end raised. `kind` is the remote exception's class, `trace` its last lines."""

    def __init__(self, kind: str, message: str, *, where: str, trace: str = "") -> None:
        self.kind, self.message, self.where, self.trace = kind, message, where, trace
        super().__init__(f"{where} raised {kind}: {message}")


class OutOfSpace(RelaxError):
    """A bounded store (shared memory, journal, queue) has no room, and waiting did not make any."""


class Corrupt(RelaxError):
    """Bytes do not match their digest or checksum."""


NEAR = 0.7
"""Twice the letters that two names share in order, by all their letters: a typo leaves more. `stop` and `top_p` have
less."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?`` if one of the known names is near, else the empty string."""
    by_folded = {name.lower().replace("-", "_"): name for name in known}
    folded = given.lower().replace("-", "_")
    # Two letters that changed places are much of a short name.
    turned = [name for name in by_folded if sorted(name) == sorted(folded)]
    near = turned or difflib.get_close_matches(folded, list(by_folded), n=1, cutoff=NEAR)
    return f"did you mean '{by_folded[near[0]]}'?" if near else ""
