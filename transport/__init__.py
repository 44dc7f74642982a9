"""Bytes and tensors between processes: messages, shared memory, the TransferQueue, weight publication."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if __name__ != "relax_rt.transport":
    raise ImportError(f"import relax_rt.transport, not {__name__}: the short name belongs to your own code")

if TYPE_CHECKING:
    from relax_rt.transport.queue.transfer_queue import TransferQueue

__all__ = ["TransferQueue"]


def __getattr__(name: str) -> Any:
    # numpy and ZeroMQ are loaded with the first use, not with the package.
    if name == "TransferQueue":
        from relax_rt.transport.queue.transfer_queue import TransferQueue

        return TransferQueue
    raise AttributeError(f"module 'relax_rt.transport' has no attribute '{name}'")
