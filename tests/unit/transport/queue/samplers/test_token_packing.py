"""Dealing samples to ranks and micro-batches: all of them, once, within the budget, evenly."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_rt.transport.queue.samplers.packing import (
    balanced_partition,
    pack_by_tokens,
)
from relax_rt.transport.rpc.errors import Refused

COSTS = st.lists(st.integers(0, 5000), max_size=60)
PARTS = st.integers(1, 9)
BUDGET = 5000
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def sums(costs: Sequence[int], parts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(costs[index] for index in part) for part in parts]


def once(parts: Sequence[Sequence[int]], count: int) -> bool:
    return sorted(index for part in parts for index in part) == list(range(count))


@UNHURRIED
@given(COSTS, PARTS, st.booleans())
def test_every_sample_goes_to_one_part_and_sums_differ_by_at_most_the_largest(
    costs: list[int], parts: int, equal: bool
) -> None:
    dealt = balanced_partition(costs, parts, equal_counts=equal)
    assert len(dealt) == parts and once(dealt, len(costs))
    assert max(sums(costs, dealt)) - min(sums(costs, dealt)) <= max(costs, default=0)
    if equal:
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    if len(costs) >= parts:
        assert all(dealt)


@UNHURRIED
@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(2, 3), st.booleans())
def test_the_largest_sum_keeps_the_ratio_to_the_optimum(costs: list[int], parts: int, equal: bool) -> None:
    def largest(owner: tuple[int, ...]) -> int:
        return max(sum(cost for cost, k in zip(costs, owner, strict=True) if k == part) for part in range(parts))

    def fair(owner: tuple[int, ...]) -> bool:
        counts = [owner.count(part) for part in range(parts)]
        return max(counts) - min(counts) <= 1

    owners = product(range(parts), repeat=len(costs))
    optimum = min(largest(owner) for owner in owners if not equal or fair(owner))
    found = max(sums(costs, balanced_partition(costs, parts, equal_counts=equal)))
    # 2 - 1/m with equal counts, 4/3 - 1/(3m) without, in whole numbers.
    bound = (2 * parts - 1) * 3 if equal else 4 * parts - 1
    assert found * 3 * parts <= bound * optimum


def test_a_known_case_of_the_differencing_method() -> None:
    assert balanced_partition([8, 7, 6, 5, 4], 2) == [[0, 2], [1, 3, 4]]
    assert balanced_partition([8, 7, 6, 5, 4, 3], 3, equal_counts=True) == [[0, 5], [1, 4], [2, 3]]
    assert balanced_partition([3], 3) == [[0], [], []]


@UNHURRIED
@given(COSTS, st.booleans(), st.integers(0, 12))
def test_micro_batches_keep_the_budget_and_are_as_many_as_asked(
    lengths: list[int], keep_order: bool, count: int
) -> None:
    packed = pack_by_tokens(lengths, BUDGET, keep_order=keep_order, count=count)
    assert once(packed, len(lengths)) and len(packed) >= count
    assert all(total <= BUDGET for total in sums(lengths, packed))
    fewest = pack_by_tokens(lengths, BUDGET, keep_order=keep_order)
    assert len(packed) == max(count, len(fewest))
    # No two bins of a first fit, and no two neighbours of a next fit, go into one.
    assert len(fewest) <= 2 * sum(lengths) // BUDGET + 1
    if count <= len(lengths):
        assert all(packed)
    if keep_order:
        assert [index for part in packed for index in part] == list(range(len(lengths)))


@UNHURRIED
@given(st.lists(st.integers(0, 9000), max_size=40), st.booleans())
def test_a_sample_over_the_budget_is_refused_or_alone(lengths: list[int], keep_order: bool) -> None:
    over = [index for index, length in enumerate(lengths) if length > BUDGET]
    if over:
        with pytest.raises(Refused, match=f"sample {over[0]} has {lengths[over[0]]} tokens, more than the {BUDGET}"):
            pack_by_tokens(lengths, BUDGET, keep_order=keep_order)
    packed = pack_by_tokens(lengths, BUDGET, keep_order=keep_order, oversize="alone")
    assert once(packed, len(lengths))
    for part, total in zip(packed, sums(lengths, packed), strict=True):
        assert total <= BUDGET or len(part) == 1


def test_packing_fills_micro_batches_evenly() -> None:
    assert pack_by_tokens([6, 5, 5, 4, 4, 3, 3], 10) == [[0, 3], [1, 2], [4, 5, 6]]
    assert pack_by_tokens([1, 1, 1, 1], 3) == [[0, 3], [1, 2]]
    assert pack_by_tokens([6, 5, 5, 4, 4], 10, keep_order=True) == [[0], [1, 2], [3, 4]]
    assert pack_by_tokens([], 10) == [] and pack_by_tokens([], 10, count=2) == [[], []]


def test_a_group_over_the_budget_is_named() -> None:
    groups = ["a", "b", "b"]
    with pytest.raises(Refused, match=r"group b of 2 samples, with sample 7\.1, has 12 tokens"):
        pack_by_tokens([5, 6, 6], 10, groups=groups, names=["7.0", "7.1", "7.2"])
    assert pack_by_tokens([5, 6, 6], 10, groups=groups, oversize="alone") == [[0], [1, 2]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: balanced_partition([1, -2], 2), "cost of sample 1: it is -2"),
        (lambda: balanced_partition([1], 0), "0 parts were asked for"),
        (lambda: pack_by_tokens([1], 0), "the budget is 0 tokens"),
        (lambda: pack_by_tokens([-1], 5), "length of sample 0: it is -1"),
    ],
)
def test_bad_input_is_refused_with_its_place(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(Refused, match=message):
        call()
