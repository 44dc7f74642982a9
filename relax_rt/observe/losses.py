"""What a run lost of what it made, by cause, and the items that it retired: from its event log. No I/O."""

from __future__ import annotations

from typing import Any

import msgspec

from relax_rt.transport.queue.api import Loss, Retired

MAX_SHOWN = 12


class ReportedLoss(Loss, frozen=True, kw_only=True):
    """Samples lost for one cause in this start of the run, as last reported.

    While the run lives that was a few seconds ago; the last report is made when the queue ends.

    Attributes:
        hint: the setting that helps.
    """

    hint: str = ""


class Losses:
    """Takes the events of a run, oldest first. Losses are of the newest start; retired items outlive a start."""

    def __init__(self) -> None:
        self._retired: dict[str, Retired] = {}
        self._before: dict[tuple[str, str], ReportedLoss] = {}
        self._losses: dict[tuple[str, str], ReportedLoss] = {}
        self.killed_workers = 0
        self.killed_because = ""

    def _begin(self) -> None:
        for key, loss in self._losses.items():
            self._before[key] = _sum(self._before.get(key), loss)
        self._losses.clear()
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
    def total(self) -> list[ReportedLoss]:
        """Of all starts of the run, the most frequent causes first."""
        found = dict(self._before)
        for key, loss in self._losses.items():
            found[key] = _sum(found.get(key), loss)
        return sorted(found.values(), key=lambda loss: -loss.members)

    @property
    def retired(self) -> list[Retired]:
        """In the order in which they were retired."""
        return list(self._retired.values())


def _sum(before: ReportedLoss | None, loss: ReportedLoss) -> ReportedLoss:
    """The newer loss with the counts of both."""
    if before is None:
        return loss
    members, groups = before.members + loss.members, before.groups + loss.groups
    return msgspec.structs.replace(loss, members=members, groups=groups, prompts=max(before.prompts, loss.prompts))


def _read(event: dict[str, Any], kind: type[Any]) -> Any:
    known = {name: event[name] for name in kind.__struct_fields__ if name in event}
    return msgspec.convert(known, kind, strict=False)
