"""Stand-ins for GPUs: an engine and a trainer backend that sleep as long as they would compute. All else is real."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from relax_rt.config.schema import RoleSettings
from relax_rt.roles.base.sample import Sample
from relax_rt.roles.rollout.engines.base import (
    Chunk,
    EngineLoad,
    GroupRequest,
    KvPolicy,
    OnFailure,
    Sink,
    Swap,
    extend_spans,
)
from relax_rt.roles.rollout.engines.settings import RolloutSettings
from relax_rt.roles.rollout.role import RolloutRole
from relax_rt.roles.training.backend.interface import GradientPart, StepResult
from relax_rt.roles.training.backend.settings import TrainerSettings
from relax_rt.roles.training.trainer import TrainerRole
from relax_rt.transport.base.versions import ROOT, VersionRecord
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.weights.manifest import Layout, layout_of
from relax_rt.transport.weights.source import WeightSource

WEIGHTS = 1 << 20
"""Parameters that travel: few, because their time on the way is replayed as well."""
WORD = 7
"""Every token. It is no stop token."""


class SleepingRolloutSettings(RolloutSettings):
    """Lengths and times of the engine; see modes_times."""

    median: int = 2048
    sigma: float = 0.7
    most: int = 8192
    token_s: float = 1e-3
    fetch_s: float = 0.0
    release_s: float = 0.0
    resume_s: float = 0.0


class SleepingTrainerSettings(TrainerSettings):
    """Times of the trainer; see modes_times."""

    train_token_s: float = 1e-6


@dataclass(eq=False)
class Member:
    """A sequence. It begins when a slot is free, and has one token more every token_s.

    Attributes:
        swaps: from which token on it is of which version. told: tokens that were reported.
    """

    request: GroupRequest
    member: int
    length: int
    asked_at: float
    began_at: float = 0.0
    told: int = 0
    swaps: list[tuple[int, int]] = field(default_factory=list)
    ended: bool = False


class SleepingEngine:
    """Engine of relax_rt.roles.rollout.engines.base, with so many slots that decode at a constant pace.

    It keeps its own time, as a GPU does: a slot that fell free takes the next sequence at that moment, also if this
    process looks at it later.
    """

    name = "sleeping"
    routing = None
    image_processor = None

    def __init__(self, settings: SleepingRolloutSettings, draw: Callable[[int], int]) -> None:
        self._settings, self._draw = settings, draw
        self._version = ROOT
        self._prepared: VersionRecord | None = None
        self._waiting: deque[Member] = deque()
        self._running: set[Member] = set()
        self._free: list[float] = [0.0] * settings.max_sequences
        self._due: list[tuple[float, int, Member]] = []
        self._order = 0
        self._made = self._swaps = 0
        self._released = self._weightless = False
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None]
        self._sink: Sink
        self._buffer = bytearray()

    async def start(self, sink: Sink, on_failure: OnFailure) -> None:
        self._sink = sink
        self._task = asyncio.create_task(self._work())
        self._task.add_done_callback(lambda t: t.cancelled() or on_failure(t.exception() or RuntimeError("it ended")))

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        if self._released or self._weightless:
            raise Refused(f"{len(requests)} requests", why="the engine has let go of its memory, or of its weights")
        now = time.monotonic()
        for request in requests:
            for member, seed in enumerate(request.seeds):
                had = request.partial(member)
                told = len(had.tokens) if had else 0
                length = max(min(self._draw(seed), request.max_new_tokens), told + 1)
                self._waiting.append(Member(request, member, length, now, told=told))
        self._wake.set()

    def abort(self, request: int) -> None:
        chunks = []
        for one in [m for m in (*self._running, *self._waiting) if m.request.id == request]:
            if one in self._running:
                self._running.remove(one)
                heapq.heappush(self._free, time.monotonic())
                chunks.append(self._chunk(one, self._has(one, time.monotonic()), "abort"))
            else:
                self._waiting.remove(one)
                chunks.append(Chunk(request, one.member, one.told, [], [], [], "abort"))
            one.ended = True
        self._wake.set()
        asyncio.get_running_loop().call_soon(self._sink, chunks)

    async def pause(self, why: str) -> None:
        raise Refused(f"a pause ({why})", why="this engine never pauses")

    async def resume(self) -> None:
        return

    async def prepare(self, source: WeightSource) -> None:
        self._prepared = None
        if self._released:
            raise Refused(f"policy version {source.record.version}", why="the engine's memory is released")
        self._buffer = self._buffer or bytearray(source.manifest.layout.nbytes)
        began = time.monotonic()
        await asyncio.to_thread(source.copy_into, memoryview(self._buffer))
        await asyncio.sleep(self._settings.fetch_s - (time.monotonic() - began))
        self._prepared = source.record

    async def commit(self, record: VersionRecord, kv: KvPolicy) -> Swap:
        if self._prepared != record:
            raise Refused(f"policy version {record.version}", why=f"what was prepared last is {self._prepared}")
        now = time.monotonic()
        self._turn(now)
        self._weightless = False
        self._version, self._swaps = record.version, self._swaps + 1
        for one in self._running:
            one.swaps.append((self._has(one, now), record.version))
        return Swap(record.version, 0.0, 0)

    def load(self) -> EngineLoad:
        return EngineLoad(
            version=self._version,
            running=len(self._running),
            waiting=len(self._waiting),
            tokens_generated=self._made,
            swaps=self._swaps,
            outstanding_tokens=sum(m.length - m.told for m in (*self._running, *self._waiting)),
            kv_used=0.0,  # there is room for every slot
            paused="",
        )

    async def release_memory(self, *, keep_weights: bool = True) -> None:
        if count := len(self._running) + len(self._waiting):
            raise Refused("release of the engine's memory", why=f"{count} sequences are in flight")
        self._released, self._prepared = True, None
        self._weightless = self._weightless or not keep_weights
        await asyncio.sleep(self._settings.release_s)

    async def resume_memory(self) -> None:
        if self._released:
            await asyncio.sleep(self._settings.resume_s)
            self._released = False

    async def close(self, timeout_s: float) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # --- time

    async def _work(self) -> None:
        while True:
            self._wake.clear()
            self._turn(time.monotonic())
            wait_s = self._due[0][0] - time.monotonic() if self._due else None
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()

    def _turn(self, now: float) -> None:
        """All that has happened until now, in order."""
        chunks: list[Chunk] = []
        while True:
            self._begin(now)
            if not self._due or self._due[0][0] > now:
                break
            at, _, one = heapq.heappop(self._due)
            if one.ended:
                continue
            count = self._has(one, at)
            if count < one.length:
                chunks.append(self._chunk(one, count, ""))
                self._next(one)
                continue
            one.ended = True
            self._running.remove(one)
            heapq.heappush(self._free, at)
            cut = one.length >= one.request.max_new_tokens
            chunks.append(self._chunk(one, one.length, "length" if cut else "stop"))
        if chunks:
            self._sink(chunks)

    def _begin(self, now: float) -> None:
        while self._waiting and self._free:
            one = self._waiting.popleft()
            one.began_at = max(heapq.heappop(self._free), one.asked_at) - one.told * self._settings.token_s
            one.swaps = [(one.told, self._version)]
            self._running.add(one)
            self._next(one)

    def _next(self, one: Member) -> None:
        """When it has something to tell again."""
        every = one.request.chunk_tokens or one.length
        count = min(one.told + every, one.length)
        self._order += 1
        heapq.heappush(self._due, (one.began_at + count * self._settings.token_s, self._order, one))

    def _has(self, one: Member, at: float) -> int:
        # A tick's rounding must not cost a token.
        count = int((at - one.began_at) / self._settings.token_s + 1e-3)
        return max(one.told, min(count, one.length))

    def _chunk(self, one: Member, count: int, reason: str) -> Chunk:
        spans: list[VersionSpan] = []
        ends = [start for start, _ in one.swaps[1:]] + [one.length]
        for (start, version), end in zip(one.swaps, ends, strict=True):
            start, end = max(start, one.told), min(end, count)
            if start < end:
                # The cache of what was sampled before stays.
                extend_spans(spans, VersionSpan(start, end, version, one.swaps[0][1]))
        start, new = one.told, count - one.told
        one.told = count
        self._made += new
        return Chunk(one.request.id, one.member, start, [WORD] * new, [-1.0] * new, spans, reason)


class SleepingBackend:
    """TrainerBackend whose time is proportional to the tokens of the batch."""

    def __init__(self, settings: SleepingTrainerSettings) -> None:
        self._settings = settings
        self._number = 0

    def log_probabilities(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        return [np.zeros(len(sample.tokens), np.float32) for sample in samples]

    def accumulate(self, samples: Sequence[Sample]) -> GradientPart:
        tokens = sum(int(s.loss_mask.sum()) for s in samples)
        time.sleep(tokens * self._settings.train_token_s)
        return GradientPart(float(tokens), tokens)

    def apply(self, count: float, number: int, before_update: Callable[[], None] = lambda: None) -> StepResult:
        before_update()
        self._number, tokens = number, int(count)
        return StepResult(
            applied=True,
            changed=True,
            why="",
            tokens=tokens,
            loss=0.0,
            grad_norm=0.0,
            learning_rate=0.0,
            ratio_mean=1.0,
            ratio_max_deviation=0.0,
            clip_fraction=0.0,
            kl_behaviour=0.0,
            computed_tokens=tokens,
        )

    def layout(self, dtype: str) -> Layout:
        return layout_of([("weights", dtype, (WEIGHTS,), 4 * WEIGHTS)])

    def export(self, into: memoryview, dtype: str, copied: Callable[[], None] = lambda: None) -> None:
        into[:8] = self._number.to_bytes(8, "little")

    def snapshot(self) -> None:
        return

    def write(self, folder: Path) -> None:
        (folder / "step").write_text(str(self._number))

    def restore(self, folder: Path) -> None:
        self._number = int((folder / "step").read_text())

    def close(self) -> None:
        return


class SleepingRollout(RolloutRole):
    """The rollout with such an engine."""

    Settings: ClassVar[type[RoleSettings]] = SleepingRolloutSettings
    preload: ClassVar[tuple[str, ...]] = tuple(name for name in RolloutRole.preload if not name.endswith("embedded"))

    def _load(self) -> None:
        from modes_times import draw

        from relax_rt.roles.rollout import engine_factory

        settings: Any = self.settings

        def make(*_: Any) -> SleepingEngine:
            return SleepingEngine(settings, lambda seed: draw(seed, settings.median, settings.sigma, settings.most))

        engine_factory.make_engine = make  # type: ignore[assignment]
        super()._load()


class SleepingTrainer(TrainerRole):
    """The trainer with such a backend."""

    Settings: ClassVar[type[RoleSettings]] = SleepingTrainerSettings
    preload: ClassVar[tuple[str, ...]] = tuple(name for name in TrainerRole.preload if not name.endswith(".backend"))

    def _load(self) -> None:
        settings: Any = self.settings
        self.backend = SleepingBackend(settings)
