"""The text of tokens as they come: what of it can be shown, and where a stop string ends it. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from relax_rt.roles.agentic.tokens.types import SampledCompletion
from relax_rt.roles.gateway.calls import TokenLogprob
from relax_rt.roles.rollout.engines.base import extend_spans
from relax_rt.roles.rollout.router.core import Deliver
from relax_rt.transport.queue.ledger.messages import VersionSpan

Spell = Callable[[Sequence[int]], str]
"""Returns the text of token ids, special tokens written out."""
UNFINISHED = "�"
"""What a decoder writes for bytes that are no complete character yet."""
PIECE = 1024
"""Tokens spelled together in the search for a position in a long text."""
MARKUP = (
    "<think>",
    "</think>",
    "<tool_call>",
    "<function=",
    "[TOOL_CALLS]",
    "to=functions.",
    "<|",
    "<｜",
)
"""Beginnings of reasoning, tool calls and special tokens in the common families of models: the text behind one is not
streamed before it has been parsed."""


@dataclass(eq=False)
class SampledTokens:
    """The tokens of an answer that have been sampled so far.

    Attributes:
        versions: over positions in `tokens`, and of tokens behind them that do not count.
        rows: routing rows of `tokens`, if requested; prompt_rows: those of the prompt.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    rows: bytearray = field(default_factory=bytearray)
    prompt_rows: bytes = b""

    def add(self, piece: Deliver, count: int) -> None:
        """Append the first `count` tokens of a piece."""
        width = len(piece.routing) // max(1, len(piece.tokens))
        self.tokens += piece.tokens[:count]
        self.logprobs += piece.logprobs[:count]
        for span in piece.versions:
            extend_spans(self.versions, span)
        self.rows += piece.routing[: count * width]
        # Each engine that generated a part returns them; as in an Outcome, the last ones hold.
        self.prompt_rows = piece.prompt_routing or self.prompt_rows

    def until(self, count: int, finish: str) -> SampledCompletion:
        """Return the first `count` tokens in the form of the ledger."""
        width = len(self.rows) // max(1, len(self.tokens))
        spans = (msgspec.structs.replace(s, end=min(s.end, count)) for s in self.versions if s.start < count)
        return SampledCompletion(
            tuple(self.tokens[:count]),
            tuple(self.logprobs[:count]),
            tuple(spans),
            finish,
            bytes(self.rows[: count * width]),
            self.prompt_rows,
        )


class AnswerReader:
    """Reads one completion.

    Args:
        spell: decodes tokens.
        stops: texts that end the completion.
        ends: token ids that end it; they have no text.
        held: show nothing before the end, because the prompt has opened the model's reasoning.
        calls: tools were offered, so that text that begins as JSON may be a call.
        logprobs: record text and log-probability of each token.

    Attributes:
        text: what was read; a stop string is part of it.
        stop: the stop string that ended it.
    """

    def __init__(
        self,
        spell: Spell,
        stops: Sequence[str],
        ends: Collection[int],
        *,
        held: bool = False,
        calls: bool = False,
        logprobs: bool = False,
    ) -> None:
        self._spell, self._stops, self._ends = spell, tuple(stops), ends
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held, self._calls, self._logprobs = held, calls, logprobs
        self._ids: list[int] = []
        self._from = self._read = 0
        """The text up to _read is known; decoding starts at _from, because a token's text depends on those before."""
        self._ahead = 0
        """Known characters behind _read; an unfinished one follows them."""
        self._shown = 0
        self._marker = -1
        self.tokens: list[TokenLogprob] = []
        self.text = ""
        self.stop: str | None = None

    @property
    def visible(self) -> str:
        """The text before the stop string."""
        return self.text if self.stop is None else self.text[: self.text.find(self.stop)]

    def take(self, tokens: Sequence[int], logprobs: Sequence[float]) -> int:
        """Read more tokens; return how many count. Fewer than all: a stop string ended the completion."""
        assert self.stop is None
        before = len(self._ids), self._from, self._read, len(self.text), self._ahead
        self._append(tokens)
        count = len(tokens)
        unread = self._read < len(self._ids)
        if self._stops and count > 1 and (unread or self._find(before[3]) is not None):
            # Read again, one by one, to find the token that completes a stop string; also if half a character hides it.
            del self._ids[before[0] :]
            self._from, self._read, self.text, self._ahead = before[1], before[2], self.text[: before[3]], before[4]
            for count, token in enumerate(tokens, 1):  # noqa: B007
                at = len(self.text)
                self._append([token])
                if self._find(at) is not None:
                    break
        if self._stops:
            self.stop = self._find(before[3])
        if self._logprobs:
            pairs = zip(tokens[:count], logprobs[:count], strict=True)
            self.tokens += [TokenLogprob(self._spell([t]), p) for t, p in pairs if t not in self._ends]
        return count

    def finish(self) -> None:
        """Read the end: bytes that are no complete character are text as they are."""
        if self.stop is None:
            self.text += self._unread()[self._ahead :]
            self._from = self._read = len(self._ids)
            self._ahead = 0

    def show(self) -> str:
        """Return new text that is final. What may begin a stop string or a marker is held back, and so is white space
        at the end, which parsers strip."""
        if self._held or (self._calls and self.text.lstrip()[:1] in ("{", "[")):
            return ""
        text = self.visible
        if self._marker < 0:
            starts = [at for mark in MARKUP if (at := text.find(mark, max(0, self._shown - 32))) >= 0]
            self._marker = min(starts, default=-1)
        if self._marker >= 0:
            text = text[: self._marker]
        elif self.stop is None:
            text = text[: len(text) - _partial_word(text, (*self._stops, *MARKUP))]
        start, self._shown = self._shown, max(self._shown, len(text.rstrip()))
        return self.text[start : self._shown]

    @property
    def shown(self) -> str:
        """All text that `show` has returned."""
        return self.text[: self._shown]

    # --- inside

    def _append(self, tokens: Sequence[int]) -> None:
        self._ids += tokens
        new = self._unread()
        whole = new.rstrip(UNFINISHED)
        self.text += whole[self._ahead :]
        if whole == new:
            self._from, self._read, self._ahead = self._read, len(self._ids), 0
        else:
            self._ahead = max(self._ahead, len(whole))

    def _unread(self) -> str:
        """Return the text behind _read."""
        ids = [token for token in self._ids[self._from :] if token not in self._ends]
        known = [token for token in self._ids[self._from : self._read] if token not in self._ends]
        return self._spell(ids)[len(self._spell(known)) :]

    def _find(self, since: int) -> str | None:
        """Return the stop string that begins first, of those that end in the text behind `since`."""
        begin = max(0, since - self._longest + 1)
        found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, begin)) >= 0]
        return min(found)[1] if found else None


def tokens_before(tokens: Sequence[int], end: int, spell: Spell) -> int:
    """Return how many tokens the first `end` characters take, approximately: a character that is cut by a piece of
    PIECE tokens counts as those that its halves are spelled as."""
    at = 0
    for begin in range(0, len(tokens), PIECE):
        piece = tokens[begin : begin + PIECE]
        if at + len(spell(piece)) >= end:
            return begin + bisect_left(range(len(piece)), end - at, key=lambda n: len(spell(piece[:n])))
        at += len(spell(piece))
    return len(tokens)


def _partial_word(text: str, words: Sequence[str]) -> int:
    """Return the length of the longest end of the text that is the beginning of one of these words."""
    longest = 0
    for word in words:
        for length in range(min(len(word) - 1, len(text)), longest, -1):
            if text.endswith(word[:length]):
                longest = length
                break
    return longest
