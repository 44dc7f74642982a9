"""A role's payloads on a node that joined: memory of its own, given out to readers elsewhere, gone with its process."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from relax_rt.cluster.nodes.links import Links
from relax_rt.transport.memory.slab_names import owner_key
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.rpc.identity import Incarnation

if TYPE_CHECKING:
    from relax_rt.transport.memory.payload import PayloadServer

PREFIX = "of-"


class FarMemory:
    """A directory in shared memory for one incarnation, and its payload server.

    Made when the role begins; served from the role's first use of the queue on. What earlier incarnations of the slot
    left here is removed: the queue has heard of their end, and gives up what lay there.

    Args:
        shm_dir: the run's directory in shared memory on this node.
        who: the incarnation.
        links: its node.
    """

    def __init__(self, shm_dir: Path, who: Incarnation, links: Links) -> None:
        self.directory = shm_dir / f"{PREFIX}{owner_key(who)}"
        self._links = links
        self._server: PayloadServer | None = None
        self._opening = asyncio.Lock()
        slot = who.slot.replace("/", "-")
        for old in shm_dir.glob(f"{PREFIX}{slot}-*"):
            if old.name.rpartition("-")[2].isdigit() and int(old.name.rpartition("-")[2]) < who.epoch:
                shutil.rmtree(old, ignore_errors=True)
        self.directory.mkdir(mode=0o700, exist_ok=True)

    async def tell(self, queue: QueueApi) -> None:
        """Serve, and tell the broker where; before any other call of this incarnation."""
        async with self._opening:
            if self._server is None:
                from relax_rt.transport.memory.payload import PayloadServer

                server = PayloadServer(self.directory, keys=self._links.keys, io_threads=1)
                await server.listen(self._links.listen)
                self._server = server
            await queue.register(self._links.node, self._server.address)

    async def close(self) -> None:
        """Serve no more."""
        if self._server is not None:
            await self._server.close()
        await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)
