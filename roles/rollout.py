"""The rollout role: asks for groups, has the engine sample them, puts them on the queue, follows the weights."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING, Any, ClassVar

from relax_rt.config.schema import RoleSettings
from relax_rt.role import Role, RoleContext
from relax_rt.roles.locations import MODEL_CODE
from relax_rt.roles.sections import RLConfig, RolloutSettings
from relax_rt.transport.queue.api import SampleKey, Ticket, VersionSpan

if TYPE_CHECKING:
    from relax_rt.roles.data.source import PromptSource
    from relax_rt.roles.engines.base import Assembly, Chunk, Completion, Engine, GroupRequest
    from relax_rt.roles.models.tokenizer import ChatTokenizer
    from relax_rt.roles.publication import EngineFailure, WeightFollower
    from relax_rt.roles.sample import Sample
    from relax_rt.transport.queue.client import NewSample, QueueClient

ADMIT_WAIT_S = 0.25
"""Short, because a wait is judged by the engine's version at its start, and a swap makes room at once."""
METRICS_EVERY_S = 2.0
LOAD_ALLOWANCE_S = 120.0


class RolloutRole(Role):
    """One engine. It generates whole groups within the staleness bound and serves nothing before it has the
    committed weights; when it dies, its tickets lapse and other rollouts make the groups."""

    kind: ClassVar[str] = "rollout"
    tier: ClassVar[int] = 40
    preload: ClassVar[tuple[str, ...]] = (
        "torch",
        "transformers",
        "relax_rt.roles.engines.embedded",
        "relax_rt.roles.models.tokenizer",
        "relax_rt.roles.publication",
        "relax_rt.roles.data.source",
        "reasoning_gym",
        "relax_rt.transport.queue.client",
        *MODEL_CODE,
    )
    Settings: ClassVar[type[RoleSettings]] = RolloutSettings

    def __init__(self, ctx: RoleContext) -> None:
        super().__init__(ctx)
        assert isinstance(ctx.config, RLConfig) and isinstance(ctx.settings, RolloutSettings)
        self.config, self.settings = ctx.config, ctx.settings
        # By request number: a group that was lost may come back with another ticket, while its old completions arrive.
        self._tickets: dict[int, Ticket] = {}
        self._left: dict[int, int] = {}
        self._requests = itertools.count(1)
        # Bounded by the tickets held: groups_in_flight groups.
        self._done: asyncio.Queue[Completion] = asyncio.Queue()
        self._room = asyncio.Event()
        self._complete = self._worked = False
        self._measured = (0, time.monotonic())
        self.engine: Engine
        self.assembly: Assembly
        self.tokenizer: ChatTokenizer
        self.source: PromptSource
        self.queue: QueueClient
        self.failure: EngineFailure
        self.follower: WeightFollower

    async def setup(self) -> None:
        from relax_rt.roles.publication import EngineFailure, WeightFollower
        from relax_rt.transport.queue.client import QueueClient

        self.ctx.progress.extend(LOAD_ALLOWANCE_S, "loading the model")
        await asyncio.to_thread(self._load)
        self.queue = QueueClient(
            await self.ctx.queue(),
            self.ctx.who,
            self.ctx.payload_dir,
            spill_dir=self.ctx.spill_dir,
            slab_bytes=self.config.queue.slab_mib << 20,
            capacity_bytes=self.config.queue.capacity_mib << 20,
            length_field="tokens",
            on_lost=self._lost,
            fetcher=self.ctx.fetcher,
            on_wait=self.ctx.progress.waiting,
        )
        await self.queue.__aenter__()
        await self.queue.warm()
        self.failure = EngineFailure()
        self.follower = WeightFollower(self.ctx, self.engine)
        await self.engine.start(self._arrive, self.failure)

    def _load(self) -> None:
        from relax_rt.roles.engines import make_engine
        from relax_rt.roles.engines.base import Assembly
        from relax_rt.roles.locations import config_dir, model_folder
        from relax_rt.roles.models.tokenizer import load_tokenizer

        folder = model_folder(self.ctx)
        self.tokenizer = load_tokenizer(folder)
        self.source = self._prompts(config_dir(self.ctx))
        self.assembly = Assembly()
        self.engine = make_engine(self.ctx, folder, self.settings)

    def _prompts(self, folder: Any) -> PromptSource:
        from relax_rt.roles.data.source import PromptSource

        return PromptSource.load(self.config.data, self.tokenizer, seed=self.config.run.seed, config_dir=folder)

    async def run(self) -> None:
        jobs = [
            asyncio.create_task(job)
            for job in (self._follow(), self._ask(), self._deliver(), self._report(), self.failure.wait())
        ]
        stop = asyncio.create_task(self.ctx.stopping.wait())
        try:
            finished, _ = await asyncio.wait([stop, *jobs], return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                task.result()
        finally:
            for task in (stop, *jobs):
                task.cancel()
            await asyncio.gather(stop, *jobs, return_exceptions=True)

    async def teardown(self) -> None:
        if hasattr(self, "engine"):
            await self.engine.close(5.0)
            self._measure()
        if hasattr(self, "queue"):
            if self._tickets:
                await self.queue.give_back([t.group for t in self._tickets.values()], "the rollout stops")
            await self.queue.close()

    async def _follow(self) -> None:
        from relax_rt.roles.publication import committed_versions

        self.ctx.progress.waiting("the first committed weights")
        async for record in committed_versions(self.ctx):
            if await self.follower.follow(record):
                self._complete = record.step >= self.config.algorithm.steps
                self._room.set()

    async def _ask(self) -> None:
        """Keep up to `groups_in_flight` groups in the engine."""
        while True:
            await self._wait_for_room()
            wanted = self.settings.groups_in_flight - len(self._tickets)
            if not self._tickets:
                self.ctx.progress.waiting("admission by the staleness bound")
            answer = await self.queue.admit(self.follower.record.version, wanted, wait_s=ADMIT_WAIT_S)
            if not answer.tickets:
                if not self._tickets:
                    self.ctx.progress.waiting(answer.waiting_on or "admission by the staleness bound")
                continue
            self.ctx.progress.waiting("")
            requests = [(next(self._requests), ticket) for ticket in answer.tickets]
            for number, ticket in requests:
                self._tickets[number] = ticket
                self._left[number] = len(ticket.wanted())
            asked = [self._request(number, ticket) for number, ticket in requests]
            for request in asked:
                self.assembly.expect(request)
            self.engine.submit(asked)

    async def _wait_for_room(self) -> None:
        while (
            self._complete or not self.follower.record.version or len(self._tickets) >= self.settings.groups_in_flight
        ):
            if self._complete and not self._tickets:
                self.ctx.progress.waiting("the end of the run: the last step is done")
            self._room.clear()
            await self._room.wait()

    def _request(self, number: int, ticket: Ticket) -> GroupRequest:
        from relax_rt.roles.engines.base import GroupRequest

        item = self.source.prompt(ticket.prompt)
        return GroupRequest(
            id=number,
            prompt=tuple(item.tokens),
            seeds=tuple(self.source.sample_seed(ticket.prompt, m, ticket.attempt) for m in ticket.wanted()),
            temperature=self.config.sampling.temperature,
            max_new_tokens=self.config.sampling.max_new_tokens,
            stop_ids=self.tokenizer.stop_ids,
        )

    def _arrive(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            completion = self.assembly.add(chunk)
            if completion is not None:
                self._done.put_nowait(completion)

    async def _deliver(self) -> None:
        """Put finished samples on the queue, all that are there at once."""
        while True:
            finished = [await self._done.get()]
            while not self._done.empty():
                finished.append(self._done.get_nowait())
            mine = [c for c in finished if c.request in self._tickets]
            samples = [self._as_sample(c) for c in mine]
            self._record_made(samples)
            await self.queue.put_samples([self._new(sample) for sample in samples])
            if mine and not self._worked:
                self._worked = True
                self.ctx.event("first_work", what=f"{len(mine)} samples")
            for completion in mine:
                if completion.request not in self._left:
                    continue  # lost while it was put
                self._left[completion.request] -= 1
                if not self._left[completion.request]:
                    del self._left[completion.request], self._tickets[completion.request]
            if mine:
                self._room.set()

    def _lost(self, groups: list[int]) -> None:
        """The queue gave these groups to others (a lapsed lease) or wants them no more: stop working on them."""
        for number in [number for number, ticket in self._tickets.items() if ticket.group in groups]:
            del self._tickets[number], self._left[number]
            self.assembly.forget(number)
            self.engine.abort(number)
        self.ctx.event("groups_lost", groups=groups)
        self._room.set()

    def _record_made(self, samples: list[Sample]) -> None:
        """Our own word of what we made, apart from the queue's: the checker holds the trainer's records against it."""
        from relax_rt.roles.sample import content_digest

        made = [
            (f"{s.meta.group}.{s.meta.member}", content_digest(s), sorted({span.version for span in s.versions}))
            for s in samples
        ]
        if made:
            self.ctx.metrics({"kind": "made", "slot": self.ctx.who.slot, "samples": made})

    def _new(self, sample: Sample) -> NewSample:
        from relax_rt.roles.columns import generated_columns
        from relax_rt.transport.queue.client import NewSample

        key = SampleKey(sample.meta.group, sample.meta.member)
        return NewSample(key, generated_columns(sample), sample.versions)

    def _as_sample(self, completion: Completion) -> Sample:
        import numpy as np

        from relax_rt.roles.sample import Sample, SampleMeta, TurnSpan

        ticket = self._tickets[completion.request]
        member = ticket.wanted()[completion.member]
        item = self.source.prompt(ticket.prompt)
        start, total = len(item.tokens), len(item.tokens) + len(completion.tokens)
        mask, logprobs = np.zeros(total, np.uint8), np.zeros(total, np.float32)
        mask[start:] = 1
        logprobs[start:] = completion.logprobs
        meta = SampleMeta(
            group=ticket.group,
            member=member,
            prompt=ticket.prompt,
            attempt=ticket.attempt,
            item=item.item,
            split=item.split,
            finish_reason=completion.finish_reason,
            truncated=completion.finish_reason == "length",
            sampling={
                "temperature": self.config.sampling.temperature,
                "max_new_tokens": self.config.sampling.max_new_tokens,
                "seed": self.source.sample_seed(ticket.prompt, member, ticket.attempt),
            },
            tokenizer_digest=self.tokenizer.tokenizer_digest,
            template_digest=self.tokenizer.template_digest,
            turns=[TurnSpan(0, start, "user"), TurnSpan(start, total, "assistant")],
            engine=str(self.ctx.who),
            answer=item.answer,
            info=item.info,
        )
        # Spans of the completion, moved to positions in the whole sample.
        spans = [VersionSpan(s.start + start, s.end + start, s.version, s.kv_version) for s in completion.versions]
        tokens = np.array([*item.tokens, *completion.tokens], np.int32)
        return Sample(meta=meta, tokens=tokens, loss_mask=mask, behaviour_logprobs=logprobs, versions=spans)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(METRICS_EVERY_S)
            self._measure()

    def _measure(self) -> None:
        """One metrics record, of the time since the last one."""
        load, now = self.engine.load(), time.monotonic()
        tokens, then = self._measured
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
            }
        )
        self._measured = (load.tokens_generated, now)
