"""The trainer's versions in memory of its device, shown to engines that share it: beside the stage, never instead."""

from __future__ import annotations

from pathlib import Path

from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.locations import stage_folder
from relax_rt.roles.training.publication.settings import PublicationTable
from relax_rt.transport.rpc.errors import RelaxError
from relax_rt.transport.weights import device
from relax_rt.transport.weights.cuda_ipc import CudaStage
from relax_rt.transport.weights.device import DeviceView
from relax_rt.transport.weights.manifest import Manifest


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
