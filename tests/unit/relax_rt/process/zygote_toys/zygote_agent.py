"""Stands in for an agent: one role forked from a zygote; prints the pids and waits to be killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from zygote_world import World

from relax_rt.process import procfs


async def main() -> None:
    procfs.become_subreaper()
    async with World(Path(sys.argv[1])) as world:
        probe = await world.fork()
        sys.stdout.write(" ".join(map(str, [*world.zygotes.pids, probe.found["pid"]])) + "\n")
        sys.stdout.flush()
        await asyncio.sleep(600)


asyncio.run(main())
