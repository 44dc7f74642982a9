"""``python -m relax_rt.transport.compat.store FOLDER``: serve the store of a folder until standard input ends.

The process that starts it holds the other end of the pipe, so the broker ends with that process, however it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

import uvloop

from relax_rt.transport.compat.store.service import StoreService
from relax_rt.transport.compat.store.state import StoreLimits
from relax_rt.transport.rpc.errors import RelaxError


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
    parser = argparse.ArgumentParser(prog="python -m relax_rt.transport.compat.store", description=__doc__)
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
