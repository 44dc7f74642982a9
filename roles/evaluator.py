"""The evaluator role: held-out accuracy before, during and after, at committed versions, beside the training."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from relax_rt.config.schema import RoleSettings
from relax_rt.role import Role, RoleContext
from relax_rt.roles.locations import MODEL_CODE
from relax_rt.roles.sections import EvaluatorSettings, RLConfig
from relax_rt.transport.versions import ROOT, VersionRecord

if TYPE_CHECKING:
    from relax_rt.roles.data.items import PromptItem
    from relax_rt.roles.data.source import PromptSource
    from relax_rt.roles.engines.base import Assembly, Chunk, Completion, Engine, GroupRequest
    from relax_rt.roles.models.tokenizer import ChatTokenizer
    from relax_rt.roles.publication import EngineFailure, WeightFollower

LOAD_ALLOWANCE_S = 120.0
PROGRESS_EVERY_S = 1.0
POLL_S = 0.2
AT_A_TIME = 1024
"""Items in the engine at a time: more than any decodes together, and fewer than any lets wait."""
SEED_DOMAIN = 1 << 63
"""Keeps the evaluator's sample seeds apart from those of training, which have 63 bits."""


class EvaluatorRole(Role):
    """Evaluates on items that training never sees (split by hash of the canonical question).

    It finishes after the evaluation of the last step's weights; with the trainer it is what the run waits for. What it
    has evaluated is read back from metrics.jsonl, so that a restart repeats at most the evaluation in hand.
    """

    kind: ClassVar[str] = "evaluator"
    tier: ClassVar[int] = 40
    restart: ClassVar[str] = "transient"
    significant: ClassVar[bool] = True
    preload: ClassVar[tuple[str, ...]] = (
        "torch",
        "transformers",
        "relax_rt.roles.engines.embedded",
        "relax_rt.roles.models.tokenizer",
        "relax_rt.roles.publication",
        "relax_rt.roles.data.source",
        "reasoning_gym",
        "relax_rt.roles.evaluation",
        *MODEL_CODE,
    )
    Settings: ClassVar[type[RoleSettings]] = EvaluatorSettings

    def __init__(self, ctx: RoleContext) -> None:
        super().__init__(ctx)
        assert isinstance(ctx.config, RLConfig) and isinstance(ctx.settings, EvaluatorSettings)
        self.config, self.settings = ctx.config, ctx.settings
        self._arrived: dict[int, Completion] = {}
        self._news = asyncio.Event()
        self._awaited = 0
        self._before: dict[str, Any] | None = None
        self._last_step = -1
        self._worked = False
        self.engine: Engine
        self.assembly: Assembly
        self.tokenizer: ChatTokenizer
        self.source: PromptSource
        self.failure: EngineFailure
        self.follower: WeightFollower

    async def setup(self) -> None:
        from relax_rt.roles.publication import EngineFailure, WeightFollower

        self.ctx.progress.extend(LOAD_ALLOWANCE_S, "loading the model")
        await asyncio.to_thread(self._load)
        self.failure = EngineFailure()
        self.follower = WeightFollower(self.ctx, self.engine)
        await self.engine.start(self._arrive, self.failure)

    def _load(self) -> None:
        from relax_rt.roles.data.source import PromptSource
        from relax_rt.roles.engines import make_engine
        from relax_rt.roles.engines.base import Assembly
        from relax_rt.roles.locations import config_dir, model_folder
        from relax_rt.roles.models.tokenizer import load_tokenizer

        folder = model_folder(self.ctx)
        self.tokenizer = load_tokenizer(folder)
        self.source = PromptSource.load(
            self.config.data, self.tokenizer, seed=self.config.run.seed, config_dir=config_dir(self.ctx)
        )
        self.assembly = Assembly()
        self.engine = make_engine(self.ctx, folder, self.settings)
        self._read_back()

    def _read_back(self) -> None:
        """What an earlier incarnation has evaluated."""
        from relax_rt.metrics import read_metrics

        for record in read_metrics(self.ctx.run_dir):
            if record.get("kind") == "evaluation":
                self._last_step = max(self._last_step, int(record["step"]))
                if record["when"] == "before":
                    self._before = record

    async def run(self) -> None:
        work = asyncio.create_task(self._work())
        broken = asyncio.create_task(self.failure.wait())
        stop = asyncio.create_task(self.ctx.stopping.wait())
        tasks = (work, broken, stop)
        try:
            finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def teardown(self) -> None:
        if hasattr(self, "engine"):
            await self.engine.close(5.0)

    async def _work(self) -> None:
        from relax_rt.roles.publication import committed_versions

        await self.ctx.ready()
        if self._before is None:
            # The engine was loaded with the initial weights: no publication is needed, and none can overtake.
            await self._evaluate(VersionRecord(ROOT, ROOT, 0), "before")
        self.ctx.progress.waiting("the next version to evaluate")
        async for record in committed_versions(self.ctx):
            when = self._when(record)
            if when and await self.follower.follow(record):
                self.ctx.progress.waiting("")
                await self._evaluate(record, when)
                self.ctx.progress.waiting("the next version to evaluate")
            if record.step >= self.config.algorithm.steps and await self._is_final(record):
                return

    async def _is_final(self, record: VersionRecord) -> bool:
        """Wait for the checkpoint of these weights. False: the trainer died before it and works on another version."""
        from relax_rt.roles.trainers.checkpoint import STATE_FILE, CheckpointState

        self.ctx.progress.waiting("the final checkpoint")
        path = self.ctx.run_dir / "checkpoints" / f"step-{record.step:06d}" / STATE_FILE
        while True:
            if path.exists() and msgspec.json.decode(path.read_bytes(), type=CheckpointState).digest == record.digest:
                return True
            known = await self.ctx.registry.versions()
            if known and known[-1].version > record.version:
                return False
            await asyncio.sleep(POLL_S)

    def _when(self, record: VersionRecord) -> str:
        table = self.config.evaluation
        if record.step < self._last_step and record.changed is False:
            # The trainer went back to a checkpoint: what was evaluated after it is of another branch.
            self._last_step = record.step
        if record.step <= self._last_step:
            return ""
        if record.step >= self.config.algorithm.steps:
            return "after"
        due = table.every_steps and record.step // table.every_steps > max(self._last_step, 0) // table.every_steps
        return "during" if due else ""

    async def _evaluate(self, record: VersionRecord, when: str) -> None:
        from relax_rt.roles.evaluation import evaluate

        table = self.config.evaluation
        count = table.during_items if when == "during" else table.items
        items = self.source.held_out[:count]
        began = time.monotonic()
        self.ctx.event("evaluation_started", when=when, version=record.version, step=record.step, items=len(items))
        texts = await self._generate(items)
        scores = await asyncio.to_thread(
            evaluate, [t for t, _ in texts], [i.answer for i in items], [stopped for _, stopped in texts], self._before
        )
        result = {
            "kind": "evaluation",
            "when": when,
            "step": record.step,
            "version": record.version,
            **scores,
            "seconds": round(time.monotonic() - began, 3),
        }
        self.ctx.metrics(result)
        if not self._worked:
            self._worked = True
            self.ctx.event("first_work", what=f"evaluation {when}")
        self.ctx.log.info(
            f"held out, {when}", **{k: result[k] for k in ("step", "version", "items", "exact", "lenient")}
        )
        self._last_step = max(self._last_step, record.step)
        if when == "before":
            self._before = result

    async def _generate(self, items: list[PromptItem]) -> list[tuple[str, bool]]:
        """The completion's text of each item, and whether it ended by itself."""
        self._arrived.clear()
        asked = [self._request(number, item) for number, item in enumerate(items)]
        submitted, tokens = 0, self.engine.load().tokens_generated
        while len(self._arrived) < len(items):
            self._news.clear()
            more = asked[submitted : len(self._arrived) + AT_A_TIME]
            if more:
                for request in more:
                    self.assembly.expect(request)
                self.engine.submit(more)
                submitted += len(more)
            # Half of them at a time, and all at the end.
            self._awaited = len(items) if submitted == len(items) else submitted - AT_A_TIME // 2
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROGRESS_EVERY_S):
                    await self._news.wait()
            before, tokens = tokens, self.engine.load().tokens_generated
            self.ctx.progress.advance(tokens - before, f"evaluating version {self.follower.record.version}")
        done = [self._arrived[number] for number in range(len(items))]
        return [(self.tokenizer.decode(c.tokens), c.finish_reason == "stop") for c in done]

    def _request(self, number: int, item: PromptItem) -> GroupRequest:
        from relax_rt.roles.engines.base import GroupRequest

        return GroupRequest(
            id=number,
            prompt=tuple(item.tokens),
            seeds=(self.source.sample_seed(number, 0, 0) | SEED_DOMAIN,),
            temperature=self.config.evaluation.temperature,
            max_new_tokens=self.config.sampling.max_new_tokens,
            stop_ids=self.tokenizer.stop_ids,
        )

    def _arrive(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            completion = self.assembly.add(chunk)
            if completion is not None:
                self._arrived[completion.request] = completion
        if len(self._arrived) >= self._awaited:
            self._news.set()
