"""Interface of engines: what roles request of one, what it reports, and the checks that all engines share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from relax_rt.roles.data.media.images import ImageSpan, identity
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused

if TYPE_CHECKING:
    from relax_rt.roles.data.media.image_processor import ImageProcessor
    from relax_rt.roles.rollout.engines.routing import RoutingShape
    from relax_rt.transport.weights.source import WeightSource

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6

KvPolicy = Literal["keep", "recompute"]
"""The KV cache of sequences in flight at a swap: keep it (later tokens carry the older kv_version), or recompute it
under the new weights (kv_version equals version afterwards)."""


class Partial(msgspec.Struct, frozen=True):
    """The beginning of a member that was sampled before, here or elsewhere: generation resumes behind it.

    Attributes:
        tokens: sampled ids. logprobs: their behaviour log-probabilities.
        versions: policy versions of the tokens, run-length coded over all of them.
        routing: their routing rows, where the request asks for them.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    routing: bytes = b""


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Sample len(seeds) completions of one prompt.

    Attributes:
        id: the caller's name of the request, unique while it is in the engine.
        prompt: token ids.
        seeds: one 64-bit seed a member; a member's tokens depend on its seed, their position and the weights, not on
            its neighbours or on where it was interrupted.
        temperature: 0 is greedy (then log-probabilities are those at temperature 1).
        max_new_tokens: of the whole completion, tokens of a partial included.
        stop_ids: sampling one of these ends the completion; the token is part of it.
        partials: of each member; empty: there are none.
        chunk_tokens: report a member every so many tokens; 0: only its end.
        routing: report routing rows (see engines/routing.py); only an engine that was started for them has any.
        rows_from: position of the prompt from which on rows are wanted.
        media: the images in the prompt, in order.
    """

    id: int
    prompt: tuple[int, ...]
    seeds: tuple[int, ...]
    temperature: float
    max_new_tokens: int
    stop_ids: frozenset[int]
    partials: tuple[Partial | None, ...] = ()
    chunk_tokens: int = 0
    routing: bool = False
    media: tuple[ImageSpan, ...] = ()
    rows_from: int = 0

    def partial(self, member: int) -> Partial | None:
        """Return the partial of a member."""
        return self.partials[member] if self.partials else None

    def identity(self) -> tuple[int, ...]:
        """Key of the prompt: equal only if tokens and images are."""
        return identity(self.prompt, self.media)


class Chunk(msgspec.Struct, frozen=True):
    """What a member has got since its last chunk; tokens of its partial are not reported again.

    Attributes:
        start: position of the first of `tokens` in the completion.
        versions: policy versions of `tokens`, in positions of the completion.
        finish_reason: stop, length or abort in a member's last chunk, which may hold no token; else empty.
        routing: a row for each of `tokens`: that of the position before it (see `routing`).
        prompt_routing: rows of the positions before the prompt's last, from the request's `rows_from` on, with a
            member's first tokens in this engine.
    """

    request: int
    member: int
    start: int
    tokens: list[int]
    logprobs: list[float]
    versions: list[VersionSpan]
    finish_reason: str = ""
    routing: bytes = b""
    prompt_routing: bytes = b""


class EngineLoad(msgspec.Struct, frozen=True):
    """Load of an engine; tokens and swaps count since it was created.

    Attributes:
        running, waiting: sequences that are decoded, and those that wait for room.
        outstanding_tokens: an upper bound of the tokens still to come, of all members.
        kv_used: used share of the KV cache, 0 to 1; 0 if further sequences take no room from those in flight.
        paused: why nothing is generated; empty while it may be.
    """

    version: int
    running: int
    waiting: int
    tokens_generated: int
    swaps: int
    outstanding_tokens: int
    kv_used: float
    paused: str


class Swap(msgspec.Struct, frozen=True):
    """New weights in place.

    Attributes:
        pause_s: how long sequences in flight got no token.
        recomputed_tokens: positions whose keys and values were computed again.
    """

    version: int
    pause_s: float
    recomputed_tokens: int


class EngineEnded(Refused):
    """The engine does not run: it failed, was closed or was not started. Another one may serve the request."""


Sink = Callable[[list[Chunk]], None]
OnFailure = Callable[[BaseException], None]


class Engine(Protocol):
    """Continuous batching with per-token log-probabilities and versions. All methods are called on the event loop.

    Every member of an accepted request ends with exactly one chunk that has a finish_reason, unless the engine fails
    or is closed before.

    Attributes:
        routing: shape of the routing rows that it reports; None: it reports none.
        image_processor: processes the images in prompts; None: it refuses them.
    """

    name: str
    routing: RoutingShape | None
    image_processor: ImageProcessor | None

    async def start(self, sink: Sink, on_failure: OnFailure) -> None:
        """Start. `sink` gets chunks and `on_failure` what ended the engine, both on the event loop."""

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Queue requests; returns at once.

        Raises:
            Refused: one of them does not fit the model or the engine, or the queue is full; none is accepted then.
            EngineEnded: it has ended.
        """

    def abort(self, request: int) -> None:
        """End a request's members at the next token boundary, tokens kept; unknown requests are ignored."""

    async def pause(self, why: str) -> None:
        """Stop generating at a token boundary until `resume`. Earlier chunks have been delivered when this returns."""

    async def resume(self) -> None:
        """Resume after `pause`; without effect if it is not paused."""

    async def prepare(self, source: WeightSource) -> None:
        """Fetch a version into memory of the engine's own and verify it, while generation goes on.

        Raises:
            Gone: a newer version took its place. Corrupt: it is not what was committed.
            Refused: it does not fit this engine's model.
        """

    async def commit(self, record: VersionRecord, kv: KvPolicy) -> Swap:
        """Sample from the prepared version from the next token boundary on; sequences in flight keep their tokens.

        Raises:
            Refused: another version, or none, was prepared last.
            Corrupt: the engine does not hold what it reported as loaded.
        """

    def load(self) -> EngineLoad:
        """Return its load."""

    async def release_memory(self, *, keep_weights: bool = True) -> None:
        """Release the device memory of weights and cache.

        Args:
            keep_weights: False: `resume_memory` need not restore them, because a version will be committed before
                anything is submitted.

        Raises:
            Refused: sequences are in flight.
        """

    async def resume_memory(self) -> None:
        """Take the memory again, and restore the weights if they were kept."""

    async def close(self, timeout_s: float) -> None:
        """End at the next token boundary; sequences in flight are dropped without a chunk."""


