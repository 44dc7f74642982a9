"""Samples that a run lost and items that it retired: read from its queue, or from the event log once it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from relax_rt.config.problems import BadInput, did_you_mean
from relax_rt.observe.events import read_events
from relax_rt.observe.losses import Losses, ReportedLoss
from relax_rt.observe.text import clip
from relax_rt.supervision import control
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.queue.ledger.messages import ProgressReport, Retired, describe_loss, failure_summary
from relax_rt.transport.rpc.errors import RelaxError
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import Client, make_hello

ASK_TIMEOUT_S = 5.0
EXAMPLE = 400
KEPT = "progress.kept_items"
MAX_NAMED = 8

T = TypeVar("T")


def progress_report(run_dir: Path) -> ProgressReport:
    """The progress report of the run's queue; of an ended run, from its event log and without a row of failures."""
    try:
        return _ask_queue(run_dir, lambda queue: queue.progress())
    except RelaxError:
        found = Losses()
        for event in read_events(run_dir):
            found.take(event)
        return ProgressReport(losses=list(found.losses), retired=found.retired)


def reinstate_items(run_dir: Path, items: Sequence[str]) -> list[str]:
    """Have the queue of a living run try these items again.

    Args:
        items: ids, or prefixes of ids that no other retired item has.

    Returns:
        Their ids.

    Raises:
        BadInput: one is not retired or ambiguous, or the run has ended.
    """
    known = [one.item for one in progress_report(run_dir).retired]
    found = list(dict.fromkeys(_retired_item(item, known) for item in items))
    try:
        _ask_queue(run_dir, lambda queue: queue.reinstate(found))
    except RelaxError as error:
        hint = f"name the items in {KEPT} of roles.toml, and `relax-rt up` takes them back"
        raise BadInput("the run's queue cannot be asked", why=str(error), hint=hint) from error
    return found


def _retired_item(item: str, known: Sequence[str]) -> str:
    """Return the retired item with this id, or the only one with this prefix."""
    if item in known:
        return item
    found = [one for one in known if item and one.startswith(item)]
    if len(found) > 1:
        more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        raise BadInput(
            f"item {item!r} is ambiguous",
            why=f"{len(found)} retired items have this prefix: {', '.join(found[:MAX_NAMED])}{more}",
            hint="give more of the id",
        )
    if not found:
        named = f"retired are {', '.join(known[:MAX_NAMED])}" if known else "none is retired"
        raise BadInput(f"item {item!r} is not retired", hint=did_you_mean(item, known) or named)
    return found[0]


def _ask_queue(run_dir: Path, question: Callable[[QueueApi], Awaitable[T]]) -> T:
    status = control.status(run_dir)
    address = next((slot.address for slot in status.slots if slot.slot == "queue/0"), "")
    if status.ended or not address:
        raise RelaxError("the queue", why=f"the run is {status.status}")

    async def ask() -> T:
        client = Client(address, make_hello(status.run_id, Incarnation("cli/0", 0)))
        try:
            return await question(client.bind(QueueApi, timeout_s=ASK_TIMEOUT_S))
        finally:
            await client.close()

    return asyncio.run(ask())


def show_losses(console: Console, losses: Iterable[ReportedLoss], retired: Iterable[Retired], workers: str) -> None:
    """Print causes with their examples, then the retired items."""
    causes, items = list(losses), list(retired)
    if causes or workers:
        console.print(Text("\nWhat was lost", "bold"))
    for loss in causes:
        console.print(Text(f"  {describe_loss(loss)}", "red"), soft_wrap=True)
        if loss.item or loss.prompt >= 0:
            whose = f"item {loss.item} ({loss.about})" if loss.item else f"prompt {loss.prompt}"
            more = f": {clip(loss.example, EXAMPLE)}" if len(loss.example) > len(loss.cause) else ""
            console.print(Text(f"    e.g. {whose}{more}"), soft_wrap=True)
        if loss.hint:
            console.print(Text(f"    what helps: {loss.hint}", "yellow"), soft_wrap=True)
    if workers:
        console.print(Text(f"  {workers}", "red"), soft_wrap=True)
    show_retired(console, items)


def show_retired(console: Console, items: Iterable[Retired]) -> None:
    """Print the retired items; nothing if there are none."""
    found = list(items)
    if not found:
        return
    console.print(Text("\nRetired items", "bold"))
    for one in found:
        about = f" ({one.about})" if one.about else ""
        console.print(Text(f"  {one.item}{about}  {one.timeouts} whole groups: {one.reason}"), soft_wrap=True)
    hint = "  taken back by `relax-rt reinstate ITEM` while the run lives, or progress.kept_items at its next start"
    console.print(Text(hint, "bright_black"), soft_wrap=True)


def show_recent(console: Console, report: ProgressReport) -> None:
    """For `ps`: groups that failed in a row, the most frequent cause in a line, and how many items are retired."""
    if report.losses:
        row, cause = failure_summary(report), describe_loss(report.losses[0])
        console.print(Text(f"  lost: {row or cause}", "red" if row else "yellow"), soft_wrap=True)
    if report.retired:
        names = ", ".join(one.item for one in report.retired[:4])
        console.print(Text(f"  retired items: {len(report.retired)} ({names}); see `relax-rt retired`", "yellow"))
