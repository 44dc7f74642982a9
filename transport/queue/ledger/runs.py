"""The samples of a lease in their short form: a put mostly makes one run."""

from __future__ import annotations

from collections.abc import Iterable

from relax_rt.transport.queue.ledger.messages import Run, SampleKey
from relax_rt.transport.queue.ledger.state import Part, Sample


def runs_of(held: Iterable[tuple[SampleKey, Sample]], told: set[int], place: dict[int, int]) -> list[Run]:
    """Samples on lease of a queue without steps, where prompts and versions are of no matter.

    told: blocks to speak of; place: where each is in the batch's list, extended here.
    """
    runs: list[Run] = []
    start, count, by_group = SampleKey(0, 0), 0, False
    group = member = -1
    parts: list[Part] = []
    lengths: list[int] = []
    for key, sample in held:
        if count and _next_rows(sample.parts, parts, count):
            next_group = key.group == group + count and key.member == member
            if (next_group and (by_group or count == 1)) or (
                not by_group and key.group == group and key.member == member + count
            ):
                by_group, count = next_group, count + 1
                lengths.append(sample.length)
                continue
        if count:
            runs.append(_run(start, count, by_group, parts, lengths, told, place))
        start, count, by_group, parts, lengths = key, 1, False, sample.parts, [sample.length]
        group, member = key.group, key.member
    if count:
        runs.append(_run(start, count, by_group, parts, lengths, told, place))
    return runs


def _run(
    key: SampleKey,
    count: int,
    by_group: bool,
    parts: list[Part],
    lengths: list[int],
    told: set[int],
    place: dict[int, int],
) -> Run:
    first = [(place.setdefault(part.block, len(place)), part.row) for part in parts if part.block in told]
    return Run(key, count, by_group, first, lengths if max(lengths) >= 0 else [])


def _next_rows(parts: list[Part], first: list[Part], by: int) -> bool:
    """Whether these are the rows of the same blocks, `by` further on."""
    if len(parts) != len(first):
        return False
    if len(parts) == 1:
        return parts[0].row == first[0].row + by and parts[0].block == first[0].block
    for n, part in enumerate(parts):
        other = first[n]
        if part.block != other.block or part.row != other.row + by:
            return False
    return True
