"""Which of the rows that are ready a task is given next. Pure: the same input gives the same choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relax_rt.transport.errors import Refused
from relax_rt.transport.loader.packing import balanced_partition
from relax_rt.transport.store.api import Sampler

Granted = dict[int, dict[int, list[int]]]
"""Batches given before, by rank and index of the batch."""
KINDS = ("sequential", "ranked", "groups", "balanced")


def check(sampler: Sampler) -> None:
    """Raises:
    Refused: there is no such sampler, or its numbers make no sense.
    """
    if sampler.kind not in KINDS:
        raise Refused(f"sampler {sampler.kind!r}", why="there is no such sampler", hint=f"one of {', '.join(KINDS)}")
    if sampler.group < 1 or sampler.ranks < 1:
        raise Refused(
            f"sampler {sampler.kind}", why=f"group {sampler.group} and ranks {sampler.ranks} must be positive"
        )


def choose(
    sampler: Sampler,
    ready: Sequence[int],
    batch: int,
    rank: int | None,
    batch_index: int | None,
    granted: Granted,
    *,
    place: Callable[[int], int],
    length: Callable[[int], int],
) -> list[int]:
    """Rows for one call; empty if there are not enough. What is to be given again is kept in `granted`.

    Args:
        ready: indexes of rows, ascending.
        place: of a row, in the order in which rows came.
        length: of a row, in tokens, for the balanced sampler.

    Raises:
        Refused: the batch cannot be made up of whole groups, or the sampler needs a rank and got none.
    """
    if sampler.kind == "sequential":
        return list(ready[:batch]) if len(ready) >= batch else []
    if sampler.kind == "ranked" and (rank is None or batch_index is None or rank < 0):
        raise Refused("sample", why=f"the ranked sampler needs a rank and a batch index, not {rank} and {batch_index}")
    if sampler.kind == "balanced":
        rank, batch_index = rank or 0, batch_index or 0
    if rank is not None and batch_index is not None and (known := granted.get(rank, {}).get(batch_index)) is not None:
        return known
    if sampler.kind == "ranked":
        chosen = list(ready[:batch]) if len(ready) >= batch else []
    elif sampler.kind == "groups":
        chosen = whole_groups(ready, batch, sampler.group, place)
    else:
        chosen = _balanced(sampler, ready, batch, rank or 0, batch_index or 0, granted, place=place, length=length)
    if chosen and rank is not None and batch_index is not None:
        granted.setdefault(rank, {})[batch_index] = chosen
    return chosen


def whole_groups(ready: Sequence[int], batch: int, size: int, place: Callable[[int], int]) -> list[int]:
    """The first runs of `size` rows that came one after the other, `batch` rows in all; empty if there are not enough.

    Raises:
        Refused: batch is not a multiple of size.
    """
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
    sampler: Sampler,
    ready: Sequence[int],
    batch: int,
    rank: int,
    batch_index: int,
    granted: Granted,
    *,
    place: Callable[[int], int],
    length: Callable[[int], int],
) -> list[int]:
    chosen = whole_groups(ready, batch * sampler.ranks, sampler.group, place)
    if not chosen:
        return []
    groups = [chosen[at : at + sampler.group] for at in range(0, len(chosen), sampler.group)]
    if len(groups) % sampler.ranks:
        raise Refused(
            f"sample of {batch} rows for each of {sampler.ranks} ranks",
            why=f"{len(groups)} groups of {sampler.group} cannot be dealt out evenly",
        )
    dealt = balanced_partition([sum(map(length, group)) for group in groups], sampler.ranks, equal_counts=True)
    for to, share in enumerate(dealt):
        granted.setdefault(to, {})[batch_index] = [index for number in sorted(share) for index in groups[number]]
    return granted.get(rank, {}).get(batch_index, [])
