"""The genrm role: engines that generate the answers of a generative judge (roles/rewards/judge.py)."""

from __future__ import annotations

import asyncio
import time
from typing import ClassVar

from relax_rt.config.schema import RoleSettings
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.locations import MODEL_CODE
from relax_rt.roles.base.role import RLRole
from relax_rt.roles.base.versions import committed_versions
from relax_rt.roles.rewards.genrm.settings import GenrmSettings, judge_folder
from relax_rt.roles.rollout.engine_factory import make_engine
from relax_rt.roles.rollout.engines.base import Chunk, Engine
from relax_rt.roles.rollout.engines.weight_follower import EngineFailure, WeightFollower
from relax_rt.roles.rollout.generation import GenerationService, serve_generation

LOAD_ALLOWANCE_S = 120.0
REPORT_EVERY_S = 2.0
IDLE = "questions of reward workers"


class GenrmRole(RLRole[GenrmSettings]):
    """Its slots are a pool behind the reward role's router: when one dies, its unfinished answers continue in another,
    tokens kept, or wait for its successor. Its weights are its own unless `follow` is set."""

    kind: ClassVar[str] = "genrm"
    tier: ClassVar[int] = 40
    preload: ClassVar[tuple[str, ...]] = (
        "torch",
        "transformers",
        "relax_rt.roles.rollout.engines.embedded",
        "relax_rt.roles.rollout.generation",
        "relax_rt.roles.rollout.engines.weight_follower",
        *MODEL_CODE,
    )
    Settings: ClassVar[type[RoleSettings]] = GenrmSettings

    def __init__(self, ctx: RoleContext) -> None:
        super().__init__(ctx)
        self._measured = (0, time.monotonic())
        self._worked = False
        self.engine: Engine
        self.failure: EngineFailure
        self.follower: WeightFollower
        self.generation: GenerationService

    async def setup(self) -> None:
        self.ctx.progress.extend(LOAD_ALLOWANCE_S, "loading the model")
        folder = await asyncio.to_thread(judge_folder, self.config, self.config_dir)
        self.engine = await asyncio.to_thread(make_engine, self.ctx, folder, self.settings)
        self.resources.push_async_callback(self.engine.close, 5.0)
        self.failure = EngineFailure()
        self.follower = WeightFollower(self.ctx, self.engine)
        self.generation = serve_generation(self.ctx, self.engine)

        def on_chunks(chunks: list[Chunk]) -> None:
            self.generation.take_chunks(chunks)

        await self.engine.start(on_chunks, self.failure)

    async def run(self) -> None:
        if not self.settings.follow:
            await self.ctx.ready()
        jobs = [asyncio.create_task(job) for job in (self._follow(), self._report(), self.failure.wait())]
        stop = asyncio.create_task(self.ctx.stopping.wait())
        try:
            finished, _ = await asyncio.wait([stop, *jobs], return_when=asyncio.FIRST_COMPLETED)
            self.failure.check()
            for task in finished:
                task.result()
        finally:
            for task in (stop, *jobs):
                task.cancel()
            await asyncio.gather(stop, *jobs, return_exceptions=True)

    async def _follow(self) -> None:
        if self.settings.follow:
            self.ctx.progress.waiting("the first committed weights")
            async for record in committed_versions(self.ctx):
                await self.follower.follow(record)
        await self.ctx.stopping.wait()

    async def _report(self) -> None:
        while True:
            load, now = self.engine.load(), time.monotonic()
            tokens, then = self._measured
            # Without a question it is idle; otherwise tokens are its progress.
            self.ctx.progress.waiting("" if load.running or load.waiting else IDLE)
            self.ctx.progress.advance(load.tokens_generated - tokens, f"{load.running} verdicts")
            if load.tokens_generated > tokens:
                if not self._worked:
                    self._worked = True
                    self.ctx.event("first_work", what=f"{load.tokens_generated} tokens of verdicts")
                tokens_per_s = (load.tokens_generated - tokens) / (now - then)
                record = {"kind": "genrm", "slot": self.ctx.who.slot, "tokens": load.tokens_generated}
                self.ctx.metrics({**record, "tokens_per_s": tokens_per_s, **self.generation.statistics()})
            self._measured = (load.tokens_generated, now)
            await asyncio.sleep(REPORT_EVERY_S)
