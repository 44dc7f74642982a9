"""The store of a folder: its broker behind a unix socket, for the processes of one node."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from relax_rt.transport.base.folder import (
    RUN_ID,
    BrokerLocation,
    ServedFolder,
    remove_abandoned_memory,
    socket_path,
)
from relax_rt.transport.base.watch import node_name
from relax_rt.transport.compat.store.api import StoreApi
from relax_rt.transport.compat.store.broker import StoreBroker
from relax_rt.transport.compat.store.state import StoreLimits
from relax_rt.transport.rpc import rpc
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import Incarnation


class StoreService:
    """Serves the store of a folder; used by ``python -m relax_rt.transport.compat.store``.

    Args:
        folder: made if it is not there (0700); holds journal, socket and spilled payload.
    """

    def __init__(self, folder: Path, limits: StoreLimits) -> None:
        self._folder, self._limits = ServedFolder(folder), limits
        self._server: rpc.Server | None = None
        self._broker: StoreBroker | None = None

    @property
    def broker(self) -> StoreBroker:
        """The broker; open() made it."""
        assert self._broker is not None, "open() first"
        return self._broker

    async def open(self) -> None:
        """Recover the store and listen.

        Raises:
            Refused: another process serves the folder, or it is that of a queue.
            Corrupt: the journal is damaged, or written by another version.
        """
        self._folder.lock()
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise

    async def _open(self) -> None:
        folder = self._folder.path
        if (folder / "journal").exists():
            raise Refused(
                f"the store in {folder}",
                why="the folder has the journal of a queue, or of a store that relax-rt 0.1 wrote",
                hint="begin in a new folder",
            )
        await asyncio.to_thread(remove_abandoned_memory)
        memory, shm_dir = self._folder.open_memory()
        self._broker = StoreBroker(folder / "store", shm_dir, folder / "spill", memory=memory, limits=self._limits)
        await self._broker.open()
        self._server = rpc.Server(rpc.make_hello(RUN_ID, Incarnation("broker/0", 0)), max_connections=16_384)
        self._server.offer(StoreApi, self._broker)
        address = await self._server.listen(f"unix://{socket_path(folder)}")
        self._folder.publish(BrokerLocation([address], "", node_name(), os.getpid(), str(shm_dir)))

    async def close(self, *, keep_memory: bool = False) -> None:
        """Stop. Without keep_memory the payloads in shared memory end as well."""
        if self._server is not None:
            await self._server.close()
        if self._broker is not None:
            await self._broker.close()
        await asyncio.to_thread(self._folder.release, keep_memory=keep_memory)
