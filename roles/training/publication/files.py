"""Writes the trainer's versions as files: before the commit if engines have no other way, else in the background."""

from __future__ import annotations

import asyncio
import errno
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from relax_rt.config.problems import BadInput
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.locations import files_folder, model_folder, stage_folder
from relax_rt.roles.training.publication.settings import PublicationTable
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import DeadlineExceeded, Gone, OutOfSpace, Refused, RelaxError
from relax_rt.transport.weights.directory import WeightDirectory
from relax_rt.transport.weights.source import StageSource

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
