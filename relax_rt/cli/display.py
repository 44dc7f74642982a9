"""What commands print: tables and paragraphs for people, JSON for programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from relax_rt.cli.doctor.finding import Finding
from relax_rt.cli.ended import Ended
from relax_rt.cli.figures import Figures
from relax_rt.cli.incidents import Incident, above
from relax_rt.cli.lost_samples import show_losses, show_recent
from relax_rt.cli.why import Account
from relax_rt.config.job import PlanLine, TriedSample
from relax_rt.interfaces.agent import Diagnosis, RunStatus, SlotStatus
from relax_rt.observe.estimate import Estimate
from relax_rt.observe.text import NOTHING, clip, count, duration, lacks, waits
from relax_rt.transport.queue.ledger.messages import ProgressReport, describe_loss

TRACE_LINES, LOG_LINES = 15, 5
GIST, REASON = 80, 160
"""Characters of a cause where it is told in full elsewhere, and of the reason that stands in a headline."""
PIPE_WIDTH = 240
WIDE = 110
"""From this width on `ps` has room for all of its columns."""
HEAD_WIDTH = 12
PROMPT_STYLE, TRAINED_STYLE = "dim", "green"
STYLE = {
    "ready": "green",
    "alive": "green",
    "draining": "yellow",
    "drained": "yellow",
    "lost": "red",
    "fenced": "red",
    "starting": "yellow",
    "requested": "yellow",
    "backoff": "red",
    "hung": "bold red",
}
ALIVE = ("requested", "starting", "ready")
LEVEL = {"ok": "green", "warn": "yellow", "fail": "bold red"}
TONE = {"good": "green", "warning": "yellow", "error": "red"}


def console_for_output() -> Console:
    """Standard output; wide when it is no terminal, so that nothing is cut for a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def say(text: str) -> None:
    """Print plain text and flush: it may precede long work."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def show_json(value: Any) -> None:
    """Print structs and plain data as indented JSON; infinite numbers become null."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def show_json_line(value: Any) -> None:
    """Print one line of JSON."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def show_plan(lines: Sequence[PlanLine]) -> None:
    """Print a plan, a heading for each of its sections."""
    console = console_for_output()
    for section, members in groupby(lines, key=lambda line: line.section):
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        for line in members:
            table.add_row(Text(line.name), Text(line.value, "bold"), Text(line.how, "bright_black"))
        console.print(Text(section, "bold"))
        console.print(table)


def show_findings(findings: Sequence[Finding]) -> None:
    """Print what the doctor found: a line for each finding, with its advice below."""
    console = console_for_output()
    for section, members in groupby(findings, key=lambda finding: finding.section):
        console.print(Text(section, "bold"))
        for one in members:
            line = Text.assemble("  ", (f"{one.level:<5}", LEVEL[one.level]), f"{one.name:<16}  {one.value}")
            console.print(line, soft_wrap=True)
            if one.advice:
                console.print(Text(f"       {'':<16}  {one.advice}", LEVEL[one.level]), soft_wrap=True)
    counts = {level: sum(one.level == level for one in findings) for level in ("warn", "fail")}
    told = [f"{n} {level}" for level, n in counts.items() if n]
    console.print(Text(f"{len(findings)} checks, " + (", ".join(told) or "all ok"), "bold"))


def show_status(
    status: RunStatus,
    figures: Mapping[str, Figures],
    estimate: Estimate | None = None,
    report: ProgressReport | None = None,
    empty_steps: str = "",
    end: Ended | None = None,
) -> None:
    """Print the slots of a run, the time left, what it lost, and whether its newest steps trained nothing.

    Args:
        end: its result, if it has ended.
    """
    console = console_for_output()
    head = f"{status.name}  [bold]{escape(status.status)}[/]"
    if status.exit_code is None:
        head += f"  up {duration(status.uptime_s)}"
    if status.reason:
        head += f"  {escape(clip(status.reason, REASON))}"
    console.print(f"{head}  [bright_black]{escape(status.run_dir)}[/]")
    if estimate is not None:
        console.print(Text(f"step {estimate.step} / {estimate.steps}  {estimate.summary(status.uptime_s)}"))
    if status.diagnosis is not None:
        console.print(Text(f"  {status.diagnosis}", "red"))
    if status.first is not None:
        console.print(Text(f"  earlier, the first failure: {status.first}", "red"))
    for name, text in end.rows() if end is not None else ():
        console.print(Text.assemble("  ", (f"{name:<{HEAD_WIDTH}}", "bright_black"), text), soft_wrap=True)
    if empty_steps:
        console.print(Text(f"  {empty_steps}", "yellow"), soft_wrap=True)
    if report is not None:
        show_recent(console, report)
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
        cells = _row(slot, figures.get(slot.slot, Figures()))
        table.add_row(*(cells[column.title] for column in shown))
    print_table(console, table)
    having = {slot.kind for slot in status.slots}
    for role in status.roles:
        if role not in having:
            note = f"  0 slots; `relax-rt scale {role} N` gives it some"
            console.print(Text.assemble("role ", (role, "bold"), (note, "bright_black")))
    for node in status.nodes if len(status.nodes) > 1 else ():
        seen = f", last heard of {duration(node.seen_s)} ago" if node.seen_s >= 1 else ""
        has = f"  {node.cores} cores, {node.gpus} GPUs, {len(node.slots)} slots{seen}"
        state = (node.state, STYLE.get(node.state, ""))
        console.print(Text.assemble("node ", (node.node, "bold"), f"  {node.host}  ", state, (has, "bright_black")))


def print_table(console: Console, table: Table) -> None:
    """Print a table; to a file or pipe without trailing blanks."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    console.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


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


