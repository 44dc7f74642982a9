"""The lower-level interface: batches named by the numbers of their samples."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from tensordict import TensorDict

from relax_rt.transport.compat.store.api import FoundRows, RowNames, Tags
from relax_rt.transport.compat.transfer_queue.columns import batch_of, columns_of, decode_object, encode_object, parsed
from relax_rt.transport.compat.transfer_queue.connection import Connection
from relax_rt.transport.compat.transfer_queue.errors import (
    NotOffered,
    NotReady,
    SamplerRefused,
    StorageKeyNotFoundError,
)
from relax_rt.transport.compat.transfer_queue.metadata import BatchMeta, schema_of
from relax_rt.transport.rpc.errors import Refused

WAIT_S = float(os.environ.get("TQ_CONTROLLER_GET_METADATA_CHECK_INTERVAL", "5"))
"""How long `get_meta` waits for enough samples where polling_mode is off."""

_log = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")
Parser = Callable[[Any], Any]


def encode_tags(tags: Sequence[dict[str, Any]], names: Sequence[object]) -> list[Tags]:
    return [
        {tag: encode_object(value, f"tag {tag!r} of {name!r}") for tag, value in own.items()}
        for own, name in zip(tags, names, strict=True)
    ]


def decode_tags(tags: Tags) -> dict[str, Any]:
    return {name: decode_object(value, f"tag {name!r}") for name, value in tags.items()}


def checked_keys(keys: Any) -> list[str]:
    """Raises:
    TypeError, ValueError: they are not a string, or a list with at least one.
    """
    if isinstance(keys, str):
        return [keys]
    if not isinstance(keys, list):
        raise TypeError(f"keys are a string or a list of strings, not {type(keys).__name__}")
    if not keys:
        raise ValueError("an empty list of keys")
    if not all(isinstance(key, str) for key in keys):
        raise TypeError(f"not all keys are strings: {keys[:8]}")
    return keys


def _forms(
    method: Callable[Concatenate[TransferQueueClient, P], Coroutine[Any, Any, T]],
) -> tuple[
    Callable[Concatenate[TransferQueueClient, P], T],
    Callable[Concatenate[TransferQueueClient, P], Coroutine[Any, Any, T]],
]:
    """The method for those who block, and for those who await it."""

    @functools.wraps(method)
    def blocking(self: TransferQueueClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.connection.run(method(self, *args, **kwargs))

    @functools.wraps(method)
    async def awaited(self: TransferQueueClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.connection.arun(method(self, *args, **kwargs))

    name = method.__name__.removeprefix("_")
    for form, called in ((blocking, name), (awaited, f"async_{name}")):
        form.__name__, form.__qualname__ = called, f"TransferQueueClient.{called}"
    return blocking, awaited


class TransferQueueClient:
    """Each method comes in two forms: `name` blocks, `async_name` is awaited, from any event loop."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.client_id = str(connection.store.who)

    def _meta(
        self, found: FoundRows, fields: Sequence[str] | None = None, status: Sequence[int] | None = None
    ) -> BatchMeta:
        return BatchMeta(
            found.indexes,
            found.partitions,
            production_status=status if status is not None else [1] * len(found.indexes),
            custom_meta=[decode_tags(tags) for tags in found.tags],
            field_names=found.fields if fields is None else fields,
            describe=lambda meta: schema_of(self.get_data(meta)),
        )

    # --- batches

    async def _get_meta(
        self,
        data_fields: list[str],
        batch_size: int,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
    ) -> BatchMeta:
        """Samples for a task that have these fields, chosen by the sampler (fetch); all of a partition (force_fetch);
        or new ones that are still to be put (insert).

        Raises:
            NotReady: there are not enough, and polling_mode is off; with it the batch is empty.
        """
        store = self.connection.store
        if mode == "insert":
            stored = await store.put(RowNames(partition_id), new=batch_size)
            found = FoundRows(stored.indexes, [], [partition_id] * batch_size, [], stored.tags)
            return self._meta(found, data_fields, [0] * batch_size)
        if mode == "force_fetch":
            found = await store.api.find(RowNames(partition_id))
            produced = await store.produced(partition_id, data_fields)
            have = dict(zip(*produced, strict=True)) if produced is not None else {}
            return self._meta(found, data_fields, [int(all(have.get(index, (False,)))) for index in found.indexes])
        if mode != "fetch":
            raise ValueError(f"mode is one of fetch, force_fetch and insert, not {mode!r}")
        if task_name is None:
            raise ValueError("fetching samples needs a task_name")
        return await self._sample(data_fields, batch_size, partition_id, task_name, sampling_config or {}, None)

    get_meta, async_get_meta = _forms(_get_meta)

    async def _sample(
        self,
        fields: list[str],
        batch_size: int,
        partition_id: str,
        task_name: str,
        sampling: dict[str, Any],
        wait_s: float | None,
    ) -> BatchMeta:
        polling = self.connection.settings.polling
        try:
            found = await self.connection.store.sample(
                partition_id,
                task_name,
                fields,
                batch_size,
                rank=sampling.get("dp_rank"),
                batch_index=sampling.get("batch_index"),
                wait_s=wait_s if wait_s is not None else 0.0 if polling else WAIT_S,
            )
        except Refused as error:
            raise SamplerRefused(error.what, why=error.why, hint=error.hint) from error
        if not found.waiting_on:
            return self._meta(found, fields)
        if polling:
            return BatchMeta.empty()
        raise NotReady(f"samples of partition {partition_id!r} for {task_name!r}", why=f"waited for {found.waiting_on}")

    async def _get_data(self, metadata: BatchMeta) -> TensorDict:
        """The fields of a batch.

        Raises:
            StorageKeyNotFoundError: a sample is gone, or has not all of the fields.
        """
        if not metadata or not metadata.field_names:
            _log.warning("a batch without samples or fields was asked for")
            return TensorDict({}, batch_size=0)
        reading = await self.connection.store.get(RowNames(indexes=metadata.global_indexes), metadata.field_names)
        try:
            gone = metadata.size - reading.rows
            missing = sorted(set(metadata.field_names) - set(reading.fields))
            if gone or missing:
                raise StorageKeyNotFoundError(f"{gone} of {metadata.size} samples are gone; fields missing: {missing}")
            return batch_of(reading)
        finally:
            reading.close()

    get_data, async_get_data = _forms(_get_data)

    async def _put(
        self,
        data: TensorDict,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: Parser | None = None,
    ) -> BatchMeta:
        """Put fields on the samples of a batch, or on new ones of a partition."""
        store = self.connection.store
        columns = columns_of(data) if data_parser is None else parsed(data, data_parser)
        if metadata is None:
            if partition_id is None:
                raise ValueError("new samples need a partition_id")
            size = data.batch_size[0]
            stored = await store.put(RowNames(partition_id), columns, new=size)
            found = FoundRows(stored.indexes, [], [partition_id] * size, stored.fields, stored.tags)
            return self._meta(found, []).add_fields(data)
        if not metadata:
            raise ValueError("the batch to put to has no samples")
        rows = RowNames(indexes=metadata.global_indexes)
        await store.put(
            rows, columns, tags=encode_tags(metadata.custom_meta, metadata.global_indexes), replace_tags=True
        )
        return metadata.add_fields(data)

    put, async_put = _forms(_put)

    async def _set_custom_meta(self, metadata: BatchMeta) -> None:
        """The tags of the samples are those of the batch from now on."""
        if metadata:
            rows = RowNames(indexes=metadata.global_indexes)
            await self.connection.store.put(
                rows, tags=encode_tags(metadata.custom_meta, metadata.global_indexes), replace_tags=True
            )

    set_custom_meta, async_set_custom_meta = _forms(_set_custom_meta)

    async def _clear_partition(self, partition_id: str) -> None:
        """Remove a partition with all its samples."""
        await self.connection.store.clear(RowNames(partition_id))

    clear_partition, async_clear_partition = _forms(_clear_partition)

    async def _clear_samples(self, metadata: BatchMeta) -> None:
        """Remove the samples of a batch."""
        if metadata:
            await self.connection.store.clear(RowNames(indexes=metadata.global_indexes))

    clear_samples, async_clear_samples = _forms(_clear_samples)

    # --- status

    async def _get_consumption_status(
        self, task_name: str, partition_id: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Numbers of a partition's samples, and for each 1 if the task has consumed it, else 0."""
        status = await self.connection.store.consumed(partition_id, task_name)
        if status is None:
            return None, None
        return torch.tensor(status[0], dtype=torch.long), torch.tensor(status[1], dtype=torch.int8)

    get_consumption_status, async_get_consumption_status = _forms(_get_consumption_status)

    async def _get_production_status(
        self, data_fields: list[str], partition_id: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Numbers of a partition's samples, and for each and each field 1 if it is there, else 0."""
        status = await self.connection.store.produced(partition_id, data_fields)
        if status is None:
            return None, None
        return torch.tensor(status[0], dtype=torch.long), torch.tensor(status[1], dtype=torch.int8)

    get_production_status, async_get_production_status = _forms(_get_production_status)

    async def _check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Whether the task has consumed the whole partition."""
        status = await self.connection.store.consumed(partition_id, task_name)
        return status is not None and bool(status[0]) and all(status[1])

    check_consumption_status, async_check_consumption_status = _forms(_check_consumption_status)

    async def _check_production_status(self, data_fields: list[str], partition_id: str) -> bool:
        """Whether all samples of a partition have these fields."""
        status = await self.connection.store.produced(partition_id, data_fields)
        return status is not None and all(map(all, status[1]))

    check_production_status, async_check_production_status = _forms(_check_production_status)

    async def _reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Let a task (default: every task) consume a partition anew; False if there is no such partition."""
        return await self.connection.store.reset(partition_id, task_name)

    reset_consumption, async_reset_consumption = _forms(_reset_consumption)

    async def _get_partition_list(self) -> list[str]:
        """Names of the partitions, oldest first."""
        return await self.connection.store.api.partitions()

    get_partition_list, async_get_partition_list = _forms(_get_partition_list)

    # --- keys

    async def _kv_retrieve_meta(self, keys: list[str] | str, partition_id: str, create: bool = False) -> BatchMeta:
        """The samples of these keys that are there; with create, all of them."""
        names = checked_keys(keys)
        if create:
            await self.connection.store.put(RowNames(partition_id, names))
        found = await self.connection.store.api.find(RowNames(partition_id, names))
        return self._meta(found, status=[int(bool(found.fields))] * len(found.indexes))

    kv_retrieve_meta, async_kv_retrieve_meta = _forms(_kv_retrieve_meta)

    async def _kv_retrieve_keys(self, global_indexes: list[int] | int, partition_id: str) -> list[str | None]:
        """Keys of samples by their numbers; None for those without."""
        indexes = [global_indexes] if isinstance(global_indexes, int) else list(global_indexes)
        if not indexes:
            raise ValueError("an empty list of numbers")
        if not all(isinstance(index, int) for index in indexes):
            raise TypeError(f"not all numbers of samples are int: {indexes[:8]}")
        found = await self.connection.store.api.find(RowNames(indexes=indexes))
        keys = {
            index: key or None
            for index, key, partition in zip(found.indexes, found.keys, found.partitions, strict=True)
            if partition == partition_id
        }
        return [keys.get(index) for index in indexes]

    kv_retrieve_keys, async_kv_retrieve_keys = _forms(_kv_retrieve_keys)

    async def _kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        """Keys with their tags, by partition."""
        listed = await self.connection.store.api.list_keys(partition_id)
        return {name: {key: decode_tags(tags) for key, tags in keys.items()} for name, keys in listed.items()}

    kv_list, async_kv_list = _forms(_kv_list)

    def wait_meta(
        self,
        data_fields: list[str],
        batch_size: int,
        partition_id: str,
        task_name: str,
        sampling_config: dict[str, Any],
        wait_s: float,
    ) -> BatchMeta:
        """Like get_meta, but waits for samples in polling_mode too."""
        return self.connection.run(
            self._sample(data_fields, batch_size, partition_id, task_name, sampling_config, wait_s)
        )

    def has_batch(
        self,
        data_fields: list[str],
        batch_size: int,
        partition_id: str,
        task_name: str,
        sampling_config: dict[str, Any],
    ) -> bool:
        """Whether the sampler has (or has given already) this batch of a rank. Not for the sequential sampler, which
        would give a batch away."""
        rank, batch_index = sampling_config.get("dp_rank"), sampling_config.get("batch_index")
        store = self.connection.store
        found = self.connection.run(
            store.sample(partition_id, task_name, data_fields, batch_size, rank=rank, batch_index=batch_index)
        )
        return not found.waiting_on

    def __getattr__(self, name: str) -> Any:
        if name.removeprefix("async_") in _NOT_OFFERED:
            raise NotOffered(f"TransferQueueClient.{name}", why=_NOT_OFFERED[name.removeprefix("async_")])
        raise AttributeError(f"TransferQueueClient has no {name}")


_JOURNALED = "the queue is journaled as it runs, and a broker that dies comes back with it"
_NOT_OFFERED = {
    "initialize_storage_manager": "there is no storage to choose",
    "save_controller_checkpoint": _JOURNALED,
    "load_controller_checkpoint": _JOURNALED,
    "save_storage_checkpoint": _JOURNALED,
    "load_storage_checkpoint": _JOURNALED,
}
