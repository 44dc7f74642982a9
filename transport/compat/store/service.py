"""``python -m relax_rt.transport.compat.store.service FOLDER``: serve a folder's store on a unix socket.

It serves the processes of one node until standard input ends: the process that starts it holds the other end of the
pipe, so the broker ends with that process, however it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

import uvloop

from relax_rt.transport.base.folder import (
    RUN_ID,
    BrokerLocation,
    ServedFolder,
    remove_abandoned_memory,
    socket_path,
)
from relax_rt.transport.base.liveness import node_name
from relax_rt.transport.compat.store.api import StoreApi
from relax_rt.transport.compat.store.broker import StoreBroker
from relax_rt.transport.compat.store.ledger import StoreLimits
from relax_rt.transport.rpc import rpc
from relax_rt.transport.rpc.errors import Refused, RelaxError
from relax_rt.transport.rpc.identity import Incarnation


class StoreService:
    """Serves the store of a folder.

    Args:
        folder: made if it is not there (0700); holds journal, socket and spilled payload.
    """

    def __init__(self, folder: Path, limits: StoreLimits) -> None:
        self._folder, self._limits = ServedFolder(folder), limits
        self._server: rpc.RpcServer | None = None
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
            await self._serve(self._folder.path)
        except BaseException:
            await self.close()
            raise

    async def _serve(self, folder: Path) -> None:
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
        self._server = rpc.RpcServer(rpc.make_hello(RUN_ID, Incarnation("broker/0", 0)), max_connections=16_384)
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


async def serve(folder: Path, limits: StoreLimits) -> None:
    """Serve until standard input ends or SIGTERM comes. A broker that fails ends the process with its error."""
    service = StoreService(folder, limits)
    await service.open()
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, over.set)
    loop.add_reader(sys.stdin.fileno(), lambda: None if os.read(sys.stdin.fileno(), 64) else over.set())
    failing, ending = asyncio.ensure_future(service.broker.run()), asyncio.ensure_future(over.wait())
    failed = False
    try:
        await asyncio.wait([failing, ending], return_when=asyncio.FIRST_COMPLETED)
        if failed := failing.done():
            failing.result()
    finally:
        loop.remove_reader(sys.stdin.fileno())
        for task in (failing, ending):
            task.cancel()
        await asyncio.gather(failing, ending, return_exceptions=True)
        await service.close(keep_memory=failed)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m relax_rt.transport.compat.store.service", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--capacity-bytes", type=int, default=0, help="payload in memory from which on it is spilled")
    parser.add_argument("--spill-bytes", type=int, default=0, help="payload that may be spilled to disk; 0: none")
    options = parser.parse_args()
    # An interrupt goes to the whole terminal; the process that started this one ends it by closing the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limits = StoreLimits(options.capacity_bytes or StoreLimits().capacity_bytes, options.spill_bytes)
    try:
        uvloop.run(serve(options.folder, limits))
    except RelaxError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
