"""The interface of the critic role, and the trainer's client of it.

Trainer and critic are one training: each call names the trainer's incarnation and its step, and a critic that is at
another position refuses it. So a policy is never trained with the values of a critic that lost, or is ahead of, one of
its steps.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.sample import Sample
from relax_rt.transport.rpc.errors import GivenUp, ProtocolError
from relax_rt.transport.rpc.interface import idempotent

CRITIC_SLOT = "critic/0"


class CriticSample(msgspec.Struct, frozen=True, array_like=True):
    """A sample as the critic sees it: tokens int32 [T], mask uint8 [T], as bytes; and the number of its group.

    branches: tokens [start, end) of each, one behind the other, if there are several: none sees what lies before it.
    """

    group: int
    tokens: bytes
    mask: bytes
    branches: list[tuple[int, int]] = []


class TrainingPosition(msgspec.Struct, frozen=True, array_like=True):
    """Where a training is: the trainer's epoch, and the steps it has done."""

    epoch: int
    step: int


class CriticReport(msgspec.Struct, frozen=True):
    """One step of the critic, which has as many updates as the policy's.

    Attributes:
        applied: False when it was skipped (a loss or gradient that is not finite); of several updates, when all
            were. updates_skipped: how many were.
        loss: mean over the trained tokens. grad_norm: before clipping; the mean of the updates that were taken.
        value, returned: mean value before the step, and mean return. clipped: share of tokens whose gradient the
            clip stopped.
        explained: 1 - var(return - value) / var(return), of the values before the step.
    """

    applied: bool
    tokens: int
    loss: float
    grad_norm: float
    value: float
    returned: float
    clipped: float
    explained: float
    updates_skipped: int = 0


class CriticApi(Protocol):
    """Every call may be sent twice. In the order of a step: values, returns, learn.

    Raises:
        StaleEpoch: a newer trainer has begun.
        Refused: the critic is not at the caller's place; go back to a checkpoint and `begin`.
    """

    @idempotent
    async def begin(self, at: TrainingPosition, folder: str) -> None:
        """Start from a checkpoint's folder, or from the model's own weights if it is empty.

        Raises:
            Refused: the folder does not hold the critic's state.
        """

    @idempotent
    async def values(self, at: TrainingPosition, first: int, pieces: list[CriticSample]) -> list[bytes]:
        """Values of these samples of the step, of which `first` is the number of the first one; float32 [T] each.

        The value of a token is that of the state before it; tokens under mask 0 have 0.
        """

    @idempotent
    async def returns(self, at: TrainingPosition, first: int, returns: list[bytes]) -> None:
        """What those values should have been, float32 [T]; empty: the sample is not learnt from."""

    @idempotent
    async def learn(self, at: TrainingPosition) -> CriticReport:
        """Take the updates of a step on what `values` and `returns` gave; the critic is at the next step then."""

    @idempotent
    async def snapshot(self, at: TrainingPosition) -> None:
        """Copy the state aside."""

    @idempotent
    async def write(self, at: TrainingPosition, folder: str) -> None:
        """Write the snapshot of that step into a folder."""


CALL_S = 900.0
SCRATCH = "critic"
"""Folder of the run where the critic writes its part of a checkpoint."""
SKIPPED_IN_A_ROW = 5
"""Consecutive steps of the critic that were skipped, or one of whose updates was, before the run ends."""
CALL_BYTES = 8 << 20
"""Bytes of tokens and masks in one call; a reply has about as many."""


