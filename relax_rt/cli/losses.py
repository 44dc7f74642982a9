"""Samples that a run lost and data items that it retired; the commands retired and reinstate.

Both are read from the queue of a live run, or from the event log once it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from relax_rt.cli.app import OK, Json, Run
from relax_rt.cli.display import console_for_output, say, show_json
from relax_rt.cli.runs import find_run_dir
from relax_rt.config.problems import BadInput, did_you_mean
from relax_rt.observe.events import read_events
from relax_rt.observe.losses import Losses, ReportedLoss
from relax_rt.observe.text import clip
from relax_rt.supervision import control
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.queue.ledger.messages import ProgressReport, Retired, describe_loss, failure_summary
from relax_rt.transport.rpc.errors import RelaxError
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import RpcClient, make_hello

CALL_TIMEOUT_S = 5.0
EXAMPLE_WIDTH = 400
MAX_NAMED = 8

T = TypeVar("T")


def retired(run: Run = None, *, json: Json = False) -> int:
    """List the retired data items of a run."""
    items = progress_report(find_run_dir(run)).retired
    if json:
        show_json(items)
    elif items:
        print_retired(console_for_output(), items)
    else:
        say("no item is retired")
    return OK


def reinstate(
    items: Annotated[list[str], Parameter(help="Ids of retired items as `relax-rt retired` lists them, or prefixes.")],
    *,
    run: Run = None,
    json: Json = False,
) -> int:
    """Sample retired items again in a live run."""
    found = reinstate_items(find_run_dir(run), items)
    text = f"reinstated: {', '.join(found)}"
    show_json({"did": text, "slots": []}) if json else say(text)
    return OK


def progress_report(run_dir: Path) -> ProgressReport:
    """The progress report of the queue; of an ended run from its event log, without the failures in a row."""
    try:
        return _call_queue(run_dir, lambda queue: queue.progress())
    except RelaxError:
        losses = Losses()
        for event in read_events(run_dir):
            losses.update(event)
        return ProgressReport(losses=list(losses.losses), retired=losses.retired)


def reinstate_items(run_dir: Path, items: Sequence[str]) -> list[str]:
    """Have the queue of a live run sample these items again.

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
        _call_queue(run_dir, lambda queue: queue.reinstate(found))
    except RelaxError as error:
        hint = "name the items in progress.kept_items of roles.toml, and `relax-rt up` samples them again"
        raise BadInput("the run's queue cannot be reached", why=str(error), hint=hint) from error
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


def _call_queue(run_dir: Path, call: Callable[[QueueApi], Awaitable[T]]) -> T:
    status = control.status(run_dir)
    address = next((slot.address for slot in status.slots if slot.slot == "queue/0"), "")
    if status.ended or not address:
        raise RelaxError("the queue", why=f"the run is {status.status}")

    async def run() -> T:
        client = RpcClient(address, make_hello(status.run_id, Incarnation("cli/0", 0)))
        try:
            return await call(client.bind(QueueApi, timeout_s=CALL_TIMEOUT_S))
        finally:
            await client.close()

    return asyncio.run(run())


def print_losses(console: Console, losses: Iterable[ReportedLoss], retired: Iterable[Retired], workers: str) -> None:
    """Print causes with their examples, then the retired items."""
    causes, items = list(losses), list(retired)
    if causes or workers:
        console.print(Text("\nLost samples", "bold"))
    for loss in causes:
        console.print(Text(f"  {describe_loss(loss)}", "red"), soft_wrap=True)
        if loss.item or loss.prompt >= 0:
            whose = f"item {loss.item} ({loss.about})" if loss.item else f"prompt {loss.prompt}"
            more = f": {clip(loss.example, EXAMPLE_WIDTH)}" if len(loss.example) > len(loss.cause) else ""
            console.print(Text(f"    e.g. {whose}{more}"), soft_wrap=True)
        if loss.hint:
            console.print(Text(f"    hint: {loss.hint}", "yellow"), soft_wrap=True)
    if workers:
        console.print(Text(f"  {workers}", "red"), soft_wrap=True)
    print_retired(console, items)


def print_retired(console: Console, items: Iterable[Retired]) -> None:
    """Print the retired items; nothing if there are none."""
    if not (found := list(items)):
        return
    console.print(Text("\nRetired items", "bold"))
    for one in found:
        about = f" ({one.about})" if one.about else ""
        console.print(Text(f"  {one.item}{about}  {one.timeouts} whole groups: {one.reason}"), soft_wrap=True)
    hint = "  undo: `relax-rt reinstate ITEM` while the run is live, or progress.kept_items at its next start"
    console.print(Text(hint, "bright_black"), soft_wrap=True)


def print_loss_summary(console: Console, report: ProgressReport) -> None:
    """Print the failures in a row or the most frequent cause of losses, and how many items are retired; for `ps`."""
    if report.losses:
        row, cause = failure_summary(report), describe_loss(report.losses[0])
        console.print(Text(f"  lost: {row or cause}", "red" if row else "yellow"), soft_wrap=True)
    if report.retired:
        names = ", ".join(one.item for one in report.retired[:4])
        console.print(Text(f"  retired items: {len(report.retired)} ({names}); see `relax-rt retired`", "yellow"))
