"""Multiple choice: the letter that a text commits to."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Annotated, Any

from pydantic import Field

from relax_rt.config.schema import Table
from relax_rt.roles.data.items import answer_text
from relax_rt.roles.rewards.library.final_answer import boxes, listed
from relax_rt.roles.rewards.library.functions import UnreadableAnswer, reward
from relax_rt.roles.rewards.library.math_parsing import ParseFailed

LONGEST = 100_000
"""Characters of a completion that are read, from its end."""


class ChoiceOptions(Table):
    """1 if the completion commits to the letter of the answer; to all letters if the answer has several."""

    letters: Annotated[str, Field(min_length=2, max_length=26)] = "ABCDEFGHIJ"
    """Letters of the choices."""
    bare: bool = False
    """Accept only a completion that is just the letter: "B", "(B)" or "B.". False: the last commitment
    counts: a box, "the answer is (B)", "I choose B", "so B", "B is correct", a last line that is the letter; without
    any, the letter that the last clause with a letter names. Letters that are ruled out ("not A", "A is wrong") and
    alternatives ("A or B") are no commitment."""


def _choice_letters(options: ChoiceOptions) -> list[tuple[str, str, str]]:
    letters = options.letters
    if not letters.isascii() or not letters.isalpha() or len(set(letters.upper())) != len(letters):
        return [("letters", f'"{letters}" must be different letters', 'as "ABCD"')]
    return []


@reward(
    "choice",
    options=ChoiceOptions,
    check=_choice_letters,
    gold=lambda answer: f"The answer is {answer_text(answer)}.",
)
def _choice(options: ChoiceOptions) -> Callable[..., Any]:
    reader = ChoiceReader(options.letters)

    def choice(completion: str, answer: Any) -> float:
        try:
            right = reader.gold(listed(answer))
        except ParseFailed as error:
            raise UnreadableAnswer(answer, str(error)) from None
        text = completion[-LONGEST:]
        return float((reader.whole(text) if options.bare else reader.committed(text)) == right)

    return choice


WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|boldsymbol|bf|rm)\s*\{([^{}]*)\}")
ORNAMENTS = re.compile(r"\*\*|__|[$`\"“”„«»*]|\\[()\[\],;! ]|(?<!\w)'|'(?!\w)")
CLAUSE = re.compile(r"[.;,!?\n]")
AFTER_ARTICLE = (
    r"(?=\s*(?:$|[.,;:!?)\]\n&+/=-]|\b(?:is|are|was|because|since|as|and|or|but|not|which|that|seems?|fits|matches|would|"
    r"must|should|for|so|then|rather|instead|over|due|in|on|with|by|given|from|if|when|while|unlike|contradicts|says?)\b))"
)
"""What follows an A or I that is a choice, not an article or pronoun."""

ANNOUNCED = re.compile(
    r"####|<answer>"
    r"|\b(?:answers?|choices?|options?|solution|selection)\s*(?:here\s+)?(?:is|are|was|would\s+be|should\s+be|must\s+be|has\s+to\s+be"
    r"|:|=|-|–|—|→)"
    r"|\banswer(?=\s+\(?[A-Z]\b)"
    r"|\b(?:I|we|I'd|I'll|I've|let's|let\s+me)\s+(?:would\s+|will\s+|have\s+to\s+|'d\s+)?"
    r"(?:think|choose|pick|select|say|guess|believe|prefer|chose|picked|selected|vote\s+for|conclude|answer|go\s+with)"
    r"(?:\s+(?:that|it\s+is|it's|it\s+must\s+be|it\s+should\s+be)){0,3}"
    r"|\b(?:go|going|went|stick)\s+(?:with|for)"
    r"|\b(?:leaves|leaving)(?:\s+(?:us|only|with|just))*",
    re.IGNORECASE,
)
CONCLUDED = re.compile(
    r"(?:\b(?:so|thus|hence|therefore|consequently|finally|ergo|conclusion|conclude)\b|=>|→|∴)\s*[,:]?"
    r"(?:\s*(?:it\s+is|it's|that\s+is|it\s+must\s+be|it\s+has\s+to\s+be|we\s+get|we\s+have|must\s+be|is))?"
    r"|\b(?:it|this|that)(?:\s+is|'s|\s+must\s+be|\s+has\s+to\s+be|\s+should\s+be|\s+would\s+be|\s+can\s+only\s+be)",
    re.IGNORECASE,
)
"""A commitment only where the clause ends behind the letter."""
FILLER = re.compile(
    r"(?:\s|[:=]|[-–—](?=\s)|\b(?:definitely|clearly|likely|probably|most|indeed|thus|therefore|actually|simply|just|the|letter|"
    r"options?|choices?|answers?|number|both|either|all|of|following|correct|right|best)\b){0,24}",
    re.IGNORECASE,
)
PRAISED = re.compile(
    r"\s*(?:is|are|seems?|looks?|must\s+be|would\s+be|has\s+to\s+be|appears?)\s+(?:to\s+be\s+)?(?:\w+ly\s+|both\s+|all\s+|indeed\s+)?"
    r"(?:(?:the|my|our|a)\s+)?(?:most\s+|only\s+|final\s+)?(?:correct|right|true|best|answers?|appropriate|accurate|choice|option)\b"
    r"(?![^.;\n]{0,80}\b(?:if|had)\b)",
    re.IGNORECASE,
)
RULED_OUT_BEFORE = re.compile(
    r"(?:\b(?:not|never|neither|nor|unlike|than|instead\s+of|except|excluding|over|against|versus|without|cannot\s+be|could\s+be|"
    r"might\s+be|may\s+be|eliminat\w+|exclud\w+|reject\w*|discard\w*|dismiss\w*|ruled?\s+out|ruling\s+out|rules\s+out|cross(?:ed)?\s+out)"
    r"|n't(?:\s+be)?|n’t(?:\s+be)?"
    r"|\b(?:wrong|incorrect|false)\s+(?:answers?|options?|choices?)(?:\s+(?:is|are|:))?)"
    r"(?:\s+(?:the|options?|choices?|answers?|be|either|both))*\s*",
    re.IGNORECASE,
)
RULED_OUT_AFTER = re.compile(
    r"\s*(?:\([^()]{0,60}\)\s*)?(?:(?:is|are|was|were|seems?|looks?|would\s+be|must\s+be|can\s+be|could\s+be)\s*"
    r"(?:(?:all|both|clearly|obviously|also|definitely|simply|just|the|an?|therefore|thus|ruled|too)\s+)*"
    r"(?:not\b|wrong|incorrect|false|invalid|impossible|out\b|eliminated|excluded|discarded|rejected|too\b|unlikely|irrelevant|what\b)"
    r"|(?:is|are|was|were|does|do|did|would|could|should|has|can)n['’]t\b|(?:does|do|did|can|could|would)\s+not\b|cannot\b|can['’]t\b"
    r"|contradicts?\b|fails?\b|violates?\b|ignores?\b)",
    re.IGNORECASE,
)
SEPARATOR = re.compile(r"\s*(?:,\s*and|,\s*or|,|;|&|\+|/|\band\b|\bor\b|\bnor\b)\s*", re.IGNORECASE)
LABEL = re.compile(r"^[ \t]*(?:[-*•]\s*)?(?:option\s+)?[(\[]?([A-Za-z])[)\].:][ \t]+\S", re.IGNORECASE | re.MULTILINE)


class ChoiceReader:
    """Reads choices among given letters."""

    def __init__(self, letters: str) -> None:
        self.letters = letters.upper()
        upper = re.escape(self.letters)
        either = upper + re.escape(self.letters.lower())
        # In brackets, in capitals, or small with a bracket behind it.
        self._marked = rf"[(\[]\s*(?P<marked>[{either}]{{1,6}})\s*[)\]]|(?<![\w'’-])(?P<label>[{either}])\)(?!\w)"
        capital = (
            rf"(?<![\w'’-])(?:(?P<article>[AI]){AFTER_ARTICLE}|(?P<capital>(?![AI](?!\w))[{upper}]{{1,6}}))(?![\w'’])"
        )
        small = rf"(?<![\w'’-])(?P<small>[{either}])(?=\s*(?:$|[.,;:!?\n]))"
        self._mention = re.compile(f"{self._marked}|{capital}")
        self._announced = re.compile(f"{self._marked}|{capital}|{small}")

    def gold(self, text: str) -> frozenset[str]:
        """Return the letters of a right answer: "B", "(b)", "B) Paris", "A, C", "Answer: B".

        Raises:
            ParseFailed: it names no choice among the letters.
        """
        found = boxes(text)
        plain = _plain(found[-1][2] if found else text).strip()
        plain = re.sub(
            r"^(?:the\s+)?(?:correct\s+)?(?:answer|option|choice)s?\s*(?:is|are|:)?\s*", "", plain, flags=re.IGNORECASE
        )
        group = self._group(plain, 0, self._announced)
        if group is not None and not group[2]:
            rest = plain[group[1] :]
            if not rest.strip(" .)]:") or (
                re.match(r"[)\].:,]?\s*[.:)–-]?\s+\S", rest) and plain[: group[1] + 1].rstrip()[-1:] in ").:]"
            ):
                return group[0]
        raise ParseFailed(f"it names no choice among {self.letters} (the option `letters`)")

    def whole(self, text: str) -> frozenset[str]:
        """Return the choice of a text that is just a choice; empty for any other text."""
        plain = _plain(text[:200]).strip()
        group = self._group(plain, 0, self._announced) if len(text) <= 200 else None
        return group[0] if group is not None and not group[2] and not plain[group[1] :].strip(" .)]:") else frozenset()

    def committed(self, text: str) -> frozenset[str]:
        """Return the choice that a text commits to; empty if it commits to none."""
        if whole := self.whole(text):
            return whole
        text = self._without_ruled_out(_without_listing(_plain(_marked_boxes(text))))
        last: tuple[int, frozenset[str]] | None = None
        for at, letters in self._commitments(text):
            if last is None or at >= last[0]:
                last = (at, letters)
        if last is not None:
            return last[1]
        for clause in reversed(CLAUSE.split(text)):
            named = {letter for match in self._mention.finditer(clause) for letter in _letters(match)}
            if named:
                return frozenset(named) if len(named) == 1 else frozenset()
        return frozenset()

    def _commitments(self, text: str) -> Iterator[tuple[int, frozenset[str]]]:
        """Yield where a text commits to which letters; to none where it names alternatives."""
        for announced in ANNOUNCED.finditer(text):
            at = announced.end()
            group = self._group(text, FILLER.match(text, at).end(), self._announced)  # type: ignore[union-attr]
            if group is not None:
                yield at, frozenset() if group[2] else group[0]
        for concluded in CONCLUDED.finditer(text):
            at = concluded.end()
            group = self._group(text, FILLER.match(text, at).end(), self._announced)  # type: ignore[union-attr]
            if group is not None and re.match(
                r"\s*(?:$|[.,;:!?)\n]|because\b|since\b|is\b|as\b)", text[group[1] : group[1] + 20]
            ):
                yield at, frozenset() if group[2] else group[0]
        at = 0
        while (match := self._mention.search(text, at)) is not None:
            letters, end, hedged = self._group(text, match.start(), self._mention) or (frozenset(), match.end(), True)
            if PRAISED.match(text, end) is not None:
                yield match.start(), frozenset() if hedged else letters
            at = max(end, match.end())
        yield from self._last_line(text)

    def _last_line(self, text: str) -> Iterator[tuple[int, frozenset[str]]]:
        line = text.rstrip().rpartition("\n")[2]
        begins = len(text.rstrip()) - len(line)
        group = self._group(line.lstrip(), 0, self._mention)
        if group is None or group[2]:
            return
        rest = line.lstrip()[group[1] :]
        if not rest.strip(" .)]:") or ((begins > 0 or len(line) < 200) and LABEL.match(line) is not None):
            yield begins, group[0]

    def _group(self, text: str, at: int, mention: re.Pattern[str]) -> tuple[frozenset[str], int, bool] | None:
        """Return the letters named one after the other from a place on, their end, and whether they are
        alternatives."""
        letters: set[str] = set()
        hedged = False
        end = at
        while (match := mention.match(text, end if not letters else at)) is not None:
            letters |= set(_letters(match))
            end = match.end()
            separator = SEPARATOR.match(text, end)
            if separator is None:
                break
            at = separator.end()
            if mention.match(text, at) is not None:
                hedged = hedged or "or" in separator[0].lower()
        return (frozenset(letters), end, hedged) if letters else None

    def _without_ruled_out(self, text: str) -> str:
        """Return the text with blanks for the letters that it rules out."""
        spans = []
        for before in RULED_OUT_BEFORE.finditer(text):
            group = self._group(text, before.end(), self._announced)
            if group is not None:
                spans.append((before.end(), group[1]))
        at = 0
        while (match := self._mention.search(text, at)) is not None:
            group = self._group(text, match.start(), self._mention)
            end = group[1] if group is not None else match.end()
            if RULED_OUT_AFTER.match(text, end) is not None:
                spans.append((match.start(), end))
            at = max(end, match.end())
        for start, end in spans:
            text = text[:start] + " " * (end - start) + text[end:]
        return text


def _letters(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).upper()


def _plain(text: str) -> str:
    """Remove LaTeX text commands, emphasis, quotes and full-width letters."""
    text = unicodedata.normalize("NFKC", text).replace("’", "'")
    for _ in range(3):
        text, times = WRAPPED.subn(r"\1", text)
        if not times:
            break
    return ORNAMENTS.sub("", text)


def _marked_boxes(text: str) -> str:
    """Return the text with its boxes written as announcements."""
    out, at = [], 0
    for start, end, content in boxes(text):
        out += [text[at:start], f" the answer is {content} .\n" if len(content) < 200 else " "]
        at = end
    return "".join([*out, text[at:]])


def _without_listing(text: str) -> str:
    """Return the text with blanks for the labels of options that it lists line by line: two or more in a row."""
    lines = text.split("\n")
    labelled = [LABEL.match(line) for line in lines]
    for index, match in enumerate(labelled):
        beside = [labelled[i] for i in (index - 1, index + 1) if 0 <= i < len(lines)]
        if match is not None and any(beside):
            lines[index] = lines[index][: match.start(1)] + "-" + lines[index][match.end(1) :]
    return "\n".join(lines)
