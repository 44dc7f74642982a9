"""Rows of about one length are attended together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relax_rt.roles.rollout.engines.attention import CALL_COST, length_class, segments


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=64))
def test_every_row_is_read_to_its_end_and_none_twice(lengths: list[int]) -> None:
    cut = segments(lengths)
    assert [s.start for s in cut] == [0, *(s.end for s in cut)][:-1]
    assert cut[-1].end == len(lengths)
    for segment in cut:
        assert segment.start < segment.end
        assert segment.upto == max(lengths[segment.start : segment.end])


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=64))
def test_cutting_never_costs_more_than_one_call_for_all(lengths: list[int]) -> None:
    cut = segments(lengths)
    cost = sum((s.end - s.start) * s.upto + CALL_COST for s in cut)
    assert cost <= len(lengths) * max(lengths) + CALL_COST


def test_one_long_row_does_not_make_the_others_read_as_far() -> None:
    assert [tuple(s) for s in segments([4000, *[100] * 63])] == [(0, 1, 4000), (1, 64, 100)]
    assert [tuple(s) for s in segments([130, *[120] * 7])] == [(0, 8, 130)]


@given(st.integers(1, 100_000))
def test_a_class_is_at_most_twice_its_shortest(length: int) -> None:
    longest = max(n for n in (64 << k for k in range(12)) if length_class(n) <= length_class(length))
    assert length <= longest
    if length > 64:
        assert length * 2 > longest
