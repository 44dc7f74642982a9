"""A rollout whose engine is struck once at each step of a publication: the target of a test's config."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from relax_rt.roles.rollout.engines.base import Engine, KvPolicy, Swap
from relax_rt.roles.rollout.role import RolloutRole
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt
from relax_rt.transport.weights.source import WeightSource

FRAGILE = "rollout/0"
STRIKES = (
    "killed_before_fetch",
    "killed_in_fetch",
    "killed_when_verified",
    "killed_in_swap",
    "killed_before_acknowledgement",
    "lies",
    "reads_what_differs",
    "hangs_in_fetch",
    "stopped_in_fetch",
)


def die(how: signal.Signals = signal.SIGKILL) -> None:
    os.kill(os.getpid(), how)


class Torn:
    """A source that breaks in the middle of the copy."""

    def __init__(self, source: WeightSource, strike: str) -> None:
        self.record, self.manifest = source.record, source.manifest
        self._strike = strike

    def copy_into(self, into: memoryview) -> None:
        into[: len(into) // 2] = b"\xff" * (len(into) // 2)
        if self._strike == "reads_what_differs":
            raise Corrupt("the copy", why="struck by the test")
        die(signal.SIGSTOP if self._strike == "stopped_in_fetch" else signal.SIGKILL)

    def mapped(self) -> AbstractContextManager[memoryview]:
        raise NotImplementedError


class FragileEngine:
    """An engine that takes the next strike at each second version that it is to get."""

    def __init__(self, engine: Engine, struck: Path) -> None:
        self._engine, self._struck = engine, struck
        self._versions = 0
        self._strike = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _now(self, strike: str) -> bool:
        return self._strike == strike

    async def prepare(self, source: WeightSource) -> None:
        self._versions += 1
        if not self._strike and self._versions > 1:
            done = len(list(self._struck.iterdir()))
            if done < len(STRIKES):
                self._strike = STRIKES[done]
                (self._struck / f"{done:02d}").write_text(f"{self._strike} {source.record.version}")
        if self._now("killed_before_fetch"):
            die()
        if self._strike in ("killed_in_fetch", "reads_what_differs", "stopped_in_fetch"):
            source = Torn(source, self._strike)
        if self._now("hangs_in_fetch"):
            await asyncio.sleep(3600)
        await self._engine.prepare(source)
        if self._now("killed_when_verified"):
            die()

    async def commit(self, record: VersionRecord, kv: KvPolicy) -> Swap:
        if self._now("killed_in_swap"):
            asyncio.get_running_loop().call_soon(die)
        if self._now("lies"):
            return Swap(record.version, 0.0, 0)
        swap = await self._engine.commit(record, kv)
        if self._now("killed_before_acknowledgement"):
            die()
        return swap


class FragileRollout(RolloutRole):
    """All other slots are whole."""

    def _load(self) -> None:
        super()._load()
        if self.ctx.who.slot == FRAGILE:
            struck = self.ctx.run_dir / "struck"
            struck.mkdir(exist_ok=True)
            self.engine = FragileEngine(self.engine, struck)
