"""The high-level interface of TransferQueue 0.1.11 on this package's own queue: no Ray, nothing to start beforehand.

Change ``import transfer_queue as tq`` to ``import relax_rt.transport.compat.transfer_queue as tq``. Payloads lie in
shared memory: a put is one copy, and a get of what was put together is none. The broker is a process of its own with a
journal, started by the first `init`; the processes of one job find it by the folder in RELAX_TRANSFER_QUEUE.

Needs torch and tensordict: ``pip install 'relax-rt[transferqueue]'``.
"""

from __future__ import annotations

try:
    from relax_rt.transport.compat.transfer_queue.client import TransferQueueClient
except ModuleNotFoundError as error:
    if error.name not in ("torch", "tensordict"):
        raise
    raise ImportError(
        f"relax_rt.transport.compat.transfer_queue needs torch and tensordict, and {error.name} is not installed: "
        "pip install 'relax-rt[transferqueue]'",
        name=error.name,
    ) from error
from relax_rt.transport.compat.transfer_queue.connection import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)
from relax_rt.transport.compat.transfer_queue.dataloader import StreamingDataLoader, StreamingDataset
from relax_rt.transport.compat.transfer_queue.errors import (
    NotInitialized,
    NotOffered,
    NotReady,
    ParserFailed,
    SamplerRefused,
    StorageKeyNotFoundError,
)
from relax_rt.transport.compat.transfer_queue.interface import (
    async_kv_batch_get,
    async_kv_batch_get_by_meta,
    async_kv_batch_put,
    async_kv_clear,
    async_kv_list,
    async_kv_put,
    close,
    get_client,
    get_metrics_endpoint,
    init,
    kv_batch_get,
    kv_batch_get_by_meta,
    kv_batch_put,
    kv_clear,
    kv_list,
    kv_put,
    load_checkpoint,
    save_checkpoint,
)
from relax_rt.transport.compat.transfer_queue.metadata import BatchMeta, KVBatchMeta

__version__ = "0.1.11"
"""Version of the interface."""

__all__ = [
    "BaseSampler",
    "BatchMeta",
    "GRPOGroupNSampler",
    "KVBatchMeta",
    "NotInitialized",
    "NotOffered",
    "NotReady",
    "ParserFailed",
    "RankAwareSampler",
    "SamplerRefused",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "StorageKeyNotFoundError",
    "StreamingDataLoader",
    "StreamingDataset",
    "TransferQueueClient",
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_put",
    "close",
    "get_client",
    "get_metrics_endpoint",
    "init",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_put",
    "load_checkpoint",
    "save_checkpoint",
]
