"""One optimizer step: its groups are taken from the queue, and their gradients accumulated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from relax_rt.roles.base.sample import Sample, content_digest, read_sample
from relax_rt.roles.training.algorithms.own import OwnPartFailed
from relax_rt.roles.training.algorithms.tensors import Metrics
from relax_rt.transport.rpc.errors import RelaxError

if TYPE_CHECKING:
    from relax_rt.interfaces.role import Progress
    from relax_rt.roles.training.algorithms.objective import Objective
    from relax_rt.roles.training.base import TrainerBackend
    from relax_rt.roles.training.sieve import Sieve
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
        full: no more are waited for.
        leases: what they were taken under; the step finishes them together.
        leased, samples: the same samples, as they were leased and as they were read. digests: of what was read.
        groups: how many there are.
        accumulated: so many samples, from the first on, have had their gradients computed, in so many parts.
        count: what the gradients so far are to be divided by.
        scored: groups that came, also those that filters left out. filtered: groups left out, by filter.
        beside: what compares the policies over tokens without gradients (`mismatch.beside_gradients`).
        left_out_tokens: whose advantage the loss took away before the update.
        refused_tokens: of samples that the queue refused as over-stale since the step before.
        spent: on `wait`, `train` and `publish`. held_s: how long the update waited for the weights to be copied.
    """

    spent: Spent = field(default_factory=Spent)
    full: bool = False
    leases: list[LeasedBatch] = field(default_factory=list)
    leased: list[LeasedSample] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    groups: int = 0
    accumulated: int = 0
    parts: int = 0
    count: float = 0.0
    scored: int = 0
    filtered: dict[str, int] = field(default_factory=dict)
    beside: Metrics = field(default_factory=dict)
    left_out_tokens: int = 0
    refused_tokens: int = 0
    held_s: float = 0.0

    def add(self, lease: LeasedBatch, samples: list[Sample]) -> None:
        """Further groups: those of a lease, with its samples as they were read."""
        self.leases.append(lease)
        self.leased += lease.samples
        self.samples += samples
        self.digests += [content_digest(sample) for sample in samples]
        self.groups += len(lease.groups())

    def waiting_tokens(self) -> int:
        """Tokens whose gradients are not there yet; those of a common prompt count once."""
        prompts = {(s.meta.group, s.prompt_length) for s in self.samples[self.accumulated :]}
        own = sum(len(s.tokens) - s.prompt_length for s in self.samples[self.accumulated :])
        return own + sum(length for _, length in prompts)


class Collector:
    """Takes the groups of one step after the other.

    Args:
        groups: of a step.
        parts: take groups as they become ready, instead of all of a step at once.
        sieve: judges them as they come; goes with `parts`.
    """

    def __init__(
        self,
        queue: QueueClient,
        progress: Progress,
        *,
        groups: int,
        parts: bool = False,
        sieve: Sieve | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue, self._progress, self._groups, self._clock = queue, progress, groups, clock
        self._parts, self.sieve = parts or sieve is not None, sieve
        self._batch: Batch | None = None
        self.waiting_on = ""
        """What the last call waited for when it timed out."""

    async def collect(self, step: int) -> Batch | None:
        """Take what is ready of a step's groups; None if nothing is. Waits for a second at most.

        Returns:
            All that the step has so far; when it is full, the next call begins another one.

        Raises:
            OwnPartFailed: a filter of a user's own failed; what it was to judge is given back.
        """
        if self._batch is None:
            # A wait may take many calls; it counts from the first of them.
            self._batch = Batch(Spent(self._clock))
            if self.sieve is not None:
                await self.sieve.begin()
        batch = self._batch
        lacking = self._groups - batch.groups
        lease = await self._queue.take("train", groups=lacking, at_least=int(self._parts), wait_s=TAKE_WAIT_S)
        if not lease:
            there = f"{batch.groups} of {self._groups} groups are there; " if batch.groups else ""
            self.waiting_on = there + (lease.waiting_on or "whole groups with rewards")
            self._progress.waiting(self.waiting_on)
            return None
        self._progress.waiting("")
        batch.spent.on("wait")
        if self.sieve is None:
            batch.add(lease, [read_sample(one) for one in lease.samples])
        else:
            try:
                await self.sieve.sift(lease, batch, step)
            except OwnPartFailed:
                await self._queue.abandon(lease, "a filter failed")
                raise
        batch.full = batch.full or batch.groups >= self._groups
        if batch.full:
            self._batch = None
        return batch

    async def give_up(self, reason: str) -> None:
        """Give back what was taken for a step that will not be taken. Raises as `give_back` does."""
        await give_back(self._queue, self.let_go(), reason)

    def let_go(self) -> list[LeasedBatch]:
        """The leases of a step that will not be taken; whoever asks gives them back."""
        batch, self._batch = self._batch, None
        return batch.leases if batch is not None else []


async def give_back(queue: QueueClient, leases: Sequence[LeasedBatch], reason: str) -> None:
    """Give leases back undone: each of them, though others fail.

    Raises:
        RelaxError: the first failure, when all have been tried.
    """
    failures = list[RelaxError]()
    for lease in leases:
        try:
            await queue.abandon(lease, reason)
        except RelaxError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def accumulate(batch: Batch, backend: TrainerBackend, objective: Objective, version: int) -> None:
    """Forward and backward of those samples of a batch whose gradients are not there yet. Blocks.

    Args:
        batch: all groups of the step, unless the objective streams.
        version: the published one that the step, or the first of its publication, begins with.
    """
    samples = batch.samples[batch.accumulated :]
    if "proximal" in objective.needs:
        set_proximal(samples, backend, version, wanted=objective.proximal_first)
    batch.left_out_tokens += objective.advantages(samples)
    batch.count += backend.accumulate(samples).count
    batch.accumulated = len(batch.samples)
    batch.parts += 1


def set_proximal(samples: Sequence[Sample], backend: TrainerBackend, version: int, *, wanted: bool = True) -> None:
    """Give samples the proximal log-probabilities of the backend's weights, or none. Blocks.

    What was computed under another version, by an engine or for an earlier publication, has lapsed; what is of this
    one stays. So whoever takes several updates to a publication (`take_updates`) calls this before the first, with the
    samples of all: each update is then compared with the weights before the first. For a single update the pass that
    computes gradients finds them itself (`Objective.proximal_first`).

    Args:
        version: of the weights, as they were published. wanted: compute those that are not there.
    """
    for sample in samples:
        if sample.proximal_version != version:
            sample.proximal_logprobs = sample.proximal_version = None
    if wanted and any(sample.proximal_logprobs is None for sample in samples):
        for sample, values in zip(samples, backend.log_probabilities(samples), strict=True):
            sample.proximal_logprobs, sample.proximal_version = values, version
