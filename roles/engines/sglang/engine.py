"""The engine over a real SGLang server. See relax_rt.roles.engines.base for the contract.

Segments (members.py) are what makes versions exact and a swap simple: every change of the server, a swap, a pause, a
release of memory, first ends all running segments, so that the server is idle, and what is loaded into an idle server
needs no session of its own, can flush, and mixes with nothing. Sequences go on behind their tokens; with kept keys and
values by way of the server's prefix cache, under the salt they were begun with.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from relax_rt.roles.engines.base import (
    Chunk,
    EngineLoad,
    GroupRequest,
    KvPolicy,
    OnFailure,
    Sink,
    Swap,
    check_request,
)
from relax_rt.roles.engines.sglang import update
from relax_rt.roles.engines.sglang.client import Event
from relax_rt.roles.engines.sglang.members import Batch, Line, Member
from relax_rt.roles.engines.sglang.options import Boot, Device, Option
from relax_rt.roles.engines.sglang.server import Place, Server
from relax_rt.roles.engines.sglang.weights import (
    PrivateCopy,
    Recipe,
    check_layout,
    checksums,
    published_tensors,
    recipes,
)
from relax_rt.roles.sections import EngineSettings
from relax_rt.transport.errors import DeadlineExceeded, ProtocolError, Refused, RelaxError
from relax_rt.transport.versions import VersionRecord
from relax_rt.transport.weights.source import WeightSource

MAX_WAITING = 4096
"""Requests that may wait; callers bound themselves far below."""
PROGRESS_TOKENS = 16
"""A segment is heard of at least every so many tokens: health is judged by them."""
ABORT_AGAIN_S = 0.25
"""An abort that overtook its request at the server has had no effect: it is said again."""
ABORT_TIMEOUT_S = 10.0
WATCH_EVERY_S = 1.0


class Held(msgspec.Struct, frozen=True):
    """A version and the checksums of a server that holds it."""

    version: int
    expected: dict[str, str]


class SglangEngine:
    """Samples through a server of its own.

    Args:
        model: Hugging Face folder that the server starts from.
        options: of the server, for what differs from start to start.
        place: where the server lives; the copy of the weights lies beside it.
        kv_tokens: room of its cache.
        booting: told how long the start may take, when it begins.
    """

    name = "sglang"

    def __init__(
        self,
        model: Path,
        settings: EngineSettings,
        place: Place,
        options: Callable[[Boot], dict[str, Option]],
        *,
        device: Device,
        weights_folder: Path,
        kv_tokens: int,
        booting: Callable[[float], object] = lambda _: None,
    ) -> None:
        self.settings, self._table = settings, settings.sglang
        self._server = Server(place, model, options, self._server_ended)
        self._copy = PrivateCopy(weights_folder)
        self._device, self._kv_tokens, self._booting = device, kv_tokens, booting
        self._model = published_tensors(model, settings.dtype)
        text = json.loads((model / "config.json").read_text())
        self.context = int(text.get("max_position_embeddings") or text["text_config"]["max_position_embeddings"])
        self.vocabulary = int(text.get("vocab_size") or text["text_config"]["vocab_size"])
        self._line = Line()
        self._running: dict[str, Member] = {}
        self._members: dict[int, list[Member]] = {}
        self._streams: set[asyncio.Task[None]] = set()
        self._orders, self._segments = itertools.count(1), itertools.count(1)
        self._holds: dict[str, str] = {"start": "the server is not started"}
        self._change, self._fetch = asyncio.Lock(), asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._recipes: dict[str, Recipe] = {}
        self._prepared: Held | None = None
        self._held: Held | None = None
        self._version = self._tokens = self._swaps = 0
        self._heard = 0.0
        self._untold: list[Chunk] = []
        self._failed: BaseException | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._sink: Sink
        self._on_failure: OnFailure

    @property
    def server_pid(self) -> int:
        """Of the guard over the server; 0 when there is none."""
        return self._server.pid

    @property
    def weights_folder(self) -> Path:
        """Where the copy lies that the server loads."""
        return self._copy.folder

    # --- life

    async def start(self, sink: Sink, on_failure: OnFailure) -> None:
        """See Engine.start. The server is up and has yielded a token when this returns.

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
            names = await update.reported(self._server.client, self._table.update_timeout_s)
            self._recipes = await asyncio.to_thread(self._find_recipes, names)
        except BaseException:
            await self._server.stop()
            raise
        self._watcher = asyncio.create_task(self._watch())
        self._release("start")

    async def _first_token(self, timeout_s: float) -> None:
        """Up is what has made a token: /health answers before."""
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        try:
            await self._server.client.call("/generate", body, timeout_s=max(1.0, timeout_s))
        except RelaxError as error:
            raise DeadlineExceeded(
                "the first token of the SGLang server", why=f"{error}; {self._server.describe()}"
            ) from error

    def _find_recipes(self, names: dict[str, str]) -> dict[str, Recipe]:
        from relax_rt.transport.weights.manifest import layout_of

        layout = layout_of((name, dtype, shape, 0) for name, (dtype, shape) in self._model.items())
        return recipes(names, layout)

    async def close(self, timeout_s: float) -> None:
        """See Engine.close."""
        self._hold("close", "it is being closed")
        self._failed = self._failed or Refused("the engine", why="it is closed")
        tasks = [*self._streams, *([self._watcher] if self._watcher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.stop(timeout_s)
        await asyncio.to_thread(self._copy.close)

    def _server_ended(self, error: RelaxError) -> None:
        self._fail(error)

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
            silent = time.monotonic() - self._heard
            if self._running and silent > self._table.stall_timeout_s:
                self._fail(
                    DeadlineExceeded(
                        f"a token of the SGLang server, with {len(self._running)} sequences running",
                        why=f"none within {silent:.0f} s; {self._server.describe()}",
                    )
                )
            if lost := [member.rid for member in self._running.values() if member.aborted]:
                await self._abort_segments(lost)

    # --- requests

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """See Engine.submit."""
        if self._failed is not None:
            raise Refused("requests to the SGLang engine", why=str(self._failed))
        if len(self._members) + len(requests) > MAX_WAITING:
            raise Refused(f"the engine holds {MAX_WAITING} requests", hint="submit fewer at a time")
        if "released" in self._holds:
            raise Refused("requests to the SGLang engine", why=self._holds["released"], hint="resume_memory first")
        for number, request in enumerate(requests):
            self._check(request, sum(other.id == request.id for other in requests[:number]))
        for request in requests:
            order = next(self._orders)
            members = [Member.of(request, index, order) for index in range(len(request.seeds))]
            self._members[request.id] = members
            self._line.add(member for member in members if not member.finish)
            self._tell(member for member in members if member.finish)
        self._advance()

    def _check(self, request: GroupRequest, others: int) -> None:
        if request.id in self._members or others:
            raise Refused(f"request {request.id}", why="one of that number is in the engine already")
        check_request(request, context=self.context, vocabulary=self.vocabulary)
        need = len(request.prompt) + request.max_new_tokens
        if need > self._kv_tokens:
            raise Refused(f"request {request.id}: {need} tokens", why=f"the cache has room for {self._kv_tokens}")

    def abort(self, request: int) -> None:
        """See Engine.abort."""
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
        while not self._holds and (members := self._line.take(self.settings.max_sequences - len(self._running))):
            for member in members:
                member.begin(f"s{next(self._segments):015d}", self._version)
                self._running[member.rid] = member
            if len(self._running) == len(members):
                self._heard = time.monotonic()
            self._idle.clear()
            self._spawn(self._sample(Batch(members), self._version))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)

    async def _sample(self, batch: Batch, version: int) -> None:
        """One call of the server: a segment of each member."""
        try:
            async for event in self._server.client.generate(self._body(list(batch.members.values()))):
                self._take(batch, event, version)
            if batch.running:
                raise ProtocolError(
                    f"{len(batch.running)} segments of the SGLang server", why="the stream ended before they did"
                )
        except RelaxError as error:
            self._fail(self._explained(error))

    def _explained(self, error: RelaxError) -> RelaxError:
        return type(error)(error.what, why=f"{error.why}; {self._server.describe()}", hint=error.hint)

    def _body(self, members: list[Member]) -> dict[str, Any]:
        first = members[0].request
        every = min(first.chunk_tokens or PROGRESS_TOKENS, PROGRESS_TOKENS)
        body: dict[str, Any] = {
            "rid": [member.rid for member in members],
            "input_ids": [[*first.prompt, *member.tokens] for member in members],
            "sampling_params": [self._sampling(member, every) for member in members],
            "extra_key": [f"v{member.salt}" for member in members],
            "return_logprob": True,
            "stream": True,
        }
        if first.routing and self._table.arguments.get("enable-return-routed-experts"):
            body["return_routed_experts"] = True
        return body

    def _sampling(self, member: Member, every: int) -> dict[str, Any]:
        request = member.request
        params: dict[str, Any] = {
            "temperature": request.temperature,
            "max_new_tokens": member.left,
            "stop_token_ids": sorted(request.stop_ids),
            # It would make the server overlook stop ids, too.
            "ignore_eos": not request.stop_ids,
            "stream_interval": every,
        }
        if self._table.deterministic:
            params["sampling_seed"] = request.seeds[member.index] & 0x7FFF_FFFF_FFFF_FFFF
        return params

    def _take(self, batch: Batch, event: Event, version: int) -> None:
        if self._failed is not None or event.meta_info is None:
            return
        member = batch.of(event.meta_info)
        self._tokens += member.take(event, version)
        self._heard = time.monotonic()
        if event.meta_info.finish_reason is not None:
            del self._running[member.rid]
            member.end_segment()
            if not member.finish:
                # Interrupted, or ended by a token that ends sequences of the model and not those of this request.
                self._line.add([member])
            if not self._running:
                self._idle.set()
        self._tell([member])
        if event.meta_info.finish_reason is not None:
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
            self._sink(told)

    # --- pauses and swaps

    def _hold(self, name: str, why: str) -> None:
        self._holds[name] = why

    def _release(self, name: str) -> None:
        self._holds.pop(name, None)
        self._advance()

    async def pause(self, why: str) -> None:
        """See Engine.pause."""
        async with self._change:
            self._hold("pause", why)
            await self._drain()
            # Whoever pauses may hand the sequences on: nothing is kept back.
            self._tell(self._line, all_of_it=True)
            self._flush()

    async def resume(self) -> None:
        """See Engine.resume."""
        async with self._change:
            self._release("pause")

    async def _drain(self) -> None:
        """End all running segments; what they sampled is told.

        Raises:
            DeadlineExceeded: the server did not end them in time; it is given up.
        """
        deadline = time.monotonic() + self._table.update_timeout_s
        while self._running and self._failed is None:
            await self._server.client.call("/abort_request", {"abort_all": True}, timeout_s=ABORT_TIMEOUT_S)
            try:
                await asyncio.wait_for(self._idle.wait(), ABORT_AGAIN_S)
            except TimeoutError:
                if time.monotonic() > deadline:
                    why = f"not within {self._table.update_timeout_s:g} s; {self._server.describe()}"
                    raise DeadlineExceeded(f"the end of {len(self._running)} running sequences", why=why) from None
        self._flush()
        if self._failed is not None:
            raise Refused("the SGLang engine", why=f"it failed: {self._failed}")

    @asynccontextmanager
    async def _still(self, name: str, why: str) -> AsyncIterator[None]:
        """An idle server for a change of it. Where the change fails, the engine is out: nothing half-changed serves."""
        async with self._change:
            self._hold(name, why)
            try:
                await self._drain()
                yield
            except RelaxError as error:
                self._fail(self._explained(error))
                raise
            except BaseException as error:
                self._fail(Refused(f"a change of the SGLang server ({why})", why=f"it was broken off: {error!r}"))
                raise
            self._release(name)

    async def prepare(self, source: WeightSource) -> None:
        """See Engine.prepare."""
        async with self._fetch:
            self._prepared = None
            if source.manifest.payload == "lora":
                raise Refused(
                    f"policy version {source.manifest.version} as LoRA", why="the sglang engine takes whole weights"
                )
            check_layout(source.manifest.layout, self._model)
            self._prepared = await asyncio.to_thread(self._fetch_version, source)

    def _fetch_version(self, source: WeightSource) -> Held:
        with self._copy.fill(source) as view:
            return Held(source.manifest.version, checksums(self._recipes, source.manifest.layout, view, self._device))

    async def commit(self, record: VersionRecord, kv: KvPolicy) -> Swap:
        """See Engine.commit."""
        async with self._fetch:
            prepared = self._prepared
            if prepared is None or prepared.version != record.version:
                have = prepared.version if prepared else "none"
                raise Refused(f"a swap to policy version {record.version}", why=f"prepared last was {have}")
            began, recomputed = time.monotonic(), 0
            async with self._still("weights", f"the weights of version {record.version} are loaded"):
                await self._load(prepared.version, flush=kv == "recompute")
                await update.verify(
                    self._server.client, prepared.expected, prepared.version, self._table.update_timeout_s
                )
                self._version, self._held = prepared.version, prepared
                self._prepared = None
                self._swaps += 1
                if kv == "recompute":
                    recomputed = sum(member.renew(self._version) for member in self._line)
            return Swap(self._version, time.monotonic() - began, recomputed)

    async def _load(self, version: int, *, flush: bool) -> None:
        client, limit = self._server.client, self._table.update_timeout_s
        if self._table.weights == "file":
            await update.load_file(client, self._copy.folder, version, flush=flush, timeout_s=limit)
            return
        layout = self._copy.layout
        assert layout is not None
        with self._copy.view as view:
            await update.load_tensors(client, layout, view, version, flush=flush, timeout_s=limit)

    # --- memory

    async def release_memory(self) -> None:
        """See Engine.release_memory."""
        if self._running or len(self._line):
            raise Refused("the release of the engine's memory", why=f"{self.load().running} sequences are in flight")
        async with self._still("memory", ""):
            await update.release_memory(self._server.client, self._table.update_timeout_s)
            self._hold("released", "its memory is released")

    async def resume_memory(self) -> None:
        """See Engine.resume_memory."""
        async with self._still("memory", ""):
            await update.resume_memory(self._server.client, self._table.update_timeout_s)
            if (held := self._held) is not None:
                await self._restore(held)
            self._holds.pop("released", None)

    async def _restore(self, held: Held) -> None:
        """A device gives memory back without what was in it."""
        client, limit = self._server.client, self._table.update_timeout_s
        if await update.reported(client, limit) == held.expected:
            return
        if self._copy.version == held.version:
            await self._load(held.version, flush=True)
        await update.verify(client, held.expected, held.version, limit)

    def load(self) -> EngineLoad:
        """See Engine.load."""
        members = [*self._running.values(), *self._line]
        taken = sum(len(member.request.prompt) + len(member.tokens) for member in self._running.values())
        return EngineLoad(
            version=self._version,
            running=len(self._running),
            waiting=len(self._line),
            tokens_generated=self._tokens,
            swaps=self._swaps,
            outstanding_tokens=sum(member.left for member in members),
            kv_used=min(1.0, taken / self._kv_tokens) if self._kv_tokens else 0.0,
            paused="; ".join(why for why in self._holds.values() if why),
        )
