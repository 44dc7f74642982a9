"""Streamed answers of an episode, for the case that their caller leaves before the end and goes on with a part."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from relax_rt.roles.agentic.tokens import Message, PromptPlan, Sampled, TokenLedger
from relax_rt.roles.gateway.sessions import Session
from relax_rt.transport.errors import Refused
from relax_rt.transport.queue.api import VersionSpan

Spell = Callable[[Sequence[int]], str]


@dataclass(eq=False)
class Streamed:
    """An answer that its caller is sent as it is made.

    Attributes:
        request: its id, as the caller knows it.
        messages, tools: what it answers. plan: of the ledger.
        gone: whether the connection is no more that it is sent by.
        tokens, logprobs, versions: sampled so far. text: what the caller was shown of it.
        counted: among the session's answers. left: its caller went before its end.
        settled: it is decided what is trained of it.
    """

    request: str
    messages: list[Message]
    tools: tuple[dict[str, Any], ...]
    plan: PromptPlan
    gone: Callable[[], bool]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    text: str = ""
    counted: bool = False
    left: bool = False
    settled: bool = False

    def begin(self) -> tuple[list[int], list[float], list[VersionSpan]]:
        """Empty lists for what is sampled; anew when the call is begun anew."""
        self.tokens, self.logprobs, self.versions, self.text = [], [], [], ""
        return self.tokens, self.logprobs, self.versions


def go_on(session: Session, ledger: TokenLedger, messages: Sequence[Message], spell: Spell) -> bool:
    """Record what was sampled of an answer that its caller left in the middle, if these messages go on with a beginning
    of it: up to the token that completes that text. What was sampled behind it is not trained. Says whether it was so.
    """
    for one in list(session.streams):
        said = messages[len(one.messages)] if len(messages) > len(one.messages) else {}
        if said.get("role") != "assistant" or list(messages[: len(one.messages)]) != one.messages:
            continue
        words = str(said.get("content") or "").strip()
        if one.counted and words == one.text.strip():
            # It was taken as a whole.
            session.streams.remove(one)
        elif (
            words
            and not said.get("tool_calls")
            and (one.left or one.gone())
            and _take(session, ledger, one, words, spell)
        ):
            return True
    return False


def _take(session: Session, ledger: TokenLedger, one: Streamed, words: str, spell: Spell) -> bool:
    count = tokens_until(one.tokens, one.text.strip(), words, spell)
    if not count:
        return False
    session.streams.remove(one)
    one.settled = True
    ledger.abandon(one.plan)
    try:
        plan = ledger.prompt(one.messages, one.tools, max_new_tokens=count)
    except Refused:
        return False
    if plan.tokens != one.plan.tokens:
        # Something else is in its place by now.
        ledger.abandon(plan)
        return False
    versions = tuple(
        msgspec.structs.replace(span, end=min(span.end, count)) for span in one.versions if span.start < count
    )
    what = Sampled(tuple(one.tokens[:count]), tuple(one.logprobs[:count]), versions, "stop")
    reply = session.sampled(ledger, plan, what)
    session.remember(one.request, reply, {"role": "assistant", "content": words})
    session.answered += not one.counted
    session.left -= one.left
    return True


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
