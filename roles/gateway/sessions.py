"""Sessions: episodes in progress with their ledgers, their limits, and the answers that their callers were given."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from relax_rt.roles.agentic.tokens.ledger import TokenLedger
from relax_rt.roles.agentic.tokens.types import LedgerReply, Message, PromptPlan, SampledCompletion
from relax_rt.roles.gateway.api import LEASE_S, ClosedSession, Exhausted, GivenAnswer, SessionLimits
from relax_rt.roles.gateway.calls import CallError
from relax_rt.roles.gateway.reading import SampledTokens, Spell
from relax_rt.transport.rpc.errors import Refused, StaleEpoch
from relax_rt.transport.rpc.identity import Incarnation

SETTLE_S = 2.0
PAUSE_S = 5.0
"""After a pause of the gateway itself as long as this, renewals that arrived meanwhile are read before any lapse."""
MAX_STREAMS = 8
"""Streamed answers remembered of a session, in case that it continues from a part of one."""
MakeLedger = Callable[[str, int], TokenLedger]
"""(name of the session, maximum tokens) -> ledger."""


class Session:
    """One episode.

    Args:
        trained: its tokens are trained on, so that they must be sampled with the run's settings.
        kept: it outlives the call that it was made for.
        nonce, owner: of the role that opened it.
    """

    def __init__(
        self,
        name: str,
        limits: SessionLimits,
        ledger: TokenLedger,
        *,
        trained: bool,
        kept: bool,
        nonce: str = "",
        owner: Incarnation | None = None,
    ) -> None:
        self.name, self.limits, self._ledger = name, limits, ledger
        self.trained, self.kept, self.nonce, self.owner = trained, kept, nonce, owner
        self.group = limits.group or name
        self.calls = self.answered = 0
        """Calls that were started, and that were answered to their end."""
        self.left = 0
        """Answers whose callers disconnected before their end and did not continue from them."""
        self.streams: deque[StreamedAnswer] = deque(maxlen=MAX_STREAMS)
        """Answers that callers may have left in the middle, the newest at the end."""
        self.ended = ""
        """Why it accepts no more calls."""
        self.exhausted: Exhausted = ""
        """The limit that a call was refused for."""
        self.error = ""
        """The runtime's error that the last call ended with."""
        self.permanent = False
        """Whether a retry of that call would end so again."""
        self.oldest = 0
        """Version of the oldest token; 0: none yet."""
        self.used_at = 0.0
        self.in_progress: set[asyncio.Task[object]] = set()
        self.closed: ClosedSession | None = None
        self._interrupted = 0
        self._ledger_lock = asyncio.Lock()
        self._abandoned: list[PromptPlan] = []
        self._answers: dict[str, GivenAnswer] = {}
        self._replies: dict[str, str] = {}
        self._instructed: set[str] = set()

    @asynccontextmanager
    async def ledger(self) -> AsyncIterator[TokenLedger]:
        """Lock the ledger: a long conversation is rendered in a thread. The exit does not await, so that a cancelled
        call has either recorded its completion or not."""
        async with self._ledger_lock:
            try:
                yield self._ledger
            finally:
                while self._abandoned:
                    self._ledger.abandon(self._abandoned.pop())

    def abandon(self, plan: PromptPlan) -> None:
        """Train nothing that was or will be sampled for this plan."""
        if self._ledger_lock.locked():
            self._abandoned.append(plan)
        else:
            self._ledger.abandon(plan)

    def begin_call(self) -> int:
        """Start a call; return its number, from 1.

        Raises:
            CallError: the session has ended, or used up its calls, in progress or answered.
        """
        self.check_open()
        if self.limits.calls and self.answered + len(self.in_progress) >= self.limits.calls:
            self.exhausted = self.exhausted or "turns"
            message = f"session {self.name!r} has had its {self.limits.calls} calls"
            raise CallError(409, message, code="session_calls_used_up")
        self.calls += 1
        return self.calls

    def check_open(self) -> None:
        """Raise CallError if it has ended."""
        if self.ended:
            raise CallError(409, f"session {self.name!r} {self.ended}", code="session_ended")

    def no_tokens(self, message: str, status: int = 409, code: str = "session_tokens_used_up") -> CallError:
        """Return the error of a call without room for its tokens."""
        self.exhausted = self.exhausted or "tokens"
        return CallError(status, message, param="messages", code=code)

    def sampled(
        self, ledger: TokenLedger, plan: PromptPlan, sampled: SampledCompletion, choice: int = 0
    ) -> LedgerReply:
        """Record a completion; one that ends after its session is not recorded."""
        self.check_open()
        reply = ledger.record(plan, sampled, choice)
        if sampled.versions:
            oldest = min(span.kv_version for span in sampled.versions)
            self.oldest = min(self.oldest or oldest, oldest)
        return reply

    def remember(
        self,
        ledger: TokenLedger,
        response: str,
        reply: LedgerReply,
        message: Message,
        *,
        choice: int = 0,
        instructed: bool = False,
    ) -> None:
        """Remember an answer as its caller got it.

        Args:
            response, choice: id of the response, and index of the choice in it.
            message: as the caller got it.
            instructed: its conversation begins with instructions that belong to its call alone.
        """
        if not choice:
            self._replies[response] = reply.id
        if instructed:
            self._instructed.add(reply.id)
        if self.trained:
            self._answers[reply.id] = GivenAnswer(reply.id, dict(message), reply.finish_reason, response, choice)
        if message.get("content") != reply.message.get("content"):
            # Cut before a stop string, or as it was streamed.
            ledger.record_delivered(reply.id, message)

    def reply(self, response: str) -> str:
        """Return the ledger's id of a response.

        Raises:
            CallError: the session does not have it.
        """
        if (found := self._replies.get(response)) is None:
            message = f"there is no response {response!r} in this session"
            raise CallError(404, message, param="previous_response_id", code="previous_response_not_found")
        return found

    def before(self, ledger: TokenLedger, response: str) -> list[Message]:
        """Return the conversation up to an answer, without the instructions that belong to its call alone."""
        found = ledger.conversation(response)
        return found[1:] if response in self._instructed else found

    def instructed(self, response: str | None) -> bool:
        """Whether an answer's conversation began with instructions of its call's own."""
        return response in self._instructed

    def end(self, why: str) -> None:
        """Accept no more calls, and cancel those in progress."""
        self.ended = self.ended or why
        self._interrupted = self._interrupted or len(self.in_progress)
        for task in list(self.in_progress):
            task.cancel()

    async def settled(self) -> None:
        """Wait until cancelled calls have released their plans."""
        if self.in_progress:
            await asyncio.wait(self.in_progress, timeout=SETTLE_S)
        async with self.ledger():
            return

    def close(self) -> ClosedSession:
        """Return the result of a session that has ended; the same each time."""
        if self.closed is None:
            episode = self._ledger.episode()
            self.closed = ClosedSession(
                episode=episode,
                answers=tuple(self._answers[reply] for reply in episode.replies if reply in self._answers),
                exhausted=self.exhausted,
                interrupted=self._interrupted,
                error=self.error,
                permanent=self.permanent,
                left=self.left,
            )
        return self.closed


