"""Where an engine gets a committed version from: its node and [publication] decide (stage, stream, broadcast,
files)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from relax_rt.cluster.nodes.api import HEAD
from relax_rt.cluster.nodes.links import Links
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.locations import files_folder, offers_folder, stage_folder
from relax_rt.roles.rollout.engines.communicator import communicator_of
from relax_rt.roles.rollout.engines.settings import RolloutSettings
from relax_rt.roles.training.publication.settings import PublicationTable
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt, DeadlineExceeded, Gone, OutOfSpace, Refused, RelaxError, Unreachable
from relax_rt.transport.weights.broadcast.receivers import BroadcastReceiver
from relax_rt.transport.weights.directory import DirectorySource
from relax_rt.transport.weights.manifest import Manifest, StageApi, check_manifest
from relax_rt.transport.weights.source import WeightSource, stage_source
from relax_rt.transport.weights.stage import read_manifest

if TYPE_CHECKING:
    pass


QUEUE_SLOT = "queue/0"
ASK_TIMEOUT_S = 5.0

MakeSource = Callable[[VersionRecord, VersionRecord | None], WeightSource]
"""Makes a source of a version, off the event loop; with the version that the engine samples from, it may be a delta
to that one."""

_FALLBACK_ERRORS = (Gone, Corrupt, Unreachable, DeadlineExceeded, OutOfSpace)
"""What another carrier may do better."""


def source_for(ctx: RoleContext) -> MakeSource:
    """The carriers of this node. Call it on the role's event loop."""
    table = ctx.config.table(PublicationTable)
    folder = files_folder(ctx, table.directory)
    if table.carrier == "directory" and folder is not None:
        return lambda record, _: DirectorySource(folder, record)
    links = Links.from_environment()
    # The trainer's stage is the head's.
    here = table.carrier == "shared_memory" or links is None or links.node == HEAD
    first = _from_stage(stage_folder(ctx)) if here or links is None else _from_stream(ctx, links)
    if here and table.carrier == "collective" and isinstance(ctx.settings, RolloutSettings):
        return _from_broadcast(ctx, first)
    if here and table.carrier == "cuda_ipc" and isinstance(ctx.settings, RolloutSettings):
        return _from_device(ctx, first)
    return first if folder is None or table.carrier != "auto" else _with_files(ctx, first, folder)


def _from_stage(stage: Path) -> MakeSource:
    return lambda record, holds: stage_source(stage, record, holds)


def _from_broadcast(ctx: RoleContext, first: MakeSource) -> MakeSource:
    """A version as it was broadcast, or by `first`; memory to receive into is offered once the size is known."""
    from relax_rt.transport.weights.broadcast.source import BroadcastSource

    receiver, stage, offers = receiver_of(ctx), stage_folder(ctx), True

    def told(record: VersionRecord, error: RelaxError) -> None:
        ctx.event("broadcast_fallback", version=record.version, why=str(error))
        ctx.log.warning("a version that was broadcast is taken from the stage", version=record.version, why=str(error))

    def broadcast(record: VersionRecord) -> BroadcastSource:
        manifest = read_manifest(stage, record.version)
        check_manifest(manifest, record, f"policy version {record.version} on the stage")
        return BroadcastSource(record, manifest, receiver)

    def source(record: VersionRecord, holds: VersionRecord | None) -> WeightSource:
        nonlocal offers
        if receiver.wait(record):
            return FallbackSource(lambda: broadcast(record), lambda: first(record, None), told)
        found = first(record, holds)
        if offers:
            try:
                receiver.register(found.manifest.sent_bytes)
            except (RelaxError, OSError) as error:
                offers = False
                ctx.event("broadcast_disabled", communicator="", why=str(error))
                ctx.log.warning("this engine receives no broadcasts", why=str(error))
        return found

    return source


def _from_device(ctx: RoleContext, first: MakeSource) -> MakeSource:
    """A version as the trainer shows it on the device, or by `first`."""
    from relax_rt.transport.weights.cuda_ipc import CudaIpcSource

    stage = stage_folder(ctx)

    def told(record: VersionRecord, error: RelaxError) -> None:
        ctx.event("device_fallback", version=record.version, why=str(error))
        ctx.log.warning("a version is not taken from the device", version=record.version, why=str(error))

    def shown(record: VersionRecord) -> CudaIpcSource:
        return CudaIpcSource(stage, record, read_manifest(stage, record.version))

    # Refused: it lies on another device, or there is no library for it here.
    return lambda record, _: FallbackSource(lambda: shown(record), lambda: first(record, None), told, also=(Refused,))


