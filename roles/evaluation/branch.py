"""Which versions led to the weights at hand: a trainer that goes back to a checkpoint leaves a branch behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from relax_rt.interfaces.role import RoleContext
from relax_rt.transport.base.versions import ROOT, VersionRecord
from relax_rt.transport.rpc.errors import DeadlineExceeded, Unreachable

RETRY_S = 0.5


class Lineage:
    """The versions that led to another, as far as they were told. Pure."""

    def __init__(self) -> None:
        self._parents = {ROOT: ROOT}

    def __contains__(self, version: int) -> bool:
        return version in self._parents

    def learn(self, records: Iterable[VersionRecord]) -> None:
        """These versions were committed."""
        self._parents.update((record.version, record.parent) for record in records)

    def path(self, version: int) -> set[int]:
        """The version, all that it was made from, and ROOT."""
        found = {ROOT}
        while version not in found and version in self._parents:
            found.add(version)
            version = self._parents[version]
        return found


class Branch:
    """Follows the committed versions for who sees only the newest: the one that began a branch may be missed."""

    def __init__(self, ctx: RoleContext) -> None:
        self._ctx, self._lineage = ctx, Lineage()

    async def to(self, record: VersionRecord) -> set[int]:
        """The versions that led to this one, itself among them, and ROOT.

        A registry that is away is waited for, visibly, until the role is asked to stop.
        """
        while record.parent not in self._lineage and not self._ctx.stopping.is_set():
            try:
                self._lineage.learn(await self._ctx.registry.versions())
                break
            except (Unreachable, DeadlineExceeded) as error:
                self._ctx.progress.waiting(f"the registry: {error}")
                await asyncio.sleep(RETRY_S)
        self._lineage.learn([record])
        return self._lineage.path(record.version)
