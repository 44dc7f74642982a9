"""Interface of the TransferQueue broker: the messages between a producer or consumer and the ledger."""

from __future__ import annotations

from typing import Protocol

import msgspec

from relax_rt.transport.identity import Incarnation
from relax_rt.transport.interface import idempotent
from relax_rt.transport.versions import VersionRecord


class SampleKey(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Names a sample: its group and its place in it. Group ids are issued by the ledger and never reused."""

    group: int
    member: int

    def __str__(self) -> str:
        return f"{self.group}.{self.member}"


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a sample's completion were sampled with `version`.

    kv_version is the oldest version in the KV cache they were sampled on (equal to version unless weights were
    swapped under a kept cache: then no single version reproduces their log-probability).
    """

    start: int
    end: int
    version: int
    kv_version: int


class Column(msgspec.Struct, frozen=True, array_like=True):
    """Where one column of one sample lies: in a slab of shared memory, or in this message when it is tiny.

    dtype is a numpy dtype string (``<i4``), or ``bf16``, ``str`` (UTF-8), ``bytes``, ``msgpack``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    slab: str = ""
    offset: int = 0
    nbytes: int = 0
    inline: bytes = b""


class Ticket(msgspec.Struct, frozen=True):
    """The right to generate one group, held until its lease lapses.

    Attributes:
        group: id of the group.
        prompt: index in the run's prompt order, which derives from (run seed, index) alone.
        attempt: 0, or how often this prompt was given out before (after a refusal, loss or lapse).
        size: members to generate.
        version: the newest policy version that the ledger knew when it admitted the group.
        lease_s: length of the lease; renew it while the group is worked on.
    """

    group: int
    prompt: int
    attempt: int
    size: int
    version: int
    lease_s: float


class Admission(msgspec.Struct, frozen=True):
    """Tickets, or why there are none yet."""

    tickets: list[Ticket]
    waiting_on: str = ""


class SampleInfo(msgspec.Struct, frozen=True):
    """A leased sample: where its columns lie and what the ledger knows of it. staleness is -1 outside training."""

    key: SampleKey
    prompt: int
    attempt: int
    columns: list[Column]
    versions: list[VersionSpan]
    staleness: int = -1


class Batch(msgspec.Struct, frozen=True):
    """Samples leased together. lease is 0 and samples empty when nothing was ready in time: see waiting_on."""

    lease: int
    samples: list[SampleInfo]
    lease_s: float = 0.0
    waiting_on: str = ""


class Put(msgspec.Struct, frozen=True):
    """New columns for one sample. `versions` comes with the columns a producer puts first."""

    key: SampleKey
    columns: list[Column]
    versions: list[VersionSpan] = []


class Failure(msgspec.Struct, frozen=True):
    """A sample on which the work cannot succeed, and why."""

    key: SampleKey
    reason: str


class Freed(msgspec.Struct, frozen=True, array_like=True):
    """An extent of the caller's slab that no one reads any more."""

    slab: str
    offset: int
    nbytes: int


class QueueStats(msgspec.Struct, frozen=True):
    """Numbers of the queue for people and metrics; counts are samples unless named otherwise."""

    by_state: dict[str, int]
    outstanding: int
    bound: float
    trainer_version: int
    step: int
    payload_bytes: int
    journal_bytes: int
    prompts_issued: int
    prompts_returned: int
    refused_stale: int
    waiting: dict[str, str]


class QueueApi(Protocol):
    """The broker of the TransferQueue. Every call that changes the ledger is journaled before it is answered.

    `seq` is the caller's own sequence number for changing calls, growing by one: a repeated call (after a
    reconnect) gets the first answer again and changes nothing.
    """

    @idempotent
    async def admit(self, seq: int, engine_version: int, groups: int, wait_s: float) -> Admission:
        """Ask for up to `groups` new groups, waiting at most wait_s for the staleness bound to allow one."""

    @idempotent
    async def put(self, seq: int, puts: list[Put]) -> list[Freed]:
        """Put columns on samples of a group that the caller generates. Answers with its freed extents."""

    @idempotent
    async def give_back(self, seq: int, groups: list[int], reason: str) -> None:
        """A producer returns unfinished groups; their prompts are given out again."""

    @idempotent
    async def renew(self, groups: list[int], leases: list[int]) -> list[int]:
        """Renew the caller's group tickets and consumer leases; answers with the ids that are no longer its own."""

    @idempotent
    async def take(self, seq: int, task: str, samples: int, groups: int, wait_s: float) -> Batch:
        """Lease ready samples for a task: up to `samples`, or exactly `groups` whole groups when groups > 0."""

    @idempotent
    async def complete(self, seq: int, task: str, lease: int, puts: list[Put], failures: list[Failure]) -> list[Freed]:
        """Finish a lease: new columns for its samples, and those that failed. Releases the lease's pins."""

    @idempotent
    async def abandon(self, seq: int, lease: int, reason: str) -> None:
        """Give a lease back undone; its samples are offered again."""

    @idempotent
    async def trained(self, seq: int, lease: int, step: int, weights: VersionRecord) -> None:
        """The optimizer step over the lease's samples is done; the trainer's weights are now `weights`."""

    @idempotent
    async def committed(self, seq: int, step: int, checkpoint: str) -> None:
        """A checkpoint that covers all steps up to `step` was renamed into place; their samples are freed."""

    @idempotent
    async def rollback(self, seq: int, step: int, weights: VersionRecord) -> None:
        """The trainer (re)starts from the checkpoint of `step` (0: none) with weights published as `weights`.

        Samples trained after that step are offered again if still admissible, else their prompts return.
        """

    @idempotent
    async def gone(self, seq: int, who: Incarnation, reason: str) -> None:
        """Told by the agent: this process has ended; its leases lapse at once and its pins are released."""

    @idempotent
    async def stats(self) -> QueueStats:
        """Numbers for people and metrics."""

    @idempotent
    async def account(self) -> dict[str, int]:
        """The ledger's account: for each state the number of samples since the run began, and duplicates (0)."""
