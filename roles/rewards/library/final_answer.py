"""Find the part of a completion that is its final answer. Pure functions on text; `math` and `choice` use them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from relax_rt.roles.data.items import answer_text

SHORT = 200
"""Characters of a completion that may be an answer as a whole."""
BRACE = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{|\\.|[{}]", re.DOTALL)
"""Start of a box, an escaped character (`\\{` is not a brace), or a brace."""
JOINED = re.compile(r"(?:[\s$,;.:]|\\[()\[\],;! ]|\\quad|\\text\s*\{\s*(?:and|or)\s*\}|\band\b|\bor\b)*")
"""Text allowed between boxes that form one answer together, as in "\\boxed{3} and \\boxed{5}"."""
MATH = re.compile(
    r"\$\$(.{1,1000}?)\$\$|\\\[(.{1,1000}?)\\\]|(?<!\\)\$((?:\\\$|[^$\n]){1,1000})(?<!\\)\$|\\\((.{1,1000}?)\\\)",
    re.DOTALL,
)
ANNOUNCED = re.compile(
    r"####|<answer>"
    r"|\b(?:final\s+|correct\s+|right\s+)?(?:answer|result|solution)s?(?:\s+(?:here|then|to\b[^.\n=]{0,60}?))?"
    r"(?:\s*\**\s*[:=]\s*\**|\s+(?:is|are|equals?|would\s+be|must\s+be)(?:\s*:|\b))",
    re.IGNORECASE,
)
FILLER = re.compile(
    r"(?:\s|\*\*|:|(?:indeed|then|just|simply|therefore|thus|now|equal to|given by|the (?:number|value))\b)+",
    re.IGNORECASE,
)
END = re.compile(
    r"\n|</answer>|[.;?](?=\s|\*|$)|\s(?=(?:because|since|so|as|which|where|when|but|whereas)\b)", re.IGNORECASE
)
BESIDE = re.compile(r"[ \t]*(?:\\?%|[a-zA-Z]+\.?(?:[²³]|\^\d|/[a-zA-Z]+)?(?:[ \t]+[a-zA-Z]+)?)[.\s*]*$")
"""A unit after a formula: one or two words."""


def boxes(text: str) -> list[tuple[int, int, str]]:
    """Start, end and content of each complete box, in order. Boxes within a complete box are not listed."""
    found: list[tuple[int, int, str]] = []
    opened: list[re.Match[str]] = []
    for mark in BRACE.finditer(text):
        if mark[0].endswith("{") and mark[0] != "\\{":
            opened.append(mark)
        elif mark[0] == "}" and opened and (box := opened.pop())[0] != "{":
            while found and found[-1][0] > box.start():
                found.pop()
            found.append((box.start(), mark.end(), text[box.end() : mark.start()].strip()))
    return found


def closing_brace(text: str, opening: int) -> int | None:
    """Position of the brace that closes the one at `opening`; None if unclosed. `\\{` and `\\}` are not braces."""
    depth = 0
    for mark in BRACE.finditer(text, opening):
        if mark[0] == "}":
            depth -= 1
        elif mark[0].endswith("{") and mark[0] != "\\{":
            depth += 1
        if depth == 0 and mark[0] == "}":
            return mark.start()
    return None


def boxed(text: str) -> str | None:
    """Return the content of the last box, joined with those directly before it that belong to the same answer."""
    found = boxes(text)
    if not found:
        return None
    contents = [found[-1][2]]
    for earlier, later in zip(reversed(found[:-1]), reversed(found[1:]), strict=True):
        if JOINED.fullmatch(text, earlier[1], later[0]) is None:
            break
        if earlier[2] != contents[0]:
            contents.insert(0, earlier[2])
    return ", ".join(contents)


def candidates(text: str) -> Iterator[str]:
    """Yield what may be the final answer of a completion without a box, the most explicit first.

    That is what the last "answer is" or "####" announces: a completion that announces an answer commits to it, and
    nothing else is read. Else the whole of a short completion, the last formula, or the last run of words that
    look like a formula.
    """
    announced = None
    for announced in ANNOUNCED.finditer(text):  # noqa: B007 the last one is wanted
        pass
    if announced is not None:
        rest = text[announced.end() :]
        if (filler := FILLER.match(rest)) is not None:
            rest = rest[filler.end() :]
        # Behind a verb an exclamation mark ends the sentence; elsewhere it may be a factorial.
        yield from _beginning(rest.lstrip(), spoken=announced[0][-1].isalpha())
        return
    formulas = list(MATH.finditer(text))
    if len(text.strip()) <= SHORT and (not formulas or len(re.findall(r"[^\W\d_]{2,}", MATH.sub(" ", text))) < 2):
        yield text
    if formulas:
        yield _joined(text, formulas)
        return
    for line in reversed(text.split("\n")):
        if (run := _last_run(line)) is not None:
            yield run
            return


def _beginning(rest: str, *, spoken: bool) -> Iterator[str]:
    """Yield the answer at the beginning of a text: formulas, or the text to the end of its sentence or clause."""
    if (first := MATH.match(rest)) is not None:
        formulas = [first]
        for one in MATH.finditer(rest, first.end()):
            if JOINED.fullmatch(rest, formulas[-1].end(), one.start()) is None:
                break
            formulas.append(one)
        joined = ", ".join(_content(one) for one in formulas)
        behind = rest[formulas[-1].end() :]
        end = END.search(behind)
        if (unit := BESIDE.fullmatch(behind[: end.start() if end else None])) is not None:
            yield f"{joined} {unit[0].strip()}"
        yield joined
        return
    end = END.search(rest)
    clause = rest[: end.start() if end else None].strip()
    if spoken and (end is None or end[0] != "."):
        clause = clause.removesuffix("**").removesuffix("!")
    yield clause
    if (run := _last_run(clause)) is not None:
        yield run


def _content(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None)


def _joined(text: str, formulas: list[re.Match[str]]) -> str:
    contents = [_content(formulas[-1])]
    for earlier, later in zip(reversed(formulas[:-1]), reversed(formulas[1:]), strict=True):
        if JOINED.fullmatch(text, earlier.end(), later.start()) is None:
            break
        contents.insert(0, _content(earlier))
    return ", ".join(contents)


TOKEN = re.compile(r"\S+")
FORMULA = re.compile(r".*[\d\\].*|[-+*/^=<>±×÷·(){}\[\],|:]+|[b-zB-HJ-Z][,;]?|or|and|cup", re.DOTALL)


def _last_run(line: str) -> str | None:
    """Return the last run of words in a line that look like a formula and contain a digit or a command."""
    words = TOKEN.findall(line)
    run: list[str] = []
    for word in reversed(words):
        if FORMULA.fullmatch(word.strip("*")) is not None:
            run.insert(0, word.strip("*"))
            if len(run) > 1 and re.search(r"[.;?]$", word):
                run.pop(0)  # the end of the sentence before
                break
        elif any(re.search(r"[\d\\]", one) for one in run):
            break
        else:
            run = []
    while run and run[0] in ("or", "and", ","):
        run.pop(0)
    while run and run[-1] in ("or", "and", ","):
        run.pop()
    return " ".join(run) if any(re.search(r"[\d\\]", one) for one in run) else None


MINUS = str.maketrans("\u2212\ufe63\uff0d\uff0b\uff0c", "---+,")
"""Signs and the comma as other keyboards and LaTeX renderers write them."""
NUMBER = re.compile(r"[+-]?\d+(?:,\d{3})*(?!\d)(\.\d+)?")
BROKEN_OFF = re.compile(r"(?:\^|\d[/:]|(?:^|[\d\s(\[{=$:,+-])\.)$")
"""What precedes a number that is a part of another one: `2^`, `2/`, `3:`, and the point of `1.2.3` or `.5`."""
BARE_INTEGER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)")


def bare_integer(text: str) -> int | None:
    """Return the integer that is all of the text but surrounding white space; commas may group its thousands."""
    text = text.strip()
    if len(text) >= 1000 or BARE_INTEGER.fullmatch(text := text.translate(MINUS)) is None:
        return None
    return int(text.replace(",", ""))


def last_integer(text: str) -> int | None:
    """The last number anywhere in the text, if it is an integer; commas may group its thousands, a minus belongs to it
    unless a digit or letter precedes it (as in `3-2`). A part of a number is none: the 5 of 3.5, .5, 2/5, 3:5, 2^5;
    the 5 of `Answer:5` and `so...5` is one."""
    text = text.translate(MINUS)
    match = None
    for match in NUMBER.finditer(text):  # noqa: B007 the last one is wanted
        pass
    if match is None or len(match[0]) >= 1000 or (match[1] or "").strip(".0"):
        return None
    before = text[max(0, match.start() - 2) : match.start()]
    if BROKEN_OFF.search(before):
        return None
    number = match[0].removesuffix(match[1] or "")
    return int((number.lstrip("+-") if before[-1:].isalnum() else number).replace(",", ""))


def squeeze(text: str) -> str:
    """Return text to compare: white space squeezed, case kept."""
    return " ".join(text.split())


def listed(answer: Any) -> str:
    """As answer_text, with the members of a list side by side: 1, 2, 3."""
    return ", ".join(answer_text(one) for one in answer) if isinstance(answer, list | tuple) else answer_text(answer)
