"""A session of harm: strikes fall when they are due, what lasts is undone, and the run is given time to recover."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from relax_rt.chaos.faults import Strike
from relax_rt.chaos.injector import Injector, Outcome
from relax_rt.observe.metrics import METRICS, Tail
from relax_rt.supervision import control
from relax_rt.transport.rpc.errors import RelaxError

POLL_S = 0.02
LOOK_S = 0.25
QUIET_S = 0.5
PUT_OFF_S, PATIENCE_S = 0.2, 30.0
"""A strike by time that finds no process is tried again so often, for so long."""


class Session(msgspec.Struct, kw_only=True):
    """The result of a schedule.

    Attributes:
        outcomes: of each strike that was due. left: strikes that were never due.
        deferred: strikes that were put off; by step: how often.
        over: the run ended in the meantime. recovered: at the end every slot was ready or had ended.
        interrupted: the user stopped it.
    """

    outcomes: list[Outcome] = []
    left: int = 0
    deferred: int = 0
    over: bool = False
    recovered: bool = False
    interrupted: bool = False
    seconds: float = 0.0


class StepWatch:
    """The newest training step, from the metrics as they grow."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = Tail(run_dir / METRICS)
        self.step = 0

    def look(self) -> int:
        """The newest recorded step; after a fall-back it is lower than before."""
        for record in self._tail.poll():
            if record.get("kind") == "step":
                self.step = int(record["step"])
        return self.step

    def close(self) -> None:
        """Release the file."""
        self._tail.close()


def play(
    run_dir: Path,
    injector: Injector,
    strikes: Sequence[Strike],
    *,
    settle_s: float = 60.0,
    defer: bool = False,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> Session:
    """Carry out a schedule on a living run, until the schedule or the run ends.

    Args:
        settle_s: time for the run to recover after the last strike.
        defer: a strike that finds no process waits for one, up to PATIENCE_S; by step, until the next step. Slot and
            fault stay as drawn.
    """
    began = time.monotonic()
    session = Session()
    by_time = sorted((s for s in strikes if not s.at_step), key=lambda s: s.at_s)
    by_step = sorted((s for s in strikes if s.at_step), key=lambda s: s.at_step)
    steps = StepWatch(run_dir)
    first_due: dict[int, float] = {}
    looked = 0.0
    try:
        while (by_time or by_step or injector.next_undo is not None) and not session.over:
            now = time.monotonic()
            injector.undo(now)
            while by_time and by_time[0].at_s <= now - began:
                strike = by_time.pop(0)
                due_s = first_due.setdefault(strike.number, strike.at_s)
                put_off = defer and now - began - due_s < PATIENCE_S
                if _strike(injector, strike, session, on_outcome, put_off=put_off).passing and put_off:
                    session.deferred += strike.at_s == due_s
                    insort(by_time, replace(strike, at_s=now - began + PUT_OFF_S), key=lambda s: s.at_s)
            if by_step and by_step[0].at_step <= steps.look():
                strike = by_step.pop(0)
                if _strike(injector, strike, session, on_outcome, put_off=defer).passing and defer:
                    session.deferred += 1
                    # Behind those of its new step: they were drawn for it.
                    insort(by_step, replace(strike, at_step=steps.step + 1), key=lambda s: s.at_step)
            if now - looked >= LOOK_S:
                looked, session.over = now, not control.find_run(run_dir).alive
            time.sleep(_pause(injector, by_time, began, fine=bool(by_step)))
        session.recovered = settled(run_dir, settle_s)
    except KeyboardInterrupt:
        session.interrupted = True
    finally:
        injector.undo(float("inf"))
        steps.close()
    session.left = len(by_time) + len(by_step)
    session.over = session.over or not control.find_run(run_dir).alive
    session.seconds = time.monotonic() - began
    return session


def _strike(
    injector: Injector,
    strike: Strike,
    session: Session,
    on_outcome: Callable[[Outcome], None],
    *,
    put_off: bool = False,
) -> Outcome:
    outcome = injector.strike(strike, put_off=put_off)
    if not (outcome.passing and put_off):
        session.outcomes.append(outcome)
        on_outcome(outcome)
    return outcome


def _pause(injector: Injector, by_time: Sequence[Strike], began: float, *, fine: bool) -> float:
    now = time.monotonic()
    due = [began + by_time[0].at_s] if by_time else []
    if injector.next_undo is not None:
        due.append(injector.next_undo)
    left_s = min(due, default=now + LOOK_S) - now
    return max(0.0, min(left_s, POLL_S if fine else LOOK_S))


def settled(run_dir: Path, settle_s: float) -> bool:
    """Wait until every slot is ready or has ended, and stays so for a moment. An ended run is settled."""
    end = time.monotonic() + settle_s
    since: float | None = None
    while time.monotonic() < end:
        try:
            slots = control.status(run_dir).slots
        except RelaxError:
            slots = []
        if not control.find_run(run_dir).alive:
            return True
        if not slots or any(slot.state not in ("ready", "ended") for slot in slots):
            since = None
        else:
            since = since or time.monotonic()
            if time.monotonic() - since >= QUIET_S:
                return True
        time.sleep(LOOK_S / 5)
    return False