class CriticClient:
    """The trainer's side of the critic: resumes it, computes values, has it learn, and saves it with each checkpoint.

    Raises (all methods):
        Refused: the critic is at another position, because it was restarted: end, and resume from a checkpoint.
    """

    def __init__(self, ctx: RoleContext) -> None:
        self._ctx, self._epoch = ctx, ctx.who.epoch
        self._scratch = ctx.run_dir / SCRATCH
        self._skipped = 0

    @asynccontextmanager
    async def _waiting(self, what: str) -> AsyncIterator[CriticApi]:
        """Yield the critic's API; the wait for it is visible in the role's progress."""
        api = await self._api()
        self._ctx.progress.waiting(f"the critic: {what}")
        try:
            yield api
        finally:
            self._ctx.progress.waiting("")

    async def _api(self) -> CriticApi:
        return await self._ctx.peer(CRITIC_SLOT, CriticApi, timeout_s=CALL_S)

    async def begin(self, step: int, folder: Path | None) -> None:
        """Start the critic from this checkpoint, or from the model's own weights.

        Raises:
            Refused: the checkpoint does not hold the critic's state.
        """
        async with self._waiting("its state") as api:
            await api.begin(TrainingPosition(self._epoch, step), str(folder) if folder is not None else "")

    async def compute_values(self, samples: Sequence[Sample], step: int) -> None:
        """Set each sample's `values`, float32 [T], of the critic at this step."""
        async with self._waiting("values") as api:
            for first, part in _parts(samples):
                found = await api.values(
                    TrainingPosition(self._epoch, step), first, [_piece(sample) for sample in part]
                )
                for sample, raw in zip(part, found, strict=True):
                    values = np.frombuffer(raw, np.float32)
                    if len(values) != len(sample.tokens):
                        raise ProtocolError("critic", why=f"{len(values)} values for {len(sample.tokens)} tokens")
                    sample.values = values

    async def learn(self, samples: Sequence[Sample], returns: Sequence[NDArray[np.float32] | None], step: int) -> None:
        """Have the critic learn from the samples of this step's `compute_values`; afterwards it is at the next step.

        Args:
            samples: the same samples. returns: float32 [T] each; None: not to be learnt from.

        Raises:
            GivenUp: too many of its steps in a row had a loss or gradient that is not finite.
        """
        at = TrainingPosition(self._epoch, step)
        async with self._waiting("its step") as api:
            for first, part in _parts(samples):
                raw = [b"" if one is None else one.tobytes() for one in returns[first : first + len(part)]]
                await api.returns(at, first, raw)
            report = await api.learn(at)
        self._skipped = self._skipped + 1 if report.updates_skipped else 0
        if self._skipped >= SKIPPED_IN_A_ROW:
            which = "had a skipped update" if report.applied else "were skipped"
            why = f"a loss or gradient is not finite; of the last step: {report.loss} and {report.grad_norm}"
            hint = "lower roles.critic.learning_rate; `relax-rt up` resumes from a checkpoint"
            raise GivenUp(f"{self._skipped} steps of the critic in a row {which}", why=why, hint=hint)

    async def snapshot(self, step: int) -> None:
        """Have the critic copy its state aside, for the checkpoint of this step."""
        async with self._waiting("a copy of its state") as api:
            await api.snapshot(TrainingPosition(self._epoch, step))

    async def write(self, step: int) -> Path:
        """Have the critic write its snapshot of this step into a scratch folder of the run; training may continue
        meanwhile. The checkpoint that it belongs to takes the files over."""
        folder = self._scratch / f"step-{step:06d}-{self._epoch}"
        shutil.rmtree(self._scratch, ignore_errors=True)
        folder.mkdir(parents=True)
        await (await self._api()).write(TrainingPosition(self._epoch, step), str(folder))
        return folder


def _piece(sample: Sample) -> CriticSample:
    tokens = np.ascontiguousarray(sample.tokens, np.int32).tobytes()
    mask = np.ascontiguousarray(sample.loss_mask, np.uint8).tobytes()
    return CriticSample(sample.meta.group, tokens, mask, sample.meta.branches)


def _parts(samples: Sequence[Sample]) -> Iterator[tuple[int, Sequence[Sample]]]:
    """Yield the samples of one call each, with the number of the first of them."""
    first, size = 0, 0
    for index, sample in enumerate(samples):
        nbytes = 5 * len(sample.tokens)
        if size and size + nbytes > CALL_BYTES:
            yield first, samples[first:index]
            first, size = index, 0
        size += nbytes
    if first < len(samples):
        yield first, samples[first:]
