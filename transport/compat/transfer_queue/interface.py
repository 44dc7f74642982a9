"""The high-level interface: init, close, and samples by keys in partitions, with fields and tags."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from tensordict import TensorDict

from relax_rt.transport.compat.store.api import RowNames
from relax_rt.transport.compat.transfer_queue import connection
from relax_rt.transport.compat.transfer_queue.client import (
    Parser,
    TransferQueueClient,
    checked_keys,
    decode_tags,
    encode_tags,
)
from relax_rt.transport.compat.transfer_queue.columns import batch_of, columns_of, parsed, row_of
from relax_rt.transport.compat.transfer_queue.errors import NotOffered
from relax_rt.transport.compat.transfer_queue.metadata import KVBatchMeta

T = TypeVar("T")
P = ParamSpec("P")
Fields = TensorDict | dict[str, Any]


def init(conf: Any = None) -> Any:
    """Connect to the queue, and start it first if nobody has. Call it once in each process, before anything else.

    The queue lies in a folder: `conf.relax.folder`, or the one that RELAX_TRANSFER_QUEUE names, or a new one, which is
    then named in this variable for processes that this one starts. Its broker ends with the process that started it.

    Args:
        conf: a DictConfig or dict. Of the interface's own settings `controller.sampler`, `controller.polling_mode` and
            `backend.SimpleStorage.total_storage_size` are heeded, by the process that starts the queue; the number of
            storage units has no meaning here. `relax.folder`: see above. `relax.capacity_bytes`: shared memory that
            this process may put into. `relax.spill_bytes`: payload that may be moved to disk when memory fills.

    Returns:
        The whole configuration.

    Raises:
        NotOffered: a setting asks for what is not here: another storage backend, a metrics server, a sampler of
            one's own.
        ValueError: there is no sampler of this name.
    """
    full = connection.merged_config(conf)
    mine = connection.start(full)
    full["relax"]["folder"] = full["controller"]["zmq_info"] = str(mine.folder)
    return connection.user_config(full)


def close() -> None:
    """Leave the queue; in the process that started it, end it. Tensors that were read stay valid."""
    connection.stop()


def get_client() -> TransferQueueClient:
    """The lower-level interface.

    Raises:
        NotInitialized: there is no queue to connect to.
    """
    return TransferQueueClient(connection.current())


def get_metrics_endpoint() -> str | None:
    """Address of the metrics server: None, there is none."""
    return None


# --- keys: each function in two forms


def _forms(
    function: Callable[Concatenate[connection.Connection, P], Coroutine[Any, Any, T]],
) -> tuple[Callable[P, T], Callable[P, Coroutine[Any, Any, T]]]:
    """The function for callers that block, and for those that await it from any event loop."""

    @functools.wraps(function)
    def blocking(*args: P.args, **kwargs: P.kwargs) -> T:
        mine = connection.current()
        return mine.run(function(mine, *args, **kwargs))

    @functools.wraps(function)
    async def awaited(*args: P.args, **kwargs: P.kwargs) -> T:
        mine = connection.current()
        return await mine.arun(function(mine, *args, **kwargs))

    name = function.__name__.removeprefix("_")
    for form, called in ((blocking, name), (awaited, f"async_{name}")):
        form.__name__ = form.__qualname__ = called
    return blocking, awaited


async def _kv_put(
    mine: connection.Connection,
    key: str,
    partition_id: str,
    fields: Fields | None = None,
    tag: dict[str, Any] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Put fields and tags of one sample; what it has already of others stays.

    Args:
        key: of the sample, in its partition; made if it is not there.
        partition_id: made if it is not there.
        fields: one row of a TensorDict, or a dict with the sample's values. Tensors are kept as they are; everything
            else must be plain data, or hold numpy arrays or tensors: objects are not pickled.
        tag: merged into the sample's tags.
        data_parser: is given a dict of the fields and answers with one of the same fields to put in their stead.

    Returns:
        The sample's key, tags, and all its fields.

    Raises:
        ValueError: neither fields nor tag, or a nested tensor.
        TypeError: a value that cannot be put.
    """
    if fields is None and tag is None:
        raise ValueError("Please provide at least one parameter of fields or tag.")
    if isinstance(fields, dict):
        fields = row_of(fields)
    elif fields is not None and not isinstance(fields, TensorDict):
        raise ValueError(f"fields are a dict or a TensorDict, not {type(fields).__name__}")
    return await _put(mine, [key], partition_id, fields, [tag] if tag is not None else None, data_parser)


kv_put, async_kv_put = _forms(_kv_put)