def _from_stream(ctx: RoleContext, links: Links) -> MakeSource:
    from relax_rt.transport.weights.stream import StageMirror

    timeout_s, loop = ctx.config.table(PublicationTable).ack_timeout_s, asyncio.get_running_loop()

    async def ask() -> str:
        return await (await ctx.peer(QUEUE_SLOT, StageApi, timeout_s=ASK_TIMEOUT_S)).where()

    def locate() -> str:
        future = asyncio.run_coroutine_threadsafe(ask(), loop)
        try:
            return future.result(2 * ASK_TIMEOUT_S)
        except TimeoutError:
            future.cancel()
            raise Unreachable(QUEUE_SLOT, why="it does not say where the weights are") from None

    def waits(why: str) -> None:
        ctx.progress.waiting(why)
        if why:
            ctx.log.info("waiting for weights of another node", why=why)

    mirror = StageMirror(stage_folder(ctx), locate, links.keys, on_wait=waits)

    def source(record: VersionRecord, holds: VersionRecord | None) -> WeightSource:
        before = mirror.bytes_in
        found = mirror.source(record, timeout_s)
        found.carrier, found.nbytes = "stream", mirror.bytes_in - before
        # None where another engine of the node has fetched it.
        if nbytes := found.nbytes:
            found.payload = mirror.payload
            why = {"why_full": mirror.why_full} if mirror.why_full else {}
            ctx.event(
                "weights_streamed",
                version=record.version,
                node=links.node,
                bytes=nbytes,
                payload=mirror.payload,
                **why,
            )
        return found

    return source


def _with_files(ctx: RoleContext, first: MakeSource, folder: Path) -> MakeSource:
    def told(record: VersionRecord, error: RelaxError) -> None:
        ctx.event("weights_from_files", version=record.version, why=str(error))
        ctx.log.warning("weights come from the folder instead", version=record.version, why=str(error))

    def source(record: VersionRecord, holds: VersionRecord | None) -> WeightSource:
        return FallbackSource(lambda: first(record, holds), lambda: DirectorySource(folder, record), told)

    return source


class FallbackSource:
    """A version by one carrier, and by another where that fails; a WeightSource.

    Args:
        first, second: make the sources. Whatever the second one lacks, it is the first one's error that is raised.
        told: hears why the second one is used.
        also: errors that the second one may do better at, besides those that pass.
    """

    def __init__(
        self,
        first: Callable[[], WeightSource],
        second: Callable[[], WeightSource],
        told: Callable[[VersionRecord, RelaxError], None],
        also: tuple[type[RelaxError], ...] = (),
    ) -> None:
        self._second, self._told = second, told
        self._fell: tuple[type[RelaxError], ...] = (*_FALLBACK_ERRORS, *also)
        self._fallen = False
        try:
            self._use(first())
        except self._fell as error:
            self._fall(error)

    def _use(self, source: WeightSource) -> None:
        self._source = source
        self.record: VersionRecord = source.record
        self.manifest: Manifest = source.manifest
        self.carrier = source.carrier
        self.payload, self.nbytes = source.payload, source.nbytes

    def copy_into(self, into: memoryview) -> None:
        """Copy the version, by the first source or, where that fails, by the second."""
        try:
            self._source.copy_into(into)
        except self._fell as error:
            # A delta rests on what lies in `into`, which is spoilt by now.
            if self._fallen or self.manifest.payload != "full":
                raise
            self._fall(error)
            self._source.copy_into(into)

    @contextmanager
    def mapped(self) -> Iterator[memoryview]:
        """Map the version of the source in use."""
        with self._source.mapped() as view:
            yield view

    def _fall(self, error: RelaxError) -> None:
        try:
            second = self._second()
        except RelaxError as other:
            error.add_note(f"and the other way: {other}")
            raise error from None
        self._fallen = True
        self._told(second.record, error)
        self._use(second)


def receiver_of(ctx: RoleContext) -> BroadcastReceiver:
    """What an engine receives broadcasts with; its memory is made with the first receiver."""
    from relax_rt.transport.weights.broadcast.source import DeviceReceiveBuffer, HostReceiveBuffer

    nccl = communicator_of(ctx.config) == "nccl"
    return BroadcastReceiver(
        offers_folder(ctx),
        ctx.who.slot,
        ctx.who.epoch,
        DeviceReceiveBuffer if nccl else HostReceiveBuffer,
        _own_device() if nccl else "",
    )


def _own_device() -> str:
    """The first device that this process sees."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
