"""Serves an engine to the routers of the run, beside the requests of the engine's owner.

The first update of a stream says whether the engine accepts the sequence. Then come tokens, and at least every `BEAT_S`
an update without tokens as a heartbeat. Closing the stream ends the sequence.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence

import msgspec

from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.rollout.engines.base import Chunk, Engine, EngineEnded, GroupRequest, Partial
from relax_rt.roles.rollout.router.admission import CapLimits, EngineCap
from relax_rt.roles.rollout.router.interface import (
    EngineReport,
    Generation,
    Rejection,
    SequenceRequest,
    SequenceUpdate,
)

FIRST_REQUEST = 1 << 48
"""Request numbers of this service begin here; those of the engine's owner are lower."""
BEAT_S = 0.5
MAX_REQUESTS = 64


def admissible(version: int, allowed: Sequence[int]) -> bool:
    """Whether an engine at this version may begin a request.

    The engine checks it again, because the router may not know its latest version, and because a new incarnation may
    answer at the old one's address: without weights it is at version 0.
    """
    return version in allowed or version > max(allowed)


class _OpenSequence:
    """A sequence of a caller, with the chunks that the caller has not read yet."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.changed = asyncio.Event()
        self.ended = False

    def add(self, chunk: Chunk) -> None:
        """Add a chunk. Bounded by the sequence's length: a slow caller gets more at a time."""
        self.chunks.append(chunk)
        self.ended = self.ended or bool(chunk.finish_reason)
        self.changed.set()

    def take(self, report: EngineReport) -> SequenceUpdate:
        """Return all chunks as one update."""
        chunks, self.chunks = self.chunks, []
        self.changed.clear()
        if not chunks:
            return SequenceUpdate(report=report)
        return SequenceUpdate(
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
    """Implements Generation with an engine that has other work too; everything runs on the event loop.

    Args:
        epoch: of the process. engine: what generates.
        stopping: set when the process is asked to stop: its sequences continue elsewhere.
        cap: bounds the sequences accepted from routers by the use of the KV cache.
    """

    def __init__(
        self,
        epoch: int,
        engine: Engine,
        stopping: asyncio.Event,
        cap: EngineCap | None = None,
        beat_s: float = BEAT_S,
    ) -> None:
        self._epoch, self._engine, self._stopping = epoch, engine, stopping
        self.cap = cap or EngineCap(CapLimits(most=MAX_REQUESTS))
        self._beat_s = beat_s
        self._open: dict[int, _OpenSequence] = {}
        self._numbers = itertools.count(FIRST_REQUEST)
        self._paused = ""
        self.accepted = self.rejected = self.tokens = 0

    def statistics(self) -> dict[str, int]:
        """Count sequences accepted and rejected, tokens delivered, and sequences running."""
        return {
            "accepted": self.accepted,
            "rejected": self.rejected,
            "tokens": self.tokens,
            "running": len(self._open),
        }

    def pause(self, why: str) -> None:
        """Abort running sequences, whose callers keep the tokens, and accept none until `resume`."""
        self._paused = why
        for number in list(self._open):
            self._engine.abort(number)

    def resume(self) -> None:
        """Accept sequences again."""
        self._paused = ""

    def take_chunks(self, chunks: list[Chunk]) -> list[Chunk]:
        """Take the chunks of this service's sequences; return the rest, which are of the owner's."""
        others = []
        for chunk in chunks:
            if chunk.request < FIRST_REQUEST:
                others.append(chunk)
            elif (one := self._open.get(chunk.request)) is not None:
                self.tokens += len(chunk.tokens)
                one.add(chunk)
                if one.ended:
                    # The engine's slot is free from now on; reports must say so even if the caller reads later.
                    del self._open[chunk.request]
        return others

    async def load(self) -> EngineReport:
        """Report the engine's load."""
        return self._report()

    async def generate(self, request: SequenceRequest) -> AsyncIterator[SequenceUpdate]:
        """Generate one sequence."""
        if request.media and (image_processor := self._engine.image_processor) is not None:
            # Processed in a thread here; the engine then finds the images' features cached.
            await asyncio.to_thread(image_processor.check, request.prompt, request.media)
        if why := self._rejection(request):
            self.rejected += 1
            yield SequenceUpdate(rejected=why, report=self._report())
            return
        number, one = next(self._numbers), _OpenSequence()
        self._open[number] = one
        try:
            try:
                partial = None
                if request.tokens:
                    versions = tuple(request.versions)
                    partial = Partial(tuple(request.tokens), tuple(request.logprobs), versions, request.rows)
                group = GroupRequest(
                    id=number,
                    prompt=tuple(request.prompt),
                    seeds=(request.seed,),
                    temperature=request.temperature,
                    max_new_tokens=request.max_new_tokens,
                    stop_ids=frozenset(request.stop_ids),
                    partials=(partial,),
                    chunk_tokens=request.chunk_tokens,
                    routing=request.routing,
                    rows_from=request.rows_from,
                    media=tuple(request.media),
                )
                self._engine.submit([group])
            except EngineEnded:
                # Not the request's fault: another engine may serve it.
                self.rejected += 1
                one.ended = True
                del self._open[number]
                yield SequenceUpdate(rejected="stopping", report=self._report())
                return
            self.accepted += 1
            yield SequenceUpdate(report=self._report())
            ends_at = time.monotonic() + request.left_s
            while not one.ended or one.chunks:
                update = await self._next(one, ends_at)
                yield update
                if update.rejected or update.finish_reason:
                    return
        finally:
            self._open.pop(number, None)
            if not one.ended:
                self._engine.abort(number)

    async def _next(self, one: _OpenSequence, ends_at: float) -> SequenceUpdate:
        """Return what arrives within a heartbeat."""
        left_s = ends_at - time.monotonic()
        try:
            # Not wait_for, which swallows a cancellation that arrives together with the result.
            async with asyncio.timeout(max(0.0, min(self._beat_s, left_s))):
                await one.changed.wait()
        except TimeoutError:
            if left_s <= self._beat_s and not one.chunks:
                # The caller's deadline, which the caller watches as well.
                return SequenceUpdate(finish_reason="abort", report=self._report())
        if self._stopping.is_set() and not one.ended:
            return msgspec.structs.replace(one.take(self._report()), rejected="stopping")
        return one.take(self._report())

    def _rejection(self, request: SequenceRequest) -> Rejection:
        if self._stopping.is_set():
            return "stopping"
        if self._paused:
            return "full"
        load = self._engine.load()
        self.cap.observe(time.monotonic(), load.kv_used, len(self._open))
        if not admissible(load.version, request.allowed):
            return "stale"
        return "" if self.cap.room(len(self._open)) else "full"

    def _report(self) -> EngineReport:
        load = self._engine.load()
        self.cap.observe(time.monotonic(), load.kv_used, len(self._open))
        return EngineReport(
            epoch=self._epoch,
            version=load.version,
            generated=load.tokens_generated,
            running=load.running,
            waiting=load.waiting,
            outstanding_tokens=load.outstanding_tokens,
            kv_used=load.kv_used,
            room=0 if self._paused else self.cap.room(len(self._open)),
            waiting_on=self._paused or load.paused,
            stopping=self._stopping.is_set(),
        )


def serve_generation(ctx: RoleContext, engine: Engine, max_requests: int = MAX_REQUESTS) -> GenerationService:
    """Serve Generation at a role's address. Call it in setup, and pass the engine's chunks through `take_chunks`."""
    service = GenerationService(ctx.who.epoch, engine, ctx.stopping, EngineCap(CapLimits(most=max_requests)))
    ctx.serve(Generation, service)
    return service
