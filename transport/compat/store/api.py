"""Interface of the store's broker: partitions of rows with named fields and tags."""

from __future__ import annotations

from typing import Annotated, Protocol

import msgspec

from relax_rt.transport.memory.refs import BlobRef, BlockRef, Count, Extent
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.interface import idempotent

MAX_ROWS = 1 << 20
"""Rows that one call may name."""
# The decoder checks these bounds.
RowCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_ROWS)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_ROWS)]

Tags = dict[str, bytes]
"""Tags of a row by name; the values are encoded by the client, and only samplers look into them."""


class StoreSampler(msgspec.Struct, frozen=True):
    """How `sample` chooses rows.

    Attributes:
        kind: ``sequential`` (oldest first), ``ranked`` (each batch of a rank is chosen once and given to all that ask
            for it), ``groups`` (whole runs of `group` rows that were put one after the other), ``balanced`` (groups,
            dealt to `ranks` ranks so that the sums of the tag ``total_lengths`` are alike).
    """

    kind: str = "sequential"
    group: Positive = 1
    ranks: Positive = 1


class StoreConfig(msgspec.Struct, frozen=True):
    """Set once, by whoever configures the store first.

    Attributes:
        expected: rows that a partition counts as coming from its beginning on, so that it is not taken for consumed
            before they are there.
        max_rows: of all partitions together; 0: no limit but memory.
        polling: clients do not wait for samples unless they ask to.
    """

    sampler: StoreSampler = StoreSampler()
    expected: RowCount = 1
    max_rows: Count = 0
    polling: bool = False


class RowNames(msgspec.Struct, frozen=True, array_like=True):
    """Names rows: by keys of a partition, by indexes (which are unique over all partitions), or a whole partition."""

    partition: str = ""
    keys: list[str] = []
    indexes: list[int] = []


class StoredRows(msgspec.Struct, frozen=True):
    """The rows of a put as they are now.

    Attributes:
        indexes: of the rows, in the order of the call.
        fields: that all of these rows have now, sorted.
        tags: of each row now.
        freed: extents that the caller may use again.
        waiting_on: why nothing was put yet.
    """

    indexes: list[int]
    fields: list[str]
    tags: list[Tags]
    freed: list[Extent] = []
    waiting_on: str = ""


class FoundRows(msgspec.Struct, frozen=True):
    """Rows that are there, in the order of the call.

    Attributes:
        keys: of each row; empty for one that was put without.
        partitions: of each row.
        fields: that all of these rows have, sorted.
        waiting_on: why a sampler gave nothing.
    """

    indexes: list[int] = []
    keys: list[str] = []
    partitions: list[str] = []
    fields: list[str] = []
    tags: list[Tags] = []
    waiting_on: str = ""


class BlockRows(msgspec.Struct, frozen=True, array_like=True):
    """`rows` rows of the answer lie in the same blocks, one after the other.

    parts: (index into the answer's blocks, first row there); of a field that several have, the last one counts.
    """

    rows: int
    parts: list[tuple[int, int]]


class FetchedRows(msgspec.Struct, frozen=True):
    """Where the fields of rows lie. What is not inline stays in place until the caller unpins `pin` or ends.

    Attributes:
        fields: those that were asked for and that all rows have, sorted.
    """

    indexes: list[int] = []
    fields: list[str] = []
    segments: list[BlockRows] = []
    blocks: list[BlockRef] = []
    blobs: list[BlobRef] = []
    pin: int = 0


class RowStatus(msgspec.Struct, frozen=True):
    """Flags of each row of a partition, in the order of indexes; rows that are expected only count as rows.

    known: whether the partition (and each of the fields) is there.
    """

    known: bool = False
    indexes: list[int] = []
    flags: list[list[bool]] = []


class StoreMembership(msgspec.Struct, frozen=True):
    """The answer to `join`: the name and epoch to call with, and where payloads lie."""

    who: Incarnation
    shm_dir: str
    spill_dir: str


class StoreApi(Protocol):
    """The store. A call with `seq` is journaled before it is answered.

    A repetition of a call, under the same number, gets the first one's answer and changes nothing. Numbers grow.
    """

    @idempotent
    async def join(self, name: str, node: str, pid: int) -> StoreMembership:
        """A process of the broker's node takes part under this name; the answer has the epoch to call with."""

    @idempotent
    async def configure(self, seq: Count, config: StoreConfig) -> StoreConfig:
        """Set the configuration if there is none yet; answers with the one in force."""

    @idempotent
    async def config(self) -> StoreConfig | None:
        """The configuration in force, if there is one."""

    @idempotent
    async def put(
        self,
        seq: Count,
        rows: RowNames,
        new: RowCount,
        block: BlockRef | None,
        blobs: list[BlobRef],
        tags: list[Tags],
        replace_tags: bool,
        wait_s: float,
    ) -> StoredRows:
        """Put the columns of a block, whose row i belongs to the i-th row named, and tags.

        Keys that are not there yet are made. new: that many rows without keys, instead of named ones.
        tags: one each, merged into the row's, or in their stead with replace_tags; empty: none.

        New rows, and the first columns of a row, wait at most wait_s for room; what comes to rows that have columns
        does not, as who waits for room waits for those who work on them.
        """

    @idempotent
    async def find(self, rows: RowNames) -> FoundRows:
        """The rows that are there."""

    @idempotent
    async def get(self, seq: Count, rows: RowNames, fields: list[str] | None) -> FetchedRows:
        """Pin the fields of the rows (None: all that every row has), and answer where they lie."""

    @idempotent
    async def unpin(self, seq: Count, pins: list[Count]) -> list[Extent]:
        """Release the caller's pins. Answers with its freed extents."""

    @idempotent
    async def clear(self, seq: Count, rows: RowNames) -> list[Extent]:
        """Remove rows; a whole partition if neither keys nor indexes are given. Answers with freed extents."""

    @idempotent
    async def list_keys(self, partition: str | None) -> dict[str, dict[str, Tags]]:
        """Keys and their tags by partition; rows without keys are left out."""

    @idempotent
    async def partitions(self) -> list[str]:
        """Names of the partitions, oldest first."""

    @idempotent
    async def sample(
        self,
        seq: Count,
        partition: str,
        task: str,
        fields: list[str],
        batch: int,
        rank: int | None,
        batch_index: int | None,
        wait_s: float,
    ) -> FoundRows:
        """Rows that have the fields and that the task has not consumed, chosen by the sampler, which then are consumed.

        rank and batch_index name the batch for samplers that give the same one to several callers. WaitingCalls at most
        wait_s; nothing was there in time: `waiting_on` says what is missing.
        """

    @idempotent
    async def consumed(self, partition: str, task: str) -> RowStatus:
        """Which rows the task has consumed; one flag each."""

    @idempotent
    async def produced(self, partition: str, fields: list[str]) -> RowStatus:
        """Which of the fields each row has; one flag a field."""

    @idempotent
    async def reset(self, seq: Count, partition: str, task: str | None) -> bool:
        """Let a task (None: every task) consume the partition anew; False if there is no such partition."""
