"""The reward role: leases completions from the queue, scores them and puts the rewards on them."""

from __future__ import annotations

import asyncio
import time
from typing import Any, ClassVar

import numpy as np

from relax_rt.config.schema import RoleSettings
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.locations import model_folder
from relax_rt.roles.base.role import FETCH_S
from relax_rt.roles.base.sample import SampleMeta
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.models.tokenizer import ChatTokenizer, load_tokenizer
from relax_rt.roles.rewards.compose import Rewards
from relax_rt.roles.rewards.dry_run import offered_info, task_of
from relax_rt.roles.rewards.genrm.settings import genrm_settings
from relax_rt.roles.rewards.judge import Judge, JudgeVerdict, Judging, LateVerdict, load_judging, with_verdict
from relax_rt.roles.rewards.scoring import RewardFailed, RewardRequest, Score
from relax_rt.roles.rewards.settings import RewardSettings, RewardTable
from relax_rt.roles.rollout.router.role import RouterRole
from relax_rt.transport.queue.batch import LeasedBatch, LeasedSample
from relax_rt.transport.queue.ledger.messages import ABOUT, Failure, SampleKey
from relax_rt.transport.rpc.errors import ProtocolError, RelaxError

TASK = "reward"
LOAD_ALLOWANCE_S = 60.0
MAX_FAILURES = 64
"""Restart the role after this many consecutive failed samples, if it has scored samples before: its process may be
broken. A restart does not help a function that never worked; the queue counts its failed groups and ends the run."""
REPORT_EVERY_S = 5.0
MAX_UNREADABLE = 10_000
"""At most this many unreadable answers are reported, each once."""
SLAB_BYTES, CAPACITY_BYTES = 1 << 20, 8 << 20
"""A reward and its components nearly always travel inside the message."""


