"""The trainer role: leases whole groups, takes the step, publishes the weights, writes checkpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from relax_rt.config.problems import BadInput
from relax_rt.config.schema import RoleSettings, RunConfig
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.locations import MODEL_CODE, model_folder
from relax_rt.roles.base.progress import NoProgress, no_progress
from relax_rt.roles.base.role import RLRole
from relax_rt.roles.base.settings import ProgressTable
from relax_rt.roles.models.opening import refused_for_good
from relax_rt.roles.rollout.engines.communicator import communicator_of
from relax_rt.roles.rollout.engines.settings import ColocationTable, RolloutSettings, SamplingTable
from relax_rt.roles.training.algorithms.settings import SHARING, AlgorithmTable, ColdStartTable
from relax_rt.roles.training.backend.settings import TrainerSettings
from relax_rt.roles.training.checkpoints.settings import CheckpointTable
from relax_rt.roles.training.empty_steps import no_advantage, no_token
from relax_rt.roles.training.publication.settings import PublicationTable
from relax_rt.transport.base.versions import ROOT, VersionRecord
from relax_rt.transport.queue.ledger.messages import failure_summary
from relax_rt.transport.rpc.errors import DeadlineExceeded, GivenUp, RelaxError, Unreachable

if TYPE_CHECKING:
    from relax_rt.roles.rollout.engines.turns import TrainerTurns
    from relax_rt.roles.training.algorithms.objective import Objective
    from relax_rt.roles.training.backend.gang import Follower
    from relax_rt.roles.training.backend.interface import StepResult, TrainerBackend
    from relax_rt.roles.training.checkpoints.store import CheckpointState, CheckpointStore
    from relax_rt.roles.training.collector import Collector
    from relax_rt.roles.training.critic.client import CriticClient
    from relax_rt.roles.training.dynamic_sampling import GroupFilter
    from relax_rt.roles.training.prompt_sampling import PromptCurriculum
    from relax_rt.roles.training.publication.files import WeightFiles
    from relax_rt.roles.training.publication.publisher import Publisher
    from relax_rt.roles.training.step import StepBatch
    from relax_rt.transport.weights.stage import WeightStage

T = TypeVar("T")

REGISTRY_WAIT_S = 600.0
FETCH_S = 10.0
"""Wait for payload of another node before the samples are given back: its owner may be dead."""
GIVE_BACK_S = 10.0
"""A trainer that cannot go on waits so long for the queue to take its groups back."""
LOAD_ALLOWANCE_S = 180.0
SAVE_ALLOWANCE_S = STEP_ALLOWANCE_S = 120.0
SKIPPED_IN_A_ROW = 5
"""Steps one after the other that were thrown away, or one of whose updates was, before the run ends."""


class TrainerRole(RLRole[TrainerSettings]):
    """Its weights count as the next policy version from the optimizer step on. When it dies, the steps since the last
    checkpoint are done again; the rollouts go on up to the staleness bound."""

    kind: ClassVar[str] = "trainer"
    tier: ClassVar[int] = 40
    restart: ClassVar[str] = "transient"
    significant: ClassVar[bool] = True
    drains: ClassVar[bool] = True
    preload: ClassVar[tuple[str, ...]] = (
        "torch",
        "transformers",
        "relax_rt.roles.training.torch.backend",
        "relax_rt.roles.training.checkpoints.resume",
        "relax_rt.roles.training.step",
        "relax_rt.roles.training.publication.publisher",
        "relax_rt.roles.training.algorithms.objective",
        "relax_rt.transport.queue.client",
        *MODEL_CODE,
    )
    Settings: ClassVar[type[RoleSettings]] = TrainerSettings
    critic: CriticClient | None = None
    turns: TrainerTurns | None = None

    def __init__(self, ctx: RoleContext) -> None:
        super().__init__(ctx)
        self.step = 0
        self.weights = VersionRecord(ROOT, ROOT, 0)
        self._held: StepBatch | None = None
        self._saving: asyncio.Task[None] | None = None
        self._saved_version: asyncio.Task[VersionRecord] | None = None
        self._skipped = self._empty = 0
        self._worked = False
        self._longest_s = 0.0
        self._early = self._quarantined_checkpoints = self._empty_why = ""
        self._trained_before_s = 0.0
        self._started = time.monotonic()
        self.objective: Objective
        self._follower: Follower | None = None
        self.backend: TrainerBackend
        self.collector: Collector
        self._group_filter: GroupFilter | None = None
        self._curriculum: PromptCurriculum | None = None
        self.stage: WeightStage
        self.publisher: Publisher
        self.store: CheckpointStore

    @classmethod
    def is_gang(cls, settings: RoleSettings) -> bool:
        return isinstance(settings, TrainerSettings) and (settings.backend == "megatron" or settings.count > 1)

    async def setup(self) -> None:
        algorithm = self.table(AlgorithmTable)
        from relax_rt.roles.base.locations import stage_folder
        from relax_rt.roles.training.algorithms.objective import Objective
        from relax_rt.roles.training.checkpoints.digests import identity_of
        from relax_rt.roles.training.checkpoints.store import CheckpointStore
        from relax_rt.transport.weights.stage import WeightStage

        self.ctx.progress.extend(LOAD_ALLOWANCE_S, "loading the model")
        with refused_for_good():
            # A user's file may have changed since validation.
            self.objective = Objective.of(
                algorithm,
                base=Path(self.config.config_dir),
                longest=self.table(SamplingTable).max_new_tokens,
            )
        await asyncio.to_thread(self._load)
        if self._follower is not None:
            return
        if algorithm.mode in SHARING:
            from relax_rt.roles.rollout.engines.turns import TrainerTurns, TurnsApi

            self.turns = TrainerTurns(self.ctx, self.table(ColocationTable).give_way_s)
            self.ctx.serve(TurnsApi, self.turns)
        model = await asyncio.to_thread(identity_of, model_folder(self.ctx))
        folder, keep = self.ctx.run_dir / "checkpoints", self.table(CheckpointTable).keep
        self.store = CheckpointStore(folder, self.ctx.who.epoch, keep, model)
        self.stage = WeightStage(stage_folder(self.ctx), self.ctx.who.epoch)
        self.resources.callback(self.stage.close)
        await self.open_queue(fetch_s=FETCH_S)
        self._open_collector()
        if algorithm.sampler is not None:
            from relax_rt.roles.training.prompt_sampling import PromptCurriculum

            history = self._group_filter.history if self._group_filter is not None else None
            make, objective = PromptCurriculum.of, self.objective
            with refused_for_good():
                self._curriculum = await asyncio.to_thread(make, self.ctx, self.config, self.queue, objective, history)
        if "values" in self.objective.needs:
            from relax_rt.roles.training.critic.client import CriticClient

            self.critic = CriticClient(self.ctx)

    def _open_collector(self) -> None:
        from relax_rt.roles.training.collector import Collector

        table = self.table(AlgorithmTable)
        if table.filters:
            from relax_rt.roles.training.dynamic_sampling import GroupFilter

            with refused_for_good():
                self._group_filter = GroupFilter.of(self.config, self.queue, self.objective, self.ctx.event)
        self.collector = Collector(
            self.queue,
            self.ctx.progress,
            groups=table.prompts_per_step,
            parts=self._streams,
            group_filter=self._group_filter,
        )

    @property
    def _streams(self) -> bool:
        """Whether gradients are computed before the last group of a step is there."""
        return self.table(AlgorithmTable).streaming and self.objective.streams

    def _load(self) -> None:
        """Of a gang, rank 0 does all that a trainer does; the others do as it tells them."""
        from relax_rt.roles.training.backend.gang import Follower

        opened: TrainerBackend | Follower
        if self.settings.backend == "megatron":
            from relax_rt.roles.training.open_backend import open_megatron

            opened = open_megatron(self.ctx, self.objective)
        else:
            from relax_rt.roles.training.open_backend import open_torch

            opened = open_torch(self.ctx, self.objective)
        if isinstance(opened, Follower):
            self._follower = opened
        else:
            self.backend = opened

    async def run(self) -> None:
        finishing = asyncio.create_task(self._time_to_finish())
        try:
            await self._work()
        finally:
            finishing.cancel()

    async def _time_to_finish(self) -> None:
        """Asked to stop, it has a step in hand, of which one micro-batch may take longer than other roles have to stop.
        The step may take what steps have taken, and as much again."""
        await self.ctx.stopping.wait()
        self.ctx.progress.extend(max(STEP_ALLOWANCE_S, 2 * self._longest_s), "asked to stop: finishing the step")

    async def _work(self) -> None:
        algorithm = self.table(AlgorithmTable)
        if self._follower is not None:
            await self.ctx.ready()
            await asyncio.to_thread(self._follower.run)
            return
        if not await self._resume():
            await asyncio.to_thread(self.backend.close)
            return
        try:
            while self.step < algorithm.steps and not self.ctx.stopping.is_set():
                await self._one_step()
        except BadInput:
            # It is nothing that the samples have done: no death may count against their prompts.
            try:
                async with asyncio.timeout(GIVE_BACK_S):
                    await self._give_back("the trainer cannot go on")
            except (TimeoutError, RelaxError) as error:
                self.ctx.log.warning("groups of the step are not given back: their leases lapse", why=str(error))
            raise
        await self.collector.give_up("the run ends")
        await self._saved()
        if self.step > self._newest_step():
            await self._save(final=True)
        await self.publisher.through()
        await self.publisher.filed()
        await asyncio.to_thread(self.backend.close)
        self.ctx.event("training_finished", step=self.step, target=algorithm.steps)

    async def _give_back(self, reason: str) -> None:
        """All groups that were taken and not trained on."""
        from relax_rt.roles.training.collector import abort_leases

        held, self._held = self._held, None
        leases = held.leases if held is not None else []
        await abort_leases(self.queue, [*leases, *self.collector.pop_leases()], reason)

    async def teardown(self) -> None:
        if self._saving is not None:
            # It waits for a version that, as it looks, never comes.
            if self.publisher.overdue and self._saved_version is self.publisher.current:
                self._saving.cancel()
            # Its failure was raised in `run`, or `run` has a failure of its own to report.
            await asyncio.gather(self._saving, return_exceptions=True)
        await super().teardown()

    async def _resume(self) -> bool:
        """Start from the newest checkpoint; tell the queue, then publish these weights as a new version.

        The version is a re-publication of the checkpoint's: it adds nothing to any distance.
        False: the role was asked to stop before there were any weights to publish.
        """
        from relax_rt.roles.training.publication.files import WeightFiles

        parent = ROOT
        known = await self.ctx.registry.versions()
        files = await asyncio.to_thread(WeightFiles.of, self.ctx)
        self.publisher = self._publisher(known[-1].version if known else ROOT, files)
        self.resources.push_async_callback(self.publisher.close)
        self.store.published = {one.version: one.digest for one in known}
        found = await self._restore()
        if found is not None:
            self.step, parent = found.step, found.version
            self._trained_before_s = found.elapsed_s
            if found.objective:
                self.objective.restore(found.objective)
        else:
            # The initial weights were published before, by an incarnation that died before its first checkpoint.
            parent = known[0].version if known else ROOT
        if not await self._cold_start(found):
            return False
        version = await self._wait_for_peer(self.ctx.registry.issue_version)
        self.weights = VersionRecord(version, parent, self.step, changed=parent == ROOT)
        if self._curriculum is not None:
            # Before anything is admitted.
            await self._curriculum.choose(self.step)
        await self.queue.rollback(found.ledger_step if found is not None else self.step, self.weights)
        await self.publisher.begin(self.weights)
        self._report_phase("its groups are gathered")
        return True

    async def _cold_start(self, found: CheckpointState | None) -> bool:
        """What comes before the first publication. False: the role was asked to stop before it was done.

        Args:
            found: the checkpoint that the trainer goes on from; what came before is done then.
        """
        if found is not None or not self.table(ColdStartTable).wanted:
            return True
        from relax_rt.roles.training.sft.phase import ColdStartPhase

        phase = ColdStartPhase(self.ctx, self.config, self.backend, self.store.model)
        async with self._device():
            done = await phase.run()
        if not done:
            return False
        await phase.adopt(self.objective)
        return True

    def _publisher(self, committed: int, files: WeightFiles | None) -> Publisher:
        from relax_rt.roles.training.publication.publisher import Publisher

        engines = [name for name, settings in self.config.roles.items() if isinstance(settings, RolloutSettings)]
        return Publisher(
            self.ctx,
            self.stage,
            self.backend,
            dtype=published_dtype(self.config),
            table=self.table(PublicationTable),
            engines=engines,
            committed=committed,
            files=files,
            communicator=communicator_of(self.config),
        )

    async def _restore(self) -> CheckpointState | None:
        """Take the newest checkpoint that can be read; those skipped are reported, and no longer count.

        Raises:
            BadInput: the run has checkpoints, and none can be read. GivenUp: the queue forgot what one was trained on.
        """
        from relax_rt.roles.training.checkpoints.resume import resume_newest
        from relax_rt.roles.training.checkpoints.store import read_sampling

        async def take(folder: Path, state: CheckpointState) -> None:
            await asyncio.to_thread(self.backend.restore, folder)
            if self.critic is not None:
                await self.critic.begin(state.step, folder)
            # An older checkpoint may be taken after this one was refused: what it knows of prompts comes last.
            if self._group_filter is not None:
                self._group_filter.restore(read_sampling(folder))
            elif self._curriculum is not None:
                self._curriculum.ahead.restore(read_sampling(folder))

        found, passed = await resume_newest(self.ctx, self.store, take)
        self._quarantined_checkpoints = f" (skipped, and set aside: {', '.join(passed)})" if passed else ""
        if found is None:
            if self.critic is not None:
                await self.critic.begin(0, None)
            return None
        folder, state = found
        await self._covered(folder, state.ledger_step)
        self.ctx.event("resumed", checkpoint=folder.name, step=state.step, version=state.version)
        return state

    async def _covered(self, folder: Path, step: int) -> None:
        """See that the queue knows what a checkpoint was trained on.

        Raises:
            GivenUp: it does not, and would give out those prompts again.
        """
        known = (await self._wait_for_peer(self.queue.api.stats, of="the queue")).step
        if known >= step:
            return
        why = f"the queue knows of no step after {known}: its journal has lost what came then, as if its host went down"
        hint = (
            f"move the checkpoints of steps after {known} out of {folder.parent}, and `relax-rt up` goes on from the "
            f"one before; if there is none, begin a run of another run.name with model.path = {str(folder)!r}"
        )
        raise GivenUp(f"checkpoint {folder.name} of step {step}", why=why, hint=hint)

    async def _one_step(self) -> None:
        """Go on with a step; returns also when its groups are not all there yet, so that a request to stop is seen."""
        self.publisher.check()
        batch = await self._collect()
        if batch is None:
            return
        if not batch.full:
            if self._streams and batch.pending_tokens() >= self._part_tokens:
                self._report_phase(
                    f"computing on {batch.groups} of {self.table(AlgorithmTable).prompts_per_step} groups"
                )
                await asyncio.to_thread(self._accumulate, batch)
                batch.timer.on("train")
            return
        self._held = batch
        self._report_phase("computing")
        if self.critic is not None:
            await self.critic.judge(batch.samples, self.step)
        async with self._device():
            result = await asyncio.to_thread(self._train, batch)
            batch.timer.on("train")
            await self._account(batch, result)
        if self.critic is not None:
            # The engines have the new weights by now: it learns while they sample.
            await self.critic.learn(batch.samples, self.objective.returns(batch.samples), self.step - 1)
        batch.timer.on("publish")
        self._longest_s = max(self._longest_s, batch.timer["train"] + batch.timer["publish"])
        self._record(batch, result)
        await self._save_if_due()

    def _report_phase(self, what: str) -> None:
        """Say what is done for the step that is being made."""
        step, steps = self.step + 1, self.table(AlgorithmTable).steps
        self.ctx.progress.advance(0, f"step {step} of {steps}: {what}{self._quarantined_checkpoints}")

    async def _collect(self) -> StepBatch | None:
        try:
            batch = await self.collector.collect(self.step + 1)
            if batch is None:
                await self._look_at_losses()
            return batch
        except NoProgress:
            # Whoever looks into it finds all that was learnt.
            await self._saved()
            if self.step > self._newest_step():
                await self._save(final=True)
            raise

    async def _look_at_losses(self) -> None:
        """No group came: say what is lost meanwhile.

        Raises:
            NoProgress: so many groups failed in a row that the run is to end.
        """
        report = await self.queue.progress()
        if report.ended:
            raise no_progress(self.config, report)
        if lost := failure_summary(report):
            self.ctx.progress.waiting(f"{self.collector.waiting_for}; {lost}")

    @asynccontextmanager
    async def _device(self) -> AsyncIterator[None]:
        """Around all that the trainer computes in a step: engines that share its device give way."""
        if self.turns is None:
            yield
            return
        async with self.turns.training():
            yield
            # They come back to the new weights, not to the old ones first.
            await self.publisher.through()

    def _train(self, batch: StepBatch) -> StepResult:
        """The gradients that are not there yet, and the update; or all updates of the step. Blocks."""
        from relax_rt.roles.training.mismatch import idle_token_metrics
        from relax_rt.roles.training.step import take_updates

        def before_update() -> None:
            batch.stage_wait_s += self.publisher.weights_may_change()

        number, over, updates = self.step + 1, self.settings.mismatch, self.table(AlgorithmTable).updates_per_step
        if updates > 1:
            return take_updates(
                batch,
                self.backend,
                self.objective,
                updates=updates,
                version=self.weights.version,
                number=number,
                over=over,
                before_update=before_update,
            )
        self._accumulate(batch)
        batch.idle_metrics = idle_token_metrics(batch.samples, self.backend, self.objective, over)
        return self.backend.apply(batch.count, number, before_update)

    def _accumulate(self, batch: StepBatch) -> None:
        from relax_rt.roles.training.step import accumulate

        accumulate(batch, self.backend, self.objective, self.weights.version)

    @property
    def _part_tokens(self) -> int:
        """Tokens for which it is worth while to begin before the rest is there: a micro-batch of every replica."""
        table = self.settings
        divided = table.tensor_parallel * table.pipeline_parallel * table.context_parallel
        return table.tokens_per_micro_batch * max(1, table.count // divided)

    async def _account(self, batch: StepBatch, result: StepResult) -> None:
        """The step is done: the queue hears of it first, then the weights are published while the next one is made."""
        if result.updates_skipped:
            self._skipped += 1
            self.ctx.event("update_skipped" if result.applied else "step_skipped", step=self.step + 1, why=result.why)
            if self._skipped >= SKIPPED_IN_A_ROW:
                which = "had an update that was thrown away" if result.applied else "were thrown away"
                what = f"{self._skipped} steps in a row {which}"
                hint = "lower the learning rate (algorithm.learning_rate); `relax-rt up` goes on from a checkpoint"
                raise GivenUp(what, why=result.why, hint=hint)
        else:
            self._skipped = 0
        empty = result.applied and not result.changed and not result.tokens
        self._note_empty(batch, result, empty=empty)
        self.step += 1
        # The last step's version is what the other roles take for the end of the run, whatever is in it.
        publishes = not empty or self.step >= self.table(AlgorithmTable).steps
        if publishes:
            version = await self._wait_for_peer(self.ctx.registry.issue_version)
            self.weights = VersionRecord(version, self.weights.version, self.step, changed=result.changed)
        skipped = empty or not result.applied
        advice = await self.queue.complete_step(batch.leases, self.step, self.weights, skipped=skipped)
        self._held = None
        batch.refused_tokens = advice.refused_tokens
        if self._curriculum is not None:
            await self._curriculum.after_step(batch.samples, self.step)
        if publishes:
            await self.publisher.begin(self.weights)
        self._early = advice.checkpoint_now

    def _note_empty(self, batch: StepBatch, result: StepResult, *, empty: bool) -> None:
        """Count consecutive steps that trained nothing: no sample of them had a part in the gradient.

        They are reported after `progress.empty_steps` of them, and whenever their number has doubled. A step whose
        update was thrown away says nothing of its samples: the count stays.
        """
        if not result.applied:
            return
        self._empty_why = ""
        if empty:
            self._empty_why = no_token(self.config, batch.samples)
            self.ctx.event("step_empty", step=self.step + 1, why=self._empty_why)
        elif all(self.objective.idle(sample) for sample in batch.samples):
            self._empty_why = no_advantage(self.config, batch.samples, batch.masked_tokens)
        self._empty = self._empty + 1 if self._empty_why else 0
        times, rest = divmod(self._empty, self.table(ProgressTable).empty_steps)
        if times and not rest and not times & (times - 1):
            self.ctx.event("steps_empty", step=self.step + 1, steps=self._empty, why=self._empty_why)
            self.ctx.log.warning("steps that trained nothing", steps=self._empty, why=self._empty_why)

    def _record(self, batch: StepBatch, result: StepResult) -> None:
        """The step's record, and a line of the log."""
        from relax_rt.roles.training.step import step_record

        epoch, steps = self.ctx.who.epoch, self.table(AlgorithmTable).steps
        elapsed_s = self._trained_before_s + time.monotonic() - self._started
        record = step_record(batch, result, step=self.step, weights=self.weights, epoch=epoch, elapsed_s=elapsed_s)
        reported = self._empty >= self.table(ProgressTable).empty_steps
        record |= {"empty_steps": self._empty, "empty_reason": self._empty_why if reported else ""}
        self.ctx.metrics(record)
        if not self._worked:
            self._worked = True
            self.ctx.event("first_work", what=f"step {self.step}")
        shown = {name: round(record[name], 4) for name in ("reward_mean", "loss", "grad_norm", "wait_s", "train_s")}
        self.ctx.log.info(f"step {self.step} of {steps}", version=self.weights.version, **shown)
        self.ctx.progress.advance(1, f"step {self.step} of {steps} is done{self._quarantined_checkpoints}")

    async def _save_if_due(self) -> None:
        if self._saving is not None and self._saving.done():
            # A save that failed ends the trainer now, not at the next checkpoint.
            self._saving.result()
        final = self.step >= self.table(AlgorithmTable).steps
        due = final or self.step % self.table(CheckpointTable).every_steps == 0
        if self._early and not due and (self._saving is None or self._saving.done()):
            self.ctx.event("early_checkpoint", step=self.step, why=self._early)
            due = True
        if due:
            await self._save(final=final)

    async def _wait_for_peer(self, call: Callable[[], Awaitable[T]], of: str = "the registry") -> T:
        """A call that waits out the far end's absence: the step that was just taken must not be lost for it."""
        deadline = time.monotonic() + REGISTRY_WAIT_S
        while True:
            try:
                answer = await call()
            except (Unreachable, DeadlineExceeded) as error:
                if time.monotonic() > deadline:
                    raise
                self.ctx.progress.waiting(f"{of}: {error}")
                continue
            self.ctx.progress.waiting("")
            return answer

    async def _save(self, *, final: bool) -> None:
        """Copy the state aside and write it while training goes on; the last one is waited for."""
        await self._saved()
        self.ctx.progress.extend(SAVE_ALLOWANCE_S, "taking a checkpoint")
        await asyncio.to_thread(self.backend.snapshot)
        if self.critic is not None:
            await self.critic.snapshot(self.step)
        elapsed = self._trained_before_s + time.monotonic() - self._started
        assert self.publisher.current is not None
        sampling = self._curriculum.ahead.state() if self._curriculum is not None else {}
        if self._group_filter is not None:
            sampling = self._group_filter.state()
        self._saved_version = self.publisher.current
        self._saving = asyncio.create_task(
            self._write(self.step, elapsed, self._saved_version, self.objective.state(), sampling)
        )
        if final:
            await self._saved()

    async def _saved(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        from relax_rt.roles.training.checkpoints.resume import wait_for_save
        from relax_rt.roles.training.critic.client import SCRATCH

        if self._saving is not None:
            # Until its version is committed nothing of it is written.
            await self.publisher.through(self._saved_version)
            critics = self.ctx.run_dir / SCRATCH if self.critic is not None else None
            await wait_for_save(self._saving, self.store, self.ctx.progress.advance, critics)

    async def _write(
        self,
        step: int,
        elapsed_s: float,
        publication: asyncio.Task[VersionRecord],
        objective: dict[str, float],
        sampling: dict[str, Any],
    ) -> None:
        from relax_rt.roles.training.checkpoints.store import CheckpointState, write_sampling

        # The checkpoint names the version by its digest, so it is complete only after the version is.
        await asyncio.wait([publication])
        version = publication.result()
        state = CheckpointState(step, version.version, version.digest, self.ctx.who.epoch, step, elapsed_s, objective)
        began = time.monotonic()
        critic = await self.critic.written(step) if self.critic is not None else None
        # The steps that it covers must not be lost to the queue if this host goes down right after.
        await self.queue.flush()

        def fill(folder: Path) -> None:
            self.backend.write(folder)
            write_sampling(folder, sampling)
            if critic is not None:
                critic.move(folder)

        folder: Path = await asyncio.to_thread(self.store.save, state, fill)
        await self.queue.commit(state.step, folder.name)
        self.ctx.event("checkpoint", step=state.step, folder=folder.name, seconds=round(time.monotonic() - began, 2))
        self._quarantined_checkpoints = ""

    def _newest_step(self) -> int:
        found = self.store.newest()
        return found[1].step if found else 0


def published_dtype(config: RunConfig) -> str:
    """The dtype of published weights: that of the engines, which validation holds to one."""
    dtype: str = config.roles["rollout"].dtype
    return dtype
