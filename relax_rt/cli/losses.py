"""What a run lost of what it made, by cause, and the items that it retired: from its event log."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from relax_rt.events import CURRENT
from relax_rt.observe.tail import Tail
from relax_rt.observe.text import clip, count

MAX_SHOWN = 12
EXAMPLE = 400
LOOK_BACK_BYTES = 1 << 20


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """Samples lost for one cause in this start of the run, as last reported (at most 5 s behind).

    Attributes:
        task: at which they failed; empty: they could not be made.
        cause, where, example, prompt: the newest reason, the `file:line` in it, more of it, whose it is.
        members, groups, prompts: how many; different prompts are counted up to 8.
        hint: the setting that helps.
        t: wall-clock time of the report (s).
    """

    task: str = ""
    cause: str = ""
    where: str = ""
    example: str = ""
    prompt: int = -1
    members: int = 0
    groups: int = 0
    prompts: int = 0
    hint: str = ""
    t: float = 0.0

    def line(self) -> str:
        """How much was lost, where, and of what."""
        what = f"at task {self.task}" if self.task else "while they were made"
        of = f"{self.prompts} prompts" if self.prompts < 8 else "8 or more prompts"
        return f"{count(self.members)} samples of {count(self.groups)} groups ({of}) failed {what}: {self.cause}"


class RetiredItem(msgspec.Struct, frozen=True, kw_only=True):
    """A data item that is not tried again."""

    item: str = ""
    about: str = ""
    task: str = ""
    reason: str = ""
    timeouts: int = 0


class Losses:
    """Takes the events of a run, oldest first. Losses are of the newest start; retired items outlive a start."""

    def __init__(self) -> None:
        self._retired: dict[str, RetiredItem] = {}
        self._begin()

    def _begin(self) -> None:
        self._losses: dict[tuple[str, str], Loss] = {}
        self.failed_groups = self.most = 0
        """Groups that failed in a row when a loss was last reported, and how many end the run."""
        self.killed_workers = 0
        self.killed_because = ""

    def take(self, event: dict[str, Any]) -> None:
        """Take in one event of the log."""
        match event.get("kind"):
            case "run_started":
                self._begin()
            case "members_lost":
                key = (str(event.get("task", "")), str(event.get("gist", "")))
                self._losses[key] = _read(event, Loss)
                self.failed_groups, self.most = int(event.get("failed_groups") or 0), int(event.get("most") or 0)
            case "item_retired":
                self._retired[str(event.get("item", ""))] = _read(event, RetiredItem)
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
    def losses(self) -> list[Loss]:
        """The most frequent causes first."""
        return sorted(self._losses.values(), key=lambda loss: -loss.members)[:MAX_SHOWN]

    @property
    def retired(self) -> list[RetiredItem]:
        """In the order in which they were retired."""
        return list(self._retired.values())


def _read(event: dict[str, Any], kind: type[Any]) -> Any:
    known = {name: event[name] for name in kind.__struct_fields__ if name in event}
    return msgspec.convert(known, kind, strict=False)


def recent(run_dir: Path) -> Losses:
    """What the newest part of the event log says."""
    found = Losses()
    tail = Tail(run_dir / "events" / CURRENT, last_bytes=LOOK_BACK_BYTES, read_bytes=2 * LOOK_BACK_BYTES)
    try:
        for event in tail.poll():
            found.take(event)
    finally:
        tail.close()
    return found


def show_losses(console: Console, losses: Iterable[Loss], retired: Iterable[RetiredItem], workers: str) -> None:
    """Print causes with their examples, then the retired items."""
    causes, items = list(losses), list(retired)
    if causes or workers:
        console.print(Text("\nWhat was lost", "bold"))
    for loss in causes:
        console.print(Text(f"  {loss.line()}", "red"), soft_wrap=True)
        if loss.where and loss.where not in loss.cause:
            console.print(Text(f"    at {loss.where}"), soft_wrap=True)
        if len(loss.example) > len(loss.cause):
            console.print(Text(f"    e.g. prompt {loss.prompt}: {clip(loss.example, EXAMPLE)}"), soft_wrap=True)
        if loss.hint:
            console.print(Text(f"    what helps: {loss.hint}", "yellow"), soft_wrap=True)
    if workers:
        console.print(Text(f"  {workers}", "red"), soft_wrap=True)
    show_retired(console, items)


def show_retired(console: Console, items: Iterable[RetiredItem]) -> None:
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


def show_recent(console: Console, run_dir: Path) -> None:
    """For `ps`: the newest loss in a line, and how many items are retired."""
    found = recent(run_dir)
    if found.losses:
        row = f"{found.failed_groups} groups failed in a row (the run ends at {found.most}); "
        row = row if found.failed_groups and found.most else ""
        newest = max(found.losses, key=lambda loss: loss.t)
        console.print(Text(f"  lost: {row}{newest.line()}", "red"), soft_wrap=True)
    if found.retired:
        names = ", ".join(one.item for one in found.retired[:4])
        console.print(Text(f"  retired items: {len(found.retired)} ({names}); see `relax-rt retired`", "yellow"))
