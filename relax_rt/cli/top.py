"""`relax-rt top`: CPU, memory and rate of progress of each slot, from two samples of its processes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Annotated

import msgspec
import psutil  # type: ignore[import-untyped]
from cyclopts import Parameter
from rich.live import Live
from rich.table import Table
from rich.text import Text

from relax_rt.cli.app import OK, Json, Run
from relax_rt.cli.display import STATE_STYLE, console_for_output, print_table, show_json
from relax_rt.cli.runs import find_run_dir
from relax_rt.config.problems import BadInput
from relax_rt.interfaces.agent import RunStatus
from relax_rt.observe.text import NOTHING, byte_size, clip, count, duration, number, pending_on, waits
from relax_rt.supervision import control

MAX_CHILDREN = 256
MAX_SAMPLES_ONCE = 10
"""Samples taken for a single frame at most, until every busy slot has made progress."""
WIDTHS = {"threads": 100, "files": 100, "own": 90, "pid": 75, "rss": 60}
"""Columns that narrower terminals leave out."""
AGENT = "the node agent and its zygotes"


class ProcessUsage(msgspec.Struct, frozen=True):
    """One process and its descendants at one moment.

    Attributes:
        pid: of the process; cpu_s: processor time of all of them since they began.
        rss, own: resident bytes, and those of them that are private (no shared memory, no file).
    """

    pid: int
    cpu_s: float
    rss: int
    own: int
    threads: int
    files: int
    processes: int


class UsageSample(msgspec.Struct, frozen=True):
    """All of a run at one moment (monotonic s)."""

    at: float
    status: RunStatus
    uses: dict[str, ProcessUsage]


class TopRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line: a slot, or the agent. None: unknown, as the process has ended or is on another node.

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


class ProgressRates:
    """Rates of the slots' progress counters, each over the time between its last two changes."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int, int, float]] = {}
        self._last: dict[str, tuple[int, float]] = {}

    def update(self, sample: UsageSample) -> None:
        for slot in sample.status.slots:
            pid, epoch, progress, at = self._known.get(slot.slot, (0, 0, 0, 0.0))
            if not slot.pid or (pid, epoch) != (slot.pid, slot.epoch) or slot.progress < progress:
                self._last.pop(slot.slot, None)
            elif slot.progress > progress:
                self._last[slot.slot] = slot.progress - progress, max(1e-6, sample.at - at)
            else:
                continue
            self._known[slot.slot] = (slot.pid, slot.epoch, slot.progress, sample.at)

    def rate(self, slot: str, now: float) -> float | None:
        """Units a second; None until the counter has changed. It falls while the counter stands still for long."""
        if slot not in self._last:
            return None
        units, interval_s = self._last[slot]
        since_s = now - self._known[slot][3]
        return units / (interval_s if since_s <= 2 * interval_s else since_s)

    def unknown(self, sample: UsageSample) -> bool:
        """Whether the rate of a busy slot is not known yet."""
        busy = [s for s in sample.status.slots if s.state == "ready" and s.pid and s.progress and not s.waiting]
        return any(self.rate(slot.slot, sample.at) is None for slot in busy)


def take_sample(run_dir: Path) -> UsageSample:
    """Get the status of the run, then the usage of its processes on this machine."""
    status = control.status(run_dir)
    here = status.nodes[0].node if status.nodes else ""
    pids = {slot.slot: slot.pid for slot in status.slots if slot.pid and slot.node in ("", here)}
    if status.agent_pid:
        pids["agent"] = status.agent_pid
    roles = set(pids.values())
    found = {name: use for name, pid in pids.items() if (use := _use(pid, roles)) is not None}
    return UsageSample(time.monotonic(), status, found)


def rows(before: UsageSample, after: UsageSample, rates: ProgressRates) -> list[TopRow]:
    """The usage between two samples, and the rates of progress known so far."""
    passed = max(1e-6, after.at - before.at)
    found = []
    for slot in after.status.slots:
        waiting = slot.waiting or ("" if slot.detail else pending_on(slot.state))
        doing = waits(waiting) if waiting else slot.detail
        rate = rates.rate(slot.slot, after.at)
        more = {"node": slot.node, "progress": slot.progress, "rate": rate, "now": doing}
        found.append(_row(slot.slot, slot.state, before, after, passed, more))
    if after.status.agent_pid:
        found.append(_row("agent", after.status.status, before, after, passed, {"now": AGENT}))
    return found


