"""The samples that are ready for a task, oldest first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping

from relax_rt.transport.queue.ledger.messages import SampleKey
from relax_rt.transport.queue.ledger.state import PackedRun


class ReadyQueue:
    """Ready samples of one task: single ones, and packed runs, of which those from `next` of the task on are ready.

    Attributes:
        entries: in order; a packed run stands under the key of its first sample, with None beside a single sample.
    """

    def __init__(self, task: str) -> None:
        self.task = task
        self.entries: OrderedDict[SampleKey, PackedRun | None] = OrderedDict()

    def __iter__(self) -> Iterator[SampleKey]:
        for key, run in self.entries.items():
            if run is None:
                yield key
            else:
                yield from self._keys_of(run)

    def __reversed__(self) -> Iterator[SampleKey]:
        for key in reversed(self.entries):
            run = self.entries[key]
            if run is None:
                yield key
            else:
                yield from reversed(self._keys_of(run))

    def __len__(self) -> int:
        return sum(1 if run is None else run.count - run.next[self.task] for run in self.entries.values())

    def __contains__(self, key: SampleKey) -> bool:
        return key in self.entries

    def _keys_of(self, run: PackedRun) -> list[SampleKey]:
        return [SampleKey(run.first + n, 0) for n in range(run.next[self.task], run.count)]

    def run_of(self, key: SampleKey) -> PackedRun | None:
        """The packed run that a ready sample is in; None for a single one."""
        if self.entries.get(key, key) is None:
            return None
        runs = (run for run in self.entries.values() if run is not None)
        return next((run for run in runs if run.first <= key.group < run.first + run.count), None)

    def add(self, key: SampleKey) -> None:
        """Add a sample behind the others."""
        self.entries[key] = None

    def discard(self, key: SampleKey) -> None:
        """Remove a sample, if it is there."""
        self.entries.pop(key, None)

    def add_run(self, run: PackedRun) -> None:
        """Add a packed run behind the others."""
        self.entries[SampleKey(run.first, 0)] = run

    def remove_run(self, run: PackedRun) -> None:
        """Remove a packed run of which nothing is ready any more."""
        del self.entries[SampleKey(run.first, 0)]

    def move_first(self, keys: Iterable[SampleKey]) -> None:
        """Move those of the samples that are ready before all others, in this order."""
        for key in reversed(list(keys)):
            if key in self.entries:
                self.entries.move_to_end(key, last=False)

    def unpack(self, runs: Mapping[int, PackedRun]) -> None:
        """Replace packed runs (by first sample) by their samples, in their places."""
        there = [key for key in (SampleKey(first, 0) for first in runs) if self.entries.get(key) is not None]
        if not there:
            return
        # Leases take from the front, so that what is to be unpacked mostly lies there too.
        front: list[tuple[SampleKey, PackedRun | None]] = []
        left = len(there)
        for key, run in self.entries.items():
            if run is None or run.first not in runs:
                front.append((key, run))
                continue
            front += [(one, None) for one in self._keys_of(run)]
            left -= 1
            if not left:
                break
        for key in there:
            del self.entries[key]
        for key, run in reversed(front):
            self.entries[key] = run
            self.entries.move_to_end(key, last=False)