def _row(slot: SlotStatus, figures: Figures) -> dict[str, Text]:
    doing = slot.detail
    if slot.waiting:
        doing = slot.waiting if slot.state == "ended" else waits(slot.waiting)
    if slot.state not in ALIVE and slot.last is not None and slot.last.failed:
        doing = f"{slot.last.kind}: {slot.last.cause}"
    elif not doing and (missing := lacks(slot.state)):
        doing = waits(missing)
    if slot.given_up:
        doing = f"given up, the others go on: {doing}"
    ready_s = slot.state_s if slot.state == "ready" else None
    return {
        "slot": Text(slot.slot),
        "role": Text(slot.kind),
        "node": Text(slot.node or NOTHING),
        "state": Text(slot.state, STYLE.get(slot.state, "bright_black")),
        "pid": Text(str(slot.pid) if slot.pid else NOTHING),
        "epoch": Text(str(slot.epoch) if slot.epoch else NOTHING),
        "restarts": Text(str(slot.restarts), "yellow" if slot.restarts else ""),
        "ready": Text(duration(ready_s) if ready_s is not None else NOTHING),
        "ver": Text(str(figures.version) if figures.version else NOTHING),
        "lag": Text(_known(figures.lag), "yellow" if (figures.lag or 0) > 1 else ""),
        "stale": Text(_known(figures.staleness)),
        "progress": Text(count(slot.progress)),
        "depth": Text(_depth(figures)),
        "now": Text(clip(doing, 120), overflow="ellipsis"),
    }


def _known(value: int | None) -> str:
    return NOTHING if value is None else count(value)


def _depth(figures: Figures) -> str:
    """``96/128``; ``128/128 +16``: 16 above the bound."""
    depth, bound = figures.depth, figures.depth_bound
    if depth is None or bound is None:
        return _known(depth)
    beyond = f" +{count(depth - bound)}" if depth > bound else ""
    return f"{count(min(depth, bound))}/{count(bound)}{beyond}"


def show_why(found: Account, asked: str = "") -> None:
    """Print the account of a run; for one role, its last failure in full."""
    console = console_for_output()
    final = None if asked else found.final
    reason = found.reason if final is None else found.reason.removesuffix(f": {final.cause}")
    head = f"{found.name} is {found.status}" + (f": {clip(reason, REASON)}" if reason else "")
    console.print(Text(head, "bold"))
    if found.agent_died:
        _show_agent_death(console, found)
    elif found.first is None and found.final is None:
        who = f"{asked} has" if asked else "No role has"
        lost = ", but samples are lost" if found.losses else ""
        lost += ", but its newest steps trained nothing" if found.empty_steps and not lost else ""
        line = f"{who} {'not ' if asked else ''}failed since the run was started{lost}."
        console.print(Text(line, "yellow" if lost else "green"))
    first = None if asked or not _led_to_end(found) else found.first
    if final is not None:
        _show_diagnosis(console, "What ended the run", final)
    if first is not None:
        _show_diagnosis(console, "First failure", first)
    if found.empty_steps:
        console.print(Text("\nSteps that trained nothing", "bold"))
        console.print(Text(f"  {found.empty_steps}", "yellow"), soft_wrap=True)
    show_losses(console, found.losses, found.retired, found.workers)
    if not asked:
        _show_earlier(console, found)
    _show_incidents(console, found, [one for one in (final, first) if one is not None])
    if found.waiting:
        console.print(Text("\nWho waits for what", "bold"))
    for slot in found.waiting:
        console.print(Text(f"  {slot.slot}  {slot.state} for {duration(slot.state_s)}  {clip(slot.reason, REASON)}"))
    if found.notes:
        console.print(Text("\nWhat else happened", "bold"))
    if found.notes_left_out:
        console.print(Text(f"  ({found.notes_left_out} earlier left out)", "bright_black"))
    for note in found.notes:
        console.print(Text(f"  {_clock(note.t)}  {note.text}", TONE.get(note.tone, "")))


