"""How tools/bench/weights.py tells a pause from noise, on tokens whose pauses are known."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "bench"))

from weights_pause import compare, difference, mean_gap, window

USUAL_S, TRANSFER_S, EVERY_S, CALM_S = 0.05, 0.1, 3.0, 2.5
Spans = list[tuple[float, float]]


def engine(updates: int, pause_s: float, jitter: float, slower: float = 1.0) -> tuple[list[float], Spans, Spans]:
    """Arrivals of tokens whose gaps scatter, with updates among them; the updates, and the calm between them.

    Args:
        pause_s: that each costs. slower: how much longer a gap is while weights are transferred.
    """
    dice = random.Random(7)
    begins = [EVERY_S * (n + 1) for n in range(updates)]
    at, arrivals, due = 0.0, list[float](), list(begins)
    while at < EVERY_S * (updates + 1):
        during = any(b <= at < b + TRANSFER_S for b in begins)
        at += USUAL_S * dice.lognormvariate(-(jitter**2) / 2, jitter) * (slower if during else 1.0)
        if due and at > due[0] + TRANSFER_S:
            at += pause_s
            due.pop(0)
        arrivals.append(at)
    disturbed = [(b, b + TRANSFER_S + 3 * USUAL_S) for b in begins]
    calm = [(EVERY_S * n + 0.4, EVERY_S * n + 0.4 + CALM_S) for n in range(updates + 1)]
    return arrivals, disturbed, calm


@pytest.mark.parametrize("jitter", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("pause_s", [0.0, 0.01, 0.06])
def test_a_pause_is_found_and_nothing_where_there_is_none(pause_s: float, jitter: float) -> None:
    found = compare(*engine(80, pause_s, jitter))
    lost_s, noise_s = found.lost()
    assert abs(lost_s - pause_s) <= max(2.5 * noise_s, 1e-6)
    assert noise_s < USUAL_S * max(jitter, 0.01) and len(found.calm) > 4 * len(found.disturbed)


def test_a_maximum_is_held_against_maxima() -> None:
    """The longest of some gaps is above the mean, update or not."""
    arrivals, disturbed, calm = engine(80, 0.0, 0.4)
    found = compare(arrivals, disturbed, calm)
    over = [one.longest_s - mean_gap(arrivals, calm) for one in found.disturbed]
    assert sum(over) / len(over) > 0.3 * USUAL_S
    longest_s, noise_s = found.longest()
    assert abs(longest_s) <= 2.5 * noise_s < 0.3 * USUAL_S


def test_a_slower_transfer_is_lost_time_too() -> None:
    lost_s, noise_s = compare(*engine(80, 0.0, 0.1, slower=2.0)).lost()
    assert lost_s > 0.3 * TRANSFER_S and noise_s < 0.1 * TRANSFER_S


def test_a_window_reaches_from_the_token_before_to_the_first_behind() -> None:
    arrivals = [0.0, 1.0, 2.0, 5.0, 6.0, 7.0]
    found = window(arrivals, 1.5, 5.5, 1.0)
    assert found is not None and (found.lost_s, found.longest_s) == (2.0, 3.0)
    assert window(arrivals, 5.5, 6.9, 1.0) is not None and window(arrivals, 5.5, 7.0, 1.0) is None
    assert window(arrivals, -1.0, 1.0, 1.0) is None
    assert mean_gap(arrivals, [(0.0, 2.0), (5.0, 7.5)]) == 1.0
    with pytest.raises(ValueError, match="no two tokens"):
        mean_gap(arrivals, [(2.5, 4.5)])


def test_the_noise_shrinks_with_what_was_seen() -> None:
    dice = random.Random(1)
    values = [dice.gauss(1.0, 1.0) for _ in range(640)]
    noises = [difference(values[:count], [0.0])[1] for count in (10, 80, 640)]
    assert all(more > 1.5 * less for more, less in itertools.pairwise(noises))
    assert abs(difference(values, [0.0])[0] - 1.0) < 3 * noises[-1]
