"""A version in memory that the server opens by itself: a request has handles of it in place of its bytes.

The message is torch's own pickling of tensors that processes share (torch.multiprocessing.reductions), which SGLang's
restricted unpickler takes in `/update_weights_from_tensor`. On CUDA they lie in device memory, shown by CUDA IPC. On
the CPU they are the private copy itself, a file of shared memory that the server maps.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from multiprocessing.resource_sharer import DupFd
from pathlib import Path
from typing import Any

import numpy as np

from relax_rt.roles.rollout.engines.sglang.options import Device
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.weights.manifest import Layout

PIECE_BYTES = 64 << 20
"""What is copied to the device at a time, through memory of that size."""


class Shown:
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