def _show_earlier(console: Console, found: Account) -> None:
    """Print how earlier starts ended, and what they lost."""
    if found.earlier:
        console.print(Text("\nEarlier starts of this run", "bold"))
    for one in found.earlier:
        began, ended = (
            NOTHING if t is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))
            for t in (one.began, one.ended)
        )
        line = f"  {began} to {ended}  {one.status}: {clip(one.reason, REASON)}"
        console.print(Text(line), soft_wrap=True)
        for loss in one.losses:
            console.print(Text(f"    lost: {describe_loss(loss)}", "yellow"), soft_wrap=True)


def _led_to_end(found: Account) -> bool:
    """Whether the first failure led to the end: not if it was recovered from and is another role's, or the same again.

    A run that has not ended has no more important failure.
    """
    first, final = found.first, found.final
    if first is None or final is None:
        return True
    if first.slot.partition("/")[0] == final.slot.partition("/")[0]:
        return first.cause != final.cause
    return any(death.slot == first.slot and not death.back for death in found.deaths)


def _show_incidents(console: Console, found: Account, told: Collection[Diagnosis]) -> None:
    """Print the slots that failed, each failure as a line, and the last one in full; what was printed before is
    shortened."""
    if found.deaths:
        console.print(Text("\nFailed and restarted", "bold"))
    for death in found.deaths:
        times = "once" if death.failures == 1 else f"{death.failures} times"
        state = f"back, away for {duration(death.away_s)} in all" if death.back else "not back"
        last = f"{death.last.kind}: {'as told above' if _is_told(death.last, told) else clip(death.last.cause, GIST)}"
        console.print(Text(f"  {death.slot}  {times}, {state}; last: {last}"), soft_wrap=True)
    if len(found.incidents) > 1:
        console.print(Text("\nEach failure", "bold"))
        if found.incidents_left_out:
            console.print(Text(f"  ({found.incidents_left_out} earlier left out)", "bright_black"))
        for same in _repeated(found.incidents):
            final = same[-1]
            again = f"{len(same)} times until {_clock(final.at)}, the last: " if len(same) > 1 else ""
            line = f"  {_clock(same[0].at)}  {again}{final.line(told=_is_told(final.diagnosis, told))}"
            console.print(Text(line), soft_wrap=True)
    if found.incidents:
        ended = [incident for incident in found.incidents if incident.diagnosis == found.final]
        newest = [*found.incidents, *ended][-1]
        _show_incident(console, newest, told=_is_told(newest.diagnosis, told))


def _is_told(diagnosis: Diagnosis, told: Collection[Diagnosis]) -> bool:
    return any((one.slot, one.kind, one.cause) == (diagnosis.slot, diagnosis.kind, diagnosis.cause) for one in told)


def _repeated(incidents: Sequence[Incident]) -> list[list[Incident]]:
    """Group failures of one slot with the same cause; external kills are never the same."""
    found: dict[object, list[Incident]] = {}
    for incident in incidents:
        one = incident.diagnosis
        alone = incident.fault is not None or one.kind == "killed"
        found.setdefault(id(incident) if alone else (one.slot, one.kind, one.cause), []).append(incident)
    return list(found.values())


def _show_incident(console: Console, incident: Incident, *, told: bool) -> None:
    """Print one failure and what followed from it."""
    console.print(Text(f"\nLast failure: {incident.slots[0]}", "bold"))
    rows: list[tuple[str, str]] = [("cause", str(incident.fault))] if incident.fault else []
    rows += [("seen", line) for line in incident.before]
    rows.append((_clock(incident.at), above(incident.diagnosis) if told else f"{incident.diagnosis}"))
    rows += [("with it", ", ".join(incident.slots[1:]))] if incident.slots[1:] else []
    rows += [("policy", line) for line in incident.policy] or [("policy", "not restarted")]
    rows += [("affected", line) for line in incident.affected] or [("affected", "no sample, as far as the log tells")]
    rows += [("", line) for line in incident.doubts()]
    if incident.away_s is None:
        rows.append(("since then", "not back"))
    else:
        rows.append((_clock(incident.at + incident.away_s), f"ready again, after {duration(incident.away_s)}"))
    if incident.first_work_s is not None:
        rows.append(("first work", f"after {duration(incident.first_work_s)}: {incident.work}"))
    said = ""
    for name, text in rows:
        console.print(Text.assemble("  ", (f"{'' if name == said else name:<{HEAD_WIDTH}}", "bright_black"), text))
        said = name


