"""One optimizer step: its groups are taken from the queue, and their gradients accumulated."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from relax_rt.roles.columns import read_sample
from relax_rt.roles.sample import Sample, content_digest

if TYPE_CHECKING:
    from relax_rt.role import Progress
    from relax_rt.roles.algorithms.objective import Objective
    from relax_rt.roles.trainers.base import TrainerBackend
    from relax_rt.transport.queue.client import LeasedBatch, LeasedSample, QueueClient

TAKE_WAIT_S = 1.0
"""Short, so that a request to stop is soon seen."""


class Spent:
    """Where the time of a step goes, without gaps, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.since = clock()
        self.seconds: dict[str, float] = {}

    def on(self, what: str) -> None:
        """The time since the last call, or the beginning, went into this."""
        now = self._clock()
        self.seconds[what] = self.seconds.get(what, 0.0) + now - self.since
        self.since = now

    def __getitem__(self, what: str) -> float:
        return self.seconds.get(what, 0.0)


@dataclass(slots=True, eq=False)
class Batch:
    """The groups of one step, as far as they are there.

    Attributes:
        leases: what they were taken under; the step finishes them together.
        leased, samples: the same samples, as they were leased and as they were read. digests: of what was read.
        accumulated: so many samples, from the first on, have their gradients in the backend.
        count: what the gradients so far are to be divided by.
        spent: on `wait`, `train` and `publish`. held_s: how long the update waited for the weights to be copied.
    """

    spent: Spent = field(default_factory=Spent)
    leases: list[LeasedBatch] = field(default_factory=list)
    leased: list[LeasedSample] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    accumulated: int = 0
    count: float = 0.0
    held_s: float = 0.0

    def add(self, lease: LeasedBatch) -> None:
        """Further groups."""
        leased = lease.samples
        samples = [read_sample(one) for one in leased]
        self.leases.append(lease)
        self.leased += leased
        self.samples += samples
        self.digests += [content_digest(sample) for sample in samples]


class Collector:
    """Takes the groups of one step after the other.

    Args:
        groups: of a step.
    """

    def __init__(
        self,
        queue: QueueClient,
        progress: Progress,
        *,
        groups: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue, self._progress, self._groups, self._clock = queue, progress, groups, clock
        self._batch: Batch | None = None

    async def collect(self) -> Batch | None:
        """Take what is ready of the step's groups; None until all of them are there. Waits for a second at most."""
        # A wait may take many calls; it counts from the first of them.
        batch = self._batch = self._batch or Batch(Spent(self._clock))
        lease = await self._queue.take("train", groups=self._groups, wait_s=TAKE_WAIT_S)
        if not lease:
            self._progress.waiting(lease.waiting_on or "whole groups with rewards")
            return None
        self._progress.waiting("")
        batch.spent.on("wait")
        batch.add(lease)
        self._batch = None
        return batch


def accumulate(batch: Batch, backend: TrainerBackend, objective: Objective, version: int) -> None:
    """Forward and backward of those samples of a batch whose gradients are not there yet. Blocks.

    Args:
        batch: all groups of the step, unless the objective streams.
        version: of the weights that the step begins with.
    """
    samples = batch.samples[batch.accumulated :]
    if "proximal" in objective.needs:
        # Of the weights that this step begins with: what an engine or an earlier step computed has lapsed.
        for sample, values in zip(samples, backend.log_probabilities(samples), strict=True):
            sample.proximal_logprobs, sample.proximal_version = values, version
    objective.advantages(samples)
    batch.count += backend.accumulate(samples).count
    batch.accumulated = len(batch.samples)
