"""Samples that a run lost, by cause, and items that it retired, collected from its event log."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from relax_rt.transport.queue.ledger.messages import Loss, Retired

MAX_SHOWN = 12
MAX_CAUSES = 64
"""Causes counted apart; the rarest are summed under OTHERS, by task. More than the queue counts apart at a time."""
OTHERS = "other causes"


T = TypeVar("T", bound=msgspec.Struct)


class ReportedLoss(Loss, frozen=True, kw_only=True):
    """Samples lost for one cause, as last reported: every few seconds while the run is live, and when the queue ends.

    Attributes:
        hint: the setting that helps.
    """

    hint: str = ""


Counts = dict[tuple[str, str], ReportedLoss]
"""Losses by task and gist."""


class Losses:
    """Collects losses from the events of a run, oldest first. Losses are of the newest start; retired items outlive a
    start."""

    def __init__(self) -> None:
        self._retired: dict[str, Retired] = {}
        self._earlier: Counts = {}
        """Losses of earlier starts."""
        self._ended: Counts = {}
        """Losses of this start that the queue no longer counts."""
        self._newest: Counts = {}
        """Newest report of each cause of this start."""
        self.killed_workers = 0
        self.killed_because = ""

    def _begin(self) -> None:
        for counts in (self._ended, self._newest):
            for key, loss in counts.items():
                _add(self._earlier, key, loss)
            counts.clear()
        self.killed_workers = 0
        self.killed_because = ""

    def update(self, event: dict[str, Any]) -> None:
        """Process one event of the log."""
        match event.get("kind"):
            case "run_started":
                self._begin()
            case "members_lost":
                if (loss := _read(event, ReportedLoss)) is not None:
                    # Keep the newest report of a cause. A count below the last one is a new count: the queue had
                    # dropped the cause to make room for another.
                    key = (loss.task, str(event.get("gist", "")))
                    before = self._newest.get(key)
                    if before is not None and loss.members < before.members:
                        _add(self._ended, key, before)
                    self._newest[key] = loss
                    if len(self._newest) > MAX_CAUSES:
                        rarest = _rarest(self._newest, other_than=key)
                        _add(self._ended, (rarest[0], OTHERS), _without_details(self._newest.pop(rarest)))
            case "item_retired":
                if (item := _read(event, Retired)) is not None:
                    self._retired[item.item] = item
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
        """Losses of the newest start, the most frequent causes first."""
        return _sorted(self._ended, self._newest)[:MAX_SHOWN]

    @property
    def total(self) -> list[ReportedLoss]:
        """Losses of all starts of the run, the most frequent causes first."""
        return _sorted(self._earlier, self._ended, self._newest)

    @property
    def retired(self) -> list[Retired]:
        """In the order in which they were retired."""
        return list(self._retired.values())


def _sorted(*parts: Counts) -> list[ReportedLoss]:
    """Sum the parts, given oldest first, by cause; the most frequent causes first."""
    found: Counts = {}
    for part in parts:
        for key, loss in part.items():
            found[key] = _sum(found.get(key), loss)
    return sorted(found.values(), key=lambda loss: -loss.members)


def _add(counts: Counts, key: tuple[str, str], loss: ReportedLoss) -> None:
    """Add a loss to the counts, and bound them."""
    counts[key] = _sum(counts.get(key), loss)
    if key[1] != OTHERS and len(counts) > MAX_CAUSES:
        rarest = _rarest(counts, other_than=key)
        _add(counts, (rarest[0], OTHERS), _without_details(counts.pop(rarest)))


def _rarest(counts: Counts, other_than: tuple[str, str]) -> tuple[str, str]:
    return min((key for key in counts if key[1] != OTHERS and key != other_than), key=lambda key: counts[key].members)


def _without_details(loss: ReportedLoss) -> ReportedLoss:
    """The counts of a loss, under OTHERS."""
    members, groups, prompts = loss.members, loss.groups, loss.prompts
    return ReportedLoss(task=loss.task, cause=OTHERS, members=members, groups=groups, prompts=prompts)


def _sum(before: ReportedLoss | None, loss: ReportedLoss) -> ReportedLoss:
    """Return the newer loss with its samples and groups added to those of the older one.

    Its prompts are the larger of the two numbers: which prompts they were is not known.
    """
    if before is None:
        return loss
    members, groups = before.members + loss.members, before.groups + loss.groups
    return msgspec.structs.replace(loss, members=members, groups=groups, prompts=max(before.prompts, loss.prompts))


def _read(event: dict[str, Any], kind: type[T]) -> T | None:
    """Read a record of the event log; None if its fields are not of their types."""
    known = {name: event[name] for name in kind.__struct_fields__ if name in event}
    try:
        return msgspec.convert(known, kind, strict=False)
    except msgspec.ValidationError:
        return None
