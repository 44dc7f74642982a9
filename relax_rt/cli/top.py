"""What each slot takes of the machine, and how fast it gets on: two looks at its processes and the time between."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path

import msgspec
import psutil  # type: ignore[import-untyped]
from rich.live import Live
from rich.table import Table
from rich.text import Text

from relax_rt.cli.display import STYLE, console_for_output, print_table, show_json
from relax_rt.cli.doctor.finding import size
from relax_rt.interfaces.agent import RunStatus
from relax_rt.observe.text import NOTHING, clip, count, duration, lacks, number, waits
from relax_rt.supervision import control

MAX_CHILDREN = 256
ONCE_LOOKS = 10
"""Looks that one frame takes at most, while a slot that works has not counted on since the first."""
WIDTHS = {"threads": 100, "files": 100, "own": 90, "pid": 75, "rss": 60}
"""Columns that narrower terminals leave out."""
AGENT = "the node agent and its zygotes"


class Use(msgspec.Struct, frozen=True):
    """One process and what it started, at one moment.

    Attributes:
        pid: of the process; cpu_s: processor time of all of them since they began.
        rss, own: resident bytes, and those of them that are shared with nobody (no shared memory, no file).
    """

    pid: int
    cpu_s: float
    rss: int
    own: int
    threads: int
    files: int
    processes: int


class Look(msgspec.Struct, frozen=True):
    """All of a run at one moment (monotonic s)."""

    at: float
    status: RunStatus
    uses: dict[str, Use]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line: a slot, or the agent. None where it cannot be known: the process is away, or on another node.

    Attributes:
        cpu: share of one core, 1.0 is one core full; rate: units of progress a second.
    """

    slot: str
    state: str
    node: str = ""
    pid: int = 0
    cpu: float | None = None
    rss: int | None = None
    own: int | None = None
    threads: int | None = None
    files: int | None = None
    processes: int | None = None
    progress: int = 0
    rate: float | None = None
    now: str = ""


