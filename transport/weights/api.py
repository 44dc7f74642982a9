"""Where the weights of a run are to be had."""

from __future__ import annotations

from typing import Protocol

from relax_rt.transport.rpc.interface import idempotent

STAGE_DIR = "weights"
"""The stage's folder in the shared memory of a node."""


class StageApi(Protocol):
    """Where the stage of a run is given out to other nodes; the queue's role offers it."""

    @idempotent
    async def where(self) -> str:
        """Its ``tcp://host:port``; another one after a restart. Empty in a run of one node."""
