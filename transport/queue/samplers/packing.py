"""Partition samples into parts of equal cost, and pack them into micro-batches by token budget. Pure functions.

Samples are named by their index. The same arguments give the same answer, so that ranks agree without talking.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import Literal, TypeAlias

from relax_rt.transport.rpc.errors import Refused

Oversize = Literal["refuse", "alone"]
"""How to treat a sample over the token budget: raise an error that names it, or give it its own micro-batch."""

_Chain: TypeAlias = "tuple[_Chain, _Chain] | int | None"
"""Indices of a part as a binary tree, so that joining two parts costs the same whatever their size."""
_Part: TypeAlias = tuple[int, _Chain]


def balanced_partition(costs: Sequence[int], parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Deal indices 0…n-1 out to `parts` parts with sums as alike as the differencing method makes them.

    The largest differencing method (Karmarkar and Karp, The differencing method of set partitioning, 1982): the two
    partial partitions of the largest spread are joined, largest part to smallest, until one is left. Its largest sum
    is at most 4/3 - 1/(3 parts) of the optimum (Michiels, Korst, Aarts, van Leeuwen, J. Comb. Optim. 13, 2007); with
    equal_counts it starts from rows of `parts` items, and the ratio is 2 - 1/parts (the same authors, STACS 2003).
    Joining never makes a spread larger than those joined, so that sums differ by at most the largest cost.

    Args:
        costs: not negative; tokens, or a measure of work.
        parts: at least 1; some are empty when there are fewer indices.
        equal_counts: the numbers of indices in the parts differ by at most one.

    Returns:
        The parts, each in ascending order, in the order of their first index (empty ones last).

    Raises:
        Refused: a negative cost, or no part.
    """
    _check(costs, "cost")
    if parts < 1:
        raise Refused("partition", why=f"{parts} parts were asked for, there must be at least 1")
    # Entries: minus the spread, a number that settles ties, parts that hold anything, by descending sum.
    order = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    if equal_counts:
        # The last row is filled up with nothing at no cost: at most one in each part.
        rows: list[list[_Part]] = [
            [(costs[index], index) for index in order[at : at + parts]] for at in range(0, len(order), parts)
        ]
        if rows:
            rows[-1] += [(0, None)] * (parts - len(rows[-1]))
    else:
        rows = [[(costs[index], index)] for index in order]
    heap = [(-_spread(row, parts), number, row) for number, row in enumerate(rows)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = _join(one, other, parts)
        heapq.heappush(heap, (-_spread(joined, parts), number, joined))
        number += 1
    filled = [part for part in (_indices(chain) for _, chain in (heap[0][2] if heap else [])) if part]
    return sorted(filled, key=lambda part: part[0]) + [[] for _ in range(parts - len(filled))]


def _spread(row: list[_Part], parts: int) -> int:
    return row[0][0] - (row[-1][0] if len(row) == parts else 0)


def _join(one: list[_Part], other: list[_Part], parts: int) -> list[_Part]:
    """The largest parts of one with the smallest of the other; parts that are not listed are empty."""
    overlap = max(0, len(one) + len(other) - parts)
    met = [(a[0] + b[0], (a[1], b[1])) for a, b in zip(one[len(one) - overlap :], reversed(other), strict=False)]
    rest = one[: len(one) - overlap] + other[: len(other) - overlap]
    return sorted(met + rest, key=lambda part: -part[0])


def _indices(chain: _Chain) -> list[int]:
    found: list[int] = []
    stack = [chain]
    while stack:
        link = stack.pop()
        if isinstance(link, int):
            found.append(link)
        elif link is not None:
            stack.extend(link)
    return sorted(found)


def _by_group(costs: Sequence[int], groups: Sequence[Hashable]) -> list[list[int]]:
    if len(groups) != len(costs):
        raise Refused("partition by groups", why=f"{len(groups)} groups are named for {len(costs)} samples")
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    return list(members.values())


def pack_by_tokens(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    keep_order: bool = False,
    groups: Sequence[Hashable] = (),
    oversize: Oversize = "refuse",
    count: int = 0,
    names: Sequence[object] = (),
) -> list[list[int]]:
    """Micro-batches of at most max_tokens tokens.

    First-fit decreasing gives their number (at most 11/9 of the fewest possible plus 6/9: Dósa, ESCAPE 2007); the
    samples are then spread evenly over as many, if that keeps the budget. With keep_order each micro-batch is a run of
    neighbours, filled until the next does not fit.

    Args:
        lengths: tokens of each sample.
        groups: of each sample the group it belongs to; given, groups are not split.
        oversize: what becomes of a sample, or group, over the budget.
        count: make at least this many, the last ones empty if there are too few samples.
        names: what errors call the samples; their indices if not given.

    Returns:
        The micro-batches, each in ascending order, in the order of their first index.

    Raises:
        Refused: a sample is over the budget and oversize is `refuse`.
    """
    _check(lengths, "length")
    if max_tokens < 1:
        raise Refused("micro-batches", why=f"the budget is {max_tokens} tokens, it must be at least 1")
    members = _by_group(lengths, groups) if groups else [[index] for index in range(len(lengths))]
    units = [sum(lengths[index] for index in unit) for unit in members]
    large = [unit for unit, tokens in enumerate(units) if tokens > max_tokens]
    if large and oversize == "refuse":
        raise _over_budget(members[large[0]], units[large[0]], max_tokens, groups, names)
    if keep_order:
        bins = _split(_next_fit(units, max_tokens), count)
    else:
        small = [unit for unit, tokens in enumerate(units) if tokens <= max_tokens]
        packed = _packed_evenly([units[unit] for unit in small], max_tokens, count - len(large))
        bins = [[unit] for unit in large] + [[small[at] for at in part] for part in packed]
    dealt = sorted((sorted(index for unit in part for index in members[unit]) for part in bins), key=_first)
    return dealt + [[] for _ in range(count - len(dealt))]


def _first(part: list[int]) -> int:
    return part[0]


def _over_budget(
    unit: list[int], tokens: int, max_tokens: int, groups: Sequence[Hashable], names: Sequence[object]
) -> Refused:
    what = f"sample {names[unit[0]] if names else unit[0]}"
    if len(unit) > 1:
        what = f"group {groups[unit[0]]} of {len(unit)} samples, with {what},"
    return Refused(
        "micro-batches by tokens",
        why=f"{what} has {tokens} tokens, more than the {max_tokens} of a micro-batch",
        hint="raise max_tokens, or let it be a micro-batch of its own with oversize='alone'",
    )


def _next_fit(units: list[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    used = 0
    for unit, tokens in enumerate(units):
        if not bins or used + tokens > max_tokens:
            bins.append([])
            used = 0
        bins[-1].append(unit)
        used += tokens
    return bins


def _packed_evenly(units: list[int], max_tokens: int, count: int) -> list[list[int]]:
    """As many bins as first-fit decreasing needs, at least `count`, and alike where the budget allows it."""
    bins = _split(_first_fit_decreasing(units, max_tokens), count)
    if not bins:
        return []
    even = balanced_partition(units, len(bins))
    fits = max(sum(units[unit] for unit in part) for part in even) <= max_tokens
    return even if fits else bins


def _first_fit_decreasing(units: list[int], max_tokens: int) -> list[list[int]]:
    """In O(n log n): a tree over the bins holds the most room in each half, so that the first with room is found."""
    size = 1 << (len(units) - 1).bit_length() if units else 1
    room = [max_tokens] * (2 * size)
    bins: list[list[int]] = []
    for unit in sorted(range(len(units)), key=lambda unit: (-units[unit], unit)):
        node = 1
        while node < size:
            node = 2 * node if room[2 * node] >= units[unit] else 2 * node + 1
        if node - size == len(bins):
            bins.append([])
        bins[node - size].append(unit)
        room[node] -= units[unit]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def _split(bins: list[list[int]], count: int) -> list[list[int]]:
    """Halve the fullest bins until there are `count`, or every bin holds one unit."""
    heap = [(-len(part), number, part) for number, part in enumerate(bins)]
    heapq.heapify(heap)
    while heap and len(heap) < count and len(heap[0][2]) > 1:
        _, number, part = heapq.heappop(heap)
        half = len(part) // 2
        heapq.heappush(heap, (-half, number, part[:half]))
        heapq.heappush(heap, (half - len(part), len(heap) + len(bins) + count, part[half:]))
    return [part for _, _, part in heap]


def _check(values: Sequence[int], what: str) -> None:
    for index, value in enumerate(values):
        if value < 0:
            raise Refused(f"{what} of sample {index}", why=f"it is {value}, which is negative")
