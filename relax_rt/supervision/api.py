"""Interface of the node agent: how a run does, and how people end it or restart a slot."""

from __future__ import annotations

from typing import Protocol

import msgspec

from relax_rt.supervision.diagnosis import Diagnosis
from relax_rt.transport.rpc import idempotent


class SlotStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How one slot does.

    Attributes:
        slot, kind, tier: which one, and its place in the start order.
        state: pending, requested, starting, ready, hung, stopping, killing, backoff or ended.
        pid: of the living process, else 0.
        epoch: of the newest incarnation.
        restarts: since the run began.
        uptime_s: age of the living process, else 0.
        state_s: time in this state.
        progress: the role's counter; detail: what it does; waiting: why it is idle, or empty.
        address: where it serves, or empty.
        log: its log file.
        last: why its previous incarnation ended.
    """

    slot: str
    kind: str
    tier: int
    state: str
    pid: int = 0
    epoch: int = 0
    restarts: int = 0
    uptime_s: float = 0.0
    state_s: float = 0.0
    progress: int = 0
    detail: str = ""
    waiting: str = ""
    address: str = ""
    log: str = ""
    last: Diagnosis | None = None


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How the run does.

    Attributes:
        status: starting, running or draining; finished, stopped, killed, failed or "agent died" once it has ended.
        reason: why it is ending or has ended.
        exit_code: once it has ended.
        diagnosis: the failure that ended it; first: the earliest one of that series, if another.
    """

    run_id: str
    name: str
    run_dir: str
    status: str
    reason: str = ""
    agent_pid: int = 0
    uptime_s: float = 0.0
    exit_code: int | None = None
    slots: list[SlotStatus] = []
    diagnosis: Diagnosis | None = None
    first: Diagnosis | None = None

    @property
    def ended(self) -> bool:
        """True when nothing of the run is left."""
        return self.exit_code is not None


class AgentApi(Protocol):
    """The node agent, on agent.sock."""

    @idempotent
    async def status(self) -> RunStatus:
        """Every slot and how the run does."""

    @idempotent
    async def stop(self, reason: str) -> None:
        """Drain the run: every role finishes its work in hand, top tier first. Returns at once."""

    @idempotent
    async def kill(self, reason: str) -> None:
        """End every role now. Returns at once."""

    async def restart(self, slot: str) -> None:
        """Stop and start one slot; not counted as a failure. Refused for an unknown slot or an ending run."""
