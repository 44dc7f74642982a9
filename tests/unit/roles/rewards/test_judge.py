"""A generative judge: what it is asked, how its words are read, and what becomes of those who get no verdict."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("torch")

from relax_rt.roles.models.tiny import character_tokenizer
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.roles.rewards.builtin import judged
from relax_rt.roles.rewards.judge import Judge, JudgeVerdict, Judging, LateVerdict, fields_of, with_verdict
from relax_rt.roles.rewards.scoring import RewardFailed, RewardRequest
from relax_rt.roles.rewards.settings import JudgeTable
from relax_rt.roles.rollout.router import GenerationRequest, NotGenerated, Outcome

TOKENIZER = ChatTokenizer(character_tokenizer(), Path())
REQUEST = RewardRequest("42 {or so}", "43", {"question": "41 + 2 =", "metadata": {"level": 3}})


def judging(prompt: str = "{completion}", **keys: object) -> Judging:
    return Judging(JudgeTable.model_validate({"prompt": prompt, **keys}), TOKENIZER)


def asked(judge: Judging, request: RewardRequest = REQUEST) -> str:
    return TOKENIZER.spell(judge.questions(request)[0].prompt)


def test_what_is_asked_holds_question_completion_answer_and_metadata_as_they_are() -> None:
    text = asked(judging("{question}|{completion}|{answer}|{level}|{{}}", system="Be just."))
    assert text == "<|system|>Be just.<|end|><|user|>41 + 2 =|42 {or so}|43|3|{}<|end|><|assistant|>"


def test_each_sample_has_a_seed_of_its_own_and_the_same_in_every_run() -> None:
    judge = judging(samples=3, temperature=1.0)
    seeds = [question.seed for question in judge.questions(REQUEST)]
    assert len(set(seeds)) == 3 and all(0 <= seed < 1 << 63 for seed in seeds)
    assert seeds == [question.seed for question in judge.questions(REQUEST)]
    other = RewardRequest("41", "43", REQUEST.info)
    assert not set(seeds) & {question.seed for question in judge.questions(other)}


@pytest.mark.parametrize("prompt", ["{completion.__class__}", "{completion[0]}", "{completion!r}", "{answer:>9}", "{}"])
def test_a_prompt_names_plain_fields(prompt: str) -> None:
    with pytest.raises(ValueError, match=r"plain field|Replacement"):
        fields_of(prompt)


@pytest.mark.parametrize(
    ("keys", "words", "verdict"),
    [
        ({}, "0.25 or rather 0.75", 0.75),
        ({"highest": 10.0}, "Score: 7", 0.7),
        ({"highest": 10.0}, "Score: 70", 1.0),
        ({"lowest": -1.0}, "-1", 0.0),
        ({}, "good", None),
        ({"otherwise": 0.0}, "good", 0.0),
        ({"pattern": r"score (\d)", "highest": 5.0}, "9 score 4", 0.8),
        ({"pattern": r"\b(yes|no)\b", "words": {"yes": 1.0, "no": 0.0}}, "No... YES.", 1.0),
        ({"pattern": r"\b(yes|no|perhaps)\b", "words": {"yes": 1.0}}, "perhaps", None),
        ({"pattern": r"yes|no", "words": {"yes": 1.0, "no": 0.5}}, "no", 0.5),
    ],
)
def test_the_last_match_is_the_verdict(keys: dict[str, object], words: str, verdict: float | None) -> None:
    found = judging(**keys).read(words)
    assert found == (verdict if verdict is None else pytest.approx(verdict))


def test_several_answers_are_one_verdict_and_one_that_cannot_be_read_fails_the_sample() -> None:
    judge = judging()
    assert judge.verdict([TOKENIZER.encode("1"), TOKENIZER.encode("0.5")]) == JudgeVerdict(0.75, ["1", "0.5"])
    failed = judge.verdict([TOKENIZER.encode("1"), TOKENIZER.encode("well")])
    assert isinstance(failed, RewardFailed) and "'well'" in failed.reason and not isinstance(failed, LateVerdict)


async def test_what_fails_is_the_sample_and_not_the_batch() -> None:
    async def generate(wanted: GenerationRequest) -> Outcome:
        text = TOKENIZER.decode(wanted.prompt)
        if "late" in text or "lost" in text:
            error = NotGenerated("a sequence", why="no engine")
            error.outcome = Outcome(kind="late" if "late" in text else "failed")
            raise error
        await asyncio.sleep(0)
        return Outcome(kind="done", tokens=TOKENIZER.encode(text[-1]))

    counted: list[int] = []
    judge = Judge(judging(highest=10.0), generate)
    requests = [RewardRequest(text, "", {}) for text in ("word 3", "late", "5", "lost", "none")]
    found = await judge.verdicts(requests, lambda: counted.append(1))
    assert [type(one) for one in found] == [JudgeVerdict, LateVerdict, JudgeVerdict, RewardFailed, RewardFailed]
    assert len(counted) == 5
    verdict = found[2]
    assert isinstance(verdict, JudgeVerdict)
    info = with_verdict(requests[2], verdict).info
    assert judged("5", "", **info) == {"verdict": 0.5}


async def test_a_prompt_that_names_what_an_item_lacks_fails_that_sample() -> None:
    async def generate(wanted: GenerationRequest) -> Outcome:
        raise AssertionError("it is not asked")

    (found,) = await Judge(judging("{completion} {colour}"), generate).verdicts([REQUEST])
    assert isinstance(found, RewardFailed) and "{colour}" in found.reason and "level" in found.reason
