"""The choice of an engine, against a naive choice."""

from __future__ import annotations

import random
import statistics

from hypothesis import given
from hypothesis import strategies as st

from relax_rt.roles.rollout.router import core
from relax_rt.roles.rollout.router.core import Candidate, Demand, LengthAverage, choose, prefix_key, weight

fleets = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5)), min_size=1, max_size=8).map(
    lambda loads: [Candidate(f"rollout/{n}", out, longs) for n, (out, longs) in enumerate(loads)]
)
needs = st.builds(
    Demand, st.text(max_size=4), st.integers(1, 2000), st.sampled_from(["", "session a", "session b"]), st.booleans()
)


@given(needs, fleets, st.randoms())
def test_the_choice_is_deterministic_in_any_order(need: Demand, fleet: list[Candidate], dice: random.Random) -> None:
    chosen = choose(need, fleet)
    mixed = list(fleet)
    dice.shuffle(mixed)
    assert choose(need, mixed) == chosen
    assert chosen in {c.slot for c in fleet}


@given(needs, fleets)
def test_without_affinity_the_least_loaded_engine_is_chosen(need: Demand, fleet: list[Candidate]) -> None:
    chosen = next(c for c in fleet if c.slot == choose(need, fleet))
    if need.long:
        assert all((chosen.longs, chosen.outstanding) <= (c.longs, c.outstanding) for c in fleet)
    elif not need.affinity:
        assert chosen.outstanding == min(c.outstanding for c in fleet)


@given(needs, fleets)
def test_affinity_is_kept_up_to_the_load_limit(need: Demand, fleet: list[Candidate]) -> None:
    if not need.affinity or need.long:
        return
    mean = (sum(c.outstanding for c in fleet) + need.expected) / len(fleet)
    fits = {c.slot for c in fleet if c.outstanding + need.expected <= max(1.25 * mean, need.expected)}
    ranked = sorted(fleet, key=lambda c: weight(need.affinity, c.slot), reverse=True)
    wanted = next((c.slot for c in ranked if c.slot in fits), None)
    if wanted is not None:
        assert choose(need, fleet) == wanted
    else:
        assert choose(need, fleet) == choose(Demand(need.name, need.expected), fleet)


def test_a_removed_slot_moves_only_its_own_keys() -> None:
    keys = [f"session {n}" for n in range(300)]
    before = {key: choose(Demand("", 1, key), [Candidate(f"rollout/{n}", 0) for n in range(5)]) for key in keys}
    after = {key: choose(Demand("", 1, key), [Candidate(f"rollout/{n}", 0) for n in range(4)]) for key in keys}
    assert all(after[key] == before[key] for key in keys if before[key] != "rollout/4")
    counts = [list(before.values()).count(f"rollout/{n}") for n in range(5)]
    assert min(counts) > 30, counts


def longest_pile(*, aware: bool) -> int:
    """Long sequences on the engine that has the most of them, of a mixture that all wants one engine's prefix."""
    lengths, dice = LengthAverage(), random.Random(1)
    out, longs = dict.fromkeys("abcd", 0), dict.fromkeys("abcd", 0)
    for n in range(400):
        expected = 2000 if dice.random() < 0.1 else dice.randint(20, 100)
        long = lengths.is_long(expected) and aware
        fleet = [Candidate(s, out[s], longs[s]) for s in out]
        slot = choose(Demand(str(n), expected, "session one", long), fleet)
        out[slot] += expected
        longs[slot] += expected == 2000
    return max(longs.values()) - min(longs.values())


def test_long_sequences_are_spread_evenly() -> None:
    assert longest_pile(aware=True) <= 1 < longest_pile(aware=False)


def test_a_request_is_long_relative_to_recent_ones() -> None:
    lengths = LengthAverage()
    assert not any(lengths.is_long(1000) for _ in range(50)), "all alike: none is long"
    assert lengths.is_long(2500)
    assert not lengths.is_long(1900)
    dice, seen, short = LengthAverage(), [], 0
    for n in range(1000):
        seen.append(2000 if n % 20 == 0 else 50)
        short += dice.is_long(seen[-1]) and seen[-1] == 50
    assert short == 0
    assert statistics.fmean(seen) * core.LONG_FACTOR < 2000


def test_prefix_keys_depend_on_the_first_tokens() -> None:
    assert prefix_key(range(64)) == prefix_key(range(100)) != prefix_key(range(1, 65))
