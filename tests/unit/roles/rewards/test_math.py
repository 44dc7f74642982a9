"""Mathematical answers: read whole or not at all, and never computed when they are too large."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from math_golds import EQUAL, GOLDS, NOT_EQUAL, TOWERS, UNREADABLE

from relax_rt.roles.rewards.compose import Rewards
from relax_rt.roles.rewards.library import maths
from relax_rt.roles.rewards.library.final_answer import boxed, candidates
from relax_rt.roles.rewards.library.functions import UnreadableAnswer, make_function
from relax_rt.roles.rewards.scoring import RewardRequest, Score
from relax_rt.roles.rewards.settings import RewardTable

pytestmark = pytest.mark.skipif(find_spec("math_verify") is None, reason="math-verify is not installed")

WRITINGS = [
    "{}",
    "So the answer is $\\boxed{{{}}}$.",
    "The answer is ${}$.",
    "The final answer is {}.",
    "**Answer:** {}",
    "so the result is: ${}$ and that is all",
    "So we get\n\\[{}\\]",
    "First \\boxed{{1}}. No, wait: it is $\\boxed{{{}}}$, I hope.",
    "Thus\n\n#### {}",
    "<think>maybe 7</think><answer>{}</answer>",
]


def score(completion: str, answer: object, **options: object) -> float:
    return float(make_function("math", options).call(completion, answer, {}))  # type: ignore[arg-type]


@pytest.mark.parametrize(("gold", "parts"), GOLDS, ids=[gold for gold, _ in GOLDS])
def test_an_answer_equals_itself_in_every_writing_and_no_part_of_it(gold: str, parts: list[str]) -> None:
    assert {writing: score(writing.format(gold), gold) for writing in WRITINGS} == dict.fromkeys(WRITINGS, 1)
    assert score(f"\\boxed{{{gold}}}", f"${gold}$") == 1
    for writing in WRITINGS[:3]:
        assert {part: score(writing.format(part), gold) for part in parts} == dict.fromkeys(parts, 0)


@pytest.mark.parametrize(("gold", "said"), EQUAL)
def test_other_writings_of_an_answer(gold: str, said: str) -> None:
    assert [score(writing.format(said), gold) for writing in WRITINGS[:3]] == [1, 1, 1]


@pytest.mark.parametrize(("gold", "said"), NOT_EQUAL)
def test_answers_that_only_look_alike(gold: str, said: str) -> None:
    assert [score(writing.format(said), gold) for writing in WRITINGS[:3]] == [0, 0, 0]


@pytest.mark.parametrize("gold", UNREADABLE)
def test_an_answer_that_is_not_understood_as_a_whole_is_reported_and_never_read_by_half(gold: str) -> None:
    for said in (f"\\boxed{{{gold}}}", "\\boxed{5}", "12"):
        with pytest.raises(UnreadableAnswer, match="cannot be read: "):
            score(said, gold)
    # The same from the policy is no answer.
    assert score(f"\\boxed{{{gold}}}", "5") == 0


@pytest.mark.parametrize("tower", TOWERS, ids=[tower[:40] for tower in TOWERS])
def test_numbers_that_are_too_large_are_not_computed(tower: str) -> None:
    # Computed, the first would take all memory, and most of the others too.
    assert [score(said, "5") for said in (f"\\boxed{{{tower}}}", tower, f"The answer is ${tower}$.")] == [0, 0, 0]
    assert score(f"\\boxed{{{tower}}}", "$10^{10^{10}}$") == (tower == "10^{10^{10}}")


@pytest.mark.parametrize(
    "large", ["2^{2024}", "2^{2^{13}}", "2024!", "7^{999}", "10^{100}", "x^{2024}", "\\binom{2024}{2}"]
)
def test_numbers_that_are_only_large_are(large: str) -> None:
    assert score(f"\\boxed{{{large} + 1 - 1}}", large) == 1
    assert score(f"\\boxed{{{large} + 1}}", large) == 0


async def test_no_worker_is_lost_to_a_tower() -> None:
    lost: list[str] = []
    scorer = Rewards(RewardTable(function="math"), Path(), on_lost=lost.append)
    requests = [RewardRequest(f"\\boxed{{{tower}}}", "5", {}, group) for group, tower in enumerate(TOWERS)]
    try:
        await scorer.start()
        results = await scorer.score(requests)
        unreadable = await scorer.score_one(RewardRequest("\\boxed{1}", "5!!", {}))
    finally:
        await scorer.close()
    assert [result.total for result in results if isinstance(result, Score)] == [0.0] * len(TOWERS)
    assert not any(result.forgiven for result in results if isinstance(result, Score))
    assert lost == []
    assert isinstance(unreadable, Score) and unreadable.total == 0 and "'5!!' cannot be read" in unreadable.unreadable


def test_what_takes_too_long_counts_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def forever(*_: object, **__: object) -> bool:
        while True:
            pass

    monkeypatch.setattr(maths, "COMPARE_S", 0.05)
    monkeypatch.setattr(maths, "answers_equal", forever)
    assert score("\\boxed{5}", "5") == 0
    monkeypatch.setattr(maths, "gold_text", forever)
    with pytest.raises(UnreadableAnswer, match=r"takes longer than 0\.05 s"):
        score("\\boxed{5}", "5")


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("\\boxed{12}? No: \\boxed{13}", "13"),
        ("We have \\boxed{x=3}. Checking gives \\boxed{4}", "4"),
        ("\\fbox{1} is wrong, so \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}\n\nWait.\n\n$$\\boxed{\\frac{1}{3}}$$", "\\frac{1}{3}"),
        ("\\boxed{7}. So finally $\\boxed {8}$", "8"),
        ("The answer is 5. I double-checked: \\boxed{6}", "6"),
        ("\\boxed{1} " * 50 + "but \\boxed{2}", "2"),
        ("\\boxed{3} and \\boxed{5}", "3, 5"),
        ("$\\boxed{3}$, $\\boxed{5}$ and $\\boxed{7}$", "3, 5, 7"),
        ("\\boxed{13} and then \\boxed{1", "13"),
    ],
)
def test_the_last_box_counts(completion: str, answer: str) -> None:
    assert score(completion, answer) == 1


@pytest.mark.parametrize(
    "completion", ["\\boxed{12}, \\boxed{13}", "\\boxed{13}? No: \\boxed{12}", "\\boxed{}", "\\boxed{13 or 14}"]
)
def test_several_answers_are_not_the_right_one(completion: str) -> None:
    assert score(completion, "13") == 0


def test_whole_solutions_as_right_answers() -> None:
    assert score("#### 72", "She sold 48/2 = 24 in May, and 48 + 24 = 72.\n#### 72") == 1
    assert score("\\boxed{24}", "She sold 48/2 = 24 in May, and 48 + 24 = 72.\n#### 72") == 0
    assert score("\\boxed{\\frac{3}{4}}", "We add: $\\frac{1}{2} + \\frac14$, so \\boxed{\\frac{3}{4}}.") == 1


def test_answers_of_any_type() -> None:
    assert [score("\\boxed{42}", gold) for gold in (42, 42.0, "42", [42], 43)] == [1, 1, 1, 1, 0]
    assert [score("\\boxed{1, 2}", [2, 1]), score("\\boxed{0.5}", 0.5), score("\\boxed{true}", True)] == [1, 1, 1]
    with pytest.raises(UnreadableAnswer, match=r"it is empty|answer is empty"):
        score("\\boxed{1}", None)


def test_options() -> None:
    assert [score(text, "3", boxed=True) for text in ("3", "\\boxed{3}")] == [0, 1]
    assert [score("\\boxed{5}", "5 \\text{ cm}", units=units) for units in ("required", "optional")] == [0, 1]
    assert score("\\boxed{5 \\text{ m}}", "5 \\text{ cm}", units="optional") == 0
    assert [score("0.333", "1/3", digits=digits) for digits in (3, 4)] == [1, 0]
    assert [score("$y = 1$", "$x = 1$", strict=strict) for strict in (True, False)] == [0, 1]


def test_what_a_completion_says_last() -> None:
    assert boxed("\\boxed{\\{1\\}}") == "\\{1\\}" and boxed("\\boxed{a") is None
    assert next(candidates("so it is 5\n\nThe answer is $x$ cm. Good.")) == "x cm"
    assert score("The answer is 42!", "42") == 1
    assert score("We tried 5 and $7$. The answer is 9, because 3 + 6 = 9", "9") == 1
    assert score("no idea", "3") == score("", "3") == 0
