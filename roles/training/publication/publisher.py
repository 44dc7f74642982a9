"""Publishes the trainer's weights: staged and committed while training continues; watches which engines have them."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

import msgspec

from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.training.backend.interface import TrainerBackend
from relax_rt.roles.training.publication.adapters import AdapterVersions, VersionAdapters
from relax_rt.roles.training.publication.carriers import DeviceWeights, WeightBroadcaster, WeightFiles
from relax_rt.roles.training.publication.engine_tracker import (
    EngineLate,
    EngineLost,
    EngineTracker,
    TrackerReport,
    VersionSettled,
)
from relax_rt.roles.training.publication.settings import Communicator, PublicationTable, wire_of
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import DeadlineExceeded, OutOfSpace, RelaxError, Unreachable
from relax_rt.transport.weights.manifest import Layout, Manifest
from relax_rt.transport.weights.payloads import wire_version
from relax_rt.transport.weights.stage import WeightStage

REGISTRY_WAIT_S = 600.0
STAGE_WAIT_S = 60.0
"""Wait for room on the stage, once no engine has time left to take the version before."""
COPY_S = 300.0
"""Limit of the copy itself, once there is room."""
STAGE_RETRY_S = 0.1
RETRY_S = 0.5
WATCH_S = 2.0
MIN_CHANGES_KEPT = 0.5
"""The trainer warns if a smaller fraction of the adapters' changes survives rounding."""

T = TypeVar("T")


class StagedVersion(msgspec.Struct, frozen=True):
    """A version on the stage, and how long that took.

    Attributes:
        export_s: until the weights might change again. stage_s: all of it.
        changes_kept: see `AdapterBackend.changes_kept`.
    """

    manifest: Manifest
    export_s: float
    stage_s: float
    changes_kept: float | None = None


