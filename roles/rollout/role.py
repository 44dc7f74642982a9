"""The rollout role: admits groups, has the engine sample them, puts samples on the queue, follows the weights.

Data flow: `_admit_groups` gets tickets of groups from the queue and submits them to the engine; the engine's chunks
arrive in `_on_chunks`; `_put_finished` puts finished samples on the queue; `_journal` saves partial completions there
every so many tokens; `_follow` swaps weights. A rollout that stops releases its groups with their tokens, and one that
dies loses what it sampled since it last journaled: whoever gets a group resumes it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from relax_rt.config.schema import RoleSettings
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.episodes import plays_episodes
from relax_rt.roles.base.locations import MODEL_CODE, model_folder
from relax_rt.roles.base.progress import without_retired
from relax_rt.roles.base.role import RLRole
from relax_rt.roles.base.versions import committed_versions
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.data.source import PromptSource
from relax_rt.roles.models.heap import trim_heap
from relax_rt.roles.models.tokenizer import ChatTokenizer, load_tokenizer
from relax_rt.roles.rollout import engine_factory
from relax_rt.roles.rollout.engines.base import Chunk, Engine, GroupRequest
from relax_rt.roles.rollout.engines.routing import RoutingShape
from relax_rt.roles.rollout.engines.settings import ColocationTable, RolloutSettings, SamplingTable
from relax_rt.roles.rollout.engines.time_slicing import EngineTimeSlicing, MemoryGate
from relax_rt.roles.rollout.engines.weight_follower import EngineFailure, WeightFollower
from relax_rt.roles.rollout.generation import MAX_REQUESTS, GenerationService, serve_generation
from relax_rt.roles.rollout.router.admission import CapLimits, EngineCap
from relax_rt.roles.rollout.samples import SampleMaker, as_put, made_record
from relax_rt.roles.rollout.work import ActiveGroup, DuePartial, RolloutWork, partials_of
from relax_rt.roles.training.algorithms.settings import SHARING, AlgorithmTable
from relax_rt.roles.training.checkpoints.cold_start import report_cold_start_wait
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.ledger.messages import Ticket
from relax_rt.transport.rpc.errors import DeadlineExceeded, RelaxError, Unreachable

ADMIT_WAIT_S = 0.25
"""Short, because the queue judges a wait by the engine's version at its start, and a swap makes room at once."""
METRICS_EVERY_S = 2.0
LOAD_ALLOWANCE_S = 120.0
JOURNAL_EVERY_S = 0.1
"""Partial completions that come due within this time are saved in one call."""
RELEASE_TIMEOUT_S = 8.0
"""A stopping rollout waits so long for the engine's next token boundary and the queue; [supervision] stop_timeout_s
is longer."""
CLOSE_TIMEOUT_S = 4.0
STOPPED = "the engine stopped it"
ENDED = "the rollout ends"
"""Why groups are released that `_release_all` did not release in time; `relax-rt why` looks for it."""
TRAINING = "the trainer has the device"
"""Why groups are released and requests rejected in modes colocate and hybrid."""
POLL_S = 0.02
RETRY_S = 0.2


