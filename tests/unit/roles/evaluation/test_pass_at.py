"""pass@k and what several completions an item do to scores and intervals."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_rt.roles.evaluation.scoring import evaluate, pass_at, wilson


@given(st.integers(1, 9), st.data())
def test_it_is_the_share_of_subsets_that_hold_a_right_one(n: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([True] * right + [False] * (n - right), k))
    assert pass_at(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_many_completions_are_no_trouble() -> None:
    exact = 1 - math.comb(990, 500) / math.comb(1000, 500)
    assert pass_at(1000, 10, 500) == pytest.approx(exact, rel=1e-12)
    assert (pass_at(10, 0, 3), pass_at(10, 8, 3), pass_at(10, 3, 1)) == (0.0, 1.0, pytest.approx(0.3))


@pytest.mark.parametrize("wrong", [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_what_is_no_estimate_is_refused(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at(*wrong)


def test_several_completions_an_item() -> None:
    texts = ["1", "1", "0", "0", "2", "0", "0", "0"]
    result = evaluate(texts, ["1", "2"], [True] * 8, samples=4, ks=(1, 2, 4))
    assert (result["items"], result["samples"], result["exact"]) == (2, 4, 3 / 8)
    assert result["pass_at"] == pytest.approx({"1": 3 / 8, "2": (5 / 6 + 1 / 2) / 2, "4": 1.0})
    # As sure as two items can be, however many completions each has.
    assert (result["exact_low"], result["exact_high"]) == wilson(0.75, 2)
    assert result["pass_at_low"]["1"] == result["exact_low"] and result["pass_at_high"]["4"] == 1.0


def test_a_reward_functions_word_counts() -> None:
    right = [False, True, True, True]
    result = evaluate(["1", "x", "y", "z"], ["1", "1"], [True] * 4, samples=2, right=right, ks=(1, 2))
    assert (result["exact"], result["success"], result["pass_at"]) == (0.25, 0.75, {"1": 0.75, "2": 1.0})
    again = evaluate(["1"] * 4, ["1", "1"], [True] * 4, result, samples=2, right=[True] * 4)
    assert (again["gain"], again["success_gain"]) == (0.75, 0.25)
    assert again["success_gain_low"] < 0.25 < again["success_gain_high"]
    with pytest.raises(ValueError, match="zip"):
        evaluate(["1"] * 4, ["1", "1"], [True] * 4, samples=2, right=[True] * 3)


def test_intervals_are_those_of_the_items_alone() -> None:
    flat = evaluate(["1"] * 30 + ["x"] * 70, ["1"] * 100, [True] * 100)
    four = evaluate(["1"] * 120 + ["x"] * 280, ["1"] * 100, [True] * 400, samples=4)
    for key in ("exact", "exact_low", "exact_high", "lenient_low", "format_high"):
        assert flat[key] == pytest.approx(four[key], abs=1e-12)