def top(
    run: Run = None,
    *,
    every: Annotated[float, Parameter(help="Seconds between two samples.")] = 1.0,
    once: Annotated[bool, Parameter(help="Print one frame and return.")] = False,
    json: Json = False,
) -> int:
    """Show CPU, memory and rate of progress of each slot."""
    if not 0.05 <= every <= 3600:
        raise BadInput(f"--every {every:g}", why="it must lie between 0.05 and 3600 seconds")
    show_top(find_run_dir(run), every_s=every, once=once, as_json=json)
    return OK


def show_top(run_dir: Path, *, every_s: float, once: bool, as_json: bool) -> None:
    """Print one frame, or show them until the run ends or Ctrl-C.

    Raises:
        NoRun: there is no live run.
    """
    rates = ProgressRates()

    def next_sample() -> UsageSample:
        sample = take_sample(run_dir)
        rates.update(sample)
        return sample

    before = next_sample()
    if before.status.ended:
        why = f"it is over: {before.status.status}" + (f", {before.status.reason}" if before.status.reason else "")
        raise control.NoRun(f"no live run in {run_dir}", why=why, hint="`relax-rt why` explains its end")
    time.sleep(every_s)
    after = next_sample()
    console = console_for_output()
    if once or as_json or not console.is_terminal:
        for _ in range(MAX_SAMPLES_ONCE - 2):
            if after.status.ended or not rates.unknown(after):
                break
            time.sleep(every_s)
            after = next_sample()
        found = rows(before, after, rates)
        show_json(found) if as_json else print_table(console, _table(after.status, found, console.width))
        return
    try:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while not after.status.ended:
                live.update(_table(after.status, rows(before, after, rates), console.width), refresh=True)
                time.sleep(every_s)
                before, after = after, next_sample()
    except KeyboardInterrupt:
        pass


def _use(pid: int, roles: set[int]) -> ProcessUsage | None:
    """Usage of a process and its descendants, without those that are slots of their own."""
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
    return ProcessUsage(pid, cpu_s, rss, own, threads, files, processes) if processes else None


def _descendants(process: psutil.Process, roles: set[int]) -> Sequence[psutil.Process]:
    found = []
    for child in process.children():
        if child.pid not in roles:
            found += [child, *_descendants(child, roles)]
    return found


def _row(
    slot: str, state: str, before: UsageSample, after: UsageSample, passed: float, more: Mapping[str, object]
) -> TopRow:
    use, was = after.uses.get(slot), before.uses.get(slot)
    known: dict[str, object] = {"slot": slot, "state": state, **more}
    if use is not None:
        cpu = max(0.0, use.cpu_s - was.cpu_s) / passed if was is not None and was.pid == use.pid else None
        known |= {"cpu": cpu, **{k: v for k, v in msgspec.structs.asdict(use).items() if k != "cpu_s"}}
    return msgspec.convert(known, TopRow)


def _table(status: RunStatus, found: Sequence[TopRow], width: int) -> Table:
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
            Text(row.state, STATE_STYLE.get(row.state, "bright_black")),
            *compress(_cells(row), [*shown, True]),
        )
    return table


def _cells(row: TopRow) -> list[Text]:
    values: Mapping[str, str | None] = {
        "pid": str(row.pid) if row.pid else None,
        "cpu": None if row.cpu is None else f"{row.cpu:.0%}",
        "rss": None if row.rss is None else byte_size(row.rss),
        "own": None if row.own is None else byte_size(row.own),
        "threads": None if row.threads is None else count(row.threads),
        "files": None if row.files is None else count(row.files),
        "progress": count(row.progress),
        "rate": None if row.rate is None else number(row.rate, ".1f"),
    }
    return [*(Text(value if value is not None else NOTHING) for value in values.values()), Text(clip(row.now, 120))]
