"""How losses and retired items are printed."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from relax_rt.observe.losses import ReportedLoss
from relax_rt.observe.text import clip
from relax_rt.transport.queue.ledger.messages import ProgressReport, Retired, describe_loss, failure_summary

EXAMPLE = 400


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
