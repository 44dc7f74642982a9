"""Rewards that compare the completion with the answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

from relax_rt.config.schema import Table
from relax_rt.roles.evaluation import squeeze
from relax_rt.roles.rewards import builtin
from relax_rt.roles.rewards.registry import reward

Function = Callable[..., Any]
LONGEST = 100_000
"""Characters of a completion that are looked at, from its end."""


class ExactOptions(Table):
    """The completion is the answer, white space aside."""

    ignore_case: bool = False


@reward("exact", options=ExactOptions)
def _exact(options: ExactOptions) -> Function:
    def exact(completion: str, answer: str) -> float:
        said, right = squeeze(completion), squeeze(answer)
        return float(said.casefold() == right.casefold() if options.ignore_case else said == right)

    return exact


class ChoiceOptions(Table):
    """The letter that the completion chooses is the answer's."""

    letters: Annotated[str, Field(min_length=2, max_length=26)] = "ABCDE"
    """Of the choices."""
    bare: bool = False
    """Only a completion that is the letter and nothing else, as "B", "(B)" or "B." Otherwise the last choice that is
    announced ("the answer is (B)", "\\boxed{B}") counts, else the last letter that stands alone in capitals."""


ANNOUNCED = (
    r"(?:answer|choice|option)(?:\s+is)?\s*[:=]?\s*\**\(?([{letters}])\)?(?![A-Za-z])"
    r"|\\boxed\{{\s*(?:\\text\{{)?\(?([{letters}])\)?\s*\}}"
)


def _choice_letters(options: ChoiceOptions) -> list[tuple[str, str, str]]:
    letters = options.letters
    if not letters.isascii() or not letters.isalpha() or len(set(letters.upper())) != len(letters):
        return [("letters", f'"{letters}" must be different letters', 'as "ABCD"')]
    return []


@reward("choice", options=ChoiceOptions, check=_choice_letters)
def _choice(options: ChoiceOptions) -> Function:
    letters = options.letters.upper()
    announced = re.compile(ANNOUNCED.format(letters=letters + letters.lower()), re.IGNORECASE)
    alone = re.compile(rf"(?<![A-Za-z'])\(?([{letters}])\)?(?![A-Za-z'])")
    bare = re.compile(rf"\s*\(?([{letters}])\)?[.:]?\s*", re.IGNORECASE)

    def read(text: str) -> str:
        """The choice in a text; empty if there is none."""
        text = text[-LONGEST:]
        if (whole := bare.fullmatch(text[:64])) is not None and len(text) <= 64:
            return str(whole[1]).upper()
        if options.bare:
            return ""
        found = list(announced.finditer(text)) or list(alone.finditer(text))
        return next(group for group in found[-1].groups() if group).upper() if found else ""

    def choice(completion: str, answer: str) -> float:
        return float(bool(said := read(completion)) and said == read(answer))

    return choice


class IntegerOptions(Table):
    """0.3 for a completion that is an integer and nothing else and ended by itself, 0.7 more if it is the answer."""


@reward("integer", options=IntegerOptions)
def _integer(options: IntegerOptions) -> Function:
    return builtin.integer


class LenientIntegerOptions(Table):
    """The last integer anywhere in the completion is the answer."""


@reward("lenient_integer", options=LenientIntegerOptions)
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
