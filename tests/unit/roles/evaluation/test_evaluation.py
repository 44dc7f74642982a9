"""Held-out scores and their intervals."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_rt.roles.evaluation.scoring import (
    bare_integer,
    constant_answer,
    difference,
    evaluate,
    exact,
    last_integer,
    lenient,
    wilson,
)


@pytest.mark.parametrize(
    ("text", "bare", "last"),
    [
        ("46", 46, 46),
        (" -46\n", -46, -46),
        ("+7", 7, 7),
        ("46.", None, 46),
        ("The answer is 1,234!", None, 1234),
        ("12 + 34 = 46", None, 46),
        ("3-2", None, 2),
        ("it is -2", None, -2),
        ("1,2", None, 2),
        ("12345,678", None, 12345678),
        ("none", None, None),
        ("", None, None),
        ("4 6", None, 6),
        ("1,234", 1234, 1234),
        ("\u2212 7", None, 7),
        ("\u22127", -7, -7),
        ("3.5", None, None),
        ("3.0", None, 3),
        ("2/5", None, None),
        ("x^5", None, None),
        ("in 5 s", None, 5),
        ("Answer:42", None, 42),
        ("the answer is:42", None, 42),
        ("The result...42", None, 42),
        ("ok.42", None, 42),
        ("**Answer:**42", None, 42),
        ("answer:-42", None, -42),
        ("so\u202642", None, 42),
        ("(6*7).42", None, 42),
        ("x/42", None, 42),
        ("3:15", None, None),
        ("3:-15", None, None),
        ("1.2.3", None, None),
        (".5", None, None),
        ("p = .5", None, None),
        ("p=.5", None, None),
        ("-.5", None, None),
        ("2^5", None, None),
    ],
)
def test_integers_in_text(text: str, bare: int | None, last: int | None) -> None:
    assert bare_integer(text) == bare
    assert last_integer(text) == last


def test_digits_without_end_are_no_answer() -> None:
    assert bare_integer("9" * 100_000) is None
    assert last_integer("9" * 100_000) is None


@given(st.integers(-(10**9), 10**9), st.text(alphabet="abc .!", max_size=5))
def test_a_bare_answer_is_exact_and_any_around_it_is_lenient(number: int, around: str) -> None:
    assert exact(f" {number} ", f"{number}", integers=True)
    assert lenient(f"{around} {number} {around}", str(number), integers=True)
    assert not lenient(f"{around} {number + 1}", str(number), integers=True)


def test_text_answers() -> None:
    assert exact(" New  York\n", "New York", integers=False)
    assert not exact("new york", "New York", integers=False)
    assert lenient("It is new york.", "New York", integers=False)
    assert not lenient("It is new yorkshire.", "New York", integers=False)
    assert not lenient("anything", "", integers=False)


def test_wilson_known_values() -> None:
    # R: prop.test(15, 50, correct = FALSE)$conf.int
    assert wilson(15, 50) == pytest.approx((0.1910, 0.4375), abs=5e-4)
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == 1.0


@given(st.integers(1, 2000), st.floats(0, 1))
def test_wilson_holds_the_share_and_narrows(n: int, share: float) -> None:
    successes = round(share * n)
    low, high = wilson(successes, n)
    assert 0 <= low <= successes / n <= high <= 1
    wide = wilson(successes, n, z=3)
    assert wide[0] <= low and high <= wide[1]


def test_difference_known_value() -> None:
    # Newcombe 1998, table II, row (a) method 10: 56/70 - 48/80.
    assert difference((48, 80), (56, 70)) == pytest.approx((0.0524, 0.3339), abs=5e-4)


@given(st.integers(1, 500), st.integers(1, 500), st.data())
def test_difference_is_antisymmetric_and_holds_the_gap(n: int, m: int, data: st.DataObject) -> None:
    a, b = data.draw(st.integers(0, n)), data.draw(st.integers(0, m))
    low, high = difference((a, n), (b, m))
    back_low, back_high = difference((b, m), (a, n))
    assert (low, high) == pytest.approx((-back_high, -back_low))
    assert low - 1e-12 <= b / m - a / n <= high + 1e-12


def test_constant_answer_does_not_depend_on_order() -> None:
    assert constant_answer(["2", "1", "1 ", "2", "3"]) == ("1", 0.4) == constant_answer(["3", "2", "2", "1", "1"])
    assert constant_answer([]) == ("", 0.0)


def test_evaluate_counts_each_kind() -> None:
    result = evaluate(["46", "46", "it is 46", "45", "well"], ["46"] * 5, [True, False, True, True, False])
    assert (result["items"], result["format"], result["exact"], result["lenient"]) == (5, 0.4, 0.2, 0.6)
    assert (result["constant"], result["constant_answer"]) == (1.0, "46")
    assert result["exact_low"] < 0.2 < result["exact_high"]
    assert "gain" not in result


def test_evaluate_text_answers() -> None:
    result = evaluate(["red", "Blue it is", "green"], ["red", "blue", "7"], [True, True, True])
    assert (result["format"], result["exact"], result["lenient"]) == pytest.approx((1.0, 1 / 3, 2 / 3))


def test_evaluate_compares_with_before() -> None:
    before = evaluate(["x"] * 100, ["1"] * 100, [True] * 100)
    after = evaluate(["1"] * 30 + ["x"] * 70, ["1"] * 100, [True] * 100, before)
    assert after["gain"] == pytest.approx(0.3)
    assert 0.15 < after["gain_low"] < 0.3 < after["gain_high"] < 0.45
    assert all(math.isfinite(v) for v in after.values() if isinstance(v, float))


def test_evaluate_refuses_uneven_lengths() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        evaluate(["1"], ["1", "2"], [True])
