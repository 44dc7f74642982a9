"""How a version gets into an idle SGLang server and is verified there: from a file, in requests, or by handles."""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from multiprocessing.reduction import ForkingPickler
from multiprocessing.resource_sharer import DupFd
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from relax_rt.roles.rollout.engines.settings import SglangTable
from relax_rt.roles.rollout.engines.sglang.client import Client, ServerRefused
from relax_rt.roles.rollout.engines.sglang.options import Device
from relax_rt.roles.rollout.engines.sglang.weights import PrivateCopy, Recipe, by_expert, checksums, compare
from relax_rt.transport.rpc.errors import Corrupt, Refused, RelaxError
from relax_rt.transport.weights.manifest import Layout
from relax_rt.transport.weights.source import WeightSource

PIECE_BYTES = 64 << 20
"""What is copied to the device at a time, through memory of that size."""


class SharedTensors:
    """One version where the server can open it, until it has copied it into its own tensors.

    Args:
        layout: of what lies in `data`, by the names that the server knows.
        file: of shared memory, in which `data` lies from byte `start` on.

    Raises:
        Refused: there is no torch here, or the device does not take it.
    """

    def __init__(self, layout: Layout, data: memoryview, file: Path, start: int, device: Device) -> None:
        try:
            import torch
            import torch.multiprocessing  # which teaches the pickler about tensors
        except ImportError as error:
            raise Refused("weights by their handles", why=str(error), hint="pip install torch") from error
        self._cuda = device == "cuda"
        flat = _on_device(data) if self._cuda else _mapped(file, start)
        self._pickler: Callable[[io.BytesIO], Any] = ForkingPickler if self._cuda else _pickler_of(file)
        self.tensors = {
            e.name: flat[e.offset : e.offset + e.nbytes].view(getattr(torch, e.dtype)).view(e.shape)
            for e in layout.entries
        }

    def message(self) -> str:
        """One entry of `serialized_named_tensors`: handles, no bytes.

        On CUDA they are opened on the device of the same *index*: role and server must see the same devices.

        Raises:
            Refused: the device's memory cannot be shown.
        """
        packed = io.BytesIO()
        try:
            self._pickler(packed).dump(list(self.tensors.items()))
        except RuntimeError as error:
            raise Refused("handles of weights", why=str(error)) from error
        return base64.b64encode(packed.getvalue()).decode()

    def close(self) -> None:
        """Give the memory back; what a server still has open of it stays until that lets go."""
        self.tensors.clear()
        if self._cuda:
            import torch

            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()


def _on_device(data: memoryview) -> Any:
    """A copy in memory that torch's allocator has made: it shows no other."""
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


def _mapped(file: Path, start: int) -> Any:
    import torch

    return torch.from_file(str(file), shared=True, size=file.stat().st_size, dtype=torch.uint8)[start:]


def _pickler_of(file: Path) -> type[ForkingPickler]:
    """Names the file where torch would hand a descriptor over, which only processes of one program can fetch.

    The server's stand-in for what fetches it opens the file (stand_ins/sitecustomize.py).
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
        message: of handles.SharedTensors; it must live until then.
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


OnFileFallback = Callable[[int, str], object]
"""Told a version that does not go by handles though it was to, and why."""


class Held(msgspec.Struct, frozen=True):
    """A version and the checksums of a server that holds it."""

    version: int
    expected: dict[str, str]


class Loader:
    """Fetches versions into a private copy, and has the server take them from it as `sglang.weights` says.

    What goes wrong with handles costs only these where the server can say so: it takes the version from the file, in
    whole and verified as ever, and so the ones after it. A server that an attempt has ended cannot: `attempt` is there
    as long as one is under way, and a successor that finds it makes none.

    Args:
        folder: of the copy.
        attempt: a file's path; None: nothing is remembered.
    """

    def __init__(
        self, table: SglangTable, folder: Path, device: Device, attempt: Path | None, not_shown: OnFileFallback
    ) -> None:
        self.copy = PrivateCopy(folder)
        self.recipes: dict[str, Recipe] = {}
        self._table, self._device, self._attempt, self._not_shown = table, device, attempt, not_shown
        self._handles, self._tried = table.weights == "handles", False
        self._shown: SharedTensors | None = None
        if self._handles and attempt is not None and attempt.exists():
            self._give_up(0, "an incarnation before this one, or its server, ended while the server opened handles")

    def fetch(self, source: WeightSource) -> Held:
        """Fill the copy, and have it where the server can open it. Blocks.

        Raises:
            Gone, Corrupt, Refused, OutOfSpace: see PrivateCopy.fill.
        """
        self.hide()
        with self.copy.fill(source) as view:
            layout = by_expert(source.manifest.layout)
            held = Held(source.manifest.version, checksums(self.recipes, layout, view, self._device))
        self._show()
        return held

    def _show(self) -> None:
        """On a device it takes as long as the copy; where it fails, the next version is another try."""
        if not self._handles:
            return
        copy, self._tried = self.copy, True
        assert copy.layout is not None
        with copy.view as view:
            try:
                self._shown = SharedTensors(by_expert(copy.layout), view, copy.path, copy.start, self._device)
            except Refused as error:
                self._not_shown(copy.version, str(error))

    def hide(self) -> None:
        """Give the memory back in which a version is shown."""
        self._tried = False
        if self._shown is not None:
            self._shown.close()
            self._shown = None

    async def load(self, client: Client, held: Held, *, flush: bool) -> None:
        """Have an idle server take what lies in the copy, and verify that it holds it.

        Args:
            flush: drop the prefix cache.

        Raises:
            Corrupt: it holds something else. ServerRefused, Unreachable, DeadlineExceeded: it did not take it.
        """
        if not self._tried:
            await asyncio.to_thread(self._show)
        try:
            if self._shown is None or not await self._load_shown(client, held, self._shown, flush=flush):
                await self._load_copy(client, held, flush=flush)
        finally:
            self.hide()

    async def _load_copy(self, client: Client, held: Held, *, flush: bool) -> None:
        limit = self._table.update_timeout_s
        if self._table.weights == "tensor":
            layout = self.copy.layout
            assert layout is not None
            # Not released here: a thread may still read from it when this is cancelled.
            view = self.copy.view
            await load_tensors(client, by_expert(layout), view, held.version, flush=flush, timeout_s=limit)
        else:
            await load_file(client, self.copy.folder, held.version, flush=flush, timeout_s=limit)
        await verify(client, held.expected, held.version, limit)

    async def _load_shown(self, client: Client, held: Held, shown: SharedTensors, *, flush: bool) -> bool:
        limit = self._table.update_timeout_s
        try:
            message = await asyncio.to_thread(shown.message)
            self._mark()
            await load_handles(client, message, held.version, flush=flush, timeout_s=limit)
            await verify(client, held.expected, held.version, limit)
        except (ServerRefused, Corrupt, Refused) as error:
            self._unmark()
            self._give_up(held.version, f"{error.what}: {error.why}")
            return False
        self._unmark()
        return True

    def _give_up(self, version: int, why: str) -> None:
        self._handles = False
        self._not_shown(version, f"{why}; handles are tried no more")

    def _mark(self) -> None:
        if self._attempt is not None:
            self._attempt.touch(mode=0o600)

    def _unmark(self) -> None:
        if self._attempt is not None:
            self._attempt.unlink(missing_ok=True)

    def close(self) -> None:
        """Give all memory back."""
        self.hide()
        self.copy.close()
