"""Which rows make up which step. A pure function of the run's seed, so that a resumed phase goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice

from relax_rt.roles.data.order import epoch_order
from relax_rt.roles.training.sft.settings import ColdStartTable


def batches(table: ColdStartTable, sizes: Sequence[int], seed: int) -> Iterator[list[int]]:
    """The rows of one step after the other: passes over all rows, each in an order of its own. A step may straddle the
    end of a pass; the last one may be smaller.

    Args:
        sizes: tokens of each row.
    """
    return islice(_endless(table, sizes, seed), table.steps)


def total(table: ColdStartTable, sizes: Sequence[int], seed: int) -> int:
    """How many steps there are."""
    if table.steps is not None:
        return table.steps
    if table.batch_tokens is None:
        return -(-len(sizes) * (table.epochs or 1) // table.batch)
    return sum(1 for _ in batches(table, sizes, seed))


def _endless(table: ColdStartTable, sizes: Sequence[int], seed: int) -> Iterator[list[int]]:
    """Without an end where `steps` are set."""
    names = [str(index) for index in range(len(sizes))]
    passes = count() if table.steps is not None else range(table.epochs or 1)
    held: list[int] = []
    tokens = 0
    for number in passes:
        for index in epoch_order(seed, number, names).tolist():
            full = tokens + sizes[index] > table.batch_tokens if table.batch_tokens else len(held) == table.batch
            if held and full:
                yield held
                held, tokens = [], 0
            held.append(index)
            tokens += sizes[index]
    if held:
        yield held
