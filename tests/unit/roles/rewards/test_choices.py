"""The choice that a text commits to."""

from __future__ import annotations

import pytest

from relax_rt.roles.rewards.library.functions import UnreadableAnswer, make_function
from relax_rt.transport.rpc.errors import RelaxError

CASES: list[tuple[str, str, int]] = [
    ("I think B. A is wrong", "B", 1),
    ("So: (b)", "B", 1),
    ("the answer is a dog, so C", "C", 1),
    ("B", "B", 1),
    (" (b). ", "B", 1),
    ("The answer is (B).", "B", 1),
    ("A is wrong. The answer is **B**", "B", 1),
    ("so \\boxed{B}", "B", 1),
    ("\\boxed{\\text{B}}", "B", 1),
    ("Not A but B", "B", 1),
    ("Answer: A. No: answer: B", "B", 1),
    ("The answer is A", "B", 0),
    ("a bad idea", "B", 0),
    ("", "B", 0),
    ("The answer is Bx", "B", 0),
    # negation
    ("The answer is not A. It is B.", "B", 1),
    ("The answer is not A. It is B.", "A", 0),
    ("It can't be C, so D.", "D", 1),
    ("B isn't right, C is.", "C", 1),
    ("B isn't right, C is.", "B", 0),
    ("We can rule out A and B. C contradicts the text. D", "D", 1),
    ("A, B, and C are wrong.", "C", 0),
    ("A, B and C are incorrect; D is correct.", "D", 1),
    ("Option A is incorrect because it rains.", "A", 0),
    ("Answer: B. Option A is incorrect because it rains.", "B", 1),
    ("The correct answer is B rather than A", "B", 1),
    ("B, not A.", "B", 1),
    ("B, not A.", "A", 0),
    ("I would choose C over D.", "C", 1),
    ("I eliminated A.", "A", 0),
    ("The answer is C, unlike A which ignores friction.", "C", 1),
    ("The correct choice is D; neither A nor B fits.", "D", 1),
    # commits
    ("I'd go with C", "C", 1),
    ("My choice: D) Paris", "D", 1),
    ("Option C is correct.", "C", 1),
    ("(C) is the best answer", "C", 1),
    ("It must be D.", "D", 1),
    ("Therefore, E.", "E", 1),
    ("Hence the correct option is (a).", "A", 1),
    ("The best choice would be c)", "C", 1),
    ("**Final answer:** D", "D", 1),
    ("Final Answer: **(C)**", "C", 1),
    ("The answer is: \n\nB", "B", 1),
    ("answer is\n\\[\\boxed{C}\\]", "C", 1),
    ("\\boxed{\\textbf{(C)}}", "C", 1),
    ("\\boxed{C: 12}", "C", 1),
    ("\\boxed{A} or rather \\boxed{B}", "B", 1),
    ("<answer>C</answer>", "C", 1),
    ("#### C", "C", 1),
    ("Let me think. A says x. B says y.\n\nC", "C", 1),
    ("Reasoning...\nB) 42", "B", 1),
    ("Correct answer: B. Explanation: A is what one gets by a sign error.", "B", 1),
    ("The answer is A because it is round", "A", 1),
    ("The answer is A. B would be true if it rained.", "A", 1),
    ("I pick option D", "D", 1),
    ("Answer - C", "C", 1),
    ("answer=D", "D", 1),
    ("The right answer is “B”.", "B", 1),
    ("The answer is $\\text{B}$.", "B", 1),
    ("The answer is $B$", "B", 1),
    ("**B**", "B", 1),
    ("B.", "B", 1),
    ("B: because", "B", 1),
    ("Ｂ", "B", 1),
    # not choices
    ("A dog is an animal", "A", 0),
    ("the answer is a dog", "A", 0),
    ("I am sure", "I", 0),
    ("a", "A", 1),
    ("Vitamin C is good. So B.", "B", 1),
    ("A or B", "B", 0),
    ("A or B", "A", 0),
    ("The answer is A or B", "A", 0),
    ("It is either A or C", "C", 0),
    ("The options are A) one B) two C) three", "C", 0),
    ("Choices: (A) 1 (B) 2 (C) 3 (D) 4", "D", 0),
    ("I don't know", "D", 0),
    ("I do", "I", 0),
    ("The answer is A and B", "A", 0),
    # several letters
    ("The answer is A and C", "AC", 1),
    ("A, C", "AC", 1),
    ("AC", "A, C", 1),
    ("\\boxed{A, C}", "CA", 1),
    ("\\boxed{AC}", "A and C", 1),
    ("Answer: (A) and (C)", "AC", 1),
    ("Answer: A, B, C", "ABC", 1),
    ("Answer: A, B", "ABC", 0),
    ("The answer is A", "AC", 0),
    ("The correct answers are B and D.", "BD", 1),
    ("B and D are correct", "BD", 1),
    # beyond D
    ("The answer is H", "H", 1),
    ("So (j)", "J", 1),
    ("\\boxed{G}", "G", 1),
    ("The answer is (I).", "I", 1),
    ("I think F", "F", 1),
    ("I think it's F.", "I", 0),
    # gold writings
    ("The answer is B", "(B)", 1),
    ("The answer is B", "B.", 1),
    ("The answer is B", "b", 1),
    ("The answer is B", "B) Paris", 1),
    ("The answer is B", "Option B", 1),
    ("The answer is B", "\\text{B}", 1),
    ("The answer is B", "\\boxed{B}", 1),
    ("The answer is B", "Answer: B", 1),
]


def score(completion: str, answer: object, **options: object) -> float:
    return float(make_function("choice", options).call(completion, answer, {}))  # type: ignore[arg-type]


@pytest.mark.parametrize(("completion", "answer", "right"), CASES)
def test_choice(completion: str, answer: str, right: int) -> None:
    assert score(completion, answer) == right


def test_choice_of_other_letters_and_bare() -> None:
    assert score("the answer is (F)", "F", letters="EFG") == 1
    assert score("the answer is (A)", "F", letters="EFG") == 0
    assert score("the answer is (B)", "B", bare=True) == 0
    assert score("b)", "(B)", bare=True) == 1
    assert score("the answer is A", ["A", "C"]) == 0 and score("A and C", ["A", "C"]) == 1
    with pytest.raises(RelaxError, match="different letters"):
        make_function("choice", {"letters": "AAB"})


@pytest.mark.parametrize("answer", ["K", "42", "", "a dog", "A or B", "none of these", None, 2])
def test_an_answer_that_names_no_choice_is_reported(answer: object) -> None:
    with pytest.raises(UnreadableAnswer, match="no choice among ABCDEFGHIJ"):
        score("The answer is A", answer)


def test_a_long_completion_is_read_to_its_end() -> None:
    text = "answers: " * 20_000 + "not A, " * 20_000 + "A, B, C are wrong. " * 5_000
    assert score(text + "\\nThe answer is D.", "D") == 1
