"""`relax-rt ps`: the slots of a run with their figures, its progress and time left, or its result."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from relax_rt.cli.app import OK, Json, Run
from relax_rt.cli.display import (
    LABEL_WIDTH,
    PIPE_WIDTH,
    REASON_WIDTH,
    STATE_STYLE,
    as_dict,
    choices,
    console_for_output,
    print_table,
    say,
    show_json,
)
from relax_rt.cli.headline import Headline
from relax_rt.cli.losses import print_loss_summary, progress_report
from relax_rt.cli.runs import find_run_dir, resolved_config
from relax_rt.cli.time_left import Estimate, estimate_of, read_ends
from relax_rt.config.job import load_job
from relax_rt.config.schema import Chosen
from relax_rt.interfaces.agent import RunStatus, SlotStatus
from relax_rt.interfaces.registry import Changes, RegistryApi
from relax_rt.observe.metrics import METRICS, Tail
from relax_rt.observe.text import NOTHING, clip, count, duration, pending_on, waits
from relax_rt.supervision import control
from relax_rt.supervision.rundir import read_run
from relax_rt.transport.base.versions import VersionRecord, VersionTree
from relax_rt.transport.queue.ledger.messages import ProgressReport
from relax_rt.transport.rpc.errors import RelaxError
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import RpcClient, make_hello

CALL_TIMEOUT_S = 1.0
LOOK_BACK_BYTES = 256 << 10
STEP_LOOK_BACK_BYTES = 2 << 20
"""The newest step record may stand far from the end: other roles write many records during a slow step."""
WIDE = 110
"""From this terminal width on there is room for most columns."""
ALIVE = ("requested", "starting", "ready")
RESULT_FILES = ("summary.json", "metrics.jsonl", "events/", "logs/", "checkpoints/", "plots/")


def ps(run: Run = None, *, json: Json = False) -> int:
    """Show the slots of a run."""
    run_dir = find_run_dir(run)
    status = control.status(run_dir)
    chosen = (read_run(run_dir) or {}).get("chosen") or {}
    figures = slot_figures(status)
    estimate = estimate_of(status) if status.status in ("starting", "running") else None
    result = run_result(run_dir) if status.ended else None
    if not json:
        show_status(status, figures, estimate, progress_report(run_dir), describe_empty_steps(run_dir), result)
        for line in choices({key: Chosen(**one) for key, one in chosen.items()}):
            say(line)
        return OK
    plain = as_dict(status)
    for slot in plain["slots"]:
        known = as_dict(figures.get(slot["slot"], SlotFigures()))
        slot.update({"policy_version": known.pop("version"), **known})
    plain["time"] = None
    if estimate is not None:
        plain["time"] = {**as_dict(estimate), "total_s": estimate.total_s(status.uptime_s)}
    plain["ended"] = as_dict(result) if result else None
    show_json({**plain, "empty_steps": empty_steps(run_dir), "chosen": chosen})
    return OK


# --- figures of each slot


class SlotFigures(msgspec.Struct, frozen=True):
    """Figures of one slot; None where it has none.

    Attributes:
        version: its policy version.
        lag: publications that it is behind: the distance from its version to the newest committed one.
        staleness: of a trainer, the largest among the samples of its last step.
        depth: its waiting work: samples outstanding, sequences admitted.
        depth_bound: upper bound of it.
    """

    version: int | None = None
    lag: int | None = None
    staleness: int | None = None
    depth: int | None = None
    depth_bound: int | None = None


def slot_figures(status: RunStatus) -> dict[str, SlotFigures]:
    """The figures of every live slot that has any. What cannot be read is left out."""
    changes, records = _read_registry(status)
    return compute_figures(status, changes, records, newest_records(_metrics(Path(status.run_dir))))


class EmptyStepsReport(msgspec.Struct, frozen=True):
    """The newest steps of a run, which trained nothing: their count, the newest one, and why."""

    count: int
    step: int
    why: str


def empty_steps(run_dir: Path) -> EmptyStepsReport | None:
    """Return the newest steps if they trained nothing, by the record of the newest one; None if it trained."""
    steps = [record for record in _metrics(run_dir, STEP_LOOK_BACK_BYTES) if record.get("kind") == "step"]
    if not steps or not (why := steps[-1].get("empty_reason")):
        return None
    return EmptyStepsReport(int(steps[-1].get("empty_steps", 0)), int(steps[-1].get("step", 0)), str(why))


def describe_empty_steps(run_dir: Path) -> str:
    """Say why the newest steps of a run trained nothing; empty if the newest one trained."""
    found = empty_steps(run_dir)
    if found is None:
        return ""
    return f"the last {found.count} steps, up to step {found.step}, trained nothing: {found.why}"


def compute_figures(
    status: RunStatus,
    changes: Changes | None,
    versions: Sequence[VersionRecord],
    metrics: Mapping[tuple[str, str], Mapping[str, Any]],
) -> dict[str, SlotFigures]:
    """Compute the figures from what was read, as for `slot_figures`.

    Args:
        metrics: the newest record of each incarnation and kind of record.
    """
    members = {m.who.slot: m for m in changes.members if m.state != "gone"} if changes else {}
    tree = VersionTree(versions)
    found: dict[str, SlotFigures] = {}
    for slot in status.slots:
        version = slot.policy_version if slot.policy_version > 0 else None
        member = members.get(slot.slot)
        if member is not None and member.policy_version:
            version = member.policy_version
        lag: int | None = None
        committed = changes.committed if changes else None
        if version is not None and committed is not None and version in tree and committed.version in tree:
            lag = tree.distance(version, committed.version)
        stale: int | None = None
        depth: tuple[int | None, int | None] = (None, None)
        for (by, _), record in metrics.items():
            if by == f"{slot.slot}#{slot.epoch}":
                values = record.get("staleness")
                numbers = [v for v in (values if isinstance(values, list) else [values]) if isinstance(v, int)]
                stale = max(numbers, default=stale)
                depth = _depth(record, depth)
        one = SlotFigures(version, lag, stale, *depth)
        if one != SlotFigures():
            found[slot.slot] = one
    return found


def newest_records(records: Iterable[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The newest record of each incarnation and kind of record."""
    return {(str(record.get("by", "")), str(record.get("kind", ""))): record for record in records}


