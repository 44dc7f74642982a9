"""An actor that holds memory of a device, and the entry point of none: named by `target`."""

from __future__ import annotations

import os

import torch

from relax_rt.actors import Actor, idempotent


class Holder(Actor):
    """Ready once it has computed on the device."""

    async def setup(self) -> None:
        self.weights = torch.ones(1 << 28, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()

    @idempotent
    async def total(self) -> int:
        return int(self.weights.sum())

    @idempotent
    async def pid(self) -> int:
        return os.getpid()
