"""The store's state as plain data, and the events that change it; both are written to the journal as they are."""

from __future__ import annotations

import msgspec

from relax_rt.transport.compat.store.api import RowCount, RowNames, StoreConfig, Tags
from relax_rt.transport.memory.block_table import BlockTable
from relax_rt.transport.memory.refs import BlobRef, BlockRef, Extent
from relax_rt.transport.rpc.identity import Incarnation


class StoreLimits(msgspec.Struct, frozen=True):
    """How much the store holds.

    Attributes:
        capacity_bytes: payload in shared memory from which on first columns of rows wait.
        spill_bytes: payload that may be moved to files on disk when shared memory fills; 0: none.
        high_water: part of capacity_bytes from which on blocks are spilled.
        max_row_bytes: a row with more payload in one put is refused.
    """

    capacity_bytes: int = 1 << 62
    spill_bytes: int = 0
    high_water: float = 0.8
    max_row_bytes: int = 1 << 30


class StoreRow(msgspec.Struct, array_like=True):
    """A row of a partition.

    Attributes:
        place: its place in the order in which rows were made in the partition.
        parts: (block, row of it), oldest first; a field is read from the newest block that has it.
    """

    place: int
    key: str = ""
    parts: list[tuple[int, int]] = []
    tags: Tags = {}


class Partition(msgspec.Struct):
    """Rows by index; indexes only grow and are never used again.

    Attributes:
        expected: indexes reserved for rows to come: the first, and how many.
        consumed: rows that each task has taken.
        granted: rows of each batch that a sampler granted and that are still there, by task, rank and batch index.
        past: by task and rank; batches with a lower index (from 0 on) were granted too, and their rows are cleared.
    """

    rows: dict[int, StoreRow] = {}
    keys: dict[str, int] = {}
    expected: tuple[int, int] = (0, 0)
    next_place: int = 0
    consumed: dict[str, set[int]] = {}
    granted: dict[str, dict[int, dict[int, list[int]]]] = {}
    past: dict[str, dict[int, int]] = {}


class Pin(msgspec.Struct, frozen=True, array_like=True):
    """Extents that a caller may be reading."""

    who: Incarnation
    extents: list[Extent]


class KeptAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What is kept of a reply, to answer a repeated call: runs of rows (first, count), freed extents, pin."""

    rows: list[tuple[int, int]] = []
    freed: list[Extent] = []
    pin: int = 0


class StoreCaller(msgspec.Struct):
    """A process that has joined: its pid and start time, and its newest answers by the calls' numbers."""

    who: Incarnation
    pid: int
    started: int
    answers: dict[int, KeptAnswer] = {}


class StoreState(msgspec.Struct):
    """Everything that the store knows.

    Attributes:
        n: number of the last event applied.
        memory: name of the shared memory that payloads lie in.
        callers: by owner key (see memory.refs).
        partitions: by name, oldest first.
        pins: what is being read, by number.
    """

    n: int = 0
    memory: str = ""
    limits: StoreLimits = StoreLimits()
    callers: dict[str, StoreCaller] = {}
    next_epoch: int = 1
    blocks: BlockTable = msgspec.field(default_factory=BlockTable)
    config: StoreConfig | None = None
    partitions: dict[str, Partition] = {}
    pins: dict[int, Pin] = {}
    next_index: int = 0
    next_pin: int = 1


class StoreOpened(msgspec.Struct, frozen=True, tag="open"):
    """A broker begins. Another memory than before means that every row is lost."""

    memory: str
    limits: StoreLimits


class CallerJoined(msgspec.Struct, frozen=True, tag="join"):
    """A process joins under a name that the broker made unique by an epoch."""

    who: Incarnation
    pid: int
    started: int


class CallerGone(msgspec.Struct, frozen=True, tag="gone"):
    """A process has ended: its pins are released. What it put stays."""

    who: Incarnation


class BlocksSpilled(msgspec.Struct, frozen=True, tag="spilled"):
    """Blocks were copied to disk: id and new place of each."""

    moves: list[tuple[int, Extent]]


class ConfigureStore(msgspec.Struct, frozen=True, tag="configure"):
    """StoreApi.configure."""

    config: StoreConfig


class PutRows(msgspec.Struct, frozen=True, tag="put"):
    """StoreApi.put."""

    rows: RowNames
    new: RowCount = 0
    block: BlockRef | None = None
    blobs: list[BlobRef] = []
    tags: list[Tags] = []
    replace_tags: bool = False


class GetRows(msgspec.Struct, frozen=True, tag="get"):
    """StoreApi.get."""

    rows: RowNames
    fields: list[str] | None = None


class UnpinRows(msgspec.Struct, frozen=True, tag="unpin"):
    """StoreApi.unpin."""

    pins: list[int]


class ClearRows(msgspec.Struct, frozen=True, tag="clear"):
    """StoreApi.clear."""

    rows: RowNames


class SampleRows(msgspec.Struct, frozen=True, tag="sample"):
    """StoreApi.sample."""

    partition: str
    task: str
    fields: list[str]
    batch: int
    rank: int | None = None
    batch_index: int | None = None


class ResetTask(msgspec.Struct, frozen=True, tag="reset"):
    """StoreApi.reset."""

    partition: str
    task: str | None = None


StoreCall = ConfigureStore | PutRows | GetRows | UnpinRows | ClearRows | SampleRows | ResetTask
"""An event of a caller."""


class StoreEntry(msgspec.Struct, frozen=True, array_like=True):
    """An event as it is journaled. who, seq: the caller and the number of its call; none for the broker's own."""

    n: int
    event: StoreOpened | CallerJoined | CallerGone | BlocksSpilled | StoreCall
    who: Incarnation | None = None
    seq: int = 0
