"""Samples of a lease that the replicas of a gang share: the payload of each goes to the replica that trains on it.

A gang on one node sends whole samples from rank 0 to the others with each command. Over several nodes that would bring
all payload to rank 0's node and from there to every other. Instead rank 0 leases, and `assign_replicas` divides the
samples; each rank reads its share out of the queue's memory, fetching what lies on other nodes (`LeaseReader`), and
tells rank 0 what it needs of a sample to decide on it (`SampleSummary`). From then on commands name samples, and carry
only the columns that rank 0 computes, as advantages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from relax_rt.roles.base.role import FETCH_S
from relax_rt.roles.base.sample import Sample, SampleMeta, bare_meta, content_digest, read_sample
from relax_rt.roles.training.batch.rows import mini_batches
from relax_rt.transport.memory.arena import ArenaReader
from relax_rt.transport.memory.payload_fetcher import Fetcher
from relax_rt.transport.memory.refs import Extent, owner_of
from relax_rt.transport.queue.batch import LeasedBatch, LeasedSample, extents_of
from relax_rt.transport.queue.ledger.messages import LeaseGrant


class SharedSample(Sample, kw_only=True):
    """A sample whose tokens one replica has.

    On the ranks of the other replicas `tokens` and `behaviour_logprobs` have the right length and are 0; the latter,
    and `reference_logprobs`, come with the log-probabilities of the sample (`Leader.log_probabilities`).

    Attributes:
        replica: who has the tokens. digest: `content_digest` of them.
        sampled_logprob: sum of the behaviour log-probabilities of its trained tokens.
    """

    replica: int
    digest: str = ""
    sampled_logprob: float = 0.0


class SampleSummary(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 gets of a sample that another replica reads: all of it but the columns that have a value a token.

    `mask` is the loss mask, run-length encoded.
    """

    meta: SampleMeta
    mask: bytes
    reward: float | None
    rewards: dict[str, float]
    turn_rewards: list[float] | None
    digest: str
    sampled_logprob: float


class ShareReport(msgspec.Struct, frozen=True):
    """How a rank's reading of its share ended.

    Attributes:
        received: bytes that came from other nodes.
        failed, again: why it could not read it, and whether another try may succeed.
    """

    node: str
    received: int = 0
    samples: list[SampleSummary] = []
    failed: str = ""
    again: bool = False


class LeaseReader:
    """Reads parts of a lease that another process holds. Calls block.

    Args:
        node: name of this node.
        locate: gives the payload servers of slab owners whose memory this process does not share.
        payload_dir, spill_dir: where payload lies on this node.
        fetcher: gets payload of other nodes; None: there are none.
    """

    def __init__(
        self,
        node: str,
        locate: Callable[[list[str]], dict[str, str]],
        payload_dir: Path,
        spill_dir: Path | None = None,
        fetcher: Fetcher | None = None,
    ) -> None:
        self.node, self._locate, self._fetcher = node, locate, fetcher
        self._reader = ArenaReader(payload_dir, spill_dir, source=fetcher.memory if fetcher is not None else None)

    def read(self, part: LeaseGrant) -> tuple[list[Sample], int]:
        """Copy samples out of the queue's memory; also returns the bytes that came from other nodes for them.

        They are copies, so that the lease need not outlive this call: rank 0 may complete or release it without asking
        the other ranks whether they still read. It costs each rank one copy of its share.

        Raises:
            Gone, Unreachable, DeadlineExceeded, Corrupt, OutOfSpace: see Fetcher.
        """
        if not part.samples:
            return [], 0
        extents = list(dict.fromkeys(extents_of(part)))
        remote = self._locate(sorted({owner_of(extent.slab) for extent in extents})) if self._fetcher else {}
        wanted: dict[str, list[Extent]] = {}
        for extent in extents:
            if address := remote.get(owner_of(extent.slab)):
                wanted.setdefault(address, []).append(extent)
        try:
            if self._fetcher is not None:
                pending = [
                    self._fetcher.submit(address, some, lease=part.lease, deadline_s=FETCH_S)
                    for address, some in wanted.items()
                ]
                for one in pending:
                    one.result()
            batch = LeasedBatch("train", part, self._reader.block)
            samples = [_copied(read_sample(leased)) for leased in batch.samples]
            batch.finish()
        finally:
            if self._fetcher is not None:
                self._fetcher.release(part.lease)
        return samples, sum(extent.nbytes for some in wanted.values() for extent in some)