def _metrics(run_dir: Path, last_bytes: int = LOOK_BACK_BYTES) -> list[dict[str, Any]]:
    tail = Tail(run_dir / METRICS, last_bytes=last_bytes, read_bytes=2 * last_bytes)
    try:
        return tail.poll()
    finally:
        tail.close()


def _depth(record: Mapping[str, Any], otherwise: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    bound = record.get("bound")
    most = int(bound) if isinstance(bound, int | float) and math.isfinite(bound) else None
    for keys in (("depth",), ("outstanding",), ("running", "waiting")):
        known = [record.get(key) for key in keys]
        if all(isinstance(value, int) for value in known):
            return sum(value for value in known if isinstance(value, int)), most
    return otherwise


def _read_registry(status: RunStatus) -> tuple[Changes | None, list[VersionRecord]]:
    address = next((slot.address for slot in status.slots if slot.slot == "registry/0"), "")
    if not address:
        return None, []

    async def read() -> tuple[Changes, list[VersionRecord]]:
        client = RpcClient(address, make_hello(status.run_id, Incarnation("cli/0", 0)))
        try:
            registry = client.bind(RegistryApi, timeout_s=CALL_TIMEOUT_S)
            return await registry.watch(0, 0.0), await registry.versions()
        finally:
            await client.close()

    try:
        return asyncio.run(read())
    except RelaxError:
        return None, []


# --- the result of a run that has ended


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a run that has ended; what is not known is None or empty.

    Attributes:
        ended_at: wall-clock time (s). ran_s: duration of its last start.
        step, steps: the last step that was done, and the number to do.
        resumes_at: step of the checkpoint that `up` continues from; 0: there is none.
        evaluation: the newest evaluation, as a line.
        files: what is in its directory.
    """

    ended_at: float | None = None
    ran_s: float | None = None
    step: int | None = None
    steps: int | None = None
    resumes_at: int | None = None
    evaluation: str = ""
    files: list[str] = []

    def rows(self) -> list[tuple[str, str]]:
        """Return the lines that `ps` prints, as pairs of a name and a text."""
        found = []
        if self.ended_at is not None:
            ran = f", after {duration(self.ran_s)}" if self.ran_s is not None else ""
            ago = duration(max(0.0, time.time() - self.ended_at))
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.ended_at))
            found.append(("ended", f"{at} ({ago} ago){ran}"))
        if self.steps is not None:
            resumes = ""
            if self.resumes_at is not None and self.resumes_at < self.steps:
                step = self.resumes_at
                start = f"the checkpoint of step {step}" if step else "the beginning: there is no checkpoint"
                resumes = f"; `relax-rt up` resumes from {start}"
            found.append(("steps", f"{self.step or 0} of {self.steps}{resumes}"))
        if self.evaluation:
            found.append(("evaluated", self.evaluation))
        if self.files:
            found.append(("files", ", ".join(self.files)))
        return found


def run_result(run_dir: Path) -> RunResult:
    """Read the result of a run from its directory."""
    run = read_run(run_dir) or {}
    at, began = run.get("ended_at"), run.get("started_at")
    ended_at = at if isinstance(at, float) else None
    ran_s = ended_at - began if ended_at is not None and isinstance(began, float) else None
    known: dict[str, Any] = {}
    with suppress(RelaxError):
        config = resolved_config(run_dir)
        job = load_job(config.run.job)
        headline, lines = Headline(job.headline, job.steps(config)), list[str]()
        for record in read_ends(run_dir / METRICS):
            headline.update(record)
            lines = headline.lines(record) or lines
        known = {"step": headline.step, "steps": headline.target, "evaluation": lines[-1] if lines else ""}
        known["resumes_at"] = job.resumes_at(run_dir)
    files = [name for name in RESULT_FILES if (run_dir / name).exists()]
    return RunResult(ended_at=ended_at, ran_s=ran_s, files=files, **known)


# --- the table


def show_status(
    status: RunStatus,
    figures: Mapping[str, SlotFigures],
    estimate: Estimate | None = None,
    report: ProgressReport | None = None,
    empty_steps: str = "",
    result: RunResult | None = None,
) -> None:
    """Print the slots of a run, the time left, what it lost, and whether its newest steps trained nothing.

    Args:
        result: of a run that has ended.
    """
    console = console_for_output()
    head = f"{status.name}  [bold]{escape(status.status)}[/]"
    if status.exit_code is None:
        head += f"  up {duration(status.uptime_s)}"
    if status.reason:
        head += f"  {escape(clip(status.reason, REASON_WIDTH))}"
    console.print(f"{head}  [bright_black]{escape(status.run_dir)}[/]")
    if estimate is not None:
        console.print(Text(f"step {estimate.step} / {estimate.steps}  {estimate.summary(status.uptime_s)}"))
    if status.diagnosis is not None:
        console.print(Text(f"  {status.diagnosis}", "red"))
    if status.first is not None:
        console.print(Text(f"  earlier, the first failure: {status.first}", "red"))
    for name, text in result.rows() if result is not None else ():
        console.print(Text.assemble("  ", (f"{name:<{LABEL_WIDTH}}", "bright_black"), text), soft_wrap=True)
    if empty_steps:
        console.print(Text(f"  {empty_steps}", "yellow"), soft_wrap=True)
    if report is not None:
        print_loss_summary(console, report)
    if not status.slots:
        return
    several = any(slot.node for slot in status.slots)
    shown = [c for c in COLUMNS if console.width >= c.width and (several or c.title != "node")]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    if console.width < PIPE_WIDTH:
        table.width = console.width
    for column in shown:
        side: Literal["left", "right"] = "right" if column.number else "left"
        # The last column takes the room that is left.
        table.add_column(column.title, justify=side, no_wrap=True, ratio=1 if column is COLUMNS[-1] else None)
    for slot in status.slots:
        cells = _row(slot, figures.get(slot.slot, SlotFigures()))
        table.add_row(*(cells[column.title] for column in shown))
    print_table(console, table)
    kinds = {slot.kind for slot in status.slots}
    for role in status.roles:
        if role not in kinds:
            note = f"  0 slots; `relax-rt scale {role} N` gives it some"
            console.print(Text.assemble("role ", (role, "bold"), (note, "bright_black")))
    for node in status.nodes if len(status.nodes) > 1 else ():
        seen = f", last heard of {duration(node.seen_s)} ago" if node.seen_s >= 1 else ""
        has = f"  {node.cores} cores, {node.gpus} GPUs, {len(node.slots)} slots{seen}"
        state = (node.state, STATE_STYLE.get(node.state, ""))
        console.print(Text.assemble("node ", (node.node, "bold"), f"  {node.host}  ", state, (has, "bright_black")))


class _Column(NamedTuple):
    """width: terminal width from which on the column is shown."""

    title: str
    number: bool = False
    width: int = 0


COLUMNS = (
    _Column("slot"),
    _Column("role", width=150),
    _Column("node"),
    _Column("state"),
    _Column("pid", number=True),
    _Column("epoch", number=True, width=WIDE),
    _Column("restarts", number=True),
    _Column("ready", number=True),
    _Column("ver", number=True),
    _Column("lag", number=True, width=70),
    _Column("stale", number=True, width=WIDE),
    _Column("progress", number=True, width=WIDE),
    _Column("depth", number=True, width=WIDE),
    _Column("now"),
)


def _row(slot: SlotStatus, figures: SlotFigures) -> dict[str, Text]:
    doing = slot.detail
    if slot.waiting:
        doing = slot.waiting if slot.state == "ended" else waits(slot.waiting)
    if slot.state not in ALIVE and slot.last is not None and slot.last.failed:
        doing = f"{slot.last.kind}: {slot.last.cause}"
    elif not doing and (reason := pending_on(slot.state)):
        doing = waits(reason)
    if slot.given_up:
        doing = f"given up, the others go on: {doing}"
    ready_s = slot.state_s if slot.state == "ready" else None
    return {
        "slot": Text(slot.slot),
        "role": Text(slot.kind),
        "node": Text(slot.node or NOTHING),
        "state": Text(slot.state, STATE_STYLE.get(slot.state, "bright_black")),
        "pid": Text(str(slot.pid) if slot.pid else NOTHING),
        "epoch": Text(str(slot.epoch) if slot.epoch else NOTHING),
        "restarts": Text(str(slot.restarts), "yellow" if slot.restarts else ""),
        "ready": Text(duration(ready_s) if ready_s is not None else NOTHING),
        "ver": Text(str(figures.version) if figures.version else NOTHING),
        "lag": Text(_known(figures.lag), "yellow" if (figures.lag or 0) > 1 else ""),
        "stale": Text(_known(figures.staleness)),
        "progress": Text(count(slot.progress)),
        "depth": Text(_depth_text(figures)),
        "now": Text(clip(doing, 120), overflow="ellipsis"),
    }


def _known(value: int | None) -> str:
    return NOTHING if value is None else count(value)


def _depth_text(figures: SlotFigures) -> str:
    """``96/128``; ``128/128 +16``: 16 above the bound."""
    depth, bound = figures.depth, figures.depth_bound
    if depth is None or bound is None:
        return _known(depth)
    beyond = f" +{count(depth - bound)}" if depth > bound else ""
    return f"{count(min(depth, bound))}/{count(bound)}{beyond}"
