"""Which rows a task is given next: rows that are ready, kept up to date, and the samplers that choose among them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from relax_rt.transport.compat.store.api import StoreSampler
from relax_rt.transport.queue.samplers.packing import balanced_partition
from relax_rt.transport.rpc.errors import Refused

KINDS = ("sequential", "ranked", "groups", "balanced")
MAX_VIEWS = 64
Wanted = tuple[str, str, frozenset[str]]
"""Partition, task, and the fields that it needs."""
BatchKey = tuple[int, int]
"""Rank and index of a batch."""


def check(sampler: StoreSampler) -> None:
    """Raises:
    Refused: there is no such sampler, or its numbers make no sense.
    """
    if sampler.kind not in KINDS:
        raise Refused(f"sampler {sampler.kind!r}", why="there is no such sampler", hint=f"one of {', '.join(KINDS)}")
    if sampler.group < 1 or sampler.ranks < 1:
        raise Refused(
            f"sampler {sampler.kind}", why=f"group {sampler.group} and ranks {sampler.ranks} must be positive"
        )


def batch_of(sampler: StoreSampler, rank: int | None, batch_index: int | None) -> BatchKey | None:
    """Which batch is asked for, where each is given again to all that ask for it.

    Raises:
        Refused: the sampler needs a rank and got none, or one that there is not.
    """
    if sampler.kind == "sequential":
        return None
    if sampler.kind == "ranked" and (rank is None or batch_index is None or rank < 0):
        raise Refused("sample", why=f"the ranked sampler needs a rank and a batch index, not {rank} and {batch_index}")
    if sampler.kind == "balanced":
        rank, batch_index = rank or 0, batch_index or 0
        if not 0 <= rank < sampler.ranks:
            raise Refused(f"sample for rank {rank}", why=f"the balanced sampler deals to {sampler.ranks} ranks")
    return None if rank is None or batch_index is None else (rank, batch_index)


def choose(
    sampler: StoreSampler,
    ready: Sequence[int],
    batch: int,
    *,
    place: Callable[[int], int],
    length: Callable[[int], int],
) -> list[list[int]]:
    """Rows for one call, or for the balanced sampler for each rank; empty if there are not enough.

    Args:
        ready: indexes of rows, ascending.
        place: of a row, in the order in which rows were made.
        length: of a row, in tokens, for the balanced sampler.

    Raises:
        Refused: the batch cannot be made up of whole groups.
    """
    if sampler.kind == "balanced":
        return _balanced(sampler, ready, batch, place=place, length=length)
    if sampler.kind == "groups":
        chosen = _whole_groups(ready, batch, sampler.group, place)
    else:
        chosen = list(ready[:batch]) if len(ready) >= batch else []
    return [chosen] if chosen else []


def _whole_groups(ready: Sequence[int], batch: int, size: int, place: Callable[[int], int]) -> list[int]:
    """The first runs of `size` neighbouring rows, `batch` rows in all; empty if there are not enough."""
    if batch % size:
        raise Refused(f"sample of {batch} rows", why=f"{batch} is not a multiple of the group size {size}")
    chosen: list[int] = []
    run: list[int] = []
    for index in ready:
        if len(chosen) == batch:
            break
        if run and place(index) != place(run[-1]) + 1:
            run = []
        run.append(index)
        if len(run) == size:
            chosen += run
            run = []
    return chosen if len(chosen) == batch else []


def _balanced(
    sampler: StoreSampler,
    ready: Sequence[int],
    batch: int,
    *,
    place: Callable[[int], int],
    length: Callable[[int], int],
) -> list[list[int]]:
    """Whole groups for every rank, so that the ranks' sums of lengths are alike."""
    chosen = _whole_groups(ready, batch * sampler.ranks, sampler.group, place)
    if not chosen:
        return []
    groups = [chosen[at : at + sampler.group] for at in range(0, len(chosen), sampler.group)]
    if len(groups) % sampler.ranks:
        raise Refused(
            f"sample of {batch} rows for each of {sampler.ranks} ranks",
            why=f"{len(groups)} groups of {sampler.group} cannot be dealt out evenly",
        )
    dealt = balanced_partition([sum(map(length, group)) for group in groups], sampler.ranks, equal_counts=True)
    return [[index for number in sorted(share) for index in groups[number]] for share in dealt]


class ReadyRows:
    """Indexes that can be given, ascending, for each partition, task and set of fields that was sampled lately.

    Kept up to date by every put, sample and clear, so that a sample does not look at every row of its partition.
    """

    def __init__(self) -> None:
        self._views: OrderedDict[Wanted, list[int]] = OrderedDict()

    def get(self, wanted: Wanted, search: Callable[[], list[int]]) -> list[int]:
        """The indexes; found by `search` and kept from then on if they were not."""
        view = self._views.get(wanted)
        if view is not None:
            self._views.move_to_end(wanted)
            return view
        view = self._views[wanted] = search()
        if len(self._views) > MAX_VIEWS:
            self._views.popitem(last=False)
        return view

    def of(self, partition: str) -> list[tuple[Wanted, list[int]]]:
        """All that are kept of a partition."""
        return [(wanted, view) for wanted, view in self._views.items() if wanted[0] == partition]

    def remove(self, partition: str, indexes: Iterable[int], task: str | None = None) -> None:
        """These rows were given to the task; without a task, they were cleared."""
        gone = set(indexes)
        for wanted, view in self.of(partition):
            if task not in (None, wanted[1]) or not view or not gone:
                continue
            if gone.issuperset(view[: len(gone)]):
                del view[: len(gone)]
            else:
                view[:] = [index for index in view if index not in gone]

    def forget(self, partition: str, task: str | None = None) -> None:
        """Search anew next time."""
        for wanted, _ in self.of(partition):
            if task in (None, wanted[1]):
                del self._views[wanted]


def enter(view: list[int], index: int) -> None:
    """Add an index that may be there."""
    if not view or index > view[-1]:
        view.append(index)
    elif view[bisect_left(view, index)] != index:
        insort(view, index)