class RewardRole(RouterRole[RewardSettings]):
    """Takes completions from the queue and puts `reward` (float32, total) and `rewards` (components) on them.

    A call that raises fails its sample, not the run; its group is regenerated. Functions of users run in worker
    processes: one that hangs past `reward.timeout_s` fails its sample, and its process is killed and replaced. (With
    `reward.workers = 0` it ends this process, because a stuck thread cannot be ended otherwise.) The role does not
    wait for weights and holds none.
    """

    kind: ClassVar[str] = "reward"
    tier: ClassVar[int] = 40
    preload: ClassVar[tuple[str, ...]] = (
        "transformers",
        "relax_rt.roles.models.tokenizer",
        "relax_rt.roles.rewards.compose",
        "relax_rt.roles.rewards.library.functions",
        "relax_rt.roles.rewards.judge",
        "relax_rt.roles.rollout.router",
        "relax_rt.transport.queue.client",
    )
    Settings: ClassVar[type[RoleSettings]] = RewardSettings

    def __init__(self, ctx: RoleContext) -> None:
        super().__init__(ctx)
        self.tokenizer: ChatTokenizer
        self.rewards: Rewards
        self.judging: Judging | None = None
        self.judge: Judge | None = None
        self._failures_in_a_row = 0
        self._has_scored = False
        self._has_worked = False
        self._counters = RewardCounters(time.monotonic())
        self._unreadable: set[str] = set()

    async def setup(self) -> None:
        self.ctx.progress.extend(LOAD_ALLOWANCE_S, "loading tokenizer and reward function")

        def on_lost(why: str) -> None:
            self.ctx.event("reward_worker_lost", reason=why[:500])

        task = task_of(self.table(DataTable))
        self.rewards = Rewards(self.table(RewardTable), self.config_dir, task, on_lost)
        self.resources.push_async_callback(self.rewards.close)
        starting = asyncio.create_task(self.rewards.start())
        try:
            await asyncio.to_thread(self._load)
        except BaseException:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            raise
        await starting
        if (sandbox := self.rewards.sandbox) is not None:
            self.ctx.event("sandbox", level=sandbox.level, backend=sandbox.backend, what=str(sandbox))
        await self.open_queue(slab_bytes=SLAB_BYTES, capacity_bytes=CAPACITY_BYTES, fetch_s=FETCH_S)

    def _load(self) -> None:
        self.tokenizer = load_tokenizer(model_folder(self.ctx))
        if self.table(RewardTable).judge is not None:
            self.judging = load_judging(self.config, self.config_dir)

    async def run(self) -> None:
        # A request for several whole groups would wait for all of them.
        groups = 1 if self.rewards.groups else 0
        try:
            if self.judging is not None:
                await self.open_router("genrm", frozen=not genrm_settings(self.config).follow)
                self.judge = Judge(self.judging, self.router.generate)
            await self.consume(TASK, self.settings.batch, self._score, "completions to score", groups=groups)
        finally:
            self._report(last=True)

    async def _score(self, batch: LeasedBatch) -> None:
        began = time.monotonic()
        requests = [self._request(sample) for sample in batch.samples]
        results = await self._score_requests(requests)
        columns: dict[SampleKey, dict[str, Any]] = {}
        failures: list[Failure] = []
        for sample, result in zip(batch.samples, results, strict=True):
            if isinstance(result, RewardFailed):
                meta = sample.decode("meta", SampleMeta)
                late = result.excess or isinstance(result, LateVerdict)
                about = str(meta.info.get("question", ""))[:ABOUT]
                failures.append(Failure(sample.key, result.reason[:500], late, meta.item, about))
                continue
            columns[sample.key] = {"reward": np.float32(result.total), "rewards": result.components}
            if result.turns:
                columns[sample.key]["turn_rewards"] = np.array(result.turns, np.float32)
        await self.queue.complete(batch, columns, failures)
        if not self._has_worked:
            self._has_worked = True
            self.ctx.event("first_work", what=f"{len(results)} samples scored")
        self._counters.add(results, time.monotonic() - began)
        for request, result in zip(requests, results, strict=True):
            # An item whose right answer cannot be read is reported once.
            item = str(request.info.get("item", ""))
            unreadable = result.unreadable if isinstance(result, Score) else ""
            if unreadable and item not in self._unreadable and len(self._unreadable) < MAX_UNREADABLE:
                self._unreadable.add(item)
                self.ctx.event("answer_unreadable", item=item, items=len(self._unreadable), reason=unreadable[:500])
        self._report()
        self._check_health(results)

    async def _score_requests(self, requests: list[RewardRequest]) -> list[Score | RewardFailed]:
        """Return scores in order; a sample without a verdict fails before the function is called."""

        def advance() -> None:
            self.ctx.progress.advance(1, "scoring")

        if self.judge is None:
            return await self.rewards.score(requests, advance)
        self.ctx.progress.waiting("verdicts of the judge")
        verdicts = await self.judge.verdicts(requests, advance)
        self.ctx.progress.waiting("")
        found = [with_verdict(r, v) for r, v in zip(requests, verdicts, strict=True) if isinstance(v, JudgeVerdict)]
        scores = iter(await self.rewards.score(found, advance))
        return [next(scores) if isinstance(verdict, JudgeVerdict) else verdict for verdict in verdicts]

    def _request(self, sample: LeasedSample) -> RewardRequest:
        meta = sample.decode("meta", SampleMeta)
        if meta.tokenizer_digest != self.tokenizer.tokenizer_digest:
            raise ProtocolError(
                f"sample {sample.key}",
                why=f"its tokens are of tokenizer {meta.tokenizer_digest}, not {self.tokenizer.tokenizer_digest}",
                hint="all roles must load the same model folder",
            )
        tokens = sample["tokens"][sample["loss_mask"] != 0]
        # The conversation as text, if the assistant has more than one turn.
        several = sum(span.role == "assistant" for span in meta.turns) > 1
        turns = [(span.role, sample["tokens"][span.start : span.end]) for span in meta.turns if several]
        info = offered_info(
            str(meta.info.get("question", "")),
            dict(meta.info.get("metadata", {})),
            None,
            item=meta.item,
            split=meta.split,
            finish_reason=meta.finish_reason,
            truncated=meta.truncated,
            tokens=len(tokens),
            turns=[{"role": role, "text": self.tokenizer.decode(own)} for role, own in turns],
        )
        return RewardRequest(self.tokenizer.decode(tokens), meta.answer, info, meta.group)

    def _check_health(self, results: list[Score | RewardFailed]) -> None:
        """Raise if the process, not a sample, is at fault; the role then restarts."""
        for result in results:
            if isinstance(result, LateVerdict):
                continue
            self._failures_in_a_row = self._failures_in_a_row + 1 if isinstance(result, RewardFailed) else 0
            self._has_scored = self._has_scored or not isinstance(result, RewardFailed)
        failed = [
            result for result in results if isinstance(result, RewardFailed) and not isinstance(result, LateVerdict)
        ]
        for result in failed:
            if result.stuck:
                raise RelaxError(
                    "the reward function hangs",
                    why=result.reason,
                    hint="give its own waits (network, subprocess) deadlines, or raise reward.timeout_s",
                )
        if failed and self._has_scored and self._failures_in_a_row >= MAX_FAILURES:
            raise RelaxError(
                f"the reward function failed {self._failures_in_a_row} times in a row",
                why=failed[-1].reason,
                hint="mend reward.function; failed samples are regenerated",
            )

    def _report(self, *, last: bool = False) -> None:
        """Record metrics and failures, at most every few seconds."""
        counters = self._counters
        if not (counters.scored or counters.failed) or not (last or counters.first_report or counters.due()):
            return
        for kind, samples in (("reward_failed", counters.failed), ("reward_forgiven", counters.forgiven)):
            if samples:
                self.ctx.event(kind, samples=samples, reason=counters.reason)
                self.ctx.log.warning(kind.replace("_", " "), samples=samples, reason=counters.reason)
        self.ctx.metrics({"kind": "reward", "slot": self.ctx.who.slot, **counters.record()})
        self._counters = RewardCounters(time.monotonic(), first_report=False)


