"""What the naive model of the ledger holds, and what follows from it by counting: distances, memory, the bound."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from ledger_model_parts import Block, Group, Lease, Sample

from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.queue.ledger.messages import BlockPut
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits


class Holdings:
    def __init__(self, policy: LedgerPolicy, limits: QueueLimits) -> None:
        self.policy, self.limits = policy, limits
        self.parents: dict[int, tuple[int, bool]] = {}
        self.trainer: int | None = None
        self.groups: dict[int, Group] = {}
        self.trained: dict[int, Group] = {}
        self.reopened: list[int] = []
        self.leases: dict[int, Lease] = {}
        self.pinned: dict[int, Lease] = {}
        self.homes: dict[bytes, Extent] = {}
        self.waiting: dict[int, tuple[int, int, int, int]] = {}
        """Attempt, failures, item and losses, by place in the prompt order."""
        self.chosen: dict[int, int] = {}
        self.filtered: list[int] = []
        self.asked = 0
        self.cursor = 0
        self.retired: list[int] = []
        self.path: dict[int, list[tuple[Group, bool]]] = {}
        """Groups of each step, and whether it was skipped."""
        self.step = self.committed = self.since_update = self.issued = 0
        self.blocked: float | None = None
        self.ended: Counter[str] = Counter()
        self.lost_payloads: set[int] = set()

    # --- versions

    def ancestry(self, version: int) -> set[int]:
        found: set[int] = set()
        while version:
            found.add(version)
            version = self.parents[version][0]
        return found

    def distance(self, a: int, b: int) -> int:
        return sum(self.parents[version][1] for version in self.ancestry(a) ^ self.ancestry(b))

    def lag(self, version: int) -> int:
        assert self.trainer is not None
        return self.distance(self.trainer, version)

    def staleness(self, group: Group) -> int:
        if self.trainer is None:
            return 0
        members = [sample for _, sample in group.alive()]
        if self.policy.on_straggler == "mask" or group.recycled:
            return max((self.unmasked(sample) for sample in members if sample.versions), default=0)
        versions = {version for sample in members for version in sample.versions}
        versions |= {version for sample in members for _, version in sample.partial}
        if not all(sample.versions for sample in members):
            versions.add(group.base)
        return max(self.lag(version) for version in versions)

    def unmasked(self, sample: Sample) -> int:
        lags = [self.lag(version) for version in sample.versions]
        return max([lag for lag in lags if lag <= self.policy.max_staleness] or [min(lags)])

    # --- memory

    def all_samples(self) -> Iterable[Sample]:
        for group in [*self.groups.values(), *self.trained.values()]:
            yield from group.samples

    def blocks(self) -> set[Block]:
        """Blocks that somebody needs."""
        return {part.block for sample in self.all_samples() for part in sample.parts}

    def references(self) -> Counter[Extent]:
        blocks = self.blocks()
        named = {digest for block in blocks for digest in block.digests}
        found = Counter(block.extent for block in blocks if block.extent is not None)
        found.update(self.homes[digest] for digest in named)
        for lease in [*self.leases.values(), *self.pinned.values()]:
            found.update(lease.pins)
        return found

    def partials_bytes(self) -> int:
        return sum(sample.partial_bytes() for sample in self.all_samples())

    def payload_bytes(self) -> int:
        return sum(extent.nbytes for extent in self.references() if not extent.slab.startswith("spill"))

    def new_block(self, put: BlockPut) -> Block:
        named = {digest for block in self.blocks() for digest in block.digests}
        for blob in put.blobs:
            if blob.digest not in named:
                self.homes[blob.digest] = blob.extent
        return Block(put.block.extent, put.block.fields, [blob.digest for blob in put.blobs])

    def outstanding(self) -> int:
        return sum(len(group.alive()) for group in self.groups.values()) + self.since_update

    def bound(self, engine_version: int) -> float:
        return (self.policy.max_staleness + 1 - self.lag(engine_version)) * self.policy.batch_samples

    def surplus(self) -> int:
        return max(self.policy.over_provision, self.asked) * self.policy.group_size

    def beyond(self) -> int:
        """Groups beyond the bound."""
        over = self.outstanding() - (self.policy.max_staleness + 1) * self.policy.batch_samples
        return max(0, math.ceil(over / self.policy.group_size))
