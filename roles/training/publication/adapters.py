"""Versions made of adapters: the trainer merges them as every receiver does, so that both have the same bits."""

from __future__ import annotations

from dataclasses import dataclass

from relax_rt.roles.training.backend.interface import AdapterBackend, TrainerBackend
from relax_rt.roles.training.publication.settings import PublicationTable
from relax_rt.transport.base.versions import ROOT
from relax_rt.transport.rpc.errors import Corrupt, Gone, Refused
from relax_rt.transport.weights.manifest import MAX_DELTA, Layout, Manifest
from relax_rt.transport.weights.payloads import Lora, encode_lora
from relax_rt.transport.weights.source import add_adapters
from relax_rt.transport.weights.stage import WeightStage, read_manifest


@dataclass(frozen=True)
class VersionAdapters:
    """The adapters of one version: encoded, and the base that they are added to."""

    blob: bytes
    base: Manifest

    @property
    def beside(self) -> bytes:
        """What is put beside the version; nothing where that would save little."""
        return self.blob if len(self.blob) <= MAX_DELTA * self.base.layout.nbytes else b""


class AdapterVersions:
    """Makes the trainer's versions of the model's own weights, which lie on the stage, and of its adapters.

    Only taking the adapters needs the weights to stay as they are; that is a copy of a few megabytes. All else may be
    done while the optimizer continues. Calls block.

    Raises:
        Refused: the backend has no adapters.
    """

    def __init__(self, backend: TrainerBackend, stage: WeightStage, dtype: str) -> None:
        if not isinstance(backend, AdapterBackend):
            raise Refused("publication.adapters", why=f"{type(backend).__name__} has no adapters", hint="leave it out")
        self._backend, self._stage, self._dtype = backend, stage, dtype
        self._base: Manifest | None = None

    @classmethod
    def of(
        cls, table: PublicationTable, backend: TrainerBackend, stage: WeightStage, dtype: str
    ) -> AdapterVersions | None:
        """As the config says; None: versions are exported whole."""
        return cls(backend, stage, dtype) if table.adapters else None

    def base(self, layout: Layout, committed: int = ROOT) -> Manifest:
        """The model's own weights on the stage; put there by the first call, and again where they are gone.

        An incarnation trusts no other one's: the model's folder may be another by now. What lies there is held against
        the model, and stays if it is the same.

        Args:
            committed: the version whose buffer nothing may be written to.

        Raises:
            OutOfSpace: there is no room for them.
        """
        try:
            if self._base is not None and read_manifest(self._stage.folder, self._base.version) == self._base:
                return self._base
        except (Gone, Corrupt):
            pass
        same = None if self._base is not None else self._stage.same_base(layout, self._export, committed)
        self._base = same or self._stage.seal_base(layout, self._export)
        return self._base

    def _export(self, into: memoryview) -> None:
        self._backend.export_base(into, self._dtype)

    def take(self, base: Manifest) -> VersionAdapters:
        """Copy the adapters as they are."""
        lora: Lora = self._backend.adapters()
        return VersionAdapters(encode_lora(lora._replace(base=base.version, base_digest=base.digest)), base)

    def make(self, adapters: VersionAdapters, into: memoryview) -> None:
        """Fill `into` with the version.

        Raises:
            Gone, Corrupt: the base was harmed meanwhile.
        """
        add_adapters(memoryview(adapters.blob), self._stage.folder, adapters.base, into)
