"""A staged version to other ranks' memory by a collective, and what a receiver has of it as a WeightSource."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from relax_rt.transport.versions import VersionRecord
from relax_rt.transport.weights.collective import memory as host
from relax_rt.transport.weights.collective.communicator import HostMemory, Memory
from relax_rt.transport.weights.collective.events import Outcome
from relax_rt.transport.weights.collective.group import Collective
from relax_rt.transport.weights.manifest import Manifest
from relax_rt.transport.weights.stage import copy_verified, pinned, verify


async def spread(
    group: Collective, root: str, folder: Path, manifest: Manifest, receivers: Mapping[str, Memory], timeout_s: float
) -> Outcome:
    """Bring a version from this node's stage into the receivers' memory; the stage is pinned meanwhile.

    Returns:
        Who has it, verified against the manifest's digest, and who is lost.

    Raises:
        Gone: the stage has it no more. CollectiveFailed, Refused: see Collective.broadcast.
    """
    with ExitStack() as pin:
        await asyncio.to_thread(pin.enter_context, pinned(folder, manifest))
        source = HostMemory(str(folder / manifest.file), manifest.layout.nbytes)
        return await group.broadcast({root: source, **receivers}, manifest.digest, timeout_s)


class ReceivedSource:
    """A version as a rank of this node has received it. See WeightSource.

    The memory is this version's until the next `spread` into it begins: its owner lets engines fetch in between.
    """

    def __init__(self, record: VersionRecord, manifest: Manifest, memory: HostMemory) -> None:
        self.record, self.manifest, self._memory = record, manifest, memory

    def copy_into(self, into: memoryview) -> None:
        """See WeightSource."""
        with host.opened(self._memory, writable=False) as view:
            copy_verified(self.manifest, view.data, into)

    @contextmanager
    def mapped(self) -> Iterator[memoryview]:
        """See WeightSource."""
        with host.opened(self._memory, writable=False) as view:
            verify(self.manifest, view.data)
            yield view.data.toreadonly()
