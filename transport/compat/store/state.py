"""All that the store knows, as plain data, and the events that change it."""

from __future__ import annotations

import msgspec

from relax_rt.transport.compat.store.api import RowCount, Rows, StoreConfig, Tags
from relax_rt.transport.memory.refs import BlobRef, BlockRef, Extent
from relax_rt.transport.rpc.identity import Incarnation


class Row(msgspec.Struct, array_like=True):
    """A row of a partition.

    Attributes:
        place: its place in the order in which rows came into the partition.
        parts: (block, row of it), oldest first; a field is in the newest block that has it.
    """

    place: int
    key: str = ""
    parts: list[tuple[int, int]] = []
    tags: Tags = {}


class Partition(msgspec.Struct):
    """Rows by index, which only grow and are never used again.

    Attributes:
        expected: indexes of rows that are to come: the first, and how many.
        consumed: rows that a task was given.
        granted: rows of each batch that a sampler gave and that are still there, by task, rank and index of the batch.
        past: by task and rank; batches with a lower index (from 0 on) were given too, and their rows are gone.
    """

    rows: dict[int, Row] = {}
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


class StoreState(msgspec.Struct):
    """Partitions by name, oldest first, and what is being read."""

    config: StoreConfig | None = None
    partitions: dict[str, Partition] = {}
    pins: dict[int, Pin] = {}
    next_index: int = 0
    next_pin: int = 1


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """See StoreApi.store_configure."""

    config: StoreConfig


class Put(msgspec.Struct, frozen=True, tag="put"):
    """See StoreApi.store_put."""

    rows: Rows
    new: RowCount = 0
    block: BlockRef | None = None
    blobs: list[BlobRef] = []
    tags: list[Tags] = []
    replace_tags: bool = False


class Get(msgspec.Struct, frozen=True, tag="get"):
    """See StoreApi.store_get."""

    rows: Rows
    fields: list[str] | None = None


class Unpin(msgspec.Struct, frozen=True, tag="unpin"):
    """See StoreApi.store_unpin."""

    pins: list[int]


class Clear(msgspec.Struct, frozen=True, tag="clear"):
    """See StoreApi.store_clear."""

    rows: Rows


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """See StoreApi.store_sample."""

    partition: str
    task: str
    fields: list[str]
    batch: int
    rank: int | None = None
    batch_index: int | None = None


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """See StoreApi.store_reset."""

    partition: str
    task: str | None = None


StoreEvent = Configure | Put | Get | Unpin | Clear | Sample | Reset