class Sessions:
    """The sessions of a gateway, a bounded number.

    Args:
        ledger: makes a ledger.
        most: open at once.
        idle_s: a session without an owner ends after so long without a call.
    """

    def __init__(self, ledger: MakeLedger, *, tokens: int, most: int, idle_s: float, now: Callable[[], float]) -> None:
        self._ledger, self._tokens, self._most, self._idle_s, self._now = ledger, tokens, most, idle_s, now
        self._open: dict[str, Session] = {}
        """Until they are forgotten, ended ones included."""
        self._owners: dict[str, tuple[int, float]] = {}
        """By slot: the newest epoch, and when it last renewed."""
        self._ticked_at = now()
        self._of_run: OrderedDict[str, Session] = OrderedDict()
        """Sessions of callers with the run's token, by name; the one used last at the end."""
        self._by_response: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open) + len(self._of_run)

    def open(self, name: str, limits: SessionLimits, nonce: str = "", owner: Incarnation | None = None) -> Session:
        """Open a session, or return the one that is open with this nonce."""
        if owner is not None:
            self.renew(owner)
        found = self._open.get(name)
        if found is not None and found.owner == owner is not None and found.nonce != nonce:
            # The `forget` of the earlier session is still on its way.
            self._end(found, f"was opened again by {owner}")
            found = None
        if found is not None:
            if (found.limits, found.nonce, found.owner) == (limits, nonce, owner) and not found.ended:
                return found
            raise Refused(f"session {name!r}", why="it is open, with other limits or for another", hint="forget it")
        if len(self._open) >= self._most:
            raise Refused(f"session {name!r}", why=f"{self._most} are open, the bound", hint="roles.gateway.sessions")
        session = self._new(name, limits, trained=True, kept=True, nonce=nonce, owner=owner)
        return self._open.setdefault(name, session)

    def renew(self, owner: Incarnation) -> None:
        """Renew the owner's sessions."""
        newest, _ = self._owners.get(owner.slot, (owner.epoch, 0.0))
        if owner.epoch < newest:
            raise StaleEpoch(f"sessions of {owner}", why=f"epoch {newest} holds the slot")
        self._owners[owner.slot] = (owner.epoch, self._now())
        if owner.epoch > newest:
            why = f"was {owner.slot}'s, which was started again"
            for session in [s for s in self._open.values() if s.owner and s.owner.slot == owner.slot]:
                self._end(session, why)

    def find(self, name: str, nonce: str) -> Session:
        """Return a session that was opened, and may have ended.

        Raises:
            Refused: there is none.
        """
        found = self._open.get(name)
        if found is None or found.nonce != nonce:
            hint = "the gateway may have restarted, or its owner did not renew it"
            raise Refused(f"session {name!r}", why="none of this name and nonce is open", hint=hint)
        return found

    def close(self, name: str, nonce: str = "") -> ClosedSession:
        """End a session, and return its result; GatewayRole.close waits for its calls in between."""
        session = self.find(name, nonce)
        session.used_at = self._now()
        session.end("has been closed")
        return session.close()

    def forget(self, name: str, nonce: str = "") -> None:
        """End a session if it is open, and forget it."""
        session = self._open.get(name)
        if session is not None and session.nonce == nonce:
            self._end(session, "was cancelled")

    def of_key(self, name: str, nonce: str = "") -> Session:
        """Return the session of a key.

        Raises:
            CallError: it is not open.
        """
        found = self._open.get(name)
        if found is None or found.nonce != nonce:
            message = f"session {name!r} is not open: it has ended, or the gateway was started again since"
            raise CallError(409, message, code="session_ended")
        found.used_at = self._now()
        return found

    def of_run(self, name: str, previous: str) -> Session:
        """Return a session for a caller with the run's token: the named one, that of the response it continues from, or
        a new one for this call. Its tokens are not trained on.

        Raises:
            CallError: the name belongs to an episode, which needs its own key.
        """
        if name in self._open:
            raise CallError(401, f"session {name!r} is an episode of the run: use its own key", code="wrong_key")
        if not name and (found := self._by_response.get(previous)) is not None:
            return found
        if (found := self._of_run.get(name)) is not None:
            self._of_run.move_to_end(name)
            return found
        limits = SessionLimits()
        session = self._new(name or "a call", limits, trained=False, kept=bool(name))
        if name:
            while len(self._of_run) >= self._most:
                self._drop(next(iter(self._of_run)))
            self._of_run[name] = session
        return session

    def remember(self, response: str, session: Session) -> None:
        """Let later calls continue from this response by its id."""
        self._by_response[response] = session
        session.used_at = self._now()
        while len(self._by_response) > self._most:
            self._by_response.popitem(last=False)

    def tick(self) -> None:
        """Forget sessions that were not used or renewed for long."""
        now = self._now()
        old = now - self._idle_s
        if now - self._ticked_at > PAUSE_S:
            self._owners = {slot: (epoch, now) for slot, (epoch, _) in self._owners.items()}
        self._ticked_at = now
        for session in list(self._open.values()):
            if session.closed is not None and session.used_at < now - LEASE_S:
                self._end(session, "has been closed")
            elif session.owner is None and session.used_at < old and not session.in_progress:
                self._end(session, "was not used for long")
            elif session.owner is not None and self._owners[session.owner.slot][1] < now - LEASE_S:
                self._end(session, f"was not renewed by {session.owner}")
        for name in [n for n, s in self._of_run.items() if s.used_at < old and not s.in_progress]:
            self._drop(name)
        for response in [r for r, s in self._by_response.items() if s.used_at < old]:
            del self._by_response[response]

    def _new(
        self,
        name: str,
        limits: SessionLimits,
        *,
        trained: bool,
        kept: bool,
        nonce: str = "",
        owner: Incarnation | None = None,
    ) -> Session:
        ledger = self._ledger(name, limits.tokens or self._tokens)
        session = Session(name, limits, ledger, trained=trained, kept=kept, nonce=nonce, owner=owner)
        session.used_at = self._now()
        return session

    def _end(self, session: Session, why: str) -> None:
        """End an open session, and forget it."""
        del self._open[session.name]
        session.end(why)
        self._forget(session)

    def _drop(self, name: str) -> None:
        session = self._of_run.pop(name)
        session.end("was not used for long")
        self._forget(session)

    def _forget(self, session: Session) -> None:
        for response in [r for r, s in self._by_response.items() if s is session]:
            del self._by_response[response]


