"""An engine inside the role's process: continuous batching over a transformers causal language model."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from relax_rt.roles.models.device import denormals_flushed
from relax_rt.roles.rollout.engines.base import (
    Chunk,
    EngineEnded,
    EngineLoad,
    GroupRequest,
    KvPolicy,
    OnFailure,
    Sink,
    Swap,
    check_request,
    fetch_locked,
)
from relax_rt.roles.rollout.engines.decoder import DecodedSequence, Decoder
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused
from relax_rt.transport.weights.source import WeightSource

MAX_MEMBERS = 1 << 16
"""Sequences that may be in the engine, waiting ones included; callers bound themselves far below."""
PREFIX_POSITIONS = 4096
"""Positions of prompts whose keys and values are kept for prompts that begin alike."""
IDLE_WAIT_S = 0.5
BOUNDARY_TIMEOUT_S = 120.0
"""A token boundary comes after one forward pass; a recomputation of the whole cache takes a few of them."""

T = TypeVar("T")


class EmbeddedEngine:
    """Samples from a model in this process, on a thread of its own. `Engine` documents its methods.

    The thread takes calls from an inbox between two forward passes (a token boundary). What it reports goes to the
    event loop in order, so that the result of a call arrives after the chunks that came before it.

    Args:
        model_dir: Hugging Face folder.
        prefix_positions: positions of computed prompts that are cached.
        routing: report routing rows; every pass then copies what its gates chose to host memory.

    Raises:
        Refused: the model has parts that are not computed here, or has no routing rows.
    """

    name = "embedded"

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: str,
        max_sequences: int,
        threads: int,
        device: str = "cpu",
        prefix_positions: int = PREFIX_POSITIONS,
        routing: bool = False,
    ) -> None:
        torch.set_num_threads(threads)
        self._decoder = Decoder(
            model_dir,
            dtype=dtype,
            max_sequences=max_sequences,
            prefix_positions=prefix_positions,
            device=device,
            routing=routing,
        )
        self.context, self.vocabulary = self._decoder.context, self._decoder.vocabulary
        self.routing = self._decoder.routing
        self.image_processor = (
            self._decoder.vision_tower.image_processor if self._decoder.vision_tower is not None else None
        )
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._sink: Sink
        self._on_failure: OnFailure
        self._failure: BaseException | None = None
        self._members: dict[int, int] = {}
        """Unfinished members of the requests in the engine; kept on the event loop."""
        self._requested = 0
        self._calls: set[Future[Any]] = set()
        self._prepared: VersionRecord | None = None
        self._preparing = asyncio.Lock()
        self._paused = ""
        self._released = self._weights_dropped = False
        """Memory is released; and the weights are not kept in host memory."""

    async def start(self, sink: Sink, on_failure: OnFailure) -> None:
        self._sink, self._on_failure = sink, on_failure
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="relax-engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        count = sum(len(r.seeds) for r in requests)
        ids = [r.id for r in requests]
        self._check_running(f"{count} sequences")
        if sum(self._members.values()) + count > MAX_MEMBERS:
            raise Refused(f"{count} sequences", why=f"the engine holds at most {MAX_MEMBERS}", hint="submit fewer")
        if self._released:
            raise Refused(f"{count} sequences", why="the engine's memory is released", hint="resume_memory() first")
        if self._weights_dropped:
            raise Refused(
                f"{count} sequences", why="the engine has released its weights", hint="commit a version first"
            )
        if len(set(ids)) < len(ids) or any(i in self._members for i in ids):
            raise Refused(f"requests {ids[:8]}", why="one of these numbers is in the engine already")
        for request in requests:
            check_request(
                request,
                context=self.context,
                vocabulary=self.vocabulary,
                routing=self.routing,
                image_processor=self.image_processor,
            )
        sequences = [
            DecodedSequence(request, m, self.routing) for request in requests for m in range(len(request.seeds))
        ]
        self._members.update((r.id, len(r.seeds)) for r in requests)
        self._requested += sum(one.request.max_new_tokens - len(one.tokens) for one in sequences)
        self._inbox.put(lambda: self._decoder.add(sequences))

    def abort(self, request: int) -> None:
        self._inbox.put(lambda: self._decoder.abort(request))

    async def pause(self, why: str) -> None:
        def pause() -> None:
            self._paused = why or "paused"
            self._report(self._decoder.report(everything=True))

        await self._at_boundary("pause", pause)

    async def resume(self) -> None:
        def resume() -> None:
            self._paused = ""

        await self._at_boundary("resume", resume)

    async def prepare(self, source: WeightSource) -> None:
        async def fetch() -> None:
            self._prepared = None
            if self._released:
                raise Refused(f"policy version {source.record.version}", why="the engine's memory is released")
            await asyncio.to_thread(self._fetch, source)
            self._prepared = source.record

        await fetch_locked(self._preparing, fetch)

    def _fetch(self, source: WeightSource) -> None:
        """Fill the standby buffer, which the engine's thread does not use. Blocks."""
        weights, manifest = self._decoder.weights, source.manifest
        weights.check(manifest.layout)
        delta = manifest.payload != "full"
        if delta and manifest.base != self._decoder.version:
            raise Refused(
                f"policy version {manifest.version}",
                why=f"its {manifest.payload} applies to version {manifest.base}, here is {self._decoder.version}",
                hint="fetch it in full",
            )
        source.copy_into(weights.standby(base=delta))
        weights.load()

    async def commit(self, record: VersionRecord, kv: KvPolicy) -> Swap:
        async with self._preparing:
            if self._prepared != record:
                raise Refused(f"policy version {record.version}", why=f"what was prepared last is {self._prepared}")
            self._prepared = None

            def swap() -> Swap:
                began = time.monotonic()
                recomputed = self._decoder.swap(record.version, kv)
                return Swap(record.version, time.monotonic() - began, recomputed)

            swapped = await self._at_boundary(f"swap to policy version {record.version}", swap, fatal=True)
            self._weights_dropped = False
            return swapped

    def load(self) -> EngineLoad:
        decoder = self._decoder
        running = len(decoder.active)
        return EngineLoad(
            version=decoder.version,
            running=running,
            waiting=max(0, sum(self._members.values()) - running),
            tokens_generated=decoder.tokens,
            swaps=decoder.swaps,
            outstanding_tokens=self._requested - decoder.resolved,
            # A running sequence has a cache row of its own and a waiting one has nothing in the cache: more sequences
            # take no room from others, however many rows are in use.
            kv_used=0.0,
            paused=self._paused,
        )

    async def release_memory(self, *, keep_weights: bool = True) -> None:
        async with self._preparing:
            if self._members:
                raise Refused(
                    "release of the engine's memory",
                    why=f"{sum(self._members.values())} sequences are in flight",
                    hint="pause() does not end them: wait for them, or abort them",
                )
            self._released, self._prepared = True, None
            self._weights_dropped = self._weights_dropped or not keep_weights
            await self._at_boundary("release of memory", lambda: self._decoder.release(keep_weights=keep_weights))

    async def resume_memory(self) -> None:
        if self._released:
            await self._at_boundary("resumption of memory", self._decoder.weights.resume)
            self._released = False

    async def close(self, timeout_s: float) -> None:
        self._closing.set()
        self._inbox.put(lambda: None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, timeout_s)
        self._fail_calls("closed")

    def _check_running(self, what: str) -> None:
        if self._failure is not None or self._thread is None or self._closing.is_set():
            why = f"the engine does not run ({self._failure or 'not started, or closed'})"
            raise EngineEnded(what, why=why, hint="its role starts a new one")

    async def _at_boundary(self, what: str, action: Callable[[], T], *, fatal: bool = False) -> T:
        """Run `action` on the engine's thread between two forward passes.

        Args:
            fatal: an error of `action` also ends the engine, before another forward pass.

        Raises:
            DeadlineExceeded: no token boundary came. Refused: the engine does not run. Whatever `action` raises.
        """
        self._check_running(what)
        answer: Future[T] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(action())
            except BaseException as error:
                answer.set_exception(error)
                if fatal:
                    raise

        self._calls.add(answer)
        self._inbox.put(run)
        try:
            # Not wait_for, which swallows a cancellation that comes together with the answer.
            async with asyncio.timeout(BOUNDARY_TIMEOUT_S):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{what}: no token boundary in {BOUNDARY_TIMEOUT_S:.0f} s",
                why="the engine's thread is in one forward pass, or has ended",
                hint="stacks are in the role's log after `relax-rt restart`",
            ) from None
        finally:
            self._calls.discard(answer)

    def _fail_calls(self, why: str) -> None:
        for call in self._calls:
            if not call.done():
                call.set_exception(Refused("a call to the engine", why=f"it ended meanwhile: {why}"))

    def _fail(self, error: BaseException) -> None:
        """End the engine; called on the event loop."""
        self._failure = error
        self._closing.set()
        self._fail_calls(f"{type(error).__name__}: {error}")
        self._on_failure(error)

    # --- the engine's thread

    def _run(self) -> None:
        try:
            with torch.inference_mode(), denormals_flushed():
                while not self._closing.is_set():
                    with suppress(queue.Empty):
                        wait = bool(self._paused) or self._decoder.idle
                        self._inbox.get(block=wait, timeout=IDLE_WAIT_S)()
                        while True:
                            self._inbox.get_nowait()()
                    if self._paused:
                        self._report(self._decoder.report())  # sequences that were aborted meanwhile
                    elif not self._decoder.idle:
                        self._report(self._decoder.step())
        except BaseException as error:  # noqa: BLE001 - the only way for the thread to report it
            self._call_on_loop(self._fail, error)

    def _report(self, chunks: list[Chunk]) -> None:
        if chunks:
            self._call_on_loop(self._deliver, chunks)

    def _call_on_loop(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed
            self._closing.set()

    def _deliver(self, chunks: list[Chunk]) -> None:
        """Give chunks to the sink; called on the event loop."""
        for chunk in chunks:
            if chunk.finish_reason:
                self._members[chunk.request] -= 1
                if not self._members[chunk.request]:
                    del self._members[chunk.request]
        try:
            self._sink(chunks)
        except Exception as error:  # noqa: BLE001 - the chunks are lost: the engine's owner must know
            if not self._closing.is_set():
                self._fail(error)