def _show_agent_death(console: Console, found: Account) -> None:
    console.print(Text("\nThe node agent died, and its roles ended with it", "bold"))
    console.print(Text(f"  {found.agent_died}", "red"))
    if found.last_event is not None:
        console.print(Text(f"  the last event is of {_clock(found.last_event)}", "bright_black"))
    told = "`relax-rt up` resumes it from its newest checkpoint; payloads that no checkpoint covers are made again"
    console.print(Text(f"  {told}"))


def show_samples(samples: Sequence[TriedSample]) -> None:
    """Print samples: the prompt dim, trained tokens green."""
    console = console_for_output()
    if samples:
        first = samples[0]
        made = f"  step {first.step}" if first.step is not None else ""
        console.print(Text(f"model {first.model}{made}  temperature {first.temperature:g}", "bold"))
    for sample in samples:
        console.print()
        for name, value in _sample_rows(sample):
            # One write a row: a grid would cut lines that are copied, and wrap a prompt away from its own newlines.
            lines = value.split("\n", allow_blank=True)
            for number, line in enumerate(lines):
                head = Text(f"{'' if number else name:<{HEAD_WIDTH}}", "bright_black")
                console.print(head + line, soft_wrap=True)


def _sample_rows(sample: TriedSample) -> Iterator[tuple[str, Text]]:
    start = len(sample.loss_mask) - sum(sample.loss_mask)
    about = [_origin(sample), f"item {sample.item}" if sample.item else ""]
    yield "sample", Text("  ".join(part for part in about if part), "bold")
    yield "prompt", Text(visible(sample.prompt), PROMPT_STYLE)
    yield "completion", Text(visible(sample.completion), TRAINED_STYLE)
    yield (
        "tokens",
        Text.assemble(
            (_spaced(sample.tokens[:start]), PROMPT_STYLE), " | ", (_spaced(sample.tokens[start:]), TRAINED_STYLE)
        ),
    )
    lengths = f"{start} of the prompt, {len(sample.tokens) - start} sampled and trained on"
    yield "loss mask", Text.assemble(runs_of(sample.loss_mask), (f"  {lengths}", "bright_black"))
    ended = f" at {visible(sample.stop_token)}" if sample.stop_token else ""
    yield (
        "finish",
        Text.assemble(f"{sample.finish_reason}{ended}", (f"  {sample.note}" if sample.note else "", "yellow")),
    )
    yield "logprob", Text.assemble(f"{sample.mean_logprob:.4f}", ("  mean of the sampled tokens", "bright_black"))
    if sample.answer is not None:
        yield "answer", Text(visible(sample.answer))
    if sample.reward is None:
        yield "reward", Text(f"none: {sample.unscored}", "yellow")
    else:
        parts = "  ".join(f"{name} {value:g}" for name, value in sample.rewards.items() if name != "reward")
        yield "reward", Text.assemble((f"{sample.reward:g}", "bold"), (f"  {parts}" if parts else "", "bright_black"))


def _origin(sample: TriedSample) -> str:
    if sample.split == "own":
        return f"own prompt {sample.index}"
    return f"{'held-out' if sample.split == 'held_out' else 'training'} prompt {sample.index}"


def _spaced(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def runs_of(mask: Sequence[int]) -> str:
    """A mask as runs: `0x31 1x3` is 31 zeros, then 3 ones."""
    return " ".join(f"{value}x{len(list(members))}" for value, members in groupby(mask))


def visible(text: str) -> str:
    """Text with control characters but newlines escaped: a model's output could move the terminal's cursor."""
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _show_diagnosis(console: Console, title: str, diagnosis: Diagnosis) -> None:
    console.print(Text(f"\n{title}", "bold"))
    console.print(Text(f"  {_clock(diagnosis.at)}  {diagnosis}", "red"))
    for line in diagnosis.evidence(TRACE_LINES, LOG_LINES):
        console.print(Text(f"    {line}", "bright_black"))


def _clock(t: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(t))