class Completion(msgspec.Struct, frozen=True):
    """One finished member, tokens of its partial included.

    Attributes:
        tokens: sampled ids, the stop token included.
        logprobs: behaviour log-probability of each token.
        versions: policy version of each token, run-length coded over positions in `tokens`.
        finish_reason: stop, length or abort.
        prompt_routing, routing: routing rows where they were asked for: of the positions before the prompt's last, and
            one for each token. Empty, the first, if no token was sampled in this engine.
    """

    request: int
    member: int
    tokens: list[int]
    logprobs: list[float]
    versions: list[VersionSpan]
    finish_reason: str
    routing: bytearray = msgspec.field(default_factory=bytearray)
    prompt_routing: bytes = b""


class Assembly:
    """Assembles chunks to completions. Bounded by the members in flight: a complete one is removed."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], Completion] = {}

    def expect(self, request: GroupRequest) -> None:
        """Expect the members of this request."""
        for member in range(len(request.seeds)):
            had = request.partial(member) or Partial((), (), ())
            routing = bytearray(had.routing if request.routing else b"")
            self._open[request.id, member] = Completion(
                request.id, member, list(had.tokens), list(had.logprobs), list(had.versions), "", routing
            )

    def forget(self, request: int) -> None:
        """Ignore further chunks of this request."""
        for key in [key for key in self._open if key[0] == request]:
            del self._open[key]

    def had(self, request: int, member: int) -> Completion | None:
        """Return an unfinished member so far, which grows with its chunks; None if it is not expected."""
        return self._open.get((request, member))

    def add(self, chunk: Chunk) -> Completion | None:
        """Add a chunk; return the completion if it was the last one. Chunks of members not expected are ignored.

        Raises:
            Refused: the chunk does not begin where the member's last one ended.
        """
        key = (chunk.request, chunk.member)
        one = self._open.get(key)
        if one is None:
            return None
        if chunk.start != len(one.tokens):
            raise Refused(
                f"a chunk of request {chunk.request}, member {chunk.member} that begins at token {chunk.start}",
                why=f"the chunks before it end at token {len(one.tokens)}",
                hint="the engine lost or repeated a chunk; it must be restarted",
            )
        one.tokens.extend(chunk.tokens)
        one.logprobs.extend(chunk.logprobs)
        for span in chunk.versions:
            extend_spans(one.versions, span)
        one.routing.extend(chunk.routing)
        if chunk.prompt_routing or chunk.finish_reason:
            prompt = chunk.prompt_routing or one.prompt_routing
            one = msgspec.structs.replace(one, finish_reason=chunk.finish_reason, prompt_routing=prompt)
            self._open[key] = one
        if not chunk.finish_reason:
            return None
        del self._open[key]
        return one


async def generate(
    engine: Engine, requests: Sequence[GroupRequest], *, timeout_s: float
) -> dict[tuple[int, int], Completion]:
    """Start an engine, complete these requests, and close it; return completions by request and member.

    Raises:
        DeadlineExceeded: not all came in time. Refused: see Engine.submit. Whatever ended the engine.
    """
    done: dict[tuple[int, int], Completion] = {}
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    assembly = Assembly()
    count = sum(len(r.seeds) for r in requests)

    def on_chunks(chunks: list[Chunk]) -> None:
        for chunk in chunks:
            if (one := assembly.add(chunk)) is not None:
                done[one.request, one.member] = one
        if len(done) == count and not over.done():
            over.set_result(None)

    def fail(error: BaseException) -> None:
        if not over.done():
            over.set_exception(error)

    for request in requests:
        assembly.expect(request)
    await engine.start(on_chunks, fail)
    try:
        engine.submit(requests)
        async with asyncio.timeout(timeout_s):
            await over
    except TimeoutError:
        why = f"{len(done)} of {count} came in {timeout_s:.0f} s"
        raise DeadlineExceeded(f"{count} completions", why=why) from None
    finally:
        await engine.close(5.0)
    return done


async def fetch_locked(lock: asyncio.Lock, fetch: Callable[[], Awaitable[None]]) -> None:
    """Run an engine's fetch of weights under its lock.

    The fetch writes into the engine's buffer from a thread, which cannot be cancelled. If the caller is cancelled, the
    fetch therefore goes on, and holds the lock as long as it writes.
    """

    async def locked() -> None:
        try:
            await fetch()
        finally:
            lock.release()

    await lock.acquire()
    work = asyncio.create_task(locked())
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        work.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise


def extend_spans(spans: list[VersionSpan], span: VersionSpan) -> None:
    """Append a span, merged with the last one if it continues that with the same versions."""
    last = spans[-1] if spans else None
    if last is not None and (last.end, last.version, last.kv_version) == (span.start, span.version, span.kv_version):
        spans[-1] = VersionSpan(last.start, span.end, span.version, span.kv_version)
    else:
        spans.append(span)


def check_request(
    request: GroupRequest,
    *,
    context: int,
    vocabulary: int,
    routing: RoutingShape | None = None,
    image_processor: ImageProcessor | None = None,
) -> None:
    """Refuse a request that no engine can serve. Images that were not processed lately are decoded and processed now.

    Args:
        context: positions that the model has.
        routing, image_processor: of the engine.

    Raises:
        Refused: with the first thing that is wrong.
    """
    what = f"request {request.id}"
    if not request.prompt or not request.seeds:
        raise Refused(
            f"{what}: {len(request.prompt)} prompt tokens, {len(request.seeds)} members", why="both are needed"
        )
    if request.routing and routing is None:
        raise Refused(
            f"{what}: routing rows",
            why="this engine was not started for them",
            hint="set roles.rollout.routing = true, with a mixture of experts",
        )
    if not 0 <= request.rows_from < len(request.prompt):
        why = f"its prompt has {len(request.prompt)} tokens"
        raise Refused(f"{what}: routing rows from position {request.rows_from} on", why=why)
    if request.max_new_tokens < 1:
        raise Refused(f"{what}: max_new_tokens = {request.max_new_tokens}", why="at least one token is sampled")
    if len(request.prompt) + request.max_new_tokens > context:
        raise Refused(
            f"{what}: {len(request.prompt)} prompt + {request.max_new_tokens} new tokens",
            why=f"the model's context is {context} tokens",
            hint="lower sampling.max_new_tokens or data.max_prompt_tokens",
        )
    if request.partials and len(request.partials) != len(request.seeds):
        raise Refused(f"{what}: {len(request.partials)} partials of {len(request.seeds)} members")
    if invalid := invalid_sampling(request.seeds, request.temperature):
        raise Refused(f"{what}: {invalid}", why="no engine samples with that")
    had = [token for partial in request.partials if partial for token in partial.tokens]
    for tokens in (request.prompt, had):
        if outside := [token for token in tokens if not 0 <= token < vocabulary]:
            raise Refused(
                f"{what}: token {outside[0]}",
                why=f"the model's vocabulary is {vocabulary} tokens",
                hint="tokenizer and model must belong together",
            )
    for member, partial in enumerate(request.partials):
        _check_partial(f"{what}, member {member}", partial, request, routing)
    if request.media and image_processor is None:
        hint = 'use a vision-language model, and roles.rollout.engine = "embedded"'
        raise Refused(f"{what}: {len(request.media)} images", why="this engine takes tokens only", hint=hint)
    if request.media and image_processor is not None:
        image_processor.check(request.prompt, request.media)


def invalid_sampling(seeds: Sequence[int], temperature: float) -> str:
    """Describe a seed or temperature that cannot be sampled with; empty: all can."""
    for seed in seeds:
        if not 0 <= seed < 1 << 64:
            return f"seed {seed} (64 bits, not negative)"
    # Outside of this range, float32 logits divided by it are infinite, or all equal.
    if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        return f"temperature {temperature} (0, or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g})"
    return ""


def _check_partial(what: str, partial: Partial | None, request: GroupRequest, routing: RoutingShape | None) -> None:
    if partial is None:
        return
    count = len(partial.tokens)
    if count > request.max_new_tokens:
        raise Refused(f"{what}: a partial of {count} tokens", why=f"max_new_tokens is {request.max_new_tokens}")
    if len(partial.logprobs) != count:
        raise Refused(f"{what}: a partial of {count} tokens and {len(partial.logprobs)} log-probabilities")
    if request.routing and routing is not None and len(partial.routing) != count * routing.row_bytes:
        raise Refused(
            f"{what}: a partial of {count} tokens and {len(partial.routing)} bytes of routing rows",
            why=f"each token has a row of {routing.row_bytes}",
        )
    ends = [0, *(span.end for span in partial.versions)]
    if [span.start for span in partial.versions] != ends[:-1] or ends[-1] != count:
        raise Refused(
            f"{what}: a partial whose versions are {partial.versions}", why=f"they do not cover its {count} tokens"
        )
