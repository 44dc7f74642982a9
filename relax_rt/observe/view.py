"""The status screen as a rich renderable, made from a Board."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from relax_rt.observe.board import Board, SlotLike, StatusLike, clock_time
from relax_rt.observe.headline import SPARK, Headline, Value
from relax_rt.observe.text import NOTHING, clip, count, duration, lacks, sparkline, waits

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
TONE_STYLE = {"good": "green", "warning": "yellow", "error": "red"}


def render(board: Board, width: int, height: int) -> RenderableType:
    """The whole screen for a terminal of width x height characters."""
    inner = width - 2
    status = board.status
    now = board.clock()
    values = _rows(board.headline.values(now), inner)
    parts: list[RenderableType] = []
    if status is not None:
        parts.append(_title(status, inner))
    ending = status is not None and status.status not in ("starting", "running")
    uptime_s = 0.0 if status is None else status.uptime_s
    parts += [_progress(board.headline, now, inner, uptime_s, ending=ending), Text("")]
    parts += [_values(row) for row in values]
    if status is not None and status.slots:
        around = 6 + 2 * len(values) + (2 + len(board.notes) if board.notes else 0)
        parts += [Text(""), _slots(status.slots, board.headline.versions, inner, max(3, height - around))]
    if board.notes:
        parts += [Text(""), Rule(style="bright_black"), _notes(board, inner)]
    return Padding(Group(*parts), (0, 1))


def _title(status: StatusLike, width: int) -> Text:
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
    """Columns on as few lines as they need; sparklines get the room that is left on theirs."""
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


def _slots(slots: Sequence[SlotLike], versions: dict[str, int], width: int, room: int) -> RenderableType:
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


def _fold(slots: Sequence[SlotLike], room: int) -> list[list[SlotLike]]:
    """One row a slot; if they do not fit, the ready slots of a kind share a row, so that trouble stays in sight."""
    if len(slots) <= room:
        return [[slot] for slot in slots]
    rows: list[list[SlotLike]] = []
    for (_, ready), alike in groupby(slots, key=lambda s: (s.kind, s.state == "ready")):
        members = list(alike)
        rows += [members] if ready else [[slot] for slot in members]
    trouble = [row for row in rows if row[0].state != "ready"]
    healthy = [row for row in rows if row[0].state == "ready"]
    if len(rows) <= room:
        return rows
    keep = {id(row) for row in [*trouble, *healthy][: room - 1]}
    return [row for row in rows if id(row) in keep]


def _row(members: Sequence[SlotLike], versions: dict[str, int], wide: bool) -> list[Text]:
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
        _doing(members),
    ]


def _doing(members: Sequence[SlotLike]) -> Text:
    for slot in members:
        if slot.state not in ("ready", "starting", "requested") and slot.last is not None and slot.last.failed:
            return Text(clip(f"{slot.last.kind}: {slot.last.cause}", 200), "red")
    for slot in members:
        if slot.detail and not slot.waiting:
            return Text(clip(slot.detail, 200))
    waiting = next((reason for slot in members if (reason := slot.waiting or lacks(slot.state))), "")
    return Text(clip(waits(waiting), 200), "bright_black") if waiting else Text("")


def _notes(board: Board, width: int) -> RenderableType:
    lines = []
    for note in board.notes:
        text = clip(note.text, width - 10)
        lines.append(Text.assemble((clock_time(note.t), "bright_black"), "  ", (text, TONE_STYLE.get(note.tone, ""))))
    return Group(*lines)
