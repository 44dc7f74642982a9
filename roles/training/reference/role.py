"""The reference role: log-probabilities of a model that is not trained, for KL terms, DPO and distillation."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from relax_rt.config.schema import RoleSettings
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.locations import MODEL_CODE
from relax_rt.roles.base.role import FETCH_S, RLRole
from relax_rt.roles.base.sample import read_sample
from relax_rt.roles.models.resolve import refused_as_bad_input
from relax_rt.roles.models.settings import ModelTable
from relax_rt.roles.rollout.engines.settings import SamplingTable
from relax_rt.roles.training.algorithms.settings import ColdStartTable
from relax_rt.roles.training.backend.settings import ReferenceSettings
from relax_rt.transport.queue.ledger.messages import Failure
from relax_rt.transport.rpc.errors import RelaxError

if TYPE_CHECKING:
    from relax_rt.roles.training.reference.model import FrozenModel
    from relax_rt.transport.queue.batch import LeasedBatch
    from relax_rt.transport.queue.ledger.messages import SampleKey

TASK, COLUMN = "reference", "reference_logprobs"
LOAD_ALLOWANCE_S = 180.0
FAILURES_IN_A_ROW = 64
"""Failed samples without a good one between them: then it is the model, not the samples."""
REPORT_EVERY_S = 5.0


class ReferenceRole(RLRole[ReferenceSettings]):
    """Takes completions from the queue and puts `reference_logprobs` on them, float32 [T].

    The model is the policy before its first step, after a cold start, or the teacher that [roles.reference] names. It
    never changes, so that the column does not lapse, and a slot that dies costs the samples in hand, which another one
    gets. A sample that the model cannot judge (a token outside its vocabulary, a log-probability that is not finite)
    fails, and is made again as `on_failed_member` says.
    """

    kind: ClassVar[str] = "reference"
    tier: ClassVar[int] = 40
    preload: ClassVar[tuple[str, ...]] = (
        "torch",
        "transformers",
        "relax_rt.roles.training.reference.model",
        "relax_rt.roles.base.sample",
        "relax_rt.transport.queue.client",
        *MODEL_CODE,
    )
    Settings: ClassVar[type[RoleSettings]] = ReferenceSettings

    def __init__(self, ctx: RoleContext) -> None:
        super().__init__(ctx)
        self.model: FrozenModel
        self._failures_in_a_row = 0
        self._worked = False
        self._counts: Counter[str] = Counter()
        """Since the last report, as are the seconds of work and the sum of log-probabilities."""
        self._seconds = self._logprobs = self._reported_at = 0.0

    async def setup(self) -> None:
        if (folder := await asyncio.to_thread(self._folder)) is not None:
            self.ctx.progress.extend(LOAD_ALLOWANCE_S, "loading the model")
            await asyncio.to_thread(self._load, folder)
        await self.open_queue(fetch_s=FETCH_S)

    def _folder(self) -> Path | None:
        """The model's; None while it is to come: the policy after a cold start."""
        from relax_rt.roles.models.resolve import resolve_model
        from relax_rt.roles.training.checkpoints.cold_start import cold_start_weights

        if self.settings.model is None and self.table(ColdStartTable).wanted:
            return cold_start_weights(self.ctx.run_dir)
        return resolve_model(self.settings.model or self.table(ModelTable).path, self.config_dir)

    def _load(self, folder: Path) -> None:
        from relax_rt.roles.models.device import open_device
        from relax_rt.roles.training.batch.budget import TokenBudget
        from relax_rt.roles.training.reference.model import FrozenModel

        device = open_device(self.ctx, self.settings)
        budget = TokenBudget.of(self.ctx, self.settings.tokens_per_micro_batch)
        with refused_as_bad_input():
            self.model = FrozenModel(
                folder,
                dtype=self.settings.dtype,
                threads=self.settings.threads,
                budget=budget,
                temperature=self.table(SamplingTable).temperature,
                device=device,
            )

    async def run(self) -> None:
        from relax_rt.roles.training.checkpoints.cold_start import wait_for_cold_start

        if not hasattr(self, "model"):
            # It comes after the time for a start.
            await self.ctx.ready()
            folder = await wait_for_cold_start(self.ctx)
            if folder is None:
                return
            self.ctx.progress.extend(LOAD_ALLOWANCE_S, "loading the model")
            await asyncio.to_thread(self._load, folder)
        try:
            await self.consume(TASK, self.settings.batch, self._judge, "completions to judge")
        finally:
            self._report(last=True)

    async def _judge(self, batch: LeasedBatch) -> None:
        began = time.monotonic()
        columns, failed = await asyncio.to_thread(self._compute, batch)
        await self.queue.complete(batch, columns, [Failure(key, why) for key, why in failed.items()])
        if not self._worked:
            self._worked = True
            self.ctx.event("first_work", what=f"{len(columns)} samples judged")
        self._counts.update(samples=len(columns), failed=len(failed))
        self._seconds += time.monotonic() - began
        self._report()
        self._failures_in_a_row = 0 if columns else self._failures_in_a_row + len(failed)
        if self._failures_in_a_row >= FAILURES_IN_A_ROW:
            raise RelaxError(
                f"the reference model could not judge {self._failures_in_a_row} samples in a row",
                why=next(iter(failed.values())),
                hint="see roles.reference.model; the samples that failed are made again",
            )

    def _compute(self, batch: LeasedBatch) -> tuple[dict[SampleKey, dict[str, Any]], dict[SampleKey, str]]:
        """Columns of the samples that can be judged, and why the others cannot."""
        samples = {leased.key: read_sample(leased) for leased in batch.samples}
        failed: dict[SampleKey, str] = {}
        for key, sample in samples.items():
            if (highest := int(sample.tokens.max(initial=0))) >= self.model.vocabulary:
                failed[key] = f"token {highest} is not in the reference's vocabulary of {self.model.vocabulary}"
        good = {key: sample for key, sample in samples.items() if key not in failed}
        found = self.model.log_probabilities(list(good.values()), self.ctx.progress.advance)
        columns: dict[SampleKey, dict[str, Any]] = {}
        for (key, sample), values in zip(good.items(), found, strict=True):
            if np.isfinite(values).all():
                columns[key] = {COLUMN: values}
                self._counts["tokens"] += int(sample.loss_mask.sum())
                self._logprobs += float(values.sum())
            else:
                failed[key] = "a log-probability of the reference is not finite"
        return columns, failed

    def _report(self, *, last: bool = False) -> None:
        """Metrics and failures, at most one record each every few seconds."""
        counts, now = self._counts, time.monotonic()
        if not (counts["samples"] or counts["failed"]) or not (last or now - self._reported_at >= REPORT_EVERY_S):
            return
        if counts["failed"]:
            self.ctx.log.warning("the reference could not judge samples", samples=counts["failed"])
        self.ctx.metrics(
            {
                "kind": "reference",
                "slot": self.ctx.who.slot,
                "samples": counts["samples"],
                "failed": counts["failed"],
                "tokens": counts["tokens"],
                "seconds": self._seconds,
                "mean_logprob": self._logprobs / counts["tokens"] if counts["tokens"] else None,
            }
        )
        counts.clear()
        self._seconds = self._logprobs = 0.0
        self._reported_at = now
