"""The status screen of `relax-rt up`: a live picture on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from relax_rt.config.job import Pacing
from relax_rt.observe.board import Board, StatusLike
from relax_rt.observe.events import CURRENT
from relax_rt.observe.headline import Column, Headline
from relax_rt.observe.metrics import METRICS
from relax_rt.observe.tail import Tail
from relax_rt.observe.view import render

LOOK_BACK_BYTES = 1 << 20
DRAW_EVERY_S = 0.5
HEARTBEAT_S = 30.0
DRAIN_HEARTBEAT_S = 10.0
CLOSE_TIMEOUT_S = 3.0
DRAIN_POLLS = 64


class Screen:
    """Shows a run while it goes on.

    Reading the files and writing to the terminal happen in a thread of the screen's own: a terminal that is
    stopped (Ctrl-S) or a full pipe holds up the screen, never the caller.

    Args:
        run_dir: where metrics.jsonl and events/ are.
        headline: what to show of the metrics.
        target_steps: steps the run is to make, if known.
        console: where to show it; standard output if none.
        began: tell of what happened from then on (wall-clock s); from now on if none is given.
        pacing: which metrics the time of a step consists of.
        starts: on a live screen, leave a line above it for each slot that becomes ready for the first time.
    """

    def __init__(
        self,
        run_dir: Path,
        headline: Sequence[Column],
        target_steps: int | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.time,
        *,
        began: float | None = None,
        pacing: Pacing | None = None,
        starts: bool = True,
    ) -> None:
        self.console = console or Console()
        self.live = self.console.is_terminal and not self.console.is_dumb_terminal and self._can_draw()
        self.board = Board(Headline(headline, target_steps, pacing=pacing), clock, began)
        self._starts = starts
        self._metrics = Tail(run_dir / METRICS, last_bytes=LOOK_BACK_BYTES)
        self._events = Tail(run_dir / "events" / CURRENT, last_bytes=LOOK_BACK_BYTES)
        self._status: StatusLike | None = None
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._drawing: Live | None = None
        self._told_at = clock()
        self._drawn_at = 0.0
        self._broken = False
        self._thread: threading.Thread | None = None

    def update(self, status: StatusLike) -> None:
        """Show this from now on. Returns at once; the first call starts the screen."""
        self._status = status
        if self._thread is None and not self._closing.is_set():
            self._thread = threading.Thread(target=self._work, name="relax-screen", daemon=True)
            self._thread.start()
        self._wake.set()

    __call__ = update

    def close(self, summary_lines: Sequence[str] = ()) -> None:
        """Show the last state, leave the terminal as it was, and print these lines. May be called again."""
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
        """Read what is new and show it, once; called by the screen's own thread."""
        self._read()
        if not self.live:
            self._tell()
        elif time.monotonic() - self._drawn_at >= DRAW_EVERY_S:
            self._draw()

    def _read(self) -> bool:
        if self._status is not None:
            self.board.take_status(self._status)
        records, events = self._metrics.poll(), self._events.poll()
        self.board.take_records(records)
        self.board.take_events(events)
        return bool(records or events)

    def _tell(self) -> None:
        lines = self.board.take_lines()
        status = self._status.status if self._status is not None else ""
        every_s = DRAIN_HEARTBEAT_S if status == "draining" else HEARTBEAT_S
        if not lines and self.board.clock() - self._told_at >= every_s:
            lines = [self.board.heartbeat()]
        if lines:
            self._told_at = self.board.clock()
            self._print(lines)

    def _draw(self) -> None:
        self.board.take_lines()
        started = self.board.take_started()
        if started and self._starts:
            # Above the picture, where they stay.
            self._print(started)
        size = self.console.size
        picture = render(self.board, size.width, size.height)
        try:
            if self._drawing is None:
                self._drawing = Live(
                    picture, console=self.console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
                )
                self._drawing.start(refresh=True)
            else:
                self._drawing.update(picture, refresh=True)
        except (OSError, SystemExit):
            self._give_up()
        self._drawn_at = time.monotonic()

    def _finish(self) -> None:
        polls = 0
        while self._read() and polls < DRAIN_POLLS:
            polls += 1
        self._metrics.close()
        self._events.close()
        if not self.live:
            self._tell()
            return
        try:
            self._draw()
        finally:
            self._stop_drawing()

    def _stop_drawing(self) -> None:
        """Give the cursor back."""
        if self._drawing is not None:
            try:
                self._drawing.stop()
            except (OSError, SystemExit):
                self._give_up()

    def _print(self, lines: Sequence[str]) -> None:
        try:
            for line in lines:
                self.console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)
            self.console.file.flush()
        except (OSError, SystemExit):
            self._give_up()

    def _give_up(self) -> None:
        # The reader is gone (`relax-rt up | head`), on which rich raises SystemExit: the run goes on unseen.
        self._broken = True
        self.live = False

    def _can_draw(self) -> bool:
        return self.console.encoding.lower().startswith("utf")
