"""Rewards that compare the completion with the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unicodedata import normalize

from relax_rt.config.schema import Table
from relax_rt.roles.data.items import answer_text
from relax_rt.roles.evaluation.scoring import squeeze
from relax_rt.roles.rewards import builtin
from relax_rt.roles.rewards.loader import UnreadGold
from relax_rt.roles.rewards.registry import reward

Function = Callable[..., Any]


class ExactOptions(Table):
    """The completion is the answer, white space aside."""

    ignore_case: bool = False


@reward("exact", options=ExactOptions, gold=answer_text)
def _exact(options: ExactOptions) -> Function:
    def exact(completion: str, answer: Any) -> float:
        said, right = squeeze(normalize("NFC", completion)), squeeze(normalize("NFC", answer_text(answer)))
        if not right:
            raise UnreadGold(answer, "it is empty")
        return float(said.casefold() == right.casefold() if options.ignore_case else said == right)

    return exact


class IntegerOptions(Table):
    """0.3 for a completion that is an integer and nothing else and ended by itself, 0.7 more if it is the answer."""


@reward("integer", options=IntegerOptions, gold=answer_text)
def _integer(options: IntegerOptions) -> Function:
    return builtin.integer


class LenientIntegerOptions(Table):
    """The last number anywhere in the completion is the answer, an integer."""


@reward("lenient_integer", options=LenientIntegerOptions, gold=answer_text)
def _lenient_integer(options: LenientIntegerOptions) -> Function:
    return builtin.lenient_integer


class VerifierOptions(Table):
    """The own verdict of the reasoning-gym task in data.task, 0 to 1."""


@reward("verifier", options=VerifierOptions, place="worker")
def _verifier(options: VerifierOptions) -> Function:
    return builtin.verifier


class GenrmOptions(Table):
    """The verdict of the generative judge of [reward.judge], 0 to 1."""


@reward("genrm", options=GenrmOptions)
def _genrm(options: GenrmOptions) -> Function:
    return builtin.judged
