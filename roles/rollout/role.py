"""The rollout role: asks for groups, has the engine sample them, puts them on the queue, follows the weights.

What the engine has sampled of unfinished sequences is marked in the queue every so many tokens. A rollout that stops
hands them over, and one that dies loses what it sampled since its last marks: whoever gets the group goes on behind.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from relax_rt.config.schema import RoleSettings
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.episodes import plays_episodes
from relax_rt.roles.base.locations import MODEL_CODE
from relax_rt.roles.base.progress import without_retired
from relax_rt.roles.base.role import RLRole
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.rollout.engines.settings import RolloutSettings, SamplingTable
from relax_rt.roles.rollout.engines.turns import Gate
from relax_rt.roles.rollout.router.admission import CapLimits, EngineCap
from relax_rt.roles.rollout.sharing import SharedDevice
from relax_rt.roles.training.algorithms.settings import SHARING, AlgorithmTable
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.ledger.messages import Ticket
from relax_rt.transport.rpc.errors import RelaxError

if TYPE_CHECKING:
    from relax_rt.roles.data.source import PromptSource
    from relax_rt.roles.models.tokenizer import ChatTokenizer
    from relax_rt.roles.rollout.engines.base import Chunk, Engine, GroupRequest
    from relax_rt.roles.rollout.engines.routing import RoutingShape
    from relax_rt.roles.rollout.engines.weight_follower import EngineFailure, WeightFollower
    from relax_rt.roles.rollout.generation import GenerationService
    from relax_rt.roles.rollout.samples import SampleMaker
    from relax_rt.roles.rollout.work import Due, Job, Work
    from relax_rt.transport.queue.partials import PartialCompletion

ADMIT_WAIT_S = 0.25
"""Short, because a wait is judged by the engine's version at its start, and a swap makes room at once."""
METRICS_EVERY_S = 2.0
LOAD_ALLOWANCE_S = 120.0
MARKS_EVERY_S = 0.1
"""Marks that come due within this time go out together."""
HAND_OVER_S = 8.0
"""A stopping rollout waits so long for the engine's next token boundary and the queue; [supervision] stop_timeout_s
is longer."""
LAST_WORD_S = 4.0
STOPPED = "the engine stopped it"
LEFT = "the rollout ends"
"""Why the queue gets groups back that were not handed over; `relax-rt why` looks for it."""


