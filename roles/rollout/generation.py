"""Generation for others: what every rollout serves beside its own work, so that routers can send it requests.

A request is a stream of pieces. The first one says whether the engine takes it; then come tokens, and between them at
least every `BEAT_S` a piece without tokens that says how the engine does. Who leaves the stream has the sequence ended.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import msgspec

from relax_rt.roles.data.media.pictures import MOST_PICTURES, Shown
from relax_rt.roles.rollout.engines.base import MAX_TEMPERATURE, EngineEnded, GroupRequest, Partial
from relax_rt.roles.rollout.intake import Intake, Marks
from relax_rt.transport.queue.ledger.messages import Finite, VersionSpan
from relax_rt.transport.rpc.interface import idempotent

if TYPE_CHECKING:
    from relax_rt.interfaces.role import RoleContext
    from relax_rt.roles.rollout.engines.base import Chunk, Engine

FIRST_REQUEST = 1 << 48
"""Numbers of our requests begin here: those of the engine's owner lie below."""
BEAT_S = 0.5
CHUNK_TOKENS = 8
MOST_REQUESTS = 64
MAX_TOKENS = 1 << 20
MOST_ROW_BYTES = 32 << 20

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Tokens = Annotated[list[TokenId], msgspec.Meta(max_length=MAX_TOKENS)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=MAX_TEMPERATURE)]
TurnedAway = Literal["", "stale", "full", "stopping"]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate.

    Attributes:
        prompt: token ids.
        seed: with the weights it decides the tokens.
        temperature: 0 is greedy.
        max_new_tokens: of the whole completion, what there is already included.
        stop_ids: one of these ends it.
        tokens, logprobs, versions: what another engine has made of the completion: it is gone on with behind that.
        routing: routing rows are wanted (see engines.routing), of the prompt from position `rows_from` on; rows: those
            of `tokens`.
        media: the pictures in the prompt.
        allowed: policy versions that the caller takes, the committed one last; a newer one than that will do too.
        chunk_tokens: a piece has about so many.
        left_s: after that the sequence is ended, seconds.
    """

    prompt: Tokens
    seed: Annotated[int, msgspec.Meta(ge=0)]
    temperature: Temperature = 1.0
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    stop_ids: Annotated[list[TokenId], msgspec.Meta(max_length=4096)] = []
    tokens: Tokens = []
    logprobs: Annotated[list[Finite], msgspec.Meta(max_length=MAX_TOKENS)] = []
    versions: Annotated[list[VersionSpan], msgspec.Meta(max_length=MAX_TOKENS)] = []
    routing: bool = False
    rows_from: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)] = 0
    media: Annotated[list[Shown], msgspec.Meta(max_length=MOST_PICTURES)] = []
    rows: Annotated[bytes, msgspec.Meta(max_length=MOST_ROW_BYTES)] = b""
    allowed: Annotated[list[int], msgspec.Meta(min_length=1, max_length=1024)]
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1, le=4096)] = CHUNK_TOKENS
    left_s: Annotated[float, msgspec.Meta(ge=0)] = 600.0


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine does; see roles.router.fleet.Sign."""

    epoch: int
    version: int
    generated: int
    running: int = 0
    waiting: int = 0
    outstanding_tokens: int = 0
    kv_used: float = 0.0
    room: int = 0
    waiting_on: str = ""
    stopping: bool = False


class Piece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a sequence has got since its last piece; without tokens it is a sign of life.

    Attributes:
        start: position of the first of `tokens` in the completion.
        logprobs: behaviour log-probability of each.
        versions: policy versions over positions of the completion.
        finish_reason: stop, length or abort, with its last piece.
        turned_away: why the sequence was not begun, or is not gone on with here; then it is the last piece.
        report: how the engine does.
        routing: a routing row for each of `tokens`, if they are wanted. prompt_routing: those of the prompt, from
            `rows_from` on, with the first tokens that this engine makes.
    """

    start: int = 0
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[VersionSpan] = []
    finish_reason: str = ""
    turned_away: TurnedAway = ""
    report: EngineReport
    routing: bytes = b""
    prompt_routing: bytes = b""


class Generation(Protocol):
    """Sequences made by one engine, for anybody in the run."""

    def generate(self, order: Order) -> AsyncIterator[Piece]:
        """Make one sequence. Refused when the engine can never do it."""

    @idempotent
    async def load(self) -> EngineReport:
        """How the engine does."""


def admissible(version: int, allowed: Sequence[int]) -> bool:
    """Whether an engine at this version may begin what is wanted of certain versions: the router's word is as old as
    its news, and a new incarnation may have answered at the old one's address. Without weights it is at version 0."""
    return version in allowed or version > max(allowed)


class _Open:
    """A sequence of a caller: what the engine made of it and the caller has not yet."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.news = asyncio.Event()
        self.ended = False

    def add(self, chunk: Chunk) -> None:
        """Bounded by the sequence's length: a caller that reads slowly gets more at a time."""
        self.chunks.append(chunk)
        self.ended = self.ended or bool(chunk.finish_reason)
        self.news.set()

    def take(self, report: EngineReport) -> Piece:
        """All of it, as one piece."""
        chunks, self.chunks = self.chunks, []
        self.news.clear()
        if not chunks:
            return Piece(report=report)
        return Piece(
            start=chunks[0].start,
            tokens=[token for chunk in chunks for token in chunk.tokens],
            logprobs=[logprob for chunk in chunks for logprob in chunk.logprobs],
            versions=[span for chunk in chunks for span in chunk.versions],
            finish_reason=chunks[-1].finish_reason,
            report=report,
            routing=b"".join(chunk.routing for chunk in chunks),
            prompt_routing=next((chunk.prompt_routing for chunk in chunks if chunk.prompt_routing), b""),
        )


