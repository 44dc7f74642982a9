"""Rewards for the form of a completion."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from relax_rt.config.schema import Table
from relax_rt.roles.data.items import answer_text
from relax_rt.roles.rewards.library.final_answer import squeeze
from relax_rt.roles.rewards.library.functions import UnreadableAnswer, reward

Function = Callable[..., Any]
Wrong = list[tuple[str, str, str]]


class RegexOptions(Table):
    """1 where a regular expression matches."""

    pattern: Annotated[str, Field(min_length=1)]
    """Regular expression of Python's `re`; `.` matches line ends, too."""
    whole: bool = False
    """The completion as a whole must match, and not only some part of it."""
    ignore_case: bool = False
    equals_answer: bool = False
    """Besides, the first group of the last match must be the answer, white space aside."""


def _compile(options: RegexOptions) -> re.Pattern[str]:
    return re.compile(options.pattern, re.DOTALL | (re.IGNORECASE if options.ignore_case else 0))


def _regex_wrong(options: RegexOptions) -> Wrong:
    try:
        pattern = _compile(options)
    except re.error as error:
        return [("pattern", f"is no regular expression: {error}", "a literal string, as 'a\\d+', needs no doubling")]
    if options.equals_answer and pattern.groups < 1:
        return [("pattern", "has no group, and equals_answer compares the first one", "as 'answer: (\\d+)'")]
    if not options.whole and pattern.match("") is not None:
        return [("pattern", "matches nothing at all, and so everywhere", "or set whole = true")]
    return []


# Some patterns do not terminate on some texts, and hold the interpreter meanwhile.
@reward("regex", options=RegexOptions, runs_in="worker", check=_regex_wrong)
def _regex(options: RegexOptions) -> Function:
    pattern = _compile(options)

    def regex(completion: str, answer: Any) -> float:
        right = squeeze(answer_text(answer))
        if options.equals_answer and not right:
            raise UnreadableAnswer(answer, "it is empty")
        if options.whole:
            found = pattern.fullmatch(completion)
        else:
            found = None
            for found in pattern.finditer(completion):  # noqa: B007 the last one is wanted
                pass
        if found is None or not options.equals_answer:
            return float(found is not None)
        return float(squeeze(found.group(1) or "") == right)

    return regex


class TagsOptions(Table):
    """1 for a completion that is nothing but <tag>…</tag> of each tag, once and in order: R1's format reward."""

    tags: Annotated[list[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]], Field(min_length=1)] = Field(
        default=["think", "answer"]
    )
    opened: bool = False
    """Set it if the prompt already opens the first tag."""


@reward("tags", options=TagsOptions)
def _tags(options: TagsOptions) -> Function:
    marks = [mark for tag in options.tags for mark in (f"<{tag}>", f"</{tag}>")]

    def tags(completion: str, answer: str) -> float:
        expected = marks[1:] if options.opened else marks
        if any(completion.count(mark) != (mark in expected) for mark in marks):
            return 0.0
        at = 0
        for number, mark in enumerate(expected):
            place = completion.find(mark, at)
            between = completion[at:place]
            inside = mark.startswith("</")
            if place < 0 or (inside and not between.strip()) or (not inside and between.strip()):
                return 0.0
            at = place + len(expected[number])
        return float(not completion[at:].strip())

    return tags


class JsonOptions(Table):
    """1 for a completion that is JSON: as a whole, or in one fenced block."""

    keys: dict[str, Literal["string", "number", "boolean", "array", "object", "null", "any"]] = Field(
        default_factory=dict
    )
    """Required keys of an object, with their types: { name = "string" }."""
    only: bool = False
    """No other keys are allowed."""


TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
    "any": (object,),
}
FENCE = "```"


def unfenced(text: str) -> str:
    """Return the content of the last complete fenced block, else of an unclosed one, else the text."""
    parts = text.split(FENCE)
    blocks = parts[1::2]
    if not blocks:
        return text
    open_end = len(parts) % 2 == 0
    block = blocks[-2] if open_end and len(blocks) > 1 else blocks[-1]
    language, line_end, rest = block.partition("\n")
    return rest if line_end and not re.search(r"[^\w+#.-]", language.strip()) else block


def _no_constant(name: str) -> None:
    """Python reads NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{name} is no JSON")


@reward("json", options=JsonOptions)
def _json(options: JsonOptions) -> Function:
    def fits(value: Any, type_: str) -> bool:
        return isinstance(value, TYPES[type_]) and not (type_ == "number" and isinstance(value, bool))

    def is_json(completion: str, answer: str) -> float:
        try:
            value = json.loads(unfenced(completion), parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return 0.0
        if not options.keys:
            return 1.0
        if not isinstance(value, dict) or (options.only and set(value) - set(options.keys)):
            return 0.0
        return float(all(name in value and fits(value[name], type_) for name, type_ in options.keys.items()))

    return is_json


class LengthRewardOptions(Table):
    """0 up to `free` tokens, falling evenly to -1 at `most` and beyond: DAPO's soft overlong punishment (3.4)."""

    free: Annotated[int, Field(ge=0)]
    """Tokens without a penalty."""
    most: Annotated[int, Field(ge=1)]
    """Tokens with the full penalty of 1."""


def _length_wrong(options: LengthRewardOptions) -> Wrong:
    if options.free < options.most:
        return []
    return [("most", f"is not above free = {options.free}", "")]


@reward("length", options=LengthRewardOptions, check=_length_wrong)
def _length(options: LengthRewardOptions) -> Function:
    def length(completion: str, answer: str, tokens: int) -> float:
        return -min(1.0, max(0.0, (tokens - options.free) / (options.most - options.free)))

    return length
