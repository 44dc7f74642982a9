"""What a run lost, as its queue says or, once it has ended, its event log; and retired items taken back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from relax_rt.config.problems import BadInput, did_you_mean
from relax_rt.observe.events import read_events
from relax_rt.observe.losses import Losses
from relax_rt.supervision import control
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.queue.ledger.messages import ProgressReport
from relax_rt.transport.rpc.errors import RelaxError
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import Client, make_hello

ASK_TIMEOUT_S = 5.0
KEPT = "progress.kept_items"
MOST_NAMED = 8

T = TypeVar("T")


def progress_report(run_dir: Path) -> ProgressReport:
    """The account of the run's queue. Once the run has ended it is that of its event log, without a row of failures."""
    try:
        return _ask(run_dir, lambda queue: queue.progress())
    except RelaxError:
        found = Losses()
        for event in read_events(run_dir):
            found.take(event)
        return ProgressReport(losses=list(found.losses), retired=found.retired)


def reinstate(run_dir: Path, items: Sequence[str]) -> list[str]:
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
        _ask(run_dir, lambda queue: queue.reinstate(found))
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
        more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        raise BadInput(
            f"item {item!r} is ambiguous",
            why=f"{len(found)} retired items have this prefix: {', '.join(found[:MOST_NAMED])}{more}",
            hint="give more of the id",
        )
    if not found:
        named = f"retired are {', '.join(known[:MOST_NAMED])}" if known else "none is retired"
        raise BadInput(f"item {item!r} is not retired", hint=did_you_mean(item, known) or named)
    return found[0]


def _ask(run_dir: Path, question: Callable[[QueueApi], Awaitable[T]]) -> T:
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
