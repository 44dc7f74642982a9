"""The trainer role: leases whole groups, takes the step, publishes the weights, writes checkpoints.

`run`, `_train` and `_take_step` are the whole training. What they use: `collector` (groups from the queue), `step`
(gradients and updates), `publication` (weights to the engines), `checkpointing`, `critic`, and a backend (`torch`,
`megatron`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

from relax_rt.config.problems import BadInput
from relax_rt.config.schema import RoleSettings
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.locations import MODEL_CODE, model_folder, stage_folder
from relax_rt.roles.base.progress import no_progress
from relax_rt.roles.base.role import FETCH_S, RLRole, wait_for_peer
from relax_rt.roles.models.resolve import refused_as_bad_input
from relax_rt.roles.rollout.engines.settings import ColocationTable, RolloutSettings, SamplingTable, communicator_of
from relax_rt.roles.rollout.engines.time_slicing import TimeSlicingApi, TrainerTimeSlicing
from relax_rt.roles.training.algorithms.settings import SHARING, AlgorithmTable, ColdStartTable
from relax_rt.roles.training.backend.settings import CheckpointTable, TrainerSettings
from relax_rt.roles.training.checkpoints.digests import identity_of
from relax_rt.roles.training.checkpoints.store import CheckpointStore
from relax_rt.roles.training.critic.client import CriticClient
from relax_rt.roles.training.publication.settings import PublicationTable
from relax_rt.transport.base.versions import ROOT, VersionRecord
from relax_rt.transport.queue.ledger.messages import failure_summary
from relax_rt.transport.rpc.errors import GivenUp, RelaxError
from relax_rt.transport.weights.stage import WeightStage

if TYPE_CHECKING:
    from relax_rt.roles.training.algorithms.objective import Objective
    from relax_rt.roles.training.backend.gang import Follower
    from relax_rt.roles.training.backend.interface import StepResult, TrainerBackend
    from relax_rt.roles.training.checkpointing import Checkpointer
    from relax_rt.roles.training.checkpoints.store import CheckpointState
    from relax_rt.roles.training.collector import Collector
    from relax_rt.roles.training.dynamic_sampling import GroupFilter
    from relax_rt.roles.training.prompt_sampling import PromptCurriculum
    from relax_rt.roles.training.publication.publisher import Publisher
    from relax_rt.roles.training.step import EmptySteps, StepBatch

RELEASE_S = 10.0
"""Wait of a trainer that cannot continue for the queue to take its leases back."""
LOAD_ALLOWANCE_S = 180.0
STEP_ALLOWANCE_S = 120.0
SKIPPED_IN_A_ROW = 5
"""Consecutive steps that were skipped, or one of whose updates was, before the run ends."""


class TrainerRole(RLRole[TrainerSettings]):
    """Trains the policy. Its weights count as the next policy version from the optimizer step on.

    When it dies, the steps since the last checkpoint are done again; the rollouts continue up to the staleness bound.
    In a gang, rank 0 does all that is written here; the other ranks follow its commands (`backend.gang`).
    """

    kind: ClassVar[str] = "trainer"
    tier: ClassVar[int] = 40
    restart: ClassVar[str] = "transient"
    significant: ClassVar[bool] = True
    drains: ClassVar[bool] = True
    preload: ClassVar[tuple[str, ...]] = (
        "torch",
        "transformers",
        "relax_rt.roles.training.torch.backend",
        "relax_rt.roles.training.checkpointing",
        "relax_rt.roles.training.step",
        *MODEL_CODE,
    )
    Settings: ClassVar[type[RoleSettings]] = TrainerSettings
    objective: Objective
    backend: TrainerBackend
    collector: Collector
    stage: WeightStage
    publisher: Publisher
    checkpoints: Checkpointer
    critic: CriticClient | None = None
    time_slicing: TrainerTimeSlicing | None = None
    _follower: Follower | None = None
    _group_filter: GroupFilter | None = None
    _curriculum: PromptCurriculum | None = None
    _empty_steps: EmptySteps

    def __init__(self, ctx: RoleContext) -> None:
        super().__init__(ctx)
        self.algorithm = self.table(AlgorithmTable)
        self.step = 0
        self.weights = VersionRecord(ROOT, ROOT, 0)
        self._held: StepBatch | None = None
        self._skipped = 0
        self._worked = False
        self._longest_s = 0.0
        self._early_checkpoint = ""

    @classmethod
    def is_gang(cls, settings: RoleSettings) -> bool:
        return isinstance(settings, TrainerSettings) and (settings.backend == "megatron" or settings.count > 1)

    # The training.

    async def run(self) -> None:
        if self._follower is not None:
            await self.ctx.ready()
            await asyncio.to_thread(self._follower.run)
            return
        finishing = asyncio.create_task(self._allow_finishing())
        try:
            if await self._start():
                await self._train()
            await asyncio.to_thread(self.backend.close)
        finally:
            finishing.cancel()

    async def _train(self) -> None:
        """Take steps until the last one or a request to stop; then bring to safety what is not yet."""
        try:
            while self.step < self.algorithm.steps and not self.ctx.stopping.is_set():
                self.publisher.check()
                batch = await self._collect()
                if batch is None:
                    continue  # nothing came: a request to stop is seen
                if batch.full:
                    await self._take_step(batch)
                elif self._streams and batch.pending_tokens() >= self._part_tokens:
                    self._report_phase(f"computing on {batch.groups} of {self.algorithm.prompts_per_step} groups")
                    await asyncio.to_thread(self._accumulate, batch)
                    batch.timer.lap("train")
        except BadInput:
            await self._release_leases("the trainer cannot go on")
            raise
        await self.collector.release("the run ends")
        await self.checkpoints.save_rest(self.step)
        await self.publisher.wait_committed()
        await self.publisher.wait_files()
        self.ctx.event("training_finished", step=self.step, target=self.algorithm.steps)

    async def _take_step(self, batch: StepBatch) -> None:
        """Take the step whose groups are all there: values, gradients, update, publication, critic, checkpoint."""
        self._held = batch
        self._report_phase("computing")
        if self.critic is not None:
            await self.critic.compute_values(batch.samples, self.step)
        async with self._own_device():
            result = await asyncio.to_thread(self._update, batch)
            batch.timer.lap("train")
            await self._complete(batch, result)
        if self.critic is not None:
            # The engines have the new weights by now: the critic learns while they sample.
            await self.critic.learn(batch.samples, self.objective.returns(batch.samples), self.step - 1)
        batch.timer.lap("publish")
        self._longest_s = max(self._longest_s, batch.timer["train"] + batch.timer["publish"])
        self._record(batch, result)
        final = self.step >= self.algorithm.steps
        await self.checkpoints.save_if_due(self.step, final=final, early=self._early_checkpoint)

    # The parts of a step.

    async def _collect(self) -> StepBatch | None:
        """Return what is there of the step's groups; None if nothing came.

        Raises:
            NoProgress: so many groups failed in a row that the run is to end; all that was learnt is saved.
        """
        batch = await self.collector.collect(self.step + 1)
        if batch is None:
            report = await self.queue.progress()
            if report.ended:
                await self.checkpoints.save_rest(self.step)
                raise no_progress(self.config, report)
            if lost := failure_summary(report):
                self.ctx.progress.waiting(f"{self.collector.waiting_for}; {lost}")
        return batch

    def _accumulate(self, batch: StepBatch) -> None:
        from relax_rt.roles.training.step import accumulate

        accumulate(batch, self.backend, self.objective, self.weights.version)

    def _update(self, batch: StepBatch) -> StepResult:
        """Compute the gradients that are not there yet, and take the step's update or updates. Blocks."""
        from relax_rt.roles.training.step import optimizer_updates, zero_advantage_token_metrics

        def before_update() -> None:
            batch.stage_wait_s += self.publisher.wait_copied()

        number, over = self.step + 1, self.settings.mismatch
        if self.algorithm.updates_per_step > 1:
            return optimizer_updates(
                batch,
                self.backend,
                self.objective,
                updates=self.algorithm.updates_per_step,
                version=self.weights.version,
                number=number,
                over=over,
                before_update=before_update,
            )
        self._accumulate(batch)
        batch.idle_metrics = zero_advantage_token_metrics(batch.samples, self.backend, self.objective, over)
        return self.backend.apply(batch.count, number, before_update)

    async def _complete(self, batch: StepBatch, result: StepResult) -> None:
        """Complete the step in the queue first, then publish the weights while the next step is made."""
        self._check_skipped(result)
        empty = result.applied and not result.changed and not result.tokens
        self._empty_steps.note(batch, result, self.step + 1, empty=empty)
        self.step += 1
        # Other roles take the last step's version for the end of the run, whatever is in it.
        publishes = not empty or self.step >= self.algorithm.steps
        if publishes:
            version = await wait_for_peer(self.ctx, self.ctx.registry.issue_version)
            self.weights = VersionRecord(version, self.weights.version, self.step, changed=result.changed)
        skipped = empty or not result.applied
        advice = await self.queue.complete_step(batch.leases, self.step, self.weights, skipped=skipped)
        self._held = None
        batch.refused_tokens = advice.refused_tokens
        if self._curriculum is not None:
            await self._curriculum.after_step(batch.samples, self.step)
        if publishes:
            await self.publisher.publish(self.weights)
        self._early_checkpoint = advice.checkpoint_now

    def _check_skipped(self, result: StepResult) -> None:
        """Count consecutive steps with a skipped update.

        Raises:
            GivenUp: too many in a row.
        """
        if not result.updates_skipped:
            self._skipped = 0
            return
        self._skipped += 1
        self.ctx.event("update_skipped" if result.applied else "step_skipped", step=self.step + 1, why=result.why)
        if self._skipped >= SKIPPED_IN_A_ROW:
            which = "had a skipped update" if result.applied else "were skipped"
            hint = "lower the learning rate (algorithm.learning_rate); `relax-rt up` resumes from a checkpoint"
            raise GivenUp(f"{self._skipped} steps in a row {which}", why=result.why, hint=hint)

    @asynccontextmanager
    async def _own_device(self) -> AsyncIterator[None]:
        """Around all that the trainer computes in a step: engines that share its device release it meanwhile."""
        if self.time_slicing is None:
            yield
            return
        async with self.time_slicing.training():
            yield
            # The engines come back to the new weights, not to the old ones first.
            await self.publisher.wait_committed()

    @property
    def _streams(self) -> bool:
        """Whether gradients are computed before the last group of a step is there."""
        return self.algorithm.streaming and self.objective.streams

    @property
    def _part_tokens(self) -> int:
        """Tokens from which computing a part of a step is worthwhile: a micro-batch of every replica."""
        table = self.settings
        divided = table.tensor_parallel * table.pipeline_parallel * table.context_parallel
        return table.tokens_per_micro_batch * max(1, table.count // divided)

    def _report_phase(self, phase: str) -> None:
        self.ctx.progress.advance(0, f"step {self.step + 1} of {self.algorithm.steps}: {phase}{self._quarantine_note}")

    @property
    def _quarantine_note(self) -> str:
        names = self.checkpoints.quarantined
        return f" (skipped and quarantined: {', '.join(names)})" if names else ""

    def _record(self, batch: StepBatch, result: StepResult) -> None:
        """Write the step's metrics and a log line."""
        from relax_rt.roles.training.step import step_record

        record = step_record(
            batch,
            result,
            step=self.step,
            weights=self.weights,
            epoch=self.ctx.who.epoch,
            elapsed_s=self.checkpoints.elapsed_s,
        )
        record |= self._empty_steps.record()
        self.ctx.metrics(record)
        if not self._worked:
            self._worked = True
            self.ctx.event("first_work", what=f"step {self.step}")
        shown = {name: round(record[name], 4) for name in ("reward_mean", "loss", "grad_norm", "wait_s", "train_s")}
        done = f"step {self.step} of {self.algorithm.steps}"
        self.ctx.log.info(done, version=self.weights.version, **shown)
        self.ctx.progress.advance(1, f"{done} is done{self._quarantine_note}")

    # The end.

    async def _allow_finishing(self) -> None:
        """When asked to stop, extend the deadline: one micro-batch of the step in hand may take longer than other roles
        have to stop. The step may take what steps have taken, and as much again."""
        await self.ctx.stopping.wait()
        self.ctx.progress.extend(max(STEP_ALLOWANCE_S, 2 * self._longest_s), "asked to stop: finishing the step")

    async def _release_leases(self, reason: str) -> None:
        """Release the leases of the step in hand. The samples are not to blame: without this, the trainer's death would
        count against their prompts."""
        from relax_rt.roles.training.collector import release_leases

        held, self._held = self._held, None
        leases = held.leases if held is not None else []
        try:
            async with asyncio.timeout(RELEASE_S):
                await release_leases(self.queue, [*leases, *self.collector.pop_leases()], reason)
        except (TimeoutError, RelaxError) as error:
            self.ctx.log.warning("groups of the step are not given back: their leases lapse", why=str(error))

    async def teardown(self) -> None:
        if hasattr(self, "publisher"):
            await self.checkpoints.close()
        await super().teardown()

    # The start.

    async def setup(self) -> None:
        from relax_rt.roles.training.algorithms.objective import Objective

        self.ctx.progress.extend(LOAD_ALLOWANCE_S, "loading the model")
        with refused_as_bad_input():
            # A user's file may have changed since validation.
            longest = self.table(SamplingTable).max_new_tokens
            self.objective = Objective.of(self.algorithm, base=self.config_dir, longest=longest)
        await asyncio.to_thread(self._load, asyncio.get_running_loop())
        if self._follower is not None:
            return
        if self.algorithm.mode in SHARING:
            self.time_slicing = TrainerTimeSlicing(self.ctx, self.table(ColocationTable).give_way_s)
            self.ctx.serve(TimeSlicingApi, self.time_slicing)
        self.stage = WeightStage(stage_folder(self.ctx), self.ctx.who.epoch)
        self.resources.callback(self.stage.close)
        await self.open_queue(fetch_s=FETCH_S)
        if "values" in self.objective.needs:
            self.critic = CriticClient(self.ctx)
        await self._open_sampling()
        await self._open_checkpoints()

    def _load(self, loop: asyncio.AbstractEventLoop) -> None:
        from relax_rt.roles.training.backend.gang import Follower
        from relax_rt.roles.training.open_backend import open_megatron, open_torch

        opened = (open_megatron if self.settings.backend == "megatron" else open_torch)(self.ctx, self.objective, loop)
        if isinstance(opened, Follower):
            self._follower = opened
        else:
            self.backend = opened

    async def _open_sampling(self) -> None:
        """Open the collector, with filters or a prompt sampler if the algorithm has them."""
        from relax_rt.roles.training.backend.gang import Leader
        from relax_rt.roles.training.collector import Collector
        from relax_rt.roles.training.dynamic_sampling import GroupFilter
        from relax_rt.roles.training.prompt_sampling import PromptCurriculum

        table = self.algorithm
        with refused_as_bad_input():
            if table.filters:
                self._group_filter = GroupFilter.of(self.config, self.queue, self.objective, self.ctx.event)
            if table.sampler is not None:
                history = self._group_filter.history if self._group_filter is not None else None
                self._curriculum = await asyncio.to_thread(
                    PromptCurriculum.of, self.ctx, self.config, self.queue, self.objective, history
                )
        # The critic is given tokens by rank 0, which then reads all samples anyway.
        alone = self.critic is not None or self.objective.reads_columns
        shares = isinstance(self.backend, Leader) and self.backend.lease_reader is not None and not alone
        self.collector = Collector(
            self.queue,
            self.ctx.progress,
            groups=table.prompts_per_step,
            parts=self._streams,
            group_filter=self._group_filter,
            read_shares=self.backend.read if isinstance(self.backend, Leader) and shares else None,
        )

    async def _open_checkpoints(self) -> None:
        from relax_rt.roles.training.checkpointing import Checkpointer
        from relax_rt.roles.training.step import EmptySteps

        table = self.table(CheckpointTable)
        model = await asyncio.to_thread(identity_of, model_folder(self.ctx))
        self.checkpoints = Checkpointer(
            self.ctx,
            CheckpointStore(self.ctx.run_dir / "checkpoints", self.ctx.who.epoch, table.keep, model),
            self.queue,
            self.backend,
            self.objective,
            critic=self.critic,
            sampling=self._group_filter or (self._curriculum.sampler if self._curriculum is not None else None),
            every_steps=table.every_steps,
        )
        self._empty_steps = EmptySteps(self.ctx, self.objective)

    async def _start(self) -> bool:
        """Resume from the newest checkpoint, roll the queue back to it, and publish these weights as a new version.

        The version is a re-publication of the checkpoint's: it adds nothing to any distance.

        Returns:
            False: the role was asked to stop before there were any weights to publish.
        """
        from relax_rt.roles.training.publication.carriers import WeightFiles
        from relax_rt.roles.training.publication.publisher import Publisher

        known = await self.ctx.registry.versions()
        files = await asyncio.to_thread(WeightFiles.of, self.ctx)
        self.publisher = Publisher(
            self.ctx,
            self.stage,
            self.backend,
            # One dtype for all engines: validation sees to that.
            dtype=self.config.roles["rollout"].dtype,
            table=self.table(PublicationTable),
            engines=[name for name, table in self.config.roles.items() if isinstance(table, RolloutSettings)],
            committed=known[-1].version if known else ROOT,
            files=files,
            communicator=communicator_of(self.config),
        )
        self.resources.push_async_callback(self.publisher.close)
        self.checkpoints.publisher = self.publisher
        self.checkpoints.store.published = {one.version: one.digest for one in known}
        found = await self.checkpoints.restore()
        if found is not None:
            self.step, parent = found.step, found.version
        else:
            # The initial weights may have been published by an incarnation that died before its first checkpoint.
            parent = known[0].version if known else ROOT
        if not await self._cold_start(found):
            return False
        version = await wait_for_peer(self.ctx, self.ctx.registry.issue_version)
        self.weights = VersionRecord(version, parent, self.step, changed=parent == ROOT)
        if self._curriculum is not None:
            # Before anything is admitted.
            await self._curriculum.choose(self.step)
        await self.queue.rollback(found.ledger_step if found is not None else self.step, self.weights)
        await self.publisher.publish(self.weights)
        self._report_phase("its groups are gathered")
        return True

    async def _cold_start(self, found: CheckpointState | None) -> bool:
        """Run the cold start that precedes the first publication, unless a checkpoint of RL is there already.

        Returns:
            False: the role was asked to stop before it was done.
        """
        if found is not None or not self.table(ColdStartTable).wanted:
            return True
        from relax_rt.roles.training.sft.phase import ColdStartPhase

        phase = ColdStartPhase(self.ctx, self.config, self.backend, self.checkpoints.store.model)
        async with self._own_device():
            done = await phase.run()
        if done:
            await phase.adopt(self.objective)
        return done