class GenerationService:
    """Serves Generation with an engine that has other work too. All of it on the event loop.

    Args:
        epoch: of the process. engine: what generates.
        stopping: set when the process is asked to end: sequences go on elsewhere.
        intake: bounds the sequences taken in from callers by the use of the KV cache.
    """

    def __init__(
        self, epoch: int, engine: Engine, stopping: asyncio.Event, intake: Intake | None = None, beat_s: float = BEAT_S
    ) -> None:
        self._epoch, self._engine, self._stopping = epoch, engine, stopping
        self.intake = intake or Intake(Marks(most=MOST_REQUESTS))
        self._beat_s = beat_s
        self._open: dict[int, _Open] = {}
        self._numbers = itertools.count(FIRST_REQUEST)
        self._held = ""
        self.begun = self.turned_away = self.tokens = 0

    def statistics(self) -> dict[str, int]:
        """Sequences begun and turned away, tokens given out, sequences at work."""
        return {
            "begun": self.begun,
            "turned_away": self.turned_away,
            "tokens": self.tokens,
            "running": len(self._open),
        }

    def hold(self, why: str) -> None:
        """Make nothing for callers from now on, until it is called with an empty reason: what is under way goes back to
        them with its tokens."""
        self._held = why
        for number in list(self._open) if why else []:
            self._engine.abort(number)

    def sift(self, chunks: list[Chunk]) -> list[Chunk]:
        """Take what is ours out of the engine's chunks; the rest is its owner's."""
        others = []
        for chunk in chunks:
            if chunk.request < FIRST_REQUEST:
                others.append(chunk)
            elif (one := self._open.get(chunk.request)) is not None:
                self.tokens += len(chunk.tokens)
                one.add(chunk)
                if one.ended:
                    # The engine has its place free, and reports are to say so, whenever the caller reads.
                    del self._open[chunk.request]
        return others

    async def load(self) -> EngineReport:
        """See Generation."""
        return self._report()

    async def generate(self, order: Order) -> AsyncIterator[Piece]:
        """See Generation."""
        if order.media and (sight := self._engine.sight) is not None:
            # In a thread; the engine finds them looked at.
            await asyncio.to_thread(sight.check, order.prompt, order.media)
        if away := self._no(order):
            self.turned_away += 1
            yield Piece(turned_away=away, report=self._report())
            return
        number, one = next(self._numbers), _Open()
        request = _request(number, order)
        self._open[number] = one
        try:
            try:
                self._engine.submit([request])
            except EngineEnded:
                # It is not the request's fault: another engine may take it.
                self.turned_away += 1
                one.ended = True
                del self._open[number]
                yield Piece(turned_away="stopping", report=self._report())
                return
            self.begun += 1
            yield Piece(report=self._report())
            ends_at = time.monotonic() + order.left_s
            while not one.ended or one.chunks:
                piece = await self._next(one, ends_at)
                yield piece
                if piece.turned_away or piece.finish_reason:
                    return
        finally:
            self._open.pop(number, None)
            if not one.ended:
                self._engine.abort(number)

    async def _next(self, one: _Open, ends_at: float) -> Piece:
        """What there is within a beat."""
        left_s = ends_at - time.monotonic()
        try:
            # Not wait_for, which forgets a cancellation that comes together with the news.
            async with asyncio.timeout(max(0.0, min(self._beat_s, left_s))):
                await one.news.wait()
        except TimeoutError:
            if left_s <= self._beat_s and not one.chunks:
                # Its caller's deadline, which he knows of himself.
                return Piece(finish_reason="abort", report=self._report())
        if self._stopping.is_set() and not one.ended:
            return msgspec.structs.replace(one.take(self._report()), turned_away="stopping")
        return one.take(self._report())

    def _no(self, order: Order) -> TurnedAway:
        """Why a sequence is not begun."""
        if self._stopping.is_set():
            return "stopping"
        if self._held:
            return "full"
        load = self._engine.load()
        self.intake.observe(time.monotonic(), load.kv_used, len(self._open))
        if not admissible(load.version, order.allowed):
            return "stale"
        return "" if self.intake.room(len(self._open)) else "full"

    def _report(self) -> EngineReport:
        load = self._engine.load()
        self.intake.observe(time.monotonic(), load.kv_used, len(self._open))
        return EngineReport(
            epoch=self._epoch,
            version=load.version,
            generated=load.tokens_generated,
            running=load.running,
            waiting=load.waiting,
            outstanding_tokens=load.outstanding_tokens,
            kv_used=load.kv_used,
            room=0 if self._held else self.intake.room(len(self._open)),
            waiting_on=self._held or load.paused,
            stopping=self._stopping.is_set(),
        )


def _request(number: int, order: Order) -> GroupRequest:
    had = (tuple(order.tokens), tuple(order.logprobs), tuple(order.versions), order.rows)
    partial = Partial(*had) if order.tokens else None
    return GroupRequest(
        id=number,
        prompt=tuple(order.prompt),
        seeds=(order.seed,),
        temperature=order.temperature,
        max_new_tokens=order.max_new_tokens,
        stop_ids=frozenset(order.stop_ids),
        partials=(partial,),
        chunk_tokens=order.chunk_tokens,
        routing=order.routing,
        rows_from=order.rows_from,
        media=tuple(order.media),
    )


def serve_generation(ctx: RoleContext, engine: Engine, most: int = MOST_REQUESTS) -> GenerationService:
    """Offer Generation at a role's address; call it in setup, and give the engine's chunks through `sift`.

    Args:
        most: sequences of callers at once.
    """
    service = GenerationService(ctx.who.epoch, engine, ctx.stopping, Intake(Marks(most=most)))
    ctx.serve(Generation, service)
    return service
