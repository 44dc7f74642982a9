"""Loads a version into an idle SGLang server and verifies it there: from a file, in requests, or by handles."""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from multiprocessing.reduction import ForkingPickler
from multiprocessing.resource_sharer import DupFd
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from relax_rt.roles.rollout.engines.settings import SglangTable
from relax_rt.roles.rollout.engines.sglang.client import ServerRefused, SglangClient
from relax_rt.roles.rollout.engines.sglang.options import Device
from relax_rt.roles.rollout.engines.sglang.weights import PrivateCopy, Recipe, by_expert, checksums, compare
from relax_rt.transport.rpc.errors import Corrupt, Refused, RelaxError
from relax_rt.transport.weights.manifest import Layout, TensorEntry
from relax_rt.transport.weights.source import WeightSource

PIECE_BYTES = 64 << 20
"""Bytes copied to the device at a time, through a buffer of that size."""
BUCKET_BYTES = 64 << 20
"""Tensors of one request; base64 makes it a third larger."""
OnFileFallback = Callable[[int, str], object]
"""Called with a version that is loaded from the file instead of by handles, and why."""


class LoadedVersion(msgspec.Struct, frozen=True):
    """A version and the checksums of a server that holds it."""

    version: int
    checksums: dict[str, str]


class WeightLoader:
    """Fetches versions into a private copy, and has the server load them from it as `sglang.weights` says.

    A failure with handles that the server survives is no failure of the version: the server loads it, and all later
    ones, from the file, verified as ever. A failure that ends the server cannot be handled here; therefore the file
    `attempt` exists while an attempt is in progress, and a successor that finds it does not use handles.

    Args:
        folder: of the copy.
        attempt: a file's path; None: nothing is remembered.
    """

    def __init__(
        self, table: SglangTable, folder: Path, device: Device, attempt: Path | None, on_file_fallback: OnFileFallback
    ) -> None:
        self.copy = PrivateCopy(folder)
        self.recipes: dict[str, Recipe] = {}
        self._table, self._device, self._attempt, self._on_file_fallback = table, device, attempt, on_file_fallback
        self._use_handles, self._tried = table.weights == "handles", False
        self._shared: SharedTensors | None = None
        if self._use_handles and attempt is not None and attempt.exists():
            self._disable_handles(
                0, "an incarnation before this one, or its server, ended while the server opened handles"
            )

    def fetch(self, source: WeightSource) -> LoadedVersion:
        """Fill the copy, and share it if handles are used. Blocks.

        Raises:
            Gone, Corrupt, Refused, OutOfSpace: see PrivateCopy.fill.
        """
        self.unshare()
        with self.copy.fill(source) as view:
            layout = by_expert(source.manifest.layout)
            found = LoadedVersion(source.manifest.version, checksums(self.recipes, layout, view, self._device))
        self._share()
        return found

    def _share(self) -> None:
        """Share the copy by handles; on a GPU this copies it. If it fails, the next version is tried again."""
        if not self._use_handles:
            return
        copy, self._tried = self.copy, True
        assert copy.layout is not None
        with copy.view as view:
            try:
                self._shared = SharedTensors(by_expert(copy.layout), view, copy.path, copy.start, self._device)
            except Refused as error:
                self._on_file_fallback(copy.version, str(error))

    def unshare(self) -> None:
        """Free the memory in which a version is shared."""
        self._tried = False
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    async def load(self, client: SglangClient, loaded: LoadedVersion, *, flush: bool) -> None:
        """Have an idle server load the copy, and verify that it holds it.

        Args:
            flush: drop the prefix cache.

        Raises:
            Corrupt: it holds something else. ServerRefused, Unreachable, DeadlineExceeded: it did not load it.
        """
        if not self._tried:
            await asyncio.to_thread(self._share)
        limit_s = self._table.update_timeout_s
        try:
            if self._shared is not None and await self._load_shared(client, loaded, self._shared, flush=flush):
                return
            if self._table.weights == "tensor":
                layout = self.copy.layout
                assert layout is not None
                # Not released here: a thread may still read from it when this is cancelled.
                view = self.copy.view
                await load_tensors(client, by_expert(layout), view, loaded.version, flush=flush, timeout_s=limit_s)
            else:
                await load_file(client, self.copy.folder, loaded.version, flush=flush, timeout_s=limit_s)
            await verify(client, loaded, limit_s)
        finally:
            self.unshare()

    async def _load_shared(
        self, client: SglangClient, loaded: LoadedVersion, shared: SharedTensors, *, flush: bool
    ) -> bool:
        limit_s = self._table.update_timeout_s
        try:
            message = await asyncio.to_thread(shared.message)
            if self._attempt is not None:
                self._attempt.touch(mode=0o600)
            await load_handles(client, message, loaded.version, flush=flush, timeout_s=limit_s)
            await verify(client, loaded, limit_s)
        except (ServerRefused, Corrupt, Refused) as error:
            self._end_attempt()
            self._disable_handles(loaded.version, f"{error.what}: {error.why}")
            return False
        self._end_attempt()
        return True

    def _end_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.unlink(missing_ok=True)

    def _disable_handles(self, version: int, why: str) -> None:
        self._use_handles = False
        self._on_file_fallback(version, f"{why}; handles are tried no more")

    def close(self) -> None:
        """Free all memory."""
        self.unshare()
        self.copy.close()


