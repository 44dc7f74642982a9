"""Stand-in for sgl_kernel: SGLang uses torch's own operators where a kernel is missing.

One is implemented here, in torch: the hash of seeded sampling.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from absent import make_absent  # type: ignore[import-not-found]
from torch._ops import _OpNamespace

__version__ = "0.4.10"
make_absent(__name__, decorates=False)
LOW = 0xFFFFFFFF


class _Operators(_OpNamespace):
    """torch.ops.sgl_kernel: CPU operators can be imported, and fail when called."""

    def __getattr__(self, name: str) -> Any:
        if name == "murmur_hash32_cpu":
            return SimpleNamespace(default=murmur_hash32)
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not name.endswith("_cpu"):
                raise

        def missing(*_: Any, **__: Any) -> None:
            raise NotImplementedError(f"torch.ops.sgl_kernel.{name} is not on this machine")

        return missing


def _mixed(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """One block of MurmurHash3 (x86, 32 bits), in the low half of int64."""
    block = (block * 0xCC9E2D51) & LOW
    block = ((block << 15) | (block >> 17)) & LOW
    state = state ^ ((block * 0x1B873593) & LOW)
    state = ((state << 13) | (state >> 19)) & LOW
    return (state * 5 + 0xE6546B64) & LOW


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 of (seed, position, column), uint32 [rows, columns].

    Args:
        seed: uint64 [rows]. positions: [rows]. columns: [columns].
    """
    wide = seed.view(torch.int64)
    state = torch.zeros_like(wide)
    for block in (wide & LOW, (wide >> 32) & LOW, positions.to(torch.int64) & LOW):
        state = _mixed(state, block)
    state = _mixed(state[:, None], columns.to(torch.int64)[None] & LOW) ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & LOW
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & LOW
    # Values above 2^31 have the same bits as an int32.
    return (state ^ (state >> 16)).to(torch.uint32)


setattr(torch.ops, "sgl_kernel", _Operators("sgl_kernel"))  # noqa: B010
