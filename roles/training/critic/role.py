"""The critic role: values for the trainer's samples, and a step on their returns after each of the trainer's own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

import msgspec
import numpy as np

from relax_rt.config.schema import RoleSettings
from relax_rt.roles.base.locations import MODEL_CODE
from relax_rt.roles.base.role import RLRole
from relax_rt.roles.base.sample import Sample, bare_meta
from relax_rt.roles.models.resolve import refused_as_bad_input
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.backend.settings import CriticSettings
from relax_rt.roles.training.critic.client import CriticApi, CriticReport, CriticSample, TrainingPosition
from relax_rt.transport.rpc.errors import Refused, StaleEpoch

if TYPE_CHECKING:
    from relax_rt.roles.training.critic.model import CriticModel, Values


LOAD_ALLOWANCE_S = 180.0
IDLE = "the trainer's next step"


class CriticRole(RLRole[CriticSettings]):
    """It has no say of its own: the trainer begins it, from the checkpoint that it resumes from itself, and asks it at
    each step. When either dies, the trainer goes back to its last checkpoint and takes the critic with it."""

    kind: ClassVar[str] = "critic"
    tier: ClassVar[int] = 30
    preload: ClassVar[tuple[str, ...]] = (
        "torch",
        "transformers",
        "relax_rt.roles.training.critic.model",
        *MODEL_CODE,
    )
    Settings: ClassVar[type[RoleSettings]] = CriticSettings

    async def setup(self) -> None:
        self.ctx.progress.extend(LOAD_ALLOWANCE_S, "loading the model")
        model = await asyncio.to_thread(self._load)
        self.ctx.serve(CriticApi, CriticService(model, self._working, self._report))

    def _load(self) -> CriticModel:
        from relax_rt.roles.base.locations import model_folder
        from relax_rt.roles.models.device import open_device
        from relax_rt.roles.training.batch.budget import TokenBudget
        from relax_rt.roles.training.critic.model import CriticModel

        device = open_device(self.ctx, self.settings)
        budget = TokenBudget.of(self.ctx, self.settings.tokens_per_micro_batch)
        updates, on_progress = self.table(AlgorithmTable).updates_per_step, self.ctx.progress.advance
        folder = model_folder(self.ctx)
        with refused_as_bad_input():
            return CriticModel(folder, self.settings, on_progress, device, budget, updates=updates)

    async def run(self) -> None:
        await self.ctx.ready()
        self._working(False)
        await self.ctx.stopping.wait()

    def _working(self, at_work: bool) -> None:
        self.ctx.progress.waiting("" if at_work else IDLE)

    def _report(self, step: int, report: CriticReport) -> None:
        fields = {name: getattr(report, name) for name in report.__struct_fields__}
        self.ctx.metrics({"kind": "critic", "step": step, **fields})
        if not report.applied:
            self.ctx.event("critic_step_skipped", step=step)
        elif report.updates_skipped:
            self.ctx.event("critic_update_skipped", step=step, updates_skipped=report.updates_skipped)


T = TypeVar("T")


class CriticService:
    """One model, one call at work at a time. Implements CriticApi.

    Args:
        working: called before (True) and after (False) each call's work.
        report: gets the step's number, from 1, and what it did.
    """

    def __init__(
        self, model: CriticModel, working: Callable[[bool], None], report: Callable[[int, CriticReport], None]
    ) -> None:
        self._model, self._working, self._report = model, working, report
        self._lock, self._writing = asyncio.Lock(), asyncio.Lock()
        self._at = TrainingPosition(0, 0)
        self._samples: dict[int, list[Sample]] = {}
        self._old: dict[int, list[Values]] = {}
        self._returns: dict[int, list[Values | None]] = {}
        self._last: CriticReport | None = None
        self._snapshot_of: TrainingPosition | None = None

    async def _alone(self, work: Callable[[], T]) -> T:
        async def at_work() -> T:
            self._working(True)
            try:
                return await asyncio.to_thread(work)
            finally:
                self._working(False)

        return await _to_its_end(self._lock, at_work)

    async def begin(self, at: TrainingPosition, folder: str) -> None:
        """Start from a checkpoint, or from the model's own weights."""
        self._fence(at)

        def work() -> None:
            self._fence(at)
            # Until it is whole it is at no trainer's place.
            self._at, self._last, self._snapshot_of = TrainingPosition(at.epoch, -1), None, None
            self._clear()
            self._model.reset()
            if folder:
                self._model.restore(Path(folder))
            self._at = at

        await self._alone(work)

    async def values(self, at: TrainingPosition, first: int, pieces: list[CriticSample]) -> list[bytes]:
        """Compute values of samples of the step."""

        def work() -> list[bytes]:
            self._check(at)
            if first == 0:
                self._clear()
            samples = [_sample(piece, first + index) for index, piece in enumerate(pieces)]
            values = self._model.values(samples)
            self._samples[first], self._old[first] = samples, values
            return [one.tobytes() for one in values]

        return await self._alone(work)

    async def returns(self, at: TrainingPosition, first: int, returns: list[bytes]) -> None:
        """Take the returns of samples of the step."""

        def work() -> None:
            self._check(at)
            samples = self._samples.get(first)
            if samples is None or len(samples) != len(returns):
                raise Refused(f"returns of step {at.step}", why=f"no {len(returns)} values were asked for from {first}")
            found = [np.frombuffer(one, np.float32) if one else None for one in returns]
            for sample, one in zip(samples, found, strict=True):
                if one is not None and len(one) != len(sample.tokens):
                    raise Refused(f"returns of step {at.step}", why=f"{len(one)} for {len(sample.tokens)} tokens")
            self._returns[first] = found

        await self._alone(work)

    async def learn(self, at: TrainingPosition) -> CriticReport:
        """Take the step's updates."""

        def work() -> CriticReport:
            if self._last is not None and self._at == TrainingPosition(at.epoch, at.step + 1):
                # Sent again: it is done.
                return self._last
            self._check(at)
            if self._returns.keys() != self._samples.keys():
                raise Refused(
                    f"step {at.step + 1} of the critic", why="values were asked for, and not all have returns"
                )
            chosen = [
                (sample, old, one)
                for first, samples in sorted(self._samples.items())
                for sample, old, one in zip(samples, self._old[first], self._returns[first], strict=True)
                if one is not None
            ]
            report = self._model.learn([c[0] for c in chosen], [c[1] for c in chosen], [c[2] for c in chosen])
            self._at, self._last = TrainingPosition(at.epoch, at.step + 1), report
            self._clear()
            self._report(at.step + 1, report)
            return report

        return await self._alone(work)

    async def snapshot(self, at: TrainingPosition) -> None:
        """Copy the state aside."""

        def work() -> None:
            self._check(at)
            self._model.snapshot()
            self._snapshot_of = at

        await self._alone(work)

    async def write(self, at: TrainingPosition, folder: str) -> None:
        """Write the snapshot of that step."""

        def work() -> None:
            if self._snapshot_of != at:
                raise Refused(f"writing the critic of step {at.step}", why="no snapshot was taken there")
            self._model.write(Path(folder))

        # Beside other calls: it reads only what `snapshot` has set aside.
        await _to_its_end(self._writing, lambda: asyncio.to_thread(work))

    def _clear(self) -> None:
        self._samples, self._old, self._returns = {}, {}, {}

    def _fence(self, at: TrainingPosition) -> None:
        if at.epoch < self._at.epoch:
            raise StaleEpoch("critic", why=f"trainer epoch {self._at.epoch} has begun, this is {at.epoch}")

    def _check(self, at: TrainingPosition) -> None:
        self._fence(at)
        if self._at != at:
            here = f"step {self._at.step} of trainer epoch {self._at.epoch}" if self._at.epoch else "no step: it is new"
            raise Refused(
                "critic",
                why=f"it is at {here}, and the trainer at step {at.step} of epoch {at.epoch}",
                hint="both go back to the last checkpoint",
            )


