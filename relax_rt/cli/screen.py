"""The live screen of a run: redrawn on a terminal, lines elsewhere.

The run's agent loads `live` or `plain` by name and shows the screen of `relax-rt up`; `relax-rt attach` shows it from
outside with attach_screen.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from relax_rt.cli.app import FAILED, INTERRUPTED
from relax_rt.cli.display import TONE_STYLE, clock
from relax_rt.cli.headline import SPARK, Headline, Value
from relax_rt.cli.runs import resolved_config
from relax_rt.config.job import Column, Pacing, load_job, pacing_of
from relax_rt.config.schema import RunConfig
from relax_rt.interfaces.agent import RunStatus, SlotStatus
from relax_rt.observe.events import CURRENT
from relax_rt.observe.metrics import METRICS, Tail
from relax_rt.observe.notes import EventNotes, Note, StartTimes
from relax_rt.observe.text import NOTHING, clip, count, duration, pending_on, sparkline, waits
from relax_rt.supervision import control
from relax_rt.transport.rpc.errors import RelaxError

POLL_S = 0.25
MAX_SILENCE_S = 30.0
"""Attaching fails when the agent has not answered for this long."""
MAX_NOTES = 5
MAX_LINES = 500
MAX_VALUES = 4
LOOK_BACK_BYTES = 1 << 20
DRAW_EVERY_S = 0.5
HEARTBEAT_S = 30.0
DRAIN_HEARTBEAT_S = 10.0
CLOSE_TIMEOUT_S = 3.0
DRAIN_POLLS = 64
GAP = 3
WIDE = 100
MIN_SPARK = 24

STATE_STYLE = {
    "ready": "green",
    "starting": "yellow",
    "requested": "yellow",
    "backoff": "red",
    "hung": "bold red",
    "killing": "red",
    "stopping": "cyan",
}
STATUS_STYLE = {"running": "bold green", "starting": "bold yellow", "draining": "bold cyan", "finished": "bold green"}


class RunView:
    """Newest state of a run, and the lines that report its changes.

    Records and events older than `began` update the state but give no lines: they belong to an earlier part of a
    resumed run.

    Args:
        began: wall-clock time (s); now if none is given.
    """

    def __init__(self, headline: Headline, now: Callable[[], float] = time.time, began: float | None = None) -> None:
        self.headline = headline
        self.now = now
        self.began = now() if began is None else began
        self.status: RunStatus | None = None
        self.notes: deque[Note] = deque(maxlen=MAX_NOTES)
        self._event_notes, self._start_times = EventNotes(), StartTimes()
        self._started: deque[str] = deque(maxlen=MAX_LINES)
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._status_reported = ""

    def update_status(self, status: RunStatus) -> None:
        """Process the agent's newest status."""
        self.status = status
        if status.status != self._status_reported:
            self._status_reported = status.status
            ready = sum(slot.state == "ready" for slot in status.slots)
            text = f"{status.name} is {status.status}, {ready} of {len(status.slots)} slots ready"
            self._add_line(self.now(), text + (f": {status.reason}" if status.reason else ""))
            if status.status == "draining" and any(slot.state == "stopping" for slot in status.slots):
                self._lines.append(self.heartbeat())

    def update_records(self, records: Sequence[dict[str, Any]]) -> None:
        """Process new lines of metrics.jsonl."""
        for record in records:
            step = self.headline.update(record)
            t = record.get("t")
            if isinstance(t, int | float) and t >= self.began:
                for line in self.headline.lines(record):
                    self._add_line(t, line)
                if step:
                    self._add_line(t, self.headline.step_line(t))

    def update_events(self, events: Sequence[dict[str, Any]]) -> None:
        """Process new lines of the event log."""
        for event in events:
            t = event.get("t")
            if isinstance(t, int | float) and t >= self.began and (line := self._start_times.update(event)):
                self._started.append(line)
                self._add_line(t, line)
            note = self._event_notes.note(event)
            if note is not None and note.t >= self.began:
                self.notes.append(note)
                mark = {"error": "ERROR ", "warning": "WARNING "}.get(note.tone, "")
                self._add_line(note.t, mark + note.text)

    def pop_lines(self) -> list[str]:
        """The lines since the last call."""
        lines = list(self._lines)
        self._lines.clear()
        return lines

    def pop_started(self) -> list[str]:
        """The slots that have become ready for the first time since the last call."""
        lines = list(self._started)
        self._started.clear()
        return lines

    def heartbeat(self) -> str:
        """A line for a time without other lines: which slots are not ready, else what they wait for."""
        if self.status is None:
            return f"{clock(self.now())} waiting for the node agent"
        slots = self.status.slots
        skipped = ("ready", "ended") if self.status.status == "draining" else ("ready",)
        not_ready = [_not_ready(s) for s in slots if s.state not in skipped]
        idle = [f"{s.slot} {waits(s.waiting)}" for s in slots if s.state == "ready" and s.waiting]
        busy = [f"{s.slot}: {s.detail}" for s in slots if s.state == "ready" and s.detail and not s.waiting]
        shown = (not_ready + busy + idle)[:MAX_VALUES]
        return f"{clock(self.now())} {self.status.status}  " + ("; ".join(shown) or "all slots ready")

    def _add_line(self, t: float, text: str) -> None:
        self._lines.append(f"{clock(t)} {text}")


