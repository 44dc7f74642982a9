"""Where an engine gets a committed version from (stage, stream, broadcast, device, files), by its node and the
[publication] table."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from relax_rt.cluster.nodes.api import HEAD
from relax_rt.cluster.nodes.links import Links
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.locations import files_folder, offers_folder, stage_folder
from relax_rt.roles.rollout.engines.settings import RolloutSettings, communicator_of
from relax_rt.roles.training.publication.settings import PublicationTable
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt, DeadlineExceeded, Gone, OutOfSpace, Refused, RelaxError, Unreachable
from relax_rt.transport.weights.broadcast.receivers import BroadcastReceiver
from relax_rt.transport.weights.directory import DirectorySource
from relax_rt.transport.weights.manifest import Manifest, StageApi, check_manifest
from relax_rt.transport.weights.source import WeightSource, stage_source
from relax_rt.transport.weights.stage import read_manifest

QUEUE_SLOT = "queue/0"
ASK_TIMEOUT_S = 5.0

MakeSource = Callable[[VersionRecord, VersionRecord | None], WeightSource]
"""Makes a source of a version, off the event loop; given the version that the engine samples from, it may be a delta to
that one."""
OnFallback = Callable[[VersionRecord, RelaxError], None]

_FALLBACK_ERRORS = (Gone, Corrupt, Unreachable, DeadlineExceeded, OutOfSpace)
"""Errors that another carrier may not have."""


def source_for(ctx: RoleContext) -> MakeSource:
    """Return the carriers of this node. Call it on the role's event loop."""
    table = ctx.config.table(PublicationTable)
    folder = files_folder(ctx, table.directory)
    if table.carrier == "directory" and folder is not None:
        return lambda record, _: DirectorySource(folder, record)
    links, stage = Links.from_environment(), stage_folder(ctx)
    # The trainer's stage is on the head node.
    here = table.carrier == "shared_memory" or links is None or links.node == HEAD

    def from_stage(record: VersionRecord, base: VersionRecord | None) -> WeightSource:
        return stage_source(stage, record, base)

    first = from_stage if here or links is None else _from_stream(ctx, links)
    if here and table.carrier == "collective" and isinstance(ctx.settings, RolloutSettings):
        return _from_broadcast(ctx, first)
    if here and table.carrier == "cuda_ipc" and isinstance(ctx.settings, RolloutSettings):
        return _from_device(ctx, first)
    if folder is None or table.carrier != "auto":
        return first
    on_fallback = _reporter(ctx, "weights_from_files", "weights come from the folder instead")

    def with_files(record: VersionRecord, base: VersionRecord | None) -> WeightSource:
        return FallbackSource(lambda: first(record, base), lambda: DirectorySource(folder, record), on_fallback)

    return with_files


def _reporter(ctx: RoleContext, event: str, message: str) -> OnFallback:
    def report(record: VersionRecord, error: RelaxError) -> None:
        ctx.event(event, version=record.version, why=str(error))
        ctx.log.warning(message, version=record.version, why=str(error))

    return report


def _from_broadcast(ctx: RoleContext, first: MakeSource) -> MakeSource:
    """Receive broadcasts, or else use `first`. The receive buffer is registered once its size is known."""
    from relax_rt.transport.weights.broadcast.source import BroadcastSource, DeviceReceiveBuffer, HostReceiveBuffer

    nccl = communicator_of(ctx.config) == "nccl"
    receiver = BroadcastReceiver(
        offers_folder(ctx),
        ctx.who.slot,
        ctx.who.epoch,
        DeviceReceiveBuffer if nccl else HostReceiveBuffer,
        # The first device that this process sees.
        os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0" if nccl else "",
    )
    stage, registers = stage_folder(ctx), True
    on_fallback = _reporter(ctx, "broadcast_fallback", "a version that was broadcast is taken from the stage")

    def broadcast(record: VersionRecord) -> BroadcastSource:
        manifest = read_manifest(stage, record.version)
        check_manifest(manifest, record, f"policy version {record.version} on the stage")
        return BroadcastSource(record, manifest, receiver)

    def source(record: VersionRecord, base: VersionRecord | None) -> WeightSource:
        nonlocal registers
        if receiver.wait(record):
            return FallbackSource(lambda: broadcast(record), lambda: first(record, None), on_fallback)
        found = first(record, base)
        if registers:
            try:
                receiver.register(found.manifest.sent_bytes)
            except (RelaxError, OSError) as error:
                registers = False
                ctx.event("broadcast_disabled", communicator="", why=str(error))
                ctx.log.warning("this engine receives no broadcasts", why=str(error))
        return found

    return source


def _from_device(ctx: RoleContext, first: MakeSource) -> MakeSource:
    """Copy from the trainer's memory on the device, or else use `first`."""
    from relax_rt.transport.weights.cuda_ipc import CudaIpcSource

    stage = stage_folder(ctx)
    on_fallback = _reporter(ctx, "device_fallback", "a version is not taken from the device")

    def source(record: VersionRecord, base: VersionRecord | None) -> WeightSource:
        def from_device() -> WeightSource:
            return CudaIpcSource(stage, record, read_manifest(stage, record.version))

        # Refused: it lies on another device, or the library for it is missing here.
        return FallbackSource(from_device, lambda: first(record, None), on_fallback, also=(Refused,))

    return source


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

    def on_wait(why: str) -> None:
        ctx.progress.waiting(why)
        if why:
            ctx.log.info("waiting for weights of another node", why=why)

    mirror = StageMirror(stage_folder(ctx), locate, links.keys, on_wait=on_wait)

    def source(record: VersionRecord, base: VersionRecord | None) -> WeightSource:
        before = mirror.bytes_in
        found = mirror.source(record, timeout_s)
        found.carrier, found.nbytes = "stream", mirror.bytes_in - before
        # Zero if another engine of the node has fetched it.
        if found.nbytes:
            found.payload = mirror.payload
            facts = {"why_full": mirror.why_full} if mirror.why_full else {}
            ctx.event(
                "weights_streamed",
                version=record.version,
                node=links.node,
                bytes=found.nbytes,
                payload=mirror.payload,
                **facts,
            )
        return found

    return source


class FallbackSource:
    """A version by one carrier, and by another where that fails; a WeightSource.

    Args:
        first, second: make the sources. If the second one fails as well, the first one's error is raised.
        on_fallback: called with the reason when the second one is used.
        also: further errors of the first one after which the second one is tried.
    """

    def __init__(
        self,
        first: Callable[[], WeightSource],
        second: Callable[[], WeightSource],
        on_fallback: OnFallback,
        also: tuple[type[RelaxError], ...] = (),
    ) -> None:
        self._second, self._on_fallback = second, on_fallback
        self._errors: tuple[type[RelaxError], ...] = (*_FALLBACK_ERRORS, *also)
        self._fell_back = False
        try:
            self._use(first())
        except self._errors as error:
            self._fall_back(error)

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
        except self._errors as error:
            # A delta applies to what lies in `into`, which is overwritten by now.
            if self._fell_back or self.manifest.payload != "full":
                raise
            self._fall_back(error)
            self._source.copy_into(into)

    @contextmanager
    def mapped(self) -> Iterator[memoryview]:
        """Map the version of the source in use."""
        with self._source.mapped() as view:
            yield view

    def _fall_back(self, error: RelaxError) -> None:
        try:
            second = self._second()
        except RelaxError as other:
            error.add_note(f"and the other way: {other}")
            raise error from None
        self._fell_back = True
        self._on_fallback(second.record, error)
        self._use(second)
