"""What a run lost of what it made, by cause, and the items that it retired: from its event log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from relax_rt.observe.text import clip
from relax_rt.transport.queue.api import Loss, ProgressReport, Retired, describe_loss, failure_summary

MAX_SHOWN = 12
EXAMPLE = 400


class ReportedLoss(Loss, frozen=True, kw_only=True):
    """Samples lost for one cause in this start of the run, as last reported: a few seconds ago while it runs, at its end once it has ended.

    Attributes:
        hint: the setting that helps.
    """

    hint: str = ""


class Losses:
    """Takes the events of a run, oldest first. Losses are of the newest start; retired items outlive a start."""

    def __init__(self) -> None:
        self._retired: dict[str, Retired] = {}
        self._begin()

    def _begin(self) -> None:
        self._losses: dict[tuple[str, str], ReportedLoss] = {}
        self.killed_workers = 0
        self.killed_because = ""

    def take(self, event: dict[str, Any]) -> None:
        """Take in one event of the log."""
        match event.get("kind"):
            case "run_started":
                self._begin()
            case "members_lost":
                key = (str(event.get("task", "")), str(event.get("gist", "")))
                self._losses[key] = _read(event, ReportedLoss)
            case "item_retired":
                self._retired[str(event.get("item", ""))] = _read(event, Retired)
            case "item_reinstated":
                self._retired.pop(str(event.get("item", "")), None)
            case "reward_worker_lost":
                self.killed_workers += 1
                self.killed_because = str(event.get("reason", ""))

    @property
    def workers(self) -> str:
        """How many reward workers were killed, and why the last one; empty if none was."""
        if not self.killed_workers:
            return ""
        return f"{self.killed_workers} reward workers were killed; the last: {self.killed_because}"

    @property
    def losses(self) -> list[ReportedLoss]:
        """The most frequent causes first."""
        return sorted(self._losses.values(), key=lambda loss: -loss.members)[:MAX_SHOWN]

    @property
    def retired(self) -> list[Retired]:
        """In the order in which they were retired."""
        return list(self._retired.values())


def _read(event: dict[str, Any], kind: type[Any]) -> Any:
    known = {name: event[name] for name in kind.__struct_fields__ if name in event}
    return msgspec.convert(known, kind, strict=False)


def show_losses(console: Console, losses: Iterable[ReportedLoss], retired: Iterable[Retired], workers: str) -> None:
    """Print causes with their examples, then the retired items."""
    causes, items = list(losses), list(retired)
    if causes or workers:
        console.print(Text("\nWhat was lost", "bold"))
    for loss in causes:
        console.print(Text(f"  {describe_loss(loss)}", "red"), soft_wrap=True)
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
    told = "  taken back by `relax-rt reinstate ITEM` while the run lives, or progress.kept_items at its next start"
    console.print(Text(told, "bright_black"), soft_wrap=True)


def show_recent(console: Console, report: ProgressReport) -> None:
    """For `ps`: groups that failed in a row, the most frequent cause in a line, and how many items are retired."""
    if report.losses:
        row, cause = failure_summary(report), describe_loss(report.losses[0])
        console.print(Text(f"  lost: {row or cause}", "red" if row else "yellow"), soft_wrap=True)
    if report.retired:
        names = ", ".join(one.item for one in report.retired[:4])
        console.print(Text(f"  retired items: {len(report.retired)} ({names}); see `relax-rt retired`", "yellow"))
