"""Batches as they come: a dataset that asks the queue for them, and torch's loader over it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, IterableDataset

from relax_rt.transport.compat.transfer_queue import connection
from relax_rt.transport.compat.transfer_queue.client import TransferQueueClient
from relax_rt.transport.compat.transfer_queue.metadata import BatchMeta

WAIT_S = float(os.environ.get("TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL", "1"))
"""How long one request for a batch waits, before the loader checks whether the partition is consumed."""

Item = tuple[TensorDict, BatchMeta]
Fetch = Callable[..., tuple[TensorDict | None, BatchMeta]]
Process = Callable[..., Any]


class StreamingDataset(IterableDataset[Item]):
    """Batches of a partition for a task, cut into micro-batches. What was read once is kept to be read again.

    Args:
        config: what `init` answered with; None: the queue of this process.
        batch_size: samples that are asked for at once.
        micro_batch_size: samples of each item.
        data_fields: fields of the samples.
        partition_id: where they are.
        task_name: each sample is given to a task once.
        dp_rank: number of the data-parallel group; all processes with the same one get the same batches.
        should_check_consumption_status: end when the whole partition has been consumed; else never end.
        fetch_batch_fn: asks for a batch in place of default_fetch_batch_fn; called with its arguments, by name.
        process_batch_fn: cuts a batch into micro-batches in place of chunk_batch_fn.

    Raises:
        ValueError: an argument makes no sense.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        micro_batch_size: int,
        data_fields: list[str],
        partition_id: str,
        task_name: str,
        dp_rank: int,
        should_check_consumption_status: bool = False,
        fetch_batch_fn: Fetch | None = None,
        process_batch_fn: Process | None = None,
    ) -> None:
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, got {micro_batch_size}")
        if len(data_fields) < 1:
            raise ValueError("data_fields must name at least one field")
        if dp_rank < 0:
            raise ValueError(f"dp_rank must be 0 or more, got {dp_rank}")
        super().__init__()
        self.config = config
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.data_fields, self.partition_id = data_fields, partition_id
        self.task_name, self.dp_rank = task_name, dp_rank
        self.should_check_consumption_status = should_check_consumption_status
        self.fetch_batch_fn: Fetch = fetch_batch_fn or default_fetch_batch_fn
        self.process_batch_fn: Process = process_batch_fn or chunk_batch_fn
        self.sampling_config = {"dp_rank": dp_rank, "task_name": task_name}
        self.buffer: list[Item] = []
        self.batch_index = 0

    def _client(self) -> TransferQueueClient:
        """The client of this process, which may be a worker of the loader."""
        known = getattr(getattr(self.config, "controller", None), "zmq_info", None)
        return TransferQueueClient(connection.current(Path(known) if isinstance(known, str) else None))

    def __iter__(self) -> Iterator[Item]:
        client = self._client()
        while True:
            if self.batch_index < len(self.buffer):
                batch = self.buffer[self.batch_index]
                self.batch_index += 1
                yield from self.process_batch_fn(*batch, micro_batch_size=self.micro_batch_size)
                continue
            if self._is_over(client):
                return
            began = time.monotonic()
            data, meta = self.fetch_batch_fn(
                tq_client=client,
                data_fields=self.data_fields,
                batch_size=self.batch_size,
                partition_id=self.partition_id,
                task_name=self.task_name,
                sampling_config=self.sampling_config,
                batch_index=self.batch_index,
            )
            if data is not None:
                self.buffer.append((data, meta))
            else:
                # A function of the user's own may not wait.
                time.sleep(max(0.0, min(WAIT_S, 0.05) - (time.monotonic() - began)))

    def _is_over(self, client: TransferQueueClient) -> bool:
        """All is consumed, and the batch that this rank would read next was not given to another of its group."""
        if not self.should_check_consumption_status:
            return False
        if not client.check_consumption_status(self.task_name, self.partition_id):
            return False
        if client.connection.settings.sampler.kind == "sequential":
            return True
        sampling = {"dp_rank": self.dp_rank, "batch_index": self.batch_index}
        return not client.has_batch(self.data_fields, self.batch_size, self.partition_id, self.task_name, sampling)

    def reset(self) -> None:
        self.batch_index = 0

    def step(self, partition_id: str) -> None:
        self.buffer, self.batch_index, self.partition_id = [], 0, partition_id


def default_fetch_batch_fn(
    tq_client: TransferQueueClient,
    data_fields: list[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: dict[str, Any],
    batch_index: int,
) -> tuple[TensorDict | None, BatchMeta]:
    """The next batch, or None if there was none for a second or so."""
    sampling = {**sampling_config, "batch_index": batch_index, "partition_id": partition_id}
    meta = tq_client.wait_meta(data_fields, batch_size, partition_id, task_name, sampling, WAIT_S)
    return (tq_client.get_data(meta), meta) if meta else (None, meta)


def chunk_batch_fn(td: TensorDict, batch_meta: BatchMeta, micro_batch_size: int = 1) -> list[Item]:
    """Cut a batch into micro-batches; the last one may be smaller. Tensors are not copied.

    Raises:
        TypeError: td is not a TensorDict.
        ValueError: micro_batch_size is not a number from 1 to the size of the batch.
    """
    if not isinstance(td, TensorDict):
        raise TypeError(f"a TensorDict is cut into micro-batches, not {type(td).__name__}")
    if not isinstance(micro_batch_size, int) or micro_batch_size < 1:
        raise ValueError(f"micro_batch_size must be a positive whole number, got {micro_batch_size!r}")
    if not td.batch_size:
        raise ValueError("the batch has no batch dimension")
    size = td.batch_size[0]
    if micro_batch_size > size:
        raise ValueError(f"micro_batch_size {micro_batch_size} is over the batch's {size} samples")
    nested = {k: v for k, v in td.items() if isinstance(v, torch.Tensor) and v.is_nested}
    dense = td.exclude(*nested) if nested else td
    items: list[Item] = []
    for start in range(0, size, micro_batch_size):
        end = min(start + micro_batch_size, size)
        part = dense[start:end]
        for name, value in nested.items():
            part[name] = _rows(value, start, end)
        items.append((part, batch_meta[start:end]))
    return items


def _rows(value: Any, start: int, end: int) -> torch.Tensor:
    if value.layout != torch.jagged or value._lengths is not None or value._ragged_idx != 1:
        return torch.nested.as_nested_tensor(list(value.unbind()[start:end]), layout=value.layout)
    offsets = value.offsets()[start : end + 1]
    lengths = offsets.diff()
    return torch.nested.nested_tensor_from_jagged(
        value.values()[offsets[0] : offsets[-1]],
        offsets=offsets - offsets[0],
        min_seqlen=int(lengths.min()),
        max_seqlen=int(lengths.max()),
    )


def _as_it_is(item: Any) -> Any:
    return item


class StreamingDataLoader(DataLoader[Item]):
    """torch's DataLoader over a StreamingDataset, which makes the batches; see DataLoader for the arguments."""

    dataset: StreamingDataset

    def __init__(
        self,
        dataset: StreamingDataset,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
    ) -> None:
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=collate_fn or _as_it_is,
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )

    def reset(self) -> None:
        self.dataset.reset()

    def step(self, partition_id: str) -> None:
        self.dataset.step(partition_id)

    def get_buffer(self) -> list[Item]:
        return self.dataset.buffer
