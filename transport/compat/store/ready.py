"""Which rows of a partition are ready for a task: kept up to date, so that sampling does not look at every row."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable

MAX_VIEWS = 64
Wanted = tuple[str, str, frozenset[str]]
"""Partition, task, and the fields that it needs."""


class ReadyRows:
    """For each partition, task and set of fields that was sampled lately: indexes that can be given, ascending."""

    def __init__(self) -> None:
        self._views: OrderedDict[Wanted, list[int]] = OrderedDict()

    def get(self, wanted: Wanted) -> list[int] | None:
        """The indexes, if they are kept."""
        view = self._views.get(wanted)
        if view is not None:
            self._views.move_to_end(wanted)
        return view

    def keep(self, wanted: Wanted, indexes: list[int]) -> list[int]:
        """Keep these from now on; the one that was not used for longest goes."""
        self._views[wanted] = indexes
        while len(self._views) > MAX_VIEWS:
            self._views.popitem(last=False)
        return indexes

    def of(self, partition: str) -> list[tuple[Wanted, list[int]]]:
        """All that are kept of a partition."""
        return [(wanted, view) for wanted, view in self._views.items() if wanted[0] == partition]

    def given(self, partition: str, task: str, indexes: Iterable[int]) -> None:
        """These were given to the task."""
        gone = set(indexes)
        for wanted, view in self.of(partition):
            if wanted[1] == task:
                _remove(view, gone)

    def forget(self, partition: str, task: str | None = None) -> None:
        """Find them anew next time."""
        for wanted, _ in self.of(partition):
            if task in (None, wanted[1]):
                del self._views[wanted]

    def cleared(self, partition: str, indexes: Iterable[int]) -> None:
        """These rows are no more."""
        gone = set(indexes)
        for _, view in self.of(partition):
            _remove(view, gone)


def enter(view: list[int], index: int) -> None:
    """Add an index that may be there."""
    if not view or index > view[-1]:
        view.append(index)
    elif view[bisect_left(view, index)] != index:
        insort(view, index)


def _remove(view: list[int], gone: set[int]) -> None:
    if not view or not gone:
        return
    head = view[: len(gone)]
    if len(head) == len(gone) and gone.issuperset(head):
        del view[: len(gone)]
    else:
        view[:] = [index for index in view if index not in gone]