def _not_ready(slot: SlotStatus) -> str:
    """A slot that is not ready: its state, for how long, what it does, and when it is killed."""
    since = f" for {duration(slot.state_s)}" if slot.state_s else ""
    most = f", killed in {duration(slot.kill_latest_s)} at the latest" if slot.kill_latest_s is not None else ""
    return f"{slot.slot} {slot.state}{since}" + (f" ({slot.detail})" if slot.detail else "") + most


def render(view: RunView, width: int, height: int) -> RenderableType:
    """The whole screen for a terminal of width x height characters."""
    inner = width - 2
    status = view.status
    now = view.now()
    values = _rows(view.headline.values(now), inner)
    parts: list[RenderableType] = []
    if status is not None:
        parts.append(_title(status, inner))
    ending = status is not None and status.status not in ("starting", "running")
    uptime_s = 0.0 if status is None else status.uptime_s
    parts += [_progress(view.headline, now, inner, uptime_s, ending=ending), Text("")]
    parts += [_values(row) for row in values]
    if status is not None and status.slots:
        around = 6 + 2 * len(values) + (2 + len(view.notes) if view.notes else 0)
        parts += [Text(""), _slots(status.slots, view.headline.versions, inner, max(3, height - around))]
    if view.notes:
        parts += [Text(""), Rule(style="bright_black"), _notes(view, inner)]
    return Padding(Group(*parts), (0, 1))


def _title(status: RunStatus, width: int) -> Text:
    head = Text.assemble(
        (status.name, "bold"),
        "  ",
        (status.status, STATUS_STYLE.get(status.status, "bold red")),
        "  ",
        duration(status.uptime_s),
    )
    if status.reason:
        head.append(f"  {clip(status.reason, max(10, width - head.cell_len - 2))}", "cyan")
    elif width - head.cell_len > len(status.run_dir) + 3:
        head.append(" " * (width - head.cell_len - len(status.run_dir)) + status.run_dir, "bright_black")
    return head


def _progress(headline: Headline, now: float, width: int, uptime_s: float, *, ending: bool) -> RenderableType:
    step = headline.step or 0
    if headline.target is None:
        return Text(f"step {step}")
    estimate = headline.estimate(now)
    done = min(1.0, step / headline.target) if headline.target else 1.0
    label = f"step {step} / {headline.target}"
    tail = f"{done:4.0%}" + ("" if ending or estimate is None else f"  {estimate.summary(uptime_s)}")
    table = Table.grid(padding=(0, 2, 0, 0))
    if not ending and estimate is not None and estimate.left_s is not None and len(label) + len(tail) + 14 > width:
        tail = f"{done:4.0%}  {duration(estimate.left_s)} left"
    bar_width = max(10, width - len(label) - len(tail) - 4)
    bar = ProgressBar(total=max(1, headline.target), completed=step, width=bar_width, finished_style="green")
    table.add_row(Text(label, "bold"), bar, Text(tail))
    return table