async def reported(client: SglangClient, timeout_s: float) -> dict[str, str]:
    """Return the server's own checksum of each of its tensors.

    Raises:
        Refused: the server has more than one rank.
    """
    answer = await client.call("/weights_checker", {"action": "checksum"}, timeout_s=timeout_s)
    ranks: list[dict[str, Any]] = answer.get("ranks") or []
    if len(ranks) != 1:
        raise Refused(f"checksums of {len(ranks)} ranks of the SGLang server", why="one is what can be verified")
    found: dict[str, str] = ranks[0]["checksums"]
    return found


async def verify(client: SglangClient, loaded: LoadedVersion, timeout_s: float) -> None:
    """Raise Corrupt unless the server holds this version."""
    compare(loaded.checksums, await reported(client, timeout_s), loaded.version)


async def load_file(client: SglangClient, folder: Path, version: int, *, flush: bool, timeout_s: float) -> None:
    """Have the server read a safetensors file of this machine; `flush` drops the prefix cache."""
    body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": flush}
    await client.call("/update_weights_from_disk", body, timeout_s=timeout_s)


async def load_tensors(
    client: SglangClient, layout: Layout, data: memoryview, version: int, *, flush: bool, timeout_s: float
) -> None:
    """Send the tensors themselves, in buckets, within one update session; `flush` drops the prefix cache."""
    buckets: list[list[TensorEntry]] = []
    size = BUCKET_BYTES
    for entry in layout.entries:
        size += entry.nbytes
        if size > BUCKET_BYTES or not buckets:
            buckets.append([])
            size = entry.nbytes
        buckets[-1].append(entry)
    async with _session(client, timeout_s):
        for number, bucket in enumerate(buckets, 1):
            last = number == len(buckets)
            rest: dict[str, Any] = {"flush_cache": flush and last} | ({"weight_version": str(version)} if last else {})
            # In a thread: the copies of a large bucket would block the event loop for too long.
            body = await asyncio.to_thread(_bucket_message, bucket, data, rest)
            await client.call("/update_weights_from_tensor", body, timeout_s=timeout_s)


async def load_handles(client: SglangClient, message: str, version: int, *, flush: bool, timeout_s: float) -> None:
    """Have the server open shared tensors and copy them, within one update session; `flush` drops the prefix cache.

    Args:
        message: of SharedTensors, which must live until this returns.
    """
    body = {"serialized_named_tensors": [message], "flush_cache": flush, "weight_version": str(version)}
    async with _session(client, timeout_s):
        await client.call("/update_weights_from_tensor", body, timeout_s=timeout_s)


@asynccontextmanager
async def _session(client: SglangClient, timeout_s: float) -> AsyncIterator[None]:
    """The update session in which the server accepts tensors. It is ended also after the server refused something."""
    await client.call("/begin_weight_update", {}, timeout_s=timeout_s)
    try:
        yield
    except ServerRefused:
        with suppress(RelaxError):
            await client.call("/end_weight_update", {}, timeout_s=timeout_s)
        raise
    await client.call("/end_weight_update", {}, timeout_s=timeout_s)


