"""What the status screen knows at one moment: pure state that takes records, events and statuses."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from relax_rt.observe.headline import Headline
from relax_rt.observe.story import Note, Starts, Story
from relax_rt.observe.text import duration, waits

NOTES = 5
MAX_LINES = 500
MAX_VALUES = 4


class SlotLike(Protocol):
    """How one slot does, as the agent tells it (`SlotStatus`)."""

    @property
    def slot(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def restarts(self) -> int: ...
    @property
    def uptime_s(self) -> float: ...
    @property
    def state_s(self) -> float: ...
    @property
    def detail(self) -> str: ...
    @property
    def waiting(self) -> str: ...
    @property
    def kill_latest_s(self) -> float | None: ...
    @property
    def last(self) -> Any: ...


class StatusLike(Protocol):
    """How the run does, as the agent tells it (`RunStatus`)."""

    @property
    def run_id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def run_dir(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def uptime_s(self) -> float: ...
    @property
    def slots(self) -> Sequence[SlotLike]: ...


class Board:
    """Newest state of a run, and the lines that tell of it one after the other.

    Records and events older than `began` fill the board but give no lines: they belong to an earlier part of a
    resumed run.

    Args:
        began: wall-clock time (s); now if none is given.
    """

    def __init__(self, headline: Headline, clock: Callable[[], float] = time.time, began: float | None = None) -> None:
        self.headline = headline
        self.clock = clock
        self.began = clock() if began is None else began
        self.status: StatusLike | None = None
        self.notes: deque[Note] = deque(maxlen=NOTES)
        self._story, self._starts = Story(), Starts()
        self._started: deque[str] = deque(maxlen=MAX_LINES)
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._told = ""

    def take_status(self, status: StatusLike) -> None:
        """The agent's word on the run."""
        self.status = status
        if status.status != self._told:
            self._told = status.status
            ready = sum(slot.state == "ready" for slot in status.slots)
            text = f"{status.name} is {status.status}, {ready} of {len(status.slots)} slots ready"
            self._say(self.clock(), text + (f": {status.reason}" if status.reason else ""))
            if status.status == "draining" and any(slot.state == "stopping" for slot in status.slots):
                self._lines.append(self.heartbeat())

    def take_records(self, records: Sequence[dict[str, Any]]) -> None:
        """New lines of metrics.jsonl."""
        for record in records:
            step = self.headline.take(record)
            t = record.get("t")
            if isinstance(t, int | float) and t >= self.began:
                for line in self.headline.lines(record):
                    self._say(t, line)
                if step:
                    self._say(t, self.headline.step_line(t))

    def take_events(self, events: Sequence[dict[str, Any]]) -> None:
        """New lines of the event log."""
        for event in events:
            t = event.get("t")
            if isinstance(t, int | float) and t >= self.began and (line := self._starts.take(event)):
                self._started.append(line)
                self._say(t, line)
            note = self._story.note(event)
            if note is not None and note.t >= self.began:
                self.notes.append(note)
                mark = {"error": "ERROR ", "warning": "WARNING "}.get(note.tone, "")
                self._say(note.t, mark + note.text)

    def take_lines(self) -> list[str]:
        """The lines told since the last call."""
        lines = list(self._lines)
        self._lines.clear()
        return lines

    def take_started(self) -> list[str]:
        """The slots that have become ready for the first time since the last call."""
        lines = list(self._started)
        self._started.clear()
        return lines

    def heartbeat(self) -> str:
        """A line for a time in which nothing else was told: who is not ready, else who waits for what."""
        if self.status is None:
            return f"{clock_time(self.clock())} waiting for the node agent"
        slots = self.status.slots
        gone = ("ended",) if self.status.status == "draining" else ()
        away = [_away(s) for s in slots if s.state != "ready" and s.state not in gone]
        idle = [f"{s.slot} {waits(s.waiting)}" for s in slots if s.state == "ready" and s.waiting]
        busy = [f"{s.slot}: {s.detail}" for s in slots if s.state == "ready" and s.detail and not s.waiting]
        told = (away + busy + idle)[:MAX_VALUES]
        return f"{clock_time(self.clock())} {self.status.status}  " + ("; ".join(told) or "all slots ready")

    def _say(self, t: float, text: str) -> None:
        self._lines.append(f"{clock_time(t)} {text}")


def _away(slot: SlotLike) -> str:
    """A slot that does not work now: its state, for how long, what it still does, and when it is killed."""
    since = f" for {duration(slot.state_s)}" if slot.state_s else ""
    most = f", killed in {duration(slot.kill_latest_s)} at the latest" if slot.kill_latest_s is not None else ""
    return f"{slot.slot} {slot.state}{since}" + (f" ({slot.detail})" if slot.detail else "") + most


def clock_time(t: float) -> str:
    """Wall-clock seconds as local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(t))