def _rows(values: Sequence[Value], width: int) -> list[list[tuple[Value, str]]]:
    """Columns on as few lines as they need; sparklines get the remaining width."""
    rows: list[list[Value]] = [[]]
    used = 0
    for value in values:
        need = _width(value) + (MIN_SPARK + 1 if value.spark else 0) + GAP
        if rows[-1] and used + need - GAP > width:
            rows.append([])
            used = 0
        rows[-1].append(value)
        used += need
    return [_with_sparks(row, width) for row in rows if row]


def _with_sparks(row: Sequence[Value], width: int) -> list[tuple[Value, str]]:
    sparks = sum(bool(value.spark) for value in row)
    free = width - sum(_width(value) + GAP for value in row) + GAP - sparks
    each = min(SPARK, free // sparks) if sparks else 0
    return [(value, sparkline(value.spark, each)) for value in row]


def _width(value: Value) -> int:
    return max(len(value.title), len(value.text))


def _values(row: Sequence[tuple[Value, str]]) -> RenderableType:
    table = Table.grid(padding=(0, GAP, 0, 0))
    for _ in row:
        table.add_column(no_wrap=True)
    table.add_row(*(Text(value.title, "bright_black") for value, _ in row))
    table.add_row(
        *(Text.assemble((value.text, "bold"), (f" {spark}" if spark else "", "blue")) for value, spark in row)
    )
    return table


def _slots(slots: Sequence[SlotStatus], versions: dict[str, int], width: int, room: int) -> RenderableType:
    wide = width >= WIDE
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bright_black", width=width)
    table.add_column("slot", no_wrap=True)
    table.add_column("state", no_wrap=True, min_width=8)
    if wide:
        table.add_column("pid", justify="right", no_wrap=True)
    table.add_column("restarts" if wide else "rst", justify="right", no_wrap=True)
    table.add_column("up", justify="right", no_wrap=True)
    table.add_column("version" if wide else "ver", justify="right", no_wrap=True)
    table.add_column("now", no_wrap=True, overflow="ellipsis", ratio=1)
    rows = _fold(slots, room)
    for members in rows:
        table.add_row(*_row(members, versions, wide))
    hidden = len(slots) - sum(len(members) for members in rows)
    if hidden:
        table.add_row(Text(f"{hidden} more", "bright_black"))
    return table


def _fold(slots: Sequence[SlotStatus], room: int) -> list[list[SlotStatus]]:
    """One row a slot; if they do not fit, the ready slots of a kind share a row, so that failures stay visible."""
    if len(slots) <= room:
        return [[slot] for slot in slots]
    rows: list[list[SlotStatus]] = []
    for (_, ready), alike in groupby(slots, key=lambda s: (s.kind, s.state == "ready")):
        members = list(alike)
        rows += [members] if ready else [[slot] for slot in members]
    failing = [row for row in rows if row[0].state != "ready"]
    healthy = [row for row in rows if row[0].state == "ready"]
    if len(rows) <= room:
        return rows
    keep = {id(row) for row in [*failing, *healthy][: room - 1]}
    return [row for row in rows if id(row) in keep]


def _row(members: Sequence[SlotStatus], versions: dict[str, int], wide: bool) -> list[Text]:
    first = members[0]
    name = first.slot if len(members) == 1 else f"{first.kind} ×{len(members)}"
    known = sorted({versions[slot.slot] for slot in members if slot.slot in versions})
    version = NOTHING if not known else str(known[0]) if len(known) == 1 else f"{known[0]}-{known[-1]}"
    restarts = sum(slot.restarts for slot in members)
    alive = [slot.uptime_s for slot in members if slot.pid]
    cells = [Text(name), Text(first.state, STATE_STYLE.get(first.state, "bright_black"))]
    if wide:
        cells.append(Text(str(first.pid) if len(members) == 1 and first.pid else NOTHING, "bright_black"))
    return [
        *cells,
        Text(count(restarts), "yellow" if restarts else "bright_black"),
        Text(duration(min(alive)) if alive else NOTHING),
        Text(version),
        _activity(members),
    ]


def _activity(members: Sequence[SlotStatus]) -> Text:
    for slot in members:
        if slot.state not in ("ready", "starting", "requested") and slot.last is not None and slot.last.failed:
            return Text(clip(f"{slot.last.kind}: {slot.last.cause}", 200), "red")
    for slot in members:
        if slot.detail and not slot.waiting:
            return Text(clip(slot.detail, 200))
    waiting = next((reason for slot in members if (reason := slot.waiting or pending_on(slot.state))), "")
    return Text(clip(waits(waiting), 200), "bright_black") if waiting else Text("")


def _notes(view: RunView, width: int) -> RenderableType:
    lines = []
    for note in view.notes:
        text = clip(note.text, width - 10)
        lines.append(Text.assemble((clock(note.t), "bright_black"), "  ", (text, TONE_STYLE.get(note.tone, ""))))
    return Group(*lines)


class Screen:
    """Shows a running run.

    Files are read and the terminal is written in a thread of the screen: a stopped terminal (Ctrl-S) or a full pipe
    blocks the screen, never the caller.

    Args:
        run_dir: where metrics.jsonl and events/ are.
        headline: what to show of the metrics.
        target_steps: steps of the run, if known.
        console: where to show it; standard output if none.
        began: report what happened from then on (wall-clock s); from now on if none is given.
        pacing: which metrics the time of a step consists of.
        starts: on a live screen, leave a line above it for each slot that becomes ready for the first time.
    """

    def __init__(
        self,
        run_dir: Path,
        headline: Sequence[Column],
        target_steps: int | None = None,
        console: Console | None = None,
        now: Callable[[], float] = time.time,
        *,
        began: float | None = None,
        pacing: Pacing | None = None,
        starts: bool = True,
    ) -> None:
        self.console = console or Console()
        self.live = (
            self.console.is_terminal
            and not self.console.is_dumb_terminal
            and self.console.encoding.lower().startswith("utf")
        )
        self.view = RunView(Headline(headline, target_steps, pacing=pacing), now, began)
        self._starts = starts
        self._metrics = Tail(run_dir / METRICS, last_bytes=LOOK_BACK_BYTES)
        self._events = Tail(run_dir / "events" / CURRENT, last_bytes=LOOK_BACK_BYTES)
        self._status: RunStatus | None = None
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._drawing: Live | None = None
        self._printed_at = now()
        self._drawn_at = 0.0
        self._broken = False
        self._thread: threading.Thread | None = None

    def update(self, status: RunStatus) -> None:
        """Show this status. Returns at once; the first call starts the screen."""
        self._status = status
        if self._thread is None and not self._closing.is_set():
            self._thread = threading.Thread(target=self._work, name="relax-screen", daemon=True)
            self._thread.start()
        self._wake.set()

    __call__ = update

    def close(self, summary_lines: Sequence[str] = ()) -> None:
        """Show the last state, restore the terminal, and print these lines. May be called again."""
        if not self._closing.is_set():
            self._closing.set()
            self._wake.set()
            if self._thread is None:
                self._finish()
            else:
                self._thread.join(CLOSE_TIMEOUT_S)
                self._broken = self._broken or self._thread.is_alive()
        if summary_lines and not self._broken:
            self._print(["", *summary_lines])

    def _work(self) -> None:
        try:
            while not self._closing.is_set():
                self._wake.wait(1.0)
                self._wake.clear()
                self.step()
        finally:
            self._finish()

    def step(self) -> None:
        """Read what is new and show it; called by the screen's thread."""
        self._read()
        if not self.live:
            self._print_new_lines()
        elif time.monotonic() - self._drawn_at >= DRAW_EVERY_S:
            self._draw()

    def _read(self) -> bool:
        if self._status is not None:
            self.view.update_status(self._status)
        records, events = self._metrics.poll(), self._events.poll()
        self.view.update_records(records)
        self.view.update_events(events)
        return bool(records or events)

    def _print_new_lines(self) -> None:
        lines = self.view.pop_lines()
        status = self._status.status if self._status is not None else ""
        every_s = DRAIN_HEARTBEAT_S if status == "draining" else HEARTBEAT_S
        if not lines and self.view.now() - self._printed_at >= every_s:
            lines = [self.view.heartbeat()]
        if lines:
            self._printed_at = self.view.now()
            self._print(lines)

    def _draw(self) -> None:
        self.view.pop_lines()
        started = self.view.pop_started()
        if started and self._starts:
            # Printed above the live part, where they stay.
            self._print(started)
        size = self.console.size
        frame = render(self.view, size.width, size.height)
        try:
            if self._drawing is None:
                self._drawing = Live(
                    frame, console=self.console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
                )
                self._drawing.start(refresh=True)
            else:
                self._drawing.update(frame, refresh=True)
        except (OSError, SystemExit):
            self._stop_showing()
        self._drawn_at = time.monotonic()

    def _finish(self) -> None:
        polls = 0
        while self._read() and polls < DRAIN_POLLS:
            polls += 1
        self._metrics.close()
        self._events.close()
        if not self.live:
            self._print_new_lines()
            return
        try:
            self._draw()
        finally:
            # Restore the cursor.
            if self._drawing is not None:
                try:
                    self._drawing.stop()
                except (OSError, SystemExit):
                    self._stop_showing()

    def _print(self, lines: Sequence[str]) -> None:
        try:
            for line in lines:
                self.console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)
            self.console.file.flush()
        except (OSError, SystemExit):
            self._stop_showing()

    def _stop_showing(self) -> None:
        # The reader closed the pipe (`relax-rt up | head`), for which rich raises SystemExit. The run continues.
        self._broken = True
        self.live = False


