"""One weight update on an idle server: load, hold what it says it holds against what was published."""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from relax_rt.roles.rollout.engines.sglang.client import Client, ServerRefused
from relax_rt.roles.rollout.engines.sglang.weights import compare
from relax_rt.transport.rpc.errors import Refused, RelaxError
from relax_rt.transport.weights.manifest import Layout

BUCKET_BYTES = 64 << 20
"""Tensors of one request; base64 makes it a third larger."""


async def reported(client: Client, timeout_s: float) -> dict[str, str]:
    """The server's own checksum of each of its tensors.

    Raises:
        Refused: the server has more than one rank.
    """
    answer = await client.call("/weights_checker", {"action": "checksum"}, timeout_s=timeout_s)
    ranks: list[dict[str, Any]] = answer.get("ranks") or []
    if len(ranks) != 1:
        raise Refused(f"checksums of {len(ranks)} ranks of the SGLang server", why="one is what can be verified")
    found: dict[str, str] = ranks[0]["checksums"]
    return found


async def verify(client: Client, expected: Mapping[str, str], version: int, timeout_s: float) -> None:
    """Raises Corrupt unless the server holds this version."""
    compare(expected, await reported(client, timeout_s), version)


async def load_file(client: Client, folder: Path, version: int, *, flush: bool, timeout_s: float) -> None:
    """Have the server read a safetensors file of this machine.

    Args:
        flush: drop the prefix cache.
    """
    body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": flush}
    await client.call("/update_weights_from_disk", body, timeout_s=timeout_s)


async def load_tensors(
    client: Client, layout: Layout, data: memoryview, version: int, *, flush: bool, timeout_s: float
) -> None:
    """Send the tensors themselves, in buckets, within one update session of the server.

    Args:
        flush: drop the prefix cache.
    """
    async with _session(client, timeout_s):
        buckets = list(_buckets(layout))
        for number, bucket in enumerate(buckets, 1):
            last = number == len(buckets)
            rest: dict[str, Any] = {"flush_cache": flush and last} | ({"weight_version": str(version)} if last else {})
            # On a thread: the copies of a large bucket take longer than the event loop may be silent.
            body = await asyncio.to_thread(_message, bucket, data, rest)
            await client.call("/update_weights_from_tensor", body, timeout_s=timeout_s)


async def load_handles(client: Client, message: str, version: int, *, flush: bool, timeout_s: float) -> None:
    """Have the server open tensors where they lie, and copy them, within one update session.

    Args:
        message: of handles.Shown; it must live until then.
        flush: drop the prefix cache.
    """
    body = {"serialized_named_tensors": [message], "flush_cache": flush, "weight_version": str(version)}
    async with _session(client, timeout_s):
        await client.call("/update_weights_from_tensor", body, timeout_s=timeout_s)


@asynccontextmanager
async def _session(client: Client, timeout_s: float) -> AsyncIterator[None]:
    """The server takes tensors in here alone. A session that it refuses something in is ended as well."""
    await client.call("/begin_weight_update", {}, timeout_s=timeout_s)
    try:
        yield
    except ServerRefused:
        with suppress(RelaxError):
            await client.call("/end_weight_update", {}, timeout_s=timeout_s)
        raise
    await client.call("/end_weight_update", {}, timeout_s=timeout_s)


def _buckets(layout: Layout) -> Iterator[list[Any]]:
    bucket: list[Any] = []
    size = 0
    for entry in layout.entries:
        if bucket and size + entry.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(entry)
        size += entry.nbytes
    if bucket:
        yield bucket


def _message(entries: list[Any], data: memoryview, rest: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"serialized_named_tensors": [_pickled(entries, data)], **rest})


def _pickled(entries: list[Any], data: memoryview) -> str:
    """The form that the server's restricted unpickler takes: pairs of a name and a tensor."""
    import torch

    tensors = []
    for entry in entries:
        raw = torch.frombuffer(bytearray(data[entry.offset : entry.offset + entry.nbytes]), dtype=torch.uint8)
        tensors.append((entry.name, raw.view(getattr(torch, entry.dtype)).view(entry.shape)))
    return base64.b64encode(pickle.dumps(tensors)).decode()


async def release_memory(client: Client, timeout_s: float) -> None:
    """Give weights, cache and graphs back to the device."""
    await client.call("/release_memory_occupation", {}, timeout_s=timeout_s)


async def resume_memory(client: Client, timeout_s: float) -> None:
    """Take them again."""
    await client.call("/resume_memory_occupation", {}, timeout_s=timeout_s)
