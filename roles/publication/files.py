"""The trainer's versions as files: before they are committed where engines have no other way, else behind."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path

from relax_rt.role import RoleContext
from relax_rt.roles.locations import model_folder
from relax_rt.roles.publication.carriers import files_folder
from relax_rt.roles.publication.place import stage_folder
from relax_rt.roles.sections import RLConfig
from relax_rt.transport.errors import RelaxError
from relax_rt.transport.versions import VersionRecord
from relax_rt.transport.weights.directory import WeightDirectory
from relax_rt.transport.weights.source import StageSource


class WeightFiles:
    """Copies versions from the stage into the run's folder.

    Raises:
        StaleEpoch: a newer trainer writes there.
    """

    def __init__(self, ctx: RoleContext, folder: Path, *, only_way: bool, timeout_s: float) -> None:
        self._ctx, self._only_way, self._timeout_s = ctx, only_way, timeout_s
        self._closing = False
        self._behind: asyncio.Task[None] | None = None
        self._directory = WeightDirectory(
            folder,
            ctx.who.epoch,
            companions=model_folder(ctx),
            # A trainer that ends does not wait for a slow disk.
            clock=lambda: math.inf if self._closing else time.monotonic(),
        )

    @classmethod
    def of(cls, ctx: RoleContext) -> WeightFiles | None:
        """As the config says; None: no files. Blocks."""
        assert isinstance(ctx.config, RLConfig)
        table, folder = ctx.config.publication, files_folder(ctx)
        if folder is None or table.carrier not in ("auto", "directory"):
            return None
        return cls(ctx, folder, only_way=table.carrier == "directory", timeout_s=table.directory_timeout_s)

    async def before(self, record: VersionRecord) -> None:
        """To be called before the commit.

        Raises:
            OutOfSpace, DeadlineExceeded, Refused: engines would not get the version.
        """
        if self._only_way:
            await asyncio.to_thread(self._write, record)

    async def after(self, record: VersionRecord) -> None:
        """To be called when it is committed. Where engines have another way the copy is made behind the training, of
        the newest version when the one before is done."""
        if self._only_way:
            await asyncio.to_thread(self._directory.retire, record.version)
        elif self._behind is None or self._behind.done():
            self._behind = asyncio.create_task(self._follow(record))

    async def close(self) -> None:
        """Give up what is being written."""
        self._closing = True
        if self._behind is not None:
            await asyncio.gather(self._behind, return_exceptions=True)

    async def _follow(self, record: VersionRecord) -> None:
        try:
            await asyncio.to_thread(self._write, record)
            await asyncio.to_thread(self._directory.retire, record.version)
        except RelaxError as error:
            self._ctx.event("weights_not_filed", version=record.version, why=str(error))
            self._ctx.log.warning("a version was not put into the folder", version=record.version, why=str(error))

    def _write(self, record: VersionRecord) -> None:
        source = StageSource(stage_folder(self._ctx), record)
        with source.mapped() as view:
            self._directory.write(record, source.manifest, view, self._timeout_s)
