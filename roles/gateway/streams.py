"""Streamed answers of an episode, for the case that their caller leaves before the end and goes on with a part."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from relax_rt.roles.agentic.tokens.ledger import TokenLedger
from relax_rt.roles.agentic.tokens.types import Message, PromptPlan, Sampled
from relax_rt.roles.gateway.sessions import Session
from relax_rt.roles.rollout.engines.base import extend_spans
from relax_rt.roles.rollout.router.core import Deliver
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import Refused

Spell = Callable[[Sequence[int]], str]


@dataclass(eq=False)
class Taken:
    """What has been sampled of an answer so far.

    Attributes:
        versions: over positions in `tokens`, and of tokens behind them that do not count.
        rows: routing rows of `tokens`, where they are wanted; prompt_rows: those of the prompt.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    rows: bytearray = field(default_factory=bytearray)
    prompt_rows: bytes = b""

    def add(self, piece: Deliver, count: int) -> None:
        """The next piece, of which so many tokens count."""
        width = len(piece.routing) // max(1, len(piece.tokens))
        self.tokens += piece.tokens[:count]
        self.logprobs += piece.logprobs[:count]
        for span in piece.versions:
            extend_spans(self.versions, span)
        self.rows += piece.routing[: count * width]
        # Each engine that has a part in it tells them; as in an Outcome, those of the last one hold.
        self.prompt_rows = piece.prompt_routing or self.prompt_rows

    def until(self, count: int, finish: str) -> Sampled:
        """Its first tokens, as they are recorded."""
        width = len(self.rows) // max(1, len(self.tokens))
        spans = (msgspec.structs.replace(s, end=min(s.end, count)) for s in self.versions if s.start < count)
        return Sampled(
            tuple(self.tokens[:count]),
            tuple(self.logprobs[:count]),
            tuple(spans),
            finish,
            bytes(self.rows[: count * width]),
            self.prompt_rows,
        )


@dataclass(eq=False)
class Streamed:
    """An answer that its caller is sent as it is made.

    Attributes:
        request: its id, as the caller knows it.
        messages, tools, may_call: what it answers. plan: of the ledger.
        gone: whether the connection is no more that it is sent by.
        taken: sampled so far. text: what the caller was shown of it.
        counted: among the session's answers. left: its caller went before its end.
        settled: it is decided what is trained of it.
    """

    request: str
    messages: list[Message]
    tools: tuple[dict[str, Any], ...]
    plan: PromptPlan
    gone: Callable[[], bool]
    taken: Taken = field(default_factory=Taken)
    text: str = ""
    counted: bool = False
    left: bool = False
    settled: bool = False
    may_call: bool = True

    def begin(self) -> Taken:
        """Empty, for what is sampled; anew when the call is begun anew."""
        self.taken, self.text = Taken(), ""
        return self.taken


def go_on(session: Session, ledger: TokenLedger, messages: Sequence[Message], spell: Spell) -> None:
    """Record what was sampled of answers that their caller left in the middle, if these messages go on with a beginning
    of them: up to the token that completes that text. What was sampled behind it is not trained."""
    for one in list(session.streams):
        said = messages[len(one.messages)] if len(messages) > len(one.messages) else {}
        if said.get("role") != "assistant" or list(messages[: len(one.messages)]) != one.messages:
            continue
        words = str(said.get("content") or "").strip()
        if one.counted and words == one.text.strip():
            # It was taken as a whole.
            session.streams.remove(one)
        elif words and not said.get("tool_calls") and (one.left or one.gone()):
            _take(session, ledger, one, words, spell)


def _take(session: Session, ledger: TokenLedger, one: Streamed, words: str, spell: Spell) -> None:
    count = tokens_until(one.taken.tokens, one.text.strip(), words, spell)
    if not count:
        return
    session.streams.remove(one)
    one.settled = True
    ledger.abandon(one.plan)
    try:
        plan = ledger.prompt(one.messages, one.tools, may_call=one.may_call, max_new_tokens=count, instead=one.plan)
    except Refused:
        return
    if plan.tokens != one.plan.tokens or plan.rows < one.plan.rows:
        # Something else is in its place by now, or what it stood behind is not there any more.
        ledger.abandon(plan)
        return
    reply = session.sampled(ledger, plan, one.taken.until(count, "stop"))
    session.remember(ledger, one.request, reply, {"role": "assistant", "content": words})
    session.answered += not one.counted
    session.left -= one.left


def tokens_until(tokens: Sequence[int], text: str, words: str, spell: Spell) -> int:
    """How many tokens it takes to say `words`, with which `text` begins, which these tokens say; 0: they do not."""
    at = spell(tokens).rfind(text)
    if not words or at < 0 or not text.startswith(words):
        return 0
    end = at + len(words)
    for count in range(bisect_left(range(len(tokens)), end, key=lambda n: len(spell(tokens[:n]))), len(tokens) + 1):
        # Half a character is spelled as one of its own.
        if spell(tokens[:count])[at:end] == words:
            return count
    return 0
