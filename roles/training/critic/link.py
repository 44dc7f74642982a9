"""The trainer's side of the critic."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.sample import Sample
from relax_rt.roles.training.critic.api import CRITIC_SLOT, CriticApi, Piece, Place
from relax_rt.transport.rpc.errors import GivenUp, ProtocolError

CALL_S = 900.0
SCRATCH = "critic"
"""Folder of the run where the critic writes what goes into a checkpoint."""
SKIPPED_IN_A_ROW = 5
"""Of its steps one after the other, thrown away or with an update that was, before the run ends; as of the policy."""
PIECE_BYTES = 8 << 20
"""Of tokens and masks in one call; an answer has about as many."""


class CriticLink:
    """Takes the critic along with the trainer: to a checkpoint, through each step, into the next checkpoint.

    Raises (all methods):
        Refused: the critic is at another place, because it was started again: end, and begin at a checkpoint.
    """

    def __init__(self, ctx: RoleContext) -> None:
        self._ctx, self._epoch = ctx, ctx.who.epoch
        self._scratch = ctx.run_dir / SCRATCH
        self._skipped = 0

    @asynccontextmanager
    async def _waiting(self, what: str) -> AsyncIterator[CriticApi]:
        """The critic, while nothing else is done here."""
        api = await self._api()
        self._ctx.progress.waiting(f"the critic: {what}")
        try:
            yield api
        finally:
            self._ctx.progress.waiting("")

    async def _api(self) -> CriticApi:
        return await self._ctx.peer(CRITIC_SLOT, CriticApi, timeout_s=CALL_S)

    async def begin(self, step: int, folder: Path | None) -> None:
        """Both start from this checkpoint, or from the beginning.

        Raises:
            Refused: the checkpoint does not hold the critic's state.
        """
        async with self._waiting("its state") as api:
            await api.begin(Place(self._epoch, step), str(folder) if folder is not None else "")

    async def judge(self, samples: Sequence[Sample], step: int) -> None:
        """Give each sample its values, float32 [T], of the critic at this step."""
        async with self._waiting("values") as api:
            for first, part in _parts(samples):
                found = await api.values(Place(self._epoch, step), first, [_piece(sample) for sample in part])
                for sample, raw in zip(part, found, strict=True):
                    values = np.frombuffer(raw, np.float32)
                    if len(values) != len(sample.tokens):
                        raise ProtocolError("critic", why=f"{len(values)} values for {len(sample.tokens)} tokens")
                    sample.values = values

    async def learn(self, samples: Sequence[Sample], returns: Sequence[NDArray[np.float32] | None], step: int) -> None:
        """Have the critic learn what was judged at this step; it is at the next one then.

        Args:
            samples: as they were judged. returns: float32 [T] each; None: not to be learnt from.

        Raises:
            GivenUp: too many of its steps in a row had a loss or gradient that is not finite.
        """
        at = Place(self._epoch, step)
        async with self._waiting("its step") as api:
            for first, part in _parts(samples):
                raw = [b"" if one is None else one.tobytes() for one in returns[first : first + len(part)]]
                await api.returns(at, first, raw)
            report = await api.learn(at)
        self._skipped = self._skipped + 1 if report.thrown_away else 0
        if self._skipped >= SKIPPED_IN_A_ROW:
            which = "had an update that was thrown away" if report.applied else "were thrown away"
            why = f"a loss or gradient is not finite; of the last step: {report.loss} and {report.grad_norm}"
            hint = "lower roles.critic.learning_rate; `relax-rt up` goes on from a checkpoint"
            raise GivenUp(f"{self._skipped} steps of the critic in a row {which}", why=why, hint=hint)

    async def snapshot(self, step: int) -> None:
        """Copy its state aside, for the checkpoint of this step."""
        async with self._waiting("a copy of its state") as api:
            await api.snapshot(Place(self._epoch, step))

    async def written(self, step: int) -> CriticFiles:
        """Its snapshot of this step, on disk. Training may go on meanwhile."""
        folder = self._scratch / f"step-{step:06d}-{self._epoch}"
        shutil.rmtree(self._scratch, ignore_errors=True)
        folder.mkdir(parents=True)
        await (await self._api()).write(Place(self._epoch, step), str(folder))
        return CriticFiles(folder)


class CriticFiles:
    """Files of a snapshot, in a folder of the run's own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def move(self, into: Path) -> None:
        """Into a checkpoint that is being made, on the same file system."""
        for path in self._folder.iterdir():
            path.rename(into / path.name)
        shutil.rmtree(self._folder)


def _piece(sample: Sample) -> Piece:
    tokens = np.ascontiguousarray(sample.tokens, np.int32).tobytes()
    mask = np.ascontiguousarray(sample.loss_mask, np.uint8).tobytes()
    return Piece(sample.meta.group, tokens, mask, sample.meta.branches)


def _parts(samples: Sequence[Sample]) -> Iterator[tuple[int, Sequence[Sample]]]:
    """Samples that go together in one call, with the number of the first of them."""
    first, size = 0, 0
    for index, sample in enumerate(samples):
        nbytes = 5 * len(sample.tokens)
        if size and size + nbytes > PIECE_BYTES:
            yield first, samples[first:index]
            first, size = index, 0
        size += nbytes
    if first < len(samples):
        yield first, samples[first:]
