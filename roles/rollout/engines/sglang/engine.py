"""The engine over a real SGLang server. See relax_rt.roles.rollout.engines.base for the contract.

Segments (members.py) are what makes versions exact and a swap simple: every change of the server, a swap, a pause, a
release of memory, first ends all running segments, so that the server is idle, and what is loaded into an idle server
needs no session of its own, can flush, and mixes with nothing. Sequences go on behind their tokens; with kept keys and
values by way of the server's prefix cache, under the salt they were begun with.
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
from relax_rt.roles.rollout.engines.sglang.client import Event, Limits
from relax_rt.roles.rollout.engines.sglang.options import Device, Option, unlike_the_model
from relax_rt.roles.rollout.engines.sglang.requests import Batch, Line, Member, RowReader, body_of
from relax_rt.roles.rollout.engines.sglang.server import Place, Server
from relax_rt.roles.rollout.engines.sglang.weight_loading import Held, Loader, OnFileFallback
from relax_rt.roles.rollout.engines.sglang.weights import Recipe, by_expert, check_layout, published_tensors, recipes
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import DeadlineExceeded, ProtocolError, Refused, RelaxError, Unreachable
from relax_rt.transport.weights.manifest import layout_of
from relax_rt.transport.weights.source import WeightSource

MAX_WAITING = 4096
"""Requests that may wait; callers bound themselves far below."""
QUEUED = 10
"""Times stall_timeout_s: how long a segment may be silent that may be waiting for room at the server."""
ABORT_AGAIN_S = 0.25
"""An abort that overtook its request at the server has had no effect: it is said again."""
ABORT_TIMEOUT_S = 10.0
WATCH_EVERY_S = 1.0


class SglangEngine:
    """Samples through a server of its own.

    Args:
        model: Hugging Face folder that the server starts from.
        options: of the server, for what differs from start to start, and the model's `context`.
        place: where the server lives; the copy of the weights lies beside it.
        kv_tokens: room of its cache, until the server says what it has.
        booting: told how long the start may take, when it begins.
        tell: told how far the start is.
        attempt: see Loader. not_shown: told of versions that do not go by handles though they were to.

    Raises:
        Refused: the server would compute something else than the model says.
    """

    name = "sglang"
    image_processor: ImageProcessor | None = None

    def __init__(
        self,
        model: Path,
        settings: EngineSettings,
        place: Place,
        options: Callable[..., dict[str, Option]],
        *,
        device: Device,
        weights_folder: Path,
        kv_tokens: int,
        booting: Callable[[float], object] = lambda _: None,
        tell: Callable[[str], object] = lambda _: None,
        attempt: Path | None = None,
        not_shown: OnFileFallback = lambda version, why: None,
    ) -> None:
        if why := unlike_the_model(model):
            raise Refused(
                f"{model.name} in the sglang engine", why=f"its Qwen3-MoE {why}", hint='use engine = "embedded"'
            )
        self.settings, self._table = settings, settings.sglang
        self._loader = Loader(self._table, weights_folder, device, attempt, not_shown)
        self._booting = booting
        self._rows = RowReader(model) if isinstance(settings, RolloutSettings) and settings.routing else None
        self.routing = self._rows.shape if self._rows is not None else None
        self._folder, self._model = model, published_tensors(model, settings.dtype)
        text = json.loads((model / "config.json").read_text())
        self.context = int(text.get("max_position_embeddings") or text["text_config"]["max_position_embeddings"])
        self.vocabulary = int(text.get("vocab_size") or text["text_config"]["vocab_size"])
        self._server = Server(place, model, functools.partial(options, context=self.context), self._fail, tell)
        self._limits = Limits(self.context, kv_tokens, settings.max_sequences)
        self._line = Line()
        self._running: dict[str, Member] = {}
        self._members: dict[int, list[Member]] = {}
        self._streams: set[asyncio.Task[None]] = set()
        self._orders, self._segments = itertools.count(1), itertools.count(1)
        self._holds: dict[str, str] = {"start": "the server is not started"}
        self._change, self._fetch = asyncio.Lock(), asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._prepared: Held | None = None
        self._held = Held(0, {})
        self._version = self._tokens = self._swaps = 0
        self._heard = 0.0
        self._untold: list[Chunk] = []
        self._failed: BaseException | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._sink: Sink
        self._on_failure: OnFailure

    @property
    def server_pid(self) -> int:
        """Process id of the guard over the server; 0 when there is none."""
        return self._server.pid

    @property
    def weights_folder(self) -> Path:
        """Where the copy lies that the server loads."""
        return self._loader.copy.folder

    # --- life

    async def start(self, sink: Sink, on_failure: OnFailure) -> None:
        """Start the server; it is up and has yielded a token when this returns.

        Raises:
            ServerDied, DeadlineExceeded: it is not; with its last lines.
            Refused: it has tensors that no publication is known to fill.
        """
        self._sink, self._on_failure = sink, on_failure
        began = time.monotonic()
        self._booting(self._table.boot_timeout_s)
        await self._server.start(self._table.boot_timeout_s)
        try:
            await self._first_token(self._table.boot_timeout_s - (time.monotonic() - began))
            self._limits = await self._server.client.limits(self._table.update_timeout_s)
            held = await weight_loading.reported(self._server.client, self._table.update_timeout_s)
            self._held = Held(0, held)
            self._loader.recipes = await asyncio.to_thread(self._find_recipes, held)
        except BaseException:
            await self._server.stop()
            raise
        self._watcher = asyncio.create_task(self._watch())
        self._watcher.add_done_callback(self._settled)
        self._release("start")

    async def _first_token(self, timeout_s: float) -> None:
        """Up is what has made a token: /health answers before."""
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        try:
            await self._server.client.call("/generate", body, timeout_s=max(1.0, timeout_s))
        except RelaxError as error:
            if isinstance(error, Unreachable):
                await self._server.end_told()
            late = DeadlineExceeded("the first token of the SGLang server", why=str(error))
            raise self._failed or self._server.explain(late) from error

    def _find_recipes(self, names: dict[str, str]) -> dict[str, Recipe]:
        layout = layout_of((name, dtype, shape, 0) for name, (dtype, shape) in self._model.items())
        return recipes(names, layout)

    async def close(self, timeout_s: float) -> None:
        """End the server and give all memory back."""
        deadline = time.monotonic() + timeout_s
        self._hold("close", "it is being closed")
        self._failed = self._failed or Refused("the engine", why="it is closed")
        tasks = [*self._streams, *([self._watcher] if self._watcher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await self._server.stop(timeout_s)
            with suppress(TimeoutError):
                # A fetch cannot be ended, and writes into the copy until it is over.
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())), self._fetch:
                    pass
        finally:
            await asyncio.to_thread(self._loader.close)
            with suppress(OSError):  # what else lies there is others'
                self.weights_folder.parent.rmdir()

    def _fail(self, error: BaseException) -> None:
        """The engine is out: it says so once, and does nothing more."""
        if self._failed is None:
            self._failed = error
            self._hold("failed", f"it failed: {error}")
            self._idle.set()
            self._on_failure(error)

    async def _watch(self) -> None:
        """Health is progress: a server with running segments that yields nothing is given up."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if crashed := await asyncio.to_thread(self._server.crashed):
                self._fail(crashed)
            if self._running and (stalled := self._stalled(time.monotonic())):
                self._fail(self._server.explain(DeadlineExceeded(stalled[0], why=stalled[1])))
            if lost := [member.rid for member in self._running.values() if member.aborted]:
                await self._abort_segments(lost)

    def _stalled(self, now: float) -> tuple[str, str] | None:
        """What yields nothing though it should, and for how long."""
        limit, count = self._table.stall_timeout_s, len(self._running)
        if (silent := now - self._heard) > limit:
            return f"a token of the SGLang server, with {count} sequences running", f"none within {silent:.0f} s"
        need = sum(len(member.request.prompt) + member.request.max_new_tokens for member in self._running.values())
        for member in self._running.values():
            # Before its first token, or where not all fit into the cache, it may wait for others.
            waits = member.fresh or need > self._limits.kv_tokens
            if (silent := now - member.heard) > limit * (QUEUED if waits else 1):
                which = f"request {member.request.id}, member {member.index}"
                return f"a token of {which} of the SGLang server", f"none within {silent:.0f} s, while others got some"
        return None

    # --- requests

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Sample the members of these requests."""
        if self._failed is not None or self._watcher is None:
            why = str(self._failed) if self._failed else "it is not started"
            raise EngineEnded("requests to the SGLang engine", why=why, hint="its role starts a new one")
        if len(self._members) + len(requests) > MAX_WAITING:
            raise Refused(f"the engine holds {MAX_WAITING} requests", hint="submit fewer at a time")
        if "released" in self._holds:
            raise Refused("requests to the SGLang engine", why=self._holds["released"], hint="resume_memory first")
        for number, request in enumerate(requests):
            self._check(request, sum(other.id == request.id for other in requests[:number]))
        for request in requests:
            order = next(self._orders)
            members = [Member.of(request, index, order, self.routing) for index in range(len(request.seeds))]
            self._members[request.id] = members
            self._line.add(member for member in members if not member.finish)
            self._tell(member for member in members if member.finish)
        self._advance()

    def _check(self, request: GroupRequest, others: int) -> None:
        if request.id in self._members or others:
            raise Refused(f"request {request.id}", why="one of that number is in the engine already")
        check_request(request, context=self.context, vocabulary=self.vocabulary, routing=self.routing)
        if self._rows is not None:
            self._rows.check(request)
        need = len(request.prompt) + request.max_new_tokens
        if need > self._limits.longest:
            raise Refused(
                f"request {request.id}: {need} tokens",
                why=f"this server takes {self._limits.longest} a sequence, with a cache of {self._limits.kv_tokens}",
                hint="give the server more room, or lower sampling.max_new_tokens or data.max_prompt_tokens",
            )

    def abort(self, request: int) -> None:
        """End a request's members at the next token boundary."""
        for member in self._members.get(request, []):
            member.aborted = True
        waiting = self._line.drop(request)
        for member in waiting:
            member.end_segment()
        self._tell(waiting)
        if running := [member.rid for member in self._members.get(request, []) if member.rid]:
            self._spawn(self._abort_segments(running))

    async def _abort_segments(self, rids: list[str]) -> None:
        """Names are of one length, so that none is the beginning of another, which the server would end as well."""
        for rid in rids:
            try:
                await self._server.client.call("/abort_request", {"rid": rid}, timeout_s=ABORT_TIMEOUT_S)
            except RelaxError:
                return  # the watcher says it again; a server that is gone is seen elsewhere

    def _advance(self) -> None:
        """Have waiting members sampled, as many as the server decodes at a time."""
        at_a_time = min(self.settings.max_sequences, self._limits.running)
        while not self._holds and (members := self._line.take(at_a_time - len(self._running))):
            now = time.monotonic()
            for member in members:
                member.begin(f"s{next(self._segments):015d}", self._version, now)
                self._running[member.rid] = member
            if len(self._running) == len(members):
                self._heard = now
            self._idle.clear()
            self._spawn(self._sample(Batch(members), self._version))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._streams.add(task)
        task.add_done_callback(self._settled)

    def _settled(self, task: asyncio.Task[None]) -> None:
        """Nobody awaits these: what went wrong in one, foreseen or not, ends the engine."""
        self._streams.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(self._server.explain(error) if isinstance(error, RelaxError) else error)

    async def _sample(self, batch: Batch, version: int) -> None:
        """One call of the server: a segment of each member."""
        try:
            async for event in self._server.client.generate(body_of(batch, seeded=self._table.deterministic)):
                rows = None
                if self._rows is not None and event.meta_info is not None:
                    rows = await self._rows.told_by(event.meta_info)
                self._take(batch, event, version, rows)
        except Unreachable:
            await self._server.end_told()  # its own end is the better reason
            raise
        if batch.running:
            raise ProtocolError(
                f"{len(batch.running)} segments of the SGLang server", why="the stream ended before they did"
            )

    def _take(self, batch: Batch, event: Event, version: int, rows: NDArray[np.int16] | None) -> None:
        if self._failed is not None or event.meta_info is None:
            return
        member = batch.of(event.meta_info)
        if new := member.take(event, version):
            self._tokens += new
            self._heard = member.heard = time.monotonic()
        if (end := event.meta_info.finish_reason) is not None:
            del self._running[member.rid]
            if member.rows is not None:
                member.take_rows(rows, batch.rows_from)
            member.end_segment(end)
            if not member.finish:
                # Interrupted, or ended by a token that ends sequences of the model and not those of this request.
                self._line.add([member])
            if not self._running:
                self._idle.set()
        self._tell([member])
        if end is not None:
            self._advance()

    def _tell(self, members: Iterable[Member], *, all_of_it: bool = False) -> None:
        """Chunks that are due, gathered so that the sink is called once for what comes at one time."""
        for member in members:
            if (chunk := member.chunk(all_of_it=all_of_it)) is not None:
                if not self._untold:
                    asyncio.get_running_loop().call_soon(self._flush)
                self._untold.append(chunk)
            if member.finish:
                self._forget(member)

    def _forget(self, member: Member) -> None:
        members = self._members.get(member.request.id, [])
        if all(other.finish for other in members):
            self._members.pop(member.request.id, None)

    def _flush(self) -> None:
        told, self._untold = self._untold, []
        if told:
            try:
                self._sink(told)
            except Exception as error:  # noqa: BLE001 - chunks that nobody took are lost: their owner must know
                self._fail(error)

    # --- pauses and swaps

    def _hold(self, name: str, why: str) -> None:
        self._holds[name] = why

    def _release(self, name: str) -> None:
        self._holds.pop(name, None)
        self._advance()

    async def pause(self, why: str) -> None:
        """Generate nothing until `resume`."""
        async with self._change:
            before = self._holds.get("pause")
            self._hold("pause", why or "paused")
            try:
                await self._drain()
            except RelaxError as error:
                raise await self._give_up(error) from error
            except BaseException:
                # Whoever gave up does not resume: what was interrupted goes on.
                if before is None:
                    self._release("pause")
                else:
                    self._hold("pause", before)
                raise
            # Whoever pauses may hand the sequences on: nothing is kept back.
            self._tell(self._line, all_of_it=True)
            self._flush()
            self._check_running()

    async def resume(self) -> None:
        """Generate again."""
        async with self._change:
            self._release("pause")

    async def _drain(self) -> None:
        """End all running segments; what they sampled is told.

        Raises:
            DeadlineExceeded: the server did not end them in time; it is given up.
        """
        deadline = time.monotonic() + self._table.update_timeout_s
        while self._running and self._failed is None:
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

    def _check_running(self) -> None:
        if self._failed is not None:
            raise EngineEnded("the SGLang engine", why=f"it failed: {self._failed}", hint="its role starts a new one")

    async def _give_up(self, error: RelaxError) -> RelaxError:
        """The engine is out over a call of the server; answers with why. Where the server has ended, this is a better
        reason than no answer."""
        try:
            if isinstance(error, Unreachable):
                await self._server.end_told()
        finally:
            self._fail(self._server.explain(error))
        return self._failed if isinstance(self._failed, RelaxError) else error

    @asynccontextmanager
    async def _still(self, name: str, why: str) -> AsyncIterator[None]:
        """An idle server for a change of it. Where the change fails, the engine is out: nothing half-changed serves."""
        async with self._change:
            self._hold(name, why)
            try:
                await self._drain()
                yield
            except RelaxError as error:
                raise await self._give_up(error) from error
            except BaseException as error:
                self._fail(Refused(f"a change of the SGLang server ({why})", why=f"it was broken off: {error!r}"))
                raise
            self._release(name)

    async def prepare(self, source: WeightSource) -> None:
        """Fetch a version into the private copy."""

        async def fetch() -> None:
            self._check_running()
            self._prepared = None
            version = f"policy version {source.manifest.version}"
            if "released" in self._holds:
                # What is loaded again when the memory comes back lies in the copy.
                raise Refused(version, why=self._holds["released"], hint="resume_memory first")
            needed = {part for recipe in self._loader.recipes.values() for part in recipe.parts}
            check_layout(by_expert(source.manifest.layout), self._model, needed)
            self._prepared = await asyncio.to_thread(self._loader.fetch, source)

        await fetch_locked(self._fetch, fetch)

    async def commit(self, record: VersionRecord, kv: KvPolicy) -> Swap:
        """Swap to the version that was prepared."""
        async with self._fetch:
            prepared = self._prepared
            if prepared is None or prepared.version != record.version:
                have = prepared.version if prepared else "none"
                raise Refused(f"a swap to policy version {record.version}", why=f"prepared last was {have}")
            began, recomputed = time.monotonic(), 0
            async with self._still("weights", f"the weights of version {record.version} are loaded"):
                await self._loader.load(self._server.client, prepared, flush=kv == "recompute")
                self._version, self._held = prepared.version, prepared
                self._prepared = None
                self._swaps += 1
                if kv == "recompute":
                    recomputed = sum(member.renew(self._version) for member in self._line)
            return Swap(self._version, time.monotonic() - began, recomputed)

    # --- memory

    async def release_memory(self, *, keep_weights: bool = True) -> None:
        """Release the device's memory. The weights come back anyway, from the copy in host memory."""
        async with self._fetch:
            what, held = "the release of the engine's memory", self._held.version
            if self._running or len(self._line):
                raise Refused(what, why=f"{len(self._running) + len(self._line)} sequences are in flight")
            if "released" in self._holds:
                return
            if held and self._loader.copy.version != held:
                why = f"it could not get version {held} back: its copy was made for another"
                raise Refused(what, why=why, hint="commit what was prepared, or prepare again, first")
            self._prepared = None
            self._loader.hide()
            async with self._still("memory", ""):
                await weight_loading.release_memory(self._server.client, self._table.update_timeout_s)
                self._hold("released", "its memory is released")

    async def resume_memory(self) -> None:
        """Take the device's memory again."""
        async with self._fetch:
            if "released" not in self._holds:
                return
            async with self._still("memory", ""):
                await weight_loading.resume_memory(self._server.client, self._table.update_timeout_s)
                await self._restore(self._held)
                self._holds.pop("released")

    async def _restore(self, held: Held) -> None:
        """A device gives memory back without what was in it."""
        client, limit = self._server.client, self._table.update_timeout_s
        if await weight_loading.reported(client, limit) == held.expected:
            return
        if held.version and self._loader.copy.version == held.version:
            await self._loader.load(client, held, flush=True)
            return
        if not held.version:
            await weight_loading.load_file(client, self._folder, 0, flush=True, timeout_s=limit)
        await weight_loading.verify(client, held.expected, held.version, limit)

    def load(self) -> EngineLoad:
        """Report the engine's load."""
        members = [*self._running.values(), *self._line]
        taken = sum(len(member.request.prompt) + len(member.tokens) for member in self._running.values())
        return EngineLoad(
            version=self._version,
            running=len(self._running),
            waiting=len(self._line),
            tokens_generated=self._tokens,
            swaps=self._swaps,
            outstanding_tokens=sum(member.left for member in members),
            kv_used=min(1.0, taken / self._limits.kv_tokens) if self._limits.kv_tokens else 0.0,
            paused="; ".join(why for why in self._holds.values() if why),
        )
