"""The ways of a version to the engines besides the stage: broadcasts, device memory they share, files in a folder."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from relax_rt.config.problems import BadInput
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.locations import files_folder, model_folder, offers_folder, stage_folder
from relax_rt.roles.training.publication.settings import Communicator, PublicationTable
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import DeadlineExceeded, Gone, OutOfSpace, Refused, RelaxError
from relax_rt.transport.weights import device
from relax_rt.transport.weights.broadcast.machine import BroadcastLimits
from relax_rt.transport.weights.broadcast.protocol import BroadcastFailed
from relax_rt.transport.weights.broadcast.receivers import BroadcastReceivers, ReservedReceivers
from relax_rt.transport.weights.cuda_ipc import CudaStage
from relax_rt.transport.weights.device import DeviceView
from relax_rt.transport.weights.directory import WeightDirectory
from relax_rt.transport.weights.manifest import Manifest
from relax_rt.transport.weights.source import StageSource

if TYPE_CHECKING:
    from relax_rt.transport.weights.broadcast.group import BroadcastGroup
    from relax_rt.transport.weights.broadcast.source import SendBuffer


ROOT = "trainer"
START_S = 120.0
"""For a rank's process, which imports the library, on a machine that is busy; no broadcast waits for it."""


def limits_of(timeout_s: float) -> BroadcastLimits:
    """Deadlines of a broadcast's steps, so that within its time the others can go on without one that is lost."""
    step = timeout_s / 4
    return BroadcastLimits(hello_s=2 * step, start_s=START_S, join_s=step, stall_s=step, abort_s=min(5.0, step / 2))


