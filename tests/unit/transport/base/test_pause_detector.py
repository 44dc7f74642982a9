"""Leases are judged by a server that has read what was sent to it, never by one that has just woken."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from relax_rt.transport.base.liveness import PAUSE_S, PauseDetector


def test_a_stop_starts_leases_again_however_late_they_are() -> None:
    pauses = PauseDetector(0.0, 0.25)
    assert pauses.check(0.25) == "expire"
    # However little late a lease is now: its renewals may wait in the socket.
    assert pauses.check(0.25 + PAUSE_S) == "restart"
    assert pauses.check(0.5 + PAUSE_S) == "expire"


def test_one_late_look_is_passed_over_and_the_next_is_not() -> None:
    pauses = PauseDetector(0.0, 0.1)
    assert [pauses.check(0.3), pauses.check(0.6), pauses.check(0.9)] == ["hold", "expire", "hold"]


def test_a_long_tick_is_no_stop() -> None:
    pauses = PauseDetector(0.0, 1.0)
    assert [pauses.check(1.01), pauses.check(2.5), pauses.check(4.6)] == ["expire", "expire", "restart"]


@given(st.lists(st.floats(0.0, 0.99), min_size=20, max_size=20), st.floats(0.01, 1.0))
def test_who_is_always_late_still_judges_every_other_time(gaps: list[float], tick_s: float) -> None:
    pauses, now, verdicts = PauseDetector(0.0, tick_s), 0.0, []
    for gap in gaps:
        now += gap
        verdicts.append(pauses.check(now))
    assert all("expire" in pair for pair in pairwise(verdicts))
