"""Episodes that are under way: their ledgers, their bounds, and what callers know of their answers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

from relax_rt.roles.agentic.tokens import Episode, Message, PromptPlan, Reply, Sampled, TokenLedger
from relax_rt.roles.gateway.api import SessionLimits
from relax_rt.roles.gateway.errors import CallError
from relax_rt.transport.errors import Refused

MakeLedger = Callable[[str, int], TokenLedger]
"""(name of the session, tokens at most)."""


class Session:
    """One episode.

    Args:
        trained: its tokens are trained on, so that they must be sampled as the run says.
        kept: it outlives the call that it was made for.
    """

    def __init__(self, name: str, limits: SessionLimits, ledger: TokenLedger, *, trained: bool, kept: bool) -> None:
        self.name, self.limits, self.ledger = name, limits, ledger
        self.trained, self.kept = trained, kept
        self.group = limits.group or name
        self.calls = 0
        self.ended = ""
        """Why it takes no more calls."""
        self.used_at = 0.0
        self.at_work: set[asyncio.Task[object]] = set()
        self._replies: dict[str, str] = {}
        self._cut: dict[tuple[str, str], Message] = {}

    def begin_call(self) -> int:
        """Number of a new call, from 1.

        Raises:
            CallError: the session has ended or used up its calls.
        """
        if self.ended:
            raise CallError(409, f"session {self.name!r} {self.ended}", code="session_ended")
        if self.limits.calls and self.calls >= self.limits.calls:
            message = f"session {self.name!r} has had its {self.limits.calls} calls"
            raise CallError(409, message, code="session_calls_used_up")
        self.calls += 1
        return self.calls

    def sampled(self, plan: PromptPlan, what: Sampled) -> Reply:
        """Record a completion; a call that ends after its session is not recorded."""
        if self.ended:
            raise CallError(409, f"session {self.name!r} {self.ended}", code="session_ended")
        return self.ledger.sampled(plan, what)

    def remember(self, response: str, reply: Reply, told: Message) -> None:
        """An answer as its caller knows it: by this id, and with these words."""
        self._replies[response] = reply.id
        if told.get("content") != reply.message.get("content"):
            # Cut before a stop string, or as it was streamed: coming back it is to be known again.
            self._cut[_key(told)] = reply.message

    def restore(self, messages: Sequence[Message]) -> list[Message]:
        """Messages with answers as they were sampled, where callers were told less."""
        if not self._cut:
            return list(messages)
        return [self._cut.get(_key(m), m) if m.get("role") == "assistant" else m for m in messages]

    def reply(self, response: str) -> str:
        """The ledger's id of an answer.

        Raises:
            CallError: the session has none such.
        """
        if (found := self._replies.get(response)) is None:
            message = f"there is no response {response!r} in this session"
            raise CallError(404, message, param="previous_response_id", code="previous_response_not_found")
        return found

    def end(self, why: str) -> None:
        """Take no more calls, and end those at work."""
        self.ended = why
        for task in list(self.at_work):
            task.cancel()


def _key(message: Message) -> tuple[str, str]:
    return str(message.get("content") or "").strip(), str(message.get("tool_calls") or "")


class Sessions:
    """The sessions of a gateway, a bounded number.

    Args:
        ledger: makes one.
        most: open at once.
        idle_s: one that nobody has opened by name ends after so long without a call.
    """

    def __init__(self, ledger: MakeLedger, *, tokens: int, most: int, idle_s: float, now: Callable[[], float]) -> None:
        self._ledger, self._tokens, self._most, self._idle_s, self._now = ledger, tokens, most, idle_s, now
        self._open: dict[str, Session] = {}
        self._passing: OrderedDict[str, Session] = OrderedDict()
        """Those of callers with the run's token, by name; the one used last at the end."""
        self._by_response: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open) + len(self._passing)

    def open(self, name: str, limits: SessionLimits) -> Session:
        """See GatewayApi.open."""
        if (found := self._open.get(name)) is not None:
            if found.limits != limits:
                raise Refused(f"session {name!r}", why="it is open, with other limits", hint="close it first")
            return found
        if len(self._open) >= self._most:
            raise Refused(f"session {name!r}", why=f"{self._most} are open, the bound", hint="roles.gateway.sessions")
        return self._open.setdefault(name, self._new(name, limits, trained=True, kept=True))

    def close(self, name: str) -> Episode:
        """See GatewayApi.close."""
        if (session := self._open.pop(name, None)) is None:
            raise Refused(f"session {name!r}", why="none of this name is open", hint="the gateway may have restarted")
        session.end("has been closed")
        self._forget(session)
        return session.ledger.episode()

    def cancel(self, name: str) -> None:
        """See GatewayApi.cancel."""
        if (session := self._open.pop(name, None)) is not None:
            session.end("was cancelled")
            self._forget(session)

    def of_key(self, name: str) -> Session:
        """The session whose key was shown.

        Raises:
            CallError: it is not open.
        """
        if (found := self._open.get(name)) is None:
            message = f"session {name!r} is not open: it has ended, or the gateway was started again since"
            raise CallError(409, message, code="session_ended")
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
        """Forget what nobody has used for long."""
        old = self._now() - self._idle_s
        for name in [n for n, s in self._passing.items() if s.used_at < old and not s.at_work]:
            self._drop(name)
        for response in [r for r, s in self._by_response.items() if s.used_at < old]:
            del self._by_response[response]

    def _new(self, name: str, limits: SessionLimits, *, trained: bool, kept: bool) -> Session:
        ledger = self._ledger(name, limits.tokens or self._tokens)
        session = Session(name, limits, ledger, trained=trained, kept=kept)
        session.used_at = self._now()
        return session

    def _drop(self, name: str) -> None:
        session = self._passing.pop(name)
        session.end("was not used for long")
        self._forget(session)

    def _forget(self, session: Session) -> None:
        for response in [r for r, s in self._by_response.items() if s is session]:
            del self._by_response[response]