class AgentScreen:
    """The screen with the interface that the agent uses: called with each status, closed at the end."""

    def __init__(self, config: RunConfig, run_dir: Path, console: Console) -> None:
        job = load_job(config.run.job)
        self._run_dir = run_dir
        self._screen = Screen(run_dir, job.headline, job.steps(config), console, pacing=pacing_of(config))
        self._last: RunStatus | None = None

    def __call__(self, status: RunStatus) -> None:
        self._last = status
        self._screen.update(status)

    def close(self, summary_lines: Sequence[str] = ()) -> None:
        """Show the end, these lines, and where to look further."""
        lines = [*summary_lines, f"everything is in {self._run_dir}"]
        if self._last is not None and self._last.diagnosis is not None:
            lines.append(f"more: relax-rt why --run {self._run_dir}")
        self._screen.close(lines)


def live(config: RunConfig, run_dir: Path) -> AgentScreen:
    """A live screen on a terminal, lines elsewhere."""
    return AgentScreen(config, run_dir, Console())


def plain(config: RunConfig, run_dir: Path) -> AgentScreen:
    """Lines, also on a terminal."""
    return AgentScreen(config, run_dir, Console(force_terminal=False))


def attach_screen(run_dir: Path, *, plain: bool) -> int:
    """Show a live run until it ends or Ctrl-C; returns the run's exit code, or INTERRUPTED.

    Raises:
        NoRun: there is no live run.
        RelaxError: its agent does not answer.
    """
    status = control.status(run_dir)
    if status.ended:
        why = f"it is over: {status.status}" + (f", {status.reason}" if status.reason else "")
        raise control.NoRun(f"no live run in {run_dir}", why=why, hint="`relax-rt why` explains its end")
    config = resolved_config(run_dir)
    job = load_job(config.run.job)
    steps = job.steps(config)
    console = Console(force_terminal=False) if plain else Console()
    # The live screen shows the newest state, so it reads from the start; plain lines would repeat the whole run.
    began = 0.0 if console.is_terminal and not plain else None
    screen = Screen(run_dir, job.headline, steps, console, began=began, pacing=pacing_of(config), starts=False)
    try:
        status = _update_until_end(run_dir, screen)
    except KeyboardInterrupt:
        screen.close([f"detached; the run continues: {run_dir}"])
        return INTERRUPTED
    except BaseException:
        screen.close()
        raise
    screen.close([f"{status.name} is {status.status}: {status.reason}", f"everything is in {run_dir}"])
    return FAILED if status.exit_code is None else status.exit_code


def _update_until_end(run_dir: Path, screen: Screen) -> RunStatus:
    answered_at = time.monotonic()
    while True:
        try:
            status = control.status(run_dir)
            answered_at = time.monotonic()
        except RelaxError:
            if time.monotonic() - answered_at > MAX_SILENCE_S:
                raise
        else:
            screen.update(status)
            if status.ended:
                return status
        time.sleep(POLL_S)
