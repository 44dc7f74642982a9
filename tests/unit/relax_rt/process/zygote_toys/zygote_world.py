"""Zygotes under test: this process is their agent."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from relax_rt.process.child import packet_pair
from relax_rt.process.limits import ProcessLimits
from relax_rt.process.zygote import ForkMsg
from relax_rt.process.zygote_pool import ForkFailed, ZygoteKey, ZygotePool
from relax_rt.supervision.spawner import RoleSpawner

TOYS = Path(__file__).parent
WAIT_S = 120
KEY = ZygoteKey(sys.executable, ())
RUN_ID = "0badf00d"


class Probe(NamedTuple):
    """A forked process and what it said."""

    control: socket.socket
    found: dict[str, Any]

    def let_go(self) -> int:
        """Its exit code, once it was told to end."""
        self.control.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.found["pid"], 0)[1])


class World:
    def __init__(self, folder: Path, modules: Sequence[str] = ("zygote_probe",)) -> None:
        self.log = folder / "log"
        self.events: list[dict[str, Any]] = []
        self.spawner = RoleSpawner(lambda kind, **fields: self.events.append({"kind": kind, **fields}))
        self.zygotes: ZygotePool = self.spawner.use_zygotes(folder / "zygote.log", None, RUN_ID)
        plain = self.zygotes.environment
        path = os.pathsep.join([str(TOYS), os.environ.get("PYTHONPATH", "")])
        self.zygotes.environment = lambda own: {**plain(own), "PYTHONPATH": path, "OF_ZYGOTE": "1"}
        self.zygotes.preload(KEY, "", modules)
        self.pair = self.zygotes.pairs[KEY]

    async def __aenter__(self) -> Self:
        self.zygotes.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.spawner.aclose()
        self.spawner.close()

    def zygote_events(self, kind: str, zygote: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["kind"] == kind and e["zygote"].startswith(zygote)]

    async def until(self, probe: Callable[[], Any]) -> Any:
        end = time.monotonic() + WAIT_S
        while not (found := probe()):
            assert time.monotonic() < end, self.events
            await asyncio.sleep(0.01)
        return found

    async def fork(self, *, needs: Sequence[str] = ("zygote_probe",), nice: int = 0, **env: str) -> Probe:
        ours, theirs = packet_pair()
        try:
            pid = await self._fork(theirs, needs, nice, env)
        except ForkFailed:
            ours.close()
            raise
        ours.settimeout(WAIT_S)
        found = json.loads(await asyncio.to_thread(ours.recv, 1 << 18))
        assert found["pid"] == pid
        return Probe(ours, found)

    async def _fork(self, theirs: socket.socket, needs: Sequence[str], nice: int, env: dict[str, str]) -> int:
        with theirs, self.log.open("ab", buffering=0) as log:
            order = ForkMsg(
                entry="relax_rt.hosting.host:main",
                argv=[sys.executable, "-m", "relax_rt.hosting.host", "toy/0"],
                env={"RELAX_SLOT": "toy/0", "RELAX_EPOCH": "7", **env},
                tags=("RELAX_SLOT", "RELAX_EPOCH"),
                limits=ProcessLimits(nice=nice),
            )
            return await self.zygotes.fork(KEY, order, [log.fileno(), theirs.fileno()], needs=needs)
