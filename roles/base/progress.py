"""What roles do about lost work: skip retired items, and end a run that makes no progress.

The queue counts the losses (transport/queue/ledger/failures.py); the job says which setting helps against one.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from relax_rt.config.job import advice
from relax_rt.config.schema import RunConfig
from relax_rt.transport.queue.client import QueueClient
from relax_rt.transport.queue.ledger.messages import ProgressReport, Ticket, describe_cause
from relax_rt.transport.rpc.errors import GivenUp

SHOWN = 3
"""Causes that the end of a run names."""


class NoProgress(GivenUp):
    """Groups fail one after the other, and none is trained: the run ends."""


async def without_retired(queue: QueueClient, tickets: list[Ticket], item: Callable[[Ticket], str]) -> list[Ticket]:
    """Return the tickets whose items are not retired; skip the others."""
    retired = [ticket.group for ticket in tickets if queue.retired and item(ticket) in queue.retired]
    if retired:
        await queue.skip_groups(retired)
    return [ticket for ticket in tickets if ticket.group not in retired]


def no_progress(config: RunConfig, report: ProgressReport) -> NoProgress:
    """Return the error that ends the run, with the causes and the settings that would help.

    It names no numbers of samples: some are lost until the last role has ended.
    """
    what = f"{report.failed_groups} groups of {report.prompts} or more prompts failed in a row, and none was trained"
    causes = "; ".join(describe_cause(loss) for loss in report.losses[:SHOWN])
    left = len(report.losses) - SHOWN
    if left > 0:
        causes += f"; and {left} further causes"
    hints = [advice(config, msgspec.structs.asdict(loss)) for loss in report.losses[:SHOWN]]
    hint = "; ".join(dict.fromkeys(hints)) or "see `relax-rt why`"
    again = "then the same `relax-rt up` again, which resumes the run with new counts"
    return NoProgress(what, why=causes, hint=f"{hint}; {again} (progress.failed_groups = {report.most})")
