"""Dividing a batch: what stays together, and which of it each replica takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relax_rt.roles.base.sample import Sample

Numbered = tuple[int, Sample]
"""A sample and its place in the batch."""


def share(samples: Sequence[Sample], place: int, replicas: int, *, whole_groups: bool = False) -> list[Numbered]:
    """What one of the replicas takes of a batch: about as many tokens as the others; perhaps nothing.

    Returns:
        Index in the batch, and the sample, in the batch's order.
    """
    loads = [0] * replicas
    mine: list[Numbered] = []
    for unit in units(enumerate(samples), whole_groups):
        least = loads.index(min(loads))
        loads[least] += tokens_of(unit)
        if least == place:
            mine += unit
    return sorted(mine, key=lambda item: item[0])


def units(samples: Iterable[Numbered], whole_groups: bool) -> list[list[Numbered]]:
    """What stays together, the longest first."""
    found: dict[int, list[Numbered]] = {}
    for index, sample in samples:
        found.setdefault(sample.meta.group if whole_groups else index, []).append((index, sample))
    return sorted(found.values(), key=lambda unit: (-tokens_of(unit), unit[0][0]))


def tokens_of(unit: Sequence[Numbered]) -> int:
    """Tokens of samples together."""
    return sum(len(sample.tokens) for _, sample in unit)
