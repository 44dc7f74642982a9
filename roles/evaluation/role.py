"""The evaluator role: held-out accuracy before, during and after, at committed versions, beside the training."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from relax_rt.config.schema import RoleSettings
from relax_rt.interfaces.role import RoleContext
from relax_rt.observe.metrics import read_metrics
from relax_rt.roles.base.locations import MODEL_CODE
from relax_rt.roles.base.role import RLRole
from relax_rt.roles.data.items import answer_text
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.data.source import PromptSource
from relax_rt.roles.evaluation.judge import JudgedCompletion, SetJudge
from relax_rt.roles.evaluation.sampling import HeldOutSampler, requests_of
from relax_rt.roles.evaluation.scoring import evaluate
from relax_rt.roles.evaluation.sets import MAIN, VersionLineage, load_set, schedules
from relax_rt.roles.evaluation.settings import EvaluationTable, EvaluatorSettings
from relax_rt.roles.models.tokenizer import load_tokenizer
from relax_rt.roles.rewards.dry_run import task_of
from relax_rt.roles.rewards.settings import RewardTable
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.transport.base.versions import ROOT, VersionRecord

if TYPE_CHECKING:
    from relax_rt.roles.data.items import PromptItem
    from relax_rt.roles.evaluation.sets import EvaluationSchedule, SetSpec
    from relax_rt.roles.models.tokenizer import ChatTokenizer
    from relax_rt.roles.rollout.engines.base import Engine
    from relax_rt.roles.rollout.engines.weight_follower import EngineFailure, WeightFollower

LOAD_ALLOWANCE_S = 120.0


class EvaluatorRole(RLRole[EvaluatorSettings]):
    """Evaluates on items that training never sees: those that [data] holds out, by hash of the canonical question, and
    the sets of [evaluation], one after the other.

    It finishes after the evaluation of the last step's weights; the run waits for it and the trainer. What it
    has evaluated is read back from metrics.jsonl, so that a restart repeats at most the current evaluation.
    """

    kind: ClassVar[str] = "evaluator"
    tier: ClassVar[int] = 40
    restart: ClassVar[str] = "transient"
    significant: ClassVar[bool] = True
    preload: ClassVar[tuple[str, ...]] = (
        "torch",
        "transformers",
        "relax_rt.roles.rollout.engines.embedded",
        "relax_rt.roles.models.tokenizer",
        "relax_rt.roles.rollout.engines.weight_follower",
        "reasoning_gym",
        "relax_rt.roles.evaluation.scoring",
        "relax_rt.roles.evaluation.judge",
        "relax_rt.roles.evaluation.sampling",
        *MODEL_CODE,
    )
    Settings: ClassVar[type[RoleSettings]] = EvaluatorSettings

    def __init__(self, ctx: RoleContext) -> None:
        super().__init__(ctx)
        self._worked = False
        self._judges: dict[str, SetJudge] = {}
        self.items: dict[str, Sequence[PromptItem]] = {}
        self.schedules: dict[str, EvaluationSchedule]
        self.engine: Engine
        self.sampler: HeldOutSampler
        self.tokenizer: ChatTokenizer
        self.source: PromptSource
        self.failure: EngineFailure
        self.follower: WeightFollower

    async def setup(self) -> None:
        from relax_rt.roles.rollout.engines.weight_follower import EngineFailure, WeightFollower

        self.ctx.progress.extend(LOAD_ALLOWANCE_S, "loading the model")
        await asyncio.to_thread(self._load)
        self.failure = EngineFailure()
        self.follower = WeightFollower(self.ctx, self.engine)
        self.sampler = HeldOutSampler(self.engine, self._count_tokens)
        await self.engine.start(self.sampler.on_chunks, self.failure)

    def _load(self) -> None:
        from relax_rt.roles.base.locations import model_folder
        from relax_rt.roles.data.source import PromptSource
        from relax_rt.roles.rollout.engine_factory import make_engine

        folder = model_folder(self.ctx)
        self.tokenizer = load_tokenizer(folder)
        self.source = PromptSource.load(
            self.table(DataTable),
            self.tokenizer,
            seed=self.config.run.seed,
            config_dir=self.config_dir,
            run_dir=self.ctx.run_dir,
        )
        self.engine = make_engine(self.ctx, folder, self.settings)
        self.resources.push_async_callback(self.engine.close, 5.0)
        self._load_sets()

    def _load_sets(self) -> None:
        """Load the sets' items and judges, and read back what an earlier incarnation has evaluated."""
        folder = self.config_dir
        self.items[MAIN] = self.source.held_out
        for table in self.table(EvaluationTable).sets:
            items, left_out = load_set(table, self.config, self.source, self.tokenizer, folder)
            self.items[table.name] = items
            self.ctx.event("evaluation_set_loaded", set=table.name, items=len(items), trained_on=left_out)
            if table.reward is not None:
                judge = SetJudge(table, folder, self.table(RewardTable).timeout_s, task_of(table))
                self.resources.push_async_callback(judge.close)
                self._judges[table.name] = judge
        kinds = ("evaluation", "evaluation_set")
        self.schedules = schedules(self.config, (r for r in read_metrics(self.ctx.run_dir) if r.get("kind") in kinds))

    async def run(self) -> None:
        work = asyncio.create_task(self._work())
        broken = asyncio.create_task(self.failure.wait())
        stop = asyncio.create_task(self.ctx.stopping.wait())
        tasks = (work, broken, stop)
        try:
            finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self.failure.check()
            for task in finished:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self) -> None:
        from relax_rt.roles.base.versions import committed_versions

        lineage = VersionLineage(self.ctx)
        await self.ctx.ready()
        # The engine was loaded with the initial weights: no publication is needed, and none can overtake.
        await self._evaluate_all(VersionRecord(ROOT, ROOT, 0))
        async for record in committed_versions(self.ctx):
            path = await lineage.path_to(record)
            for schedule in self.schedules.values():
                schedule.keep_path(path)
            if any(
                schedule.when(record.step, record.version) for schedule in self.schedules.values()
            ) and await self.follower.follow(record):
                await self._evaluate_all(record)
            if record.step >= self.table(AlgorithmTable).steps and await self.is_final(record):
                return

    async def _evaluate_all(self, record: VersionRecord) -> None:
        """Evaluate the sets that are due at these weights, which the engine has."""
        for schedule in self.schedules.values():
            if when := schedule.when(record.step, record.version):
                self.ctx.progress.waiting("")
                await self._evaluate(schedule, record, when)
        self.ctx.progress.waiting("the next version to evaluate")

    async def _evaluate(self, schedule: EvaluationSchedule, record: VersionRecord, when: str) -> None:
        spec, began = schedule.spec, time.monotonic()
        items = self.items[spec.name][: spec.count(when)]
        about = {"set": spec.name, "when": when, "step": record.step, "version": record.version}
        about |= {"for_steps": schedule.due_steps(record.step)}
        self.ctx.event("evaluation_started", **about, items=len(items))
        scores = await self._scores(spec, items, spec.samples, spec.temperature, schedule.before)
        if spec.greedy:
            before = schedule.before.get("greedy") if schedule.before else None
            scores["greedy"] = await self._scores(spec, items, 1, 0.0, before)
        seconds = round(time.monotonic() - began, 3)
        kind = "evaluation" if spec.name == MAIN else "evaluation_set"
        result = {"kind": kind, **about, **scores, "seconds": seconds}
        self.ctx.metrics(result)
        shown = {key: scores[key] for key in ("items", "exact", "lenient", "pass_at")}
        self.ctx.event("evaluation_done", **about, **shown, seconds=seconds)
        if not self._worked:
            self._worked = True
            self.ctx.event("first_work", what=f"evaluation {when}")
        name = "held out" if spec.name == MAIN else spec.name
        self.ctx.log.info(f"{name}, {when}", step=record.step, version=record.version, **shown)
        schedule.record(result)

    async def _scores(
        self,
        spec: SetSpec,
        items: Sequence[PromptItem],
        samples: int,
        temperature: float,
        before: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """Complete the items and judge the completions."""
        completions = await self._generate(spec, items, samples, temperature)
        judge, verdict = self._judges.get(spec.name), None
        if judge is not None:
            verdict = await judge.judge(
                items, completions, lambda: self.ctx.progress.advance(1, f"judging {spec.name}")
            )
        scores = await asyncio.to_thread(
            evaluate,
            [one.text for one in completions],
            [answer_text(item.answer) for item in items],
            [one.stopped for one in completions],
            before,
            samples=samples,
            right=verdict.right if verdict is not None else None,
            ks=tuple(k for k in spec.ks if k <= samples),
        )
        if verdict is not None:
            scores |= {"reward": verdict.reward, "failed": verdict.failed}
            if verdict.failed:
                why = {"set": spec.name, "samples": verdict.failed, "reason": verdict.reason}
                self.ctx.event("evaluation_reward_failed", **why)
                self.ctx.log.warning("held-out completions could not be judged", **why)
        return scores

    async def _generate(
        self, spec: SetSpec, items: Sequence[PromptItem], samples: int, temperature: float
    ) -> list[JudgedCompletion]:
        """Sample the completions, item by item."""
        requests = requests_of(
            items,
            samples=samples,
            together=self.settings.max_sequences,
            seed=self.source.sample_seed,
            temperature=temperature,
            max_new_tokens=spec.max_new_tokens,
            stop_ids=self.tokenizer.stop_ids,
        )
        done = await self.sampler.complete(requests)
        return [JudgedCompletion(self.tokenizer.decode(c.tokens), len(c.tokens), c.finish_reason) for c in done]

    def _count_tokens(self, tokens: int) -> None:
        self.ctx.progress.advance(tokens, f"evaluating version {self.follower.record.version}")