class Publisher:
    """Publishes one version after the other, each in the background of the next step.

    The weights are copied to the stage at once, those of a gang's other ranks aside; until that is done
    `wait_copied` holds the next optimizer step, but not its forward and backward passes. Gathering the copies,
    digests, the delta and the commit need the copies alone. At most one publication is under way. What goes wrong in it
    is raised by the next call.

    Args:
        stage: opened under this incarnation's epoch.
        dtype: of the published weights.
        engines: roles whose engines follow every version.
        committed: the newest committed version, 0 if there is none.
        files: puts each version into a folder as well.
        communicator: over which broadcasts go, where the carrier is "collective".
    """

    def __init__(
        self,
        ctx: RoleContext,
        stage: WeightStage,
        backend: TrainerBackend,
        *,
        dtype: str,
        table: PublicationTable,
        engines: Collection[str],
        committed: int,
        files: WeightFiles | None = None,
        communicator: Communicator = "gloo",
    ) -> None:
        self._ctx, self._stage, self._backend, self._dtype, self._table = ctx, stage, backend, dtype, table
        self._committed, self._files = committed, files
        self._broadcaster, self._device = WeightBroadcaster.of(ctx, table, communicator), DeviceWeights.of(ctx, table)
        self._adapter_versions = AdapterVersions.of(table, backend, stage, dtype)
        self._tracker = EngineTracker(engines, table.ack_timeout_s)
        self._copied = threading.Event()
        self._copied.set()
        self._idle = threading.Event()
        self._idle.set()
        self._closing = self._warned = False
        self._copy_wait_s = table.ack_timeout_s + STAGE_WAIT_S + COPY_S
        # Each of its parts has a limit; a disk or a driver that never answers has none.
        self._limit_s = self._copy_wait_s + STAGE_WAIT_S + COPY_S + table.directory_timeout_s + REGISTRY_WAIT_S
        self._started_at = 0.0
        self._facts: dict[int, dict[str, float | int]] = {}
        self._phase = ""
        self._copied_at: float | None = None
        self.current: asyncio.Task[VersionRecord] | None = None
        self._watching = asyncio.create_task(self._watch())

    async def publish(self, weights: VersionRecord) -> None:
        """Publish the backend's weights as this version; returns once the publication before it is committed."""
        await self.wait_committed()
        self._copied.clear()
        self._started_at = time.monotonic()
        self.current = asyncio.create_task(self._publish(weights))

    async def wait_committed(self, publication: asyncio.Task[VersionRecord] | None = None) -> None:
        """Wait until a publication (default: the newest) is committed; the wait is visible in the role's progress."""
        publication = publication or self.current
        if publication is None:
            return
        try:
            while not publication.done():
                self._check_overdue()
                self._ctx.progress.waiting(f"the publication before: {self._phase}")
                await asyncio.wait([publication], timeout=RETRY_S)
        finally:
            self._ctx.progress.waiting("")
        publication.result()

    async def wait_files(self) -> None:
        """Wait until the newest version is written to the folder of files, if there is one."""
        if self._files is not None:
            await self._files.wait()

    def wait_copied(self) -> float:
        """Block until the weights have been copied and may change. Call it in the trainer's thread.

        Returns:
            Seconds waited.
        """
        if self._copied.is_set():
            return 0.0
        began = time.monotonic()
        try:
            while not self._copied.wait(RETRY_S):
                if time.monotonic() - began > self._copy_wait_s:
                    raise DeadlineExceeded(
                        f"the weights were not copied within {self._copy_wait_s:g} s", why=self._phase
                    )
                self._ctx.progress.waiting(f"the copy of the weights before: {self._phase}")
        finally:
            self._ctx.progress.waiting("")
        return time.monotonic() - began

    def check(self) -> None:
        """Raise the failure of a background task, or DeadlineExceeded for an overdue publication."""
        self._check_overdue()
        broadcast = self._broadcaster.current if self._broadcaster is not None else None
        for task in (self.current, self._watching, broadcast):
            if task is not None and task.done():
                task.result()

    @property
    def overdue(self) -> bool:
        """Whether the copy of a publication, or all of it, has taken longer than its parts may take."""
        if self.current is None or self.current.done():
            return False
        return time.monotonic() - self._started_at > self._limit_now_s

    @property
    def _limit_now_s(self) -> float:
        return self._limit_s if self._copied.is_set() else self._copy_wait_s

    def _check_overdue(self) -> None:
        limit_s = self._limit_now_s
        if self.overdue:
            raise DeadlineExceeded(f"the publication was not through within {limit_s:g} s", why=self._phase)

    async def close(self) -> None:
        """Cancel what is under way."""
        self._closing = True
        tasks = [task for task in (self.current, self._watching) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._files is not None:
            await self._files.close()
        if self._broadcaster is not None:
            await self._broadcaster.close()
        # The thread that writes the stage cannot be cancelled; the stage must not be closed under it.
        await asyncio.to_thread(self._idle.wait, COPY_S)
        if self._device is not None:
            await asyncio.to_thread(self._device.close)

    async def _publish(self, weights: VersionRecord) -> VersionRecord:
        """Stage and seal with digests, commit under this incarnation's epoch, retire the version before."""
        try:
            staged = await self._staged(weights.version)
        finally:
            self._copied.set()
        record = VersionRecord(weights.version, weights.parent, weights.step, staged.manifest.digest, weights.changed)
        if self._files is not None:
            self._phase = f"version {weights.version} is put into the folder of files, before its commit"
            await self._files.write_before_commit(record)
        if self._broadcaster is not None:
            self._phase = f"whom version {weights.version} is broadcast to is written down, before its commit"
            await self._broadcaster.reserve(staged.manifest)
        self._phase = f"version {weights.version} is to be committed in the registry"
        record = await self._wait_for_registry(lambda: self._ctx.registry.commit_version(record))
        self._committed = record.version
        self._phase = f"version {record.version} is committed; the memory of those before it is freed"
        if self._broadcaster is not None:
            self._broadcaster.start()
        facts: dict[str, float | int] = {
            "bytes": staged.manifest.layout.nbytes,
            "delta_bytes": staged.manifest.deltas[-1].nbytes if staged.manifest.deltas else 0,
            "wire_bytes": staged.manifest.wire_bytes,
            "adapter_bytes": staged.manifest.adapter_bytes,
            "export_s": round(staged.export_s, 4),
            "stage_s": round(staged.stage_s, 4),
        }
        if staged.changes_kept is not None:
            facts["changes_kept"] = round(staged.changes_kept, 4)
            if staged.changes_kept < MIN_CHANGES_KEPT and not self._warned:
                # Once a process: engines sample from what is published, not from what was trained.
                self._warned = True
                self._ctx.log.warning(
                    f"of the changes that adapters make, {staged.changes_kept:.1%} are left in {self._dtype}: the "
                    'others are below the rounding of the weights; roles.rollout.dtype = "float32" keeps all',
                    changes_kept=facts["changes_kept"],
                )
        self._facts = {record.version: facts}
        self._report(self._tracker.committed(record.version, time.monotonic()))
        await asyncio.to_thread(self._stage.retire, record.version)
        if self._broadcaster is not None:
            await self._broadcaster.retire(record.version)
        if self._device is not None:
            await asyncio.to_thread(self._device.retire, record.version)
        self._ctx.event(
            "published",
            version=record.version,
            parent=record.parent,
            step=record.step,
            digest=record.digest,
            **facts,
            **({"no_delta": staged.manifest.no_delta} if staged.manifest.no_delta else {}),
        )
        await self._ctx.ready(record.version)
        if self._files is not None:
            self._phase = f"version {record.version} is committed; those before it are removed from the folder of files"
            await self._files.write_after_commit(record)
        return record

    async def _staged(self, version: int) -> StagedVersion:
        """Stage the version; wait for a free buffer while engines have time to release one, then evict a reader."""
        deadline, evict = math.inf, False
        while True:
            self._phase = f"version {version} is staged"
            try:
                return await asyncio.to_thread(self._write, version, evict)
            except OutOfSpace as error:
                now = time.monotonic()
                # Once copied, the weights may be others: they must not be exported again as this version.
                if self._copied.is_set() or now > deadline:
                    raise
                self._phase = str(error)
                if not evict and not self._tracker.patience_s(now):
                    deadline, evict = now + STAGE_WAIT_S, True
                await asyncio.sleep(STAGE_RETRY_S)

    def _write(self, version: int, evict: bool) -> StagedVersion:
        self._idle.clear()
        try:
            return self._write_stage(version, evict)
        finally:
            self._idle.set()

    def _write_stage(self, version: int, evict: bool) -> StagedVersion:
        layout, began = self._backend.layout(self._dtype), time.monotonic()
        self._copied_at = None
        if evict and (evicted := self._stage.evict(self._committed)):
            # Where only memory is short nothing is taken from anybody.
            why = "readers hold every buffer longer than engines have time"
            self._ctx.event("weights_evicted", version=version, buffer=evicted, why=why)
        base = self._adapter_versions.base(layout, self._committed) if self._adapter_versions is not None else None
        with self._stage.writing(layout, self._committed) as (file, view):
            adapters: VersionAdapters | None = None
            if self._adapter_versions is not None and base is not None:
                adapters = self._adapter_versions.take(base)
            else:
                self._backend.export(view, self._dtype, lambda: self._release_weights(version))
            self._release_weights(version)
            kept = getattr(self._backend, "changes_kept", None)
            if self._adapter_versions is not None and adapters is not None:
                self._adapter_versions.make(adapters, view)
            manifest = self._sealed(version, layout, file, view, adapters)
            if self._device is not None:
                self._device.show(manifest, view)
            if self._table.delta and self._committed:
                # To the version that engines have or are getting.
                manifest = self._stage.seal_delta(manifest, view, self._committed)
        assert self._copied_at is not None
        return StagedVersion(manifest, self._copied_at - began, time.monotonic() - began, kept)

    def _release_weights(self, version: int) -> None:
        """Let the weights change: all that is still read of them was copied."""
        if self._copied_at is None:
            self._copied_at = time.monotonic()
            self._phase = f"version {version} is brought to the stage, whole"
            self._copied.set()

    def _sealed(
        self, version: int, layout: Layout, file: str, view: memoryview, adapters: VersionAdapters | None
    ) -> Manifest:
        """Seal the copy, rounded to the wire dtype; if shared memory is full, keep the copy and wait for room."""
        wire = wire_of(self._table.wire_dtype, self._dtype)
        # Rounded in place: `view` then holds what will arrive.
        narrow = wire_version(layout, view, wire) if wire is not None else b""
        beside, digest = (adapters.beside, adapters.base.digest) if adapters is not None else (b"", "")
        deadline = time.monotonic() + STAGE_WAIT_S
        while True:
            try:
                return self._stage.seal(version, layout, file, view, narrow, beside, digest)
            except OutOfSpace as error:
                if self._closing or time.monotonic() > deadline:
                    raise
                self._phase = str(error)
                time.sleep(STAGE_RETRY_S)

    async def _wait_for_registry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call of the registry until it answers: its absence must not cost the step."""
        deadline = time.monotonic() + REGISTRY_WAIT_S
        while True:
            try:
                return await call()
            except (Unreachable, DeadlineExceeded) as error:
                if time.monotonic() > deadline:
                    raise
                self._phase = f"the registry is away: {error}"
                await asyncio.sleep(STAGE_RETRY_S)

    async def _watch(self) -> None:
        """Pass the registry's member changes to the tracker."""
        revision = 0
        while True:
            try:
                changes = await self._ctx.registry.watch(revision, WATCH_S)
            except RelaxError:
                await asyncio.sleep(RETRY_S)
                self._report(self._tracker.tick(time.monotonic()))
                continue
            revision = changes.revision
            self._report(self._tracker.members(changes.members, time.monotonic()))

    def _report(self, reports: list[TrackerReport]) -> None:
        for report in reports:
            match report:
                case EngineLate(who=who):
                    facts = {"version": report.version, "has": report.has, "after_s": round(report.after_s, 2)}
                    self._ctx.event("engine_late", engine=str(who), **facts)
                    self._ctx.log.warning("an engine is late with new weights", engine=str(who), **facts)
                case EngineLost(who=who):
                    self._ctx.event(
                        "engine_lost", engine=str(who), version=report.version, has=report.has, why=report.why
                    )
                case VersionSettled():
                    self._ctx.metrics(
                        {
                            "kind": "publication",
                            "version": report.version,
                            "engines": report.whole,
                            "late": report.late,
                            "starting": report.starting,
                            "seconds": round(report.after_s, 4),
                            **self._facts.get(report.version, {}),
                        }
                    )
