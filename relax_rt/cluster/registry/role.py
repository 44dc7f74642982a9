"""The registry role: serves RegistryApi over the state machine in `core`, durable in `store` before it answers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, NoReturn

from relax_rt.cluster.registry.core import TICK_S, RegistryCore
from relax_rt.cluster.registry.store import Store
from relax_rt.interfaces.registry import Changes, Member, RegistryApi, Renewed
from relax_rt.interfaces.role import Role
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import caller

FILE = "registry.sqlite"
MAX_WAIT_S = 60.0
"""A watch returns after this time, so that a connection that died unnoticed does not hold a handler for ever."""
MAX_TEXT = 500


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
        """Serve until asked to stop. If the store cannot be written, the process ends and is restarted."""
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


class RegistryService:
    """Implements RegistryApi. No call, and no watch, returns before its state is on disk.

    Args:
        store: where the state lives; opened by `start`.
        event: appends to the run's event log.
        clock: monotonic seconds.
        identity: who calls; the default reads it from the connection.
    """

    def __init__(
        self,
        store: Store,
        *,
        event: Callable[..., None] = lambda kind, /, **fields: None,
        clock: Callable[[], float] = time.monotonic,
        identity: Callable[[], Incarnation] = lambda: caller().who,
    ) -> None:
        self._store = store
        self._event = event
        self._clock = clock
        self._identity = identity
        self._changed = asyncio.Event()
        self.core: RegistryCore

    async def start(self) -> None:
        """Read the store. Raises RelaxError: it cannot be read."""
        stored = await self._store.open()
        self.core = RegistryCore(stored, self._clock())
        self._event(
            "registry_started",
            generation=stored.generation,
            members=len(stored.entries),
            committed=self.core.committed.version if self.core.committed else 0,
        )

    async def serve(self) -> NoReturn:
        """Lapse leases as time passes. Raises RelaxError: the store cannot be written."""
        while True:
            await asyncio.sleep(TICK_S)
            for member in self.core.tick(self._clock()):
                self._event("lease_lapsed", slot=member.who.slot, epoch=member.who.epoch, detail=member.detail)
            await self._commit()

    async def close(self) -> None:
        """Close the store."""
        await self._store.close()

    async def enter_self(self, slot: str, pid: int, address: str) -> Incarnation:
        """Register the registry's own slot, with an epoch and without a lease."""
        who = Incarnation(slot, self.core.issue_epoch(slot))
        self.core.enter(who, pid, address, "ready")
        await self._commit()
        return who

    async def issue_epoch(self, slot: str, token: str = "") -> int:
        asked_again = self.core.issued(slot, token)
        epoch = asked_again or self.core.issue_epoch(slot, token)
        await self._commit()
        if not asked_again:
            self._event("epoch_issued", slot=slot, epoch=epoch)
        return epoch

    async def announce(self, pid: int, address: str, ttl_s: float, node: str = "", remote: str = "") -> Renewed:
        who = self._identity()
        answer = self.core.announce(who, pid, address, ttl_s, self._clock(), node=node, remote=remote)
        await self._commit()
        place = {"node": node, "remote": remote} if node else {}
        self._event("slot_announced", slot=who.slot, epoch=who.epoch, pid=pid, address=address, **place)
        return answer

    async def renew(self, state: str, progress: int, detail: str, policy_version: int) -> Renewed:
        who = self._identity()
        answer = self.core.renew(who, state, progress, detail[:MAX_TEXT], policy_version, self._clock())
        await self._commit()
        return answer

    async def leave(self, reason: str) -> None:
        self.core.leave(self._identity(), reason[:MAX_TEXT])
        await self._commit()

    async def process_exited(self, who: Incarnation, reason: str) -> None:
        self.core.process_exited(who, reason[:MAX_TEXT])
        await self._commit()

    async def watch(self, since: int, wait_s: float) -> Changes:
        deadline = asyncio.get_running_loop().time() + min(max(0.0, wait_s), MAX_WAIT_S)
        while True:
            signal = self._changed
            found = self.core.changes(since)
            if found is not None:
                await self._store.durable()
                return found
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0:
                return Changes(self.core.revision, False, [], self.core.committed)
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await signal.wait()

    async def issue_version(self) -> int:
        who = self._identity()
        version = self.core.issue_version(who)
        await self._commit()
        self._event("version_issued", version=version, slot=who.slot, epoch=who.epoch)
        return version

    async def commit_version(self, record: VersionRecord) -> VersionRecord:
        who = self._identity()
        known = self.core.committed == record
        committed = self.core.commit_version(who, record)
        await self._commit()
        if not known:
            fields: dict[str, Any] = {"version": record.version, "parent": record.parent, "step": record.step}
            self._event("version_committed", **fields, digest=record.digest, slot=who.slot, epoch=who.epoch)
        return committed

    async def versions(self) -> list[VersionRecord]:
        records = self.core.versions()
        await self._store.durable()
        return records

    def members(self) -> list[Member]:
        """All members."""
        found = self.core.changes(0)
        return found.members if found else []

    async def _commit(self) -> None:
        """Make the state machine's writes durable, then wake the watchers."""
        writes, self.core.writes = self.core.writes, []
        self._store.put(writes)
        try:
            await self._store.durable()
        finally:
            # Also when the caller was cancelled: its change is written all the same, and watchers wait for it.
            if writes:
                self._changed.set()
                self._changed = asyncio.Event()
