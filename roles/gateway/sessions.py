"""Sessions: episodes under way with their ledgers, their limits, and the answers that their clients know."""

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
from relax_rt.roles.gateway.api import LEASE_S, Closed, Said, SessionLimits, UsedUp
from relax_rt.roles.gateway.calls import CallError
from relax_rt.roles.gateway.reading import SampledTokens, Spell
from relax_rt.transport.rpc.errors import Refused, StaleEpoch
from relax_rt.transport.rpc.identity import Incarnation

SETTLE_S = 2.0
PAUSE_S = 5.0
"""Of the gateway itself: renewals that came meanwhile are read before anything lapses."""
MAX_STREAMS = 8
"""Streamed answers that are remembered of a session, in case that it goes on with a part of one."""
MakeLedger = Callable[[str, int], TokenLedger]
"""(name of the session, tokens at most)."""


class Session:
    """One episode.

    Args:
        trained: its tokens are trained on, so that they must be sampled as the run says.
        kept: it outlives the call that it was made for.
        nonce, owner: of whoever opened it.
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
        """Begun, and answered to their end."""
        self.left = 0
        """Answers that their callers left before the end, and did not go on with."""
        self.streams: deque[StreamedAnswer] = deque(maxlen=MAX_STREAMS)
        """Those that callers may have left in the middle, the newest at the end."""
        self.ended = ""
        """Why it takes no more calls."""
        self.used_up: UsedUp = ""
        """What a call was refused for."""
        self.trouble = ""
        """The error of the runtime's own that the last call ended with."""
        self.never = False
        """It would end so again."""
        self.oldest = 0
        """Version of the oldest token; 0: there is none."""
        self.used_at = 0.0
        self.at_work: set[asyncio.Task[object]] = set()
        self.closed: Closed | None = None
        self._waiting = 0
        self._alone = asyncio.Lock()
        self._given_up: list[PromptPlan] = []
        self._said: dict[str, Said] = {}
        self._replies: dict[str, str] = {}
        self._instructed: set[str] = set()

    @asynccontextmanager
    async def ledger(self) -> AsyncIterator[TokenLedger]:
        """The ledger, for one at a time: a long conversation is rendered in a thread. Nothing waits on the way out, so
        that who is cancelled has either recorded something or not."""
        async with self._alone:
            try:
                yield self._ledger
            finally:
                while self._given_up:
                    self._ledger.abandon(self._given_up.pop())

    def abandon(self, plan: PromptPlan) -> None:
        """Nothing that was or will be sampled for this plan is trained."""
        if self._alone.locked():
            self._given_up.append(plan)
        else:
            self._ledger.abandon(plan)

    def begin_call(self) -> int:
        """Number of a new call, from 1.

        Raises:
            CallError: the session has ended or used up its calls: those that were answered or still may be.
        """
        self.check_open()
        if self.limits.calls and self.answered + len(self.at_work) >= self.limits.calls:
            self.used_up = self.used_up or "turns"
            message = f"session {self.name!r} has had its {self.limits.calls} calls"
            raise CallError(409, message, code="session_calls_used_up")
        self.calls += 1
        return self.calls

    def check_open(self) -> None:
        """Raises: CallError: it has ended."""
        if self.ended:
            raise CallError(409, f"session {self.name!r} {self.ended}", code="session_ended")

    def no_tokens(self, message: str, status: int = 409, code: str = "session_tokens_used_up") -> CallError:
        """Why a call cannot be answered: there is no room for its tokens."""
        self.used_up = self.used_up or "tokens"
        return CallError(status, message, param="messages", code=code)

    def sampled(self, ledger: TokenLedger, plan: PromptPlan, what: SampledCompletion, choice: int = 0) -> LedgerReply:
        """Record a completion; a call that ends after its session is not recorded."""
        self.check_open()
        reply = ledger.record(plan, what, choice)
        if what.versions:
            oldest = min(span.kv_version for span in what.versions)
            self.oldest = min(self.oldest or oldest, oldest)
        return reply

    def remember(
        self,
        ledger: TokenLedger,
        response: str,
        reply: LedgerReply,
        told: Message,
        *,
        choice: int = 0,
        instructed: bool = False,
    ) -> None:
        """An answer as its caller knows it: a choice of this id, with these words.

        Args:
            instructed: its conversation begins with instructions that belong to its call alone.
        """
        if not choice:
            self._replies[response] = reply.id
        if instructed:
            self._instructed.add(reply.id)
        if self.trained:
            self._said[reply.id] = Said(reply.id, dict(told), reply.finish_reason, response, choice)
        if told.get("content") != reply.message.get("content"):
            # Cut before a stop string, or as it was streamed.
            ledger.record_delivered(reply.id, told)

    def reply(self, response: str) -> str:
        """The ledger's id of an answer.

        Raises:
            CallError: the session has none such.
        """
        if (found := self._replies.get(response)) is None:
            message = f"there is no response {response!r} in this session"
            raise CallError(404, message, param="previous_response_id", code="previous_response_not_found")
        return found

    def before(self, ledger: TokenLedger, response: str) -> list[Message]:
        """The conversation up to an answer, without the instructions that were its call's alone."""
        found = ledger.conversation(response)
        return found[1:] if response in self._instructed else found

    def instructed(self, response: str | None) -> bool:
        """Whether an answer's conversation began with instructions of its call's own."""
        return response in self._instructed

    def end(self, why: str) -> None:
        """Take no more calls, and end those at work."""
        self.ended = self.ended or why
        self._waiting = self._waiting or len(self.at_work)
        for task in list(self.at_work):
            task.cancel()

    async def settled(self) -> None:
        """Calls that were ended have let go of their plans."""
        if self.at_work:
            await asyncio.wait(self.at_work, timeout=SETTLE_S)
        async with self.ledger():
            return

    def close(self) -> Closed:
        """What it was, once it has ended; the same each time."""
        if self.closed is None:
            episode = self._ledger.episode()
            self.closed = Closed(
                episode=episode,
                said=tuple(self._said[reply] for reply in episode.replies if reply in self._said),
                used_up=self.used_up,
                waiting=self._waiting,
                trouble=self.trouble,
                never=self.never,
                left=self.left,
            )
        return self.closed


