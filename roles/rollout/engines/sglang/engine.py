"""An engine over an SGLang server; `Engine` documents its methods.

Segments (requests.py) make versions exact and a swap simple: every change of the server (a swap, a pause, a release of
memory) first ends all running segments, so that the server is idle. Loading into an idle server needs no session of its
own, can flush the cache, and mixes no versions. Sequences resume behind their tokens; with kept keys and values by way
of the server's prefix cache, under the salt they were started with.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_rt.roles.data.media.image_processor import ImageProcessor
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
from relax_rt.roles.rollout.engines.settings import EngineSettings, RolloutSettings
from relax_rt.roles.rollout.engines.sglang import weight_loading
from relax_rt.roles.rollout.engines.sglang.client import ServerLimits, StreamEvent
from relax_rt.roles.rollout.engines.sglang.options import Device, Option, sglang_mismatch
from relax_rt.roles.rollout.engines.sglang.requests import (
    MemberQueue,
    RowDecoder,
    SegmentBatch,
    SegmentedMember,
    request_body,
)
from relax_rt.roles.rollout.engines.sglang.server import ServerSpec, SglangServer
from relax_rt.roles.rollout.engines.sglang.weight_loading import LoadedVersion, OnFileFallback, WeightLoader
from relax_rt.roles.rollout.engines.sglang.weights import by_expert, check_layout, published_tensors, recipes
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import DeadlineExceeded, ProtocolError, Refused, RelaxError, Unreachable
from relax_rt.transport.weights.manifest import layout_of
from relax_rt.transport.weights.source import WeightSource

MAX_WAITING = 4096
"""Requests that may wait; callers bound themselves far below."""
QUEUED_FACTOR = 10
"""Multiple of stall_timeout_s that a segment may be silent while it may be waiting for room at the server."""
ABORT_AGAIN_S = 0.25
"""An abort that overtook its request at the server had no effect: it is repeated."""
ABORT_TIMEOUT_S = 10.0
WATCH_EVERY_S = 1.0


class SglangEngine:
    """Samples through a server of its own.

    Args:
        model: Hugging Face folder that the server starts from.
        spec: interpreter, folders and environment of the server.
        options: returns the server's options from what differs between starts, and the model's `context`.
        weights_folder: of the private copy of the weights.
        kv_tokens: size of its cache, until the server reports it.
        on_boot: called with the maximum duration of the start, when it begins.
        on_progress: called with how far the start is.
        attempt: see WeightLoader. on_file_fallback: called for versions that are loaded from the file instead.

    Raises:
        Refused: the server would compute something else than the model says.
    """

    name = "sglang"
    image_processor: ImageProcessor | None = None

    def __init__(
        self,
        model: Path,
        settings: EngineSettings,
        spec: ServerSpec,
        options: Callable[..., dict[str, Option]],
        *,
        device: Device,
        weights_folder: Path,
        kv_tokens: int,
        on_boot: Callable[[float], object] = lambda _: None,
        on_progress: Callable[[str], object] = lambda _: None,
        attempt: Path | None = None,
        on_file_fallback: OnFileFallback = lambda version, why: None,
    ) -> None:
        if why := sglang_mismatch(model):
            raise Refused(
                f"{model.name} in the sglang engine", why=f"its Qwen3-MoE {why}", hint='use engine = "embedded"'
            )
        self.settings, self._table = settings, settings.sglang
        self._loader = WeightLoader(self._table, weights_folder, device, attempt, on_file_fallback)
        self._on_boot = on_boot
        self._rows = RowDecoder(model) if isinstance(settings, RolloutSettings) and settings.routing else None
        self.routing = self._rows.shape if self._rows is not None else None
        self._folder, self._model = model, published_tensors(model, settings.dtype)
        text = json.loads((model / "config.json").read_text())
        self.context = int(text.get("max_position_embeddings") or text["text_config"]["max_position_embeddings"])
        self.vocabulary = int(text.get("vocab_size") or text["text_config"]["vocab_size"])
        self._server = SglangServer(
            spec, model, functools.partial(options, context=self.context), self._fail, on_progress
        )
        self._limits = ServerLimits(self.context, kv_tokens, settings.max_sequences)
        self._waiting = MemberQueue()
        self._running: dict[str, SegmentedMember] = {}
        self._members: dict[int, list[SegmentedMember]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._orders, self._segments = itertools.count(1), itertools.count(1)
        self._holds: dict[str, str] = {"start": "the server is not started"}
        """Reasons why nothing is sampled, by what set them."""
        self._change, self._fetch = asyncio.Lock(), asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._prepared: LoadedVersion | None = None
        self._loaded = LoadedVersion(0, {})
        self._version = self._tokens = self._swaps = 0
        self._progressed_at = 0.0
        self._unreported: list[Chunk] = []
        self._failure: BaseException | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._sink: Sink
        self._on_failure: OnFailure

    @property
    def weights_folder(self) -> Path:
        """Folder of the private copy that the server loads."""
        return self._loader.copy.folder

    # --- start, end and health

    async def start(self, sink: Sink, on_failure: OnFailure) -> None:
        """Start the server; it has generated a token when this returns.

        Raises:
            ServerDied, DeadlineExceeded: it does not start; with its last lines.
            Refused: it has tensors that no publication is known to fill.
        """
        self._sink, self._on_failure = sink, on_failure
        began, limit_s = time.monotonic(), self._table.update_timeout_s
        self._on_boot(self._table.boot_timeout_s)
        await self._server.start(self._table.boot_timeout_s)
        try:
            await self._first_token(self._table.boot_timeout_s - (time.monotonic() - began))
            self._limits = await self._server.client.limits(limit_s)
            checksums = await weight_loading.reported(self._server.client, limit_s)
            self._loaded = LoadedVersion(0, checksums)
            layout = layout_of((name, dtype, shape, 0) for name, (dtype, shape) in self._model.items())
            self._loader.recipes = await asyncio.to_thread(recipes, checksums, layout)
        except BaseException:
            await self._server.stop()
            raise
        self._watcher = asyncio.create_task(self._watch())
        self._watcher.add_done_callback(self._on_task_done)
        self._unhold("start")

    async def _first_token(self, timeout_s: float) -> None:
        # /health answers before the server can generate.
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        try:
            await self._server.client.call("/generate", body, timeout_s=max(1.0, timeout_s))
        except RelaxError as error:
            if isinstance(error, Unreachable):
                await self._server.wait_for_exit()
            late = DeadlineExceeded("the first token of the SGLang server", why=str(error))
            raise self._failure or self._server.explain(late) from error

    async def close(self, timeout_s: float) -> None:
        """End the server and release all memory."""
        deadline = time.monotonic() + timeout_s
        self._holds["close"] = "it is being closed"
        self._failure = self._failure or Refused("the engine", why="it is closed")
        tasks = [*self._tasks, *([self._watcher] if self._watcher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await self._server.stop(timeout_s)
            with suppress(TimeoutError):
                # A fetch cannot be cancelled, and writes into the copy until it is over.
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())), self._fetch:
                    pass
        finally:
            await asyncio.to_thread(self._loader.close)
            with suppress(OSError):  # other files may lie there
                self.weights_folder.parent.rmdir()

    def _fail(self, error: BaseException) -> None:
        """End the engine and report the failure, once."""
        if self._failure is None:
            self._failure = error
            self._holds["failed"] = f"it failed: {error}"
            self._idle.set()
            self._on_failure(error)

    async def _fail_change(self, error: RelaxError) -> RelaxError:
        """End the engine after a call of the server failed; return the cause. If the server has ended, that is a better
        reason than a missing answer."""
        try:
            if isinstance(error, Unreachable):
                await self._server.wait_for_exit()
        finally:
            self._fail(self._server.explain(error))
        return self._failure if isinstance(self._failure, RelaxError) else error

    def _check_running(self) -> None:
        if self._failure is not None:
            raise EngineEnded("the SGLang engine", why=f"it failed: {self._failure}", hint="its role starts a new one")

    async def _watch(self) -> None:
        """Health is progress: fail if the server has running segments and generates nothing."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if crashed := await asyncio.to_thread(self._server.crashed):
                self._fail(crashed)
            if self._running and (stalled := self._stalled(time.monotonic())):
                self._fail(self._server.explain(DeadlineExceeded(stalled[0], why=stalled[1])))
            if aborted := [member.rid for member in self._running.values() if member.aborted]:
                await self._abort_segments(aborted)

    def _stalled(self, now: float) -> tuple[str, str] | None:
        """Return what generates nothing though it should, and for how long."""
        limit_s, count = self._table.stall_timeout_s, len(self._running)
        if (silent_s := now - self._progressed_at) > limit_s:
            return f"a token of the SGLang server, with {count} sequences running", f"none within {silent_s:.0f} s"
        need = sum(len(member.request.prompt) + member.request.max_new_tokens for member in self._running.values())
        for member in self._running.values():
            # Before its first token, or where not all fit into the cache, it may wait for others.
            waits = member.fresh or need > self._limits.kv_tokens
            if (silent_s := now - member.progressed_at) > limit_s * (QUEUED_FACTOR if waits else 1):
                which = f"request {member.request.id}, member {member.index}"
                return (
                    f"a token of {which} of the SGLang server",
                    f"none within {silent_s:.0f} s, while others got some",
                )
        return None

    # --- requests

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        if self._failure is not None or self._watcher is None:
            why = str(self._failure) if self._failure else "it is not started"
            raise EngineEnded("requests to the SGLang engine", why=why, hint="its role starts a new one")
        if len(self._members) + len(requests) > MAX_WAITING:
            raise Refused(f"the engine holds {MAX_WAITING} requests", hint="submit fewer at a time")
        if "released" in self._holds:
            raise Refused("requests to the SGLang engine", why=self._holds["released"], hint="resume_memory first")
        for number, request in enumerate(requests):
            if request.id in self._members or any(other.id == request.id for other in requests[:number]):
                raise Refused(f"request {request.id}", why="one of that number is in the engine already")
            check_request(request, context=self.context, vocabulary=self.vocabulary, routing=self.routing)
            if self._rows is not None:
                self._rows.check(request)
            need, limits = len(request.prompt) + request.max_new_tokens, self._limits
            if need > limits.longest:
                raise Refused(
                    f"request {request.id}: {need} tokens",
                    why=f"this server takes {limits.longest} a sequence, with a cache of {limits.kv_tokens}",
                    hint="give the server more room, or lower sampling.max_new_tokens or data.max_prompt_tokens",
                )
        for request in requests:
            order = next(self._orders)
            members = [
                SegmentedMember.from_request(request, index, order, self.routing) for index in range(len(request.seeds))
            ]
            self._members[request.id] = members
            self._waiting.add(member for member in members if not member.finish)
            self._report(member for member in members if member.finish)
        self._advance()

    def abort(self, request: int) -> None:
        for member in self._members.get(request, []):
            member.aborted = True
        waiting = self._waiting.drop(request)
        for member in waiting:
            member.end_segment()
        self._report(waiting)
        if running := [member.rid for member in self._members.get(request, []) if member.rid]:
            self._spawn(self._abort_segments(running))

    async def _abort_segments(self, rids: list[str]) -> None:
        # Names have one length: the server also ends requests whose names begin with the given one.
        for rid in rids:
            try:
                await self._server.client.call("/abort_request", {"rid": rid}, timeout_s=ABORT_TIMEOUT_S)
            except RelaxError:
                return  # the watcher repeats it; a server that has ended is noticed elsewhere

    def _advance(self) -> None:
        """Start segments of waiting members, as many as the server decodes at a time."""
        at_a_time = min(self.settings.max_sequences, self._limits.running)
        while not self._holds and (members := self._waiting.take(at_a_time - len(self._running))):
            now = time.monotonic()
            for member in members:
                member.begin(f"s{next(self._segments):015d}", self._version, now)
                self._running[member.rid] = member
            if len(self._running) == len(members):
                self._progressed_at = now
            self._idle.clear()
            self._spawn(self._sample(SegmentBatch(members), self._version))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        # Nobody awaits these tasks: an error of one ends the engine.
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(self._server.explain(error) if isinstance(error, RelaxError) else error)

    async def _sample(self, batch: SegmentBatch, version: int) -> None:
        """One call of the server: a segment of each member."""
        try:
            async for event in self._server.client.generate(request_body(batch, seeded=self._table.deterministic)):
                rows = None
                if self._rows is not None and event.meta_info is not None:
                    rows = await self._rows.rows_in(event.meta_info)
                self._on_event(batch, event, version, rows)
        except Unreachable:
            await self._server.wait_for_exit()  # the server's end is the better reason
            raise
        if batch.running:
            raise ProtocolError(
                f"{len(batch.running)} segments of the SGLang server", why="the stream ended before they did"
            )

    def _on_event(self, batch: SegmentBatch, event: StreamEvent, version: int, rows: NDArray[np.int16] | None) -> None:
        if self._failure is not None or event.meta_info is None:
            return
        member = batch.member(event.meta_info)
        if new := member.take(event, version):
            self._tokens += new
            self._progressed_at = member.progressed_at = time.monotonic()
        if (end := event.meta_info.finish_reason) is not None:
            del self._running[member.rid]
            if member.rows is not None:
                member.take_rows(rows, batch.rows_from)
            member.end_segment(end)
            if not member.finish:
                # Interrupted, or ended by a token that ends sequences of the model and not those of this request.
                self._waiting.add([member])
            if not self._running:
                self._idle.set()
        self._report([member])
        if end is not None:
            self._advance()

    def _report(self, members: Iterable[SegmentedMember], *, everything: bool = False) -> None:
        """Collect chunks that are due, so that the sink is called once for all that come together."""
        for member in members:
            if (chunk := member.chunk(everything=everything)) is not None:
                if not self._unreported:
                    asyncio.get_running_loop().call_soon(self._flush)
                self._unreported.append(chunk)
            if member.finish and all(other.finish for other in self._members.get(member.request.id, [])):
                self._members.pop(member.request.id, None)

    def _flush(self) -> None:
        chunks, self._unreported = self._unreported, []
        if chunks:
            try:
                self._sink(chunks)
            except Exception as error:  # noqa: BLE001 - the chunks are lost: the engine's owner must know
                self._fail(error)

    # --- pauses and swaps

    def _unhold(self, name: str) -> None:
        self._holds.pop(name, None)
        self._advance()

    async def pause(self, why: str) -> None:
        async with self._change:
            before = self._holds.get("pause")
            self._holds["pause"] = why or "paused"
            try:
                await self._drain()
            except RelaxError as error:
                raise await self._fail_change(error) from error
            except BaseException:
                # A cancelled caller does not resume: what was interrupted continues.
                if before is None:
                    self._unhold("pause")
                else:
                    self._holds["pause"] = before
                raise
            # The caller may hand the sequences over: report everything.
            self._report(self._waiting, everything=True)
            self._flush()
            self._check_running()

    async def resume(self) -> None:
        async with self._change:
            self._unhold("pause")

    async def _drain(self) -> None:
        """End all running segments, and report what they sampled.

        Raises:
            DeadlineExceeded: the server did not end them in time.
        """
        deadline = time.monotonic() + self._table.update_timeout_s
        while self._running and self._failure is None:
            for member in self._running.values():
                member.interrupted = True
            await self._server.client.call("/abort_request", {"abort_all": True}, timeout_s=ABORT_TIMEOUT_S)
            try:
                async with asyncio.timeout(ABORT_AGAIN_S):
                    await self._idle.wait()
            except TimeoutError:
                if time.monotonic() > deadline:
                    why = f"not within {self._table.update_timeout_s:g} s"
                    raise DeadlineExceeded(f"the end of {len(self._running)} running sequences", why=why) from None
        self._flush()
        self._check_running()

    @asynccontextmanager
    async def _idle_server(self, name: str, why: str) -> AsyncIterator[None]:
        """Change the server inside the block, while it is idle. If the change fails, the engine ends: a half-changed
        server must not serve."""
        async with self._change:
            self._holds[name] = why
            try:
                await self._drain()
                yield
            except RelaxError as error:
                raise await self._fail_change(error) from error
            except BaseException as error:
                self._fail(Refused(f"a change of the SGLang server ({why})", why=f"it was broken off: {error!r}"))
                raise
            self._unhold(name)

    async def prepare(self, source: WeightSource) -> None:
        async def fetch() -> None:
            self._check_running()
            self._prepared = None
            if "released" in self._holds:
                # The copy holds what is loaded again when the memory comes back.
                what = f"policy version {source.manifest.version}"
                raise Refused(what, why=self._holds["released"], hint="resume_memory first")
            needed = {part for recipe in self._loader.recipes.values() for part in recipe.parts}
            check_layout(by_expert(source.manifest.layout), self._model, needed)
            self._prepared = await asyncio.to_thread(self._loader.fetch, source)

        await fetch_locked(self._fetch, fetch)

    async def commit(self, record: VersionRecord, kv: KvPolicy) -> Swap:
        async with self._fetch:
            prepared = self._prepared
            if prepared is None or prepared.version != record.version:
                have = prepared.version if prepared else "none"
                raise Refused(f"a swap to policy version {record.version}", why=f"prepared last was {have}")
            began, recomputed = time.monotonic(), 0
            async with self._idle_server("weights", f"the weights of version {record.version} are loaded"):
                await self._loader.load(self._server.client, prepared, flush=kv == "recompute")
                self._version, self._loaded = prepared.version, prepared
                self._prepared = None
                self._swaps += 1
                if kv == "recompute":
                    recomputed = sum(member.recompute(self._version) for member in self._waiting)
            return Swap(self._version, time.monotonic() - began, recomputed)

    # --- memory and load

    async def release_memory(self, *, keep_weights: bool = True) -> None:
        """Release the device's memory. The weights come back anyway, from the copy in host memory."""
        async with self._fetch:
            what, version = "the release of the engine's memory", self._loaded.version
            if self._running or len(self._waiting):
                raise Refused(what, why=f"{len(self._running) + len(self._waiting)} sequences are in flight")
            if "released" in self._holds:
                return
            if version and self._loader.copy.version != version:
                why = f"it could not get version {version} back: its copy was made for another"
                raise Refused(what, why=why, hint="commit what was prepared, or prepare again, first")
            self._prepared = None
            self._loader.unshare()
            async with self._idle_server("memory", ""):
                await self._server.client.call("/release_memory_occupation", {}, timeout_s=self._table.update_timeout_s)
                self._holds["released"] = "its memory is released"

    async def resume_memory(self) -> None:
        async with self._fetch:
            if "released" not in self._holds:
                return
            client, limit_s, loaded = self._server.client, self._table.update_timeout_s, self._loaded
            async with self._idle_server("memory", ""):
                await client.call("/resume_memory_occupation", {}, timeout_s=limit_s)
                # A device gives memory back without its content.
                if await weight_loading.reported(client, limit_s) != loaded.checksums:
                    if loaded.version and self._loader.copy.version == loaded.version:
                        await self._loader.load(client, loaded, flush=True)
                    else:
                        if not loaded.version:
                            await weight_loading.load_file(client, self._folder, 0, flush=True, timeout_s=limit_s)
                        await weight_loading.verify(client, loaded, limit_s)
                self._holds.pop("released")

    def load(self) -> EngineLoad:
        members = [*self._running.values(), *self._waiting]
        taken = sum(len(member.request.prompt) + len(member.tokens) for member in self._running.values())
        return EngineLoad(
            version=self._version,
            running=len(self._running),
            waiting=len(self._waiting),
            tokens_generated=self._tokens,
            swaps=self._swaps,
            outstanding_tokens=sum(member.left for member in members),
            kv_used=min(1.0, taken / self._limits.kv_tokens) if self._limits.kv_tokens else 0.0,
            paused="; ".join(why for why in self._holds.values() if why),
        )
