"""The registry as a role of a run."""

from __future__ import annotations

import asyncio
import os
from typing import ClassVar

from relax_rt.cluster.registry.service import RegistryService
from relax_rt.cluster.registry.store import Store
from relax_rt.interfaces.registry import RegistryApi
from relax_rt.interfaces.role import Role

FILE = "registry.sqlite"


class RegistryRole(Role):
    """Discovery of a run: slots, leases, epochs and policy versions. It comes first and goes last."""

    kind: ClassVar[str] = "registry"
    tier: ClassVar[int] = 0

    async def setup(self) -> None:
        """Open the store and offer RegistryApi."""
        self.service = RegistryService(Store(self.ctx.run_dir / FILE, self.ctx.run_id), event=self.ctx.event)
        await self.service.start()
        self.ctx.serve(RegistryApi, self.service)

    async def run(self) -> None:
        """Answer until asked to stop; a store that cannot be written ends the process, which then starts anew."""
        who = await self.service.enter_self(self.ctx.who.slot, os.getpid(), getattr(self.ctx, "address", ""))
        self.ctx.log.info("registry answers", epoch=who.epoch)
        await self.ctx.ready()
        self.ctx.progress.waiting("calls")
        leases = asyncio.create_task(self.service.serve())
        stopping = asyncio.create_task(self.ctx.stopping.wait())
        try:
            await asyncio.wait((leases, stopping), return_when=asyncio.FIRST_COMPLETED)
            if leases.done():
                leases.result()
        finally:
            for task in (leases, stopping):
                task.cancel()
            await asyncio.gather(leases, stopping, return_exceptions=True)

    async def teardown(self) -> None:
        """Close the store."""
        if hasattr(self, "service"):
            await self.service.close()