class RewardCounters:
    """Counts what was scored since the last metrics record."""

    def __init__(self, since: float, *, first_report: bool = True) -> None:
        self.since, self.first_report = since, first_report
        self.scored = self.failed = self.forgiven = self.unreadable = 0
        self.seconds = 0.0
        self.reason = ""
        self.totals: dict[str, float] = {}

    def due(self) -> bool:
        """Return whether it is time for a record."""
        return time.monotonic() - self.since >= REPORT_EVERY_S

    def add(self, results: list[Score | RewardFailed], seconds: float) -> None:
        """Count a batch."""
        self.seconds += seconds
        for result in results:
            if isinstance(result, RewardFailed):
                self.failed += 1
                self.reason = self.reason or result.reason[:500]
                continue
            self.scored += 1
            self.unreadable += bool(result.unreadable)
            # Unreadable answers have a count and an event of their own.
            self.forgiven += bool(result.forgiven) and not result.unreadable
            self.reason = self.reason or ("" if result.unreadable else "; ".join(result.forgiven)[:500])
            for name, value in {**result.components, "total": result.total}.items():
                self.totals[name] = self.totals.get(name, 0.0) + value

    def record(self) -> dict[str, Any]:
        """Return counts, seconds of scoring, mean reward and mean of each component."""
        means = {name: total / self.scored for name, total in self.totals.items()} if self.scored else {}
        total = means.pop("total", None)
        return {
            "scored": self.scored,
            "failed": self.failed,
            "forgiven": self.forgiven,
            "unreadable": self.unreadable,
            "seconds": self.seconds,
            "mean": total,
            "components": means,
        }