class RolloutRole(RLRole[RolloutSettings]):
    """One engine. It generates whole groups within the staleness bound and serves nothing before it has the
    committed weights; when it dies, its tickets lapse and other rollouts go on with the groups."""

    kind: ClassVar[str] = "rollout"
    tier: ClassVar[int] = 40
    preload: ClassVar[tuple[str, ...]] = (
        "torch",
        "transformers",
        "relax_rt.roles.rollout.engines.embedded",
        "relax_rt.roles.models.tokenizer",
        "relax_rt.roles.rollout.engines.weight_follower",
        "relax_rt.roles.data.kept",
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
        self._room, self._news, self._changed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._complete = self._worked = False
        self._doubtful = False
        """The engine failed, or may sample from weights that are not whole: nothing more of it is kept."""
        self._measured = (0, time.monotonic())
        self.only_serves = plays_episodes(self.config)
        """Groups are not its affair: environments play them, and it generates for these."""
        self.gate = Gate()
        self.device = SharedDevice(self) if self.table(AlgorithmTable).mode in SHARING else None
        self.engine: Engine
        self.routing: RoutingShape | None = None
        self.cap: EngineCap | None = None
        self.work: Work
        self.maker: SampleMaker
        self.tokenizer: ChatTokenizer
        self.source: PromptSource
        self.failure: EngineFailure
        self.follower: WeightFollower
        self.generation: GenerationService

    async def setup(self) -> None:
        from relax_rt.roles.rollout.engines.weight_follower import EngineFailure, WeightFollower
        from relax_rt.roles.rollout.generation import MAX_REQUESTS, serve_generation

        if self.device is not None:
            await self.device.turns.enter()
        self.ctx.progress.extend(LOAD_ALLOWANCE_S, "loading the model")
        await asyncio.to_thread(self._load)
        await self.open_queue(length_field="tokens", on_lost=self._lost)
        await self.queue.warm()
        self.failure = EngineFailure()
        self.follower = WeightFollower(self.ctx, self.engine, self.settings.kv_on_update)
        most = self.settings.max_sequences if self.only_serves else MAX_REQUESTS
        self.generation = serve_generation(self.ctx, self.engine, most)
        await self.engine.start(self._arrive, self._engine_failed)

    def _load(self) -> None:
        from relax_rt.roles.base.locations import model_folder
        from relax_rt.roles.models.tokenizer import load_tokenizer
        from relax_rt.roles.rollout.engines import make_engine
        from relax_rt.roles.rollout.samples import SampleMaker
        from relax_rt.roles.rollout.work import Work

        folder, sampling = model_folder(self.ctx), self.table(SamplingTable)
        self.tokenizer = load_tokenizer(folder)
        size = self.table(AlgorithmTable).group_size
        slots = max(self.settings.max_sequences, size)
        self.engine = make_engine(self.ctx, folder, self.settings.model_copy(update={"max_sequences": slots}))
        self.routing = self.engine.routing if self.settings.routing else None
        self.work = Work(self.settings.journal_every_tokens, self._row_bytes)
        if not self.only_serves:
            self.source = self._prompts()
            self.maker = SampleMaker(
                self.source,
                self.tokenizer,
                temperature=sampling.temperature,
                max_new_tokens=sampling.max_new_tokens,
                engine=str(self.ctx.who),
                routing=self.routing,
                sees=self.engine.sight is not None,
            )
        if self.engine.name != "embedded":
            # The embedded engine has room for every slot; where the cache is shared, its use bounds what is begun.
            self.cap = EngineCap(CapLimits(most=self.settings.groups_in_flight * size, least=size))

    @property
    def _row_bytes(self) -> int:
        return self.routing.row_bytes if self.routing is not None else 0

    def _prompts(self) -> PromptSource:
        from relax_rt.roles.data.source import PromptSource

        return PromptSource.load(
            self.table(DataTable),
            self.tokenizer,
            seed=self.config.run.seed,
            config_dir=self.config_dir,
            run_dir=self.ctx.run_dir,
        )

    async def run(self) -> None:
        ask = asyncio.create_task(self._ask())
        jobs = [
            asyncio.create_task(job)
            for job in (self._follow(), self._deliver(), self._journal(), self._report(), self.failure.wait())
        ]
        if self.device is not None:
            jobs.append(asyncio.create_task(self.device.turns.follow()))
        stop = asyncio.create_task(self.ctx.stopping.wait())
        over: list[asyncio.Task[None]] = []
        try:
            finished, _ = await asyncio.wait([stop, ask, *jobs], return_when=asyncio.FIRST_COMPLETED)
            self.failure.check()
            for task in finished:
                task.result()
            ask.cancel()
            over.append(asyncio.create_task(self._hand_over()))
            going: set[asyncio.Task[Any]] = {*over, *jobs}
            # Whoever follows the weights ends when the role stops: only an error of it ends the hand-over.
            while not over[0].done():
                finished, going = await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED)
                self.failure.check()
                for task in finished:
                    task.result()
        finally:
            for task in (stop, ask, *jobs, *over):
                task.cancel()
            await asyncio.gather(stop, ask, *jobs, *over, return_exceptions=True)

    async def teardown(self) -> None:
        try:
            if hasattr(self, "engine"):
                await self.engine.close(5.0)
                self._measure()
        finally:
            try:
                if hasattr(self, "queue"):
                    await self._leave_queue()
            finally:
                await super().teardown()

    async def _leave_queue(self) -> None:
        # The queue may be gone as well: then the tickets lapse.
        with suppress(RelaxError, TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                if not self._doubtful:
                    await self._keep(self.work.take_all())
                if self.queue.groups:
                    lost = self.work.tokens_unmarked
                    self.ctx.event("groups_released", groups=len(self.queue.groups), tokens_lost=lost)
                    # What an engine fails on may be in one of them.
                    await self.queue.release_groups(list(self.queue.groups), LEFT, losses=int(self._doubtful))

    async def _follow(self) -> None:
        from relax_rt.roles.base.versions import committed_versions
        from relax_rt.roles.training.checkpoints.cold_start import report_cold_start_wait

        self.ctx.progress.waiting("the first committed weights")
        await report_cold_start_wait(self.ctx)
        async for record in committed_versions(self.ctx):
            async with self.gate.inside():
                # On its way back from the trainer's turn the engine may have got it already.
                if record.version > self.follower.record.version:
                    await self.follow(record)

    async def follow(self, record: VersionRecord, *, again: bool = False) -> bool:
        """Bring the engine to a version. False when a newer one took its place.

        Args:
            again: the engine has let go of its weights.
        """
        try:
            whole = await (self.follower.again(record) if again else self.follower.follow(record))
        except Exception:
            self._doubtful = True
            raise
        if whole:
            self._complete = record.step >= self.table(AlgorithmTable).steps
            self._room.set()
        return whole

    def _engine_failed(self, error: BaseException) -> None:
        self._doubtful = True
        self.failure(error)

    # --- groups

    async def _ask(self) -> None:
        """Keep as many members in hand as `groups_in_flight` groups have."""
        while True:
            await self._wait_for_room()
            async with self.gate.inside():
                if not self._complete:
                    await self._admit()

    async def _admit(self) -> None:
        if not self.work.jobs:
            self.ctx.progress.waiting("admission by the staleness bound")
        answer = await self.queue.admit(self.follower.record.version, self._free(), wait_s=ADMIT_WAIT_S)
        if not answer.tickets:
            if not self.work.jobs:
                self.ctx.progress.waiting(answer.waiting_on or "admission by the staleness bound")
            return
        self.ctx.progress.waiting("")
        await self._begin(await without_retired(self.queue, answer.tickets, self._item))

    def _item(self, ticket: Ticket) -> str:
        return self.source.prompt(ticket.prompt, ticket.item).item

    def _free(self) -> int:
        """Groups that may be begun now.

        Counted by members: a group of which only the longest is left leaves room for nearly another one.
        """
        size = self.table(AlgorithmTable).group_size
        room = self.settings.groups_in_flight * size - self.work.members
        if self.cap is not None:
            room = min(room, self.cap.room(self.work.sequences))
        return -(-room // size)

    async def _wait_for_room(self) -> None:
        while self.only_serves or self._complete or not self.follower.record.version or self._free() <= 0:
            if self._complete and not self.work.jobs:
                self.ctx.progress.waiting("the end of the run: the last step is done")
            self._room.clear()
            await self._room.wait()

    async def _begin(self, tickets: list[Ticket]) -> None:
        begun = [ticket for ticket in tickets if ticket.partials]
        found = await self.queue.load_partials(begun) if begun else {}
        requests: list[GroupRequest] = []
        for ticket in tickets:
            if ticket.group not in self.queue.groups:
                continue  # lost meanwhile
            number, origin = next(self._requests), self.maker.origin(ticket)
            request = self._request(number, ticket, origin, found)
            self.work.begin(number, ticket, request, origin)
            requests.append(request)
            if request.partials:
                had = [len(one.tokens) if one else 0 for one in request.partials]
                self.ctx.event("group_resumed", group=ticket.group, members=ticket.wanted(), tokens=had)
        self.engine.submit(requests)

    def _request(self, number: int, ticket: Ticket, origin: bytes, found: dict[Any, PartialCompletion]) -> GroupRequest:
        from relax_rt.roles.rollout.engines.base import GroupRequest
        from relax_rt.roles.rollout.work import partials_of

        sampling, stop_ids = self.table(SamplingTable), self.tokenizer.stop_ids
        return GroupRequest(
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

    def _arrive(self, chunks: list[Chunk]) -> None:
        if self._doubtful:
            return
        self.work.arrive(self.generation.take_chunks(chunks))
        for job in self.work.interrupted():
            self.give_up([job], STOPPED)
        self._news.set()
        self._changed.set()

    def _lost(self, groups: list[int]) -> None:
        """The queue gave these groups to others (a lapsed lease) or wants them no more: stop working on them."""
        for number in self.work.lost(groups):
            self.engine.abort(number)
        self.ctx.event("groups_lost", groups=groups)
        self._room.set()
        self._changed.set()

    # --- what was sampled

    async def _deliver(self) -> None:
        """Put finished samples on the queue, all that are there at once."""
        from relax_rt.roles.rollout.samples import as_put, made_record

        while True:
            await self._news.wait()
            self._news.clear()
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
            self._room.set()
            self._changed.set()

    async def _journal(self) -> None:
        """Mark what has grown; give back what was handed over, once its tokens are marked."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._keep(self.work.take_due())
            if over := self.work.take_handed_over():
                for ending in dict.fromkeys(job.ending for job in over):
                    groups = [job.ticket.group for job in over if job.ending == ending]
                    await self.queue.release_groups(groups, ending, losses=int(ending == STOPPED))
                self._room.set()
                self._changed.set()
            if not self.ctx.stopping.is_set():
                await asyncio.sleep(MARKS_EVERY_S)

    async def _keep(self, due: Sequence[Due]) -> None:
        if due:
            self.work.marked(due, await self.queue.save_partials([one.mark for one in due]))

    # --- the end

    def give_up(self, jobs: Sequence[Job], why: str) -> None:
        """Have these stopped at the next token boundary, and given back to the queue with their tokens."""
        for number in self.work.hand_over([job.number for job in jobs], why):
            self.engine.abort(number)
        self._changed.set()

    async def _hand_over(self) -> None:
        """Stop at the next token boundary; what is not finished goes to others, with its tokens."""
        handed = list(self.work.jobs.values())
        self.ctx.progress.extend(HAND_OVER_S, "handing sequences over")
        self.give_up(handed, "the rollout stops")
        with suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_S):
                while self.work.jobs:
                    self._room.clear()
                    await self._room.wait()
        if handed:
            left = len(self.work.jobs)
            self.ctx.event("groups_handed_over", groups=len(handed), late=left)

    # --- figures

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(METRICS_EVERY_S)
            self._measure()

    def _measure(self) -> None:
        """One metrics record, of the time since the last one."""
        load, now = self.engine.load(), time.monotonic()
        tokens, then = self._measured
        if self.cap is not None:
            self.cap.observe(now, load.kv_used, self.work.sequences)
            self._room.set()
        if self.only_serves and self.follower.record.version:
            self.ctx.progress.waiting("" if load.running or load.waiting else "replies that environments ask for")
        # Tokens, not completions: a long sequence is progress before it ends.
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
        self._measured = (load.tokens_generated, now)