class RolloutRole(RLRole[RolloutSettings]):
    """One engine. It generates whole groups within the staleness bound, and serves other roles' requests.

    It generates nothing before it has the committed weights. When it dies, its tickets lapse and other rollouts resume
    the groups.
    """

    kind: ClassVar[str] = "rollout"
    tier: ClassVar[int] = 40
    preload: ClassVar[tuple[str, ...]] = (
        "torch",
        "transformers",
        "relax_rt.roles.rollout.engines.embedded",
        "relax_rt.roles.models.tokenizer",
        "relax_rt.roles.rollout.engines.weight_follower",
        "relax_rt.roles.rollout.samples",
        "relax_rt.roles.rollout.generation",
        "reasoning_gym",
        "relax_rt.transport.queue.client",
        *MODEL_CODE,
    )
    Settings: ClassVar[type[RoleSettings]] = RolloutSettings

    def __init__(self, ctx: RoleContext) -> None:
        super().__init__(ctx)
        self._requests = itertools.count(1)
        self._capacity, self._finished, self._changed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._complete = self._worked = False
        self._unreliable = False
        """The engine failed, or may sample from incomplete weights: nothing that it samples is kept any more."""
        self._last_metrics = (0, time.monotonic())
        self.serves_only = plays_episodes(self.config)
        """Environments play the groups: this role admits none, and generates what they request."""
        self.memory_gate = MemoryGate()
        self.time_slicing: EngineTimeSlicing | None = None
        if self.table(AlgorithmTable).mode in SHARING:
            table = self.table(ColocationTable)
            self.time_slicing = EngineTimeSlicing(
                ctx,
                self._release_memory,
                self._resume_memory,
                release_timeout_s=table.give_way_s,
                resume_timeout_s=table.take_back_s,
            )
        self.engine: Engine
        self.routing: RoutingShape | None = None
        self.cap: EngineCap | None = None
        self.work: RolloutWork
        self.maker: SampleMaker
        self.tokenizer: ChatTokenizer
        self.source: PromptSource
        self.failure: EngineFailure
        self.follower: WeightFollower
        self.generation: GenerationService

    async def setup(self) -> None:
        if self.time_slicing is not None:
            await self.time_slicing.enter()
        self.ctx.progress.extend(LOAD_ALLOWANCE_S, "loading the model")
        await asyncio.to_thread(self._load)
        await self.open_queue(length_field="tokens", on_lost=self._on_lost)
        await self.queue.warm()
        self.failure = EngineFailure()
        self.follower = WeightFollower(self.ctx, self.engine, self.settings.kv_on_update)
        most = self.settings.max_sequences if self.serves_only else MAX_REQUESTS
        self.generation = serve_generation(self.ctx, self.engine, most)
        await self.engine.start(self._on_chunks, self._on_engine_failure)

    def _load(self) -> None:
        folder, sampling = model_folder(self.ctx), self.table(SamplingTable)
        self.tokenizer = load_tokenizer(folder)
        size = self.table(AlgorithmTable).group_size
        slots = max(self.settings.max_sequences, size)
        self.engine = engine_factory.make_engine(
            self.ctx, folder, self.settings.model_copy(update={"max_sequences": slots})
        )
        self.routing = self.engine.routing if self.settings.routing else None
        self.work = RolloutWork(self.settings.journal_every_tokens, self._row_bytes)
        if not self.serves_only:
            self.source = PromptSource.load(
                self.table(DataTable),
                self.tokenizer,
                seed=self.config.run.seed,
                config_dir=self.config_dir,
                run_dir=self.ctx.run_dir,
            )
            self.maker = SampleMaker(
                self.source,
                self.tokenizer,
                temperature=sampling.temperature,
                max_new_tokens=sampling.max_new_tokens,
                engine=str(self.ctx.who),
                routing=self.routing,
                has_vision=self.engine.image_processor is not None,
            )
        if self.engine.name != "embedded":
            # The embedded engine has cache for every slot. Where sequences share a cache, its use bounds their number.
            self.cap = EngineCap(CapLimits(most=self.settings.groups_in_flight * size, least=size))

    @property
    def _row_bytes(self) -> int:
        return self.routing.row_bytes if self.routing is not None else 0

    async def run(self) -> None:
        admission = asyncio.create_task(self._admit_groups())
        jobs = [
            asyncio.create_task(job)
            for job in (self._follow(), self._put_finished(), self._journal(), self._report(), self.failure.wait())
        ]
        if self.time_slicing is not None:
            jobs.append(asyncio.create_task(self.time_slicing.follow()))
        stop = asyncio.create_task(self.ctx.stopping.wait())
        releasing: list[asyncio.Task[None]] = []
        try:
            finished, _ = await asyncio.wait([stop, admission, *jobs], return_when=asyncio.FIRST_COMPLETED)
            self.failure.check()
            for task in finished:
                task.result()
            admission.cancel()
            releasing.append(asyncio.create_task(self._release_all()))
            going: set[asyncio.Task[Any]] = {*releasing, *jobs}
            # `_follow` ends when the role stops: only its errors end the release.
            while not releasing[0].done():
                finished, going = await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED)
                self.failure.check()
                for task in finished:
                    task.result()
        finally:
            for task in (stop, admission, *jobs, *releasing):
                task.cancel()
            await asyncio.gather(stop, admission, *jobs, *releasing, return_exceptions=True)

    async def teardown(self) -> None:
        try:
            if hasattr(self, "engine"):
                await self.engine.close(5.0)
                self._record_metrics()
        finally:
            try:
                if hasattr(self, "queue"):
                    # The queue may be gone as well: then the tickets lapse.
                    with suppress(RelaxError, TimeoutError):
                        async with asyncio.timeout(CLOSE_TIMEOUT_S):
                            await self._release_rest()
            finally:
                await super().teardown()

    async def _release_rest(self) -> None:
        """Save and release what `_release_all` did not release in time."""
        if not self._unreliable:
            await self._save(self.work.take_all())
        if self.queue.groups:
            lost = self.work.unsaved_tokens
            self.ctx.event("groups_released", groups=len(self.queue.groups), tokens_lost=lost)
            # The engine may have failed because of one of them.
            await self.queue.release_groups(list(self.queue.groups), ENDED, losses=int(self._unreliable))

    async def _follow(self) -> None:
        self.ctx.progress.waiting("the first committed weights")
        await report_cold_start_wait(self.ctx)
        async for record in committed_versions(self.ctx):
            async with self.memory_gate.inside():
                # The engine may have got it already when it resumed its memory.
                if record.version > self.follower.record.version:
                    await self.follow(record)

    async def follow(self, record: VersionRecord, *, again: bool = False) -> bool:
        """Bring the engine to a version; False when a newer one took its place.

        Args:
            again: the engine has released its weights.
        """
        try:
            whole = await (self.follower.follow_again(record) if again else self.follower.follow(record))
        except Exception:
            self._unreliable = True
            raise
        if whole:
            self._complete = record.step >= self.table(AlgorithmTable).steps
            self._capacity.set()
        return whole

    def _on_engine_failure(self, error: BaseException) -> None:
        self._unreliable = True
        self.failure(error)

    # --- groups

    async def _admit_groups(self) -> None:
        """Keep as many members in progress as `groups_in_flight` groups have."""
        while True:
            while self.serves_only or self._complete or not self.follower.record.version or self._free() <= 0:
                if self._complete and not self.work.groups:
                    self.ctx.progress.waiting("the end of the run: the last step is done")
                self._capacity.clear()
                await self._capacity.wait()
            async with self.memory_gate.inside():
                if not self._complete:
                    await self._admit()

    async def _admit(self) -> None:
        if not self.work.groups:
            self.ctx.progress.waiting("admission by the staleness bound")
        answer = await self.queue.admit(self.follower.record.version, self._free(), wait_s=ADMIT_WAIT_S)
        if not answer.tickets:
            if not self.work.groups:
                self.ctx.progress.waiting(answer.waiting_on or "admission by the staleness bound")
            return
        self.ctx.progress.waiting("")

        def item(ticket: Ticket) -> str:
            return self.source.prompt(ticket.prompt, ticket.item).item

        await self._start(await without_retired(self.queue, answer.tickets, item))

    def _free(self) -> int:
        """Return how many groups may be started now, counted by members: a group of which only the longest member is
        left leaves room for nearly another one."""
        size = self.table(AlgorithmTable).group_size
        room = self.settings.groups_in_flight * size - self.work.members
        if self.cap is not None:
            room = min(room, self.cap.room(self.work.sequences))
        return -(-room // size)

    async def _start(self, tickets: list[Ticket]) -> None:
        resumed = [ticket for ticket in tickets if ticket.partials]
        found = await self.queue.load_partials(resumed) if resumed else {}
        sampling, stop_ids = self.table(SamplingTable), self.tokenizer.stop_ids
        requests: list[GroupRequest] = []
        for ticket in tickets:
            if ticket.group not in self.queue.groups:
                continue  # lost meanwhile
            number, origin = next(self._requests), self.maker.origin(ticket)
            request = GroupRequest(
                id=number,
                prompt=tuple(self.source.prompt(ticket.prompt, ticket.item).tokens),
                seeds=tuple(self.source.sample_seed(ticket.prompt, m, ticket.attempt) for m in ticket.wanted()),
                temperature=sampling.temperature,
                max_new_tokens=sampling.max_new_tokens,
                stop_ids=stop_ids,
                partials=partials_of(ticket, found, origin, sampling.max_new_tokens, stop_ids, self._row_bytes),
                chunk_tokens=self.settings.journal_every_tokens,
                routing=self.routing is not None,
            )
            self.work.add(number, ticket, request, origin)
            requests.append(request)
            if request.partials:
                had = [len(one.tokens) if one else 0 for one in request.partials]
                self.ctx.event("group_resumed", group=ticket.group, members=ticket.wanted(), tokens=had)
        self.engine.submit(requests)

    def _on_chunks(self, chunks: list[Chunk]) -> None:
        if self._unreliable:
            return
        self.work.on_chunks(self.generation.take_chunks(chunks))
        for group in self.work.interrupted():
            self.release([group], STOPPED)
        self._finished.set()
        self._changed.set()

    def _on_lost(self, groups: list[int]) -> None:
        """Stop working on groups that the queue gave to others (a lapsed lease) or dropped."""
        for number in self.work.drop(groups):
            self.engine.abort(number)
        self.ctx.event("groups_lost", groups=groups)
        self._capacity.set()
        self._changed.set()

    # --- samples

    async def _put_finished(self) -> None:
        """Put finished samples on the queue, all in one call."""
        while True:
            await self._finished.wait()
            self._finished.clear()
            finished = self.work.take_finished()
            if not finished:
                continue
            made = [(job, completion, self.maker.make(job, completion)) for job, completion in finished]
            self.ctx.metrics(made_record(self.ctx.who.slot, made))
            await self.queue.put_samples([as_put(sample) for _, _, sample in made])
            if not self._worked:
                self._worked = True
                self.ctx.event("first_work", what=f"{len(made)} samples")
            self.work.put(finished)
            self._capacity.set()
            self._changed.set()

    async def _journal(self) -> None:
        """Save partial completions that have grown; release stopped groups once their tokens are saved."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._save(self.work.take_due())
            if over := self.work.take_released():
                for ending in dict.fromkeys(group.ending for group in over):
                    groups = [group.ticket.group for group in over if group.ending == ending]
                    await self.queue.release_groups(groups, ending, losses=int(ending == STOPPED))
                self._capacity.set()
                self._changed.set()
            if not self.ctx.stopping.is_set():
                await asyncio.sleep(JOURNAL_EVERY_S)

    async def _save(self, due: Sequence[DuePartial]) -> None:
        if due:
            self.work.saved(due, await self.queue.save_partials([one.chunk for one in due]))

    # --- the end

    def release(self, groups: Sequence[ActiveGroup], why: str) -> None:
        """Stop groups at the next token boundary, and give them back to the queue with their tokens."""
        for number in self.work.release([group.number for group in groups], why):
            self.engine.abort(number)
        self._changed.set()

    async def _release_all(self) -> None:
        """Stop at the next token boundary; other rollouts resume what is not finished."""
        groups = list(self.work.groups.values())
        self.ctx.progress.extend(RELEASE_TIMEOUT_S, "releasing unfinished groups")
        self.release(groups, "the rollout stops")
        with suppress(TimeoutError):
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                while self.work.groups:
                    self._capacity.clear()
                    await self._capacity.wait()
        if groups:
            self.ctx.event("groups_handed_over", groups=len(groups), late=len(self.work.groups))

    # --- time slicing of the device (modes colocate and hybrid)

    async def _release_memory(self) -> None:
        """Release the groups and requests in flight with their tokens, then the engine's memory."""
        await self.memory_gate.close()
        self.generation.pause(TRAINING)
        self.release(list(self.work.groups.values()), TRAINING)
        # Meanwhile `_put_finished` and `_journal` put what is finished, save what is not, and release the groups.
        while self.work.groups or (load := self.engine.load()).running or load.waiting:  # noqa: ASYNC110 - no event has both
            await asyncio.sleep(POLL_S)
        before_mib = _resident_mib()
        # Committed weights need not be kept: the newest version is fetched again.
        await self.engine.release_memory(keep_weights=not self.follower.record.version)
        await asyncio.to_thread(trim_heap)
        self.ctx.event("engine_memory", resident_mib=_resident_mib(), before_mib=before_mib)

    async def _resume_memory(self) -> None:
        await self.engine.resume_memory()
        if self.follower.record.version:
            while True:
                try:
                    committed = (await self.ctx.registry.watch(0, 0.0)).committed
                except (Unreachable, DeadlineExceeded):
                    await asyncio.sleep(RETRY_S)
                    continue
                assert committed is not None, "this engine had a committed version before"
                if await self.follow(committed, again=True):
                    break
        self.generation.resume()
        self.memory_gate.open()

    # --- metrics

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(METRICS_EVERY_S)
            self._record_metrics()

    def _record_metrics(self) -> None:
        """Write a metrics record of the time since the last one."""
        load, now = self.engine.load(), time.monotonic()
        tokens, then = self._last_metrics
        if self.cap is not None:
            self.cap.observe(now, load.kv_used, self.work.sequences)
            self._capacity.set()
        if self.serves_only and self.follower.record.version:
            self.ctx.progress.waiting("" if load.running or load.waiting else "requests from environments")
        # Tokens, not completions: a long sequence makes progress before it ends.
        self.ctx.progress.advance(load.tokens_generated - tokens, f"version {load.version}, {load.running} sequences")
        self.ctx.metrics(
            {
                "kind": "rollout",
                "slot": self.ctx.who.slot,
                "version": load.version,
                "tokens": load.tokens_generated,
                "tokens_per_s": (load.tokens_generated - tokens) / (now - then),
                "running": load.running,
                "waiting": load.waiting,
                "journaled_tokens": self.work.journaled_tokens,
                "partials_dropped": self.work.partials_dropped,
                "resumed_tokens": self.work.resumed_tokens,
            }
        )
        self._last_metrics = (load.tokens_generated, now)


def _resident_mib() -> float:
    """Return the private resident memory of this process."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return round((resident - shared) * os.sysconf("SC_PAGESIZE") / (1 << 20), 1)
