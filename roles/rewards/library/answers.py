"""Rewards that compare the completion with the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unicodedata import normalize

from relax_rt.config.schema import Table
from relax_rt.roles.data.items import answer_text
from relax_rt.roles.rewards.library.final_answer import bare_integer, last_integer, squeeze
from relax_rt.roles.rewards.library.functions import UnreadableAnswer, reward

Function = Callable[..., Any]
FORMAT, RIGHT = 0.3, 0.7
"""Parts of the reward `integer`."""


def _integer_answer(answer: Any) -> int:
    value = bare_integer(answer_text(answer))
    if value is None:
        raise UnreadableAnswer(answer, "it is not an integer")
    return value


def integer(completion: str, answer: Any, finish_reason: str = "stop") -> dict[str, float]:
    """0.3 for a completion that is an integer and nothing else and ended by itself, 0.7 more if it is the answer."""
    right, value = _integer_answer(answer), bare_integer(completion)
    formatted = value is not None and finish_reason == "stop"
    return {"format": FORMAT * formatted, "right": RIGHT * (formatted and value == right)}


def lenient_integer(completion: str, answer: Any) -> float:
    """1 if the last number anywhere in the completion is the answer, an integer."""
    return float(last_integer(completion) == _integer_answer(answer))


def exact(completion: str, answer: Any) -> float:
    """1 if the completion is the answer, white space aside."""
    return float(squeeze(completion) == squeeze(answer_text(answer)))


def verifier(completion: str, answer: str, score: Callable[[str], float]) -> float:
    """The reasoning-gym task's own verdict, 0 to 1."""
    return score(completion.strip())


def judged(completion: str, answer: str, verdict: float) -> dict[str, float]:
    """The verdict of the generative judge, 0 to 1: what `reward.function = "genrm"` means."""
    return {"verdict": verdict}


class ExactOptions(Table):
    """The completion is the answer, white space aside."""

    ignore_case: bool = False


@reward("exact", options=ExactOptions, gold=answer_text)
def _exact(options: ExactOptions) -> Function:
    def score(completion: str, answer: Any) -> float:
        said, right = squeeze(normalize("NFC", completion)), squeeze(normalize("NFC", answer_text(answer)))
        if not right:
            raise UnreadableAnswer(answer, "it is empty")
        return float(said.casefold() == right.casefold() if options.ignore_case else said == right)

    return score


class IntegerOptions(Table):
    """0.3 for a completion that is an integer and nothing else and ended by itself, 0.7 more if it is the answer."""


@reward("integer", options=IntegerOptions, gold=answer_text)
def _integer(options: IntegerOptions) -> Function:
    return integer


class LenientIntegerOptions(Table):
    """The last number anywhere in the completion is the answer, an integer."""


@reward("lenient_integer", options=LenientIntegerOptions, gold=answer_text)
def _lenient_integer(options: LenientIntegerOptions) -> Function:
    return lenient_integer


class VerifierOptions(Table):
    """The own verdict of the reasoning-gym task in data.task, 0 to 1."""


@reward("verifier", options=VerifierOptions, runs_in="worker")
def _verifier(options: VerifierOptions) -> Function:
    return verifier


class GenrmOptions(Table):
    """The verdict of the generative judge of [reward.judge], 0 to 1."""


@reward("genrm", options=GenrmOptions)
def _genrm(options: GenrmOptions) -> Function:
    return judged