class WeightBroadcaster:
    """Broadcasts one version after the other. Call it on the event loop.

    A version that is committed while the one before is still under way is not broadcast: engines take it from the
    stage. So does an engine whose rank is not there yet: processes are started ahead, and no version waits for one.
    A rank whose process never comes up is given up, the trainer's own with all broadcasts, and an event says why.
    """

    def __init__(self, ctx: RoleContext, stage: Path, timeout_s: float, communicator: Communicator) -> None:
        self._ctx, self._stage, self._timeout_s = ctx, stage, timeout_s
        self._kind = communicator
        self._receivers = BroadcastReceivers(offers_folder(ctx))
        self._reserved: ReservedReceivers | None = None
        self._manifest: Manifest | None = None
        self._group: BroadcastGroup | None = None
        self._given_up: set[str] = set()
        self._send_buffer: SendBuffer
        self._opening = asyncio.create_task(self._open())
        self.current: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, ctx: RoleContext, table: PublicationTable, communicator: Communicator) -> WeightBroadcaster | None:
        """Make the broadcaster that the config asks for; None: no broadcasts."""
        if table.carrier != "collective":
            return None
        return cls(ctx, stage_folder(ctx), table.broadcast_timeout_s, communicator)

    async def reserve(self, manifest: Manifest) -> None:
        """Reserve the receivers of a version; call it before the commit."""
        self._drop("it was not committed")
        if self._group is None or (self.current is not None and not self.current.done()):
            return
        with suppress(OSError):
            there = await self._ready()
            if ROOT not in there:
                return
            self._reserved = await asyncio.to_thread(
                self._receivers.reserve, manifest.version, manifest.digest, manifest.sent_bytes, self._timeout_s, there
            )
            self._manifest = manifest

    async def _ready(self) -> frozenset[str]:
        """The ranks that can be broadcast to; those of other engines are started for the next version."""
        from relax_rt.transport.weights.broadcast.group import RankSpec

        assert self._group is not None
        registered = await asyncio.to_thread(self._receivers.registered)
        for receiver in registered:
            self._group.admit(RankSpec(receiver.slot, receiver.device))
        self._group.prestart(ROOT, *(receiver.slot for receiver in registered))
        there, given_up = self._group.present, self._group.given_up
        for slot in given_up.keys() - self._given_up - {ROOT}:
            self._given_up.add(slot)
            self._ctx.event("broadcast_rank_removed", communicator=self._kind, engine=slot, why=given_up[slot])
        if ROOT in given_up:
            await self._off(given_up[ROOT])
        return there

    async def _off(self, why: str) -> None:
        """There are no broadcasts any more."""
        self._ctx.event("broadcast_disabled", communicator=self._kind, why=why)
        self._ctx.log.warning("weights are not broadcast", why=why)
        group, self._group = self._group, None
        if group is not None:
            await group.__aexit__(None, None, None)

    def start(self) -> None:
        """Broadcast the committed version in the background."""
        reserved, manifest, self._reserved = self._reserved, self._manifest, None
        if reserved is not None and manifest is not None:
            self.current = asyncio.create_task(self._send(manifest, reserved))

    async def retire(self, committed: int) -> None:
        """Forget the broadcasts of versions before the committed one."""
        await asyncio.to_thread(self._receivers.retire, committed)

    async def close(self) -> None:
        """Give up what is under way, and end the processes."""
        self._drop("the trainer ends")
        tasks = [task for task in (self._opening, self.current) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._group is not None:
            await self._group.__aexit__(None, None, None)
            self._group = None

    def _drop(self, why: str) -> None:
        if (reserved := self._reserved) is not None:
            self._reserved = None
            reserved.finish(dict.fromkeys(reserved.receivers, why))

    async def _open(self) -> None:
        """Behind the start of the trainer: until it is done, nothing is broadcast."""
        from relax_rt.transport.weights.broadcast.group import GLOO, NCCL, BroadcastGroup, RankSpec
        from relax_rt.transport.weights.broadcast.source import DeviceSendBuffer, host_send_buffer

        nccl = self._kind == "nccl"
        root = RankSpec(ROOT, (os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0") if nccl else "")
        group = BroadcastGroup([root], NCCL if nccl else GLOO, limits_of(self._timeout_s))
        self._send_buffer = DeviceSendBuffer() if nccl else host_send_buffer
        try:
            await group.__aenter__()
            group.prestart(ROOT)
        except (RelaxError, ImportError, OSError) as error:
            await self._off(str(error))
            return
        self._group = group

    async def _send(self, manifest: Manifest, reserved: ReservedReceivers) -> None:
        from relax_rt.transport.weights.broadcast.source import broadcast_version

        assert self._group is not None
        began, error, unusable = time.monotonic(), "", False
        lost = dict.fromkeys(reserved.receivers, "the trainer ends")
        try:
            memories = {slot: receiver.memory for slot, receiver in reserved.receivers.items()}
            outcome = await broadcast_version(
                self._group, ROOT, self._stage, manifest, memories, self._timeout_s, send_buffer=self._send_buffer
            )
            lost = {one.member: f"{one.fate}: {one.why}" for one in outcome.lost}
        except BroadcastFailed as failed:
            error = str(failed)
            if failed.outcome is not None:
                lost = {one.member: f"{one.fate}: {one.why}" for one in failed.outcome.lost}
            else:
                lost, unusable = dict.fromkeys(reserved.receivers, error), True
        except (RelaxError, OSError) as failed:
            error = str(failed)
            lost = dict.fromkeys(reserved.receivers, error)
        finally:
            reserved.finish(lost, unusable)
        self._ctx.event(
            "weights_broadcast",
            version=manifest.version,
            communicator=self._kind,
            bytes=manifest.sent_bytes,
            engines=sorted(set(reserved.receivers) - set(lost)),
            lost=lost,
            why=error,
            seconds=round(time.monotonic() - began, 4),
        )


class DeviceWeights:
    """Shows each staged version. A device that does not take one costs nothing but that: engines read the stage."""

    def __init__(self, ctx: RoleContext, folder: Path) -> None:
        self._ctx, self._folder = ctx, folder
        self._stage: CudaStage | None = None

    @classmethod
    def of(cls, ctx: RoleContext, table: PublicationTable) -> DeviceWeights | None:
        """As the config says; None: no version is shown."""
        return cls(ctx, stage_folder(ctx)) if table.carrier == "cuda_ipc" else None

    def show(self, manifest: Manifest, staged: memoryview) -> None:
        """Copy a version to the device; blocks. Call it before the commit."""

        def fill(view: DeviceView) -> None:
            device.copy_from_host(view, staged[: view.nbytes])

        try:
            self._stage = self._stage or CudaStage(self._folder)
            self._stage.publish(manifest, fill)
        except (RelaxError, OSError) as error:
            self._ctx.event("weights_export_failed", version=manifest.version, why=str(error))
            self._ctx.log.warning("a version is not on the device", version=manifest.version, why=str(error))

    def retire(self, committed: int) -> None:
        """Show no version before the committed one any more."""
        if self._stage is not None:
            self._stage.retire(committed)

    def close(self) -> None:
        """Give the memory back."""
        if self._stage is not None:
            self._stage.close()


LOOK_S = 0.5
HUNG_S = 60.0
"""Longer than its own limit a copy takes only where a call of the file system does not come back."""
CLOSE_S = 5.0
"""For a copy that was given up to notice it. A thread in a call that does not come back is left behind."""
PERMANENT_ERRNOS = frozenset(
    (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
)
"""Errors that the next trainer would get as well; a disk that is full or does not answer may be mended meanwhile."""


class WeightFiles:
    """Copies versions from the stage into the run's folder.

    Args:
        only_way: engines get the versions from the folder alone. Otherwise a folder that cannot be opened or written
            costs the copy, and is tried again with the next version.

    Raises:
        StaleEpoch: a newer trainer writes there.
        OutOfSpace, Refused: it cannot be opened, and is the only way. BadInput: nor will it ever be.
    """

    def __init__(self, ctx: RoleContext, folder: Path, *, only_way: bool, timeout_s: float) -> None:
        self._ctx, self._folder, self._only_way, self._timeout_s = ctx, folder, only_way, timeout_s
        self._closing = False
        self._next: VersionRecord | None = None
        self._newest = 0
        self._reported = 0
        self._writer: asyncio.Task[None] | None = None
        self._directory: WeightDirectory | None = None
        try:
            self._open_directory()
        except (OutOfSpace, Refused) as error:
            if only_way:
                raise _permanent_or_not(error) from error
            self._report_failure(0, error)

    @classmethod
    def of(cls, ctx: RoleContext) -> WeightFiles | None:
        """Make the writer that the config asks for; None: no files. Blocks."""
        table = ctx.config.table(PublicationTable)
        folder = files_folder(ctx, table.directory)
        if folder is None or table.carrier not in ("auto", "directory"):
            return None
        return cls(ctx, folder, only_way=table.carrier == "directory", timeout_s=table.directory_timeout_s)

    async def write_before_commit(self, record: VersionRecord) -> None:
        """Write a version before its commit, if the files are the engines' only way.

        Raises:
            OutOfSpace, DeadlineExceeded, Refused: engines would not get the version. BadInput: nor any other.
        """
        if self._only_way:
            try:
                await asyncio.to_thread(self._write, record)
            except Refused as error:
                raise _permanent_or_not(error) from error

    async def write_after_commit(self, record: VersionRecord) -> None:
        """Handle a committed version: write it in the background, unless that was done before the commit. While a
        copy is under way only the newest version waits for it."""
        if self._only_way:
            await asyncio.to_thread(self._retire, record)
            return
        self._next, self._newest = record, record.version
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_newest())

    async def wait(self) -> None:
        """Wait until the newest version is in the folder or was given up; each copy has a limit. A role that is
        asked to stop does not wait."""
        # The copy under way, and the newest after it.
        limit_s = 2 * self._timeout_s + HUNG_S
        until = time.monotonic() + limit_s
        try:
            while self._writer is not None and not self._writer.done() and not self._ctx.stopping.is_set():
                if time.monotonic() > until:
                    what = f"the newest weights in {self._folder}"
                    self._report_failure(
                        self._newest, DeadlineExceeded(what, why=f"the file system has not answered for {limit_s:g} s")
                    )
                    return
                self._ctx.progress.waiting(f"the newest weights are put into {self._folder}")
                await asyncio.wait([self._writer], timeout=LOOK_S)
        finally:
            self._ctx.progress.waiting("")

    async def close(self) -> None:
        """Give up what is being written."""
        self._closing = True
        if self._writer is not None:
            await asyncio.wait([self._writer], timeout=CLOSE_S)

    async def _write_newest(self) -> None:
        while self._next is not None and not self._closing:
            record, self._next = self._next, None
            try:
                await in_own_thread(partial(self._put, record))
            except Gone:
                continue  # the stage keeps the newest committed one: there is a newer
            except Exception as error:  # noqa: BLE001 a copy costs no more than itself, and is reported
                self._report_failure(record.version, error)

    def _open_directory(self) -> WeightDirectory:
        if self._directory is None:
            self._directory = WeightDirectory(
                self._folder,
                self._ctx.who.epoch,
                companions=model_folder(self._ctx),
                # A trainer that has failed does not wait for a slow disk.
                clock=lambda: math.inf if self._closing else time.monotonic(),
            )
        return self._directory

    def _write(self, record: VersionRecord) -> None:
        directory, source = self._open_directory(), StageSource(stage_folder(self._ctx), record)
        with source.mapped() as view:
            directory.write(record, source.manifest, view, self._timeout_s)

    def _put(self, record: VersionRecord) -> None:
        self._write(record)
        self._retire(record)

    def _retire(self, record: VersionRecord) -> None:
        self._open_directory().retire(record.version)

    def _report_failure(self, version: int, error: Exception) -> None:
        if version and version == self._reported:
            return
        self._reported = version
        why = str(error) if isinstance(error, RelaxError | OSError) else f"{type(error).__name__}: {error}"
        self._ctx.event("weights_save_failed", version=version, why=why)
        self._ctx.log.warning("a version was not put into the folder", version=version, why=why)


async def in_own_thread(work: Callable[[], None]) -> None:
    """As asyncio.to_thread, in a daemon thread: nobody waits for it when the process ends, wherever it hangs."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def end(error: Exception | None) -> None:
        if not done.done():
            done.set_exception(error) if error is not None else done.set_result(None)

    def run() -> None:
        failure: Exception | None = None
        try:
            work()
        except Exception as error:  # noqa: BLE001 it is raised where it is awaited
            failure = error
        with suppress(RuntimeError):  # the loop is closed: nobody awaits it any more
            loop.call_soon_threadsafe(end, failure)

    threading.Thread(target=run, name="weight-files", daemon=True).start()
    await done


def _permanent_or_not(error: OutOfSpace | Refused) -> OutOfSpace | Refused | BadInput:
    """Return the error, or BadInput if no restart of the trainer can help."""
    cause = error.__cause__
    if not isinstance(cause, OSError) or cause.errno not in PERMANENT_ERRNOS:
        return error
    hint = error.hint or 'name a folder in publication.directory that this user may write in, or use carrier = "auto"'
    return BadInput(error.what, why=error.why, hint=hint)
