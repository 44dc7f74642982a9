"""Mathematical answers, compared by value: math-verify."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import Field

from relax_rt.config.schema import Table
from relax_rt.roles.rewards.library.final_answer import boxed, candidates
from relax_rt.roles.rewards.library.functions import UnreadableAnswer, reward
from relax_rt.roles.rewards.library.math_parsing import ParsedAnswer, ParseFailed, gold_text, read, word_key

LONGEST = 20_000
"""Characters of a completion that are read, from its end, where the answer is."""
COMPARE_S = 3.0
"""For reading and comparing one completion; then it counts as wrong. sympy's simplifications have no bound."""


class MathOptions(Table):
    """1 if the completion's final answer equals the right one as mathematics: fractions, sets, intervals, matrices,
    equations, ratios, numbers with units, words; LaTeX or plain."""

    digits: Annotated[int, Field(ge=1, le=15)] = 6
    """Decimal places to which numbers are compared."""
    strict: bool = True
    """Variables have names: x = 1 is not y = 1, and (1, 2) is no set."""
    boxed: bool = False
    """Read \\boxed{} alone: an answer that is not in a box is none."""
    units: Literal["required", "optional"] = "required"
    """Whether an answer may lack the unit, percent or currency sign that the right one has. One with another unit is
    wrong; one with a unit where the right one has none is compared without it."""


def _installed(options: MathOptions) -> list[tuple[str, str, str]]:
    if find_spec("math_verify") is None:
        return [("name", "math-verify is not installed", "pip install relax-rt[agentic]")]
    return []


class _Timeout(BaseException):
    """Time is up. No Exception: neither sympy nor math-verify may swallow it."""


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise _Late in the body when it takes longer; without effect outside the main thread, where no signal arrives."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise _Timeout

    before = signal.signal(signal.SIGALRM, late)
    # Again and again: what catches BaseException on its way gets the next one.
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _boxed_gold(answer: Any) -> str:
    """Return a completion with the right answer."""
    try:
        return f"\\boxed{{{gold_text(answer)}}}"
    except ParseFailed:
        return ""


# sympy may not terminate. Too large numbers are refused before they are computed, a deadline ends long computations in
# Python, and killing the worker ends long computations in C.
@reward("math", options=MathOptions, runs_in="worker", check=_installed, gold=_boxed_gold)
def _math(options: MathOptions) -> Callable[..., Any]:
    import math_verify  # noqa: F401 takes a second, which is not to count for the first completion

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def math(completion: str, answer: Any) -> float:
        try:
            with _deadline(COMPARE_S):
                text = gold_text(answer)
                gold = text, read(text)
        except ParseFailed as error:
            raise UnreadableAnswer(answer, str(error)) from None
        except _Timeout:
            raise UnreadableAnswer(answer, f"reading it takes longer than {COMPARE_S:g} s") from None
        try:
            with _deadline(COMPARE_S):
                said = final_answer(completion[-LONGEST:], only_boxed=options.boxed)
                return float(said is not None and answers_equal(gold, said, options))
        except _Timeout:
            return 0.0

    return math


def final_answer(completion: str, *, only_boxed: bool = False) -> tuple[str, ParsedAnswer | None] | None:
    """Return the final answer of a completion with its parsed form (None if unparsable); None if it has no answer."""
    if (inside := boxed(completion)) is not None:
        return inside, _try(inside)
    if only_boxed:
        return None
    for text in candidates(completion):
        if (found := _try(text)) is not None:
            return text, found
    return None


def _try(text: str) -> ParsedAnswer | None:
    try:
        return read(text)
    except ParseFailed:
        return None


def answers_equal(gold: tuple[str, ParsedAnswer], said: tuple[str, ParsedAnswer | None], options: MathOptions) -> bool:
    """Return whether an answer is the right one."""
    right, found = gold[1], said[1]
    if right.text:
        return word_key(said[0]) == right.writing
    if found is None or found.text:
        return False
    if found.writing == right.writing:
        return True
    if right.unit == "%" or found.unit == "%":
        return _same_percent(right, found, options)
    if right.unit == "degree" != found.unit:
        import sympy

        # In radians: 90 degrees are pi / 2.
        return (
            found.unit == "" and right.value is not None and _same_value(_scaled(right, sympy.pi / 180), found, options)
        )
    if right.unit and found.unit != right.unit and not (options.units == "optional" and not found.unit):
        return False
    return _same_value(right, found, options)


def _same_percent(right: ParsedAnswer, found: ParsedAnswer, options: MathOptions) -> bool:
    import sympy

    if right.unit == found.unit:
        return _same_value(right, found, options)
    if right.unit == "%":
        if found.unit:
            return False
        of_one = right.value is not None and _same_value(_scaled(right, sympy.Rational(1, 100)), found, options)
        return of_one or (options.units == "optional" and _same_value(right, found, options))
    if right.unit:
        return False
    of_one = found.value is not None and _same_value(right, _scaled(found, sympy.Rational(1, 100)), options)
    return of_one or _same_value(right, found, options)


def _scaled(reading: ParsedAnswer, factor: Any) -> ParsedAnswer:
    try:
        return dataclasses.replace(reading, value=reading.value * factor, unit="")
    except TypeError:
        return reading


def _same_value(right: ParsedAnswer, found: ParsedAnswer, options: MathOptions) -> bool:
    if right.parts or found.parts:
        # Part by part. What cannot be a time of day is a ratio: equal to its multiples and, of two parts, its
        # quotient.
        ours, theirs = right.parts, found.parts
        if len(ours) == len(theirs) and all(_equal(a, b, options) for a, b in zip(ours, theirs, strict=True)):
            return True
        if right.timelike or not ours:
            return False
        if not theirs:
            return len(ours) == 2 and found.value is not None and _equal(ours[0], ours[1] * found.value, options)
        products = zip(ours[1:], theirs[1:], strict=len(ours) == len(theirs)) if len(ours) == len(theirs) else []
        return len(ours) == len(theirs) and all(_equal(theirs[0] * a, ours[0] * b, options) for a, b in products)
    if right.value is None or found.value is None or right.count != found.count:
        return False
    return _equal(right.value, found.value, options, rounded=right.decimal or found.decimal)


def _equal(right: Any, found: Any, options: MathOptions, *, rounded: bool = False) -> bool:
    import math_verify

    if rounded and (close := _close(right, found, options.digits)) is not None:
        return close
    return bool(
        math_verify.verify(
            right,
            found,
            float_rounding=options.digits,
            strict=options.strict,
            # x >= 5 and [5, oo) say the same.
            allow_set_relation_comp=True,
            timeout_seconds=None,
            raise_on_error=False,
        )
    )


def _close(right: Any, found: Any, digits: int) -> bool | None:
    """Return whether two numbers are equal to `digits` decimal places, or to 0.1% if those would round the number to 0.

    None if one is not a real number.
    """
    import sympy

    if not all(isinstance(one, sympy.Expr) and not one.free_symbols and one.is_number for one in (right, found)):
        return None
    try:
        ours, theirs = sympy.N(right, 40), sympy.N(found, 40)
        if not (ours.is_real and theirs.is_real and ours.is_finite and theirs.is_finite):
            return None
        most = sympy.Float(10) ** -digits / 2
        return bool(abs(ours - theirs) <= (most if abs(ours) > 2 * most else abs(ours) / 1000))
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return None