async def _kv_batch_put(
    mine: connection.Connection,
    keys: list[str],
    partition_id: str,
    fields: Fields | None = None,
    tags: list[dict[str, Any]] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Put fields and tags of many samples, in one step: all of it or nothing.

    Args:
        fields: as many rows as keys.
        tags: one dict for each key.

    Raises:
        ValueError: neither fields nor tags, another number of them than of keys, or a key named twice.
    """
    if fields is None and tags is None:
        raise ValueError("Please provide at least one parameter of `fields` or `tags`.")
    if isinstance(fields, dict):
        fields = TensorDict(fields, batch_size=[len(keys)])
    if fields is not None and fields.batch_size[0] != len(keys):
        raise ValueError(f"{len(keys)} keys came with fields for {fields.batch_size[0]}")
    return await _put(mine, keys, partition_id, fields, tags, data_parser)


kv_batch_put, async_kv_batch_put = _forms(_kv_batch_put)


async def _put(
    mine: connection.Connection,
    keys: list[str],
    partition_id: str,
    fields: TensorDict | None,
    tags: list[dict[str, Any]] | None,
    parser: Parser | None,
) -> KVBatchMeta:
    checked_keys(keys)
    if tags is not None and len(tags) != len(keys):
        raise ValueError(f"{len(keys)} keys came with tags for {len(tags)}")
    if len(set(keys)) != len(keys):
        raise ValueError("Got duplicated keys.")
    columns = None
    if fields is not None:
        columns = columns_of(fields) if parser is None else parsed(fields, parser)
    stored = await mine.store.put(RowNames(partition_id, keys), columns, tags=encode_tags(tags, keys) if tags else ())
    return KVBatchMeta(list(keys), [decode_tags(own) for own in stored.tags], partition_id, stored.fields)


async def _kv_batch_get(
    mine: connection.Connection,
    keys: list[str] | str,
    partition_id: str,
    select_fields: list[str] | str | None = None,
) -> TensorDict:
    """The fields of samples, in the order of the keys; keys that are not there are passed over.

    Tensors of one and more dimensions come as jagged nested tensors, scalars as a dense one, everything else as a
    NonTensorStack. Large tensors of samples that were put together are not copied: they lie in shared memory, which
    is kept for them, and a change made in place is the caller's own.

    Args:
        select_fields: those that are wanted; default: all that each of the samples has.

    Raises:
        ValueError: none of the keys is there, or there is no field that all samples have.
    """
    rows = RowNames(partition_id, checked_keys(keys))
    wanted = [select_fields] if isinstance(select_fields, str) else select_fields
    reading = await mine.store.get(rows, wanted)
    try:
        if not reading.rows:
            raise ValueError(f"neither of the keys {rows.keys[:8]} was found in partition {partition_id!r}")
        if reading.fields:
            return batch_of(reading)
    finally:
        reading.close()
    if not (await mine.store.api.find(rows)).fields:
        raise ValueError(f"no field is there for all of the keys {rows.keys[:8]} of partition {partition_id!r}")
    return TensorDict({}, batch_size=0)


kv_batch_get, async_kv_batch_get = _forms(_kv_batch_get)


async def _kv_batch_get_by_meta(
    mine: connection.Connection, meta: KVBatchMeta, select_fields: list[str] | str | None = None
) -> TensorDict:
    """kv_batch_get of the samples and fields that a put answered with.

    Raises:
        ValueError: a selected field is not among those of the batch; see kv_batch_get for others.
    """
    if meta.partition_id is None:
        raise ValueError("the batch does not say which partition it is of")
    wanted = [select_fields] if isinstance(select_fields, str) else select_fields
    if wanted is not None and (unknown := [name for name in wanted if name not in (meta.fields or ())]):
        raise ValueError(f"fields {unknown} are not among those of the batch, {meta.fields}")
    return await _kv_batch_get(mine, meta.keys, meta.partition_id, meta.fields if wanted is None else wanted)


kv_batch_get_by_meta, async_kv_batch_get_by_meta = _forms(_kv_batch_get_by_meta)


async def _kv_list(mine: connection.Connection, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
    """Tags by key by partition, of one partition or all; an unknown one is skipped."""
    listed = await mine.store.api.list_keys(partition_id)
    return {name: {key: decode_tags(tags) for key, tags in keys.items()} for name, keys in listed.items()}


kv_list, async_kv_list = _forms(_kv_list)


async def _kv_clear(mine: connection.Connection, keys: list[str] | str, partition_id: str) -> None:
    """Remove samples; keys that are not there are skipped. Their partition stays, be it empty."""
    await mine.store.clear(RowNames(partition_id, checked_keys(keys)))


kv_clear, async_kv_clear = _forms(_kv_clear)


def save_checkpoint(
    checkpoint_dir: str | Path, *, include_storage: bool = True, metadata: dict[str, Any] | None = None
) -> None:
    """Not offered.

    Raises:
        NotOffered: always.
    """
    raise NotOffered(
        f"save_checkpoint({str(checkpoint_dir)!r})",
        why="the queue is journaled as it runs",
        hint="a broker that dies comes back with all that was put while the machine is up; keep relax.folder",
    )


def load_checkpoint(checkpoint_dir: str | Path) -> None:
    """Not offered.

    Raises:
        NotOffered: always.
    """
    raise NotOffered(
        f"load_checkpoint({str(checkpoint_dir)!r})",
        why="the queue is journaled as it runs",
        hint="start it with the relax.folder that it had",
    )