def _copied(sample: Sample) -> Sample:
    """Copy the columns that passes read. Proximal log-probabilities of a queue have lapsed: they name no version."""
    columns = {
        name: np.array(values)
        for name in ("tokens", "loss_mask", "behaviour_logprobs", "reference_logprobs", "turn_rewards")
        if (values := getattr(sample, name)) is not None
    }
    return replace(sample, **columns, proximal_logprobs=None, routing=None, media=None)


def assign_replicas(samples: Sequence[LeasedSample], replicas: int, *, whole_groups: bool, updates: int) -> list[int]:
    """Assign each sample to a replica, so that all get about as many tokens of every update.

    Groups stay together where there are enough of them: their samples share a prompt, and often a block of memory.

    Args:
        whole_groups: they must. updates: of the step that these samples are all of, or a part of.
    """
    found = [0] * len(samples)
    groups = [sample.key.group for sample in samples]
    for places in mini_batches(groups, updates):
        whole = whole_groups or len({groups[place] for place in places}) >= replicas
        units: dict[int, list[int]] = {}
        for place in places:
            units.setdefault(groups[place] if whole else place, []).append(place)
        sizes = {unit: sum(max(samples[place].length, 1) for place in members) for unit, members in units.items()}
        loads = [0] * replicas
        for unit in sorted(units, key=lambda one: (-sizes[one], units[one][0])):
            replica = loads.index(min(loads))
            loads[replica] += sizes[unit]
            for place in units[unit]:
                found[place] = replica
    return found


def shared(sample: Sample, replica: int) -> SharedSample:
    """Return the sample as its replica has it."""
    trained = sample.behaviour_logprobs[1:][sample.loss_mask[1:] != 0]
    return SharedSample(
        **{name: getattr(sample, name) for name in Sample.__struct_fields__},
        replica=replica,
        digest=content_digest(sample),
        sampled_logprob=float(trained.sum(dtype=np.float64)),
    )


def summarise(sample: SharedSample) -> SampleSummary:
    """Return what rank 0 needs of a sample."""
    return SampleSummary(
        meta=sample.meta,
        mask=encode_runs(sample.loss_mask),
        reward=sample.reward,
        rewards=sample.rewards,
        turn_rewards=None if sample.turn_rewards is None else sample.turn_rewards.tolist(),
        digest=sample.digest,
        sampled_logprob=sample.sampled_logprob,
    )


def from_summary(summary: SampleSummary, leased: LeasedSample, replica: int) -> SharedSample:
    """Return the sample as the ranks of other replicas have it."""
    mask = decode_runs(summary.mask, np.dtype(np.uint8))
    return SharedSample(
        meta=summary.meta,
        # Zeros of any length in four bytes: nothing reads them.
        tokens=np.broadcast_to(np.zeros((), np.int32), mask.shape),
        loss_mask=mask,
        behaviour_logprobs=np.broadcast_to(np.zeros((), np.float32), mask.shape),
        versions=leased.versions,
        reward=summary.reward,
        rewards=summary.rewards,
        turn_rewards=None if summary.turn_rewards is None else np.array(summary.turn_rewards, np.float32),
        replica=replica,
        digest=summary.digest,
        sampled_logprob=summary.sampled_logprob,
    )


def stand_in(group: int, member: int, replica: int) -> SharedSample:
    """Return what a rank that has nothing of a sample takes in its place: only `replica` is read of it."""
    nothing = np.zeros(0, np.float32)
    return SharedSample(
        meta=bare_meta(group, member),
        tokens=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, np.uint8),
        behaviour_logprobs=nothing,
        versions=[],
        replica=replica,
    )


def encode_runs(values: NDArray[np.generic]) -> bytes:
    """Encode an array [T] as runs of equal values: their number, lengths and values. Masks and the advantages of group
    baselines have few of them."""
    bits = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")
    starts = np.concatenate(([0], np.flatnonzero(bits[1:] != bits[:-1]) + 1)) if len(bits) else np.zeros(0, np.int64)
    lengths = np.diff(np.concatenate((starts, [len(bits)]))).astype(np.int32)
    return np.int32(len(starts)).tobytes() + lengths.tobytes() + bits[starts].tobytes()


def decode_runs(data: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Decode what `encode_runs` made of an array of this dtype."""
    count = int(np.frombuffer(data, np.int32, 1)[0])
    lengths = np.frombuffer(data, np.int32, count, 4)
    return np.repeat(np.frombuffer(data, dtype, count, 4 + 4 * count), lengths)
