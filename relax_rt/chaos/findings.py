"""What the checker looks at and what it finds; no I/O."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from relax_rt.chaos.timeline import Event, line

MAX_SHOWN = 12


class Write(msgspec.Struct, frozen=True):
    """A change that the queue accepted, as its journal has it.

    Attributes:
        n: place in the ledger's order. who: ``slot#epoch`` of the caller, empty for the queue's own.
        what: the kind of change, ``put``; ``gone`` tells that `about` had ended.
    """

    n: int
    who: str
    what: str
    about: str = ""


class Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint folder as it lies on disk."""

    folder: str
    step: int
    version: int
    digest: str
    epoch: int


class Evidence(msgspec.Struct, kw_only=True):
    """All that is known of a run.

    Attributes:
        events: the event log in the order written. complete: none of its segments was dropped.
        steps: the trainer's own records, in the order written. made: the rollouts' own.
        evaluations: the evaluator's own.
        writes: what the queue's journal still holds.
        checkpoints: the folders there are.
        has_journal: the queue has left one. journal_error: why it cannot be read.
        ended: the run is over. status: of run.json.
        recovered: of a run that goes on: every slot is ready or has ended; None: nobody looked.
        target: steps of the job, batch: samples of a step, max_staleness: its bound; None for a job without them.
        leftovers: what of an ended run is still there.
    """

    events: list[Event]
    complete: bool = True
    steps: list[Event] = []
    made: list[Event] = []
    evaluations: list[Event] = []
    writes: list[Write] = []
    has_journal: bool = True
    journal_error: str = ""
    checkpoints: list[Checkpoint] = []
    ended: bool = False
    status: str = ""
    recovered: bool | None = None
    target: int | None = None
    batch: int | None = None
    max_staleness: float | None = None
    leftovers: list[str] = []

    def lines(self, numbers: Iterable[int]) -> list[str]:
        """Events by their place, as evidence."""
        return [line(n, self.events[n]) for n in numbers]

    @property
    def reached(self) -> bool:
        """The run ended with what it was for."""
        return self.ended and self.status == "finished"

    @property
    def trains(self) -> bool:
        """Its job trains: steps, and what they were made of, are to be on record."""
        return bool(self.target or self.batch)

    @property
    def last_step(self) -> int:
        """The highest step on record."""
        return max((int(record["step"]) for record in self.steps), default=0)


class Breach(msgspec.Struct, frozen=True):
    """A promise that was not kept.

    Attributes:
        check: the name of the check. what: what is wrong.
        events: the events and records that show it.
    """

    check: str
    what: str
    events: list[str] = []


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found.

    Attributes:
        looked_at: how many things it judged, of which kind. why_not: it could judge nothing, for this reason.
        not_shown: what was done to the run without showing what it was for; no promise is broken by it.
    """

    check: str
    promise: str
    looked_at: int
    of: str
    breaches: list[Breach] = []
    why_not: str = ""
    not_shown: list[str] = []