async def _to_its_end(lock: asyncio.Lock, work: Callable[[], Awaitable[T]]) -> T:
    """Do something with a lock held. A thread cannot be cancelled: when the caller is, the lock stays with the work,
    and the same call sent again finds it done."""
    await lock.acquire()

    async def held() -> T:
        try:
            return await work()
        finally:
            lock.release()

    task = asyncio.get_running_loop().create_task(held())
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise


def _sample(piece: CriticSample, number: int) -> Sample:
    """What packing reads of a sample."""
    tokens = np.frombuffer(piece.tokens, np.int32)
    mask = np.frombuffer(piece.mask, np.uint8)
    if len(tokens) != len(mask):
        raise Refused(f"sample {number} for the critic", why=f"{len(tokens)} tokens and a mask of {len(mask)}")
    ends = [0, *(end for _, end in piece.branches)]
    if piece.branches and ([start for start, _ in piece.branches] != ends[:-1] or ends[-1] != len(tokens)):
        raise Refused(f"sample {number} for the critic", why=f"its branches {piece.branches[:16]} are not its tokens")
    meta = msgspec.structs.replace(bare_meta(piece.group, number), branches=piece.branches)
    return Sample(
        meta=meta, tokens=tokens, loss_mask=mask, behaviour_logprobs=np.zeros(len(tokens), np.float32), versions=[]
    )
