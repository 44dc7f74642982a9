"""Where slots are, for the processes of one node: asked of the node's own agent, which is there as long as they are."""

from __future__ import annotations

from typing import Protocol

from relax_rt.transport.rpc.interface import idempotent


class WhereApi(Protocol):
    """The agent of a node, on agent.sock."""

    @idempotent
    async def where(self, slot: str) -> str:
        """The address at which a process of this node reaches the slot; empty while it is nowhere."""