@dataclass(eq=False)
class StreamedAnswer:
    """An answer that is streamed to its caller.

    Attributes:
        request: its id, as the caller knows it.
        messages, tools, may_call: what it answers. plan: of the ledger.
        gone: whether the caller's connection has ended.
        taken: sampled so far. text: what the caller was sent of it.
        counted: among the session's answers. left: its caller disconnected before its end.
        settled: it is decided what of it is trained.
    """

    request: str
    messages: list[Message]
    tools: tuple[dict[str, Any], ...]
    plan: PromptPlan
    gone: Callable[[], bool]
    taken: SampledTokens = field(default_factory=SampledTokens)
    text: str = ""
    counted: bool = False
    left: bool = False
    settled: bool = False
    may_call: bool = True

    def restart(self) -> SampledTokens:
        """Clear what was sampled, and return the empty tokens: the call starts, or starts anew."""
        self.taken, self.text = SampledTokens(), ""
        return self.taken


def adopt_partial_answer(session: Session, ledger: TokenLedger, messages: Sequence[Message], spell: Spell) -> None:
    """Record streamed answers that their callers left in the middle, if these messages continue from the beginning of
    one: up to the token that completes that text. What was sampled behind it is not trained."""
    for one in list(session.streams):
        following = messages[len(one.messages)] if len(messages) > len(one.messages) else {}
        if following.get("role") != "assistant" or list(messages[: len(one.messages)]) != one.messages:
            continue
        text = str(following.get("content") or "").strip()
        if one.counted and text == one.text.strip():
            # The caller got the whole answer.
            session.streams.remove(one)
            continue
        if not text or following.get("tool_calls") or not (one.left or one.gone()):
            continue
        count = tokens_until(one.taken.tokens, one.text.strip(), text, spell)
        if not count:
            continue
        session.streams.remove(one)
        one.settled = True
        ledger.abandon(one.plan)
        try:
            plan = ledger.prompt(one.messages, one.tools, may_call=one.may_call, max_new_tokens=count, instead=one.plan)
        except Refused:
            continue
        if plan.tokens != one.plan.tokens or plan.rows < one.plan.rows:
            # Another answer has taken its place by now, or what came before it is gone.
            ledger.abandon(plan)
            continue
        reply = session.sampled(ledger, plan, one.taken.until(count, "stop"))
        session.remember(ledger, one.request, reply, {"role": "assistant", "content": text})
        session.answered += not one.counted
        session.left -= one.left


def tokens_until(tokens: Sequence[int], text: str, beginning: str, spell: Spell) -> int:
    """Return how many of the tokens, which spell `text`, spell its `beginning`; 0: `text` does not begin so."""
    at = spell(tokens).rfind(text)
    if not beginning or at < 0 or not text.startswith(beginning):
        return 0
    end = at + len(beginning)
    for count in range(bisect_left(range(len(tokens)), end, key=lambda n: len(spell(tokens[:n]))), len(tokens) + 1):
        # Half a character is spelled as a character of its own.
        if spell(tokens[:count])[at:end] == beginning:
            return count
    return 0
