"""The life of one request: it waits, an engine makes a part, another goes on, and it has exactly one outcome. Pure.

Tokens that came are kept, whatever becomes of the engine that made them: the next one goes on behind them. A piece is
believed only if it fits what is there, token by token, each with its version; an engine whose piece does not fit has
lost the sequence, as if it had died. How often that may happen is bounded; being turned away is not counted, the
deadline bounds it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from relax_rt.roles.data.media.pictures import Shown
from relax_rt.roles.rollout.engines.base import extend_spans, odd_sampling
from relax_rt.roles.rollout.generation import Piece
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import Refused

OF_ONE = 3
"""How often each of as many engines as may be lost with a request may be lost: connections end without a death too."""

Kind = Literal["done", "cancelled", "late", "failed", "refused"]


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that somebody wants.

    Attributes:
        prompt: token ids.
        seed, temperature, stop_ids: as in GroupRequest.
        max_new_tokens: length at most.
        timeout_s: it ends by then, finished or not, seconds.
        lag: publications that the engine's weights may be behind the committed ones when it is sent there.
        session: requests of one session go to one engine as long as that is not overloaded.
        prefix: the same for those whose prompts begin alike.
        expected_tokens: length that it will probably have; 0: max_new_tokens.
        chunk_tokens: tokens of a piece, about.
        routing: routing rows are wanted, which only engines have that were started for them.
        rows_from: position of the prompt from which on they are wanted: whoever asks has those before.
        media: the pictures in the prompt, which only engines take whose model sees.
    """

    prompt: tuple[int, ...]
    seed: int = 0
    temperature: float = 1.0
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    timeout_s: float = 300.0
    lag: int = 0
    session: str = ""
    prefix: bool = False
    expected_tokens: int = 0
    chunk_tokens: int = 8
    routing: bool = False
    rows_from: int = 0
    media: tuple[Shown, ...] = ()

    def __post_init__(self) -> None:
        """Refused here, for no engine would take it: a vocabulary is only known there."""
        odd = odd_sampling((self.seed,), self.temperature)
        odd = odd or next(
            (f"token {token}" for token in (*self.prompt, *self.stop_ids) if not 0 <= token < 1 << 31), ""
        )
        if not 0 <= self.rows_from <= max(0, len(self.prompt) - 1):
            odd = odd or f"routing rows from position {self.rows_from} on of a prompt of {len(self.prompt)}"
        if odd:
            raise Refused(f"a request with {odd}", why="no engine samples with that")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request; each has one.

    Attributes:
        kind: done; cancelled by its owner; late: its deadline came; failed: too many engines were lost with it;
            refused: an engine says that none could ever do it.
        finish_reason: stop or length, if it is done.
        tokens, logprobs, versions: what was made, also if it is not done; versions over positions of the completion.
        engines: incarnations that worked on it, in turn, as ``rollout/0#3``.
        why: of an outcome that is not done.
        slow: it is late although an engine was making its tokens: it lacks time, not an engine.
        routing: a routing row for each token, if they were wanted. prompt_routing: those of the positions before the
            prompt's last, from `rows_from` on.
    """

    kind: Kind
    finish_reason: str = ""
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[VersionSpan] = []
    engines: list[str] = []
    why: str = ""
    slow: bool = False
    routing: bytes = b""
    prompt_routing: bytes = b""


class Place(msgspec.Struct, frozen=True):
    """Where a request is worked on; attempts are numbered from 1."""

    attempt: int
    slot: str
    epoch: int


class Life:
    """See the module. `place`, `outcome` and the tokens are to be read, not set."""

    def __init__(self, number: int, wanted: Wanted, now: float, most_losses: int, lowest: int = 1) -> None:
        self.number, self.wanted, self._lowest = number, wanted, lowest
        self.deadline = now + wanted.timeout_s
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[VersionSpan] = []
        self.routing = bytearray()
        self.prompt_routing = b""
        self.place: Place | None = None
        self.met = False
        """The engine that has it has said a word of it."""
        self.heard_at = now
        self.outcome: Outcome | None = None
        self.waiting_on = "its turn"
        self.losses: list[str] = []
        self.lost_with: set[tuple[str, int]] = set()
        """Incarnations that were lost while they had it."""
        self.engines: list[str] = []
        self.long = False
        self._most_losses = most_losses
        self._attempts = 0

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return self.wanted.max_new_tokens - len(self.tokens)

    @property
    def expected(self) -> int:
        """Tokens that will probably still come, at least one."""
        length = min(self.wanted.expected_tokens or self.wanted.max_new_tokens, self.wanted.max_new_tokens)
        return max(1, length - len(self.tokens))

    def send(self, now: float, slot: str, epoch: int) -> Place:
        """It is sent to an engine."""
        assert self.outcome is None and self.place is None
        self._attempts += 1
        self.place, self.met = Place(self._attempts, slot, epoch), False
        self.heard_at, self.waiting_on = now, f"the first token of {slot}"
        return self.place

    def takes(self, attempt: int) -> bool:
        """Whether what this attempt says still counts."""
        return self.place is not None and self.place.attempt == attempt

    def add(self, now: float, piece: Piece) -> str:
        """Take a piece of the present attempt; says why it cannot be, and then has taken nothing."""
        self.heard_at = now
        if wrong := self.wrong(piece):
            return wrong
        assert self.place is not None
        if piece.tokens:
            who = f"{self.place.slot}#{self.place.epoch}"
            if not self.engines or self.engines[-1] != who:
                self.engines.append(who)
            self.tokens += piece.tokens
            self.logprobs += piece.logprobs
            for span in piece.versions:
                extend_spans(self.versions, span)
            if self.wanted.routing:
                self.routing += piece.routing
                self.prompt_routing = piece.prompt_routing or self.prompt_routing
            self.waiting_on = ""
        if piece.report.waiting_on:
            self.waiting_on = f"{self.place.slot}: {piece.report.waiting_on}"
        if piece.finish_reason in ("stop", "length"):
            self.place = None
            self._end("done", finish_reason=piece.finish_reason)
        return ""

    def wrong(self, piece: Piece) -> str:
        """Why a piece cannot be of this sequence."""
        have, n = len(self.tokens), len(piece.tokens)
        if n and piece.start != have:
            return f"a piece begins at token {piece.start}, expected {have}"
        if len(piece.logprobs) != n:
            return f"{n} tokens with {len(piece.logprobs)} log-probabilities"
        if n > self.left:
            return f"{have + n} tokens, at most {self.wanted.max_new_tokens} were wanted"
        at = have
        for span in piece.versions:
            if span.start != at or span.end <= at or not self._lowest <= span.kv_version <= span.version:
                return f"versions {piece.versions} of tokens {have} to {have + n}"
            at = span.end
        if at != have + n:
            return f"tokens {at} to {have + n} are of no known version"
        last = piece.tokens[-1] if n else self.tokens[-1] if have else None
        if piece.finish_reason == "stop" and last not in self.wanted.stop_ids:
            return f"it ended with token {last}, which is none to stop at"
        if piece.finish_reason == "length" and n != self.left:
            return f"it ended at its length with {have + n} tokens of {self.wanted.max_new_tokens}"
        return self._wrong_rows(piece) if n and self.wanted.routing else ""

    def _wrong_rows(self, piece: Piece) -> str:
        """Why its routing rows cannot be those of its tokens, of which it has some."""
        row, rest = divmod(len(piece.routing), len(piece.tokens))
        if not row or rest or row * len(self.tokens) != len(self.routing):
            return f"{len(piece.tokens)} tokens with {len(piece.routing)} bytes of routing rows"
        prompt = len(piece.prompt_routing)
        if (prompt or not self.tokens) and prompt != (len(self.wanted.prompt) - 1 - self.wanted.rows_from) * row:
            of = f"a prompt of {len(self.wanted.prompt)}, from position {self.wanted.rows_from} on,"
            return f"{of} with {prompt} bytes of rows of {row}"
        return ""

    def lose(self, why: str) -> None:
        """The engine that had it was lost; if that were too many, or it was too often, it has failed."""
        assert self.place is not None
        self.lost_with.add((self.place.slot, self.place.epoch))
        self.give_back(why)
        self.losses.append(why)
        if len(self.lost_with) >= self._most_losses or len(self.losses) >= OF_ONE * self._most_losses:
            self._end("failed", why=f"{len(self.lost_with)} engines were lost with it: " + "; ".join(self.losses))

    def give_back(self, why: str) -> None:
        """The engine that had it did not want it, or wants it no more: it waits again."""
        self.place = None
        self.waiting_on = why

    def refuse(self, why: str) -> None:
        """An engine says that it can never be done."""
        self._end("refused", why=why)

    def cancel(self) -> None:
        """Its owner wants it no more."""
        self._end("cancelled", why="cancelled by its caller")

    def expire(self, *, slow: bool = False) -> None:
        """Its deadline has come; `slow`: while an engine was making its tokens."""
        last = f"; it waited for {self.waiting_on}" if self.waiting_on else ""
        self._end(
            "late", why=f"not finished in {self.wanted.timeout_s:g} s, {len(self.tokens)} tokens made{last}", slow=slow
        )

    def _end(self, kind: Kind, *, finish_reason: str = "", why: str = "", slow: bool = False) -> None:
        assert self.outcome is None
        self.outcome = Outcome(
            kind=kind,
            finish_reason=finish_reason,
            tokens=self.tokens,
            logprobs=self.logprobs,
            versions=self.versions,
            engines=self.engines,
            why=why,
            slow=slow,
            routing=bytes(self.routing),
            prompt_routing=self.prompt_routing,
        )
        self.waiting_on = ""
