"""The cap by KV use: against a reference model, and with an engine whose cache fills."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_rt.roles.rollout.router.admission import CapLimits, EngineCap
from relax_rt.transport.rpc.errors import Refused

LIMITS = CapLimits(most=32, least=2, high=0.9, low=0.6, every_s=1.0)
looks = st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 1.0), st.integers(0, 40)), max_size=60)


@given(looks)
def test_the_cap_follows_the_water_marks(seen: list[tuple[float, float, int]]) -> None:
    cap, now, shut, changed_at = EngineCap(LIMITS), 0.0, False, -10.0
    for pause, used, in_flight in seen:
        now += pause
        before = cap.cap
        cap.observe(now, used, in_flight)
        shut = used >= 0.9 or (shut and used > 0.6)
        assert cap.closed == shut
        assert 2 <= cap.cap <= 32
        if cap.cap != before:
            assert now - changed_at >= 1.0
            changed_at = now
            assert (used >= 0.9 and cap.cap < before) or (used <= 0.6 and cap.cap == before + 1)
        if shut and in_flight >= 2:
            assert cap.room(in_flight) == 0
        if not shut:
            assert cap.room(in_flight) == max(0, cap.cap - in_flight)
        assert cap.room(0) > 0, "an engine without work is never shut out"


def drive(cap: EngineCap, *, watched: bool) -> list[float]:
    """Use of the cache of an engine whose sequences grow by 50 tokens a second, with work without end."""
    running: list[int] = []
    use = []
    for now in range(400):
        running = [n + 50 for n in running if n + 50 < 1000]
        used = sum(running) / 20_000
        cap.observe(float(now), min(1.0, used) if watched else 0.0, len(running))
        running += [0] * min(cap.room(len(running)), 64 - len(running))
        use.append(used)
    return use


def test_the_cap_keeps_an_engine_from_overflowing() -> None:
    free = drive(EngineCap(CapLimits(most=64)), watched=False)[100:]
    held = drive(EngineCap(CapLimits(most=64)), watched=True)[100:]
    assert sum(used > 1.0 for used in free) / len(free) > 0.5, "the case is none"
    assert sum(used > 1.0 for used in held) / len(held) < 0.05, "sequences still grow when it shuts, so not never"
    assert sum(held) / len(held) > 0.5, "and it is not left empty"


def test_the_cap_is_stable_between_the_marks() -> None:
    cap = EngineCap(LIMITS)
    for n in range(100):
        cap.observe(float(n), 0.65 + 0.2 * (n % 2), 32)
    assert (cap.cap, cap.closed) == (32, False)


@pytest.mark.parametrize("wrong", [{"most": 0}, {"most": 4, "least": 5}, {"most": 4, "low": 0.9, "high": 0.8}])
def test_limits_that_contradict_each_other_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(Refused, match="limits"):
        CapLimits(**wrong)  # type: ignore[arg-type]