class Sessions:
    """The sessions of a gateway, a bounded number.

    Args:
        ledger: makes one.
        most: open at once.
        idle_s: one that nobody renews ends after so long without a call.
    """

    def __init__(self, ledger: MakeLedger, *, tokens: int, most: int, idle_s: float, now: Callable[[], float]) -> None:
        self._ledger, self._tokens, self._most, self._idle_s, self._now = ledger, tokens, most, idle_s, now
        self._open: dict[str, Session] = {}
        """Until they are forgotten: those that have ended, too."""
        self._owners: dict[str, tuple[int, float]] = {}
        """Of a slot: the newest epoch, and when it was last heard of."""
        self._looked_at = now()
        self._passing: OrderedDict[str, Session] = OrderedDict()
        """Those of callers with the run's token, by name; the one used last at the end."""
        self._by_response: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open) + len(self._passing)

    def open(self, name: str, limits: SessionLimits, nonce: str = "", owner: Incarnation | None = None) -> Session:
        """Open a session, or return the one that is open with this nonce."""
        if owner is not None:
            self.renew(owner)
        found = self._open.get(name)
        if found is not None and found.owner == owner is not None and found.nonce != nonce:
            # Its forgetting is still on the way here.
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
        """One that was opened, and may have ended.

        Raises:
            Refused: there is none.
        """
        found = self._open.get(name)
        if found is None or found.nonce != nonce:
            hint = "the gateway may have restarted, or whoever opened it did not renew it"
            raise Refused(f"session {name!r}", why="none of this name and nonce is open", hint=hint)
        return found

    def close(self, name: str, nonce: str = "") -> Closed:
        """End a session, and say what it was; see GatewayApi.close, which waits in between."""
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
        """The session whose key was shown.

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
        """A session for a caller with the run's token: the one he names, the one of the response that he goes on from,
        or one for this call. Its tokens are not trained on.

        Raises:
            CallError: the name belongs to an episode, whose own key is wanted.
        """
        if name in self._open:
            raise CallError(401, f"session {name!r} is an episode of the run: use its own key", code="wrong_key")
        if not name and (found := self._by_response.get(previous)) is not None:
            return found
        if (found := self._passing.get(name)) is not None:
            self._passing.move_to_end(name)
            return found
        limits = SessionLimits()
        session = self._new(name or "a call", limits, trained=False, kept=bool(name))
        if name:
            while len(self._passing) >= self._most:
                self._drop(next(iter(self._passing)))
            self._passing[name] = session
        return session

    def remember(self, response: str, session: Session) -> None:
        """A later call may go on from this response with no more than its id."""
        self._by_response[response] = session
        session.used_at = self._now()
        while len(self._by_response) > self._most:
            self._by_response.popitem(last=False)

    def tick(self) -> None:
        """Forget what nobody has used or renewed for long."""
        now = self._now()
        old = now - self._idle_s
        if now - self._looked_at > PAUSE_S:
            self._owners = {slot: (epoch, now) for slot, (epoch, _) in self._owners.items()}
        self._looked_at = now
        for session in list(self._open.values()):
            if session.closed is not None and session.used_at < now - LEASE_S:
                self._end(session, "has been closed")
            elif session.owner is None and session.used_at < old and not session.at_work:
                self._end(session, "was not used for long")
            elif session.owner is not None and self._owners[session.owner.slot][1] < now - LEASE_S:
                self._end(session, f"was not renewed by {session.owner}")
        for name in [n for n, s in self._passing.items() if s.used_at < old and not s.at_work]:
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
        """End one that was opened, and forget it."""
        del self._open[session.name]
        session.end(why)
        self._forget(session)

    def _drop(self, name: str) -> None:
        session = self._passing.pop(name)
        session.end("was not used for long")
        self._forget(session)

    def _forget(self, session: Session) -> None:
        for response in [r for r, s in self._by_response.items() if s is session]:
            del self._by_response[response]


@dataclass(eq=False)
class StreamedAnswer:
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
    taken: SampledTokens = field(default_factory=SampledTokens)
    text: str = ""
    counted: bool = False
    left: bool = False
    settled: bool = False
    may_call: bool = True

    def begin(self) -> SampledTokens:
        """Empty, for what is sampled; anew when the call is begun anew."""
        self.taken, self.text = SampledTokens(), ""
        return self.taken


def adopt_partial_answer(session: Session, ledger: TokenLedger, messages: Sequence[Message], spell: Spell) -> None:
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


def _take(session: Session, ledger: TokenLedger, one: StreamedAnswer, words: str, spell: Spell) -> None:
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