class Paces:
    """How fast counters go: over the time between two changes, however many looks lie between them."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int, int, float]] = {}
        self._last: dict[str, tuple[int, float]] = {}

    def take(self, seen: Look) -> None:
        for slot in seen.status.slots:
            pid, epoch, progress, at = self._known.get(slot.slot, (0, 0, 0, 0.0))
            if not slot.pid or (pid, epoch) != (slot.pid, slot.epoch) or slot.progress < progress:
                self._last.pop(slot.slot, None)
            elif slot.progress > progress:
                self._last[slot.slot] = slot.progress - progress, max(1e-6, seen.at - at)
            else:
                continue
            self._known[slot.slot] = (slot.pid, slot.epoch, slot.progress, seen.at)

    def rate(self, slot: str, now: float) -> float | None:
        """Units a second; None until the counter has changed, and sinking when it has long not done so again."""
        if slot not in self._last:
            return None
        units, took_s = self._last[slot]
        since_s = now - self._known[slot][3]
        return units / (took_s if since_s <= 2 * took_s else since_s)

    def unknown(self, seen: Look) -> bool:
        """Whether a slot that works has not counted on yet."""
        at_work = [s for s in seen.status.slots if s.state == "ready" and s.pid and s.progress and not s.waiting]
        return any(self.rate(slot.slot, seen.at) is None for slot in at_work)


def look(run_dir: Path) -> Look:
    """Ask the agent, then look at the processes of this machine."""
    status = control.status(run_dir)
    here = status.nodes[0].node if status.nodes else ""
    pids = {slot.slot: slot.pid for slot in status.slots if slot.pid and slot.node in ("", here)}
    if status.agent_pid:
        pids["agent"] = status.agent_pid
    roles = set(pids.values())
    found = {name: use for name, pid in pids.items() if (use := _use(pid, roles)) is not None}
    return Look(time.monotonic(), status, found)


def rows(before: Look, after: Look, paces: Paces) -> list[Row]:
    """What happened between two looks; rates of progress as far as they are known of all looks."""
    passed = max(1e-6, after.at - before.at)
    found = []
    for slot in after.status.slots:
        waiting = slot.waiting or ("" if slot.detail else lacks(slot.state))
        doing = waits(waiting) if waiting else slot.detail
        rate = paces.rate(slot.slot, after.at)
        more = {"node": slot.node, "progress": slot.progress, "rate": rate, "now": doing}
        found.append(_row(slot.slot, slot.state, before, after, passed, more))
    if after.status.agent_pid:
        found.append(_row("agent", after.status.status, before, after, passed, {"now": AGENT}))
    return found


def show_top(run_dir: Path, *, every_s: float, once: bool, as_json: bool) -> None:
    """Print one frame, or show them until the run ends or Ctrl-C.

    Raises:
        NoRun: no run lives there.
    """
    paces = Paces()

    def next_look() -> Look:
        seen = look(run_dir)
        paces.take(seen)
        return seen

    before = next_look()
    if before.status.ended:
        why = f"it is over: {before.status.status}" + (f", {before.status.reason}" if before.status.reason else "")
        raise control.NoRun(f"no run lives in {run_dir}", why=why, hint="`relax-rt why` tells of its end")
    time.sleep(every_s)
    after = next_look()
    console = console_for_output()
    if once or as_json or not console.is_terminal:
        for _ in range(ONCE_LOOKS - 2):
            if after.status.ended or not paces.unknown(after):
                break
            time.sleep(every_s)
            after = next_look()
        found = rows(before, after, paces)
        show_json(found) if as_json else print_table(console, _table(after.status, found, console.width))
        return
    try:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while not after.status.ended:
                live.update(_table(after.status, rows(before, after, paces), console.width), refresh=True)
                time.sleep(every_s)
                before, after = after, next_look()
    except KeyboardInterrupt:
        pass


def _use(pid: int, roles: set[int]) -> Use | None:
    """The process and its descendants, but those that are slots of their own."""
    try:
        process = psutil.Process(pid)
        below = _descendants(process, roles)[:MAX_CHILDREN]
    except psutil.Error:
        return None
    cpu_s, rss, own, threads, files, processes = 0.0, 0, 0, 0, 0, 0
    for one in [process, *below]:
        try:
            with one.oneshot():
                times, memory = one.cpu_times(), one.memory_info()
                threads += one.num_threads()
            cpu_s += times.user + times.system
            rss += memory.rss
            own += memory.rss - memory.shared
            files += one.num_fds()
            processes += 1
        except psutil.Error:
            continue
    return Use(pid, cpu_s, rss, own, threads, files, processes) if processes else None


def _descendants(process: psutil.Process, roles: set[int]) -> Sequence[psutil.Process]:
    found = []
    for child in process.children():
        if child.pid not in roles:
            found += [child, *_descendants(child, roles)]
    return found


def _row(slot: str, state: str, before: Look, after: Look, passed: float, more: Mapping[str, object]) -> Row:
    use, was = after.uses.get(slot), before.uses.get(slot)
    known: dict[str, object] = {"slot": slot, "state": state, **more}
    if use is not None:
        cpu = max(0.0, use.cpu_s - was.cpu_s) / passed if was is not None and was.pid == use.pid else None
        known |= {"cpu": cpu, **{k: v for k, v in msgspec.structs.asdict(use).items() if k != "cpu_s"}}
    return msgspec.convert(known, Row)


def _table(status: RunStatus, found: Sequence[Row], width: int) -> Table:
    title = f"{status.name}  {status.status}  up {duration(status.uptime_s)}"
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black", title=title, title_justify="left")
    for name in ("slot", "state"):
        table.add_column(name, no_wrap=True)
    numbers = ("pid", "cpu", "rss", "own", "threads", "files", "progress", "a second")
    shown = [width >= WIDTHS.get(name, 0) for name in numbers]
    for name, there in zip(numbers, shown, strict=True):
        if there:
            table.add_column(name, justify="right", no_wrap=True)
    table.add_column("now", no_wrap=True, overflow="ellipsis", ratio=1)
    table.width = min(width, 200)
    for row in found:
        table.add_row(
            Text(row.slot),
            Text(row.state, STYLE.get(row.state, "bright_black")),
            *compress(_cells(row), [*shown, True]),
        )
    return table


def _cells(row: Row) -> list[Text]:
    values: Mapping[str, str | None] = {
        "pid": str(row.pid) if row.pid else None,
        "cpu": None if row.cpu is None else f"{row.cpu:.0%}",
        "rss": None if row.rss is None else size(row.rss),
        "own": None if row.own is None else size(row.own),
        "threads": None if row.threads is None else count(row.threads),
        "files": None if row.files is None else count(row.files),
        "progress": count(row.progress),
        "rate": None if row.rate is None else number(row.rate, ".1f"),
    }
    return [*(Text(value if value is not None else NOTHING) for value in values.values()), Text(clip(row.now, 120))]
