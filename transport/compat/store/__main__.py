"""``python -m relax_rt.transport.compat.store FOLDER``: a broker for the keyed store, until its standard input ends.

Who starts it holds the other end of a pipe, and so it never outlives them, however they end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

import uvloop

from relax_rt.transport.queue.hosting import Host
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.rpc.errors import RelaxError

UNBOUNDED = 1 << 62


async def serve(folder: Path, *, capacity_bytes: int, spill_bytes: int) -> None:
    """Host the store until standard input ends or SIGTERM comes. A broken broker ends with its error."""
    limits = QueueLimits(
        capacity_bytes=capacity_bytes or UNBOUNDED, capacity_samples=UNBOUNDED, spill_bytes=spill_bytes
    )
    # The queue beside the store has no consumer; a policy names at least one.
    host = Host(folder, LedgerPolicy(tasks={"none": ("none",)}, step_task=""), limits)
    await host.open()
    assert host.broker is not None
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, over.set)
    loop.add_reader(sys.stdin.fileno(), lambda: None if os.read(sys.stdin.fileno(), 64) else over.set())
    failing, ending = asyncio.ensure_future(host.broker.run()), asyncio.ensure_future(over.wait())
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
        await host.close(keep_memory=failed)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m relax_rt.transport.compat.store", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--capacity-bytes", type=int, default=0, help="payload in memory from which on it is spilled")
    parser.add_argument("--spill-bytes", type=int, default=0, help="payload that may be spilled to disk; 0: none")
    options = parser.parse_args()
    # An interrupt goes to the whole terminal; who started this ends it by closing the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        uvloop.run(serve(options.folder, capacity_bytes=options.capacity_bytes, spill_bytes=options.spill_bytes))
    except RelaxError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