def _bucket_message(entries: list[TensorEntry], data: memoryview, rest: dict[str, Any]) -> bytes:
    """Encode tensors in the form that the server's restricted unpickler accepts: pairs of a name and a tensor."""
    import torch

    tensors = []
    for entry in entries:
        raw = torch.frombuffer(bytearray(data[entry.offset : entry.offset + entry.nbytes]), dtype=torch.uint8)
        tensors.append((entry.name, raw.view(getattr(torch, entry.dtype)).view(entry.shape)))
    pickled = base64.b64encode(pickle.dumps(tensors)).decode()
    return msgspec.json.encode({"serialized_named_tensors": [pickled], **rest})


class SharedTensors:
    """One version where the server can open it, until it has copied it into its own tensors.

    Args:
        layout: of what lies in `data`, by the names that the server knows.
        file: of shared memory, in which `data` begins at byte `start`.

    Raises:
        Refused: there is no torch here, or the device has no room.
    """

    def __init__(self, layout: Layout, data: memoryview, file: Path, start: int, device: Device) -> None:
        try:
            import torch
            import torch.multiprocessing  # registers tensors with the pickler
        except ImportError as error:
            raise Refused("weights by their handles", why=str(error), hint="pip install torch") from error
        self._cuda = device == "cuda"
        self._pickler: Callable[[io.BytesIO], Any] = ForkingPickler
        if self._cuda:
            flat = _on_device(data)
        else:
            mapped = torch.from_file(str(file), shared=True, size=file.stat().st_size, dtype=torch.uint8)
            flat, self._pickler = mapped[start:], _file_pickler(file)
        self.tensors = {
            e.name: flat[e.offset : e.offset + e.nbytes].view(getattr(torch, e.dtype)).view(e.shape)
            for e in layout.entries
        }

    def message(self) -> str:
        """Return one entry of `serialized_named_tensors`: handles, no bytes.

        On CUDA they are opened on the device of the same *index*: role and server must see the same devices.

        Raises:
            Refused: the device's memory cannot be shared.
        """
        packed = io.BytesIO()
        try:
            self._pickler(packed).dump(list(self.tensors.items()))
        except RuntimeError as error:
            raise Refused("handles of weights", why=str(error)) from error
        return base64.b64encode(packed.getvalue()).decode()

    def close(self) -> None:
        """Free the memory; what a server still has open stays until it closes it."""
        self.tensors.clear()
        if self._cuda:
            import torch

            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()


def _on_device(data: memoryview) -> Any:
    """Copy weights to memory of torch's allocator, which is the only memory that it shares."""
    import torch

    try:
        flat = torch.empty(len(data), dtype=torch.uint8, device="cuda")
        through = torch.empty(min(len(data), PIECE_BYTES), dtype=torch.uint8)
        for at in range(0, len(data), PIECE_BYTES):
            piece = np.frombuffer(data[at : at + PIECE_BYTES], np.uint8)
            through.numpy()[: len(piece)] = piece
            flat[at : at + len(piece)].copy_(through[: len(piece)])
        torch.cuda.synchronize()
    except RuntimeError as error:
        what, hint = f"{len(data) >> 20} MiB of weights on the device, beside the server's", "lower memory_fraction"
        raise Refused(what, why=str(error), hint=hint) from error
    return flat


def _file_pickler(file: Path) -> type[ForkingPickler]:
    """Return a pickler that names the file, where torch would pass a descriptor, which only its own children can fetch.

    The server's stand-in for the fetching side opens the file (stand_ins/sitecustomize.py).
    """
    import torch
    from torch.multiprocessing.reductions import rebuild_storage_fd

    named = DupFd.__new__(DupFd)
    vars(named)["_id"] = str(file)

    class Pickler(ForkingPickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.UntypedStorage):
                return rebuild_storage_fd, (torch.UntypedStorage, named, obj.nbytes())
            return NotImplemented

    return Pickler
